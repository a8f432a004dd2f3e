"""The end of a tile of queries in the Hopper attention: results, and what is made of them, leave.

A result that is stored as it is goes through boxes of shared memory and the TMA; other outputs are
computed and stored in registers, two neighbouring columns at once where they lie side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...gemm.hopper.epilogue import STMATRIX
from ...gemm.hopper.state import fence_shared, warpgroup_sync
from ...gpu.access import is_multiple
from ...gpu.intrinsics import pack_halves
from ..tiled.stores import RowStores
from ..tiled.tiles import Tile
from .config import BOX, WARPGROUP_ROWS
from .state import arrive

if TYPE_CHECKING:
    from .consumer import Consumer

# The named barrier of all consumers.
ALL_CONSUMERS = 7
GROUPS_PER_BOX = BOX // 8


class Epilogue:
    """Emits the epilogue of a consumer warpgroup whose thread holds `row` and `column` first."""

    def __init__(self, consumer: Consumer, row: Expr, column: Expr):
        self.consumer, self.kernel = consumer, consumer.kernel
        self.plan, self.problem = self.kernel.plan, self.kernel.problem
        self.attention = self.kernel.problem.attention
        self.row = row
        self.staged = self.plan.config.staged
        self.over_queries = self.staged and not self.plan.own_output
        self.words = T.alloc_local((4,), "uint32") if self.staged else None
        self.lse = T.alloc_local((2,), "float32") if self._uses_lse() else None
        self.stores = RowStores(self.kernel, consumer.results, consumer.lane, column)

    def _uses_lse(self) -> bool:
        return bool(self.attention.row_outputs) or not self.staged

    # ---- called by the consumer

    def await_buffer(self) -> None:
        """Emits the wait until the boxes are free; the last product may still run."""
        if self.staged:
            with T.If(self.consumer.thread == 0), T.Then():
                T.evaluate(T.ptx.cp.async_.bulk.wait_group.read(0))

    def emit(self, tile: Tile) -> None:
        """Emits the stores of a tile whose results are complete."""
        if self.lse is not None:
            for half in range(2):
                T.buffer_store(self.lse, self.consumer.softmax.lse(half), [half])
        if self.staged:
            self._store_boxes(tile)
        rows = [T.Bind(tile.query + self.row + half * 8) for half in range(2)]
        for half in range(2):
            exists = self._exists(rows[half])
            with T.If(exists), T.Then():
                lse = None if self.lse is None else self.lse[half]
                self.stores.emit(tile, half, rows[half], lse, not self.staged)

    def finish(self) -> None:
        """Emits the wait for the last stores, before the block ends."""
        if self.staged:
            with T.If(self.consumer.thread == 0), T.Then():
                T.evaluate(T.ptx.cp.async_.bulk.wait_group(0))

    def _exists(self, row: Expr) -> Expr:
        whole = is_multiple(self.attention.M, self.plan.config.block_m)
        return tirx.IntImm("bool", 1) if whole else row < self.kernel.M

    # ---- through shared memory

    def _store_boxes(self, tile: Tile) -> None:
        consumer, number = self.consumer, self.consumer.number
        if self.over_queries:
            # All consumers are through with the queries.
            count = 128 * self.plan.config.consumers
            T.evaluate(T.ptx.bar.sync(T.uint32(ALL_CONSUMERS), T.uint32(count)))
        else:
            warpgroup_sync(number)
        row = T.Bind(consumer.thread // 32 * 16 + consumer.lane % 16)
        for group in range(0, self.problem.features // 8, 2):
            self._pack(group)
            box, part = divmod(group, GROUPS_PER_BOX)
            piece = T.bitwise_xor(part + consumer.lane // 16, row % 8)
            target = self.kernel.shared.o.ptr_to([number, box, row * BOX + piece * 8])
            T.evaluate(T.ptx[STMATRIX](target, *(self.words[i] for i in range(4))))
        fence_shared()
        warpgroup_sync(number)
        at = {**tile.place, "m": tile.query + number * WARPGROUP_ROWS}
        with T.If(consumer.thread == 0), T.Then():
            for box in range(int(self.kernel.shared.o.shape[1])):
                source = self.kernel.shared.o.ptr_to([number, box, 0])
                place = at | {"e": box * BOX}
                self.plan.o_map.store(source, self.kernel.maps.o, place)
            T.evaluate(T.ptx.cp.async_.bulk.commit_group())
            if self.over_queries:
                T.evaluate(T.ptx.cp.async_.bulk.wait_group.read(0))
                arrive(self.kernel.shared.q_empty.ptr_to([0]))

    def _pack(self, group: int) -> None:
        """Two groups of 8 columns as four words; behind the last group come zeros."""
        dtype = self.problem.result.dtype
        for i in range(4):
            at = group * 4 + i * 2
            word = T.uint32(0)
            if at < self.problem.features // 2:
                results = self.consumer.results
                word = pack_halves(dtype, results[at], results[at + 1])
            T.buffer_store(self.words, word, [i])
