"""An attention as the decode kernel sees it: units that share keys and values, and their rows.

A batch axis is divided where keys and values are the same for neighbouring points of it:

    q[b, h, m, d]  k[b, h // 4, n, d]  v[b, h // 4, n, e]     h = 4 * h_outer + h_inner
    units (b, h_outer): read their keys and values once       rows (h_inner, m)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var

from ....config import HardwareProfile
from ....errors import Unsupported
from ...contraction.model import INDEX, Simplifier, fresh_var
from ...contraction.reader import Axis, size_of
from ...gpu.product_frame import Frame, coordinates
from ...program.expr import HALF_DTYPES, constant, convert, same, substitute
from ...program.program import Extent
from ..read.bounds import KeyLimits, key_limits
from ..read.model import Attention
from ..tiled.source import Source, read_source
from .config import MAX_FEATURES, block_rows

MAX_QUERIES = 128
"""Queries of an attention; with more, the products decide and not the memory, and other kernels
win. Heads that share keys do not count: blocks take parts of a unit's rows."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeProblem:
    """What `read_decode` finds.

    Attributes
    ----------
    units : axes of the attentions that share nothing.
    shared : axes of the heads (or whatever shares keys and values) of a unit.
    whole : each batch axis as an expression over `units` and `shared`.
    range : bounds of the visible keys.
    queries : queries of an attention; the most of a symbolic number.
    """

    attention: Attention
    units: tuple[Axis, ...]
    shared: tuple[Axis, ...]
    whole: dict[Var, Expr]
    k: Source
    v: Source
    range: KeyLimits
    queries: int

    @property
    def row_axes(self) -> tuple[Axis, ...]:
        """Axes of the rows of a unit."""
        return (*self.shared, *self.attention.queries)

    @property
    def rows(self) -> int:
        """Rows of a unit, the most there may be."""
        return size_of(self.shared) * self.queries

    def row_count(self, frame: Frame) -> int | Expr:
        """Rows of a unit that there are."""
        count = frame.size(size_of(self.row_axes))
        return count if isinstance(count, int) else convert(count, "int32")

    @property
    def block_rows(self) -> int:
        """Rows of a block: all of a unit, or an even part of them."""
        return block_rows(self.rows, self.attention.E)

    @property
    def chunks(self) -> int:
        """Blocks (or clusters) that share a unit's rows; each reads all keys."""
        return -(-self.rows // self.block_rows)

    @property
    def unit_count(self) -> Extent:
        """Number of units."""
        return size_of(self.units)

    def unit_env(self, unit: Expr, frame: Frame) -> dict[Var, Expr]:
        """The unit axes at a unit."""
        return coordinates(self.units, unit, frame)

    def row_env(self, unit: dict[Var, Expr], row: Expr, frame: Frame) -> dict[Var, Expr]:
        """The axes of the batch and the queries at a row of a unit."""
        env = {**unit, **coordinates(self.row_axes, row, frame)}
        return env | {var: frame.rewrite(whole, env) for var, whole in self.whole.items()}


def read_decode(attention: Attention, hw: HardwareProfile, queries: int = 0) -> DecodeProblem:
    """The units and rows of an attention, and its keys and values in memory; `queries` are the most
    of a symbolic number.

    Raises
    ------
    Unsupported
        For a device before sm_80, operands that are not plain half-precision tensors contiguous
        along the head, or too many queries.
    """
    if not hw.architecture.has_mma:
        raise Unsupported(f"decode attention is for sm_80 and later, not {hw.arch}")
    if attention.operand_dtype not in HALF_DTYPES:
        raise Unsupported(f"decode attention of {attention.operand_dtype} operands")
    queries = attention.M if isinstance(attention.M, int) else queries or attention.M
    sizes = [queries, attention.D, attention.E]
    if not all(isinstance(size, int) for size in sizes):
        raise Unsupported("decode attention with a symbolic number of queries, or head size")
    if queries > MAX_QUERIES:
        raise Unsupported(f"decode attention of {queries} queries, more than {MAX_QUERIES}")
    if attention.E > MAX_FEATURES:
        raise Unsupported(f"{attention.E} features, more than {MAX_FEATURES}")
    k = read_source(attention, attention.k, "n", attention.terms, "keys")
    v = read_source(attention, attention.v, "n", attention.features, "values")
    units, shared, whole = _divide(attention, [k.offset, v.offset])
    row_vars = [*whole, *(axis.var for axis in (*shared, *attention.queries))]
    bounds = key_limits(attention, row_vars)
    return DecodeProblem(attention, units, shared, whole, k, v, bounds, queries)


def _divide(
    attention: Attention, offsets: Sequence[Expr]
) -> tuple[tuple[Axis, ...], tuple[Axis, ...], dict[Var, Expr]]:
    """Axes of the units, axes that share keys and values, and the batch axes over both."""
    simplify = Simplifier(a for group in attention.groups.values() for a in group)
    units, shared, whole = [], [], {}
    for axis in attention.batch:
        inner = _shared_points(axis, offsets, simplify)
        if inner == 1:
            units.append(axis)
            continue
        if inner == axis.extent:
            shared.append(axis)
            continue
        low = Axis(fresh_var(f"{axis.var.name}_in", INDEX), inner)
        high = Axis(fresh_var(f"{axis.var.name}_out", INDEX), axis.extent // inner)
        units.append(high)
        shared.append(low)
        whole[axis.var] = high.var * constant(inner, INDEX) + low.var
    return tuple(units), tuple(shared), whole


def _shared_points(axis: Axis, offsets: Sequence[Expr], simplify: Simplifier) -> int:
    """How many neighbouring points of a batch axis read the same keys and values."""
    if not isinstance(axis.extent, int):
        return 1
    for inner in range(axis.extent, 1, -1):
        if axis.extent % inner == 0 and all(
            same(simplify(_coarse(offset, axis.var, inner)), offset) for offset in offsets
        ):
            return inner
    return 1


def _coarse(offset: Expr, var: Var, inner: int) -> Expr:
    """`offset` at the first of the `inner` points around `var`."""
    size = constant(inner, INDEX)
    return substitute(offset, {var: tirx.FloorDiv(var, size) * size})
