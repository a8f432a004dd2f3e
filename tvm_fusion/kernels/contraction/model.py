"""Contractions as values: what a PrimFunc around matrix products computes, nothing about how.

    T[i, j] = sum_k x[i, k] * w[j, k]     a product: accumulator acc0, axes M (i), N (j), K (k)
    y[j, i] = gelu(T[i, j] + b[j])        an output: indices (j, i), value gelu(acc0 + b[j])

A segment is a set of products over one space (batch, M, N) whose accumulators meet in common
outputs: one matmul with its epilogue, or gate and up of a SwiGLU. Products with outputs of their
own (Q, K, V) are segments side by side. Each segment has sizes and operands of its own; where
batch, M and K are the same in all of them, the contraction is uniform.

Expressions are TIR over axis variables (int64), placeholders (accumulators and bindings) and loads
of the PrimFunc's own parameters. Half precision is widened: loads stand under a cast to float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import tvm
from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...ir.extents import Bounds
from ..program.expr import constant, dtype_of, keeps_value, number, rebuild, variables
from ..program.extents import MAX_EXTENT, equal_sizes
from ..program.program import Extent, Param
from .axis import INDEX, Axis  # noqa: F401
from .windows import Windows

# Simplifies indices whose sizes are symbolic: what is left of a reshape whose ranges are known.
#
# (i * n + j) // n  ->  i        (i * n + j) % n  ->  j        for 0 <= j < n, n > 0


class Simplifier:
    """Simplifies indices over axes with known ranges; symbolic sizes are positive."""

    def __init__(self, axes: Iterable[Axis]):
        axes = list(axes)
        self._analyzer = tvm.sym.Analyzer()
        extents = [axis.extent for axis in axes if not isinstance(axis.extent, int)]
        for size in variables(*extents):
            one, most = constant(1, dtype_of(size)), constant(MAX_EXTENT, dtype_of(size))
            self._analyzer.bind(size, tvm.ir.Range(one, most))
        for axis in axes:
            self._analyzer.bind(axis.var, tvm.ir.Range(0, axis.extent))

    def __call__(self, expr: Expr) -> Expr:
        """`expr`, simplified."""
        return self._analyzer.simplify(self._visit(self._analyzer.simplify(expr)))

    def most(self, expr: Expr) -> int | None:
        """What an expression is at most, or None."""
        bound = self._analyzer.const_int_bound(expr)
        known = bound.min_value >= 0 and bound.max_value < MAX_EXTENT
        return int(bound.max_value) if known else None

    def _visit(self, expr: Expr) -> Expr:
        if not isinstance(expr, tirx.Add | tirx.Sub | tirx.Mul | tirx.FloorDiv | tirx.FloorMod):
            return expr
        expr = rebuild(expr, self._visit)
        if not isinstance(expr, tirx.FloorDiv | tirx.FloorMod) or number(expr.b) is not None:
            return expr
        quotient = self._quotient(expr.a, expr.b)
        if quotient is None:
            return expr
        rest = self._analyzer.simplify(expr.a - quotient * expr.b)
        return quotient if isinstance(expr, tirx.FloorDiv) else rest

    def _quotient(self, a: Expr, b: Expr) -> Expr | None:
        """a // b without a division, or None."""
        zero = constant(0, dtype_of(a))
        if self._analyzer.can_prove(tirx.And(a >= zero, a < b)):
            return zero
        split = self._analyzer.simplify(tirx.FloorDiv(a, b))
        if isinstance(split, tirx.FloorDiv):
            return None
        split = self._analyzer.simplify(self._visit(split))
        return None if _divides(split) else split


