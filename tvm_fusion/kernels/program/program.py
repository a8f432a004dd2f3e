"""Row programs: what a fused PrimFunc computes over rows x columns, and nothing about how.

Every expression of a program is a TIR expression over placeholders (the `var` of a tile, scalar,
element, reduction or value), the row and column variables of the space, and symbolic sizes. Half
precision is already widened: placeholders of float16 and bfloat16 data have dtype float32.

    out[i, j] = exp(x[i, j] - max_j x[i, j]) / sum_j exp(x[i, j] - max_j x[i, j])

    rows [M] x columns N, 2 reduction phases
      tile   x0 = x[i0 * N + j]
      reduce r0 = max_j x0                 phase 0
      value  v0 = exp(x0 - r0)             phase 1
      reduce r1 = sum_j v0                 phase 1
      out    y[i0 * N + j] = v0 / r1       phase 2
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import tvm
from tvm import tirx
from tvm.ir import Expr, Var

from ...ir.blocks import log_add
from ...ir.extents import Bounds
from .expr import unflatten, variables

Extent = int | Expr
"""A size: a Python int where it is known, else a TIR expression over symbolic variables."""


class ReduceKind(enum.StrEnum):
    """How a reduction combines two elements."""

    SUM = "sum"
    PROD = "prod"
    MAX = "max"
    MIN = "min"
    ARGMAX = "argmax"
    ARGMIN = "argmin"
    LOG_SUM = "log_sum"


COMBINE: dict[ReduceKind, Callable[[Expr, Expr], Expr]] = {
    ReduceKind.SUM: tirx.Add,
    ReduceKind.PROD: tirx.Mul,
    ReduceKind.MAX: tirx.Max,
    ReduceKind.MIN: tirx.Min,
    ReduceKind.LOG_SUM: log_add,
}
"""What combines two elements; ARGMAX and ARGMIN combine pairs. Only scans are LOG_SUM."""


class Level(enum.IntEnum):
    """How often an expression must be evaluated."""

    CONSTANT = 0
    ROW = 1
    ELEMENT = 2


@dataclass(frozen=True, slots=True, eq=False)
class Param:
    """Parameter of the PrimFunc: a buffer, or (``shape is None``) a number passed by value.

    `most` is how many elements it has at most, by the bounds of symbolic sizes; None if not known.
    """

    name: str
    shape: tuple[Extent, ...] | None
    dtype: str
    var: Var
    most: int | None = None

    @property
    def elements(self) -> Extent:
        """Number of elements (1 for a number passed by value)."""
        return math.prod(self.shape or ())


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Input read along the columns: element (row, j) lies at ``offset + j`` of the parameter.

    A tile may be loaded ahead, for every point of the space. `offset` may hold scalars (a row
    picked by an index tensor). `per_row` is False when all rows read the same vector (a bias, a
    gamma).
    """

    var: Var
    param: int
    offset: Expr
    dtype: str
    per_row: bool


