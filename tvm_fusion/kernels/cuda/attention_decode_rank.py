"""Predicted time of the decode attention, and the configurations worth writing.

    seconds = start + (memory^p + flight^p + chain^p)^(1/p) + combine

memory: all bytes at the rate of the device. flight: the fullest multiprocessor, by the bytes that
its blocks have on their way (Little's law). chain: a warp's steps one after the other.
"""

from __future__ import annotations

import math

from ...config import HardwareProfile, Policy
from ...errors import Unsupported
from ..attention_model import Attention
from ..contraction import Extent
from ..expr import bytes_of
from .attention_decode_config import MAX_CLUSTER, DecodeConfig, Layout
from .attention_decode_problem import DecodeProblem, read_decode
from .row_resources import clusters_on_device

ASSUMED_KEYS, ASSUMED_UNITS = 4096, 64
"""What symbolic sizes are taken for: a context, and key heads times a batch."""
STEPS, WARPS, STAGES = (16, 32), (2, 4, 8), (2, 3, 4, 5)
READS = 1.08
"""Rate of reads alone, of that of a copy (H200: `tvm_fusion calibrate`, 4.60e12 of 4.27e12)."""
START = 1.9e-6
"""Seconds before the first keys arrive and after the last: as in the skinny products."""
TRIP = 9.0e-7
"""Seconds from the start of a copy to its end, under traffic (estimate)."""
CHAIN, CHAIN_KEYS = 3.0e-7, 1.2e-8
"""Seconds of a step of a warp, and of each of its keys (estimate: the latencies of ldmatrix,
mma.sync, shuffles and ex2 one after the other)."""
TURN = 1.0e-6
"""Seconds that a block spends before and behind its loop while others use the memory."""
WARP_PARTS = 2.0e-9
"""Seconds in which a thread reads one partial result from shared memory (estimate)."""
LONE_SM = 6.7e10
"""Bytes a second that one multiprocessor reads from memory (H200: `tvm_fusion calibrate`)."""
UNEVEN = 0.15
"""Of the bytes that the last wave leaves to few, the share that shows (the skinny products')."""
POWER = 4.0


