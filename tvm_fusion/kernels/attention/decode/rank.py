"""Predicted time of the decode attention, and the configurations worth writing.

    seconds = start + (memory^p + flight^p + chain^p)^(1/p) + turns + combine

memory: all bytes at the rate of the device. flight: the fullest multiprocessor, by the bytes that
its blocks have on their way (Little's law). chain: a warp's steps one after the other. turns: what
a block spends before and behind its loop. Constants are fitted to 37 kernels measured on an H200
2026-11-22 (tests/data/attention_decode_h200.jsonl) where nothing else is said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ....config import HardwareProfile, Policy
from ....errors import Unsupported
from ...group.traffic import clusters_on_device
from ...program.expr import bytes_of
from ...program.program import Extent
from ..read.model import Attention
from .config import MAX_CLUSTER, DecodeConfig, Layout, block_rows
from .problem import DecodeProblem, read_decode

ASSUMED_KEYS, ASSUMED_UNITS = 4096, 64
"""What symbolic sizes are taken for: a context, and key heads times a batch."""
SPLITS, STEPS, WARPS, STAGES = (1, 2, 4, 8), (16, 32), (2, 4, 8), (2, 3, 4)
READS = 1.08
"""Rate of these reads, of that of a copy: keys and values of many units side by side."""
START = 1.8e-6
"""Seconds before the first keys arrive and after the last."""
STAGE = 1.4e-7
"""Seconds that each stage of the ring adds to the start."""
TRIP = 8.3e-7
"""Seconds from the start of a copy to its end, under traffic."""
FLIGHT = 0.44
"""The same of a multiprocessor that reads alone, as a part of the device's under full traffic."""
CHAIN, CHAIN_KEYS = 2.9e-7, 8.5e-9
"""Seconds of a step of a warp, and of each of its keys: the latencies of ldmatrix, mma.sync,
shuffles and ex2 one after the other."""
TURN, CLUSTER_TURN = 8.0e-7, 3.6e-6
"""Seconds that a block, alone or of a cluster, takes to follow another one."""
WARP_PARTS = 2.0e-9
"""Seconds in which a thread reads one partial result from shared memory (estimate)."""
SMALLER_GROUP = 15 / 16
"""Clusters of more than two blocks that find a place, of those that groups of equal size would
take (H200: 15 of 8 and 30 of 4 with a block on each multiprocessor)."""
UNEVEN = 0.11
"""Of what the last wave leaves idle, the share that shows."""
POWER = 3.9


