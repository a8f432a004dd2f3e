"""What the parts of a Hopper kernel share: shared memory, barriers, tensor maps, some PTX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...gpu.intrinsics import cluster_arrive, cluster_wait, device_call
from ...gpu.memory import shared_pool
from ...gpu.product_frame import Frame, Grid, Tile, in_register
from ...program.expr import convert
from .model import BOX, STEP_BYTES, HopperProblem
from .plan import Plan

# Device functions for blocks of a cluster that write to each other's shared memory.
#
# `tests/cuda_emulator/hopper.h` has a stand-in for each.

_MAP = (
    "unsigned a = (unsigned)__cvta_generic_to_shared(p), r; "
    'asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(rank)); '
)


def place_in(place: Expr, rank: Expr) -> Expr:
    """The address of the same shared-memory `place` of the cluster's block `rank`."""
    return device_call("uint32", "place_in", "void* p, int rank", _MAP + "return r;", place, rank)


def send_to(address: Expr, values: Sequence[Expr], barrier: Expr) -> Expr:
    """Stores four float32 at a 16-byte aligned address; the barrier there counts the bytes.

    Both addresses are from `place_in`. Nobody waits for the store but who waits for the barrier.
    """
    body = (
        'asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 '
        '[%0], {%1, %2, %3, %4}, [%5];" '
        ':: "r"(r), "f"(a), "f"(b), "f"(c), "f"(d), "r"(m) : "memory");'
    )
    arguments = "unsigned r, float a, float b, float c, float d, unsigned m"
    return device_call("void", "send_to", arguments, body, address, *values, barrier)


def arrive_at(barrier: Expr, rank: Expr) -> Expr:
    """Arrives at the same barrier of block `rank`, to say that memory there is free.

    It orders no stores to the other block: that takes a release in the scope of the cluster, for
    which ptxas emits a barrier for all memory of the device (at every step of a product of
    4096^3: 250 us instead of 174 on an H200, 2026-11-20).
    """
    body = _MAP + (
        'asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(r) : "memory");'
    )
    return device_call("void", "arrive_at", "void* p, int rank", body, barrier, rank)


def add_floats(source: Expr, target: Expr) -> Expr:
    """Adds the four float32 at a 16-byte aligned place to four in registers."""
    body = (
        "float4 v = *(const float4*)p; float* s = (float*)q; "
        "s[0] += v.x; s[1] += v.y; s[2] += v.z; s[3] += v.w;"
    )
    return device_call("void", "add_floats", "const void* p, void* q", body, source, target)


# Named barriers 0 and 1 are the block's own; each consumer warpgroup has one.
FIRST_BARRIER = 2

# Places in the registers of a `Ring`.
STAGE, PHASE = range(2)


@dataclass(slots=True, eq=False)
class Maps:
    """Addresses of the tensor maps by segment, and by product or part of A; those of A once if
    segments share it.
    """

    a: list[list[Var]]
    b: list[list[Var]]
    staged: list[Var | None]
    residual: list[Var | None]


@dataclass(slots=True, eq=False)
class Shared:
    """Buffers and barriers in shared memory.

    `full` and `empty` belong to the stages of A and B, `arrived` to the boxes a residual comes in.
    Where A has stages of its own, `brought` and `free` belong to those.
    Of blocks that split the terms of a tile: `partial` lies over the stages and holds sums of the
    others; `drained` says that all blocks of the cluster are through with their stages, `summed`
    (one a consumer) that the sums have come, `resume` that the producer may go on.
    """

    a: Expr
    b: Expr
    boxes: Expr | None
    full: Expr
    empty: Expr
    arrived: Expr
    partial: Expr | None = None
    drained: Expr | None = None
    summed: Expr | None = None
    resume: Expr | None = None
    brought: Expr | None = None
    free: Expr | None = None


