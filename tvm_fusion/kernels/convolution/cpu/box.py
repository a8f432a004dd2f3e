"""A box of the data that a task reads, copied with the zeros around it.

    box[c, u, v] = d[n, first_c + c, first_u + u, first_v + v], or 0 outside of its bounds

The copy holds what sums are computed in, in the order of the data's own dimensions: padding, half
precision and functions of the data cost a task's copy only, whatever number of filters reads it.
Data that is put together of parts along its channels is copied part by part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from tvm import tirx
from tvm.ir import Expr

from ...cpu.loops import Loop, Loops, seq
from ...cpu.nests.scope import Scope
from ...cpu.stages.resolve import Point, Resolve
from ...program.expr import bytes_of, constant, convert, dtype_of, number
from ...program.program import Extent
from ..geometry import Convolution, Window
from .apart import Apart
from .vectors import by_vectors

# A first-level cache: bytes of a line, and sets. Three quarters of the sets that can be reached are
# enough.
LINE_BYTES, CACHE_SETS, ENOUGH_SETS = 64, 64, 0.75


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
        Elements of the data that the box is of, one every `source_step`.
    runs : tuple of Run
        The taps, for each phase.
    streams : int
        In how many parts the box holds them: element u is the u // streams-th of part u % streams,
        so that what a tap meets at neighbouring positions lies side by side.
    lead, room : int
        Elements before the first one of a part, and of a part with these; of the latter 0 for just
        what it holds.
    """

    window: Window
    block: int
    stride: int
    source_step: int
    first: int
    extent: int
    runs: tuple[Run, ...]
    streams: int = 1
    lead: int = 0
    room: int = 0

    @property
    def part(self) -> int:
        """Elements of a part of the box, and of what stands before it."""
        return self.room or -(-self.extent // self.streams)

    @classmethod
    def of(cls, window: Window, block: int, packed: bool, apart: bool = False) -> Span:
        """The span of blocks of some positions; if `packed`, with no elements that no tap meets,
        where there is one tap; if `apart`, in as many parts as the window's stride.
        """
        phases = [window.phase_taps(p) for p in range(window.phases)]
        offsets = [at for phase in phases for _, at in phase]
        first, last = min(offsets, default=0), max(offsets, default=0)
        one_tap = packed and window.expansion == 1 and window.taps == 1
        stride, step = (1, window.stride) if one_tap else (window.stride, 1)
        in_phase = -(-block // window.expansion)
        extent = stride * (in_phase - 1) + last - first + 1
        runs = tuple(_run(n, phase, first) for n, phase in enumerate(phases))
        streams = stride if apart and window.expansion == 1 else 1
        return cls(window, block, stride, step, first, extent, runs, streams)

    def aligned(self, lanes: int, block: int) -> Span:
        """The same for rows whose data is stored by whole vectors, from one that begins a vector
        on, and of which only what `block` positions read is filled.

        Stores that cross cache lines take most of the time of a copy that few taps read: 3 x 3 of
        96 channels of 112 x 112, two apart, take 125 us without on a core of a Zen 5, 101 so.
        """
        if self.window.expansion > 1 or self.source_step > 1:
            return self
        shift = (self.first - self.window.low) % self.streams
        before = (self.window.low - self.first + shift) // self.streams
        lead, held = -before % lanes, -(-(self.extent + shift) // self.streams)
        return replace(
            self,
            first=self.first - shift,
            extent=self.extent + shift - (self.block - block) * self.stride,
            runs=tuple(replace(r, at=r.at + shift) for r in self.runs),
            lead=lead,
            room=-(-(lead + held) // lanes) * lanes,
        )

    def place(self, position: Expr, tap: Expr, loops: Loops) -> Expr:
        """Where the box holds what a tap, `tap` elements behind the first one, meets."""
        lead = loops.imm(self.lead)
        if self.streams == 1:
            return position * loops.imm(self.stride) + tap + lead
        streams = loops.imm(self.streams)
        part = tirx.FloorMod(tap, streams) * loops.imm(self.part)
        return part + tirx.FloorDiv(tap, streams) + position + lead


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
    along_last : bool
        Whether vectors run along the last window, which comes last then.
    """

    def __init__(
        self,
        convolution: Convolution,
        spans: Sequence[Span],
        channels: int,
        dtype: str,
        lanes: int,
        scope: Scope,
        along_last: bool = False,
    ) -> None:
        self.convolution, self.spans, self.lanes = convolution, spans, lanes
        self.scope, self.loops, self.dtype = scope, scope.loops, dtype
        dims = {s.window.dim: s.streams * s.part for s in spans}
        if convolution.channel_dim is not None:
            dims[convolution.channel_dim] = channels
        self.order = sorted(dims)
        if along_last:
            last = spans[-1].window.dim
            self.order = [*(d for d in self.order if d != last), last]
        shape = [dims[d] for d in self.order]
        if channels > 1 and self.order[0] == convolution.channel_dim:
            shape[-1] += _spread(channels, prod(shape[1:-1]), shape[-1], bytes_of(dtype))
        self.buffer = scope.allocate("box", shape, dtype)

    def imm(self, value: Extent) -> Expr:
        """A size as an index."""
        return self.loops.imm(value)

    def load(self, channel: Expr, at: Sequence[tuple[Expr, Expr]]) -> Expr:
        """An element: its channel, and for each window the position and where a tap of it lies."""
        where: dict[int | None, Expr] = {self.convolution.channel_dim: channel}
        for span, (position, tap) in zip(self.spans, at, strict=True):
            where[span.window.dim] = span.place(position, tap, self.loops)
        indices = [where[d] for d in self.order]
        return tirx.BufferLoad(self.buffer, [self.loops.simplify(i) for i in indices])

    def fill(self, starts: Sequence[Expr], channel: Expr, count: Expr) -> tirx.Stmt:
        """Copy the box of some positions of the results.

        Parameters
        ----------
        starts : sequence of Expr
            The first position of each window, a multiple of its expansion.
        channel, count : Expr
            The first channel, of all groups, and how many.
        """
        zero = self.imm(0)
        parts = self.convolution.sources
        if not parts:
            copy = self._fill(starts, channel, zero, count, self.convolution.data)
            return seq(self._ends(), copy)
        copies = []
        for part in parts:
            begin, end = self.imm(part.first) - channel, self.imm(part.end) - channel
            first = self.loops.simplify(tirx.Max(begin, zero))
            last = self.loops.simplify(tirx.Max(tirx.Min(end, count), first))
            copies.append(self._fill(starts, channel, first, last, part.placed))
        return seq(self._ends(), *copies)

    def _ends(self) -> tirx.Stmt | None:
        """Access to both ends of a row that begins with elements that nobody reads: TVM would leave
        out these, and what is aligned would not be.
        """
        if not self.spans[-1].lead:
            return None
        zero, before = constant(0, self.dtype), [self.imm(0)] * (len(self.order) - 1)
        ends = (0, int(self.buffer.ty.shape[-1]) - 1)
        return seq(*(tirx.BufferStore(self.buffer, zero, [*before, self.imm(at)]) for at in ends))

    def _fill(
        self, starts: Sequence[Expr], channel: Expr, first: Expr, last: Expr, data: Expr
    ) -> tirx.Stmt:
        """Copy the channels of the box from `first` on and below `last`, which are of `data`."""
        count = self.loops.simplify(last - first)
        *outer, inner = self.order
        by_dim = {s.window.dim: (s, i) for s, i in zip(self.spans, starts, strict=True)}
        together = self._holds_all(count)
        if together:
            *outer, inner = outer
        made: list[Loop] = []
        where: list[Expr] = []
        sources: dict[int, Expr] = {}
        inside: list[Expr] = []
        for dim in outer:
            if dim == self.convolution.channel_dim:
                loop = self.loops.new("c", count)
                at = self.loops.simplify(first + loop.value)
                sources[dim] = self.loops.simplify(channel + at)
            else:
                span, start = by_dim[dim]
                loop = self.loops.new("u", span.extent)
                at = loop.value
                sources[dim] = self._source(span, start, loop.value)
                inside += self._bounds(span, sources[dim])
            made.append(loop)
            where.append(at)
        if inner == self.convolution.channel_dim:
            row = _Row(where, sources, inner, channel, 1, first, first, last, last, 1, data)
        else:
            span, start = by_dim[inner]
            base, step = self._source(span, start, self.imm(0)), span.source_step
            extent, each = self.imm(span.extent), int(number(count)) if together else 1
            ends = (
                self._least(self.imm(end) - base, step, extent) * self.imm(each)
                for end in (span.window.low, span.window.high)
            )
            low, high = map(self.loops.simplify, ends)
            extent = self.imm(span.extent * each)
            zero = self.imm(0)
            row = _Row(where, sources, inner, base, step, zero, low, high, extent, each, data)
            row = replace(row, streams=span.streams, part=span.part, lead=span.lead)
        body = copy = self._row(row)
        if inside:
            body = tirx.IfThenElse(tirx.all(*inside), copy, self._no_row(row))
        for loop in reversed(made):
            body = loop.around(body)
        return body

    def _holds_all(self, count: Expr) -> bool:
        """Whether the channels lie innermost and all of them are in the box, so that elements of
        rows lie end to end.
        """
        *_, before, last = (-1, *self.order)
        dim = self.convolution.channel_dim
        if last != dim or before != self.spans[-1].window.dim or before + 1 != dim:
            return False
        if self.convolution.sources:
            return False
        held = number(count) == int(self.buffer.ty.shape[-1])
        return (
            held
            and self.convolution.groups == 1
            and self.spans[-1].source_step == 1
            and (number(count) == self._all_channels())
        )

    def _all_channels(self) -> int:
        filters, channels = self.convolution.filters_of_group, self.convolution.channels_of_group
        return filters if self.convolution.is_depthwise else channels

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

    def _row(self, row: _Row) -> tirx.Stmt:
        """A row with the zeros before and behind it."""
        if row.streams > 1:
            parts = self._apart(row)

            def element(at: Expr, point: Point) -> Expr:
                return self._element(row, at, [], point)

            zeros = parts.zeros(row.low, row.high, row.extent, constant(0, self.dtype))
            return seq(zeros, parts.copy(row.low, row.high, element))
        return seq(
            self._zeros(row, row.first, row.low),
            self._copy(row),
            self._zeros(row, row.high, row.extent),
        )

    def _no_row(self, row: _Row) -> tirx.Stmt:
        """A row that is padding."""
        if row.streams == 1:
            return self._zeros(row, row.first, row.extent)
        zero = constant(0, self.dtype)
        return self._apart(row).zeros(row.extent, row.extent, row.extent, zero)

    def _apart(self, row: _Row) -> Apart:
        return Apart(
            self.loops, self.lanes, self.buffer, row.where, row.streams, row.part, row.lead
        )

    def _copy(self, row: _Row) -> tirx.Stmt:
        """The elements of a row that are no padding."""

        def ops(at: Expr, lane: Loop | None) -> list:
            point = Point(lane)
            here, *inner = row.parts(at, self.loops)
            value = self._element(row, here, inner, point)
            return [*point.ops, tirx.BufferStore(self.buffer, value, row.place(here, inner))]

        return by_vectors(self.loops, self.lanes, row.low, row.high, ops, twice=True)

    def _element(self, row: _Row, here: Expr, inner: list[Expr], point: Point) -> Expr:
        """An element of the data: where it lies in its row, and behind that."""
        names = self.convolution.coordinates
        source = self.loops.simplify(row.base + here * self.imm(row.step))
        sources = {**row.sources, row.dim: source}
        if inner:
            sources[row.dim + 1] = inner[0]
        env = {names[d]: i for d, i in sources.items()}
        return convert(Resolve(self.scope, env, point)(row.data), self.dtype)

    def _zeros(self, row: _Row, low: Expr, high: Expr) -> tirx.Stmt:
        zero = constant(0, self.dtype)

        def ops(at: Expr, lane: Loop | None) -> list:
            here, *inner = row.parts(at, self.loops)
            return [tirx.BufferStore(self.buffer, zero, row.place(here, inner))]

        return by_vectors(self.loops, self.lanes, low, high, ops)


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """A row of a box: of elements `first` to `extent`, `low` to `high` are those of `data` from
    `base` on, `step` apart along `dim`, at `sources` of the other dimensions; or `each` channels of
    them, which lie in the dimension behind; or taken apart, in `streams` parts of `part` elements,
    the first `lead` of which nobody reads.
    """

    where: list[Expr]
    sources: dict[int, Expr]
    dim: int
    base: Expr
    step: int
    first: Expr
    low: Expr
    high: Expr
    extent: Expr
    each: int
    data: Expr
    streams: int = 1
    part: int = 0
    lead: int = 0

    def place(self, here: Expr, inner: Sequence[Expr]) -> list[Expr]:
        """Where the box holds an element of the row."""
        first = here + constant(self.lead, dtype_of(here)) if self.lead else here
        return [*self.where, first, *inner]

    def parts(self, at: Expr, loops: Loops) -> list[Expr]:
        """Where an element of the row lies along the innermost dimensions."""
        if self.each == 1:
            return [at]
        each = loops.imm(self.each)
        return [loops.simplify(f(at, each)) for f in (tirx.FloorDiv, tirx.FloorMod)]


def _spread(channels: int, rows: int, length: int, size: int) -> int:
    """Elements to add to each row so that channels, which are read one after the other, do not meet
    in the same sets of the first-level cache.
    """

    def sets(more: int) -> int:
        step = rows * (length + more) * size
        return len({c * step // LINE_BYTES % CACHE_SETS for c in range(min(channels, CACHE_SETS))})

    options = range(LINE_BYTES // size)
    enough = max(map(sets, options)) * ENOUGH_SETS
    return next(more for more in options if sets(more) >= enough)
