"""Time of the direct convolution kernel, from plain numbers."""

from __future__ import annotations

import math

from ....config import HardwareProfile
from ...gemm.simt.config import rounded_waves
from ...gpu.memory import WIDEST
from .shape import Shape

# Estimates, none of them measured on a device: the cycles that a warp waits for a row of the data
# where so many warps share a multiprocessor; issue slots of a thread's start, of the loop of a row,
# of a result's elements and store, of a weight that goes to shared memory and of one that goes
# to a register; how many slots a warp misses for each that it takes; and what sums that are moved
# cost rows that go to some of them only, of their multiplications.
LATENCY_CYCLES = 900.0
BUSY_WARPS = 8
START_SLOTS = 90
ROW_SLOTS = 14
RESULT_SLOTS = 5
FILL_SLOTS, HOLD_SLOTS = 14, 2.0
MISSED_SLOTS = 0.8
MOVED_SHARE = 0.15
START_SECONDS = 1.3e-6
# Registers beside sums, elements and weights: addresses, bounds and counters; of each further row
# that is read ahead, the share of its elements that nvcc converts ahead, too; of the sums, those of
# which there are two where rows go to some only, for each row of results beyond three. Held to the
# registers and the spills of 70 kernels (nvcc 13.0).
OTHER_REGISTERS, AHEAD_SHARE, MOST_AHEAD, RAMP_SHARE = 16, 0.25, 7, 0.125
SCHEDULERS = 4
# The greater of time at the memory and in the multiprocessors hides most of the lesser one.
OVERLAP_EXPONENT = 4
LINE_BYTES = 128


