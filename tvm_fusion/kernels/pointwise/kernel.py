"""Pointwise kernels: any number of outputs in one launch, 16 bytes an access, a flat grid.

Outputs that run over other axes (the siblings of a program) get their own range of blocks:

    if block < n: compute the program   else: compute the sibling, as its block number block - n
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...errors import Unsupported
from ..forms import Form, Writer
from ..gpu.closed_forms import closed_forms
from ..gpu.frame import Frame, kernel_frame
from ..gpu.vectors import combs, flat_tiles, flat_width, vector_elements, vector_width
from ..program.analysis import analyze
from ..program.expr import bytes_of, constant, convert, dtype_of, linear_form, number
from ..program.narrow import narrow_indices
from ..program.program import Element, Program
from .part import LANES, PointwiseConfig, PointwisePart

if TYPE_CHECKING:
    from ...config import HardwareProfile, Policy

# Which ways of splitting a pointwise program over threads are worth trying, best first.
#
# Ranked by an estimate, not by shapes: bytes over the bandwidth that the bytes in flight sustain
# (Little's law), times what is lost in the last wave of blocks.
#
#     in flight on a multiprocessor = resident threads * vectors a thread * bytes read a vector
#
# and not below what its accesses take: lanes of a warp that are `stride` bytes apart touch
# 32 * stride / 128 lines of memory in each of their loads (a pooling window read by wide vectors).

THREADS = (256, 128, 512, 64)
UNROLL = (1, 2, 4)
NARROW = 8
"""Accesses below so many bytes are worse than reading broadcast operands element by element."""

REGISTERS = 18
"""Registers of a thread beside its loaded vectors (ptxas gives pointwise kernels of the benchmark
suite 17 to 32 with one or two vectors of 16 bytes)."""

MOST_LOADED = 160
"""Registers of what a thread loads before it computes. Two max pools of 3 x 3 behind each other
read 49 elements a result: vectors of 8 halves took 196 registers and spilled 2.4 KB a thread, of 4
none."""

LINE = 128
"""Bytes of a line of the L1."""

UNROLL_COST = 0.01
WAVE_COST = 0.25
"""Shares of time that doubling the vectors a thread, and an idle last wave, cost: estimates."""


def pointwise_config(program: Program, hw: HardwareProfile) -> PointwiseConfig:
    """The best guess."""
    return pointwise_configs(program, hw)[0]


def pointwise_configs(program: Program, hw: HardwareProfile) -> list[PointwiseConfig]:
    """Configurations for one program (not its siblings), best first."""
    return [config for _, config in pointwise_ranked(program, hw)]


def pointwise_ranked(
    program: Program, hw: HardwareProfile, policy: Policy | None = None
) -> list[tuple[float, PointwiseConfig]]:
    """As `pointwise_configs`, each with its predicted seconds.

    Along rows, flat where rows are no multiple of a vector, and with the lanes of a warp across
    rows where more bytes are consecutive that way.
    """
    found = []
    for alike in _forms(program):
        sizes = [t for t in THREADS if t <= hw.max_threads_per_block] or [hw.max_threads_per_block]
        choices = [
            replace(form, threads=t, unroll=u)
            for form in alike
            for t in sizes
            for u in (UNROLL if form.across is None else UNROLL[:1])
        ]
        choices = [c for c in choices if _leaves_registers(program, c, hw)] or choices
        timed = [(estimate_us(program, c, hw) / 1e6, c) for c in choices]
        found += sorted(timed, key=lambda entry: entry[0])
    return found


def _forms(program: Program) -> list[list[PointwiseConfig]]:
    """Widths and directions; the best first, those that the estimate compares together."""
    width = _that_fits(program, vector_width(program, tail=not program.rows))
    plain = PointwiseConfig(width=width, across=axis_to_walk(program, width))
    forms = [[plain]]
    if plain.across is not None:
        forms.append([replace(plain, across=None)])
    elif _strides(program, width):
        forms = [[replace(plain, width=width >> step) for step in range(width.bit_length())]]
    wide = flat_width(program)
    if wide is not None and wide > width:
        narrowest = min(bytes_of(output.dtype) for output in program.outputs)
        first = plain.across is None and width * narrowest < NARROW
        forms.insert(0 if first else len(forms), [PointwiseConfig(width=wide, flat=True)])
    return forms


def _that_fits(program: Program, width: int) -> int:
    """The widest of vectors so wide, or narrower, whose loads leave registers to compute in."""
    while width > 1 and _loaded_registers(program, PointwiseConfig(width=width)) > MOST_LOADED:
        width //= 2
    return width


def _leaves_registers(program: Program, config: PointwiseConfig, hw: HardwareProfile) -> bool:
    """Whether a thread has registers left beside what its vectors load."""
    most = min(MOST_LOADED, hw.registers_per_sm // config.threads - REGISTERS)
    return config.unroll * _loaded_registers(program, config) <= most


def _loaded_registers(program: Program, config: PointwiseConfig) -> int:
    """Registers of a thread for the tiles, elements and combs of one vector."""
    width = config.width
    if config.flat:
        return width * sum(bytes_of(tile.dtype) for tile in flat_tiles(program)) // 4
    size = sum(bytes_of(tile.dtype) for tile in program.tiles)
    found = vector_elements(program, width).values()
    size += sum(bytes_of(vector.element.dtype) for vector in found)
    size += sum(comb.stride * bytes_of(comb.dtype) for comb in combs(program, width))
    return width * size // 4


def estimate_us(program: Program, config: PointwiseConfig, hw: HardwareProfile) -> float:
    """Time of a program, in microseconds; of one with symbolic sizes, that of one full wave."""
    read = bytes_per_vector(program, config)
    written = config.width * sum(bytes_of(o.dtype) for o in program.outputs)
    resident = _resident_blocks(program, config, hw)
    each, slots = config.threads * config.unroll, hw.num_sms * resident
    blocks = float(slots)
    if program.is_static:
        vectors = math.ceil(program.row_count * program.columns / config.width)
        blocks = max(1.0, math.ceil(vectors / each))
    needed = hw.hbm_bytes_per_s * hw.bytes_in_flight_latency_s / hw.num_sms
    in_flight = resident * each * max(read, 1)
    rate = hw.hbm_bytes_per_s * min(1.0, in_flight / needed) * min(1.0, blocks / hw.num_sms)
    waves = blocks / slots
    lost = WAVE_COST * (math.ceil(waves) - waves) / waves if waves > 1 else 0.0
    moved_us = blocks * each * (read + written) / rate * (1 + lost) * 1e6
    moved_us = max(
        moved_us, blocks * each * _wavefronts(program, config) / hw.wavefronts_per_s * 1e6
    )
    latency_us = hw.bytes_in_flight_latency_s * 1e6
    return latency_us + moved_us * (1 + UNROLL_COST * math.log2(config.unroll))


def _wavefronts(program: Program, config: PointwiseConfig) -> float:
    """Lines of memory that the accesses of one thread's vector touch, its share of the warp's."""
    tiles = [bytes_of(t.dtype) for t in program.tiles] + [
        bytes_of(o.dtype) for o in program.outputs
    ]
    wide = sum(max(1.0, LANES * config.width * size / LINE) for size in tiles)
    apart = _strides(program, config.width)
    strided = sum(min(LANES, max(1.0, config.width * LANES * stride / LINE)) for stride in apart)
    return (wide + config.width * strided) / LANES


@lru_cache(maxsize=64)  # of each width for all numbers of threads
def _strides(program: Program, width: int) -> Sequence[int]:
    """Bytes between neighbouring columns of each load that steps over memory and is no vector."""
    vectors = set(vector_elements(program, width))
    vectors |= {var for comb in combs(program, width) for var in comb.teeth}
    found = []
    for element in program.elements:
        form = linear_form(element.offset, [program.column_var])
        step = None if form is None else number(form[0][0])
        if element.var not in vectors and step is not None and step > 1:
            found.append(step * bytes_of(element.dtype))
    return found


def bytes_per_vector(program: Program, config: PointwiseConfig) -> int:
    """Bytes that a thread asks memory for together: tensors as large as the space."""
    if config.flat:
        tiles = flat_tiles(program)
    else:
        tiles = [t for t in program.tiles if t.per_row or not program.rows]
    strided = [bytes_of(e.dtype) for e in program.elements]
    return config.width * (sum(bytes_of(t.dtype) for t in tiles) + sum(strided))


def _resident_blocks(program: Program, config: PointwiseConfig, hw: HardwareProfile) -> int:
    """Blocks on a multiprocessor, by its threads and registers."""
    tiles = config.width * sum(bytes_of(tile.dtype) for tile in program.tiles) // 4
    runs = sum(comb.stride * bytes_of(comb.dtype) for comb in combs(program, config.width))
    registers = REGISTERS + config.unroll * (tiles + config.width * runs // 4)
    threads = min(hw.max_threads_per_sm, hw.registers_per_sm // registers)
    return max(1, min(threads // config.threads, hw.max_blocks_per_sm))


# ---- lanes across rows


def axis_to_walk(program: Program, width: int) -> int | None:
    """The row axis along which most bytes of strided loads are consecutive, if there is one."""
    if not program.is_static:
        return None
    vectors = vector_elements(program, width)
    strided = [element for element in program.elements if element.var not in vectors]
    gains = [0] * len(program.rows)
    for element in strided:
        axis = _consecutive_axis(program, element)
        if axis is not None and program.rows[axis] >= LANES // 2:
            gains[axis] += bytes_of(element.dtype)
    best = max(gains, default=0)
    return gains.index(best) if best else None


def _consecutive_axis(program: Program, element: Element) -> int | None:
    """The row axis whose neighbours are neighbours in memory."""
    axes = (*program.row_vars, program.column_var)
    form = linear_form(element.offset, axes)
    if form is None:
        return None
    steps = [number(step) for step in form[0]]
    return steps.index(1) if 1 in steps[:-1] and steps[-1] not in (0, 1) else None


def emit_pointwise(
    program: Program, hw: HardwareProfile, config: PointwiseConfig | None = None
) -> tirx.PrimFunc:
    """The TIRx kernel of a program without reductions, and of its siblings.

    Parameters
    ----------
    config : of the program; its siblings take the same number of threads, and else their best
        guess.

    Raises
    ------
    Unsupported
        For reductions, empty outputs, and grids beyond 2**31 - 1 blocks.
    """
    config = config or pointwise_config(program, hw)
    parts = []
    for part in (program, *program.siblings):
        if part.phases:
            raise Unsupported("the program reduces")
        if part.accumulations or any(output.place is not None for output in part.outputs):
            raise Unsupported("the columns of an output are not consecutive")
        if part.is_static and not part.row_count * part.columns:
            raise Unsupported("an output is empty")
        guess = dataclasses.replace(pointwise_config(part, hw), threads=config.threads)
        chosen = config if part is program else guess
        parts.append(PointwisePart(closed_forms(narrow_indices(part)), chosen))
    grid = sum(part.blocks for part in parts)
    if not isinstance(grid, int):
        grid = tirx.Max(grid, constant(1, dtype_of(grid)))
    with kernel_frame(program, grid, config.threads) as frame:
        dispatch(frame, parts, frame.block)
    return frame.func


def dispatch(frame: Frame, parts: list[PointwisePart], block: Expr) -> None:
    """Each part gets its range of blocks."""
    part, *others = parts
    if not others:
        part.emit(frame, block)
        return
    count = part.blocks if isinstance(part.blocks, int) else convert(part.blocks, "int32")
    with T.If(block < count):
        with T.Then():
            part.emit(frame, block)
        with T.Else():
            dispatch(frame, others, T.Bind(block - count))


WRITER = Writer(
    "pointwise work",
    analyze,
    (Form("pointwise", PointwiseConfig, pointwise_ranked, emit_pointwise),),
)
