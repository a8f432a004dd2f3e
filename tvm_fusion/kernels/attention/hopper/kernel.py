"""Attention on Hopper's tensor cores: persistent blocks, TMA, wgmma, a producer and consumers.

    producer warpgroup:   tiles of Q, K and V -> shared memory (TMA, mbarriers)
    consumer warpgroups:  64 queries each: S = Q K^T, online softmax in registers, O += P V

Blocks stay and take every (number of blocks)-th tile of queries, so that the producer runs ahead
into the next tile. Tiles of keys that no query of a tile sees are left out. The parts:
`problem` (what the TMA can address), `config`,
`attention.tiled.range`, `match` and `scouts` (which keys),
`state`, `producer`, `consumer`,
`attention.tiled.online_softmax`, `attention.tiled.points` and `same` (logits and visibility),
`attention.tiled.loads`, `epilogue`.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ....config import HardwareProfile, Policy
from ....errors import Unsupported
from ...gemm.hopper.state import set_registers
from ...gpu.product_frame import open_kernel
from ..read.model import Attention
from .config import PRODUCER_REGISTERS, SCOUT_REGISTERS, AttentionConfig
from .consumer import Consumer
from .match import WARP
from .problem import read_attention
from .producer import emit_producer
from .rank import rank_configs
from .scouts import emit_scouts
from .state import Kernel, allocate, encode_maps, initialise_barriers, make_plan


def attention_hopper_ranked(
    attention: Attention, hw: HardwareProfile, policy: Policy | None = None
) -> list[tuple[float, AttentionConfig]]:
    """Predicted seconds and configurations that fit the attention and the device, best first.

    Raises
    ------
    Unsupported
        Where the kernel cannot compute the attention; see `emit_attention_hopper`.
    """
    ranked = rank_configs(read_attention(attention, hw), hw)
    if not ranked:
        raise Unsupported("no tile of this attention fits")
    return ranked


def emit_attention_hopper(
    attention: Attention, hw: HardwareProfile, config: AttentionConfig | None = None
) -> tirx.PrimFunc:
    """Write an attention as one TIRx kernel for Hopper's tensor cores.

    Parameters
    ----------
    attention : Attention
        Q, K and V plain strided tensors of float16 or bfloat16, contiguous along terms and
        features, of which there are multiples of 8 up to 256; any logit, visibility and outputs.
        Batch, queries and keys may be symbolic.
    hw : HardwareProfile
        A Hopper device (sm_90a).
    config : AttentionConfig, optional
        One of `attention_hopper_ranked`; the first where None.

    Returns
    -------
    func : tirx.PrimFunc
        With the parameters of the PrimFunc that the attention was read from.

    Raises
    ------
    Unsupported
        For another architecture or dtype, symbolic terms, operands that are computed, row pitches
        that are no multiples of 16 bytes, tiles that are no boxes of a tensor of 5 dimensions.
    """
    problem = read_attention(attention, hw)
    if config is None:
        config = attention_hopper_ranked(attention, hw)[0][1]
    plan = make_plan(problem, config, hw)
    with open_kernel(attention) as frame:
        _emit(Kernel(frame, problem, plan, encode_maps(frame, problem, plan)))
    return frame.func


def _emit(kernel: Kernel) -> None:
    """The kernel: set-up, then producer and consumers apart."""
    config = kernel.plan.config
    T.device_entry()
    kernel.block = T.cta_id([kernel.plan.blocks])
    kernel.thread = T.thread_id([config.threads])
    # ptxas moves registers between warpgroups only where it knows how many blocks share them.
    with T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1}):
        _body(kernel)


def _body(kernel: Kernel) -> None:
    """What all threads do."""
    config = kernel.plan.config
    kernel.shared = allocate(kernel.problem, kernel.plan)
    warpgroup = _warpgroup(kernel.thread)
    initialise_barriers(kernel)
    moves_registers, scouts = config.consumers > 1, kernel.plan.match is not None
    with T.If(warpgroup == 0):
        with T.Then():
            if moves_registers:
                set_registers(SCOUT_REGISTERS if scouts else PRODUCER_REGISTERS, more=False)
            with T.If(kernel.thread == 0), T.Then():
                emit_producer(kernel)
            if scouts:
                with T.If(kernel.thread >= WARP), T.Then():
                    emit_scouts(kernel)
        with T.Else():
            if moves_registers:
                set_registers(config.consumer_registers(scouts), more=True)
            Consumer(kernel, T.Bind(warpgroup - 1)).emit()


def _warpgroup(thread: Expr) -> Expr:
    """The number of a thread's warpgroup: the same in a warp, which the compiler then knows."""
    found = T.alloc_local((1,), "int32")
    value = T.tvm_warp_shuffle(T.uint32(0xFFFFFFFF), thread // 128, 0, 32, 32)
    T.buffer_store(found, value, [0])
    return found[0]
