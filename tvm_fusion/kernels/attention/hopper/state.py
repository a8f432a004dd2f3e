"""What the parts of a Hopper attention share: shared memory, barriers, tensor maps, tiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ....config import HardwareProfile
from ....errors import Unsupported
from ...gemm.hopper.state import fence_shared, wait
from ...gpu.memory import shared_pool
from ...gpu.product_frame import Frame, ceil_div
from ...gpu.tensor_map import TensorMap
from ..read.bounds import Match, key_range, split_match
from ..tiled.tiles import KeyTiles, Tile, TiledKernel, TiledPlan, kept, loop_parts
from .config import BOX, HALF_BYTES, WARPGROUP_ROWS, AttentionConfig, boxes_of, smem_bytes
from .problem import HopperAttention

# The producer needs one thread of its warpgroup. The other warps are scouts: in turn they look at
# the keys of a coming tile of queries and pass on in shared memory what they find, so that a search
# may take as long as the consumers need for several tiles. Everything that is left out was read.

WARP = 32

# Warps that search, behind that of the producer; each writes into a slot of its own.
SCOUTS = 3

# Places of a slot: tiles of keys as in `KeyTiles`, and whether keys of a value stand apart.
FIRST, END, WHOLE_FIRST, WHOLE_END, MIXED, PLACES = range(6)


# ---- what scouts find


@dataclass(slots=True, eq=False)
class Found:
    """What scouts find out about coming tiles of queries, in shared memory.

    Attributes
    ----------
    tiles : for each slot the `PLACES`.
    rows : for each slot the first and the last key of each query.
    tiles_full : the first and the last tile are there, for the producer.
    rows_full : the rest is there as well, for the consumers; an arrival of each lane.
    empty : all have read it.
    """

    tiles: Expr
    rows: Expr
    tiles_full: Expr
    rows_full: Expr
    empty: Expr

    @property
    def barriers(self) -> list[tuple[Expr, int, int]]:
        """Barriers, how many, and how many arrivals each waits for."""
        return [
            (self.tiles_full, SCOUTS, 1),
            (self.rows_full, SCOUTS, WARP),
            (self.empty, SCOUTS, 1),
        ]


def found_bytes(block_m: int) -> int:
    """Shared memory of `Found.rows`; the rest lies where barriers do."""
    return SCOUTS * block_m * 2 * 4


def allocate_found(pool: T.SMEMPool, block_m: int) -> Found:
    """Emits the shared memory."""
    tiles = pool.alloc((SCOUTS, PLACES), "int32", align=8)
    rows = pool.alloc((SCOUTS, block_m, 2), "int32", align=8)
    return Found(tiles, rows, *(pool.alloc((SCOUTS,), "uint64", align=8) for _ in range(3)))


def slot_of(turn: Expr) -> tuple[Expr, Expr]:
    """The slot of a turn, and the parity of its use."""
    slots = T.int32(SCOUTS)
    return T.truncmod(turn, slots), T.bitwise_and(T.truncdiv(turn, slots), T.int32(1))


def take_range(kernel: Kernel) -> tuple[Expr, Expr]:
    """Emits the producer's wait for the range of its tile; the first tile of keys, and the one
    behind the last.
    """
    found = kernel.shared.found
    slot, phase = slot_of(kernel.turn)
    wait(found.tiles_full.ptr_to([slot]), phase)
    first, end = (kept(found.tiles[slot, place]) for place in (FIRST, END))
    return first, end


def take_rows(kernel: Kernel) -> tuple[KeyTiles, Expr]:
    """Emits the consumers' wait for what is found about the present tile: its tiles of keys, and
    whether keys of a value stand apart.
    """
    found = kernel.shared.found
    slot, phase = slot_of(kernel.turn)
    wait(found.rows_full.ptr_to([slot]), phase)
    places = [found.tiles[slot, i] for i in (FIRST, WHOLE_FIRST, WHOLE_END, END)]
    return KeyTiles(*map(kept, places)), kept(found.tiles[slot, MIXED])


def release_found(kernel: Kernel) -> None:
    """Emits the hand-back of what was found about the tile before, which all have read."""
    with T.If(kernel.turn > 0), T.Then():
        slot, _ = slot_of(kernel.turn - 1)
        empty = kernel.shared.found.empty.ptr_to([slot])
        T.evaluate(T.ptx.mbarrier.arrive.shared.b64(empty, T.uint32(1)))


@dataclass(frozen=True, slots=True, eq=False)
class Plan(TiledPlan):
    """What follows from a problem and a configuration.

    `own_output` says that results have shared memory of their own, not that of the queries;
    `blocks` take the tiles in turn. With a `match`, scouts leave out tiles of keys by what they
    read.
    """

    own_output: bool
    blocks: int
    match: Match | None
    q_map: TensorMap
    k_map: TensorMap
    v_map: TensorMap
    o_map: TensorMap | None


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
    match, keys = split_match(attention, key_range(attention))
    more = _more_bytes(problem, c) + (0 if match is None else found_bytes(c.block_m))
    own = smem_bytes(c, problem.terms, problem.features, True) + more <= hw.smem_per_block_bytes
    size = smem_bytes(c, problem.terms, problem.features, own) + more
    if size > hw.smem_per_block_bytes:
        raise Unsupported(f"{size} bytes of shared memory")
    query_tiles = ceil_div(attention.M, c.block_m)
    tiles = query_tiles * attention.B
    parts, points_first = loop_parts(attention, keys, c.block_m, c.block_n)
    if match is not None:
        looked_at = {"above", "below"} if keys.rest else {"above", "whole", "below"}
        parts = parts & {"ragged"} | looked_at
        points_first = True
    return Plan(
        config=c,
        own_output=own,
        query_tiles=query_tiles,
        tiles=tiles,
        blocks=min(tiles, hw.num_sms) if isinstance(tiles, int) else hw.num_sms,
        match=match,
        keys=keys,
        uneven=any(bound.slope for bound in keys.bounds),
        parts=parts,
        points_first=points_first,
        q_map=problem.q.boxes(c.block_m),
        k_map=problem.k.boxes(c.block_n),
        v_map=problem.v.boxes(c.block_n),
        o_map=problem.result.boxes(WARPGROUP_ROWS) if c.staged else None,
    )


def _more_bytes(problem: HopperAttention, config: AttentionConfig) -> int:
    """What small tiles of transposed keys and values take beside others: they are whole boxes."""
    more = 0
    for view in (problem.k, problem.v):
        boxes, size = view.layout(config.block_n)
        more += max(0, boxes * size - config.block_n * boxes_of(view.head) * BOX)
    return more * config.stages * HALF_BYTES


@dataclass(slots=True, eq=False)
class Maps:
    """Addresses of the tensor maps."""

    q: Var
    k: Var
    v: Var
    o: Var | None


@dataclass(slots=True, eq=False)
class Shared:
    """Buffers in shared memory, by boxes, and their barriers: `full` and `empty` ones.

    `found` is what scouts find out about the keys of coming tiles of queries.
    """

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
    found: Found | None = None


@dataclass(slots=True, eq=False)
class Kernel(TiledKernel):
    """A Hopper attention under construction; `turn` counts the tiles of a block, in its loop."""

    problem: HopperAttention
    plan: Plan
    maps: Maps
    shared: Shared | None = None
    thread: Expr | None = None
    block: Expr | None = None
    turn: Expr | None = None

    @contextmanager
    def each_tile(self) -> Iterator[Tile]:
        """Emits the loop over the tiles of this block around what stands in the `with` block."""
        tiles, blocks = self.plan.tiles, self.plan.blocks
        turns = self.size(ceil_div(tiles, blocks))
        with T.serial(0, turns, unroll=False) as turn:
            self.turn, place = turn, self.block
            if self.plan.uneven:
                # In snake order, so that blocks get long and short tiles.
                odd = tirx.EQ(turn % 2, 1)
                place = tirx.Select(odd, T.int32(blocks - 1) - self.block, self.block)
            number = kept(turn * blocks + place)
            if isinstance(tiles, int) and tiles % blocks == 0:
                yield self.tile(number)
                return
            with T.If(number < self.size(tiles)), T.Then():
                yield self.tile(number)


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
    pool = shared_pool()

    def tiles(*shape: int) -> Expr:
        return pool.alloc(shape, dtype, align=1024, layout=None)

    def barriers(count: int) -> Expr:
        return pool.alloc((count,), "uint64", align=8)

    o_shape = (c.consumers, features, WARPGROUP_ROWS * BOX)
    q_shape = problem.q.layout(c.block_m)
    q = k = v = o = None
    if c.staged and not plan.own_output:
        # Results take the place of the queries.
        o = tiles(*o_shape)
        pool.move_base_to(0)
        q = tiles(*q_shape)
        pool.move_base_to(c.block_m * max(columns, features) * BOX * HALF_BYTES)
    else:
        q = tiles(*q_shape)
    k = tiles(c.stages, *problem.k.layout(c.block_n))
    v = tiles(c.stages, *problem.v.layout(c.block_n))
    if c.staged and plan.own_output:
        o = tiles(*o_shape)
    shared = Shared(q, k, v, o, barriers(1), barriers(1), *(barriers(c.stages) for _ in range(4)))
    if plan.match is not None:
        shared.found = allocate_found(pool, c.block_m)
    pool.commit()
    return shared


def initialise_barriers(kernel: Kernel) -> None:
    """Emits the set-up of all barriers, by one thread, and makes it visible."""
    s, c = kernel.shared, kernel.plan.config
    counts = [(s.q_full, 1, 1), (s.q_empty, 1, c.consumers)]
    for full, empty in ((s.k_full, s.k_empty), (s.v_full, s.v_empty)):
        counts += [(full, c.stages, 1), (empty, c.stages, c.consumers)]
    if s.found is not None:
        counts += s.found.barriers
    with T.If(kernel.thread == 0), T.Then():
        for barrier, number, arrivals in counts:
            for i in range(number):
                T.evaluate(T.ptx.mbarrier.init.shared.b64(barrier.ptr_to([i]), T.uint32(arrivals)))
        T.evaluate(T.ptx["fence.mbarrier_init.release.cluster"]())
    fence_shared()
    T.evaluate(T.cuda.cta_sync())


def arrive(barrier: Expr) -> None:
    """Emits an arrival."""
    T.evaluate(T.ptx.mbarrier.arrive.shared.b64(barrier, T.uint32(1)))
