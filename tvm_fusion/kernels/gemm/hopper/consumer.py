"""A consumer warpgroup: 64 rows of every tile, wgmma over the steps, the epilogue between them."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...gpu.product_frame import Tile
from ...program.expr import HALF_DTYPES, bytes_of
from .epilogue import Epilogue
from .fragments import fragments_of
from .in_place import InPlace
from .layout import Layout
from .model import BOX, STEP_BYTES, WGMMA_BYTES
from .producer import first_computing
from .state import (
    Hopper,
    Ring,
    add_floats,
    arrive_at,
    expect,
    fence_shared,
    place_in,
    release,
    release_data,
    send_to,
    wait,
    warpgroup_sync,
)

# Blocks of a cluster that split the terms of a tile add up their sums in each other's memory.
#
# Every block stores its own share of the tile's columns, so it needs the others' sums of them:
#
#     all stages of all blocks drained -> push the others' shares into their stages' memory
#     -> what the others have pushed is there -> add it to the own share, in the order of the blocks
#
# The own share then lies in the accumulators of the first columns, where the epilogue looks for it.

# Accumulators that one store moves.
VECTOR = 4


class Exchange:
    """Emits the exchange of a consumer warpgroup's accumulators `sums`."""

    def __init__(self, kernel: Hopper, layout: Layout, sums: Expr):
        self.kernel, self.plan, self.layout, self.sums = kernel, kernel.plan, layout, sums
        self.split = kernel.plan.config.split
        self.size = kernel.plan.accumulators // self.split
        self.own = T.alloc_local((self.size,), "float32")

    def emit(self, turn: Expr) -> None:
        """Emits the exchange at the end of a tile."""
        self._wait_until_drained(turn)
        for target in range(self.split):
            with T.If(self.kernel.rank == target):
                with T.Then():
                    for i, at in enumerate(self._share(target)):
                        T.buffer_store(self.own, self.sums[at], [i])
                with T.Else():
                    self._push(target)
        wait(self._summed(), turn % 2)
        for slot in range(self.split - 1):
            for i in range(0, self.size, VECTOR):
                place = self.kernel.shared.partial.ptr_to([self._place(slot, i)])
                T.evaluate(add_floats(place, self.own.ptr_to([i])))
        for i, at in enumerate(self._share(0)):
            T.buffer_store(self.sums, self.own[i], [at])
        self._resume()

    def _share(self, rank: int) -> Iterator[int]:
        """The accumulators of the columns that block `rank` stores, of both halves of a pair."""
        products = len(self.kernel.problem.segments[0].products)
        columns = self.plan.share_n // 2
        for product in range(products):
            start = product * self.plan.out_n // 2 + rank * columns
            yield from range(start, start + columns)

    def _place(self, slot: Expr | int, i: int) -> Expr:
        """Where this thread's accumulators `i` and behind lie in what another block sends."""
        consumer = slot * self.plan.consumers + self.layout.number
        vector = consumer * (self.size // VECTOR) + i // VECTOR
        return (vector * 128 + self.layout.thread) * VECTOR

    def _push(self, target: int) -> None:
        """Stores the share of block `target` in its memory: the blocks before it come first."""
        rank = self.kernel.rank
        slot = T.Bind(rank - T.cast(rank > target, "int32"))
        start = self.kernel.shared.partial.ptr_to([self._place(slot, 0)])
        base = T.Bind(place_in(start, T.int32(target)))
        barrier = T.Bind(place_in(self._summed(), T.int32(target)))
        share = list(self._share(target))
        for i in range(0, self.size, VECTOR):
            values = [self.sums[at] for at in share[i : i + VECTOR]]
            place = base + T.uint32(i // VECTOR * 128 * VECTOR * 4)
            T.evaluate(send_to(place, values, barrier))

    def _summed(self) -> Expr:
        return self.kernel.shared.summed.ptr_to([self.layout.number])

    def _wait_until_drained(self, turn: Expr) -> None:
        warpgroup_sync(self.layout.number)
        barrier = self.kernel.shared.drained.ptr_to([0])
        with T.If(self.layout.thread == 0), T.Then():
            expect(self._summed(), (self.split - 1) * self.size * 128 * 4)
        with T.If(self.layout.thread < self.split), T.Then():
            T.evaluate(arrive_at(barrier, self.layout.thread))
        wait(barrier, turn % 2)

    def _resume(self) -> None:
        """The producer may fill the stages again once both warpgroups have read."""
        fence_shared()
        warpgroup_sync(self.layout.number)
        with T.If(self.layout.thread == 0), T.Then():
            barrier = self.kernel.shared.resume.ptr_to([0])
            T.evaluate(T.ptx.mbarrier.arrive.shared.b64(barrier, T.uint32(1)))


# Descriptor fields for the 128-byte swizzle, which is taken of addresses, so that a tile may start
# at any row; the stride between groups of 8 rows is in units of 16 bytes.
GROUP_STRIDE = 8 * STEP_BYTES // 16
SWIZZLE_128B = 3


class Consumer:
    """Emits the code of the consumer warpgroups."""

    def __init__(self, kernel: Hopper, number: Expr):
        self.kernel, self.plan, self.number = kernel, kernel.plan, number
        self.promote = self.plan.config.promote
        self.sums = T.alloc_local((self.plan.accumulators,), "float32")
        self.partial = self.sums
        if self.promote:
            self.partial = T.alloc_local((self.plan.accumulators,), "float32")
        a, b = kernel.problem.a, kernel.problem.segments[0].b[0]
        windows = kernel.problem.segments[0].windows
        rows = 8 if windows is None else windows.group_rows
        place = number * kernel.problem.box_bytes
        self.a_start = self._descriptor(kernel.shared.a, a.k_major, place, rows)
        self.b_start = self._descriptor(kernel.shared.b, b.k_major, 0)
        self.taps = [(0, 0)] if kernel.problem.taps == 1 else windows.taps_of_step
        self.a_step = self._step(a.k_major)
        self.b_step = self._step(b.k_major)
        self.steps = self.kernel.steps
        self.ring = Ring(self.plan.config.stages, 0)
        self.epilogue = Epilogue(kernel, number, self.sums)
        split = self.plan.config.split > 1
        self.exchange = Exchange(kernel, self.epilogue.layout, self.sums) if split else None
        self.streams = kernel.problem.streams
        self.data = Ring(self.plan.data_stages, 0) if self.streams else None
        self.in_place = InPlace(kernel, self.epilogue.layout) if self.streams else None
        self.fragments = None if self.streams else fragments_of(kernel, self.epilogue.layout)

    def _descriptor(self, buffer: Expr, k_major: bool, offset: Expr | int, rows: int = 8) -> Expr:
        """The matrix descriptor of a tile in stage 0, its groups of 8 rows so many rows apart.

        The leading offset is the distance of panels of 64 contiguous rows; not used where terms are
        contiguous, since one row of the swizzle is a whole step then.
        """
        found = T.alloc_local((1,), "uint64")
        leading = 1 if k_major else BOX * STEP_BYTES // 16
        T.evaluate(
            T.cuda.wgmma.encode_matrix_descriptor(
                found.ptr_to([0]),
                buffer.ptr_to([0, offset]),
                leading,
                rows * GROUP_STRIDE // 8,
                SWIZZLE_128B,
            )
        )
        return found

    def _step(self, k_major: bool) -> int:
        """Distance of the terms of two wgmmas in units of 16 bytes."""
        terms = WGMMA_BYTES // bytes_of(self.kernel.problem.dtype)
        return (WGMMA_BYTES if k_major else terms * STEP_BYTES) // 16

    def emit(self) -> None:
        """Emits the loop over tiles."""
        plan = self.plan
        self.epilogue.start()
        if self.in_place is not None:
            with T.If(self.kernel.turns > 0), T.Then():
                self.in_place.begin(self.kernel.tile(T.int32(0)))
                self.in_place.ahead(T.int32(0))
                self.in_place.compute(0, 1)
                self.in_place.finish()
        with T.serial(0, self.kernel.turns) as turn:
            tile = self.kernel.tile(turn)
            if self.promote:
                for i in range(plan.accumulators):
                    T.buffer_store(self.sums, T.float32(0), [i])
            self.steps = self.kernel.steps_of(tile)
            if self.fragments is not None:
                self.fragments.begin(tile)
                self.fragments.ahead(tile, 0)
            if plan.config.deferred:
                self._steps_with_epilogue(turn, tile)
            else:
                if self.promote:
                    self._windows(tile)
                elif self.streams:
                    with T.serial(0, self.steps) as step:
                        self._taps_of(turn, step, tile)
                else:
                    with T.serial(0, self.steps) as step:
                        self._step_of(step, tile)
                    self._drain()
                self.epilogue.prepare(tile)
                if self.exchange is not None:
                    self.exchange.emit(turn)
                self.epilogue.scale(tile)
                self.epilogue.now(turn, tile)
        if plan.config.deferred:
            # With symbolic sizes a block may have had no tile.
            with T.If(self.kernel.turns > 0), T.Then():
                for chunk in range(plan.chunks):
                    self.epilogue.chunk(chunk)
        self.epilogue.finish()

    def _steps_with_epilogue(self, turn: Expr, tile: Tile) -> None:
        """The first steps carry the epilogue of the tile before."""
        plan = self.plan
        for step in range(plan.peeled):
            self._step_of(step, tile)
            first = step * plan.chunks_per_step
            with T.If(turn > 0), T.Then():
                for chunk in range(first, min(first + plan.chunks_per_step, plan.chunks)):
                    self.epilogue.chunk(chunk)
        with T.serial(plan.peeled, self.steps) as step:
            self._step_of(step, tile)
        self._drain()
        self.epilogue.keep(turn, tile)

    def _step_of(self, step: Expr | int, tile: Tile, place: Expr | int | None = None) -> None:
        """One step: wait for its stage, issue its wgmmas, hand back the stage before.

        `place` is that in its window, if sums are promoted.
        """
        adds = step > 0 if place is None else place > 0
        ring, kernel, plan, fragments = self.ring, self.kernel, self.plan, self.fragments
        wait(kernel.shared.full.ptr_to([ring.stage]), ring.phase)
        if fragments is not None:
            fragments.compute(tile, step, ring.stage)
            fragments.ahead(tile, fragments.advance(step, self.steps))
        size = plan.a_bytes // 16
        a = T.Bind(self.a_start[0] + T.cast(ring.stage * size, "uint64"))
        size = plan.b_bytes // 16
        b = T.Bind(self.b_start[0] + T.cast(ring.stage * size, "uint64"))
        T.evaluate(T.ptx.wgmma.fence.sync.aligned())
        next_tap = plan.config.block_n * STEP_BYTES // 16
        for tap, (_, row) in enumerate(self.taps):
            self._multiply(a, row, b, tap * next_tap, True if tap else adds)
        T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())
        if self.promote:
            self._promote(place)
        elif fragments is not None:
            # At once: ptxas takes the registers of A for free behind wgmma, which still reads them.
            T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
            release(kernel, ring.stage)
        else:
            T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(1))
            self._release_previous(step)
        self.epilogue.during(step, tile)
        ring.advance()

    def _multiply(self, a: Expr, row: int, b: Expr, place: int, adds: Expr | bool) -> None:
        """The wgmmas of one tile of B, at a place behind the first one; that of A starts at a row
        of its box. `adds` says whether there are sums already.
        """
        fragments, dtype = self.fragments, self.kernel.problem.dtype
        terms = WGMMA_BYTES // bytes_of(dtype)
        name = (
            f"wgmma.mma_async.sync.aligned.m64n{self.plan.config.block_n}k{terms}"
            f".f32.{'.'.join(self.kernel.problem.kinds)}"
        )
        sums = [self.partial[i] for i in range(self.plan.accumulators)]
        for part in range(STEP_BYTES // WGMMA_BYTES):
            later = T.ptx.pred(True if part else adds)
            at_a = [a + T.uint64(row * STEP_BYTES // 16 + part * self.a_step)]
            if fragments is not None:
                at_a = fragments.of_wgmma(part)
            at_b = b + T.uint64(place + part * self.b_step)
            T.evaluate(T.ptx[name](*sums, *at_a, at_b, later, 1, 1, *self._transposed()))

    def _taps_of(self, turn: Expr, step: Expr, tile: Tile) -> None:
        """One step whose box of A all taps read, each with weights of a stage of their own. Beside
        wgmmas of its last taps the next step's box is computed, that of the next tile behind the
        last step.
        """
        kernel, plan, ring = self.kernel, self.plan, self.ring
        data, computes = self.data, self.in_place
        last = tirx.EQ(step + T.int32(1), self.steps)
        more = T.Bind(tirx.Or(step + 1 < self.steps, turn + 1 < kernel.turns))
        with T.If(tirx.And(last, more)), T.Then():
            computes.begin(kernel.tile(turn + 1))
        with T.If(more), T.Then():
            computes.ahead(T.Bind(T.Select(last, T.int32(0), step + 1)))
        a = T.Bind(self.a_start[0] + T.cast(data.stage * (plan.a_bytes // 16), "uint64"))
        first, taps = first_computing(len(self.taps)), len(self.taps)
        for tap, (_, row) in enumerate(self.taps):
            wait(kernel.shared.full.ptr_to([ring.stage]), ring.phase)
            size = plan.b_bytes // 16
            b = T.Bind(self.b_start[0] + T.cast(ring.stage * size, "uint64"))
            T.evaluate(T.ptx.wgmma.fence.sync.aligned())
            self._multiply(a, row, b, 0, True if tap else step > 0)
            T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())
            if tap >= first:
                with T.If(more), T.Then():
                    computes.compute(tap - first, taps - first)
            T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(0 if tap == taps - 1 else 1))
            if tap:
                release(kernel, ring.previous)
            if tap == taps - 1:
                release(kernel, ring.stage)
                release_data(kernel, data.stage)
            ring.advance()
        with T.If(more), T.Then():
            computes.finish()
        self.epilogue.during(step, tile)
        data.advance()

    def _transposed(self) -> list[int]:
        """Which operands in memory are not contiguous along the terms; only halves may be so."""
        problem = self.kernel.problem
        in_memory = [] if self.fragments is not None else [problem.a]
        views = (*in_memory, problem.segments[0].b[0])
        return [0 if v.k_major else 1 for v in views] if problem.dtype in HALF_DTYPES else []

    def _windows(self, tile: Tile) -> None:
        """All steps, in windows of so many whose sums are added up together."""
        size, steps = self.promote, self.steps
        with T.serial(0, steps // size) as window:
            for place in range(size):
                self._step_of(window * size + place, tile, place)
        if not isinstance(steps, int) or steps % size:
            with T.serial(0, steps % size) as place:
                self._step_of(steps // size * size + place, tile, place)

    def _promote(self, place: Expr | int) -> None:
        """Adds the sums of a window to those of full precision, behind its last step; the others
        are not waited for.
        """
        last = self.promote - 1
        whole = isinstance(place, int)
        T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(1 if whole and place < last else 0))
        if whole and place:
            release(self.kernel, self.ring.previous)
        if whole and place < last:
            return
        release(self.kernel, self.ring.stage)
        due = tirx.IntImm("bool", 1)
        if not whole:
            due = tirx.EQ(place + T.int32(1), self.steps % self.promote)
        with T.If(due), T.Then():
            for i in range(self.plan.accumulators):
                T.buffer_store(self.sums, self.sums[i] + self.partial[i], [i])

    def _release_previous(self, step: Expr | int) -> None:
        if isinstance(step, int):
            if step:
                release(self.kernel, self.ring.previous)
        elif self.plan.config.deferred:
            release(self.kernel, self.ring.previous)
        else:
            with T.If(step > 0), T.Then():
                release(self.kernel, self.ring.previous)

    def _drain(self) -> None:
        """The last step's products are in the accumulators."""
        if self.fragments is not None:
            return
        T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
        release(self.kernel, self.ring.previous)
