"""What the parts of a Hopper attention share: shared memory, barriers, tensor maps, tiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...config import HardwareProfile
from ...errors import Unsupported
from ..contraction_model import Extent, size_of
from ..expr import convert
from .attention_hopper_config import (
    BOX,
    HALF_BYTES,
    WARPGROUP_ROWS,
    AttentionConfig,
    boxes_of,
    smem_bytes,
)
from .attention_hopper_problem import HopperAttention
from .attention_hopper_range import KeyTiles, Range, emit_tiles, key_range, static_tiles
from .gemm_frame import Frame, ceil_div, coordinates
from .gemm_hopper_state import fence_shared
from .gemm_tensor_map import TensorMap

# Tiles of queries that are walked through to find what no tile needs.
MAX_WALK = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What follows from a problem and a configuration.

    `own_output` says that results have shared memory of their own, not that of the queries.
    `tiles` are those of queries, `blocks` take them in turn; `uneven` says that they differ in the
    number of keys they meet. `parts` are those of the loop over keys that some tile needs: behind
    the first tile come tiles looked at by point ("above"), "whole" tiles, and such tiles again
    ("below"). `points_first` says that the first is looked at by point.
    """

    config: AttentionConfig
    own_output: bool
    query_tiles: Extent
    tiles: Extent
    blocks: int
    keys: Range
    uneven: bool
    parts: frozenset[str]
    points_first: bool
    q_map: TensorMap
    k_map: TensorMap
    v_map: TensorMap
    o_map: TensorMap | None

    @property
    def ragged_keys(self) -> bool:
        """Whether the last tile of keys may reach beyond them."""
        return "ragged" in self.parts


def make_plan(problem: HopperAttention, config: AttentionConfig, hw: HardwareProfile) -> Plan:
    """Everything derived from a configuration.

    Raises
    ------
    Unsupported
        Where shared memory does not suffice, or tiles are no boxes of an operand.
    """
    attention, c = problem.attention, config
    if c.staged and problem.result is None:
        raise Unsupported("a result that the TMA cannot store")
    own = smem_bytes(c, problem.terms, problem.features, True) <= hw.smem_per_block_bytes
    size = smem_bytes(c, problem.terms, problem.features, own)
    if size > hw.smem_per_block_bytes:
        raise Unsupported(f"{size} bytes of shared memory")
    keys = key_range(attention)
    query_tiles = ceil_div(attention.M, c.block_m)
    tiles = query_tiles * attention.B
    parts, points_first = _parts(problem, c, keys)
    return Plan(
        config=c,
        own_output=own,
        query_tiles=query_tiles,
        tiles=tiles,
        blocks=min(tiles, hw.num_sms) if isinstance(tiles, int) else hw.num_sms,
        keys=keys,
        uneven=any(bound.slope for bound in keys.bounds),
        parts=parts,
        points_first=points_first,
        q_map=problem.q.boxes(c.block_m),
        k_map=problem.k.boxes(c.block_n),
        v_map=problem.v.boxes(c.block_n),
        o_map=problem.result.boxes(WARPGROUP_ROWS) if c.staged else None,
    )


def _parts(
    problem: HopperAttention, c: AttentionConfig, keys: Range
) -> tuple[frozenset[str], bool]:
    """The parts of the loop over keys, and whether the first tile is looked at by point."""
    attention = problem.attention
    M, N = attention.M, attention.N
    ragged = not isinstance(N, int) or N % c.block_n != 0
    found = {"ragged"} if ragged else set()
    by_point = ragged or bool(keys.bounds or keys.rest)
    if isinstance(M, int) and isinstance(N, int) and M <= MAX_WALK * c.block_m:
        tops = range(0, M, c.block_m)
        rows = [(top, min(top + c.block_m, M) - 1) for top in tops]
        all_tiles = [static_tiles(keys, pair, N, c.block_n) for pair in rows]
        if None not in all_tiles:
            for first, whole_first, whole_end, end in all_tiles:
                counts = {
                    "above": end - 1 - whole_end,
                    "whole": whole_end - whole_first,
                    "below": whole_first - first,
                }
                found |= {name for name, count in counts.items() if count}
            return frozenset(found), by_point
    found |= {"whole"} if not keys.rest else set()
    if keys.rest or any(bound.upper for bound in keys.bounds):
        found.add("above")
    if not keys.rest and any(not bound.upper for bound in keys.bounds):
        found.add("below")
    return frozenset(found), by_point


@dataclass(slots=True, eq=False)
class Maps:
    """Addresses of the tensor maps."""

    q: Var
    k: Var
    v: Var
    o: Var | None


