"""GEMM with mma.sync and cp.async: tensor cores of sm_80 and later, any layout and pitch.

A block computes one tile of one segment. Slices of A and B lie in a ring of stages in shared
memory; while one is multiplied, later ones are on their way: plain operands by cp.async, others
through registers, where they may be computed. Warps read fragments of the next mma.sync steps
(ldmatrix) while the present ones multiply.

    step i:   round 0      registers -> stage i - 2;  loads of step i + stages - 1
              round ...    ldmatrix of round r + 1, mma.sync of round r
              last round   wait for stage i + 1, barrier, ldmatrix of its round 0

Float32 may be multiplied in parts (`split`): by each warp, or, with wgmma, by warpgroups, which
multiply parts that the block writes to shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ....config import HardwareProfile
from ...contraction.reader import Contraction
from ...gpu.memory import shared_pool
from ...gpu.product_frame import Frame, Tile, ceil_div, open_kernel
from ...program.expr import constant, convert
from ..hopper.state import fence_shared
from ..side_by_side import grid_of
from .computed import Compute
from .epilogue import Epilogue, Layout
from .operand import Copy, Loader, Place, Shift
from .plan import Fragments, MmaConfig, Words
from .problem import PIECE, Loop, MmaSegment, Way, read_mma
from .rank import check_config, mma_ranked, parts_bytes, ring_bytes, table_bytes
from .split import GROUP_STEPS, PART_BUFFERS, GroupProducts, SplitProducts
from .units import (
    commit_async,
    load_matrices,
    multiply,
    round_tf32,
    shared_word,
    wait_async,
)
from .windows import Evaluate, Gather, WindowCopy

WORDS_AHEAD = 64
"""Registers that a thread's fragments leave behind the last step, beside its sums."""

LOADERS = {
    Way.COPY: Copy,
    Way.SHIFT: Shift,
    Way.WINDOW: WindowCopy,
    Way.GATHER: Gather,
    Way.EVALUATE: Evaluate,
    Way.COMPUTE: Compute,
}


def emit_gemm_mma(
    contraction: Contraction, hw: HardwareProfile, config: MmaConfig | None = None
) -> tirx.PrimFunc:
    """Write a contraction as one TIRx kernel on mma.sync.

    Parameters
    ----------
    contraction : Contraction
        float16 or bfloat16 operands of any layout, computed ones too (with sums in float32), plain
        8-bit integers and floats, float32 that the configuration rounds or splits; any epilogue,
        any sizes, symbolic ones too.
    hw : HardwareProfile
        A CUDA device with cp.async: sm_80 or later.
    config : MmaConfig, optional
        One of `mma_ranked`; the first where None.

    Returns
    -------
    func : tirx.PrimFunc
        With the parameters of the PrimFunc that the contraction was read from.

    Raises
    ------
    Unsupported
        For another architecture, dtypes that mma.sync does not take, a configuration that does not
        fit.
    """
    if config is None:
        config = mma_ranked(contraction, hw, None)[0][1]
    segments = read_mma(contraction, hw, config.takes_float32)
    check_config(segments, config, hw)
    with open_kernel(contraction) as frame:
        _Kernel(frame, segments, config).emit()
    return frame.func


def _unrolled(count: int) -> AbstractContextManager[Expr | int]:
    """A loop that is unrolled. One of a single turn is none: nvcc 13.0 takes its pragma for that of
    the loop around it, and unrolled all 224 steps of 14,336 terms (10,000 instructions).
    """
    return T.serial(count, unroll=True) if count > 1 else nullcontext(0)


