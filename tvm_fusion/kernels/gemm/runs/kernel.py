"""Products of few terms by mma.sync, fragments of the data read straight from its runs.

    weights of the block's filters -> shared memory, lines filled up with zeros to multiples of 8,
        or, where those of a filter are no whole pieces of 16 bytes, as they lie in memory
    for each tile of positions:
        a residual of its first rows starts on its way to registers, those of others 16 rows ahead
        the lines of the next tile's data start on their way (cp.async)
        for 16 terms at a time:  fragments of A, of B (ldmatrix), mma.sync
        epilogue, as that of other products

Runs that lie apart are read by ldmatrix. Of others a thread reads what it holds of a position: two
neighbouring terms, a word of shared memory, whose address is that of the position and a constant.
Terms in front of a run and behind it are another position's: they are taken out, for zero times
infinity is no zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ....config import HardwareProfile
from ...gpu.frame import launch_bounds
from ...gpu.intrinsics import device_call
from ...gpu.memory import shared_pool
from ...gpu.product_frame import Frame, Tile, coordinates, divided, open_kernel
from ...program.expr import conjunction, constant, convert, variables
from ...program.extents import is_multiple, sized
from ..mma.epilogue import Epilogue, Layout
from ..mma.operand import always
from ..mma.plan import TERM_BYTES
from ..mma.problem import MmaSegment
from ..mma.units import CHUNK, copy_async, load_if, load_matrices, multiply, wait_async
from .patch import Patch, left_of, move_half
from .problem import OCTET, Runs
from .shape import ELEMENT, STAGES, RunsConfig, Shape

ROUND = 32
"""Weights that a thread has on their way at once, at most."""


def emit_runs(problem: Runs, hw: HardwareProfile, config: RunsConfig) -> tirx.PrimFunc:
    """Write a product of few terms as one TIRx kernel on mma.sync.

    Parameters
    ----------
    problem : Runs
        float16 or bfloat16, any epilogue.
    hw : HardwareProfile
        A CUDA device with cp.async: sm_80 or later.
    config : RunsConfig
        One of `rank_runs`.

    Returns
    -------
    func : tirx.PrimFunc
        With the parameters of the PrimFunc that the problem was read from.

    Raises
    ------
    Unsupported
        Where the configuration does not suit the problem.
    """
    shape = Shape(problem, config)
    shape.check(hw)
    with open_kernel(problem.contraction) as frame:
        _Kernel(frame, shape).emit(hw)
    return frame.func


class TileLayout(Layout):
    """Rows of a tile are numbers of its own; `origin` is its first position along each window."""

    def __init__(
        self, frame: Frame, shape: Shape, place: tuple[Expr, ...], origin: Mapping[int, Expr]
    ) -> None:
        super().__init__(frame, shape.problem.segment, shape.config, place)
        self.shape, self.origin = shape, origin

    def ragged_rows(self, segment: MmaSegment) -> bool:
        return any(self._is_ragged(i) for i in self.origin)

    def _is_ragged(self, window: int) -> bool:
        size = self.shape.problem.windows[window].size
        return not is_multiple(size, self.shape.extent(window))

    def position(self, window: int, row: Expr) -> Expr:
        """That of a tile's row along a window."""
        p, columns = self.shape.problem, self.shape.config.columns
        if window == p.inner:
            return self.origin[window] + convert(row % columns, self.frame.index)
        if window == p.below:
            return self.origin[window] + convert(row // columns, self.frame.index)
        return self.origin[window]

    def exists(self, segment: MmaSegment, row: Expr) -> Expr | None:
        windows = self.shape.problem.windows
        return conjunction(
            *(
                self.position(i, row) < sized(windows[i].size, self.frame.index)
                for i in self.origin
                if self._is_ragged(i)
            )
        )

    def existing_row(self, segment: MmaSegment, row: Expr) -> Expr:
        exists = self.exists(segment, row)
        return row if exists is None else T.Select(exists, row, constant(0, self.frame.index))

    def point(self, segment: MmaSegment, tile: Tile, row: Expr, column: Expr) -> dict[Var, Expr]:
        env: dict[Var, Expr] = {}
        for i, window in enumerate(self.shape.problem.windows):
            env |= coordinates(window.positions, self.position(i, row), self.frame)
        column = convert(column, self.frame.index)
        return env | coordinates(segment.segment.n, column, self.frame)


class _Kernel:
    """One kernel under construction."""

    def __init__(self, frame: Frame, shape: Shape) -> None:
        self.frame, self.shape, self.config = frame, shape, shape.config
        self.problem: Runs = shape.problem

    def emit(self, hw: HardwareProfile) -> None:
        s, c = self.shape, self.config
        slots = s.slots(hw)
        T.device_entry()
        block = T.cta_id([slots * s.column_tiles])
        self.thread = T.thread_id([c.threads])
        pool = shared_pool()
        stages = pool.alloc((STAGES * s.stage_bytes,), "uint8", align=16, layout=None)
        self.weights = pool.alloc((s.weight_bytes,), "uint8", align=16, layout=None)
        staging = max(16, s.staging_bytes)
        self.staging = pool.alloc((staging,), "uint8", align=16, layout=None)
        pool.commit()
        with launch_bounds(s.resident(hw)):
            self.lane = T.Bind(self.thread % 32)
            warp = T.Bind(self.thread // 32)
            self.warp_row = T.Bind(warp % c.warps_m * c.warp_m)
            self.warp_column = T.Bind(warp // c.warps_m * c.warp_n)
            self.column_tile = T.Bind(self._index(block % s.column_tiles))
            self.slot = T.Bind(block // s.column_tiles)
            self.patch = Patch(self.frame, s, stages, self.thread)
            self._emit(slots)

    def _index(self, value: Expr) -> Expr:
        return convert(value, self.frame.index)

    def _emit(self, slots: Expr | int) -> None:
        tiles = self.shape.row_tiles
        tiles = tiles if isinstance(tiles, int) else convert(tiles, "int32")
        if self.shape.weight_pieces:
            self._copy_weights()  # in one group with the first patch
        self.patch.load(self._origin(self.slot), T.int32(0))
        if not self.shape.weight_pieces:
            self._fill_weights()
        self._masks()
        if not self.patch.is_async:
            self.patch.store(T.int32(0))
        turns, _ = divided(tiles + slots - 1 - self.slot, slots)
        turns = T.Bind(turns)
        with T.serial(0, turns, unroll=False) as turn:
            number = T.Bind(self.slot + turn * slots)
            stage = T.Bind(turn % STAGES)
            sums = T.alloc_local((self.config.tiles_m * self.config.tiles_n * 4,), "float32")
            epilogue = self._epilogue(number, sums) if self.shape.words_ahead else None
            if epilogue is not None:
                epilogue.begin()
            if self.patch.is_async:
                T.evaluate(wait_async(0))
            T.evaluate(T.cuda.cta_sync())
            following = turn + 1 < turns
            with T.If(following), T.Then():
                self.patch.load(self._origin(T.Bind(number + slots)), 1 - stage)
            self._multiply(stage, sums)
            if not self.patch.is_async:
                with T.If(following), T.Then():
                    self.patch.store(1 - stage)
            (epilogue or self._epilogue(number, sums)).emit()

    def _origin(self, number: Expr) -> dict[int, Expr]:
        """The first position of a tile along each window."""
        s, found = self.shape, {}
        order = [self.problem.inner, *reversed(self.problem.others)]
        rest = self._index(number)
        for i in order:
            tiles, extent = s.tiles[i], s.extent(i)
            place = constant(0, self.frame.index)
            tiles = self.frame.size(tiles)
            if not isinstance(tiles, int) or tiles > 1:
                quotient, place = divided(rest, tiles)
                place, rest = T.Bind(place * extent), T.Bind(quotient)
            found[i] = place
        return found

    # ---- weights

    def _copy_weights(self) -> None:
        """The weights of the block's filters on their way to shared memory, as they lie there: in
        a line each that is filled up with zeros, or all behind each other.
        """
        s, p = self.shape, self.problem
        total, filters = s.weight_pieces, int(p.segment.N)
        each = -(-total // self.config.threads)
        parameter = self.frame.buffers[p.weights.load.source]
        parameter = parameter.ptr_to([0] * len(p.weights.load.indices))
        first = T.Bind(self.column_tile * (self.config.block_n * p.weight_step) + p.weight_base)
        end = p.weight_base + (filters - 1) * p.weight_step + p.run
        with T.serial(0, each, unroll=False) as turn:
            number = T.Bind(turn * self.config.threads + self.thread)
            inside = None
            if s.linear:
                target, element = number * CHUNK, number * OCTET
            else:
                filter, octet = T.Bind(number // (2 * s.steps)), T.Bind(number % (2 * s.steps))
                target = filter * s.weight_pitch + octet * CHUNK
                element = filter * p.weight_step + octet * OCTET
                inside = octet < s.octets if 2 * s.steps > s.octets else None
            place = T.Bind(first + self._index(element))
            at, left = convert(place, "int64") * ELEMENT, left_of(place, end, self.frame)
            exists = number < total if each * self.config.threads > total else None
            with T.If(always(exists)), T.Then():
                target = self.weights.ptr_to([target])
                T.evaluate(copy_async(CHUNK, target, parameter, at, inside, left))

    def _fill_weights(self) -> None:
        """All weights of the block's filters, several of a thread at once. Neighbouring threads
        have neighbouring filters where these are neighbours in memory, else neighbouring terms.
        """
        s, c = self.shape, self.config
        terms = s.steps * 2 * OCTET
        by_filter = self._lies_by_filter()
        near, far = (c.block_n, terms) if by_filter else (terms, c.block_n)
        lanes = max(1, c.threads // near)
        each = min(ROUND, -(-far // lanes))
        held = T.alloc_local((each,), self.problem.dtype)
        for start in range(0, near, c.threads):
            first, own = T.Bind(self.thread % near), T.Bind(self.thread // near)
            if lanes == 1:
                first, own = T.Bind(self.thread + start), T.int32(0)
            exists = tirx.And(first < near, own < lanes)
            with T.serial(0, -(-far // (lanes * each)), unroll=False) as turn:
                second = T.Bind(turn * (each * lanes) + own)

                def place(i: Expr, first: Expr = first, second: Expr = second) -> tuple:
                    other = second + i * lanes
                    return (first, other) if by_filter else (other, first)

                with T.serial(each, unroll=True) as i:
                    self._load_weight(held.ptr_to([i]), *place(i))
                with T.serial(each, unroll=True) as i:
                    filter, term = place(i)
                    with T.If(tirx.And(exists, second + i * lanes < far)), T.Then():
                        at = filter * s.weight_pitch + term * ELEMENT
                        move_half(self.weights.ptr_to([at]), held.ptr_to([i]))

    def _lies_by_filter(self) -> bool:
        """Whether neighbouring filters are neighbours in memory."""
        inner = self.problem.weights.load.indices[-1]
        return self.problem.segment.segment.n[-1].var in variables(inner)

    def _load_weight(self, target: Expr, filter: Expr, term: Expr) -> None:
        """A weight; 0 for terms that fill up lines, and filters that there are none of."""
        p, width = self.problem, self.shape.octets * OCTET
        line = T.Bind(term // width)
        within = T.Bind(term % width - self.shape.lead)
        number = self.column_tile * self.config.block_n + self._index(filter)
        inside = conjunction(
            line < p.lines,
            within >= 0,
            within < p.run,
            filter < self.config.block_n,
            number < constant(int(p.segment.N), self.frame.index),
        )
        line, within = self._index(line), self._index(within)
        env = coordinates(p.segment.segment.n, number, self.frame)
        tap = p.windows[p.inner].tap
        if tap is not None:
            env[tap.var] = within // p.unit
        channel = within % p.unit if tap is not None else within
        for i in reversed(p.others):
            if (tap := p.windows[i].tap) is not None:
                env[tap.var], line = line % p.windows[i].taps, line // p.windows[i].taps
        env |= coordinates(p.channels, channel if p.inside else line, self.frame)
        load = p.weights.load
        place = constant(0, self.frame.index)
        for index, extent in zip(
            self.frame.place(load.indices, env), load.source.ty.shape, strict=True
        ):
            place = place * constant(int(extent), self.frame.index) + index
        source = self.frame.buffers[load.source].ptr_to([0] * len(load.indices))
        mask = T.Select(inside, T.int32(1), T.int32(0))
        T.evaluate(load_if(ELEMENT, target, source, place, mask, T.int32(1)))

    # ---- products

    def _masks(self) -> None:
        """Which halves of a thread's word belong to a run, for the octets that hold others, too."""
        s = self.shape
        self.masks: dict[int, Expr] = {}
        for octet in range(s.octets):
            first = octet * OCTET - s.lead
            if first >= 0 and first + OCTET <= self.problem.run:
                continue
            at = self.lane % 4 * 2 + first
            parts = []
            for v, bits in enumerate((0xFFFF, 0xFFFF0000)):
                inside = tirx.And(at + v >= 0, at + v < self.problem.run)
                parts.append(T.Select(inside, T.uint32(bits), T.uint32(0)))
            self.masks[octet] = T.Bind(T.bitwise_or(*parts))

    def _multiply(self, stage: Expr, sums: Expr) -> None:
        """The sums of a tile."""
        s, c, p = self.shape, self.config, self.problem
        with T.serial(c.tiles_m * c.tiles_n * 4, unroll=True) as i:
            T.buffer_store(sums, T.float32(0), [i])
        self._places(stage)
        self._weight_place()
        a = T.alloc_local((2 * c.tiles_m * 4,), "uint32")
        b = T.alloc_local((2 * c.tiles_n * 2,), "uint32")
        offsets = s.line_offsets()
        self._read(0, a, b, offsets)
        for step in range(s.steps):
            if step + 1 < s.steps:
                self._read(step + 1, a, b, offsets)
            half = step % 2
            with T.serial(c.tiles_m, unroll=True) as i, T.serial(c.tiles_n, unroll=True) as j:
                left = a.ptr_to([half * c.tiles_m * 4 + i * 4])
                right = b.ptr_to([half * c.tiles_n * 2 + j * 2])
                into = sums.ptr_to([(i * c.tiles_n + j) * 4])
                T.evaluate(multiply(p.dtype, p.dtype, 2 * OCTET, into, left, right))

    def _weight_place(self) -> None:
        """Where a thread's row of the first of B's matrices starts, or its word of them."""
        s = self.shape
        if not s.linear:
            row = self.lane // 16 * 8 + self.lane % 8
            self.weight_place = T.Bind(
                (self.warp_column + row) * s.weight_pitch + self.lane // 8 % 2 * (TERM_BYTES // 2)
            )
            return
        at = (self.warp_column + self.lane // 4) * self.problem.weight_step
        at = at // 2 * 2 if s.weights_shifted else at
        self.weight_place = T.Bind((at + self.lane % 4 * 2) * ELEMENT)
        if s.weights_shifted:
            self.weight_shift = T.Bind(self.lane // 4 % 2 * 16)

    def _places(self, stage: Expr) -> None:
        """Where the runs of a thread's positions start in a stage, each with its lane's word; those
        of ldmatrix are rows of its matrices.
        """
        s, c, p = self.shape, self.config, self.problem
        lines = 0
        if p.below is not None:
            behind = p.others[p.others.index(p.below) + 1 :]
            lines = p.windows[p.below].stride * math.prod(s.spans[i] for i in behind)
        start = s.front - s.lead

        def place(row: Expr, term: Expr) -> Expr:
            at = row % c.columns * s.distance + start
            at = at // 2 * 2 if s.shifted else at
            line = row // c.columns * lines
            offset = (line * s.pitch + at + term) * ELEMENT
            return T.Bind(stage * s.stage_bytes + offset)

        if p.apart:
            first = self.warp_row + self.lane % 16
            term = self.lane // 16 * OCTET
            self.places = [place(first + i * 16, term) for i in range(c.tiles_m)]
            return
        first, term = self.warp_row + self.lane // 4, self.lane % 4 * 2
        self.places = [place(first + i * 8, term) for i in range(2 * c.tiles_m)]
        if s.shifted:
            self.shift = T.Bind((self.lane // 4 % 2 * p.step + start) % 2 * 16)

    def _read(self, step: int, a: Expr, b: Expr, offsets: list[int]) -> None:
        """Fragments of 16 terms."""
        s, c = self.shape, self.config
        half = step % 2
        for i in range(c.tiles_m):
            first = half * c.tiles_m * 4 + i * 4
            if self.problem.apart:
                self._matrices(step, i, a, first, offsets)
                continue
            for part in range(2):
                for below in range(2):
                    value = self._fragment(2 * step + part, i, below, offsets)
                    T.buffer_store(a, value, [first + part * 2 + below])
        for j in range(c.tiles_n if s.linear else 0):
            for part in range(2):
                value = self._weight_word(2 * step + part, j)
                T.buffer_store(b, value, [half * c.tiles_n * 2 + j * 2 + part])
        for j in range(0 if s.linear else c.warp_n // 16):
            place = self.weight_place + (j * 16 * s.weight_pitch + step * TERM_BYTES)
            target = b.ptr_to([half * c.tiles_n * 2 + j * 4])
            T.evaluate(load_matrices(target, self.weights.ptr_to([place]), False))

    def _matrices(self, step: int, tile: int, a: Expr, first: int, offsets: list[int]) -> None:
        """A's fragments of 16 terms, which may be those of two lines, or half of them zeros."""
        place = self.places[tile] + self._far(2 * step, offsets)
        last = 2 * step + 1 == len(offsets) * self.shape.octets
        if not last:
            far = self._far(2 * step + 1, offsets) - self._far(2 * step, offsets) - CHUNK
            place = place + self.lane // 16 * far if far else place
        source = self.patch.stages.ptr_to([place])
        T.evaluate(load_matrices(a.ptr_to([first]), source, False))
        if last:
            for part in range(2):
                T.buffer_store(a, T.uint32(0), [first + 2 + part])

    def _far(self, number: int, offsets: list[int]) -> int:
        """Bytes between the start of a run's line and an octet, of all of a row's."""
        line, octet = divmod(number, self.shape.octets)
        return (offsets[line] * self.shape.pitch + octet * OCTET) * ELEMENT

    def _fragment(self, number: int, tile: int, below: int, offsets: list[int]) -> Expr:
        """A thread's word of an octet, of its position in the upper or the lower half of a tile."""
        s = self.shape
        if number >= len(offsets) * s.octets:
            return T.uint32(0)
        place = self.places[2 * tile + below] + self._far(number, offsets)
        value = self._word(self.patch.stages.ptr_to([place]), self.shift if s.shifted else None)
        octet = number % s.octets
        return T.bitwise_and(value, self.masks[octet]) if octet in self.masks else value

    def _weight_word(self, octet: int, tile: int) -> Expr:
        """A thread's word of an octet, of its filter of 8; those behind the last term are 0."""
        s = self.shape
        if octet >= s.octets:
            return T.uint32(0)
        far = (tile * 8 * self.problem.weight_step + octet * OCTET) * ELEMENT
        source = self.weights.ptr_to([self.weight_place + far])
        value = self._word(source, self.weight_shift if s.weights_shifted else None)
        return T.bitwise_and(value, self.masks[octet]) if octet in self.masks else value

    def _word(self, source: Expr, shift: Expr | None) -> Expr:
        """Two neighbouring halves, of which the first one may be the upper one of a word."""
        if shift is None:
            body = "return *(const unsigned*)p;"
            return device_call("uint32", "shared_word", "const void* p", body, source)
        body = "const unsigned* w = (const unsigned*)p; return __funnelshift_r(w[0], w[1], shift);"
        arguments = "const void* p, int shift"
        return device_call("uint32", "shared_halves", arguments, body, source, shift)

    # ---- results

    def _epilogue(self, number: Expr, sums: Expr) -> Epilogue:
        """That of a tile."""
        place = (self.thread, self.lane, self.warp_row, self.warp_column)
        layout = TileLayout(self.frame, self.shape, place, self._origin(number))
        zero = constant(0, self.frame.index)
        tile = Tile(zero, zero, self.column_tile)
        held = {self.problem.accumulator: sums}
        segment, size = self.problem.segment, max(16, self.shape.staging_bytes)
        ring = self.staging, size
        return Epilogue(layout, segment, tile, held, *ring, own=True, by_parts=True)
