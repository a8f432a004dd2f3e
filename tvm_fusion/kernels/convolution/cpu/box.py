"""A box of the data that a task reads, copied with the zeros around it.

    box[c, u, v] = d[n, first_c + c, first_u + u, first_v + v], or 0 outside of its bounds

The copy holds what sums are computed in, in the order of the data's own dimensions: padding, half
precision and functions of the data cost a task's copy only, whatever number of filters reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.tirx import ForKind

from ...cpu.loops import Loop, nest, pieces, seq
from ...cpu.nests.point import has_vector_form
from ...cpu.nests.scope import Scope
from ...cpu.stages.resolve import Point, Resolve
from ...program.expr import constant, convert, number
from ..geometry import Convolution, Window


@dataclass(frozen=True, slots=True)
class Run:
    """The taps that the positions of a phase meet elements at: `count` of them, one every `step`
    from `first` on, at elements of a box `pitch` apart from `at` on.
    """

    phase: int
    count: int
    first: int
    step: int
    at: int
    pitch: int


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """What a block of positions of one window reads.

    Attributes
    ----------
    window : Window
    block : int
        Positions of a block, a multiple of the window's expansion unless it is all of them.
    stride : int
        Elements of the box between positions of a phase.
    source_step : int
        Elements of the data between those of the box.
    first : int
        The element of the data that is the first of the box, for the first position.
    extent : int
        Elements of the box.
    runs : tuple of Run
        The taps, for each phase.
    """

    window: Window
    block: int
    stride: int
    source_step: int
    first: int
    extent: int
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, window: Window, block: int) -> Span:
        """The span of blocks of some positions."""
        phases = [window.phase_taps(p) for p in range(min(window.expansion, window.size))]
        offsets = [at for phase in phases for _, at in phase]
        first, last = min(offsets, default=0), max(offsets, default=0)
        one_tap = window.expansion == 1 and window.taps == 1
        stride, step = (1, window.stride) if one_tap else (window.stride, 1)
        in_phase = -(-block // window.expansion)
        extent = stride * (in_phase - 1) + last - first + 1
        runs = tuple(_run(n, phase, first) for n, phase in enumerate(phases))
        return cls(window, block, stride, step, first, extent, runs)


def _run(number_of: int, phase: list[tuple[int, int]], first: int) -> Run:
    if not phase:
        return Run(number_of, 0, 0, 0, 0, 0)
    (tap, at), *others = phase
    step, pitch = (others[0][0] - tap, others[0][1] - at) if others else (0, 0)
    return Run(number_of, len(phase), tap, step, at - first, pitch)


class Box:
    """The buffer of a box, and what fills it.

    Parameters
    ----------
    spans : sequence of Span
        Of the windows, in order.
    channels : int
        Channels at a time.
    """

    def __init__(
        self,
        convolution: Convolution,
        spans: Sequence[Span],
        channels: int,
        dtype: str,
        lanes: int,
        scope: Scope,
    ) -> None:
        self.convolution, self.spans, self.lanes = convolution, spans, lanes
        self.scope, self.loops, self.dtype = scope, scope.loops, dtype
        dims = {s.window.dim: s.extent for s in spans}
        if convolution.channel_dim is not None:
            dims[convolution.channel_dim] = channels
        self.order = sorted(dims)
        self.buffer = scope.allocate("box", [dims[d] for d in self.order], dtype)

    def imm(self, value: int) -> Expr:
        """An index constant."""
        return self.loops.imm(value)

    def load(self, channel: Expr, at: Sequence[Expr]) -> Expr:
        """An element: its channel, and where it lies in each window's span."""
        where = {s.window.dim: i for s, i in zip(self.spans, at, strict=True)}
        where[self.convolution.channel_dim] = channel
        return tirx.BufferLoad(self.buffer, [self.loops.simplify(where[d]) for d in self.order])

    def fill(self, starts: Sequence[Expr], channel: Expr, count: Expr) -> tirx.Stmt:
        """Copy the box of some positions of the results.

        Parameters
        ----------
        starts : sequence of Expr
            The first position of each window, a multiple of its expansion.
        channel, count : Expr
            The first channel, of all groups, and how many.
        """
        *outer, inner = self.order
        by_dim = {s.window.dim: (s, i) for s, i in zip(self.spans, starts, strict=True)}
        made: list[Loop] = []
        where: dict[int, Expr] = {}
        sources: dict[int, Expr] = {}
        inside: list[Expr] = []
        for dim in outer:
            if dim == self.convolution.channel_dim:
                loop = self.loops.new("c", count)
                sources[dim] = self.loops.simplify(channel + loop.value)
            else:
                span, start = by_dim[dim]
                loop = self.loops.new("u", span.extent)
                sources[dim] = self._source(span, start, loop.value)
                inside += self._bounds(span, sources[dim])
            made.append(loop)
            where[dim] = loop.value
        if inner == self.convolution.channel_dim:
            copy = self._copy(where, sources, inner, channel, 1, self.imm(0), count)
            zeros = self._zeros(where, inner, self.imm(0), count)
        else:
            span, start = by_dim[inner]
            base = self._source(span, start, self.imm(0))
            step, extent = span.source_step, self.imm(span.extent)
            low = self._least(span.window.low - base, step, extent)
            high = self._least(span.window.high - base, step, extent)
            copy = seq(
                self._zeros(where, inner, self.imm(0), low),
                self._copy(where, sources, inner, base, step, low, high),
                self._zeros(where, inner, high, extent),
            )
            zeros = self._zeros(where, inner, self.imm(0), extent)
        body = copy
        if inside:
            body = tirx.IfThenElse(tirx.all(*inside), copy, zeros)
        for loop in reversed(made):
            body = loop.around(body)
        return body

    def _least(self, distance: Expr, step: int, extent: Expr) -> Expr:
        """The first element of a box that is `distance` or further from its start."""
        at = tirx.FloorDiv(distance + self.imm(step - 1), self.imm(step))
        return self.loops.simplify(tirx.Max(self.imm(0), tirx.Min(at, extent)))

    def _source(self, span: Span, start: Expr, at: Expr) -> Expr:
        """The element of the data that lies somewhere in a box."""
        window = span.window
        begin = tirx.FloorDiv(start, self.imm(window.expansion)) * self.imm(window.stride)
        return self.loops.simplify(begin + self.imm(span.first) + at * self.imm(span.source_step))

    def _bounds(self, span: Span, source: Expr) -> list[Expr]:
        """The conditions under which an element is no padding, but for those that always hold."""
        low, high = self.imm(span.window.low), self.imm(span.window.high)
        tests = (tirx.GE(source, low), tirx.LT(source, high))
        return [t for t in tests if not self.loops.analyzer.can_prove(t)]

    def _copy(
        self,
        where: dict[int, Expr],
        sources: dict[int, Expr],
        inner: int,
        base: Expr,
        step: int,
        low: Expr,
        high: Expr,
    ) -> tirx.Stmt:
        """Elements from `low` on and below `high` along the innermost dimension."""
        names = self.convolution.coordinates

        def ops(at: Expr, lane: Loop | None) -> list:
            point = Point(lane)
            here = {**sources, inner: self.loops.simplify(base + at * self.imm(step))}
            env = {names[d]: value for d, value in here.items()}
            value = Resolve(self.scope, env, point)(self.convolution.data)
            store = tirx.BufferStore(
                self.buffer, convert(value, self.dtype), self._at(where, inner, at)
            )
            return [*point.ops, store]

        return self._along(low, high, ops)

    def _zeros(self, where: dict[int, Expr], inner: int, low: Expr, high: Expr) -> tirx.Stmt:
        zero = constant(0, self.dtype)

        def ops(at: Expr, lane: Loop | None) -> list:
            return [tirx.BufferStore(self.buffer, zero, self._at(where, inner, at))]

        return self._along(low, high, ops)

    def _at(self, where: dict[int, Expr], inner: int, at: Expr) -> list[Expr]:
        return [self.loops.simplify({**where, inner: at}[d]) for d in self.order]

    def _along(self, low: Expr, high: Expr, ops) -> tirx.Stmt:
        """Points from `low` on and below `high`, by vectors as far as they go."""
        return by_vectors(self.loops, self.lanes, low, high, ops)


