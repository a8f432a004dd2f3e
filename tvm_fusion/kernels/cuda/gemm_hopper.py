"""GEMM on Hopper's tensor cores: persistent blocks, TMA, wgmma, a producer, one or two consumers.

    producer warpgroup:   tiles of A and B -> ring of stages in shared memory (TMA, mbarriers)
    consumer warpgroups:  64 rows each: wgmma over the steps of a tile; epilogue; boxes -> TMA

Blocks stay and take every (number of blocks)-th tile, so the producer runs ahead into the next tile
while an epilogue works. The parts: `gemm_hopper_problem` (what the TMA can address),
`gemm_hopper_plan` (configurations), `gemm_hopper_producer`, `gemm_hopper_consumer`,
`gemm_hopper_epilogue`.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from ...config import HardwareProfile
from ...errors import Unsupported
from ..contraction import Contraction
from .gemm_frame import Frame, open_kernel
from .gemm_grid import Grid
from .gemm_hopper_configs import rank_configs
from .gemm_hopper_consumer import Consumer
from .gemm_hopper_plan import PRODUCER_REGISTERS, HopperConfig, Plan, make_plan
from .gemm_hopper_problem import HopperProblem, read_problems
from .gemm_hopper_producer import emit_producer
from .gemm_hopper_state import (
    Hopper,
    allocate,
    encode_maps,
    initialise_barriers,
    set_registers,
)

ARCHITECTURE = "sm_90a"


def hopper_configs(contraction: Contraction, hw: HardwareProfile) -> list[HopperConfig]:
    """The configurations that fit the contraction and the device, best guess first.

    Raises
    ------
    Unsupported
        Where the kernel cannot compute the contraction; see `emit_gemm_hopper`.
    """
    configs = rank_configs(_problems(contraction, hw), hw)
    if not configs:
        raise Unsupported("no tile of this contraction fits")
    return configs


def emit_gemm_hopper(
    contraction: Contraction, hw: HardwareProfile, config: HopperConfig | None = None
) -> tirx.PrimFunc:
    """Write a contraction as one TIRx kernel for Hopper's tensor cores.

    Parameters
    ----------
    contraction : Contraction
        float16 or bfloat16 operands that are plain strided tensors (transposed, batched, with heads
        permuted), sums in float32; one product, a gate/up pair, or several products side by side
        that share A; any epilogue. Batch and M may be symbolic.
    hw : HardwareProfile
        A Hopper device (sm_90a).
    config : HopperConfig, optional
        One of `hopper_configs`; the first where None.

    Returns
    -------
    func : tirx.PrimFunc
        With the parameters of the PrimFunc that the contraction was read from.

    Raises
    ------
    Unsupported
        For another architecture or dtype, symbolic N or K, an operand that is computed, row pitches
        that are no multiples of 16 bytes, tiles that are no boxes of a tensor of 5 dimensions.
    """
    problems = _problems(contraction, hw)
    if config is None:
        config = hopper_configs(contraction, hw)[0]
    if config.batched not in problems:
        raise Unsupported(f"the first {config.batched} row axes cannot be batch")
    problem = problems[config.batched]
    plan = make_plan(problem, config, hw)
    with open_kernel(contraction) as frame:
        _emit(frame, problem, plan)
    return frame.func


def _problems(contraction: Contraction, hw: HardwareProfile) -> dict[int, HopperProblem]:
    if hw.arch != ARCHITECTURE:
        raise Unsupported(f"{hw.arch} has no wgmma")
    return read_problems(contraction)


def _emit(frame: Frame, problem: HopperProblem, plan: Plan) -> None:
    """The kernel: set-up, then producer and consumers apart."""
    c = plan.config
    grid = Grid(
        "int32", problem.batch, problem.M, problem.columns, c.block_m, plan.out_n, c.group_m
    )
    kernel = Hopper(frame, problem, plan, grid, encode_maps(frame, problem, plan))
    T.device_entry()
    kernel.block = T.cta_id([plan.blocks])
    kernel.thread = T.thread_id([plan.threads])
    kernel.shared = allocate(problem, plan)
    # The same for all threads of a warp, and the compiler knows it.
    warpgroup = T.alloc_local((1,), "int32")
    lanes = T.uint32(0xFFFFFFFF)
    value = T.tvm_warp_shuffle(lanes, kernel.thread // 128, 0, 32, 32)
    T.buffer_store(warpgroup, value, [0])
    initialise_barriers(kernel)
    with T.If(warpgroup[0] == 0):
        with T.Then():
            if plan.moves_registers:
                set_registers(PRODUCER_REGISTERS, more=False)
            with T.If(kernel.thread == 0), T.Then():
                emit_producer(kernel)
        with T.Else():
            if plan.moves_registers:
                set_registers(plan.consumer_registers, more=True)
            number = T.Bind(warpgroup[0] - 1)
            Consumer(kernel, number).emit()
