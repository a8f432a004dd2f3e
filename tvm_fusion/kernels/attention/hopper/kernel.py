"""Attention on Hopper's tensor cores: persistent blocks, TMA, wgmma, a producer and consumers.

    producer warpgroup:   tiles of Q, K and V -> shared memory (TMA, mbarriers)
    consumer warpgroups:  64 queries each: S = Q K^T, online softmax in registers, O += P V

Blocks stay and take every (number of blocks)-th tile of queries, so that the producer runs ahead
into the next tile. Tiles of keys that no query of a tile sees are left out. The parts:
`problem` (what the TMA can address), `config`, `state`, `attention.tiled.tiles` and `scouts` (which
keys), `consumer`, `attention.tiled.points` (logits and visibility) and
`attention.tiled.online_softmax`.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ....config import HardwareProfile, Policy
from ....errors import Unsupported
from ...gemm.hopper.state import Ring, expect, set_registers, wait
from ...gpu.product_frame import open_kernel
from ...gpu.tensor_map import TensorMap
from ..read.bounds import key_range, split_match
from ..read.model import Attention
from ..tiled.points import read_formulas, registers_of_score
from ..tiled.shape import shape_of, sharing
from ..tiled.tiles import Tile
from ..time import AttentionTile, hopper_time
from .config import (
    BOX,
    HALF_BYTES,
    PRODUCER_REGISTERS,
    SCOUT_REGISTERS,
    AttentionConfig,
    candidates,
)
from .consumer import Consumer
from .problem import HopperAttention, View, read_attention
from .scouts import emit_scouts
from .state import (
    WARP,
    Kernel,
    allocate,
    encode_maps,
    initialise_barriers,
    make_plan,
    release_found,
    take_range,
)

# The order of the configurations of the Hopper attention, by the model of `attention.time`.


def rank_configs(
    problem: HopperAttention, hw: HardwareProfile
) -> list[tuple[float, AttentionConfig]]:
    """Seconds and configurations that can be planned, the fastest first."""
    attention = problem.attention
    match, keys = split_match(attention, key_range(attention))
    formulas = read_formulas(problem, keys.rest)
    shape = shape_of(problem, formulas, sharing(problem.k.access.digits))
    found = []
    for config in candidates(
        problem.dtype,
        problem.terms,
        problem.features,
        attention.M if isinstance(attention.M, int) else None,
        attention.N if isinstance(attention.N, int) else None,
        problem.result is not None,
        registers_of_score(formulas.loads),
        hw.smem_per_block_bytes,
        match is not None,
    ):
        try:
            plan = make_plan(problem, config, hw)
        except Unsupported:
            continue
        tile = AttentionTile(
            config.block_m,
            config.block_n,
            overlaps=config.consumers > 1,
            in_place=config.staged and not plan.own_output,
        )
        found.append((hopper_time(shape, tile, hw).seconds, config))
    return sorted(found, key=lambda entry: entry[0])


# The producer: one thread that brings queries, keys and values, ahead into coming tiles.
#
# Where scouts look for the tiles of keys that can match, it waits for what they find.
#
# K[n-1] Q K[n-2] V[n-1] K[n-3] V[n-2] ... V[0]        keys from the last tile to the first


def emit_producer(kernel: Kernel) -> None:
    """Emits the loop of the producer."""
    stages = kernel.plan.config.stages
    keys, values, queries = Ring(stages, 1), Ring(stages, 1), Ring(1, 1)
    with kernel.each_tile() as tile:
        first, end = tile.keys.first, tile.keys.end
        if kernel.shared.found is not None:
            first, end = take_range(kernel)
        count = T.Bind(end - first)
        with T.serial(0, count, unroll=False) as step:
            number = T.Bind(end - 1 - step)
            _bring_keys(kernel, tile, number, keys)
            with T.If(tirx.EQ(step, 0)):
                with T.Then():
                    _bring_queries(kernel, tile, queries)
                with T.Else():
                    _bring_values(kernel, tile, number + 1, values)
        _bring_values(kernel, tile, first, values)


def _bring_queries(kernel: Kernel, tile: Tile, ring: Ring) -> None:
    s, plan = kernel.shared, kernel.plan
    wait(s.q_empty.ptr_to([0]), ring.phase)
    at = {**tile.place, "m": tile.query}
    if s.found is not None:
        release_found(kernel)
    view = kernel.problem.q
    _bring(view, plan.q_map, kernel.maps.q, s.q, [], at, s.q_full.ptr_to([0]))
    ring.advance()


def _bring_keys(kernel: Kernel, tile: Tile, number: Expr, ring: Ring) -> None:
    s, plan = kernel.shared, kernel.plan
    wait(s.k_empty.ptr_to([ring.stage]), ring.phase)
    at = {**tile.place, "n": number * plan.config.block_n}
    view, barrier = kernel.problem.k, s.k_full.ptr_to([ring.stage])
    _bring(view, plan.k_map, kernel.maps.k, s.k, [ring.stage], at, barrier)
    ring.advance()


def _bring_values(kernel: Kernel, tile: Tile, number: Expr, ring: Ring) -> None:
    s, plan = kernel.shared, kernel.plan
    wait(s.v_empty.ptr_to([ring.stage]), ring.phase)
    at = {**tile.place, "n": number * plan.config.block_n}
    view, barrier = kernel.problem.v, s.v_full.ptr_to([ring.stage])
    _bring(view, plan.v_map, kernel.maps.v, s.v, [ring.stage], at, barrier)
    ring.advance()


def _bring(
    view: View,
    found: TensorMap,
    handle: Var,
    buffer: Expr,
    stage: list[Expr],
    at: dict[str, Expr],
    barrier: Expr,
) -> None:
    """All boxes of a tile, which starts `at` this point."""
    boxes, size = (int(extent) for extent in buffer.shape[len(stage) :])
    expect(barrier, boxes * size * HALF_BYTES)
    for box in range(boxes):
        target = buffer.ptr_to([*stage, box, 0])
        column = at.get(view.columns, 0) + box * BOX
        found.load(target, handle, at | {view.columns: column}, barrier)


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
