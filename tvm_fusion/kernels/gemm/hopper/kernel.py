"""GEMM on Hopper's tensor cores: persistent blocks, TMA, wgmma, a producer, one or two consumers.

    producer warpgroup:   tiles of A and B -> ring of stages in shared memory (TMA, mbarriers)
    consumer warpgroups:  64 rows each: wgmma over the steps of a tile; epilogue; boxes -> TMA

Blocks stay and take every (number of blocks)-th tile, so the producer runs ahead into the next tile
while an epilogue works. The blocks of a cluster may share a tile's terms (`split`) or the tiles of
B (`multicast`). The parts: `problem` (what the TMA can address), `config`,
`plan`, `consumer` (with the sums of split terms), `prologue`, `fragments` and `in_place` (what is
computed of A), `epilogue`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ....config import HardwareProfile, Policy
from ....errors import Unsupported
from ...contraction.reader import Contraction
from ...gpu.product_frame import Frame, Grid, open_kernel
from ..side_by_side import SegmentGrid
from .configs import rank_configs
from .consumer import Consumer
from .model import HopperProblem
from .plan import HopperConfig, Plan, make_plan
from .problem import read_problems
from .producer import emit_producer
from .state import Hopper, allocate, encode_maps, initialise_barriers, set_registers


def hopper_ranked(
    contraction: Contraction, hw: HardwareProfile, policy: Policy | None = None
) -> list[tuple[float, HopperConfig]]:
    """Predicted seconds and configurations that fit the contraction and the device, best first.

    Raises
    ------
    Unsupported
        Where the kernel cannot compute the contraction; see `emit_gemm_hopper`.
    """
    return ranked_problems(_problems(contraction, hw), hw, policy)


def ranked_problems(
    problems: Mapping[int, HopperProblem], hw: HardwareProfile, policy: Policy | None
) -> list[tuple[float, HopperConfig]]:
    """Predicted seconds and configurations of the ways to see a product, best first.

    Raises
    ------
    Unsupported
        Operands may not be rounded, or no tile fits.
    """
    allowed = policy is not None and policy.allow_tf32
    if any(problem.rounds_operands for problem in problems.values()) and not allowed:
        raise Unsupported("float32 operands, which may not be rounded to tfloat32")
    ranked = rank_configs(problems, hw)
    if not ranked:
        raise Unsupported("no tile of this contraction fits")
    return ranked


def hopper_configs(contraction: Contraction, hw: HardwareProfile) -> list[HopperConfig]:
    """The configurations of `hopper_ranked`."""
    return [config for _, config in hopper_ranked(contraction, hw)]


def emit_gemm_hopper(
    contraction: Contraction, hw: HardwareProfile, config: HopperConfig | None = None
) -> tirx.PrimFunc:
    """Write a contraction as one TIRx kernel for Hopper's tensor cores.

    Parameters
    ----------
    contraction : Contraction
        Operands that are plain strided tensors of float16 or bfloat16 (transposed, batched, with
        heads permuted), of 8-bit floats, or, if the configuration says so, of float32 (the last two
        contiguous along the terms); sums in float32; products or gate/up pairs, one or several
        side by side that share A or have sizes of their own; any epilogue. A single product's A may
        be computed of a matrix of halves, beside vectors (see `prologue`). Batch and M may be
        symbolic.
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
        For another architecture or dtype, symbolic N or K, other operands that are computed, row
        pitches that are no multiples of 16 bytes, tiles that are no boxes of a tensor of 5
        dimensions.
    """
    problems = _problems(contraction, hw)
    if config is None:
        config = hopper_configs(contraction, hw)[0]
    if config.batched not in problems:
        raise Unsupported(f"the first {config.batched} row axes cannot be batch")
    return emit_problem(problems[config.batched], config, hw)


def emit_problem(
    problem: HopperProblem, config: HopperConfig, hw: HardwareProfile
) -> tirx.PrimFunc:
    """The kernel of a problem.

    Raises
    ------
    Unsupported
        The kernel has no form for the configuration.
    """
    plan = make_plan(problem, config, hw)
    with open_kernel(problem.contraction) as frame:
        _emit(frame, problem, plan)
    return frame.func


def _problems(contraction: Contraction, hw: HardwareProfile) -> dict[int, HopperProblem]:
    check_architecture(hw)
    return _read(contraction)


@lru_cache(maxsize=16)  # ranked, then written
def _read(contraction: Contraction) -> dict[int, HopperProblem]:
    return read_problems(contraction)


def check_architecture(hw: HardwareProfile) -> None:
    """Raises Unsupported for a device without wgmma."""
    if not hw.architecture.has_wgmma:
        raise Unsupported(f"{hw.arch} has no wgmma")


def _grid(problem: HopperProblem, plan: Plan) -> Grid | SegmentGrid:
    c = plan.config
    tile = (c.block_m * c.multicast, plan.out_n, max(1, c.group_m // c.multicast))
    if not problem.shared:
        return SegmentGrid("int32", problem.segments, *tile)
    return Grid("int32", problem.batch, problem.whole_tiles(tile[0]), problem.columns, *tile)


def _emit(frame: Frame, problem: HopperProblem, plan: Plan) -> None:
    """The kernel: set-up, then producer and consumers apart."""
    kernel = Hopper(frame, problem, plan, _grid(problem, plan), encode_maps(frame, problem, plan))
    T.device_entry()
    kernel.cluster = T.cta_id([plan.blocks])
    if plan.cluster > 1:
        kernel.rank = T.cta_id_in_cluster([plan.cluster])
        kernel.cluster = T.Bind(T.truncdiv(kernel.cluster, plan.cluster))
    kernel.thread = T.thread_id([plan.threads])
    kernel.shared = allocate(problem, plan)
    # The same for all threads of a warp, and the compiler knows it.
    warpgroup = T.alloc_local((1,), "int32")
    lanes = T.uint32(0xFFFFFFFF)
    value = T.tvm_warp_shuffle(lanes, kernel.thread // 128, 0, 32, 32)
    T.buffer_store(warpgroup, value, [0])
    initialise_barriers(kernel)
    special = kernel.rank
    with T.If(warpgroup[0] == 0):
        with T.Then():
            if plan.moves_registers:
                set_registers(plan.producer_registers, more=False)
            with T.If(kernel.thread == 0), T.Then():
                if plan.cluster > 1:
                    # In a register: each use of the index itself would read the special one again.
                    kernel.rank = _in_register(special)
                emit_producer(kernel)
        with T.Else():
            if plan.moves_registers:
                set_registers(plan.consumer_registers, more=True)
            # Only an exchange of sums uses it so often that it is worth a register.
            kernel.rank = _in_register(special) if plan.config.split > 1 else special
            number = T.Bind(warpgroup[0] - 1)
            Consumer(kernel, number).emit()


def _in_register(value: Expr) -> Expr:
    """The value, computed here and kept."""
    found = T.alloc_local((1,), "int32")
    T.buffer_store(found, value, [0])
    return found[0]
