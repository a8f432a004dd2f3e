"""A consumer warpgroup: 64 rows of every tile, wgmma over the steps, the epilogue between them."""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script import tirx as T

from .gemm_grid import Tile
from .gemm_hopper_epilogue import Epilogue
from .gemm_hopper_plan import BLOCK_K, WGMMA_K
from .gemm_hopper_problem import BOX
from .gemm_hopper_state import Hopper, Ring, release, wait

# Descriptor fields for the 128-byte swizzle: stride between groups of 8 rows, in units of 16 bytes.
GROUP_STRIDE = 8 * BLOCK_K * 2 // 16
SWIZZLE_128B = 3


class Consumer:
    """Emits the code of the consumer warpgroups."""

    def __init__(self, kernel: Hopper, number: Expr):
        self.kernel, self.plan, self.number = kernel, kernel.plan, number
        self.dtype = {"float16": "f16", "bfloat16": "bf16"}[kernel.problem.dtype]
        self.sums = T.alloc_local((self.plan.accumulators,), "float32")
        a, b = kernel.problem.a, kernel.problem.segments[0].b[0]
        self.a_start = self._descriptor(kernel.shared.a, a.k_major, number * BOX * BLOCK_K)
        self.b_start = self._descriptor(kernel.shared.b, b.k_major, 0)
        self.a_step = self._step(a.k_major)
        self.b_step = self._step(b.k_major)
        self.ring = Ring(self.plan.config.stages, 0)
        self.epilogue = Epilogue(kernel, number, self.sums)

    def _descriptor(self, buffer: Expr, k_major: bool, offset: Expr | int) -> Expr:
        """The matrix descriptor of a tile in stage 0.

        The leading offset is the distance of panels of 64 contiguous rows; not used where terms are
        contiguous, since one row of the swizzle is a whole step then.
        """
        found = T.alloc_local((1,), "uint64")
        leading = 1 if k_major else BOX * BLOCK_K * 2 // 16
        T.evaluate(
            T.cuda.wgmma.encode_matrix_descriptor(
                found.ptr_to([0]), buffer.ptr_to([0, offset]), leading, GROUP_STRIDE, SWIZZLE_128B
            )
        )
        return found

    def _step(self, k_major: bool) -> int:
        """Distance of 16 terms in units of 16 bytes."""
        return WGMMA_K * 2 // 16 if k_major else WGMMA_K * BOX * 2 // 16

    def emit(self) -> None:
        """Emits the loop over tiles."""
        plan = self.plan
        with T.serial(0, self.kernel.turns) as turn:
            tile = self.kernel.tile(turn)
            if plan.config.deferred:
                self._steps_with_epilogue(turn, tile)
            else:
                with T.serial(0, plan.steps) as step:
                    self._step_of(step, tile)
                self._drain()
                self.epilogue.now(turn, tile)
        if plan.config.deferred:
            # With symbolic sizes a block may have had no tile.
            with T.If(self.kernel.turns > 0), T.Then():
                for chunk in range(plan.chunks):
                    self.epilogue.chunk(chunk)
        self.epilogue.finish()

    def _steps_with_epilogue(self, turn: Expr, tile: Tile) -> None:
        """The first steps carry the epilogue of the tile before."""
        plan = self.plan
        for step in range(plan.peeled):
            self._step_of(step, tile)
            first = step * plan.chunks_per_step
            with T.If(turn > 0), T.Then():
                for chunk in range(first, min(first + plan.chunks_per_step, plan.chunks)):
                    self.epilogue.chunk(chunk)
        with T.serial(plan.peeled, plan.steps) as step:
            self._step_of(step, tile)
        self._drain()
        self.epilogue.keep(turn, tile)

    def _step_of(self, step: Expr | int, tile: Tile) -> None:
        """One step: wait for its stage, issue its wgmmas, hand back the stage before."""
        ring, kernel, plan = self.ring, self.kernel, self.plan
        wait(kernel.shared.full.ptr_to([ring.stage]), ring.phase)
        size = plan.config.block_m * BLOCK_K * 2 // 16
        a = T.Bind(self.a_start[0] + T.cast(ring.stage * size, "uint64"))
        size = plan.config.block_n * BLOCK_K * 2 // 16
        b = T.Bind(self.b_start[0] + T.cast(ring.stage * size, "uint64"))
        T.evaluate(T.ptx.wgmma.fence.sync.aligned())
        name = (
            f"wgmma.mma_async.sync.aligned.m64n{plan.config.block_n}k{WGMMA_K}"
            f".f32.{self.dtype}.{self.dtype}"
        )
        sums = [self.sums[i] for i in range(plan.accumulators)]
        problem = kernel.problem
        transposed = [0 if view.k_major else 1 for view in (problem.a, problem.segments[0].b[0])]
        for part in range(BLOCK_K // WGMMA_K):
            later = T.ptx.pred(True if part else step > 0)
            at_a = a + T.uint64(part * self.a_step)
            at_b = b + T.uint64(part * self.b_step)
            T.evaluate(T.ptx[name](*sums, at_a, at_b, later, 1, 1, *transposed))
        T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())
        T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(1))
        self._release_previous(step)
        self.epilogue.during(step, tile)
        ring.advance()

    def _release_previous(self, step: Expr | int) -> None:
        if isinstance(step, int):
            if step:
                release(self.kernel, self.ring.previous)
        elif self.plan.config.deferred:
            release(self.kernel, self.ring.previous)
        else:
            with T.If(step > 0), T.Then():
                release(self.kernel, self.ring.previous)

    def _drain(self) -> None:
        """The last step's products are in the accumulators."""
        T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(0))
        release(self.kernel, self.ring.previous)