@dataclass(slots=True, eq=False)
class Shared:
    """Buffers in shared memory, by boxes, and their barriers: `full` and `empty` ones."""

    q: Expr
    k: Expr
    v: Expr
    o: Expr | None
    q_full: Expr
    q_empty: Expr
    k_full: Expr
    k_empty: Expr
    v_full: Expr
    v_empty: Expr


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Queries of one head: `batch` is the flat coordinate, `query` the first; and their keys."""

    batch: Expr
    query: Expr
    keys: KeyTiles
    axes: dict[Var, Expr]

    @property
    def place(self) -> dict[str, Expr]:
        """Flat coordinates of the groups of the batch."""
        own = {f"batch{i}": value for i, value in enumerate(self.axes.values())}
        return {"batch": self.batch, **own}


@dataclass(slots=True, eq=False)
class Kernel:
    """A Hopper attention under construction."""

    frame: Frame
    problem: HopperAttention
    plan: Plan
    maps: Maps
    shared: Shared | None = None
    thread: Expr | None = None
    block: Expr | None = None

    def size(self, extent: Extent) -> Expr:
        """A size as an int32."""
        return T.int32(extent) if isinstance(extent, int) else convert(extent, "int32")

    @property
    def M(self) -> Expr:
        """Number of queries of a head."""
        return self.size(size_of(self.problem.attention.queries))

    @property
    def N(self) -> Expr:
        """Number of keys of a head."""
        return self.size(size_of(self.problem.attention.keys))

    @contextmanager
    def each_tile(self) -> Iterator[Tile]:
        """Emits the loop over the tiles of this block around what stands in the `with` block."""
        tiles, blocks = self.plan.tiles, self.plan.blocks
        turns = self.size(ceil_div(tiles, blocks))
        with T.serial(0, turns, unroll=False) as turn:
            place = self.block
            if self.plan.uneven:
                # In snake order, so that blocks get long and short tiles.
                odd = tirx.EQ(turn % 2, 1)
                place = tirx.Select(odd, T.int32(blocks - 1) - self.block, self.block)
            number = kept(turn * blocks + place)
            if isinstance(tiles, int) and tiles % blocks == 0:
                yield self._tile(number)
                return
            with T.If(number < self.size(tiles)), T.Then():
                yield self._tile(number)

    def _tile(self, number: Expr) -> Tile:
        attention, c = self.problem.attention, self.plan.config
        query_tiles, batch = self.size(self.plan.query_tiles), self.size(attention.B)
        if self.plan.uneven:  # the longest first, a head's tiles apart
            query, head = query_tiles - 1 - number // batch, kept(number % batch)
        else:
            query, head = number % query_tiles, kept(number // query_tiles)
        first = kept(query * c.block_m)
        axes = coordinates(attention.batch, head, self.frame)
        axes = {var: kept(convert(value, "int32")) for var, value in axes.items()}
        last = tirx.Min(first + (c.block_m - 1), self.M - 1)
        keys = emit_tiles(self.frame, self.plan.keys, (first, last), self.N, c.block_n, axes)
        keys = KeyTiles(*map(kept, (keys.first, keys.whole_first, keys.whole_end, keys.end)))
        return Tile(head, first, keys, {a.var: axes[a.var] for a in attention.batch})


def encode_maps(frame: Frame, problem: HopperAttention, plan: Plan) -> Maps:
    """Emits the host code that makes all tensor maps."""

    def encode(found: TensorMap) -> Var:
        return found.encode(frame.buffers[found.param])

    output = None if plan.o_map is None else encode(plan.o_map)
    return Maps(encode(plan.q_map), encode(plan.k_map), encode(plan.v_map), output)


def allocate(problem: HopperAttention, plan: Plan) -> Shared:
    """Emits the shared memory of the kernel."""
    c, dtype = plan.config, problem.dtype
    columns, features = boxes_of(problem.terms), boxes_of(problem.features)
    pool = T.SMEMPool()

    def tiles(*shape: int) -> Expr:
        return pool.alloc(shape, dtype, align=1024, layout=None)

    def barriers(count: int) -> Expr:
        return pool.alloc((count,), "uint64", align=8)

    o_shape = (c.consumers, features, WARPGROUP_ROWS * BOX)
    q = k = v = o = None
    if c.staged and not plan.own_output:
        # Results take the place of the queries.
        o = tiles(*o_shape)
        pool.move_base_to(0)
        q = tiles(columns, c.block_m * BOX)
        pool.move_base_to(c.block_m * max(columns, features) * BOX * HALF_BYTES)
    else:
        q = tiles(columns, c.block_m * BOX)
    k = tiles(c.stages, columns, c.block_n * BOX)
    v = tiles(c.stages, features, c.block_n * BOX)
    if c.staged and plan.own_output:
        o = tiles(*o_shape)
    shared = Shared(q, k, v, o, barriers(1), barriers(1), *(barriers(c.stages) for _ in range(4)))
    pool.commit()
    return shared


def initialise_barriers(kernel: Kernel) -> None:
    """Emits the set-up of all barriers, by one thread, and makes it visible."""
    s, c = kernel.shared, kernel.plan.config
    counts = [(s.q_full, 1, 1), (s.q_empty, 1, c.consumers)]
    for full, empty in ((s.k_full, s.k_empty), (s.v_full, s.v_empty)):
        counts += [(full, c.stages, 1), (empty, c.stages, c.consumers)]
    with T.If(kernel.thread == 0), T.Then():
        for barrier, number, arrivals in counts:
            for i in range(number):
                T.evaluate(T.ptx.mbarrier.init.shared.b64(barrier.ptr_to([i]), T.uint32(arrivals)))
        T.evaluate(T.ptx["fence.mbarrier_init.release.cluster"]())
    fence_shared()
    T.evaluate(T.cuda.cta_sync())


def kept(value: Expr) -> Expr:
    """An int32, computed here: what is only bound would be spelled out wherever it is used."""
    if isinstance(value, tirx.IntImm):
        return value
    found = T.alloc_local((1,), "int32")
    T.buffer_store(found, value, [0])
    return found[0]


def arrive(barrier: Expr) -> None:
    """Emits an arrival."""
    T.evaluate(T.ptx.mbarrier.arrive.shared.b64(barrier, T.uint32(1)))