@dataclass(slots=True, eq=False)
class Hopper:
    """A Hopper kernel under construction.

    `cluster` is the number of the block's cluster (or of the block), `rank` its place therein.
    """

    frame: Frame
    problem: HopperProblem
    plan: Plan
    grid: Grid
    maps: Maps
    shared: Shared | None = None
    thread: Expr | None = None
    cluster: Expr | None = None
    rank: Expr | None = None

    def tile(self, turn: Expr) -> Tile:
        """The tile a block works on in its turn number `turn`."""
        tile = self.grid.tile(self.cluster + turn * self.plan.clusters)
        multicast = self.plan.config.multicast
        if multicast == 1:
            return tile
        return replace(tile, m=T.Bind(tile.m * multicast + self.rank))

    def step_bytes(self) -> Expr | int:
        """Bytes that arrive in a step; emits a register for them where the call tells the rows."""
        plan = self.plan
        if plan.few_rows is None:
            return plan.transaction_bytes
        return in_register(convert(plan.few_rows, "int32") * STEP_BYTES + plan.b_bytes)

    @property
    def steps(self) -> Expr | int:
        """Steps of a tile that this block computes."""
        least, spare = self.plan.least_steps, self.plan.spare_steps
        return least + T.cast(self.rank < spare, "int32") if spare else least

    def steps_of(self, tile: Tile) -> Expr | int:
        """Steps of one tile that this block computes."""
        first, *others = self.plan.depths
        if self.problem.shared or all(depth == first for depth in others):
            return self.steps
        found = T.int32(first)
        for number, depth in enumerate(others, 1):
            found = tirx.Select(tile.segment == T.int32(number), T.int32(depth), found)
        return T.Bind(found)

    @property
    def first_step(self) -> Expr | int:
        """The first of them."""
        plan = self.plan
        if plan.config.split == 1:
            return 0
        spare = T.int32(plan.spare_steps)
        return self.rank * plan.least_steps + tirx.Min(self.rank, spare)

    @property
    def first_column(self) -> Expr | int:
        """The first column of a tile whose outputs this block stores."""
        return 0 if self.plan.config.split == 1 else self.rank * self.plan.share_n

    @property
    def turns(self) -> Expr:
        """Number of tiles of this block."""
        tiles, clusters = self.plan.tiles, self.plan.clusters
        if isinstance(tiles, int):
            # Without a division, whose result would be kept in a register throughout.
            least, spare = divmod(tiles, clusters)
            return least + T.cast(self.cluster < spare, "int32") if spare else T.int32(least)
        return (convert(tiles, "int32") - self.cluster + clusters - 1) // clusters


def encode_maps(frame: Frame, problem: HopperProblem, plan: Plan) -> Maps:
    """Emits the host code that makes all tensor maps."""
    buffers = frame.buffers

    def encode(found, boxes=None) -> Var | None:
        return None if found is None else found.encode(buffers[found.param], boxes)

    staged = plan.config.staged
    few = {} if plan.few_rows is None else {problem.a.rows: plan.few_rows}
    return Maps(
        a=[[encode(m, few) for m in maps] for maps in plan.a_maps],
        b=[[encode(m) for m in maps] for maps in plan.b_maps],
        staged=[encode(s.staged_map) if staged else None for s in problem.segments],
        residual=[encode(s.residual_map) if staged else None for s in problem.segments],
    )


