"""What the parts of a Hopper kernel share: shared memory, barriers, tensor maps, some PTX."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..expr import convert
from .gemm_frame import Frame
from .gemm_grid import Grid, Tile
from .gemm_hopper_plan import BLOCK_K, Plan
from .gemm_hopper_problem import BOX, HopperProblem

# Places in the registers of a `Ring`.
STAGE, PHASE, PREVIOUS = range(3)


@dataclass(slots=True, eq=False)
class Maps:
    """Addresses of the tensor maps; B and outputs by segment (and product)."""

    a: Var
    b: list[list[Var]]
    staged: list[Var | None]
    residual: Var | None


@dataclass(slots=True, eq=False)
class Shared:
    """Buffers and barriers in shared memory.

    `full` and `empty` belong to the stages of A and B, `arrived` to the boxes a residual comes in.
    """

    a: Expr
    b: Expr
    boxes: Expr | None
    full: Expr
    empty: Expr
    arrived: Expr


@dataclass(slots=True, eq=False)
class Hopper:
    """A Hopper kernel under construction."""

    frame: Frame
    problem: HopperProblem
    plan: Plan
    grid: Grid
    maps: Maps
    shared: Shared | None = None
    thread: Expr | None = None
    block: Expr | None = None

    def tile(self, turn: Expr) -> Tile:
        """The tile a block works on in its turn number `turn`."""
        return self.grid.tile(self.block + turn * self.plan.blocks)

    @property
    def turns(self) -> Expr:
        """Number of tiles of this block."""
        tiles = self.plan.tiles
        tiles = tiles if isinstance(tiles, int) else convert(tiles, "int32")
        return (tiles - self.block + self.plan.blocks - 1) // self.plan.blocks


def encode_maps(frame: Frame, problem: HopperProblem, plan: Plan) -> Maps:
    """Emits the host code that makes all tensor maps."""
    buffers = frame.buffers

    def encode(found) -> Var | None:
        return None if found is None else found.encode(buffers[found.param])

    staged = plan.config.staged
    return Maps(
        a=encode(plan.a_map),
        b=[[encode(m) for m in maps] for maps in plan.b_maps],
        staged=[encode(s.staged_map) if staged else None for s in problem.segments],
        residual=encode(problem.segments[0].residual_map) if staged else None,
    )


def allocate(problem: HopperProblem, plan: Plan) -> Shared:
    """Emits the shared memory of the kernel."""
    c = plan.config
    pool = T.SMEMPool()

    def tiles(count: int, size: int) -> Expr:
        return pool.alloc((count, size), problem.dtype, align=1024, layout=None)

    shared = Shared(
        a=tiles(c.stages, c.block_m * BLOCK_K),
        b=tiles(c.stages, c.block_n * BLOCK_K),
        boxes=tiles(plan.consumers * c.boxes, BOX * BOX) if c.boxes else None,
        full=pool.alloc((c.stages,), "uint64", align=8),
        empty=pool.alloc((c.stages,), "uint64", align=8),
        arrived=pool.alloc((max(1, plan.consumers * c.boxes),), "uint64", align=8),
    )
    pool.commit()
    return shared


def initialise_barriers(kernel: Hopper) -> None:
    """Emits the set-up of all barriers, by one thread, and makes it visible."""
    shared, c = kernel.shared, kernel.plan.config
    with T.If(kernel.thread == 0), T.Then():
        for stage in range(c.stages):
            _initialise(shared.full.ptr_to([stage]), 1)
            _initialise(shared.empty.ptr_to([stage]), kernel.plan.consumers)
        for box in range(kernel.plan.consumers * c.boxes):
            _initialise(shared.arrived.ptr_to([box]), 1)
    fence_shared()
    T.evaluate(T.cuda.cta_sync())


def _initialise(barrier: Expr, arrivals: int) -> None:
    T.evaluate(T.ptx.mbarrier.init.shared.b64(barrier, T.uint32(arrivals)))


def expect(barrier: Expr, size: int) -> None:
    """Emits an arrival that makes the barrier wait for `size` bytes."""
    T.evaluate(T.ptx.mbarrier.arrive.expect_tx.shared.b64(barrier, T.uint32(size)))


def wait(barrier: Expr, phase: Expr) -> None:
    """Emits a wait for the end of a barrier's phase."""
    T.evaluate(T.cuda.mbarrier_wait(barrier, phase))


def release(kernel: Hopper, stage: Expr) -> None:
    """Emits the hand-back of a stage by one thread of a consumer warpgroup."""
    with T.If(kernel.thread % 128 == 0), T.Then():
        barrier = kernel.shared.empty.ptr_to([stage])
        T.evaluate(T.ptx.mbarrier.arrive.shared.b64(barrier, T.uint32(1)))


def fence_shared() -> None:
    """Emits the fence between writes to shared memory and the TMA that reads it."""
    T.evaluate(T.ptx.fence.proxy.async_.shared__cta())


def set_registers(count: int, more: bool) -> None:
    """Emits the change of a warpgroup's registers a thread."""
    name = "inc" if more else "dec"
    T.evaluate(T.ptx[f"setmaxnreg.{name}.sync.aligned.u32"](count))


class Ring:
    """Position in a ring of stages, kept in registers: stage, phase, and the stage before."""

    def __init__(self, stages: int, phase: int):
        self.stages = stages
        self.state = T.alloc_local((4,), "int32")
        for place, value in ((STAGE, 0), (PHASE, phase), (PREVIOUS, 0)):
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
        return self.state[PREVIOUS]

    def advance(self) -> None:
        """Emits the step to the next stage."""
        T.buffer_store(self.state, self.stage, [PREVIOUS])
        T.buffer_store(self.state, self.stage + 1, [STAGE])
        with T.If(self.stage == self.stages), T.Then():
            T.buffer_store(self.state, T.int32(0), [STAGE])
            T.buffer_store(self.state, T.bitwise_xor(self.phase, T.int32(1)), [PHASE])
