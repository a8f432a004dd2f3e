"""Attention by mma.sync, for sm_80 and later: tiles of queries stay, tiles of keys come by.

Each warp of a block has 16 or 32 queries, and their scores, weights and results in registers:

    wait for K[i], V[i];  barrier;  start the copies of the tile after next
    S = Q K[i]^T  (mma.m16n8k16),  online softmax,  O += P V[i]: the scores are the left operand

A warp reads what it multiplies by ldmatrix from swizzled shared memory (Dao, FlashAttention-2,
2023). Tiles of keys that no query of a block sees are left out; where all are seen, nothing is
looked at by point. Logits, visibility, softmax and stores are those of the Hopper form. Compiled
and inspected for sm_80, sm_89 and sm_90a; not timed on sm_80 and sm_89.

    config    configurations, shared memory     problem   operands, plan
    memory    copies and fragments

Tiles, ranges of keys, logits, weights and stores are those of `tiled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ....config import HardwareProfile, Policy
from ....errors import Unsupported
from ...contraction.model import Extent
from ...gemm.mma.units import commit_async, multiply, split_tf32, wait_async
from ...gpu.access import is_multiple
from ...gpu.frame import then
from ...gpu.memory import shared_pool
from ...gpu.product_frame import open_kernel
from ...program.expr import convert, dtype_of
from ..read.model import Attention
from ..tiled.online_softmax import Softmax
from ..tiled.points import Points
from ..tiled.shape import shape_of, sharing
from ..tiled.tiles import RowStores, Tile, TiledKernel, kept
from ..time import MmaTile, mma_time
from .config import TERMS_TF32, WARP, AttentionMmaConfig, candidates, resident_blocks
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
        tile = MmaTile(c.block_m, c.block_n, c.warp_rows, c.warps, resident_blocks(layout, hw))
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
    """Emits what happens to them; `row` is the first row of the block that the lane holds."""

    def __init__(self, kernel: MmaKernel, row: Expr, lane: Expr):
        self.kernel, self.row = kernel, row
        plan, problem = kernel.plan, kernel.problem
        column = T.Bind(lane % 4 * 2)
        self.scores = T.alloc_local((plan.config.block_n // 2,), "float32")
        self.results = T.alloc_local((problem.features // 2,), "float32")
        self.softmax = Softmax(problem, plan.config, self.scores, self.results)
        self.points = Points(kernel, problem.formulas, self.scores, row, column)
        self.stores = RowStores(kernel, self.results, lane, column)

    def start(self, tile: Tile) -> None:
        """Emits what stands before the first tile of keys."""
        self.softmax.start(empty=True)
        self.points.start(tile)

    def clear_scores(self) -> None:
        """Emits zeros in place of the scores."""
        for i in range(self.kernel.plan.config.block_n // 2):
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
        Q, K and V plain tensors of float16 or bfloat16, contiguous along terms and features, of
        which there are multiples of 8 up to 256; keys may be gathered by pages. Any logit,
        visibility and outputs. Batch, queries and keys may be symbolic.
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
            _Block(self, self.tile(block)).emit()


class _Block:
    """Emits what a block does with its tile of queries."""

    def __init__(self, kernel: MmaKernel, tile: Tile):
        self.kernel, self.tile, self.plan = kernel, tile, kernel.plan
        self.problem, self.config = kernel.problem, kernel.plan.config
        self.layout, self.attention = self.plan.layout, kernel.problem.attention
        lane, warp = T.Bind(kernel.thread % WARP), T.Bind(kernel.thread // WARP)
        self.fragments = Fragments(kernel.memory, self.layout, lane, warp)
        first = T.Bind(warp * self.config.warp_rows)
        self.rows = [
            WarpRows(kernel, T.Bind(first + (lane // 4 + number * 16)), lane)
            for number in range(self.config.tiles)
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
        for rows in self.rows:
            rows.finish(self.tile)

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
        wide = self.problem.dtype == "float32"
        for rows in self.rows:
            rows.clear_scores()
        for term in range(self.layout.k.chunks // 2):
            if self.queries is None:
                numbers = range(self.config.tiles)
                queries = [self.fragments.queries(number, term) for number in numbers]
            else:
                queries = [own[term] for own in self.queries]
            if wide:
                queries = [_Parts(own, range(4)) for own in queries]
            for group in range(self.config.block_n // 16):
                keys = self.fragments.keys(stage, group, term)
                keys = _Parts(keys, range(4)) if wide else keys
                for rows, own in zip(self.rows, queries, strict=True):
                    for half in range(2):
                        self._multiply(rows.scores, group * 8 + half * 4, own, 0, keys, half)

    def _results(self, stage: Expr) -> None:
        """O += P V."""
        features = self.problem.features
        if self.problem.dtype == "float32":
            self._wide_results(stage)
            return
        for group in range(self.config.block_n // 16):
            for feature in range(self.layout.v.chunks // 2):
                values = self.fragments.values(stage, group, feature)
                for rows in self.rows:
                    for half in range(min(2, features // 8 - feature * 2)):
                        at = feature * 8 + half * 4
                        weights = rows.softmax.weights
                        self._multiply(rows.results, at, weights, group * 4, values, half)

    def _wide_results(self, stage: Expr) -> None:
        """The same in float32: a lane's columns 2 i and 2 i + 1 of the weights stand for columns i
        and i + 4 of the left operand, and the rows of the right one are read in that order.
        """
        for group in range(self.config.block_n // 8):
            order = [group * 4 + n for n in (0, 2, 1, 3)]
            weights = [_Parts(rows.scores, order) for rows in self.rows]
            for feature in range(self.problem.features // 8):
                values = _Parts(self.fragments.wide_values(stage, group, feature), range(2))
                for rows, own in zip(self.rows, weights, strict=True):
                    self._multiply(rows.results, feature * 4, own, 0, values, 0)

    def _multiply(
        self,
        sums: Expr,
        at: int,
        left: Expr | _Parts,
        start: int,
        right: Expr | _Parts,
        half: int,
    ) -> None:
        dtype = self.problem.dtype
        if isinstance(left, _Parts):
            self._multiply_parts(sums.ptr_to([at]), left, right, half)
            return
        into, a, b = sums.ptr_to([at]), left.ptr_to([start]), right.ptr_to([half * 2])
        T.evaluate(multiply(dtype, dtype, 16, into, a, b))

    @staticmethod
    def _multiply_parts(into: Expr, left: _Parts, right: _Parts, half: int) -> None:
        """In float32, but for the product of both small parts: the smallest first. The left operand
        is finite, or makes NaN of a row of scores anyway.
        """
        pairs = ((left.low, right.finite), (left.high, right.low), (left.high, right.high))
        for a, b in pairs:
            a, b = a.ptr_to([0]), b.ptr_to([half * 2])
            T.evaluate(multiply("float32", "float32", TERMS_TF32, into, a, b))


class _Parts:
    """Numbers of float32 in two parts that tensor cores read as they are, or nearly: the nearest of
    10 bits of mantissa, and what is left, which has 13 more (`split_tf32`).
    """

    def __init__(self, words: Expr, places: Sequence[int]) -> None:
        self.high, self.finite, self.low = (
            T.alloc_local((len(places),), "uint32") for _ in range(3)
        )
        for n, place in enumerate(places):
            word = words[place]
            bits = word if dtype_of(word) == "uint32" else T.reinterpret("uint32", word)
            parts = (part.ptr_to([n]) for part in (self.high, self.finite, self.low))
            T.evaluate(split_tf32(*parts, bits))