@dataclass(frozen=True, slots=True, eq=False)
class Scalar:
    """Input element at ``offset``, the same for the whole row; may be loaded ahead."""

    var: Var
    param: int
    offset: Expr
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class Element:
    """Any other load (transposed, strided, gathered, conditional): the element at ``offset``.

    With a `guard` the load is legal only where the guard holds, and `var` stands under the
    if_then_else it came from: substitute the load for `var` in place, never bind it ahead.
    Without one it may be bound ahead, once for each point. `offset` may hold placeholders.
    """

    var: Var
    param: int
    offset: Expr
    dtype: str
    guard: Expr | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """``var = kind over all columns of body``, combined with `initial` unless that is None.

    `dtype` is the dtype of the accumulator and of `var`. `phase` counts the reductions that must be
    finished before. A reduction with `online` (the `var` of a maximum of the same phase, see
    `online.merge_online`) is a sum whose body is relative to that maximum: it may run along with
    it when the partial sums are rescaled by ``exp(old - new)``. ARGMAX and ARGMIN compare `body`
    and give the `index` of the extremum, the smallest of equal ones; `dtype` is that of the index.
    """

    var: Var
    kind: ReduceKind
    body: Expr
    dtype: str
    initial: Expr | None
    phase: int
    online: Var | None = None
    index: Expr | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Scan:
    """``var[j] = kind over all columns up to j of body``; `exclusive`: of those before j.

    `dtype` is that of the accumulator and of `var`. `body` may hold scans that stand before.
    """

    var: Var
    kind: ReduceKind
    body: Expr
    dtype: str
    exclusive: bool


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """Pointwise temporary ``var = body``; may be bound once for each point, or computed again."""

    var: Var
    body: Expr
    phase: int


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """``parameter[offset + j] = value`` if `full`, else ``parameter[offset] = value`` once a row.

    `value` has not yet been cast to `dtype`. It is known once `phase` phases of reductions are
    done. A full output whose columns are not consecutive in memory has a `place` instead: the
    element that holds column j, an expression over the row variables and the column variable. Of
    one with a `share` above 1, a row has the first of so many equal parts of the columns only.
    """

    param: int
    value: Expr
    offset: Expr
    dtype: str
    full: bool
    phase: int
    place: Expr | None = None
    share: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Accumulation:
    """``parameter[offset + j] = kind over the last row axis of body``, at every column j.

    `offset` is over the other row axes, `body` over the whole space and known after `phase` phases.
    """

    param: int
    kind: ReduceKind
    body: Expr
    offset: Expr
    dtype: str
    initial: Expr | None
    phase: int


Access = Tile | Scalar | Element | Output
Definition = Tile | Scalar | Element | Reduction | Scan | Value


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """What one fused PrimFunc computes; made by `analysis.analyze`.

    Attributes
    ----------
    name : global symbol of the PrimFunc, or None.
    params : parameters in the order of the PrimFunc.
    rows : extents of the row axes; empty for a single row. Axes that every access walks through
        together are one axis, so a program whose accesses are all contiguous is one long row.
    columns : extent of the column axis, the one that reductions run over and vectors lie along.
    row_vars, column_var : the coordinates, of dtype `index_dtype`.
    exact : whether every rounding of the unfused graph is kept (as casts in the expressions).
    siblings : more pointwise programs over the same parameters, for outputs that run over other
        axes; one launch computes them side by side.
    accumulations : outputs that reduce over the last row axis beside the reductions over columns.
    scans : along the columns, each behind those that its body holds.
    """

    name: str | None
    params: tuple[Param, ...]
    rows: tuple[Extent, ...]
    columns: Extent
    row_vars: tuple[Var, ...]
    column_var: Var
    tiles: tuple[Tile, ...]
    scalars: tuple[Scalar, ...]
    elements: tuple[Element, ...]
    reductions: tuple[Reduction, ...]
    values: tuple[Value, ...]
    outputs: tuple[Output, ...]
    exact: bool = False
    siblings: tuple[Program, ...] = ()
    accumulations: tuple[Accumulation, ...] = ()
    scans: tuple[Scan, ...] = ()
    _levels: dict[Var, Level] = field(default_factory=dict, init=False, repr=False)

    @property
    def row_count(self) -> Extent:
        """Number of rows."""
        return math.prod(self.rows)

    @property
    def phases(self) -> int:
        """Number of sweeps of reductions that depend on each other; 0 means pointwise."""
        return max((r.phase + 1 for r in self.reductions), default=0)

    @property
    def index_dtype(self) -> str:
        """The dtype of the coordinates and offsets."""
        return str(self.column_var.ty.dtype)

    @property
    def is_static(self) -> bool:
        """Whether all extents of the space are known."""
        return all(isinstance(extent, int) for extent in (*self.rows, self.columns))

    def placeholders(self) -> dict[Var, Definition]:
        """Definition of each placeholder."""
        parts = (
            *(self.tiles, self.scalars, self.elements),
            *(self.reductions, self.scans, self.values),
        )
        return {item.var: item for part in parts for item in part}

    def indices(self, access: Access) -> tuple[Expr, ...]:
        """Indices of the element accessed at (row_vars, column_var), one an axis."""
        offset = access.offset
        if isinstance(access, Output) and access.place is not None:
            offset = access.place
        elif isinstance(access, Tile) or (isinstance(access, Output) and access.full):
            offset = offset + self.column_var
        shape = self.params[access.param].shape
        return unflatten(offset, shape, self.analyzer())

    def analyzer(self, sizes: Mapping[Var, Bounds] | None = None) -> tvm.sym.Analyzer:
        """An analyzer that knows the ranges of the coordinates, and the bounds of `sizes`."""
        analyzer = tvm.sym.Analyzer()
        for size, bounds in (sizes or {}).items():
            bounds.tell(analyzer, size)
        for var, extent in zip(
            (*self.row_vars, self.column_var), (*self.rows, self.columns), strict=True
        ):
            analyzer.bind(var, tvm.ir.Range(0, extent))
        return analyzer

    def __str__(self) -> str:
        lines = _lines(self)
        for sibling in self.siblings:
            lines += ["beside it", *_lines(sibling)]
        return "\n".join(lines)

    def level(self, *exprs: Expr) -> Level:
        """How often the expressions change: with the element, with the row, or never."""
        definitions = self.placeholders()

        def of(var: Var) -> Level:
            # conditional loads read others, which several of them share: each is asked once
            if var not in self._levels:
                self._levels[var] = own(var)
            return self._levels[var]

        def own(var: Var) -> Level:
            item = definitions.get(var)
            if isinstance(item, Element):
                return highest(item.offset, *([] if item.guard is None else [item.guard]))
            if isinstance(item, Tile | Scan | Value) or var.same_as(self.column_var):
                return Level.ELEMENT
            row = isinstance(item, Scalar | Reduction) or var in self.row_vars
            return Level.ROW if row else Level.CONSTANT

        def highest(*parts: Expr) -> Level:
            return max(map(of, variables(*parts)), default=Level.CONSTANT)

        return highest(*exprs)