def _divides(expr: Expr) -> bool:
    if isinstance(expr, tirx.FloorDiv | tirx.FloorMod):
        return True
    return isinstance(expr, tirx.Add | tirx.Sub | tirx.Mul) and (
        _divides(expr.a) or _divides(expr.b)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """Temporary ``var = value``, to be computed once before it is read."""

    var: Var
    value: Expr


def fresh_var(name: str, dtype: str) -> Var:
    """A new variable."""
    return Var(name, tvm.ir.PrimType(dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """One factor of a product: `value` over axis variables and `bindings`, computed in order.

    `windows` tell how it is read where that is at windows with zeros around them.
    """

    value: Expr
    bindings: tuple[Binding, ...] = ()
    windows: Windows | None = None

    @property
    def load(self) -> TensorLoad | None:
        """The load of an operand that is nothing else: elements of a parameter, at most widened."""
        return _plain_load(self.value)

    @property
    def stored(self) -> TensorLoad | None:
        """The same; of what is read at windows, the load of an element of the data."""
        return self.load if self.windows is None else _plain_load(self.windows.data)


def _plain_load(expr: Expr) -> TensorLoad | None:
    while isinstance(expr, tirx.Cast) and keeps_value(dtype_of(expr.value), dtype_of(expr)):
        expr = expr.value
    return expr if isinstance(expr, TensorLoad) else None


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """``accumulator = sum over the axes k of a * b``, together with other products of a segment
    that have this accumulator.

    `dtype` is the dtype of the sum while it runs (float32 for half precision) and of the
    placeholder; `stored_dtype` is the one the unfused graph stores it in, or rounds it to wherever
    it reads it; `scaled_dtype` the half precision it rounds to behind one factor, if it does that.
    """

    accumulator: Var
    a: Operand
    b: Operand
    k: tuple[Axis, ...]
    dtype: str
    stored_dtype: str
    scaled_dtype: str | None = None

    @property
    def K(self) -> Extent:
        """Number of terms of the sum."""
        return size_of(self.k)


RUN_ROWS = 16
"""Rows of a run whose columns are reduced: those that a warp has of a tensor core's sums."""


@dataclass(frozen=True, slots=True, eq=False)
class Finish:
    """What is stored of a reduction: `value` over the axes of the segment, `bindings`, computed in
    order, and `reduced`, which stands for the reduction.
    """

    reduced: Var
    bindings: tuple[Binding, ...]
    value: Expr

    def map(self, change: Callable[[Expr], Expr]) -> Finish:
        """The same with all expressions changed."""
        bindings = tuple(Binding(b.var, change(b.value)) for b in self.bindings)
        return Finish(self.reduced, bindings, change(self.value))


@dataclass(frozen=True, slots=True)
class RowPartial:
    """A reduction ("sum" or "max") of each aligned run of `width` columns of a row. Of one with a
    `finish`, that is stored.
    """

    kind: str
    width: int
    finish: Finish | None = None

    def map(self, change: Callable[[Expr], Expr]) -> RowPartial:
        """The same with all expressions changed."""
        finish = None if self.finish is None else self.finish.map(change)
        return replace(self, finish=finish)


@dataclass(frozen=True, slots=True)
class ColumnPartial:
    """A reduction ("sum" or "max") of runs of `rows` rows of a column: `RUN_ROWS` of them, or fewer
    that lie within as many, such as 2 x 2 positions of an image.

    A run holds as many elements along axes of the segment as `heights` say, one along others; its
    rows differ in `bits` of their numbers, where a form of a kernel has set these. Where runs are
    `whole` no term is missing of any; else terms are as many as there are rows. Runs of rows behind
    the last one that is stored are not `inside`, a condition over the axes of the segment. Of a
    reduction with a `finish`, that is stored.
    """

    kind: str
    rows: int = RUN_ROWS
    whole: bool = False
    inside: Expr | None = None
    finish: Finish | None = None
    heights: Mapping[Var, int] = field(default_factory=dict, compare=False)
    bits: tuple[int, ...] = ()

    def map(self, change: Callable[[Expr], Expr]) -> ColumnPartial:
        """The same with all expressions changed."""
        inside = None if self.inside is None else change(self.inside)
        finish = None if self.finish is None else self.finish.map(change)
        return replace(self, inside=inside, finish=finish)


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """``parameter[indices] = value`` at every point of the segment, where cast to `dtype`.

    With `partial`, the parameter's element is the reduction of `value` over a run of columns or of
    rows, and `indices` are the same at all points of a run.
    """

    param: int
    indices: tuple[Expr, ...]
    value: Expr
    dtype: str
    partial: RowPartial | ColumnPartial | None = None

    def map(self, change: Callable[[Expr], Expr]) -> Output:
        """The same with all expressions changed."""
        indices, partial = tuple(map(change, self.indices)), self.partial
        if partial is not None:
            partial = partial.map(change)
        return replace(self, indices=indices, value=change(self.value), partial=partial)


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """The points that products are computed at.

    The rows are the points of the axes `m` in row-major order (the last axis runs fastest); columns
    and batch likewise.
    """

    batch: tuple[Axis, ...]
    m: tuple[Axis, ...]
    n: tuple[Axis, ...]

    @property
    def groups(self) -> dict[str, tuple[Axis, ...]]:
        """The axes by the name of their group, as accesses have them."""
        return {"batch": self.batch, "m": self.m, "n": self.n}

    @property
    def B(self) -> Extent:
        """Number of independent products: the size of the batch."""
        return size_of(self.batch)

    @property
    def M(self) -> Extent:
        """Number of rows."""
        return size_of(self.m)

    @property
    def N(self) -> Extent:
        """Number of columns."""
        return size_of(self.n)


@dataclass(frozen=True, slots=True, eq=False)
class Partners:
    """Pairs of columns that are computed from each other's accumulators (a rotary embedding).

    Columns t and t + `distance`, for t < `distance`, of each aligned run of `width` columns are a
    pair; the columns of a run beyond 2 `distance` have no partner.

    Attributes
    ----------
    width, distance : in columns.
    part : stands, in the values, for where a column lies in its run: 0 for the first of a pair, 1
        for the second, 2 for a column without partner. Under every condition on it, both sides may
        be evaluated.
    vars : of each product, the accumulator of the partner; None where no value reads it.
    """

    width: int
    distance: int
    part: Var
    vars: tuple[Var | None, ...]

    def part_of(self, column: int) -> int:
        """What `part` is for a column of a segment."""
        return min(column % self.width // self.distance, 2)

    def partner_of(self, column: int) -> int:
        """The other column of a pair; a column without partner itself."""
        return column + (self.distance, -self.distance, 0)[self.part_of(column)]


@dataclass(frozen=True, slots=True, eq=False)
class Segment(Space):
    """Products over one space, and the outputs made of them; `bindings` are shared temporaries."""

    products: tuple[Product, ...]
    bindings: tuple[Binding, ...]
    outputs: tuple[Output, ...]
    partners: Partners | None = None

    @property
    def space(self) -> tuple[Axis, ...]:
        """All axes but the contracted ones."""
        return (*self.batch, *self.m, *self.n)


@dataclass(frozen=True, slots=True, eq=False)
class Contraction:
    """What one fused PrimFunc computes; made by `contraction.analyze_contraction`.

    `rows` says how many rows a kernel is for where `M` is symbolic and that is known.
    """

    name: str | None
    params: tuple[Param, ...]
    segments: tuple[Segment, ...]
    exact: bool = False
    rows: Bounds = field(default_factory=Bounds)

    @property
    def batch(self) -> Extent:
        """Number of independent products of the first segment (of each, if they are `uniform`)."""
        return self.segments[0].B

    @property
    def M(self) -> Extent:
        """Number of rows of the first segment (of each, if they are `uniform`)."""
        return self.segments[0].M

    @property
    def uniform(self) -> bool:
        """Whether all segments have one batch and M, and all products one K.

        Operands may differ all the same: A need not be shared.
        """
        first = self.segments[0]
        return all(
            equal_sizes(s.B, first.B)
            and equal_sizes(s.M, first.M)
            and all(equal_sizes(p.K, first.products[0].K) for p in s.products)
            for s in self.segments
        )

    @property
    def products(self) -> tuple[Product, ...]:
        """Products of all segments."""
        return tuple(p for segment in self.segments for p in segment.products)

    @property
    def has_partials(self) -> bool:
        """Whether an output is a reduction of runs of columns or of rows."""
        return any(o.partial is not None for segment in self.segments for o in segment.outputs)

    @property
    def has_partners(self) -> bool:
        """Whether a value is made of two columns of a product."""
        return any(segment.partners is not None for segment in self.segments)

    @property
    def is_static(self) -> bool:
        """Whether all extents are known."""
        axes = [a for s in self.segments for a in s.space] + [a for p in self.products for a in p.k]
        return all(isinstance(axis.extent, int) for axis in axes)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def size_of(axes: Iterable[Axis]) -> Extent:
    """Number of points of the axes together."""
    return math.prod(axis.extent for axis in axes)


def _lines(contraction: Contraction) -> list[str]:
    """The listing that `str(contraction)` shows."""

    def names(axes: Iterable[Axis]) -> str:
        return "(" + ", ".join(f"{axis.var}: {axis.extent}" for axis in axes) + ")"

    lines = []
    for s in contraction.segments:
        lines.append(f"segment batch {names(s.batch)} M {names(s.m)} N {names(s.n)}")
        for p in s.products:
            dtypes = f"in {p.dtype}, stored as {p.stored_dtype}"
            lines.append(f"  {p.accumulator} = sum over {names(p.k)} {dtypes}")
            for operand in (p.a, p.b):
                lines += [f"    {b.var} = {b.value}" for b in operand.bindings]
                lines.append(f"    * {operand.value}")
        lines += _pairs(s)
        lines += [f"  {b.var} = {b.value}" for b in s.bindings]
        for o in s.outputs:
            index = ", ".join(map(str, o.indices))
            value = o.value if o.partial is None else _reduced(o)
            lines.append(f"  {contraction.params[o.param].name}[{index}] = {value}")
    return lines


def _pairs(segment: Segment) -> list[str]:
    """``pair0 = acc0 of the other column of a pair, 64 apart in runs of 128``."""
    if segment.partners is None:
        return []
    p = segment.partners
    return [
        f"  {var} = {product.accumulator} of the other column of a pair, {p.distance} apart in "
        f"runs of {p.width}"
        for var, product in zip(p.vars, segment.products, strict=True)
        if var is not None
    ]


def _reduced(output: Output) -> str:
    """``sum over runs of 128 columns of value``."""
    partial = output.partial
    over = isinstance(partial, ColumnPartial)
    run = f"{partial.rows} rows" if over else f"{partial.width} columns"
    found = f"{partial.kind} over runs of {run} of {output.value}"
    return found if partial.finish is None else f"{partial.finish.value} of the {found}"
