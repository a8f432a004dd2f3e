"""The rows x columns space that all reductions and outputs of a PrimFunc share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm.ir import Expr, Var

from ...errors import Unsupported
from .definitions import Definition
from .expr import constant, dtype_of, flatten, unflatten
from .program import Extent


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

    def narrowed(self, columns: int) -> Space:
        """The same coordinates over fewer columns."""
        coordinates = (*self.row_vars, self.column_var)
        analyzer = _analyzer(coordinates, (*self.rows, columns))
        return dataclasses.replace(self, columns=columns, analyzer=analyzer)

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

    def has_axes(self, shape: Sequence[Extent]) -> bool:
        """Whether `shape` is rows and columns, but for axes of extent 1."""
        mine = [extent for extent in (*self.rows, self.columns) if extent != 1]
        theirs = [extent for extent in shape if extent != 1]
        return len(mine) == len(theirs) and all(map(self.equal, mine, theirs))

    def indices(self, shape: Sequence[Extent], full: bool) -> tuple[Expr, ...]:
        """Where a buffer of `shape` holds the element of this point (or of this row)."""
        space = self if full else dataclasses.replace(self, columns=1)
        if not space.has_axes(shape):
            return unflatten(self.element_index if full else self.row_index, shape, self.analyzer)
        axes = zip((*space.rows, space.columns), (*space.row_vars, space.column_var), strict=True)
        names = iter([var for extent, var in axes if extent != 1])
        zero = constant(0, self.index_dtype)
        return tuple(zero if extent == 1 else next(names) for extent in shape)


def pointwise_space(definitions: Sequence[Definition], output: Definition) -> Space:
    """The axes of an output; its last one is the column axis."""
    shape = [extent for extent in output.shape if extent != 1]
    return _make(shape[:-1], shape[-1] if shape else 1, _index_dtype(definitions))


def row_space(definitions: Sequence[Definition], reductions: Sequence[Definition]) -> Space:
    """Rows from the reductions, columns from what they reduce; all must agree."""
    dtype = _index_dtype(definitions)
    columns = [math.prod(extent for _, extent in d.reduced) for d in reductions]
    rows = [extent for extent in reductions[0].shape if extent != 1]
    space = _make(rows, columns[0], dtype)
    for definition, extent in zip(reductions, columns, strict=True):
        if not space.equal(extent, columns[0]):
            raise Unsupported(f"reductions over {columns[0]} and over {extent} elements")
        if not space.is_row(definition.shape):
            raise Unsupported(f"{definition.buffer.name} does not hold one element a row")
    return space


def make_space(rows: Sequence[Extent], columns: Extent, index_dtype: str) -> Space:
    """A space of given extents."""
    return _make(rows, columns, index_dtype)


def index_dtype_of(definitions: Sequence[Definition]) -> str:
    """The dtype of the coordinates that the definitions are read at."""
    return _index_dtype(definitions)


def _index_dtype(definitions: Sequence[Definition]) -> str:
    axes = [axis for d in definitions for axis in (*d.axes, *(var for var, _ in d.reduced))]
    narrow = all(dtype_of(axis) == "int32" for axis in axes if axis is not None)
    symbolic = any(not isinstance(extent, int) for d in definitions for extent in d.shape)
    return "int32" if narrow and not symbolic else "int64"


def _make(rows: Sequence[Extent], columns: Extent, dtype: str) -> Space:
    row_vars = tuple(Var(f"i{axis}", tvm.ir.PrimType(dtype)) for axis in range(len(rows)))
    column_var = Var("j", tvm.ir.PrimType(dtype))
    analyzer = _analyzer((*row_vars, column_var), (*rows, columns))
    return Space(tuple(rows), columns, row_vars, column_var, analyzer)


def _analyzer(coordinates: Sequence[Var], extents: Sequence[Extent]) -> tvm.sym.Analyzer:
    analyzer = tvm.sym.Analyzer()
    for var, extent in zip(coordinates, extents, strict=True):
        analyzer.bind(var, tvm.ir.Range(0, extent))
    return analyzer
