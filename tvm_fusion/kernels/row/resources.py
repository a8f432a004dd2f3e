"""What a block of a row kernel needs, and how many fit on a multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .config import WARP, Form, RowConfig
from .work import RowWork

if TYPE_CHECKING:
    from ...config import HardwareProfile

BASE_REGISTERS = 15
STREAMING_REGISTERS = 24
"""Addresses, coordinates, accumulators; more of them in loops."""
IN_FLIGHT = 32
"""Elements that a single sweep has in registers at a time."""
AHEAD = 48
"""Elements that a thread may hold for the compiler to load shared vectors ahead."""
REGISTER_STEP = 8
"""Registers are given to threads in multiples of this."""
SPILLED_BYTES = 24
"""Bytes moved for a register too many: it is stored and loaded several times, once a sweep."""
PARTIAL_BYTES = 4 * WARP


@dataclass(frozen=True, slots=True)
class RowResources:
    """Registers a thread, bytes of an element that do not fit into them, shared memory a block,
    blocks that are on the device at a time.
    """

    registers: float
    spilled_bytes: float
    shared_bytes: int
    slots: int


def row_resources(work: RowWork, config: RowConfig, hw: HardwareProfile) -> RowResources:
    """Estimates the resources of a configuration."""
    wanted = wanted_registers(work, config)
    threads = config.threads * config.rows
    limit = registers_limit(config, hw)
    registers = min(wanted, limit)
    given = -(-max(registers, 16) // REGISTER_STEP) * REGISTER_STEP
    spilled = 0.0
    if wanted > limit:
        excess = (wanted - limit) / max(1, elements_a_thread(work, config))
        spilled = SPILLED_BYTES * excess
    shared = PARTIAL_BYTES + ring_bytes(work, config)
    blocks = min(
        hw.max_blocks_per_sm,
        hw.max_threads_per_sm // threads,
        int(hw.registers_per_sm // (given * threads)),
        hw.smem_per_sm_bytes // (shared + hw.smem_reserved_per_block_bytes),
    )
    if config.form is Form.BULK:
        blocks = min(blocks, config.resident)
    slots = clusters_on_device(config.cluster, blocks, hw) * config.cluster
    return RowResources(registers, spilled, shared, slots)


def registers_limit(config: RowConfig, hw: HardwareProfile) -> float:
    """Registers that ptxas may use."""
    blocks = max(1, config.min_blocks)
    share = hw.registers_per_sm // (config.threads * config.rows * blocks)
    return min(hw.max_registers_per_thread, share // REGISTER_STEP * REGISTER_STEP)


def elements_a_thread(work: RowWork, config: RowConfig) -> int:
    """Columns that a thread holds at a time."""
    if config.form is Form.LOOP:
        return config.unroll * config.width
    return work.chunks(config.width, config.threads * config.cluster) * config.width


def wanted_registers(work: RowWork, config: RowConfig) -> float:
    """Registers without any limit; checked against ptxas on an H200's kernels.

    What a later sweep reads stays in registers, widened (ptxas converts halves once). Of the
    vectors that all rows share, about half are there, packed, while a thread holds little; all of
    them in clusters; and both of the two that windows move together. A single sweep needs no more
    than what is in flight.
    """
    elements = elements_a_thread(work, config)
    if config.form is Form.LOOP:
        return STREAMING_REGISTERS + elements
    if not work.held_again(config.runs_online):
        return BASE_REGISTERS + min(elements, IN_FLIGHT) * work.streamed / 4
    moved = work.accesses[config.width].moved
    held = max(work.streamed / 4, work.kept / 4, 1.0) + moved / 4
    if config.cluster > 1:
        held += work.shared / 4
    elif elements <= AHEAD:
        held += work.shared / 8
    base = STREAMING_REGISTERS if config.form is Form.BULK else BASE_REGISTERS
    return base + elements * held


def ring_bytes(work: RowWork, config: RowConfig) -> int:
    """Shared memory of the rows in flight."""
    if config.form is not Form.BULK:
        return 0
    return config.stages * (work.columns // config.cluster) * work.streamed


def clusters_on_device(cluster: int, blocks: int, hw: HardwareProfile) -> int:
    """Clusters (blocks, if they are of one) that run at a time with `blocks` on a multiprocessor.

    A cluster lies within one group of multiprocessors, of which some have a pair more than
    `sms_per_cluster_group`.
    """
    if cluster <= 2:
        return hw.num_sms * blocks // cluster
    groups = hw.num_sms // hw.sms_per_cluster_group
    return groups * (hw.sms_per_cluster_group * blocks // cluster)