@dataclass(frozen=True, slots=True)
class DecodeSizes:
    """What the time depends on.

    Attributes
    ----------
    units : attentions that share no keys: batch times key heads.
    rows : queries of a unit, those of all heads that share its keys.
    keys, terms, features : of one attention; `keys` those that are visible.
    other_bytes : read and written beside keys and values.
    """

    units: int
    rows: int
    keys: int
    terms: int
    features: int
    other_bytes: int = 0

    def layout(self, config: DecodeConfig) -> Layout:
        """The shared memory of a configuration."""
        terms, features = (-(-n // 16) * 16 for n in (self.terms, self.features))
        return Layout(config, terms, features, block_rows(self.rows, self.features))

    def smem_bytes(self, config: DecodeConfig) -> int:
        """Bytes of it."""
        return self.layout(config).smem_bytes(self.features)

    @property
    def chunks(self) -> int:
        """Blocks (or clusters) that share a unit's rows."""
        return -(-self.rows // block_rows(self.rows, self.features))


def sizes_of(problem: DecodeProblem) -> DecodeSizes:
    """The sizes of an attention; assumed where they are symbolic."""
    attention = problem.attention
    sources = (problem.k.load.source, problem.v.load.source)
    others = [
        p.elements * bytes_of(p.dtype)
        for p in attention.params
        if p.shape and not any(p.var.same_as(s) for s in sources)
    ]
    return DecodeSizes(
        _known(problem.unit_count, ASSUMED_UNITS),
        problem.rows,
        _known(attention.N, ASSUMED_KEYS),
        attention.D,
        attention.E,
        sum(n for n in others if isinstance(n, int)),
    )


def check_config(problem: DecodeProblem, config: DecodeConfig, hw: HardwareProfile) -> None:
    """Raises Unsupported for a configuration that the device or the kernel does not allow."""
    c = config
    if c.split > 1 and not hw.has_clusters:
        raise Unsupported(f"a split of keys takes clusters, which {hw.name} does not have")
    if not 1 <= c.split <= MAX_CLUSTER or c.step % 16 or not 2 <= c.stages <= 6:
        raise Unsupported(f"{c}: at most {MAX_CLUSTER} blocks, steps of 16 keys, 2 to 6 stages")
    if not 1 <= c.warps <= 16:
        raise Unsupported(f"{c}: 1 to 16 warps")
    size = sizes_of(problem).smem_bytes(c)
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
    found = rank(sizes_of(read_decode(attention, hw)), hw)
    if not found:
        raise Unsupported("no ring of keys fits into shared memory")
    return found


def rank(sizes: DecodeSizes, hw: HardwareProfile) -> list[tuple[float, DecodeConfig]]:
    """Predicted seconds and configurations that fit a device, the fastest first."""
    splits = SPLITS if hw.has_clusters else (1,)
    configs = [
        DecodeConfig(split, warps, step, stages)
        for split in splits
        for warps in WARPS
        for step in STEPS
        for stages in STAGES
        if split == 1 or split * warps * step <= max(sizes.keys, warps * step)
    ]
    fitting = [c for c in configs if sizes.smem_bytes(c) <= hw.smem_per_block_bytes]
    found = [(decode_seconds(sizes, config, hw), config) for config in fitting]
    return sorted(found, key=lambda entry: entry[0])


def decode_seconds(sizes: DecodeSizes, config: DecodeConfig, hw: HardwareProfile) -> float:
    """Predicted seconds of one launch."""
    layout = sizes.layout(config)
    blocks = sizes.units * sizes.chunks * config.split

    # Blocks that run at the same time, and those of the fullest multiprocessor.
    resident = resident_blocks(layout, sizes.features, hw)
    places = resident * hw.num_sms
    if config.split > 1:
        places = clusters_on_device(config.split, resident, hw) * config.split
        if config.split > 2:
            places *= SMALLER_GROUP
    waves = blocks / max(places, 1)
    fullest = min(resident, math.ceil(blocks / hw.num_sms))
    turns = max(1, math.ceil(waves - 1e-9))

    unit_bytes = sizes.keys * (sizes.terms + sizes.features) * 2
    memory = (sizes.units * unit_bytes + sizes.other_bytes) / (hw.hbm_bytes_per_s * READS)
    memory += sizes.units * (sizes.chunks - 1) * unit_bytes / hw.l2_bytes_per_s
    memory *= 1 + UNEVEN * (turns / waves - 1 if waves > 1 else 0)
    own = config.tiles_in_flight * layout.stage_bytes
    speed = min(fullest * own / (hw.bytes_in_flight_latency_s * FLIGHT), hw.sm_bytes_per_s)
    flight = turns * fullest * unit_bytes / config.split / speed
    steps = math.ceil(sizes.keys / (config.split * config.warps * config.step))
    work = CHAIN + CHAIN_KEYS * config.step * -(-layout.rows // 16)
    chain = turns * steps * max(work, (TRIP + work) / config.stages)
    busy = sum(t**POWER for t in (memory, flight, chain)) ** (1 / POWER)
    turn = (turns - 1) * (CLUSTER_TURN if config.split > 1 else TURN) / resident
    start = hw.kernel_gap_us * 1e-6 + START + STAGE * config.stages
    return start + busy + turn + _combine(sizes, layout, hw)


def _combine(sizes: DecodeSizes, layout: Layout, hw: HardwareProfile) -> float:
    """Seconds from a block's last key to its outputs."""
    config = layout.config
    each = math.ceil(min(sizes.rows, layout.rows) * sizes.features / config.threads)
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


def _known(extent: Extent, assumed: int) -> int:
    return extent if isinstance(extent, int) else assumed
