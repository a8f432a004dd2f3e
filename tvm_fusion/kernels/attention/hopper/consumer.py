"""A consumer warpgroup of the Hopper attention: 64 queries of every tile, all their keys.

    S = Q K[n-1]^T;  softmax
    loop over the other tiles of keys, from the last to the first:
        issue S = Q K[i]^T and O += P V[i+1];  wait for S;  softmax while O is still computed
    O += P V[first];  store O / sum

The product with V is waited for at the top of the next turn: ptxas moves a wait upwards past the
arithmetic of a basic block, which would undo the overlap. A fence stands before both products, or
ptxas serialises all of them (C7510, C7520).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...gemm.hopper.consumer import GROUP_STRIDE, SWIZZLE_128B
from ...gemm.hopper.epilogue import STMATRIX
from ...gemm.hopper.state import Ring, fence_shared, wait, warpgroup_sync
from ...gpu.access import is_multiple
from ...gpu.intrinsics import pack_halves
from ..tiled.online_softmax import ALL_LANES, Softmax
from ..tiled.points import HIDDEN, Points, read_formulas
from ..tiled.tiles import KeyTiles, RowStores, Tile
from .config import BOX, HALF_BYTES, WARPGROUP_ROWS, WGMMA_TERMS
from .state import Kernel, arrive, slot_of, take_rows

# Keys of a query's value in the consumers of the Hopper attention, by what scouts found.
#
# A query's keys lie between two ends, as by any bound, or their values are compared with its own.


class Same:
    """Emits what beside `points` hides keys of another value than the query's."""

    def __init__(self, points: Points):
        self.points, self.kernel, self.match = points, points.kernel, points.plan.match
        points.starts = True
        self.mixed = T.alloc_local((1,), "int32")

    def start(self) -> KeyTiles:
        """Emits the wait for what is found about a tile of queries; its tiles of keys."""
        keys, mixed = take_rows(self.kernel)
        T.buffer_store(self.mixed, mixed, [0])
        slot, _ = slot_of(self.kernel.turn)
        bounds, rows = self.points.bounds, self.kernel.shared.found.rows
        for half in range(2):
            row = self.points.first_row + half * 8
            ends = ((1, half, tirx.Min), (0, 2 + half, tirx.Max))
            for place, at, combine in ends:
                T.buffer_store(bounds, combine(bounds[at], rows[slot, row, place]), [at])
        return keys

    def apply(self, number: Expr) -> None:
        """Emits the comparison of values where keys of a value stand apart."""
        points, rewrite = self.points, self.kernel.frame.rewrite
        with T.If(self.mixed[0] != 0), T.Then():
            base = T.Bind(number * points.plan.config.block_n + points.column)
            zero = T.int32(0)
            own = [T.Bind(rewrite(self.match.query, points.point(h, zero))) for h in range(2)]
            for i in range(points.count):
                for v in range(2):
                    key = T.Bind(rewrite(self.match.key, points.point(0, base + (i * 8 + v))))
                    for half in range(2):
                        at = i * 4 + half * 2 + v
                        same = tirx.EQ(own[half], key)
                        value = tirx.Select(same, points.scores[at], T.float32(HIDDEN))
                        T.buffer_store(points.scores, value, [at])


# The end of a tile of queries in the Hopper attention: results, and what is made of them, leave.
#
# A result that is stored as it is goes through boxes of shared memory and the TMA; other outputs
# are
# computed and stored in registers, two neighbouring columns at once where they lie side by side.

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


# Named barriers: 0 is the block's own, 2 ... 4 those of the warpgroups (`warpgroup_sync`).
FIRST_TURN = 8

