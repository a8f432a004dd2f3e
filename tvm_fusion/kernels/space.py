"""The rows x columns space that all reductions and outputs of a PrimFunc share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm.ir import Expr, Var

from ..errors import Unsupported
from .definitions import Definition
from .expr import constant, dtype_of, flatten, unflatten
from .program import Extent, Param


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """Row and column axes, and an analyzer that knows their ranges."""

    rows: tuple[Extent, ...]
    columns: Extent
    row_vars: tuple[Var, ...]
    column_var: Var
    analyzer: tvm.sym.Analyzer

    @property
    def index_dtype(self) -> str:
        """The dtype of the coordinates."""
        return dtype_of(self.column_var)

    @property
    def row_index(self) -> Expr:
        """Linear number of the row."""
        return flatten(self.row_vars, self.rows, self.index_dtype)

    @property
    def element_index(self) -> Expr:
        """Linear number of the element."""
        extents = (*self.rows, self.columns)
        return flatten((*self.row_vars, self.column_var), extents, self.index_dtype)

    def equal(self, a: Extent, b: Extent) -> bool:
        """Whether two sizes are equal for all values of the symbolic variables."""
        if isinstance(a, int) and isinstance(b, int):
            return a == b
        a, b = (constant(x, "int64") if isinstance(x, int) else x for x in (a, b))
        return self.analyzer.can_prove_equal(a, b)

    def is_element(self, shape: Sequence[Extent]) -> bool:
        """Whether a buffer of `shape` has one element for each point."""
        return self.equal(math.prod(shape), math.prod(self.rows) * self.columns)

    def is_row(self, shape: Sequence[Extent]) -> bool:
        """Whether a buffer of `shape` has one element for each row."""
        return self.equal(math.prod(shape), math.prod(self.rows))

    def indices(self, shape: Sequence[Extent], full: bool) -> tuple[Expr, ...]:
        """Where a buffer of `shape` holds the element of this point (or of this row)."""
        axes = list(zip(self.rows, self.row_vars, strict=True))
        axes += [(self.columns, self.column_var)] if full else []
        real = [extent for extent in shape if extent != 1]
        axes = [axis for axis in axes if axis[0] != 1]
        if len(real) == len(axes) and all(map(self.equal, real, (extent for extent, _ in axes))):
            names = iter(var for _, var in axes)
            zero = constant(0, self.index_dtype)
            return tuple(zero if extent == 1 else next(names) for extent in shape)
        return unflatten(self.element_index if full else self.row_index, shape, self.analyzer)


def choose_space(definitions: Sequence[Definition], params: Sequence[Param]) -> Space:
    """Rows from the reductions, columns from what they reduce; without any, an output's shape."""
    written = {definition.buffer: definition for definition in definitions}
    outputs = [written[p.var] for p in params if p.var in written]
    if not outputs:
        raise Unsupported("no parameter is written")
    dtype = _index_dtype(definitions)
    reductions = [d for d in definitions if d.kind is not None]
    if not reductions:
        shape = [extent for extent in outputs[0].shape if extent != 1]
        return _make(shape[:-1], shape[-1] if shape else 1, dtype)
    columns = [math.prod(extent for _, extent in d.reduced) for d in reductions]
    rows = [extent for extent in reductions[0].shape if extent != 1]
    space = _make(rows, columns[0], dtype)
    for definition, extent in zip(reductions, columns, strict=True):
        if not space.equal(extent, columns[0]):
            raise Unsupported(f"reductions over {columns[0]} and over {extent} elements")
        if not space.is_row(definition.shape):
            raise Unsupported(f"{definition.buffer.name} does not hold one element a row")
    return space


def _index_dtype(definitions: Sequence[Definition]) -> str:
    axes = [axis for d in definitions for axis in (*d.axes, *(var for var, _ in d.reduced))]
    narrow = all(dtype_of(axis) == "int32" for axis in axes if axis is not None)
    symbolic = any(not isinstance(extent, int) for d in definitions for extent in d.shape)
    return "int32" if narrow and not symbolic else "int64"


def _make(rows: Sequence[Extent], columns: Extent, dtype: str) -> Space:
    row_vars = tuple(Var(f"i{axis}", tvm.ir.PrimType(dtype)) for axis in range(len(rows)))
    column_var = Var("j", tvm.ir.PrimType(dtype))
    analyzer = tvm.sym.Analyzer()
    for var, extent in zip((*row_vars, column_var), (*rows, columns), strict=True):
        analyzer.bind(var, tvm.ir.Range(0, extent))
    return Space(tuple(rows), columns, row_vars, column_var, analyzer)
