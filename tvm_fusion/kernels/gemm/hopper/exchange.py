"""Blocks of a cluster that split the terms of a tile add up their sums in each other's memory.

Every block stores its own share of the tile's columns, so it needs the others' sums of them:

    all stages of all blocks drained -> push the others' shares into their stages' memory
    -> what the others have pushed is there -> add it to the own share, in the order of the blocks

The own share then lies in the accumulators of the first columns, where the epilogue looks for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm.ir import Expr
from tvm.script import tirx as T

from .cluster import add_floats, arrive_at, place_in, send_to
from .layout import Layout
from .state import Hopper, expect, fence_shared, wait, warpgroup_sync

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
