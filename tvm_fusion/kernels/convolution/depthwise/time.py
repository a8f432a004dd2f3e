"""Time of the direct convolution kernel, from plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ....config import HardwareProfile
from ...gemm.simt.config import rounded_waves
from ...gpu.memory import WIDEST
from .shape import Shape


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What is fitted to measured kernels, by `tests/fit_gemm_cost.py depthwise`.

    Attributes
    ----------
    start_s : float
        Seconds of a launch: its first blocks, its last stores.
    row_cycles, fill_cycles : float
        What a thread waits for a row of the data, and for a weight that it moves to shared memory.
    access_slots, weight_slots, turn_slots : float
        Issue slots of a read of the data with its address, of one of weights in shared memory, of a
        turn of the loop over outer taps.
    missed_slots : float
        How many slots a warp misses for each that it takes.
    spill_slots : float
        Slots of a row for each register that is missing.
    kept_registers : float
        Registers beside sums, weights and elements where nvcc keeps weights over the rows.
    narrow : float
        Share of the time of memory that accesses of half a line cost in addition.
    overlap : float
        The greater of time at the memory and in the multiprocessors hides the lesser one the more
        of it, the greater this exponent.
    """

    start_s: float
    row_cycles: float
    fill_cycles: float
    access_slots: float
    weight_slots: float
    turn_slots: float
    missed_slots: float
    spill_slots: float
    kept_registers: float
    narrow: float
    overlap: float


# Of 14 depthwise layers and 141 random convolutions on an H100 (2026-11-26, 608 kernels; the fit
# knows of its slower memory): on the layers, off by 5 % in the median, first choices lose 3 %.
FITTED = Coefficients(
    start_s=1.1e-6,
    row_cycles=287.0,
    fill_cycles=600.0,
    access_slots=2.6,
    weight_slots=1.97,
    turn_slots=31.0,
    missed_slots=0.74,
    spill_slots=22.0,
    kept_registers=9.2,
    narrow=0.12,
    overlap=2.55,
)
# Estimates: issue slots of a thread's start, of the loop of a row, of a conversion to float32, of a
# weight that goes to shared memory and of one that goes to a register; what sums that are moved
# cost rows that go to some of them only, of their multiplications; of strips that a warp's lanes
# are apart, what each costs beyond the first.
START_SLOTS, ROW_SLOTS, CONVERSION_SLOTS = 60, 8, 2
FILL_SLOTS, HOLD_SLOTS = 4, 7.0
MOVED_SHARE = 0.1
APART_SHARE = 0.2
# Registers beside sums, elements and weights: addresses, bounds and counters; of each further row
# that is read ahead, the share of its elements that nvcc converts ahead, too; of the sums, those of
# which there are two where rows go to some only, for each row of results beyond three. Held to the
# registers and the spills of 70 kernels (nvcc 13.0).
OTHER_REGISTERS, AHEAD_SHARE, MOST_AHEAD, RAMP_SHARE = 16, 0.25, 7, 0.125
SCHEDULERS = 4
# Where nothing but sizes is known: issue slots of a term and of a result, and how many threads
# bring in a filter's weights; fitted to the fastest kernels of the 14 layers above.
TERM_SLOTS, RESULT_SLOTS, FILLING = 1.3, 25, 4
LINE_BYTES = 128
TURNED_PASSES = 3
"""Passes of a store of a part of a line that no other lane stores to (H100, 2026-11-26: halves one
by one, 32 x 128 x 56 x 56, 235 us)."""


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