def by_vectors(loops, lanes: int, low: Expr, high: Expr, ops) -> tirx.Stmt:
    """``ops(at, lane)`` at each point from `low` on and below `high`, by vectors where they have
    such a form and as far as these go.
    """
    length = loops.simplify(high - low)
    size = number(length)

    def vector(first: Expr, width: int) -> tirx.Stmt:
        kind = ForKind.VECTORIZED if width > 1 else ForKind.SERIAL
        lane = loops.new("v", width, kind)
        found = ops(loops.simplify(first + lane.value), lane if width > 1 else None)
        if width > 1 and not has_vector_form(found):
            lane = loops.new("v", width)
            found = ops(loops.simplify(first + lane.value), None)
        return nest([lane], found)

    if size is None:
        whole = loops.new("i", loops.simplify(tirx.FloorDiv(length, loops.imm(lanes))))
        done = loops.simplify(low + tirx.FloorDiv(length, loops.imm(lanes)) * loops.imm(lanes))
        rest = loops.new("i", loops.simplify(high - done))
        return seq(
            whole.around(vector(low + whole.value * loops.imm(lanes), lanes)),
            rest.around(nest([], ops(loops.simplify(done + rest.value), None))),
        )
    count, rest = divmod(max(0, int(size)), lanes)
    whole = loops.new("i", count)
    first = loops.simplify(low + loops.imm(count * lanes))
    return seq(
        whole.around(vector(low + whole.value * loops.imm(lanes), lanes)) if count else None,
        *(vector(first + loops.imm(start), width) for start, width in pieces(rest, lanes)),
    )
