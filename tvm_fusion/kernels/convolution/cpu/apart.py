"""Rows of a box whose elements are taken apart: element u is the u // s-th of part u % s.

    box[r, q] = d[first + q s + r]        r < s, the stride of the positions

What a tap meets at positions beside each other lies side by side then, and vectors run along the
positions. Vectors of a row are taken apart in registers: s of them are loaded, and shuffled to one
of each part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.tirx import ForKind

from ...cpu.loops import Loops, nest, seq
from ...cpu.nests.point import has_vector_form
from ...cpu.nests.scope import allocate, new_buffer
from ...cpu.stages.resolve import Point
from ...program.expr import dtype_of
from .vectors import by_vectors, in_vectors

Element = Callable[[Expr, Point], Expr]
"""The value of an element of a row."""


class Apart:
    """Writes a row of `streams` parts, `part` elements each, of which the first `lead` are unused.

    Parameters
    ----------
    box : Var
    where : sequence of Expr
        The row within the box.
    """

    def __init__(
        self,
        loops: Loops,
        lanes: int,
        box: Var,
        where: Sequence[Expr],
        streams: int,
        part: int,
        lead: int,
    ) -> None:
        self.loops, self.lanes, self.box, self.where = loops, lanes, box, where
        self.streams, self.part, self.lead = streams, part, lead

    def imm(self, value: int) -> Expr:
        """An index constant."""
        return self.loops.imm(value)

    def zeros(self, low: Expr, high: Expr, extent: Expr, zero: Expr) -> tirx.Stmt:
        """Zeros in place of the elements below `low` and from `high` on and below `extent`."""
        stmts = []
        for r in range(self.streams):
            first, last, end = (self._first_from(at - self.imm(r)) for at in (low, high, extent))
            for begin, behind in ((self.imm(0), first), (last, end)):
                stmts.append(self._zeros(r, begin, behind, zero))
        return seq(*stmts)

    def _place(self, r: Expr | int, at: Expr) -> Expr:
        """Where element `at` of a part lies in the row."""
        part = self.imm(r) if isinstance(r, int) else r
        place = part * self.imm(self.part) + at + self.imm(self.lead)
        return self.loops.simplify(place)

    def _zeros(self, r: int, begin: Expr, end: Expr, zero: Expr) -> tirx.Stmt:
        def ops(at: Expr, _lane: object) -> list:
            return [tirx.BufferStore(self.box, zero, [*self.where, self._place(r, at)])]

        return by_vectors(self.loops, self.lanes, begin, end, ops)

    def copy(self, low: Expr, high: Expr, element: Element) -> tirx.Stmt:
        """The elements from `low` on and below `high`."""
        loops, streams = self.loops, self.imm(self.streams)
        first = self._first_from(low)
        last = loops.simplify(tirx.Max(first, tirx.FloorDiv(high, streams)))
        begin, end = loops.simplify(first * streams), loops.simplify(last * streams)

        def vector(at: Expr, width: int) -> tirx.Stmt:
            shuffled = self._shuffled(at, width, element) if width > 1 else None
            if shuffled is not None:
                return shuffled
            start = loops.simplify(at * streams)
            return self._single(start, start + self.imm(width * self.streams), element)

        return seq(
            self._single(low, loops.simplify(tirx.Min(begin, high)), element),
            in_vectors(loops, self.lanes, first, last, vector, twice=True),
            self._single(end, loops.simplify(tirx.Max(end, high)), element),
        )

    def _first_from(self, at: Expr) -> Expr:
        """The first element of a part that is element `at` of the row, or one behind it."""
        up = tirx.FloorDiv(at + self.imm(self.streams - 1), self.imm(self.streams))
        return self.loops.simplify(tirx.Max(self.imm(0), up))

    def _single(self, low: Expr, high: Expr, element: Element) -> tirx.Stmt:
        """Elements one by one."""
        loops, streams = self.loops, self.imm(self.streams)
        loop = loops.new("i", loops.simplify(high - low))
        at = loops.simplify(low + loop.value)
        place = self._place(tirx.FloorMod(at, streams), tirx.FloorDiv(at, streams))
        point = Point(None)
        value = element(at, point)
        store = tirx.BufferStore(self.box, value, [*self.where, place])
        return loop.around(nest([], [*point.ops, store]))

    def _shuffled(self, first: Expr, width: int, element: Element) -> tirx.Stmt | None:
        """A vector of each part; None where the elements have no vector form."""
        loops, streams = self.loops, self.streams
        begin = loops.simplify(first * self.imm(streams))
        rows, stmts = [], []
        for n in range(streams):
            lane = loops.new("v", width, ForKind.VECTORIZED)
            point = Point(lane)
            value = element(loops.simplify(begin + self.imm(n * width) + lane.value), point)
            row = new_buffer("row", [self.imm(width)], dtype_of(value))
            ops = [*point.ops, tirx.BufferStore(row, value, [lane.value])]
            if not has_vector_form(ops):
                return None
            rows.append(row)
            stmts.append(nest([lane], ops))
        whole = [tirx.Ramp(self.imm(0), self.imm(1), width)]
        vectors = [tirx.BufferLoad(row, whole) for row in rows]
        for r in range(streams):
            order = [tirx.const(r + streams * lane, "int32") for lane in range(width)]
            place = tirx.Ramp(self._place(r, first), self.imm(1), width)
            part = tirx.Shuffle(vectors, order)
            stmts.append(tirx.BufferStore(self.box, part, [*self.where, place]))
        return seq(*map(allocate, rows), *stmts)
