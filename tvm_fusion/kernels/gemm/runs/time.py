"""Predicted time of the kernel for runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ....config import HardwareProfile
from ...contraction.model import Output
from ...program.expr import bytes_of
from ..epilogue import operation_s, starts_off_words
from ..mma.rank import OPERATION_LATENCY, PEAK_SHARE, PORT_BYTES, SM90_SHARE
from ..mma.units import CHUNK
from .problem import OCTET, Runs
from .shape import ELEMENT, Shape

TERMS = 2 * OCTET
"""Of an mma.sync."""
OFF_WORD_CYCLES = 3.0
"""What each element of a warp adds to a tile whose rows leave in words that start anywhere: a lane
has one word behind the other (393 x 1209 x 91 and 1240 x 473 x 80 on an H200, 2026-11-29: 4.5 us
with 512 elements, 5.3 with 1024, 7.0 with 2048).
"""
LANES = 128
"""Instructions of a lane that a multiprocessor issues in a cycle."""
WARP, ROWS_OF_LOAD = 32, 8
"""Lanes of a warp, and rows that they hold: four have neighbouring columns of one."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Of the model.

    Attributes
    ----------
    start_s : float
        Seconds of a launch: its first blocks, its last stores.
    fill_cycles : float
        What a block waits for a round of its weights.
    wait_cycles : float
        What a block waits in a tile where no other one works: barrier, first words, last sums.
    element_cycles : float
        Issue cycles of an element of the epilogue, its stores included, of a warp's 32 lanes.
    piece_cycles : float
        Issue cycles of a piece of data.
    line_cycles : float
        Of each line of memory that a warp's load of what is read for each element meets: those of
        8 rows.
    overlap : float
        The greater of time at the memory and in the multiprocessors hides the lesser one the more
        of it, the greater this exponent.
    within : float
        The same of tensor cores, shared memory and the way from the L2.
    """

    start_s: float
    fill_cycles: float
    wait_cycles: float
    element_cycles: float
    piece_cycles: float
    line_cycles: float
    overlap: float
    within: float


# Of 14 first layers and 16 thin products on an H200 (2026-11-26, tests/data/runs_sweep_h200.json):
# off by 6 % in the median, first choices lose 3 %. `line_cycles` is of five products with a
# residual (2026-11-27): predicted are 0.97 to 1.08 of what they take in the median, 0.77 without.
FITTED = Coefficients(
    start_s=8.2e-7,
    fill_cycles=1370.0,
    wait_cycles=625.0,
    element_cycles=2.13,
    piece_cycles=26.3,
    line_cycles=1.0,
    overlap=5.08,
    within=1.92,
)


def moved_bytes(problem: Runs) -> int:
    """Bytes of all tensors."""
    return sum(
        math.prod(map(int, p.shape)) * bytes_of(p.dtype)
        for p in problem.contraction.params
        if p.shape is not None
    )


def runs_seconds(shape: Shape, hw: HardwareProfile, fitted: Coefficients = FITTED) -> float:
    """Predicted seconds of one launch: the tiles of a multiprocessor, each at the rate of what
    limits it, beside the time of all tensors' bytes.
    """
    p, c = shape.problem, shape.config
    resident, slots = max(1, shape.resident(hw)), shape.slots(hw)
    blocks = slots * shape.column_tiles
    here = min(resident, -(-blocks // hw.num_sms))
    turns = -(-shape.row_tiles // slots)
    clock = hw.clock_ghz * 1e9
    flop = 2.0 * c.block_m * c.block_n * shape.steps * TERMS
    idle = max(1.0, 4 / (c.warps * here))  # a multiprocessor has four schedulers
    tensor = flop / _flops_per_cycle(p.dtype, hw) * idle
    words = c.tiles_m * 4 * (2 if shape.shifted else 1)
    words *= 1.0 if p.apart else _conflicts(p.step)
    if shape.linear:
        others = c.tiles_n * 2 * (2 if shape.weights_shifted else 1) * _conflicts(p.weight_step)
    else:
        others = c.warp_n / 16 * 4
    shared = c.warps * shape.steps * (words + others) * (1.0 if p.apart else idle)
    stored = c.block_m * c.block_n
    outputs = len(p.segment.outputs)
    issue = fitted.element_cycles * stored * outputs / LANES
    issue += fitted.piece_cycles * shape.patch_lines * shape.pieces / LANES
    operations = OPERATION_LATENCY * operation_s([p.segment.segment], hw)
    issue += operations * stored * hw.num_sms * clock
    issue += fitted.line_cycles * ROWS_OF_LOAD * _loads_of_elements(p) * stored / WARP
    port = shape.patch_lines * shape.pieces * p.piece * ELEMENT + stored * ELEMENT * outputs
    port /= PORT_BYTES
    limits = sum(limit**fitted.within for limit in (tensor, shared, port)) ** (1 / fitted.within)
    body = limits + issue
    each = body * here + fitted.wait_cycles / here
    if any(_starts_off_words(p, output) for output in p.segment.outputs):
        each += OFF_WORD_CYCLES * c.warp_m * c.warp_n
    rounds = -(-c.block_n * shape.steps // c.threads)  # of 16 weights a thread
    filled = rounds * fitted.fill_cycles
    if shape.weight_pieces:
        filled = _copied_cycles(shape.weight_pieces)
    busy = (turns * each + filled) / clock
    memory = moved_bytes(p) / hw.hbm_bytes_per_s
    e = fitted.overlap
    return fitted.start_s + hw.kernel_gap_us * 1e-6 + (busy**e + memory**e) ** (1 / e)


def _starts_off_words(problem: Runs, output: Output) -> bool:
    """Whether rows of an output start off 4 bytes."""
    shape = problem.contraction.params[output.param].shape
    return starts_off_words(output, shape, problem.segment.groups)


def _loads_of_elements(problem: Runs) -> float:
    """Loads of a thread for each of its elements, of what differs between all of them."""
    found = [load for load in problem.segment.loads if load.is_matrix]
    return sum(0.5 if load.paired else 1.0 for load in found)


def _flops_per_cycle(dtype: str, hw: HardwareProfile) -> float:
    """Of a multiprocessor."""
    rate = hw.tensor_flop_per_s.get(dtype, hw.fma_per_s_f32)
    rate *= SM90_SHARE if hw.architecture.is_rated_by_wgmma else PEAK_SHARE
    return rate / hw.num_sms / (hw.clock_ghz * 1e9)


def _copied_cycles(pieces: float) -> float:
    """In which weights come in by copies of 16 bytes, the first data beside them (an estimate)."""
    return pieces * CHUNK / PORT_BYTES


def _conflicts(step: int) -> float:
    """Passes that a warp's words of 8 positions take through the banks of shared memory."""
    words = {(position * step // 2 + lane) for position in range(8) for lane in range(4)}
    banks = [w % 32 for w in words]
    return float(max(map(banks.count, banks)))


PLANNED_ROWS, PLANNED_COLUMNS, PLANNED_WARPS = 128, 64, 4
"""A tile that is near the fastest for most sizes."""


def sums_seconds(
    rows: int, columns: int, terms: int, dtype: str, hw: HardwareProfile, copied: bool = False
) -> float:
    """The same as the planner sees it: of the sums and their epilogue alone, from plain sizes;
    `copied`: weights are.
    """
    f, steps = FITTED, -(-terms // TERMS)
    block_n = min(PLANNED_COLUMNS, max(16, 1 << (columns - 1).bit_length()))
    cells = PLANNED_ROWS * block_n
    tensor = 2.0 * cells * steps * TERMS / _flops_per_cycle(dtype, hw)
    own = PLANNED_ROWS // PLANNED_WARPS
    shared = PLANNED_WARPS * steps * (own / 4 + block_n / 4)
    issue = (f.element_cycles * cells + f.piece_cycles * PLANNED_ROWS * terms / OCTET) / LANES
    tiles = -(-rows // PLANNED_ROWS) * -(-columns // block_n)
    body = (tensor**f.within + shared**f.within) ** (1 / f.within) + issue
    filled = -(-block_n * steps // (PLANNED_WARPS * 32)) * f.fill_cycles
    if copied:
        filled = _copied_cycles(block_n * terms / OCTET)
    filled += f.wait_cycles
    return (max(1.0, tiles / hw.num_sms) * body + filled) / (hw.clock_ghz * 1e9)
