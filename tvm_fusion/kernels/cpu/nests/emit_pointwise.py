"""Loops of a nest without reductions: the contiguous axis innermost.

Cheap loops are left to LLVM to vectorise, but for short ones: it would unroll these, and turn the
loop around them into vectors that gather and scatter. In loops with much arithmetic a point waits
for its own operations most of the time. Both are written as operations on several vectors at once:

    for block:                                             and the rest in pieces of 32, 16, 8 and 4
        for v < 64 as vectors: y[64 * block + v] = f(x[64 * block + v])

Loops are cut where the condition on a load changes.
"""

from __future__ import annotations

from itertools import pairwise

import tvm
from tvm import tirx
from tvm.ir import Expr, Var
from tvm.ir.prim.expr import CmpExpr
from tvm.tirx import ForKind

from ...program.expr import bytes_of, constant, dtype_of, number
from ..loops import Loop, nest, seq
from ..stages.rewrite import Substitute, branches, free_variables, is_conditional, loads, nodes
from ..stages.stages import analyzer_of, load_stride, stage_work
from .nests import Nest
from .point import LEAST_PIECE, NestEmitter, has_vector_form
from .space import Slot

# Where conditions on an axis change, so that a loop can be cut there.
#
#    for j < 9: y[j] = if_then_else(1 <= j and j < 8, x[j - 1], 0)
# -> for j < 1: y[j] = 0;  for j < 7: y[1 + j] = x[j];  for j < 1: y[8 + j] = 0

# More cuts than a pad or a concatenation of a few tensors needs would only be code.
MOST_CUTS = 4


def cuts(item: Nest, axis: int, size: int) -> list[int]:
    """Positions on an axis of the nest, between 0 and `size`, at which a condition changes.

    Only conditions that decide about a load count, and only those that depend on nothing else.
    """
    found: set[int] = set()
    for member in item.members:
        var = member.axes[axis].var
        for expr in nodes(*member.stage.expressions()):
            if is_conditional(expr) and loads(*branches(expr)[1:]):
                found.update(_changes(branches(expr)[0], var))
    inside = sorted(c for c in found if 0 < c < size)
    return inside if len(inside) <= MOST_CUTS else []


def _changes(condition: Expr, var: Var) -> set[int]:
    """Where comparisons of `var` with constants change."""
    found = set()
    for expr in nodes(condition):
        if isinstance(expr, CmpExpr) and set(free_variables(expr)) == {var} and not loads(expr):
            change = _change(expr, var)
            if change is not None:
                found.add(change)
    return found


def _change(comparison: CmpExpr, var: Var) -> int | None:
    """The first value of `var` for which a comparison is another than for smaller ones."""
    if isinstance(comparison, tirx.EQ | tirx.NE):
        return None
    analyzer = tvm.sym.Analyzer()

    def difference(at: int) -> int | None:
        env = {var: constant(at, dtype_of(var))}
        side = Substitute(env)(comparison.a), Substitute(env)(comparison.b)
        return number(analyzer.simplify(side[0] - side[1]))

    at_zero, at_one, at_two = difference(0), difference(1), difference(2)
    if None in (at_zero, at_one, at_two) or at_one - at_zero != at_two - at_one:
        return None
    slope = at_one - at_zero
    if slope not in (1, -1):
        return None
    root = -at_zero * slope
    # The difference is slope * (var - root): if it rises, `<` and `>=` change at the root.
    changes_at_root = isinstance(comparison, tirx.LT | tirx.GE) == (slope == 1)
    return root if changes_at_root else root + 1


# Work (in additions) from which on vectors pay: tanh(sigmoid(x) * y + x) of 2 Mi float32 takes
# 1.15 ms instead of 1.73 ms, tanh alone 1.13 ms instead of 1.40 ms.
VECTOR_WORK = 12
VECTORS = 4

# Elements of a row that LLVM writes out, to take several rows for a vector: on a core of a Zen 5,
# float32 x * y of 47,000 elements, rows of 9 to 49 times a number each, take 22 us, by vectors of a
# row 2 to 3; rows of 8 4.5 and 2.1, of 6 2.3 and 3.6. Where there is much arithmetic halves do
# not pay: exp(x) * y of rows of 12 takes 9 us, 16 by vectors of 8 and 4.
LEAST_ROW, SHORT_ROW = 8, 64