def missing_registers(shape: Shape, resident: int, hw: HardwareProfile, kept: float) -> float:
    """Registers that a thread of `resident` blocks lacks, since nvcc keeps weights of shared memory
    over the rows of a walk: `kept` are those beside sums, weights and elements.
    """
    c = shape.config
    if not (c.shared and shape.ramps):
        return 0.0
    warps = -(-c.threads // hw.warp_size)
    most = hw.registers_per_sm // (resident * warps * hw.warp_size) // 8 * 8
    sums = shape.alive * c.columns * c.filters
    needed = sums + shape.taps * c.filters + len(shape.reach.offsets) * c.channels + kept
    return max(0.0, needed - min(most, hw.max_registers_per_thread))


def row_slots(shape: Shape, operations: float, fitted: Coefficients) -> tuple[float, float, float]:
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
        weights = fitted.weight_slots * multiplied / (c.columns * c.filters) * vectors
    turns = fitted.turn_slots * shape.turns if shape.turns > 1 else 0
    reads = fitted.access_slots * accesses + CONVERSION_SLOTS * converted
    data = rows * reads + ROW_SLOTS + turns
    results = c.columns * c.filters
    stores = results / _stored_width(shape)
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
        apart = 1 + APART_SHARE * (-(-hw.warp_size // lanes) - 1)  # by the strips of a warp
        read = max(1.0, lanes * c.channels * numbers.bytes / LINE_BYTES) * apart
        wrote = max(1.0, lanes * c.filters * numbers.bytes / LINE_BYTES) * apart
        shared = lanes * math.gcd(c.filters, 4) * 4 / LINE_BYTES
    else:
        pitch = c.columns * numbers.bytes * hw.warp_size / LINE_BYTES
        read, wrote = (min(hw.warp_size, max(1.0, p)) for p in (pitch * shape.columns.step, pitch))
        shared = 1.0
    if numbers.is_turned:  # each lane's store has a line of its own
        wrote = hw.warp_size * TURNED_PASSES
    found = accesses * read
    if c.shared:
        terms = shape.fmas * shape.chunks * shape.outer_taps / (c.columns * c.filters)
        found += max(1.0, shared) * terms * c.filters / math.gcd(c.filters, 4)
    return found, stored / _stored_width(shape) * wrote


def _stored_width(shape: Shape) -> int:
    """Results of one store of a thread."""
    c, numbers = shape.config, shape.numbers
    most = WIDEST // numbers.bytes
    if numbers.along_channels and not numbers.is_turned:
        return math.gcd(c.filters, most)
    columns = shape.columns.size if shape.columns.phases == 1 else 1
    return math.gcd(c.columns, columns, most)


def direct_seconds(
    shape: Shape,
    hw: HardwareProfile,
    moved_bytes: float,
    operations: float = 3.0,
    fitted: Coefficients = FITTED,
) -> float:
    """Predicted seconds of one launch: waves of blocks, of which each fills its shared memory and
    goes on at the rate of its instructions, or of the latency of its loads; beside them the time
    of `moved_bytes`. `operations` are the instructions behind each sum.
    """
    config = shape.config
    warps = -(-config.threads // hw.warp_size)
    resident = max(1, resident_blocks(shape, hw))
    blocks = -(-shape.lanes // config.lanes) * -(-shape.tasks // config.tasks)
    data, multiplied, results = row_slots(shape, operations, fitted)
    data += fitted.spill_slots * missing_registers(shape, resident, hw, fitted.kept_registers)
    rows = min(config.rows, shape.rows.positions)
    steps = rows + shape.alive - 1
    slide = shape.rows
    if shape.bands == 1:  # rows of padding are not walked over
        steps = min(steps, -(-slide.high // (slide.stride * slide.unit)))
    filled = shape.taps * config.filters * config.lanes / config.threads if shape.is_staged else 0
    start = START_SLOTS + FILL_SLOTS * filled
    if not config.shared:
        start += HOLD_SLOTS * shape.taps * config.filters
    sums = rows + MOVED_SHARE * (shape.alive - 1) if shape.ramps else steps
    slots = start + steps * data + sums * multiplied + rows * results
    issue_per_s = hw.fma_per_s_f32 / 2 / hw.warp_size  # of all multiprocessors, warp instructions
    clock = issue_per_s / hw.num_sms / SCHEDULERS
    here = min(resident, -(-blocks // hw.num_sms))
    each = max(1.0, here * warps / SCHEDULERS)  # warps of a scheduler
    share = each / (each + fitted.missed_slots)
    issue = slots * each / share
    latency = (steps + 2) * shape.turns * fitted.row_cycles + slots * 2
    wave = (max(issue, latency) + filled * fitted.fill_cycles) / clock
    waves = rounded_waves(blocks / (hw.num_sms * here), hw)
    busy = max(waves * wave, slots * warps * blocks / (issue_per_s * share))
    read, written = wavefronts(shape, hw)
    busy = max(busy, (steps * read + rows * written) * warps * blocks / hw.wavefronts_per_s)
    # Rows of other bands come from the L2 once more.
    again = (rows + slide.taps / slide.stride - 1) / rows
    memory = moved_bytes / hw.hbm_bytes_per_s * (1 + fitted.narrow * _narrowness(shape, hw))
    memory = max(memory, moved_bytes * again / hw.l2_bytes_per_s)
    p = fitted.overlap
    return fitted.start_s + (busy**p + memory**p) ** (1 / p)


def _narrowness(shape: Shape, hw: HardwareProfile) -> float:
    """Lines of 128 bytes for each that neighbouring lanes read, beyond the first."""
    c, numbers = shape.config, shape.numbers
    if not (numbers.along_channels and numbers.is_depthwise):
        return 0.0
    side_by_side = min(c.lanes, hw.warp_size) * c.channels * numbers.bytes
    return max(0.0, LINE_BYTES / side_by_side - 1)


def sums_seconds(results: float, terms: int, hw: HardwareProfile) -> float:
    """Seconds of the weights' way in and of the sums of a convolution of which nothing but sizes is
    known: `results` of all filters, each a sum of `terms` (taps times channels); for the planner.
    """
    slots = TERM_SLOTS * terms + RESULT_SLOTS
    filling = terms / FILLING * FITTED.fill_cycles / (hw.clock_ghz * 1e9)
    return filling + results * slots / (hw.fma_per_s_f32 / 2)