def _words_of_rows(segment: MmaSegment, config: MmaConfig) -> int:
    """Registers of a thread for what the epilogue reads for each element: of 16 rows, and the next
    ones.
    """
    words = sum(load.words_of_piece for load in segment.loads if load.is_matrix)
    return words * (config.warp_n // PIECE) * min(2, config.tiles_m)


class _Kernel:
    """One kernel under construction."""

    def __init__(self, frame: Frame, segments: tuple[MmaSegment, ...], config: MmaConfig):
        self.frame, self.segments, self.config = frame, segments, config
        columns = segments[0].own_columns(config.block_n)  # of one with windows, or of all
        self.grid = grid_of(frame.index, frame.contraction, config.block_m, columns)

    def emit(self) -> None:
        c, tiles = self.config, self.grid.tiles
        T.device_entry()
        block = T.cta_id([tiles if isinstance(tiles, int) else convert(tiles, "int32")])
        self.thread = T.thread_id([c.threads])
        pool = shared_pool()
        self.ring = pool.alloc((ring_bytes(self.segments, c),), "uint8", align=1024, layout=None)
        size = parts_bytes(self.segments, c)
        self.parts = pool.alloc((size,), "uint8", align=1024, layout=None) if size else None
        words = table_bytes(self.segments, c) // 4
        self.table = pool.alloc((words,), "int32", align=16, layout=None) if words else None
        pool.commit()
        self.lane = T.Bind(self.thread % 32)
        warp = T.Bind(self.thread // 32)
        self.warp_row = T.Bind(warp % c.warps_m * c.warp_m)
        self.warp_column = T.Bind(warp // c.warps_m * c.warp_n)
        for number, own in self.grid.each_segment(self.grid.tile(block)):
            self._segment(own, self.segments[number])

    def _segment(self, tile: Tile, segment: MmaSegment) -> None:
        c = self.config
        tile = Tile(*(T.Bind(x) for x in (tile.batch, tile.m, tile.n)))
        sums: dict[Var, Expr] = {}
        for position, loop in enumerate(segment.loops):
            if position:
                T.evaluate(wait_async(0))
                T.evaluate(T.cuda.cta_sync())
            own = []
            for product in loop.products:
                if product.accumulator not in sums:
                    buffer = T.alloc_local((c.tiles_m * c.tiles_n * 4,), product.dtype)
                    with T.serial(c.tiles_m * c.tiles_n * 4, unroll=True) as i:
                        T.buffer_store(buffer, constant(0, product.dtype), [i])
                    sums[product.accumulator] = buffer
                own.append(sums[product.accumulator])
            _MainLoop(self, segment, loop, tile, own).emit()
        place = (self.thread, self.lane, self.warp_row, self.warp_column)
        size = ring_bytes(self.segments, c)
        layout = Layout(self.frame, segment, c, place)
        # Memory is waited for once in 16 rows and not at each 16 columns: three products with a
        # residual took 46.6, 26.1 and 18.9 us so, and 57.1, 27.4 and 19.2 (H200, 2026-11-27).
        ahead = _words_of_rows(segment, c) <= WORDS_AHEAD
        epilogue = Epilogue(layout, segment, tile, sums, self.ring, size, c.wide, by_parts=ahead)
        epilogue.begin()
        epilogue.emit()


class _MainLoop:
    """The steps of one loop of a tile."""

    def __init__(
        self, kernel: _Kernel, segment: MmaSegment, loop: Loop, tile: Tile, sums: list[Expr]
    ):
        self.kernel, self.loop, self.sums = kernel, loop, sums
        self.config = c = kernel.config
        self.frame = kernel.frame
        stage_bytes, start = c.stage_bytes(len(loop.b)), 0
        self.loaders: list[Loader] = []
        for source in (loop.a, *loop.b):
            place = Place(kernel.ring, stage_bytes, start)
            loader = LOADERS[source.way](kernel.frame, segment, source, c, loop.K, place)
            loader.prepare(tile, kernel.thread)
            self.loaders.append(loader)
            start += loader.panel.size
        self.copies = [x for x in self.loaders if x.is_async]
        self.others = [x for x in self.loaders if not x.is_async]
        self.tabled = [x for x in self.loaders if isinstance(x, Gather)]
        for loader in self.tabled:
            loader.table = kernel.table
        self.fragments = [
            (Words if x.panel.by_words else Fragments)(
                x.panel,
                x.source.side,
                kernel.lane,
                kernel.warp_row if x.source.side == "m" else kernel.warp_column,
            )
            for x in self.loaders
        ]
        # Two sets of registers: one is multiplied while the other is filled.
        self.a = T.alloc_local((2 * c.tiles_m * 4,), "uint32")
        self.b = [T.alloc_local((2 * c.tiles_n * 2,), "uint32") for _ in loop.b]
        split = c.split and loop.a.dtype == "float32"
        self.split = SplitProducts(c) if split and not c.wgmma else None
        self.groups = None
        if split and c.wgmma:
            self.groups = GroupProducts(self.loaders, c, kernel.parts, kernel.thread)

    def emit(self) -> None:
        c = self.config
        steps = ceil_div(self.loop.K, self.loaders[0].panel.terms)
        self.steps = steps if isinstance(steps, int) else T.Bind(convert(steps, "int32"))
        self._fill()
        if self.groups:
            self._split_by_block()
            return
        if c.is_deep and isinstance(self.steps, int):
            self._by_rings(self.steps)
            return
        with T.serial(0, self.steps, unroll=False) as step:
            stage, following = T.Bind(step % c.stages), T.Bind((step + 1) % c.stages)
            emit = self._split_step if self.split else self._step
            emit(step, stage, following)

    def _by_rings(self, steps: int) -> None:
        """The steps of a deep ring, a round of its stages at a time: addresses in shared memory are
        constants then. A step of 16 x 32 is 30 instructions so, with the remainder by 8 in each
        60, with that by 12 more; few warps wait for each of them.
        """
        stages = self.config.stages
        rounds, rest = divmod(steps, stages)
        if rounds:
            with T.serial(0, rounds, unroll=False) as number:
                for stage in range(stages):
                    self._step_at(T.Bind(number * stages + stage), stage)
        for stage in range(rest):
            self._step_at(T.int32(rounds * stages + stage), stage)

    def _step_at(self, step: Expr, stage: int) -> None:
        """A step whose stage is known."""
        stages = self.config.stages
        free = T.int32((stage - 1) % stages)
        self._step(step, T.int32(stage), T.int32((stage + 1) % stages), free)

    def _step(self, step: Expr, stage: Expr, following: Expr, free: Expr | None = None) -> None:
        """A step, a round at a time: the next one's fragments arrive in registers meanwhile. `free`
        is the stage of the step before, where it is known.
        """
        c = self.config
        for turn in range(c.rounds):
            last = turn == c.rounds - 1
            if last:
                T.evaluate(wait_async(c.stages - 2))
                T.evaluate(T.cuda.cta_sync())
            self._read(following if last else stage, (turn + 1) % c.rounds)
            if turn == 0:
                self._ahead(step, free)
            self._multiply(turn)

    def _split_step(self, step: Expr, stage: Expr, following: Expr) -> None:
        """A step of split operands, two rounds at a time: the fragments of the next two arrive in
        the registers of those that were split.
        """
        for turn in range(0, self.config.rounds, 2):
            last = turn == self.config.rounds - 2
            if turn == 0:
                self._ahead(step)
            if last:
                T.evaluate(wait_async(self.config.stages - 2))
                T.evaluate(T.cuda.cta_sync())
            source, behind = (following, 0) if last else (stage, turn + 2)
            self.split.take(self.a)
            self._read_pair(0, range(self.config.warp_m // 16), source, behind)
            for tile in range(self.config.warp_n // 16):
                for number, sums in enumerate(self.sums):
                    for column in (2 * tile, 2 * tile + 1):
                        self.split.multiply(self.b[number], sums, column)
                    self._read_pair(number + 1, [tile], source, behind)

    def _split_by_block(self) -> None:
        """All steps of operands that the block splits: parts of the next step are written while
        those of the present one are multiplied. A slice is brought one step earlier than elsewhere,
        since its stage is free as soon as it is split.
        """
        groups = self.groups
        self._ahead(T.int32(0))
        self._split_slice(T.int32(0))
        T.evaluate(T.cuda.cta_sync())
        with T.serial(0, ceil_div(self.steps, GROUP_STEPS), unroll=False) as window:
            first = T.Bind(window * GROUP_STEPS)
            count = T.Bind(tirx.Min(self.steps - first, T.int32(GROUP_STEPS)))
            with T.serial(0, count, unroll=False) as place:
                step = T.Bind(first + place)
                groups.begin(step % PART_BUFFERS, place > 0)
                groups.wait_for_step_before()
                T.evaluate(wait_async(self.config.stages - 2))
                T.evaluate(T.cuda.cta_sync())
                following = T.Bind(step + 1)
                self._ahead(following)
                with T.If(self._exists(following)), T.Then():
                    self._split_slice(following)
                groups.add(self.sums)
                T.evaluate(T.cuda.cta_sync())
            groups.finish(self.sums)

    def _split_slice(self, step: Expr) -> None:
        """Writes the parts of a step, which wgmma may read behind the next barrier."""
        c = self.config
        for number in range(len(self.loaders)):
            self.groups.split(number, step % c.stages, step % PART_BUFFERS)
        fence_shared()

    def _read_pair(self, number: int, tiles: Iterable[int], stage: Expr, turn: int) -> None:
        """Fragments of two rounds, of some tiles of an operand."""
        for tile in tiles:
            for half in range(2):
                self._read_tile(number, tile, stage, turn + half)

    def _fill(self) -> None:
        """The first steps' slices, and the first fragments."""
        whole = self.config.stages - 2
        if self.tabled:
            for step in range(self.config.stages):
                self._tabulate(T.int32(step))
            T.evaluate(T.cuda.cta_sync())
        if self.others:
            with T.serial(0, whole, unroll=False) as step:
                self._bring(step, stored=True)
        else:
            for step in range(whole):
                self._bring(T.int32(step), stored=True)
        self._bring(T.int32(whole), stored=False)
        T.evaluate(wait_async(self.config.stages - 2))
        T.evaluate(T.cuda.cta_sync())
        if self.groups:
            return
        self._read(T.int32(0), 0)
        if self.split:
            self._read(T.int32(0), 1)

    def _bring(self, step: Expr, stored: bool) -> None:
        """A slice for the stage of its number; `stored`: at once, where it passes registers."""
        with T.If(self._exists(step)), T.Then():
            for loader in self.copies:
                loader.copy(step, step)
            for loader in self.others:
                loader.load(step)
                if stored:
                    loader.store(step, step)
        T.evaluate(commit_async())

    def _tabulate(self, step: Expr) -> None:
        """What the terms of a step give, a barrier before they are loaded."""
        with T.If(self._exists(step)), T.Then():
            for loader in self.tabled:
                loader.tabulate(step)

    def _exists(self, step: Expr) -> Expr:
        return step < self.steps

    def _ahead(self, step: Expr, free: Expr | None = None) -> None:
        """What arrived in registers goes to its stage; the loads of a later step start."""
        c = self.config
        if self.others:
            late = T.Bind(step + (c.stages - 2))
            with T.If(self._exists(late)), T.Then():
                for loader in self.others:
                    loader.store(late, late % c.stages)
        ahead = T.Bind(step + (c.stages - 1))
        with T.If(self._exists(ahead)), T.Then():
            for loader in self.copies:
                loader.copy(ahead, ahead % c.stages if free is None else free)
            for loader in self.others:
                loader.load(ahead)
        if self.tabled:
            self._tabulate(T.Bind(step + c.stages))
        T.evaluate(commit_async())

    def _read(self, stage: Expr, turn: int) -> None:
        """Fragments of one round."""
        c = self.config
        for number in range(len(self.loaders)):
            registers = self.b[number - 1] if number else self.a
            tiles = (c.warp_n if number else c.warp_m) // 16
            for tile in range(tiles):
                self._read_tile(number, tile, stage, turn)
            if self.loop.a.dtype == "float32" and not self.split:
                with T.serial(tiles * 4, unroll=True) as i:
                    T.evaluate(round_tf32(registers.ptr_to([turn % 2 * tiles * 4 + i])))

    def _read_tile(self, number: int, tile: int, stage: Expr, turn: int) -> None:
        """Fragments of 16 rows of an operand, for one round."""
        loader, fragments = self.loaders[number], self.fragments[number]
        registers = self.b[number - 1] if number else self.a
        tiles = (self.config.warp_n if number else self.config.warp_m) // 16
        first = (turn % 2 * tiles + tile) * 4
        if loader.panel.by_words:
            for i in range(4):
                place = loader.place.at(stage, fragments.place(tile, turn, i))
                T.buffer_store(registers, shared_word(place), [first + i])
            return
        place = loader.place.at(stage, fragments.place(tile, turn))
        target = registers.ptr_to([first])
        T.evaluate(load_matrices(target, place, not loader.panel.k_major))

    def _multiply(self, turn: int) -> None:
        """The products of one round."""
        c, half = self.config, turn % 2
        for number, sums in enumerate(self.sums):
            dtypes = self.loop.a.dtype, self.loop.b[number].dtype
            with _unrolled(c.tiles_m) as i, _unrolled(c.tiles_n) as j:
                a = self.a.ptr_to([half * c.tiles_m * 4 + i * 4])
                b = self.b[number].ptr_to([half * c.tiles_n * 2 + j * 2])
                into = sums.ptr_to([(i * c.tiles_n + j) * 4])
                T.evaluate(multiply(*dtypes, self.loop.terms, into, a, b))