class PointwiseEmitter(NestEmitter):
    """Emits one nest."""

    def emit(self, lane: Slot | None) -> tirx.Stmt:
        """The loops, with `lane` innermost."""
        outer = {s: self.space.loop(s) for s in self.space.slots if s is not lane}
        if lane is None:
            values = self.space.values({s: loop.value for s, loop in outer.items()})
            return nest(list(outer.values()), self.writer.write(values, []))
        pieces = self._pieces(lane)
        if len(pieces) == 1:
            body = self._vectors(outer, lane)
            if body is None:
                return self._plain(outer, lane, *pieces[0])
        else:
            body = seq(*(self._plain({}, lane, *p, around=outer) for p in pieces))
        for loop in reversed(outer.values()):
            body = loop.around(body)
        return body

    def _pieces(self, lane: Slot) -> list[tuple[Expr, Expr]]:
        """Start and length of the parts of the lane loop without a change of a condition."""
        extent = self.space.extent(lane)
        size = number(extent)
        zero = self.loops.imm(0)
        if size is None or len(lane.axes) > 1 or not self.space.is_whole(lane):
            return [(zero, extent)]
        ends = [0, *cuts(self.nest, lane.axes[0], int(size)), int(size)]
        return [(self.loops.imm(a), self.loops.imm(b - a)) for a, b in pairwise(ends)]

    def _plain(
        self,
        loops: dict[Slot, Loop],
        lane: Slot,
        start: Expr,
        length: Expr | int,
        around: dict[Slot, Loop] | None = None,
    ) -> tirx.Stmt:
        """A part of the lane loop, within `loops`; loops `around` it are added by the caller."""
        inner = self.loops.new("i", length)
        values = self._values({**(around or {}), **loops}, lane, start + inner.value)
        return nest([*loops.values(), inner], self.writer.write(values, []))

    def _vectors(self, outer: dict[Slot, Loop], lane: Slot) -> tirx.Stmt | None:
        """The lane loop in blocks of vectors, or None where that does not pay or does not work."""
        extent = self.space.extent(lane)
        whole = self.space.extent(lane, whole=True)
        count = self._lane_count(whole)
        if count is None or not self._pays(whole, count) or not self._is_even(lane):
            return None
        blocks = self.loops.simplify(tirx.FloorDiv(extent, self.loops.imm(count)))
        rest = self.loops.simplify(extent - blocks * self.loops.imm(count))
        full = self._block(outer, lane, self.loops.imm(0), blocks, count)
        if full is None:
            return None
        start = self.loops.simplify(blocks * self.loops.imm(count))
        tail = []
        for number_of, at, width in self.pieces(rest, min(count, self._vector_lanes())):
            piece = None
            if isinstance(width, int) and width >= LEAST_PIECE:
                piece = self._block(outer, lane, start + at, number_of, width)
            if piece is None:
                lanes = self.loops.imm(width) if isinstance(width, int) else width
                piece = self._plain({}, lane, start + at, number_of * lanes, around=outer)
            tail.append(piece)
        return seq(full, *tail)

    def _block(
        self, outer: dict[Slot, Loop], lane: Slot, start: Expr, blocks: Expr, count: int
    ) -> tirx.Stmt | None:
        """Blocks of `count` lanes from `start` on, or None where they have no vector form."""
        block = self.loops.new("block", blocks)
        v = self.loops.new("v", count, ForKind.VECTORIZED)
        first = start + block.value * self.loops.imm(count)
        ops = self.writer.write(self._values(outer, lane, first + v.value), [], lane=v)
        return nest([block, v], ops) if has_vector_form(ops) else None

    def _values(self, outer: dict[Slot, Loop], lane: Slot, at: Expr) -> list[Expr]:
        return self.space.values({**{s: loop.value for s, loop in outer.items()}, lane: at})

    def _lane_count(self, extent: Expr) -> int | None:
        """Lanes of a block: as many vectors as a whole tile fills, or a part of one; None if it
        fills none.
        """
        lanes = self._vector_lanes()
        size = number(extent)
        counts = [n * lanes for n in (VECTORS, 2, 1)]
        while counts[-1] > LEAST_ROW:
            counts.append(counts[-1] // 2)
        return counts[0] if size is None else next((n for n in counts if n <= size), None)

    def _vector_lanes(self) -> int:
        widest = max(bytes_of(dtype_of(m.stage.values[0])) for m in self.nest.members)
        return self.machine.lanes(widest)

    def _is_heavy(self) -> bool:
        return sum(stage_work(m.stage) for m in self.nest.members) >= VECTOR_WORK

    def _pays(self, extent: Expr, count: int) -> bool:
        """Whether blocks of `count` lanes are faster than what LLVM makes of the loop."""
        size = number(extent)
        if size == count:
            return True
        if self._is_heavy():
            return count >= self._vector_lanes()
        return size is not None and LEAST_ROW <= size <= SHORT_ROW

    def _is_even(self, lane: Slot) -> bool:
        """Whether every load is contiguous along the lanes, or the same for all of them."""
        for member in self.nest.members:
            axis = member.axes[lane.axes[-1]]
            analyzer = analyzer_of(member.stage.domain)
            if any(load_stride(r, axis.var, analyzer) not in (0, 1) for r in member.stage.reads()):
                return False
        return True
