"""The producer: one thread that keeps the ring of A and B tiles full, ahead into coming tiles."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...gpu.product_frame import Grid, Tile
from ..side_by_side import SegmentGrid
from .model import BOX, STEP_BYTES, HopperSegment, WindowPart, Windows
from .state import Hopper, Ring, expect, wait

AHEAD_TAPS = 1
"""Taps before the first one beside which a box is computed, behind whose weights it is asked for:
late, for the request waits until the step before is over, and further weights wait behind it."""


def first_computing(taps: int) -> int:
    """The first tap of a step beside which the box of the next one is computed."""
    return min(taps // 2, 4)


def emit_producer(kernel: Hopper) -> None:
    """Emits the loop of the producer thread."""
    ring = Ring(kernel.plan.config.stages, 1)
    terms = _terms(kernel)
    if kernel.problem.streams:
        _emit_streams(kernel, terms, ring)
        return
    arriving = kernel.step_bytes()
    with T.serial(0, kernel.turns) as turn:
        tile = _kept(kernel.grid, kernel.tile(turn))
        if kernel.shared.resume is not None:
            # The stages hold partial sums of other blocks until the consumers have read them.
            with T.If(turn > 0), T.Then():
                wait(kernel.shared.resume.ptr_to([0]), (turn + 1) % 2)
        terms.begin(tile)
        with T.serial(0, kernel.steps_of(tile), unroll=False) as step:
            barrier = kernel.shared.full.ptr_to([ring.stage])
            _wait_until_empty(kernel, ring)
            expect(barrier, arriving)
            term = terms.at(step)
            if kernel.problem.shared:
                terms.load_a(0, tile, term, ring.stage, barrier)
            for number, own in kernel.grid.each_segment(tile):
                if not kernel.problem.shared:
                    terms.load_a(number, own, term, ring.stage, barrier)
                for place, tap in enumerate(terms.taps(number)):
                    _load_b(kernel, number, own, term | tap, ring.stage, barrier, place)
                terms.advance(number)
            ring.advance()
    if kernel.plan.config.multicast > 1:
        # The block lives until the others have handed back its last stages.
        with T.serial(0, kernel.plan.config.stages, unroll=False):
            _wait_until_empty(kernel, ring)
            ring.advance()


def _emit_streams(kernel: Hopper, terms: Terms | Taps, ring: Ring) -> None:
    """Emits the loop where A comes into stages of its own, and the weights of each tap into one of
    theirs. A box comes some taps before the step before its own ends, which computes it.
    """
    data = Ring(kernel.plan.data_stages, 1)
    ahead = max(0, first_computing(kernel.problem.taps) - AHEAD_TAPS)

    def bring(tile: Tile) -> None:
        wait(kernel.shared.free.ptr_to([data.stage]), data.phase)
        barrier = kernel.shared.brought.ptr_to([data.stage])
        expect(barrier, kernel.plan.data_bytes)
        terms.load_a(0, tile, terms.at(0), data.stage, barrier)
        data.advance()

    with T.If(kernel.turns > 0), T.Then():
        tile = kernel.tile(T.int32(0))
        terms.begin(tile)
        bring(tile)
    with T.serial(0, kernel.turns) as turn:
        tile = _kept(kernel.grid, kernel.tile(turn))
        steps = kernel.steps_of(tile)
        with T.serial(0, steps, unroll=False) as step:
            term = {name: T.Bind(place) for name, place in terms.at(step).items()}
            for number, tap in enumerate(terms.taps(0)):
                _wait_until_empty(kernel, ring)
                full = kernel.shared.full.ptr_to([ring.stage])
                expect(full, kernel.plan.transaction_bytes)
                _load_b(kernel, 0, tile, term | tap, ring.stage, full)
                ring.advance()
                if number != ahead:
                    continue
                with T.If(step + 1 < steps):
                    with T.Then():
                        terms.advance(0)
                        bring(tile)
                    with T.Else(), T.If(turn + 1 < kernel.turns), T.Then():
                        following = kernel.tile(turn + 1)
                        terms.begin(following)
                        bring(following)


def _kept(grid: Grid | SegmentGrid, tile: Tile) -> Tile:
    """The tile, its coordinates in registers where they come of divisions by sizes that are not
    known: these would stay in the loop over the terms.
    """
    if isinstance(grid, SegmentGrid) or isinstance(grid.per_batch, int):
        return tile
    return tile.in_registers()


def _wait_until_empty(kernel: Hopper, ring: Ring) -> None:
    """Waits until all blocks that read the present stage are through with it."""
    wait(kernel.shared.empty.ptr_to([ring.stage]), ring.phase)


class Terms:
    """A's tiles are rows of a matrix, and a step's terms lie behind each other."""

    def __init__(self, kernel: Hopper) -> None:
        self.kernel = kernel

    def begin(self, tile: Tile) -> None:
        """Emits what comes before the steps of a tile."""

    def at(self, step: Expr) -> dict[str, Expr]:
        """Where the terms of a step start."""
        kernel = self.kernel
        return {"k": T.Bind((kernel.first_step + step) * kernel.problem.block_k)}

    def load_a(
        self, number: int, tile: Tile, term: dict[str, Expr], stage: Expr, barrier: Expr
    ) -> None:
        """The tile of A, of map `number`."""
        kernel, plan = self.kernel, self.kernel.plan
        at = {"batch": tile.batch, "m": tile.m * plan.config.block_m} | term
        panels = 1 if kernel.problem.a.k_major else plan.config.block_m // BOX
        for panel in range(panels):
            target = kernel.shared.a.ptr_to([stage, panel * BOX * STEP_BYTES])
            place = at | {"m": at["m"] + panel * BOX}
            plan.a_maps[number][0].load(target, kernel.maps.a[number][0], place, barrier)

    def taps(self, number: int) -> list[dict[str, Expr]]:
        """Where a segment's weights of a step are, beside its terms: one place for each tile."""
        return [{}]

    def advance(self, number: int) -> None:
        """Emits the way to a segment's next step."""