def _lines(program: Program) -> list[str]:
    """The listing that `str(program)` shows."""

    def place(access: Access, column: str = "") -> str:
        return f"{program.params[access.param].name}[{access.offset}{column}]"

    j = program.column_var
    head = f"rows {list(program.rows)} x columns {program.columns}"
    lines = [f"{head}, {program.phases} reduction phase(s)"]
    lines += [f"  tile    {t.var} = {place(t, f' + {j}')}  {t.dtype}" for t in program.tiles]
    lines += [f"  scalar  {s.var} = {place(s)}  {s.dtype}" for s in program.scalars]
    for element in program.elements:
        guard = "" if element.guard is None else f"  if {element.guard}"
        lines.append(f"  element {element.var} = {place(element)}  {element.dtype}{guard}")
    lines += [f"  value   {v.var} = {v.body}  phase {v.phase}" for v in program.values]
    for r in program.reductions:
        online = f" along with {r.online}" if r.online is not None else ""
        lines.append(f"  reduce  {r.var} = {r.kind} of {r.body}  phase {r.phase}{online}")
    for s in program.scans:
        kind = f"{s.kind} before" if s.exclusive else s.kind
        lines.append(f"  scan    {s.var} = {kind} of {s.body}")
    for o in program.outputs:
        where = place(o, f" + {j}" if o.full else "")
        if o.place is not None:
            where = f"{program.params[o.param].name}[{o.place}]"
        lines.append(f"  out     {where} = {o.value}  after phase {o.phase}")
    for a in program.accumulations:
        where = f"{program.params[a.param].name}[{a.offset} + {j}]"
        lines.append(f"  sum     {where} = {a.kind} over rows of {a.body}  after phase {a.phase}")
    return lines