def layout_of(problem: DecodeProblem, config: DecodeConfig) -> Layout:
    """The shared memory of a configuration."""
    terms, features = (-(-n // 16) * 16 for n in (problem.attention.D, problem.attention.E))
    return Layout(config, terms, features, problem.block_rows)


def check_config(problem: DecodeProblem, config: DecodeConfig, hw: HardwareProfile) -> None:
    """Raises Unsupported for a configuration that the device or the kernel does not allow."""
    c = config
    if c.split > 1 and not hw.has_clusters:
        raise Unsupported(f"a split of keys takes clusters, which {hw.name} does not have")
    if not 1 <= c.split <= MAX_CLUSTER or c.step % 16 or not 2 <= c.stages <= 6:
        raise Unsupported(f"{c}: at most {MAX_CLUSTER} blocks, steps of 16 keys, 2 to 6 stages")
    if not 1 <= c.warps <= 16:
        raise Unsupported(f"{c}: 1 to 16 warps")
    size = layout_of(problem, c).smem_bytes(problem.attention.E)
    if size > hw.smem_per_block_bytes:
        raise Unsupported(f"{c}: {size} bytes of shared memory, {hw.smem_per_block_bytes} at most")


def attention_decode_ranked(
    attention: Attention, hw: HardwareProfile, policy: Policy | None = None
) -> list[tuple[float, DecodeConfig]]:
    """Predicted seconds of a launch and configurations, the fastest first.

    Parameters
    ----------
    attention : Attention
        See `emit_attention_decode`.
    hw : HardwareProfile
    policy : Policy, optional
        Not needed: sums run in float32 always.

    Raises
    ------
    Unsupported
        For an attention that the decode kernel does not take.
    """
    problem = read_decode(attention, hw)
    found = []
    for config in _candidates(problem, hw):
        try:
            check_config(problem, config, hw)
        except Unsupported:
            continue
        found.append((decode_seconds(problem, config, hw), config))
    if not found:
        raise Unsupported("no ring of keys fits into shared memory")
    return sorted(found, key=lambda entry: entry[0])


def _candidates(problem: DecodeProblem, hw: HardwareProfile) -> list[DecodeConfig]:
    keys = _known(problem.attention.N, ASSUMED_KEYS)
    splits = range(1, MAX_CLUSTER + 1) if hw.has_clusters else (1,)
    return [
        DecodeConfig(split, warps, step, stages)
        for split in splits
        for warps in WARPS
        for step in STEPS
        for stages in STAGES
        if split == 1 or split * warps * step <= max(keys, warps * step)
    ]


def decode_seconds(problem: DecodeProblem, config: DecodeConfig, hw: HardwareProfile) -> float:
    """Predicted seconds of one launch."""
    attention, layout = problem.attention, layout_of(problem, config)
    keys = _known(attention.N, ASSUMED_KEYS)
    units = _known(problem.unit_count, ASSUMED_UNITS)
    clusters = units * problem.chunks
    blocks = clusters * config.split

    # Blocks that run at the same time, and those of the fullest multiprocessor.
    resident = resident_blocks(layout, attention.E, hw)
    places = resident * hw.num_sms
    if config.split > 1:
        places = clusters_on_device(config.split, resident, hw) * config.split
    waves = blocks / max(places, 1)
    fullest = min(resident, math.ceil(blocks / hw.num_sms))
    turns = max(1, math.ceil(waves - 1e-9))

    unit_bytes = keys * (attention.D + attention.E) * 2
    rate = hw.hbm_bytes_per_s * READS
    memory = (units * unit_bytes + _other_bytes(problem)) / rate
    memory += units * (problem.chunks - 1) * unit_bytes / hw.l2_bytes_per_s
    memory *= 1 + UNEVEN * (turns / waves - 1 if waves > 1 else 0)
    own = config.tiles_in_flight * layout.stage_bytes
    speed = min(fullest * own / hw.bytes_in_flight_latency_s, LONE_SM)
    flight = turns * fullest * unit_bytes / config.split / speed
    steps = math.ceil(keys / (config.split * config.warps * config.step))
    tiles = -(-layout.rows // 16)
    work = CHAIN + CHAIN_KEYS * config.step * tiles
    chain = turns * steps * max(work, (TRIP + work) / config.stages)
    busy = sum(t**POWER for t in (memory, flight, chain)) ** (1 / POWER)
    return (
        hw.kernel_gap_us * 1e-6
        + START
        + busy
        + (turns - 1) * TURN / resident
        + _combine(problem, layout, hw)
    )


def _combine(problem: DecodeProblem, layout: Layout, hw: HardwareProfile) -> float:
    """Seconds from a block's last key to its outputs."""
    config = layout.config
    rows = min(problem.rows, layout.rows)
    each = math.ceil(rows * problem.attention.E / config.threads)
    seconds = 2 * hw.barrier_s + each * config.warps * WARP_PARTS
    if config.split > 1:
        seconds += hw.cluster_barrier_s + each * hw.remote_store_s * config.warps
        seconds += math.ceil(each / config.split) * config.split * WARP_PARTS
    return seconds


def resident_blocks(layout: Layout, features: int, hw: HardwareProfile) -> int:
    """Blocks that a multiprocessor holds at once, by shared memory, registers and threads."""
    config = layout.config
    by_smem = hw.smem_per_sm_bytes // (
        layout.smem_bytes(features) + hw.smem_reserved_per_block_bytes
    )
    by_registers = hw.registers_per_sm // (registers_of(layout) * config.threads)
    by_threads = hw.max_threads_per_sm // config.threads
    return max(1, min(by_smem, by_registers, by_threads, hw.max_blocks_per_sm))


def registers_of(layout: Layout) -> int:
    """Registers of a lane: sums, queries, the scores of a step, and what addresses take."""
    tiles = -(-layout.rows // 16)
    held = tiles * (layout.features + layout.config.step) // 2
    held += tiles * layout.terms // 4 if layout.holds_queries else 8
    return min(255, held + 56)


def _other_bytes(problem: DecodeProblem) -> int:
    """Bytes of what is read or written beside keys and values."""
    sources = (problem.k.load.source, problem.v.load.source)
    return sum(
        p.elements * bytes_of(p.dtype)
        for p in problem.attention.params
        if p.shape and isinstance(p.elements, int) and not any(p.var.same_as(s) for s in sources)
    )


def _known(extent: Extent, assumed: int) -> int:
    return extent if isinstance(extent, int) else assumed