def allocate(problem: HopperProblem, plan: Plan) -> Shared:
    """Emits the shared memory of the kernel."""
    c = plan.config
    pool = shared_pool()

    def tiles(count: int, size: int, dtype: str = "uint8") -> Expr:
        return pool.alloc((count, size), dtype, align=1024, layout=None)

    shared = Shared(
        a=tiles(plan.a_stages, plan.a_bytes),
        b=tiles(c.stages, plan.b_bytes),
        boxes=tiles(plan.consumers * plan.boxes, BOX * BOX, "float16") if plan.boxes else None,
        full=pool.alloc((c.stages,), "uint64", align=8),
        empty=pool.alloc((c.stages,), "uint64", align=8),
        arrived=pool.alloc((max(1, plan.consumers * c.boxes),), "uint64", align=8),
    )
    if plan.data_stages:
        shared.brought = pool.alloc((plan.data_stages,), "uint64", align=8)
        shared.free = pool.alloc((plan.data_stages,), "uint64", align=8)
    if c.split > 1:
        shared.drained = pool.alloc((1,), "uint64", align=8)
        shared.summed = pool.alloc((plan.consumers,), "uint64", align=8)
        shared.resume = pool.alloc((1,), "uint64", align=8)
        pool.move_base_to(0)
        shared.partial = pool.alloc((plan.exchange_bytes // 4,), "float32", align=1024)
    pool.commit()
    return shared


def initialise_barriers(kernel: Hopper) -> None:
    """Emits the set-up of all barriers, by one thread, and makes it visible."""
    shared, c = kernel.shared, kernel.plan.config
    with T.If(kernel.thread == 0), T.Then():
        for stage in range(c.stages):
            _initialise(shared.full.ptr_to([stage]), 1)
            _initialise(shared.empty.ptr_to([stage]), kernel.plan.consumers * c.multicast)
        for box in range(kernel.plan.consumers * c.boxes):
            _initialise(shared.arrived.ptr_to([box]), 1)
        for stage in range(kernel.plan.data_stages):
            _initialise(shared.brought.ptr_to([stage]), 1)
            _initialise(shared.free.ptr_to([stage]), kernel.plan.consumers)
        if c.split > 1:
            _initialise(shared.drained.ptr_to([0]), c.split * kernel.plan.consumers)
            _initialise(shared.resume.ptr_to([0]), kernel.plan.consumers)
            for number in range(kernel.plan.consumers):
                _initialise(shared.summed.ptr_to([number]), 1)
        if kernel.plan.cluster > 1:
            T.evaluate(T.ptx["fence.mbarrier_init.release.cluster"]())
    fence_shared()
    if kernel.plan.cluster == 1:
        T.evaluate(T.cuda.cta_sync())
    else:
        T.evaluate(cluster_arrive())
        T.evaluate(cluster_wait())


def _initialise(barrier: Expr, arrivals: int) -> None:
    T.evaluate(T.ptx.mbarrier.init.shared.b64(barrier, T.uint32(arrivals)))


def expect(barrier: Expr, size: Expr | int) -> None:
    """Emits an arrival that makes the barrier wait for `size` bytes."""
    size = T.uint32(size) if isinstance(size, int) else convert(size, "uint32")
    T.evaluate(T.ptx.mbarrier.arrive.expect_tx.shared.b64(barrier, size))


def wait(barrier: Expr, phase: Expr) -> None:
    """Emits a wait for the end of a barrier's phase."""
    T.evaluate(T.cuda.mbarrier_wait(barrier, phase))


def release(kernel: Hopper, stage: Expr) -> None:
    """Emits the hand-back of a stage by one thread of a consumer warpgroup.

    Where blocks load for each other, it goes to all that write into the stage.
    """
    barrier = kernel.shared.empty.ptr_to([stage])
    multicast = kernel.plan.config.multicast
    thread = kernel.thread % 128
    with T.If(thread < multicast), T.Then():
        if multicast > 1:
            T.evaluate(arrive_at(barrier, thread))
        else:
            T.evaluate(T.ptx.mbarrier.arrive.shared.b64(barrier, T.uint32(1)))


def release_data(kernel: Hopper, stage: Expr) -> None:
    """Emits the hand-back of a stage of A alone by one thread of a consumer warpgroup."""
    with T.If(kernel.thread % 128 == 0), T.Then():
        barrier = kernel.shared.free.ptr_to([stage])
        T.evaluate(T.ptx.mbarrier.arrive.shared.b64(barrier, T.uint32(1)))


def warpgroup_sync(number: Expr) -> None:
    """Emits the barrier of consumer warpgroup `number`."""
    barrier = T.cast(FIRST_BARRIER + number, "uint32")
    T.evaluate(T.ptx.bar.sync(barrier, T.uint32(128)))


def fence_shared() -> None:
    """Emits the fence between writes to shared memory and the TMA that reads it."""
    T.evaluate(T.ptx.fence.proxy.async_.shared__cta())


def set_registers(count: int, more: bool) -> None:
    """Emits the change of a warpgroup's registers a thread."""
    name = "inc" if more else "dec"
    T.evaluate(T.ptx[f"setmaxnreg.{name}.sync.aligned.u32"](count))


class Ring:
    """Position in a ring of stages, kept in registers: stage and phase."""

    def __init__(self, stages: int, phase: int):
        self.stages = stages
        self.state = T.alloc_local((2,), "int32")
        for place, value in ((STAGE, 0), (PHASE, phase)):
            T.buffer_store(self.state, T.int32(value), [place])

    @property
    def stage(self) -> Expr:
        """The present stage."""
        return self.state[STAGE]

    @property
    def phase(self) -> Expr:
        """Parity of the turn of the ring."""
        return self.state[PHASE]

    @property
    def previous(self) -> Expr:
        """The stage before the present one."""
        first = tirx.EQ(self.stage, 0)
        return tirx.Select(first, T.int32(self.stages - 1), self.stage - T.int32(1))

    def advance(self) -> None:
        """Emits the step to the next stage."""
        T.buffer_store(self.state, self.stage + 1, [STAGE])
        with T.If(self.stage == self.stages), T.Then():
            T.buffer_store(self.state, T.int32(0), [STAGE])
            T.buffer_store(self.state, T.bitwise_xor(self.phase, T.int32(1)), [PHASE])
