"""Constant right operands of contractions, which are packed in panels when a module is compiled.

    W: const [K, N]    ->    panels [N / 16, K, 16]    zeros behind the last column

A kernel then takes the panels in place of the constant: each is read from end to end, whatever the
register tile. The function says which of its parameters are constants, the kernel how it wants
those it takes as panels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, prod

import numpy as np
from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...program.expr import dtype_of, keeps_value, number
from ..stages.stages import Axis, Graph, Stage

# Attribute of a PrimFunc to write: its parameters that are constants of the module, by position.
CONSTANTS_ATTR = "tvm_fusion.constants"

# Points of Winograd's transform F(2, 3).
WINOGRAD_POINTS = 4

# Attribute of a kernel: lists of numbers, one for each parameter that it takes as panels.
PANELS_ATTR = "tvm_fusion.panels"


@dataclass(frozen=True, slots=True)
class Panels:
    """How a constant becomes panels: which of its dimensions are batch, terms and columns, each in
    order, the columns of a panel, whether two terms of bfloat16 are paired in one number (see
    `pairs`), and which dimensions of three taps are widened to four points of Winograd's transform.
    Dimensions of length 1 may be left out.
    """

    batch: tuple[int, ...]
    terms: tuple[int, ...]
    columns: tuple[int, ...]
    lanes: int
    paired: bool = False
    widened: tuple[int, ...] = ()

    def dtype(self, dtype: str) -> str:
        """The type of the panels of a constant of a type."""
        return "uint32" if self.paired else "float32" if self.widened else dtype

    def shape(self, shape: Iterable[int]) -> tuple[int, ...]:
        """The shape of the panels of a constant of a shape."""
        shape = tuple(WINOGRAD_POINTS if d in self.widened else n for d, n in enumerate(shape))
        terms, columns = (prod(shape[d] for d in dims) for dims in (self.terms, self.columns))
        batch = (shape[d] for d in self.batch)
        terms = ceil(terms / 2) if self.paired else terms
        return (*batch, ceil(columns / self.lanes), terms, self.lanes)

    def of(self, constant: np.ndarray) -> np.ndarray:
        """The panels of a constant."""
        *batch, panels, terms, lanes = self.shape(constant.shape)
        if self.widened:
            constant = _widened(constant, self.widened)
        order = (*self.batch, *self.terms, *self.columns)
        rest = (d for d in range(constant.ndim) if d not in order)
        all_terms = prod(constant.shape[d] for d in self.terms)
        matrix = constant.transpose(*order, *rest).reshape(*batch, all_terms, -1)
        matrix = _paired(matrix) if self.paired else matrix
        missing = panels * lanes - matrix.shape[-1]
        if missing:
            matrix = np.pad(matrix, [*[(0, 0)] * (matrix.ndim - 1), (0, missing)])
        split = matrix.reshape(*batch, terms, panels, lanes)
        return np.ascontiguousarray(split.swapaxes(-2, -3))

    def numbers(self) -> list[int]:
        """As a list for an attribute; see `read`."""
        sides = (self.batch, self.terms, self.columns)
        dims = (d for side in sides for d in side)
        return [self.lanes, int(self.paired), *map(len, sides), *dims, *self.widened]

    @classmethod
    def read(cls, numbers: Iterable[int]) -> Panels:
        """The panels of a list."""
        lanes, paired, batch, terms, columns, *dims = (int(n) for n in numbers)
        ends = (0, batch, batch + terms, batch + terms + columns, len(dims))
        *sides, widened = (tuple(dims[a:b]) for a, b in pairwise(ends))
        return cls(*sides, lanes, bool(paired), widened)


def _paired(matrix: np.ndarray) -> np.ndarray:
    """Rows of bfloat16 two by two, the earlier in the lower half; a zero behind an odd number."""
    numbers = np.ascontiguousarray(matrix).view(np.uint16)
    if numbers.shape[-2] % 2:
        numbers = np.pad(numbers, [*[(0, 0)] * (numbers.ndim - 2), (0, 1), (0, 0)])
    numbers = numbers.astype(np.uint32)
    return numbers[..., 0::2, :] | numbers[..., 1::2, :] << 16


def _widened(weights: np.ndarray, dims: tuple[int, ...]) -> np.ndarray:
    """G w along some dimensions, for F(2, 3) of S. Winograd (Arithmetic Complexity of Computations,
    1980).
    """
    matrix = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
    found = weights.astype("float64")
    for d in dims:
        found = np.moveaxis(np.tensordot(matrix, found, (1, d)), 0, d)
    return found.astype("float32")


def mark_constants(func: tirx.PrimFunc, positions: Iterable[int]) -> tirx.PrimFunc:
    """The function with these of its parameters, by position, as constants of the module."""
    positions = list(positions)
    return func.with_attr(CONSTANTS_ATTR, positions) if positions else func


def without_constants(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with parameters only."""
    marked = func.attrs is not None and CONSTANTS_ATTR in func.attrs
    return func.without_attr(CONSTANTS_ATTR) if marked else func