class TapCounter:
    """Counts the channels and taps of a convolution's steps: a division in each step costs small
    tiles 5 to 24 % (measured on a prototype in CUDA on an H200, 2026-11-23). `state` holds the
    first channel of a step, then its tap along each window that slides.
    """

    def __init__(self, kernel: Hopper) -> None:
        self.kernel = kernel
        self.windows = [segment.windows for segment in kernel.problem.segments]
        most = max(len(windows.sliding) for windows in self.windows)
        self.state = T.alloc_local((1 + most,), "int32")

    def restart(self) -> None:
        """Emits the way to the first step of a tile."""
        first = self.kernel.first_step
        if isinstance(first, int):
            places = [T.int32(0)] * int(self.state.shape[0])
        else:
            places = self._places(self.windows[0], first)
        for i, place in enumerate(places):
            T.buffer_store(self.state, place, [i])

    def _places(self, windows: Windows, step: Expr) -> list[Expr]:
        """Channel and taps of a step."""
        per_tap = windows.channels // self.kernel.problem.block_k
        rest = T.Bind(step // per_tap)
        taps = []
        for position in reversed(windows.sliding):
            taps.append(rest % windows.taps[position])
            rest = rest // windows.taps[position]
        return [step % per_tap * self.kernel.problem.block_k, *taps[::-1]]

    def advance(self, number: int) -> None:
        """Emits the way to the next channels, or to the first ones of the next tap."""
        windows = self.windows[number]
        last = len(windows.sliding) - 1
        self._count(
            0, self.kernel.problem.block_k, windows.channels, lambda: self._next(windows, last)
        )

    def _next(self, windows: Windows, place: int) -> None:
        if place >= 0:
            taps = windows.taps[windows.sliding[place]]
            self._count(1 + place, 1, taps, lambda: self._next(windows, place - 1))

    def _count(self, place: int, step: int, end: int, carry: Callable[[], None]) -> None:
        """Emits a counter's step; at its end it starts again, and the next one is counted."""
        T.buffer_store(self.state, self.state[place] + step, [place])
        with T.If(self.state[place] == end), T.Then():
            T.buffer_store(self.state, T.int32(0), [place])
            carry()


class Taps(TapCounter):
    """A's tiles are boxes of windows (see `Windows`), and a step is a tap and some channels, all of
    them in one part of A. Where each box of each part starts is kept for a tile.
    """

    def __init__(self, kernel: Hopper) -> None:
        super().__init__(kernel)
        self.boxes = kernel.plan.a_rows // BOX
        self.parts = [_parts(segment) for segment in kernel.problem.segments]
        self.count = self.boxes * len(self.windows[0].names)
        self.starts = T.alloc_local((self.count * len(self.parts[0]),), "int32")

    def begin(self, tile: Tile) -> None:
        """Emits the first positions of a tile's boxes, and its first tap."""
        for number, own in self.kernel.grid.each_segment(tile):
            self._begin(number, own)
        self.restart()

    def _begin(self, number: int, tile: Tile) -> None:
        for place, part in enumerate(self.parts[number]):
            self._begin_part(part.windows, tile, place * self.count)

    def _begin_part(self, windows: Windows, tile: Tile, place: int) -> None:
        plan, count = self.kernel.plan, len(windows.names)
        for box in range(self.boxes):
            firsts = windows.first(tile.m * (plan.config.block_m // BOX) + box)
            for i, first in enumerate(firsts):
                start = first * windows.strides[i] - windows.before[i]
                if windows.rims and windows.dilations[i] < 0:
                    start = start - windows.reach[i]
                T.buffer_store(self.starts, start, [place + box * count + i])

    def at(self, step: Expr) -> dict[str, Expr]:
        """Where the terms of a step start."""
        return {"k": self.state[0]}

    def taps(self, number: int) -> list[dict[str, Expr]]:
        """Where a segment's weights of a step are, beside its terms."""
        windows = self.windows[number]
        found = T.int32(windows.first_tap)
        for place, position in enumerate(windows.sliding):
            found = found + self.state[1 + place] * windows.tap_steps[position]
        return [{"tap": found}]

    def load_a(
        self, number: int, tile: Tile, term: dict[str, Expr], stage: Expr, barrier: Expr
    ) -> None:
        """The boxes of a tile of A."""

        def load(place: int) -> None:
            part, *others = self.parts[number][place:]
            if not others:
                self._load_part(number, place, tile, term, stage, barrier)
                return
            with T.If(term["k"] < part.end):
                with T.Then():
                    self._load_part(number, place, tile, term, stage, barrier)
                with T.Else():
                    load(place + 1)

        load(0)

    def _load_part(
        self,
        number: int,
        place_of: int,
        tile: Tile,
        term: dict[str, Expr],
        stage: Expr,
        barrier: Expr,
    ) -> None:
        kernel, plan, part = self.kernel, self.kernel.plan, self.parts[number][place_of]
        windows, found = part.windows, plan.a_maps[number][place_of]
        first, count = place_of * self.count, len(part.windows.names)
        if part.first:
            term = term | {"k": term["k"] - part.first}
        for box in range(self.boxes):
            place = {"batch": tile.batch} | term
            if windows.group_channels:
                place["k"] = term["k"] + tile.batch * windows.group_channels
            for i, name in enumerate(windows.names):
                place[name] = self.starts[first + box * count + i]
            for tap, i in enumerate(self._sliding(windows)):
                name = windows.names[i]
                place[name] = place[name] + self._distance(windows, i, self.state[1 + tap])
            target = kernel.shared.a.ptr_to([stage, box * kernel.problem.box_bytes])
            found.load(target, kernel.maps.a[number][place_of], place, barrier)

    def _distance(self, windows: Windows, i: int, tap: Expr) -> Expr:
        """How far a tap of a window is from where its box starts."""
        found = tap * windows.dilations[i]
        if windows.repeats[i] == 1:
            return found
        return T.truncdiv(found + windows.offsets[i], T.int32(windows.repeats[i]))

    def _sliding(self, windows: Windows) -> tuple[int, ...]:
        """The windows whose tap tells where a box starts."""
        return windows.sliding


class Rims(Taps):
    """A's tiles are boxes of windows with their rims, and a step is some channels of all taps."""

    def begin(self, tile: Tile) -> None:
        """Emits the first elements of a tile's boxes, and its first channel."""
        for number, own in self.kernel.grid.each_segment(tile):
            self._begin(number, own)
        first = self.kernel.first_step
        start = T.int32(first) if isinstance(first, int) else first
        T.buffer_store(self.state, start * self.kernel.problem.block_k, [0])

    def taps(self, number: int) -> list[dict[str, Expr]]:
        """Where a segment's weights of a step are, beside its terms."""
        return [{"tap": T.int32(tap)} for tap, _ in self.windows[number].taps_of_step]

    def advance(self, number: int) -> None:
        """Emits the way to the next channels."""
        T.buffer_store(self.state, self.state[0] + self.kernel.problem.block_k, [0])

    def _sliding(self, windows: Windows) -> tuple[int, ...]:
        return ()


def _parts(segment: HopperSegment) -> tuple[WindowPart, ...]:
    """The parts of A; one where it lies in one tensor."""
    windows = segment.windows
    return segment.parts or (WindowPart(0, windows.channels, windows, segment.a),)


def _terms(kernel: Hopper) -> Terms | Taps:
    if not kernel.problem.has_windows:
        return Terms(kernel)
    return Rims(kernel) if kernel.problem.taps > 1 else Taps(kernel)


def _load_b(
    kernel: Hopper,
    number: int,
    tile: Tile,
    term: dict[str, Expr],
    stage: Expr,
    barrier: Expr,
    place_in_stage: int = 0,
) -> None:
    """The tiles of B of one segment; those of a pair are one operand of wgmma.

    Blocks that share them take turns in loading their pieces for all.
    """
    plan, blocks = kernel.plan, kernel.plan.config.multicast
    at = {"batch": tile.batch, "n": tile.n * plan.out_n} | term
    k_major = kernel.problem.segments[number].b[0].k_major
    width = plan.out_n // blocks if k_major else BOX
    pieces = plan.out_n // width  # of each product
    for piece in range(len(plan.b_maps[number]) * pieces):
        product, first = divmod(piece, pieces)
        mine = tirx.IntImm("bool", 1)
        if blocks > 1 and pieces % blocks:
            mine = tirx.EQ(kernel.rank, piece % blocks)
        elif blocks > 1:
            # Without branches, which take registers: one of as many neighbours as there are blocks.
            if first % blocks:
                continue
            first = first + kernel.rank
        with T.If(mine), T.Then():
            column = first * width
            row = place_in_stage * plan.config.block_n + product * plan.out_n + column
            target = kernel.shared.b.ptr_to([stage, row * STEP_BYTES])
            place = at | {"n": at["n"] + column}
            handle = kernel.maps.b[number][product]
            plan.b_maps[number][product].load(target, handle, place, barrier, blocks)
