"""Attention with few queries: keys and values are streamed once, at the speed of the memory.

Heads (or whatever else) that share keys and values become rows beside the queries, so that a unit
of keys is read once for all of them. The keys of a unit are divided over the blocks of a cluster
and their warps, a step of keys to each in turn; every warp keeps several steps on their way into a
ring of its own, multiplies on tensor cores (mma.m16n8k16) and keeps a running softmax. What they
have found meets in shared memory, and in that of the cluster, at the end.

    problem   units, rows, keys and values in memory, the visible keys
    products  scores and weighted values, and how they read what was copied
    softmax   weights                      combine   from partial results to the outputs
    config    configurations, memory       rank      their times
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ....config import HardwareProfile
from ...gemm.mma.units import CHUNK, commit_async, copy_async, wait_async, warp_sync
from ...gpu.access import is_multiple
from ...gpu.frame import then
from ...gpu.intrinsics import cluster_arrive
from ...gpu.memory import shared_pool
from ...gpu.product_frame import Frame, lower, open_kernel
from ...program.expr import conjunction, constant, convert
from ..read.model import Attention
from ..tiled.source import Lines, Source
from .combine import Combine
from .config import WARP, DecodeConfig, Tile
from .problem import DecodeProblem, read_decode
from .products import Products
from .rank import attention_decode_ranked, check_config, sizes_of
from .softmax import Softmax, shuffled

# Keys and values on their way through shared memory, copied by cp.async.
#
# Each warp has a ring of its own: it waits for its own copies, and no barrier of the block is
# needed.
# A stage holds the keys of a step, then their values; `Tile` says how their rows lie.

Limits = tuple[Expr, Expr]
"""No key at or above the first is visible; none at or above the second exists."""


class Rows(Lines):
    """Copies of the rows of keys (or of values) of one unit into a warp's ring."""

    def __init__(
        self,
        frame: Frame,
        source: Source,
        axes: tuple,
        env: Mapping[Var, Expr],
        ring: Expr,
        tile: Tile,
    ):
        super().__init__(frame, source, axes, env)
        self.ring, self.tile = ring, tile
        self.per_row = tile.width // source.piece

    def prepare(self, lane: Expr) -> None:
        """Emits what does not change from step to step."""
        super().prepare()
        self.lane = lane

    def copy(self, stage: Expr, first: Expr, limits: Limits | None) -> None:
        """Starts the copies of the keys of a step from `first` on, to the address `stage`; zeros in
        place of keys that are not visible."""
        tile = self.tile
        count = None if limits is None else limits[1]
        start, last = self._split(0)
        line = None
        if self.evenly and WARP % self.per_row == 0:
            line = T.Bind(self.at(first + start, last))
        for i in range(tile.rows * self.per_row // WARP):
            row, column = self._split(i)
            if line is not None:
                at = line + self.further(i * (WARP // self.per_row))
            else:
                at = self.at(first + row, column, count)
            inside = None if limits is None else first + row < limits[0]
            if tile.width != self.source.extent * self.source.size:
                end = self.source.extent * self.source.size // self.source.piece
                inside = conjunction(inside, column < end)
            within = T.bitwise_xor(column * self.source.piece, tile.turn(row) * CHUNK)
            place = self.ring.ptr_to([stage + (row * tile.width + within + tile.start)])
            T.evaluate(copy_async(self.source.piece, place, self.pointer, at, inside))

    def _split(self, i: int) -> tuple[Expr, Expr]:
        """Row and piece within the row of a lane's copy number `i`."""
        if WARP % self.per_row == 0:
            return self.lane // self.per_row + i * (WARP // self.per_row), self.lane % self.per_row
        if self.per_row % WARP == 0:
            across = self.per_row // WARP
            return constant(i // across, "int32"), self.lane + i % across * WARP
        unit = self.lane + i * WARP
        return unit // self.per_row, unit % self.per_row


def emit_attention_decode(
    attention: Attention, hw: HardwareProfile, config: DecodeConfig | None = None
) -> tirx.PrimFunc:
    """Write an attention with few queries as one TIRx kernel.

    Parameters
    ----------
    attention : Attention
        At most 128 queries of each head; static numbers of terms and features, and of queries
        where the configuration does not say the most. Keys and
        values are plain half-precision tensors, contiguous along the head; they may be gathered by
        pages.
    hw : HardwareProfile
        A CUDA device of compute capability 8.0 or later; with clusters for a split of keys.
    config : DecodeConfig, optional
        One of `attention_decode_ranked`; the first where None.

    Returns
    -------
    func : tirx.PrimFunc
        With the parameters of the PrimFunc that the attention was read from.

    Raises
    ------
    Unsupported
        For another attention, or a configuration that does not fit the device.
    """
    if config is None:
        config = attention_decode_ranked(attention, hw)[0][1]
    problem = read_decode(attention, hw, config.queries)
    check_config(problem, config, hw)
    with open_kernel(attention) as frame:
        _Kernel(frame, problem, config).emit()
    return frame.func


def _last(rows: int | Expr) -> Expr:
    """The last of so many rows."""
    return constant(rows - 1, "int32") if isinstance(rows, int) else rows - 1


class _Kernel:
    """One kernel: clusters over units and chunks of their rows."""

    def __init__(self, frame: Frame, problem: DecodeProblem, config: DecodeConfig):
        self.frame, self.problem, self.config = frame, problem, config
        self.attention = problem.attention
        self.layout = sizes_of(problem).layout(config)

    def emit(self) -> None:
        config, problem, layout = self.config, self.problem, self.layout
        split = config.split
        blocks = problem.unit_count * (problem.chunks * split)
        T.device_entry()
        block = T.cta_id([blocks if isinstance(blocks, int) else convert(blocks, "int32")])
        self.rank = T.cta_id_in_cluster([split]) if split > 1 else None
        self.thread = T.thread_id([config.threads])
        self._memory()
        if split > 1:
            T.evaluate(cluster_arrive())
            block = T.Bind(T.truncdiv(block, split))
        chunk = constant(0, "int32")
        if problem.chunks > 1:
            block, chunk = T.Bind(block // problem.chunks), T.Bind(block % problem.chunks)
        self.unit = problem.unit_env(T.Bind(convert(block, self.frame.index)), self.frame)
        self.first_row = T.Bind(chunk * layout.rows)
        self.lane, self.warp = T.Bind(self.thread % WARP), T.Bind(self.thread // WARP)
        self._find_keys()
        self._loop()
        memory = (self.parts, self.stats, self.landing)
        combine = Combine(self.frame, problem, layout, memory, self.thread, self.rank)
        T.evaluate(T.cuda.cta_sync())
        combine.publish(self.softmax, self.sums, self.lane, self.warp)
        T.evaluate(T.cuda.cta_sync())
        combine.emit(self.unit, self.first_row)

    def _memory(self) -> None:
        layout = self.layout
        pool = shared_pool()
        self.ring = pool.alloc(
            (layout.ring_bytes + layout.query_bytes,), "uint8", align=128, layout=None
        )
        pool.move_base_to(0)
        self.parts = pool.alloc((layout.part_bytes // 4,), "float32", align=128, layout=None)
        pool.move_base_to(layout.dynamic_bytes - layout.stat_bytes)
        self.stats = pool.alloc((layout.stat_bytes // 4,), "float32", align=4, layout=None)
        pool.commit()
        landing = layout.landing_floats(self.attention.E)
        self.landing = T.alloc_shared((landing,), "float32") if landing else None

    # ---- which keys

    def _find_keys(self) -> None:
        """The first and last key that can be visible, and the steps of this warp."""
        config, bounds = self.config, self.problem.range
        total = self.attention.N
        count = constant(total, "int32") if isinstance(total, int) else convert(total, "int32")
        self.count, below, least = count, count, None
        for bound in bounds.below:
            below = T.min(below, self._over_rows(bound, largest=True))
        for bound in bounds.least:
            own = self._over_rows(bound, largest=False)
            least = own if least is None else T.max(least, own)
        self.below, self.least = T.Bind(below), None if least is None else T.Bind(least)
        self.masked = bool(bounds.below) or not is_multiple(total, config.step)
        first = constant(0, "int32") if least is None else T.Bind(self.least // config.step)
        share = self.warp if self.rank is None else self.rank * config.warps + self.warp
        self.first_step = T.Bind(first + share)
        self.stride = config.warps * config.split
        last = T.Bind((self.below + (config.step - 1)) // config.step)
        steps = (last - self.first_step + (self.stride - 1)) // self.stride
        self.steps = T.Bind(T.max(steps, constant(0, "int32")))

    def _first_key(self, number: Expr) -> Expr:
        """The first key of the warp's step of that number."""
        return T.Bind((self.first_step + number * self.stride) * self.config.step)

    def _over_rows(self, bound: Expr, largest: bool) -> Expr:
        """The largest (smallest) value of a bound over the block's rows, within 0 ... N."""
        problem, frame = self.problem, self.frame
        row = T.min(self.first_row + self.lane, _last(problem.row_count(frame)))
        flat = T.Bind(convert(row, frame.index))
        env = problem.row_env(self.unit, flat, frame)
        value = convert(lower(frame.rewrite(bound, env), False), "int64")
        zero, most = constant(0, "int64"), convert(self.count, "int64")
        value = T.Bind(convert(T.max(zero, T.min(value, most)), "int32"))
        for step in (1, 2, 4, 8, 16):
            other = shuffled(value, step)
            value = T.Bind(T.max(value, other) if largest else T.min(value, other))
        return value

    # ---- the loop of a warp

    def _loop(self) -> None:
        config, layout = self.config, self.layout
        env = self.problem.row_env(self.unit, constant(0, self.frame.index), self.frame)
        keys = self.attention.keys
        self.rows = [
            Rows(self.frame, source, keys, env, self.ring, tile)
            for source, tile in ((self.problem.k, layout.keys), (self.problem.v, layout.values))
        ]
        for rows in self.rows:
            rows.prepare(self.lane)
        self.base = T.Bind(self.warp * (config.stages * layout.stage_bytes))
        for number in range(config.stages - 1):
            self._fill(constant(number, "int32"))
        products = Products(self.frame, self.problem, layout, self.ring, self.lane)
        products.put_queries(self.unit, self.first_row, self.thread)
        T.evaluate(T.cuda.cta_sync())
        products.begin()
        self.softmax = Softmax(self.frame, self.problem, layout, self.lane)
        self.softmax.begin(self.unit, self.first_row)
        self.softmax.fetch(self._first_key(constant(0, "int32")))
        below = self.below if self.masked else None
        with T.serial(0, self.steps, unroll=False) as i:
            T.evaluate(wait_async(config.stages - 2))
            T.evaluate(warp_sync())
            stage, first = self._stage(i), self._first_key(i)
            self._fill(T.Bind(i + (config.stages - 1)))
            scores = products.scores(stage)
            self.softmax.logits(scores, first, self.least, below)
            self.softmax.fetch(self._first_key(i + 1))
            factors = self.softmax.weights(scores)
            products.rescale(dict(zip(self.softmax.parts, factors, strict=True)))
            products.add(stage, scores)
        T.evaluate(wait_async(0))
        self.softmax.finish()
        self.sums = products.sums

    def _stage(self, number: Expr) -> Expr:
        """The address of the ring's stage that the warp's step of that number arrives in."""
        return T.Bind(self.base + number % self.config.stages * self.layout.stage_bytes)

    def _fill(self, number: Expr) -> None:
        """Starts the copies of the warp's step of that number, if there is one."""
        with then(number < self.steps):
            stage, first = self._stage(number), self._first_key(number)
            limits = (self.below, self.count) if self.masked else None
            for rows in self.rows:
                rows.copy(stage, first, limits)
        T.evaluate(commit_async())