def wanted_panels(kernel: tirx.PrimFunc) -> dict[int, Panels]:
    """The parameters that a kernel takes as panels, by position."""
    found = kernel.attrs.get(PANELS_ATTR, ()) if kernel.attrs is not None else ()
    return {int(position): Panels.read(numbers) for position, *numbers in found}


def constants_of(func: tirx.PrimFunc) -> tuple[Var, ...]:
    """The parameters of a function that are constants."""
    marked = func.attrs.get(CONSTANTS_ATTR, ()) if func.attrs is not None else ()
    return tuple(func.params[int(i)] for i in marked)


def read_once(constants: Iterable[Var], graph: Graph) -> frozenset[Var]:
    """Those of some parameters that are read in one place of a graph."""
    reads = [load.source for s in graph.stages for load in s.reads()]
    return frozenset(c for c in constants if sum(c.same_as(r) for r in reads) == 1)


def panels_of(
    stage: Stage,
    operand: Expr,
    sides: tuple[tuple[Axis, ...], tuple[Axis, ...], tuple[Axis, ...]],
    lanes: int,
    paired: bool = False,
) -> tuple[Var, Panels] | None:
    """The constant that an operand reads, and how it is packed; None where it is none.

    Parameters
    ----------
    stage : Stage
    operand : Expr
        Read element by element, maybe converted.
    sides : tuple
        The axes of batch, terms and columns.
    lanes : int
    paired : bool
        Whether terms are paired.
    """
    load = plain_load(stage, operand)
    if load is None or load.source not in stage.constants:
        return None
    dimension: dict[Var, int] = {}
    for d, (index, extent) in enumerate(zip(load.indices, load.source.ty.shape, strict=True)):
        if number(extent) == 1:
            continue
        if not isinstance(index, Var) or index in dimension:
            return None
        dimension[index] = d
    axes = [[a.var for a in side if a.size != 1] for side in sides]
    used = [v for side in axes for v in side]
    if len(used) != len(dimension) or any(v not in dimension for v in used):
        return None
    dimensions = (tuple(dimension[v] for v in side) for side in axes)
    return load.source, Panels(*dimensions, lanes, paired)


def plain_load(stage: Stage, operand: Expr) -> TensorLoad | None:
    """What an operand loads, if it is a load or a conversion of one.

    Of several conversions all but the last keep the number: one conversion does as well.
    """
    bound: Mapping[Var, Expr] = dict(stage.binds)
    last = True
    while operand in bound or isinstance(operand, tirx.Cast):
        if operand in bound:
            operand = bound[operand]
        elif last or keeps_value(dtype_of(operand.value), dtype_of(operand)):
            operand, last = operand.value, False
        else:
            return None
    return operand if isinstance(operand, TensorLoad) else None
