"""Attention by mma.sync, for sm_80 and later: tiles of queries stay, tiles of keys come by.

Each warp of a block has 16 or 32 queries, and their scores, weights and results in registers:

    wait for K[i], V[i];  barrier;  start the copies of the tile after next
    S = Q K[i]^T  (mma.m16n8k16),  online softmax,  O += P V[i]: the scores are the left operand

A warp reads what it multiplies by ldmatrix from swizzled shared memory (Dao, FlashAttention-2,
2023). Tiles of keys that no query of a block sees are left out, by bounds and by what is read for
both (documents); where all are seen, nothing is looked at by point. Logits, visibility, softmax and
stores are those of the Hopper form. Compiled and inspected for sm_80, sm_89 and sm_90a; not timed
on sm_80 and sm_89.

    config    configurations, shared memory     problem   operands, plan
    memory    copies and fragments

Where there are few queries, two or four warps share them, each with its part of every tile's keys,
and put together in the end what they found. Float32 is multiplied in parts (`gemm.mma.split`).

Tiles, ranges of keys, logits, weights and stores are those of `tiled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ....config import HardwareProfile, Policy
from ....errors import Unsupported
from ...contraction.model import Extent
from ...gemm.mma.split import (
    FIRST_PRODUCT,
    LEAST_REST,
    PARTS,
    SMALL_PRODUCTS,
    SUMS,
    multiply_parts,
)
from ...gemm.mma.units import (
    at_least,
    commit_async,
    multiply,
    shared_word,
    split_float32,
    store_shared,
    wait_async,
)
from ...gpu.access import is_multiple
from ...gpu.frame import then
from ...gpu.memory import shared_pool
from ...gpu.product_frame import open_kernel
from ...program.expr import convert, dtype_of
from ..read.model import Attention
from ..tiled.matches import matching_tiles
from ..tiled.online_softmax import Softmax
from ..tiled.points import Points
from ..tiled.shape import shape_of, sharing
from ..tiled.tiles import RowStores, Tile, TiledKernel, kept
from ..time import MmaTile, mma_time
from .config import WARP, AttentionMmaConfig, candidates, resident_blocks
from .memory import Fragments, TileCopy
from .problem import MmaAttention, MmaPlan, make_plan, read_mma_attention

# The order of the configurations of the mma.sync attention, by the model of `attention.time`.


def attention_mma_ranked(
    attention: Attention, hw: HardwareProfile, policy: Policy | None = None
) -> list[tuple[float, AttentionMmaConfig]]:
    """Predicted seconds and configurations that fit the attention and the device, best first.

    Raises
    ------
    Unsupported
        Where the kernel cannot compute the attention; see `emit_attention_mma`.
    """
    problem = read_mma_attention(attention, hw)
    shape = shape_of(problem, problem.formulas, _sharing(problem))
    found = []
    for layout in candidates(
        problem.layout,
        problem.dtype,
        attention.M if isinstance(attention.M, int) else None,
        attention.N if isinstance(attention.N, int) else None,
        hw.smem_per_block_bytes,
    ):
        c = layout.config
        resident = resident_blocks(layout, hw)
        tile = MmaTile(c.block_m, c.block_n, c.warp_rows, c.warps, resident, c.shares)
        found.append((mma_time(shape, tile, hw).seconds, c))
    if not found:
        raise Unsupported("no tile of this attention fits")
    return sorted(found, key=lambda entry: entry[0])


def _sharing(problem: MmaAttention) -> int:
    """Heads that share keys and values, as far as addresses tell."""
    access = problem.k.access
    return 1 if access is None else sharing(access.digits)


# Sixteen queries of a warp in the mma.sync attention: scores, weights and results in registers.
#
# A lane holds rows lane // 4 and 8 below, and columns 2 * (lane % 4) and the next of every 8, of
# the
# scores as of the results: what mma.m16n8k16 leaves of its sums, as wgmma does.


class WarpRows:
    """Emits what happens to them; `row` is the first row of the block that the lane holds, `own`
    the first key of a tile that its warp has.
    """

    def __init__(self, kernel: MmaKernel, row: Expr, lane: Expr, own: Expr | int):
        self.kernel, self.row = kernel, row
        plan, problem = kernel.plan, kernel.problem
        column = T.Bind(lane % 4 * 2)
        keys = plan.config.own_keys
        self.scores = T.alloc_local((keys // 2,), "float32")
        self.results = T.alloc_local((problem.features // 2,), "float32")
        own_config = replace(plan.config, block_n=keys, shares=1)
        self.softmax = Softmax(problem, own_config, self.scores, self.results)
        self.points = Points(kernel, problem.formulas, self.scores, row, column, own, keys)
        self.stores = RowStores(kernel, self.results, lane, column)

    def start(self, tile: Tile) -> None:
        """Emits what stands before the first tile of keys."""
        self.softmax.start(empty=True)
        self.points.start(tile)

    def clear_scores(self) -> None:
        """Emits zeros in place of the scores."""
        for i in range(self.kernel.plan.config.own_keys // 2):
            T.buffer_store(self.scores, T.float32(0), [i])

    def weigh(self, number: Expr, by_point: bool) -> None:
        """Emits the weights of tile `number` of keys, as operands of the second product."""
        self.points.apply(number, by_point)
        self.softmax.weigh(first=False)
        self.softmax.shrink_results()
        if self.kernel.problem.dtype != "float32":
            self.softmax.pack()

    def finish(self, tile: Tile) -> None:
        """Emits the outputs of the rows that exist."""
        self.softmax.total()
        self.softmax.divide()
        whole = is_multiple(self.kernel.problem.attention.M, self.kernel.plan.config.block_m)
        for half in range(2):
            row = T.Bind(tile.query + self.row + half * 8)
            exists = tirx.IntImm("bool", 1) if whole else row < self.kernel.M
            with T.If(exists), T.Then():
                self.stores.emit(tile, half, row, self.softmax.lse(half), True)


def emit_attention_mma(
    attention: Attention, hw: HardwareProfile, config: AttentionMmaConfig | None = None
) -> tirx.PrimFunc:
    """Write an attention as one TIRx kernel for tensor cores from sm_80 on.

    Parameters
    ----------
    attention : Attention
        Q, K and V plain tensors of float16, bfloat16 or float32, contiguous along terms and
        features, of which there are multiples of 8 up to 256; keys may be gathered by pages. Any
        logit, visibility and outputs. Batch, queries and keys may be symbolic.
    hw : HardwareProfile
        A CUDA device of compute capability 8.0 or later.
    config : AttentionMmaConfig, optional
        One of `attention_mma_ranked`; the first where None.

    Returns
    -------
    func : tirx.PrimFunc
        With the parameters of the PrimFunc that the attention was read from.

    Raises
    ------
    Unsupported
        For another attention, or a configuration that does not fit the device.
    """
    problem = read_mma_attention(attention, hw)
    if config is None:
        config = attention_mma_ranked(attention, hw)[0][1]
    plan = make_plan(problem, config, hw)
    with open_kernel(attention) as frame:
        MmaKernel(frame, problem, plan).emit()
    return frame.func


@dataclass(slots=True, eq=False)
class MmaKernel(TiledKernel):
    """A kernel under construction: one block for each tile of queries."""

    problem: MmaAttention
    plan: MmaPlan
    memory: Expr | None = None
    thread: Expr | None = None

    def emit(self) -> None:
        """Emits all of it."""
        tiles, threads = self.plan.tiles, self.plan.config.threads
        T.device_entry()
        block = T.cta_id([tiles if isinstance(tiles, int) else convert(tiles, "int32")])
        self.thread = T.thread_id([threads])
        pool = shared_pool()
        self.memory = pool.alloc((self.plan.layout.smem_bytes,), "uint8", align=128, layout=None)
        pool.commit()
        # Left alone, ptxas spills some bytes to make room for another block.
        with T.attr({"tirx.launch_bounds_min_blocks_per_sm": self.plan.resident}):
            _Block(self, self._matching(self.tile(block))).emit()

    def _matching(self, tile: Tile) -> Tile:
        """The tile with the keys that may have a value of its queries."""
        match, warps = self.plan.match, self.plan.config.warps
        if match is None:
            return tile
        return matching_tiles(self, match, tile, self.thread, warps, self.memory)


class _Block:
    """Emits what a block does with its tile of queries."""

    def __init__(self, kernel: MmaKernel, tile: Tile):
        self.kernel, self.tile, self.plan = kernel, tile, kernel.plan
        self.problem, self.config = kernel.problem, kernel.plan.config
        self.layout, self.attention = self.plan.layout, kernel.problem.attention
        lane, warp = T.Bind(kernel.thread % WARP), T.Bind(kernel.thread // WARP)
        c, own = self.config, 0
        if c.shares > 1:
            self.lane, self.group, self.share = lane, T.Bind(warp // c.shares), warp % c.shares
            self.share = T.Bind(self.share)
            warp, own = self.group, T.Bind(self.share * c.own_keys)
        first = T.Bind(warp * c.warp_rows)
        self.fragments = Fragments(kernel.memory, self.layout, lane, first, own)
        self.rows = [
            WarpRows(kernel, T.Bind(first + (lane // 4 + number * 16)), lane, own)
            for number in range(c.tiles)
        ]
        self.last = kept(tile.keys.end - 1)
        self.queries: list[list[Expr]] | None = None

    def emit(self) -> None:
        """Emits copies, loops over tiles of keys, and outputs."""
        self._start_copies()
        for rows in self.rows:
            rows.start(self.tile)
        T.evaluate(wait_async(self.config.stages - 1))
        T.evaluate(T.cuda.cta_sync())
        if self.layout.holds_queries:
            terms = range(self.layout.k.chunks // 2)
            self.queries = [
                [self.fragments.queries(number, term) for term in terms]
                for number in range(self.config.tiles)
            ]
        keys, parts = self.tile.keys, self.plan.parts
        loops = [(keys.first, keys.end, False)]
        if self.plan.points_first:
            loops = [(keys.whole_end, keys.end, True)]
            loops += [(keys.whole_first, keys.whole_end, False)] if "whole" in parts else []
            loops += [(keys.first, keys.whole_first, True)] if "below" in parts else []
        for first, end, by_point in loops:
            with T.serial(0, T.Bind(end - first), unroll=False) as step:
                self._step(T.Bind(end - 1 - step), by_point)
        T.evaluate(wait_async(0))
        if self.config.shares > 1:
            self._put_together()
            with T.If(self.share == 0), T.Then():
                self._finish()
        else:
            self._finish()

    def _finish(self) -> None:
        for rows in self.rows:
            rows.finish(self.tile)

    def _put_together(self) -> None:
        """What warps with the same queries found, in the registers of the first of them."""
        others, words = self.config.shares - 1, self.layout.exchange_words
        each = words // self.config.tiles

        def place(share: Expr | int, number: int, word: int) -> Expr:
            line = (self.group * others + (share - 1)) * words + (number * each + word)
            return self.kernel.memory.ptr_to([(line * WARP + self.lane) * 4])

        T.evaluate(T.cuda.cta_sync())
        with T.If(self.share > 0), T.Then():
            for number, rows in enumerate(self.rows):
                for word, value in enumerate(rows.softmax.found()):
                    bits = T.reinterpret("uint32", value)
                    T.evaluate(store_shared(place(self.share, number, word), bits))
        T.evaluate(T.cuda.cta_sync())
        with T.If(self.share == 0), T.Then():
            for share in range(1, others + 1):
                for number, rows in enumerate(self.rows):
                    words_of = [shared_word(place(share, number, word)) for word in range(each)]
                    rows.softmax.join([T.reinterpret("float32", word) for word in words_of])

    # ---- copies

    def _start_copies(self) -> None:
        """The queries, and all stages but one."""
        kernel, c = self.kernel, self.config
        index = kernel.frame.index
        env = {var: T.Bind(convert(value, index)) for var, value in self.tile.axes.items()}

        def copy(source, axes, shared, rows) -> TileCopy:
            made = TileCopy(kernel.frame, source, axes, env, kernel.memory, shared, rows, c.threads)
            made.start(kernel.thread)
            return made

        attention, layout = self.attention, self.layout
        queries = copy(self.problem.q, attention.queries, layout.k, c.block_m)
        count = None if is_multiple(attention.M, c.block_m) else kernel.M
        queries.copy(layout.query_start, self.tile.query, count)
        T.evaluate(commit_async())
        self.k = copy(self.problem.k, attention.keys, layout.k, c.block_n)
        self.v = copy(self.problem.v, attention.keys, layout.v, c.block_n)
        self.count = self._count_of_keys()
        for position in range(c.stages - 1):
            self._fill(self.last - position, position * layout.stage_bytes)

    def _count_of_keys(self) -> Expr | None:
        """Keys at or above are not read; None where a tile has none of these."""
        count: Extent | Expr = self.attention.N
        own = [bound for bound in self.plan.keys.bounds if bound.upper and not bound.slope]
        if not own:
            return None if is_multiple(count, self.config.block_n) else self.kernel.N
        count = self.kernel.N
        for bound in own:
            rest = convert(self.kernel.frame.rewrite(bound.rest, self.tile.axes), "int32")
            count = tirx.Min(count, rest + 1)
        return kept(count)

    def _fill(self, number: Expr, stage: Expr | int) -> None:
        """The copies of tile `number` of keys and values, if there is one, as one group."""
        with then(number >= self.tile.keys.first):
            first = T.Bind(number * self.config.block_n)
            self.k.copy(stage, first, self.count)
            self.v.copy(stage + self.layout.v_start, first, self.count)
        T.evaluate(commit_async())

    # ---- a tile of keys

    def _step(self, number: Expr, by_point: bool) -> None:
        stages, size = self.config.stages, self.layout.stage_bytes
        T.evaluate(wait_async(stages - 2))
        T.evaluate(T.cuda.cta_sync())
        position = T.Bind(self.last - number)
        free = T.Bind(T.truncmod(position + (stages - 1), stages) * size)
        self._fill(T.Bind(number - (stages - 1)), free)
        stage = T.Bind(T.truncmod(position, stages) * size)
        for rows in self.rows:
            rows.points.ahead(number)
        self._scores(stage)
        for rows in self.rows:
            rows.weigh(number, by_point)
        self._results(stage)

    def _scores(self, stage: Expr) -> None:
        """S = Q K^T."""
        if self.problem.dtype == "float32":
            self._wide_scores(stage)
            return
        for rows in self.rows:
            rows.clear_scores()
        for term in range(self.layout.k.chunks // 2):
            queries = self._queries(term)
            for group in range(self.config.own_keys // 16):
                keys = self.fragments.keys(stage, group, term)
                for rows, own in zip(self.rows, queries, strict=True):
                    for half in range(2):
                        self._multiply(rows.scores, group * 8 + half * 4, own, 0, keys, half)

    def _queries(self, term: int) -> list[Expr]:
        """Fragments of terms number `term`, of each tile of queries."""
        if self.queries is not None:
            return [own[term] for own in self.queries]
        return [self.fragments.queries(number, term) for number in range(self.config.tiles)]

    def _wide_scores(self, stage: Expr) -> None:
        """The same in float32: two fragments of 8 terms as one of 16, whose neighbours are terms t
        and t + 4.
        """
        count = self.layout.k.chunks // 2
        for term in range(0, count, 2):
            terms = range(term, min(term + 2, count))
            queries = [self._queries(t) for t in terms]
            left = [
                _Parts([(own[i], own[i + 2]) for own in fragments for i in range(2)], 4)
                for fragments in zip(*queries, strict=True)
            ]
            for group in range(self.config.own_keys // 16):
                keys = [self.fragments.keys(stage, group, t) for t in terms]
                for half in range(2):
                    right = _Parts([(own[half * 2], own[half * 2 + 1]) for own in keys], 2)
                    for rows, own in zip(self.rows, left, strict=True):
                        at = group * 8 + half * 4
                        self._multiply_parts(rows.scores, at, own, right, first=term == 0)

    def _results(self, stage: Expr) -> None:
        """O += P V."""
        features = self.problem.features
        if self.problem.dtype == "float32":
            self._wide_results(stage)
            return
        for group in range(self.config.own_keys // 16):
            for feature in range(self.layout.v.chunks // 2):
                values = self.fragments.values(stage, group, feature)
                for rows in self.rows:
                    for half in range(min(2, features // 8 - feature * 2)):
                        at = feature * 8 + half * 4
                        weights = rows.softmax.weights
                        self._multiply(rows.results, at, weights, group * 4, values, half)

    def _wide_results(self, stage: Expr) -> None:
        """The same in float32: a lane reads keys 2 i and 2 i + 1 of 8, as it has weights."""
        for group in range(self.config.own_keys // 16):
            places = range(group * 8, group * 8 + 8, 2)
            weights = [
                _Parts([(rows.scores[i], rows.scores[i + 1]) for i in places], 4)
                for rows in self.rows
            ]
            for feature in range(self.problem.features // 8):
                eights = range(2 * group, 2 * group + 2)
                values = [self.fragments.wide_values(stage, eight, feature) for eight in eights]
                right = _Parts([(own[0], own[1]) for own in values], 2)
                for rows, own in zip(self.rows, weights, strict=True):
                    self._multiply_parts(rows.results, feature * 4, own, right, first=False)

    def _multiply(
        self, sums: Expr, at: int, left: Expr, start: int, right: Expr, half: int
    ) -> None:
        dtype = self.problem.dtype
        into, a, b = sums.ptr_to([at]), left.ptr_to([start]), right.ptr_to([half * 2])
        T.evaluate(multiply(dtype, dtype, 16, into, a, b))

    @staticmethod
    def _multiply_parts(sums: Expr, at: int, left: _Parts, right: _Parts, first: bool) -> None:
        """The products of 16 terms in float32; the `first` take the place of what is there.
        The left operand is finite, or makes NaN of a row of scores anyway.
        """
        part = T.alloc_local((SUMS,), "float32")
        for i in range(SUMS):
            T.buffer_store(part, T.float32(0), [i])
        multiply_parts(part.ptr_to([0]), left.pointers, right.pointers, SMALL_PRODUCTS)
        for i in range(SUMS):
            T.buffer_store(part, at_least(part[i], T.float32(LEAST_REST)), [i])
        multiply_parts(part.ptr_to([0]), left.pointers, right.pointers, FIRST_PRODUCT)
        for i in range(SUMS):
            T.buffer_store(sums, part[i] if first else sums[at + i] + part[i], [at + i])


class _Parts:
    """Pairs of float32 in three parts that tensor cores multiply (`gemm.mma.split`): the fragments
    of an operand, of which there are `count`; those beyond the pairs are 0.
    """

    def __init__(self, pairs: Sequence[tuple[Expr, Expr]], count: int) -> None:
        parts = [T.alloc_local((count,), "uint32") for _ in range(PARTS)]
        self.pointers = [part.ptr_to([0]) for part in parts]
        for n in range(count):
            if n < len(pairs):
                places = [part.ptr_to([n]) for part in parts]
                T.evaluate(split_float32(places, *map(_bits, pairs[n])))
            else:
                for part in parts:
                    T.buffer_store(part, T.uint32(0), [n])


def _bits(word: Expr) -> Expr:
    return word if dtype_of(word) == "uint32" else T.reinterpret("uint32", word)