def registers_of(shape: Shape) -> int:
    """Estimate of a thread's registers."""
    c, numbers = shape.config, shape.numbers
    reach = shape.reach
    rows = shape.units * (1 if shape.turns > 1 else shape.chunks * shape.outer_taps)
    words = -(-c.channels * reach.pieces[0].width * min(numbers.bytes, 4) // 4)
    held = len(reach.pieces) * words * rows
    elements = len(reach.offsets) * c.channels * (1 + AHEAD_SHARE * (min(rows, MOST_AHEAD) - 1))
    read = 1 if numbers.is_depthwise else c.channels
    weights = 2 * c.filters * read if c.shared else shape.taps * c.filters
    sums = shape.alive * c.columns * c.filters
    if shape.ramps:
        sums *= 1 + RAMP_SHARE * max(0, shape.alive - 3)
    beside = -(-c.columns * c.filters * numbers.beside // 4)
    return int(sums + elements + held + weights + beside + 2 * c.filters + OTHER_REGISTERS)


def resident_blocks(shape: Shape, hw: HardwareProfile) -> int:
    """Blocks of a multiprocessor."""
    warps = -(-shape.config.threads // hw.warp_size)
    registers = -(-min(registers_of(shape), hw.max_registers_per_thread) // 8) * 8
    smem = shape.shared_bytes + hw.smem_reserved_per_block_bytes
    # Each of four schedulers has registers of its own.
    held = hw.registers_per_sm // SCHEDULERS // (registers * hw.warp_size) * SCHEDULERS
    return min(
        held // warps,
        hw.max_threads_per_sm // (warps * hw.warp_size),
        hw.smem_per_sm_bytes // smem,
        hw.max_blocks_per_sm,
    )


def row_slots(shape: Shape, operations: float) -> tuple[float, float, float]:
    """Issue slots of a thread for a row of the data, for its multiplications, and for a row of
    results.

    `operations` are those behind a sum.
    """
    c, numbers = shape.config, shape.numbers
    reach = shape.reach
    rows = shape.units * shape.chunks * shape.outer_taps
    multiplied = shape.fmas * shape.chunks * shape.outer_taps
    accesses = len(reach.pieces) * (1 if numbers.along_channels else c.channels)
    converted = len(reach.offsets) * c.channels if numbers.bytes < 4 else 0
    weights = 0.0
    if c.shared:
        vectors = c.filters / math.gcd(c.filters, 4)
        weights = multiplied / (c.columns * c.filters) * vectors
    turns = 12 * shape.turns if shape.turns > 1 else 0
    data = rows * (1.2 * accesses + converted) + ROW_SLOTS + turns
    results = c.columns * c.filters
    width = c.filters if numbers.along_channels else math.gcd(c.columns, shape.columns.size)
    stores = results / math.gcd(width, WIDEST // numbers.bytes)
    return data, multiplied + weights, results * (operations + 0.5) + 1.3 * stores


def wavefronts(shape: Shape, hw: HardwareProfile) -> tuple[float, float]:
    """Passes of a warp's accesses through the load units, for a row of data and one of results."""
    c, numbers = shape.config, shape.numbers
    reach = shape.reach
    rows = shape.units * shape.chunks * shape.outer_taps
    accesses = len(reach.pieces) * (1 if numbers.along_channels else c.channels) * rows
    stored = c.columns * c.filters
    if numbers.along_channels:
        lanes = min(c.lanes, hw.warp_size)
        apart = -(-hw.warp_size // lanes)  # strips of a warp
        read = max(1.0, lanes * c.channels * numbers.bytes / LINE_BYTES) * apart
        width = math.gcd(c.filters, WIDEST // numbers.bytes)
        wrote = max(1.0, lanes * c.filters * numbers.bytes / LINE_BYTES) * apart
        shared = lanes * math.gcd(c.filters, 4) * 4 / LINE_BYTES
    else:
        pitch = c.columns * numbers.bytes * hw.warp_size / LINE_BYTES
        read, wrote = (min(hw.warp_size, max(1.0, p)) for p in (pitch * shape.columns.step, pitch))
        width = math.gcd(c.columns, shape.columns.size, WIDEST // numbers.bytes)
        shared = 1.0
    found = accesses * read
    if c.shared:
        terms = shape.fmas * shape.chunks * shape.outer_taps / (c.columns * c.filters)
        found += max(1.0, shared) * terms * c.filters / math.gcd(c.filters, 4)
    return found, stored / width * wrote


def direct_seconds(
    shape: Shape, hw: HardwareProfile, moved_bytes: float, operations: float = 3.0
) -> float:
    """Predicted seconds of one launch: waves of blocks at the rate of their instructions, or of the
    latency of their loads; beside them the time of `moved_bytes`. `operations` are the
    instructions behind each sum.
    """
    config = shape.config
    warps = -(-config.threads // hw.warp_size)
    resident = max(1, resident_blocks(shape, hw))
    blocks = -(-shape.lanes // config.lanes) * -(-shape.tasks // config.tasks)
    data, multiplied, results = row_slots(shape, operations)
    rows = min(config.rows, shape.rows.positions)
    steps = rows + shape.alive - 1
    slide = shape.rows
    if shape.bands == 1:  # rows of padding are not walked over
        steps = min(steps, -(-slide.high // (slide.stride * slide.unit)))
    start = START_SLOTS
    if shape.is_staged:
        start += FILL_SLOTS * shape.taps * config.filters * config.lanes / config.threads
    if not config.shared:
        start += HOLD_SLOTS * shape.taps * config.filters
    sums = rows + MOVED_SHARE * (shape.alive - 1) if shape.ramps else steps
    slots = start + steps * data + sums * multiplied + rows * results
    issue_per_s = hw.fma_per_s_f32 / 2 / hw.warp_size  # of all multiprocessors, warp instructions
    clock = issue_per_s / hw.num_sms / SCHEDULERS
    here = min(resident, -(-blocks // hw.num_sms))
    each = max(1.0, here * warps / SCHEDULERS)  # warps of a scheduler
    share = each / (each + MISSED_SLOTS)
    issue = slots * each / share / clock
    # From a warp's view a load takes longer the more others there are.
    wait = hw.memory_latency_s * clock
    wait += (LATENCY_CYCLES - wait) * min(1.0, here * warps / BUSY_WARPS)
    latency = ((steps + 2) * wait * shape.turns + slots * 2) / clock
    wave = max(issue, latency)
    waves = rounded_waves(blocks / (hw.num_sms * here), hw)
    busy = max(waves * wave, slots * warps * blocks / (issue_per_s * share))
    read, written = wavefronts(shape, hw)
    busy = max(busy, (steps * read + rows * written) * warps * blocks / hw.wavefronts_per_s)
    # Rows of other bands come from the L2 once more.
    again = (rows + slide.taps / slide.stride - 1) / rows
    memory = max(moved_bytes / hw.hbm_bytes_per_s, moved_bytes * again / hw.l2_bytes_per_s)
    p = OVERLAP_EXPONENT
    return START_SECONDS + (busy**p + memory**p) ** (1 / p)


def sums_seconds(results: float, terms: int, hw: HardwareProfile) -> float:
    """Seconds of the sums of a convolution of which nothing but sizes is known: `results` of all
    filters, each a sum of `terms` (taps times channels); for the planner.
    """
    slots = 1.15 * terms + RESULT_SLOTS
    return results * slots / (hw.fma_per_s_f32 / 2) * (1 + MISSED_SLOTS / SCHEDULERS)
