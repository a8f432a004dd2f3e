"""The end of a tile of queries in the Hopper attention: results, and what is made of them, leave.

A result that is stored as it is goes through boxes of shared memory and the TMA; other outputs are
computed and stored in registers, two neighbouring columns at once where they lie side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..contraction_model import Output
from ..expr import bytes_of, convert
from .attention_hopper_config import BOX, WARPGROUP_ROWS
from .attention_hopper_state import Tile, arrive
from .gemm_access import affine_access, is_multiple
from .gemm_frame import coordinates
from .gemm_hopper_epilogue import PAIRED_DTYPES, STMATRIX
from .gemm_hopper_state import fence_shared, warpgroup_sync
from .gemm_math import lower
from .gemm_words import store_pair
from .intrinsics import pack_halves

if TYPE_CHECKING:
    from .attention_hopper_consumer import Consumer

# The named barrier of all consumers.
ALL_CONSUMERS = 7
GROUPS_PER_BOX = BOX // 8


class Epilogue:
    """Emits the epilogue of a consumer warpgroup whose thread holds `row` and `column` first."""

    def __init__(self, consumer: Consumer, row: Expr, column: Expr):
        self.consumer, self.kernel = consumer, consumer.kernel
        self.plan, self.problem = self.kernel.plan, self.kernel.problem
        self.frame, self.attention = self.kernel.frame, self.kernel.problem.attention
        self.row, self.column = row, column
        self.staged = self.plan.config.staged
        self.over_queries = self.staged and not self.plan.own_output
        self.words = T.alloc_local((4,), "uint32") if self.staged else None
        self.lse = T.alloc_local((2,), "float32") if self._uses_lse() else None

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
                self._store_row(tile, half, rows[half])

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

    # ---- from registers

    def _store_row(self, tile: Tile, half: int, row: Expr) -> None:
        env = dict(tile.axes)
        env |= coordinates(self.attention.queries, row, self.frame)
        if self.lse is not None:
            env[self.attention.lse] = self.lse[half]
        if self.attention.row_outputs:
            with T.If(self.consumer.lane % 4 == 0), T.Then():
                for output in self.attention.row_outputs:
                    value = lower(self.frame.rewrite(output.value, env), False)
                    indices = self.frame.place(output.indices, env)
                    target = self.frame.output(output.param)
                    T.buffer_store(target, convert(value, output.dtype), indices)
        if self.staged:
            return
        for group in range(self.problem.features // 8):
            column = group * 8 + self.column
            pair = [self._values(env, group, half, v, column + v) for v in range(2)]
            for position, output in enumerate(self.attention.outputs):
                self._store(output, env, column, [values[position] for values in pair])

    def _values(
        self, env: dict[Var, Expr], group: int, half: int, v: int, column: Expr
    ) -> list[Expr]:
        """The outputs of one element."""
        env = env | coordinates(self.attention.features, column, self.frame)
        env[self.attention.result] = T.Bind(self.consumer.results[group * 4 + half * 2 + v])
        outputs = self.attention.outputs
        halves = all(bytes_of(output.dtype) <= 2 for output in outputs)
        for binding in self.attention.output_bindings:
            env[binding.var] = T.Bind(lower(self.frame.rewrite(binding.value, env), halves))
        return [T.Bind(lower(self.frame.rewrite(o.value, env), halves)) for o in outputs]

    def _store(
        self, output: Output, env: dict[Var, Expr], column: Expr, pair: Sequence[Expr]
    ) -> None:
        target = self.frame.output(output.param)
        paired = self._is_paired(output)
        for v in range(1 if paired else 2):
            point = env | coordinates(self.attention.features, column + v, self.frame)
            indices = self.frame.place(output.indices, point)
            if paired:
                low, high = (convert(x, "float32") for x in pair)
                T.evaluate(store_pair(output.dtype, target.ptr_to(indices), low, high))
            else:
                T.buffer_store(target, convert(pair[v], output.dtype), indices)

    def _is_paired(self, output: Output) -> bool:
        """Whether columns 2 i and 2 i + 1 are one aligned access."""
        if output.dtype not in PAIRED_DTYPES:
            return False
        groups = {name: self.attention.groups[name] for name in ("batch", "m", "e")}
        shape = self.attention.params[output.param].shape
        access = affine_access(output.indices, shape, groups)
        return access is not None and access.aligned(2, "e")