UNITS = 16  # bytes in which descriptors count
BOX_ROW = BOX * HALF_BYTES


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of an operand in shared memory; offsets are in the units of descriptors.

    Attributes
    ----------
    buffer : its boxes of 64 columns, and their elements, in the last two dimensions.
    rows_of_terms : what a product sums over are the rows of a box, else its columns.
    """

    buffer: Expr
    rows_of_terms: bool

    @property
    def box(self) -> int:
        """From a box to the next one."""
        return int(self.buffer.shape[-1]) * HALF_BYTES // UNITS

    @property
    def stage(self) -> int:
        """From a stage to the next one."""
        return int(self.buffer.shape[-2]) * self.box

    def step(self, number: int) -> int:
        """From the first terms to those of the `number`-th instruction."""
        if self.rows_of_terms:
            return number * WGMMA_TERMS * BOX_ROW // UNITS
        box, part = divmod(number, BOX // WGMMA_TERMS)
        return box * self.box + part * WGMMA_TERMS * HALF_BYTES // UNITS


def shared_by_warp(value: Expr) -> Expr:
    """An int32 that is the same in a warp, kept in a register."""
    if isinstance(value, tirx.IntImm | int):
        return value
    found = T.alloc_local((1,), "int32")
    T.buffer_store(found, T.tvm_warp_shuffle(T.uint32(ALL_LANES), value, 0, 32, 32), [0])
    return found[0]


class Consumer:
    """Emits the code of the consumer warpgroups; `number` is that of the thread's own."""

    def __init__(self, kernel: Kernel, number: Expr):
        self.kernel, self.plan, self.problem = kernel, kernel.plan, kernel.problem
        self.config, self.number = self.plan.config, number
        c, s, problem = self.config, kernel.shared, kernel.problem
        self.scores = T.alloc_local((c.block_n // 2,), "float32")
        self.results = T.alloc_local((problem.features // 2,), "float32")
        self.thread = T.Bind(kernel.thread % 128)
        self.lane = T.Bind(kernel.thread % 32)
        row = T.Bind(number * WARPGROUP_ROWS + self.thread // 32 * 16 + self.lane // 4)
        column = T.Bind(self.lane % 4 * 2)
        self.softmax = Softmax(problem, c, self.scores, self.results, rarely=True)
        formulas = read_formulas(problem, self.plan.keys.rest)
        self.points = Points(kernel, formulas, self.scores, row, column)
        self.same = Same(self.points) if self.plan.match is not None else None
        self.epilogue = Epilogue(self, row, column)
        first = [number, 0] if problem.q.transposed else [0, number * WARPGROUP_ROWS * BOX]
        self.q = Tiles(s.q, problem.q.transposed)
        self.k = Tiles(s.k, problem.k.transposed)
        self.v = Tiles(s.v, not problem.v.transposed)
        self.q_start = self._descriptor(s.q.ptr_to(first), self.q)
        self.k_start = self._descriptor(s.k.ptr_to([0, 0, 0]), self.k)
        self.v_start = self._descriptor(s.v.ptr_to([0, 0, 0]), self.v)
        self.queries = Ring(1, 0)
        self.keys, self.values = Ring(c.stages, 0), Ring(c.stages, 0)
        # Whether a product with V is in flight; its stage is the one before the present one.
        self.busy = T.alloc_local((1,), "int32")

    def _descriptor(self, place: Expr, tiles: Tiles) -> Expr:
        """The matrix descriptor of a tile in stage 0."""
        leading = tiles.box if tiles.rows_of_terms else 1
        found = T.alloc_local((1,), "uint64")
        T.evaluate(
            T.cuda.wgmma.encode_matrix_descriptor(
                found.ptr_to([0]), place, leading, GROUP_STRIDE, SWIZZLE_128B
            )
        )
        return found

    # ---- tiles of queries

    def emit(self) -> None:
        """Emits the loop over the tiles of queries."""
        if self.config.consumers > 1:
            with T.If(self.number == self.config.consumers - 1), T.Then():
                self._pass_turn(T.int32(0))
        with self.kernel.each_tile() as tile:
            self._tile(tile)
        self.epilogue.finish()

    def _tile(self, tile: Tile) -> None:
        s, keys = self.kernel.shared, tile.keys
        self.softmax.start()
        self.points.start(tile)
        wait(s.q_full.ptr_to([0]), self.queries.phase)
        self.queries.advance()
        wait(s.k_full.ptr_to([self.keys.stage]), self.keys.phase)
        T.evaluate(T.ptx.wgmma.fence.sync.aligned())
        self._issue_scores()
        if self.same is not None:
            keys = self.same.start()
        # The compiler would compute these anew in every turn.
        places = (keys.first, keys.whole_first, keys.whole_end, keys.end)
        keys = KeyTiles(*map(shared_by_warp, places))
        tile = replace(tile, keys=keys)
        last = T.Bind(keys.end - 1)
        self.points.ahead(last)
        T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
        self._release_keys(tile, last)
        self._look(last, self.plan.points_first)
        self.softmax.weigh(first=True)
        T.buffer_store(self.busy, T.int32(0), [0])
        count = T.Bind(last - keys.first)
        with T.serial(0, count, unroll=False) as step:
            self._step(tile, T.Bind(last - 1 - step))
        self._drain()
        self.softmax.shrink_results()
        self.softmax.pack()
        self._issue_values()
        self.softmax.total()
        self.epilogue.await_buffer()
        T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
        self._release_values()
        self.softmax.divide()
        self.epilogue.emit(tile)

    def _issue_values(self) -> None:
        """Emits the wait for a tile of values and the product with it."""
        wait(self.kernel.shared.v_full.ptr_to([self.values.stage]), self.values.phase)
        T.evaluate(T.ptx.wgmma.fence.sync.aligned())
        self._issue_results()
        self.values.advance()

    def _drain(self) -> None:
        """Emits the wait for the product with V that is in flight, if there is one."""
        T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
        with T.If(self.busy[0] == 1), T.Then():
            self._release_values()
        T.buffer_store(self.busy, T.int32(0), [0])

    # ---- tiles of keys

    def _step(self, tile: Tile, number: Expr) -> None:
        """Emits one turn: scores of tile `number`, results of the one before."""
        s = self.kernel.shared
        T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
        with T.If(self.busy[0] == 1), T.Then():
            self._release_values()
        T.buffer_store(self.busy, T.int32(1), [0])
        self.softmax.shrink_results()
        self.softmax.pack()
        wait(s.k_full.ptr_to([self.keys.stage]), self.keys.phase)
        if self.config.consumers > 1:
            self._await_turn()
        T.evaluate(T.ptx.wgmma.fence.sync.aligned())
        self._issue_scores()
        self._issue_values()
        self.points.ahead(number)
        T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(1))
        if self.config.consumers > 1:
            self._pass_turn((self.number + 1) % self.config.consumers)
        self._release_keys(tile, number)
        self._apply(tile, number)
        self.softmax.weigh(first=False)

    def _apply(self, tile: Tile, number: Expr) -> None:
        """Emits logits, and visibility where tile `number` is not seen as a whole."""
        parts, keys = self.plan.parts, tile.keys
        if not parts & {"above", "below"}:
            self._look(number, False)
        elif "whole" not in parts:
            self._look(number, True)
        else:
            conditions = []
            if "above" in parts:
                conditions.append(number >= keys.whole_end)
            if "below" in parts:
                conditions.append(number < keys.whole_first)
            by_point = conditions[0] if len(conditions) == 1 else tirx.Or(*conditions)
            with T.If(by_point):
                with T.Then():
                    self._look(number, True)
                with T.Else():
                    self._look(number, False)

    def _look(self, number: Expr, by_point: bool) -> None:
        self.points.apply(number, by_point)
        if self.same is not None and by_point:
            self.same.apply(number)

    def _await_turn(self) -> None:
        barrier = T.cast(FIRST_TURN + self.number, "uint32")
        T.evaluate(T.ptx.bar.sync(barrier, T.uint32(256)))

    def _pass_turn(self, number: Expr) -> None:
        barrier = T.cast(FIRST_TURN + number, "uint32")
        T.evaluate(T.ptx.bar.arrive(barrier, T.uint32(256)))

    def _release_keys(self, tile: Tile, number: Expr) -> None:
        """Emits the hand-back of a tile of keys, and behind the last one that of the queries."""
        s = self.kernel.shared
        with T.If(self.thread == 0), T.Then():
            arrive(s.k_empty.ptr_to([self.keys.stage]))
            if not self.epilogue.over_queries:
                with T.If(number == tile.keys.first), T.Then():
                    arrive(s.q_empty.ptr_to([0]))
        self.keys.advance()

    def _release_values(self) -> None:
        """Emits the hand-back of the tile of values before the present one."""
        with T.If(self.thread == 0), T.Then():
            arrive(self.kernel.shared.v_empty.ptr_to([self.values.previous]))

    # ---- products

    def _stage(self, start: Expr, tiles: Tiles, ring: Ring) -> Expr:
        """The descriptor of a tile in the present stage."""
        found = T.alloc_local((1,), "uint64")
        T.buffer_store(found, start[0] + T.cast(ring.stage * tiles.stage, "uint64"), [0])
        return found[0]

    def _issue_scores(self) -> None:
        """Emits S = Q K^T of the present stage."""
        c, kind = self.config, self.problem.kind
        name = f"wgmma.mma_async.sync.aligned.m64n{c.block_n}k16.f32.{kind}.{kind}"
        sums = [self.scores[i] for i in range(c.block_n // 2)]
        flags = (1, 1, int(self.q.rows_of_terms), int(self.k.rows_of_terms))
        k_start = self._stage(self.k_start, self.k, self.keys)
        for step in range(-(-self.problem.terms // WGMMA_TERMS)):
            q = self.q_start[0] + T.uint64(self.q.step(step))
            k = k_start + T.uint64(self.k.step(step))
            later = T.ptx.pred(int(step > 0))
            T.evaluate(T.ptx[name](*sums, q, k, later, *flags))
        T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())

    def _issue_results(self) -> None:
        """Emits O += P V of the present stage."""
        c, kind, features = self.config, self.problem.kind, self.problem.features
        name = f"wgmma.mma_async.sync.aligned.m64n{features}k16.f32.{kind}.{kind}"
        sums = [self.results[i] for i in range(features // 2)]
        start = self._stage(self.v_start, self.v, self.values)
        for step in range(c.block_n // WGMMA_TERMS):
            v = start + T.uint64(self.v.step(step))
            weights = [self.softmax.weights[step * 4 + i] for i in range(4)]
            flags = (1, 1, int(self.v.rows_of_terms))
            T.evaluate(T.ptx[name](*sums, *weights, v, T.ptx.pred(1), *flags))
        T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())
