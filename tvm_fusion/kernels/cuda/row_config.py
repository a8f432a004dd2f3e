"""Configurations of row kernels: threads a row, how a row is held, the best guess by size."""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import Unsupported
from ..expr import bytes_of
from ..online import merge_online
from ..program import Program
from .row_exchange import WARP
from .vectors import can_stream, vector_width

if TYPE_CHECKING:
    from ...config import HardwareProfile

# Evidence: NVIDIA H200, float16, median kernel time with a clean L2, 2026-11-20.
ELEMENTS_A_THREAD = (
    32  # softmax 8192x4096: 30.3 us; 64 elements (fewer threads) 34 us, 16 elements 31 us
)
SHORT_ROW = 4096  # up to here one block of N / 32 threads holds a row
MEDIUM_ROW = 16384  # up to here one block of 512 threads does
LONG_ROW = 32768  # up to here a cluster does; above, a ring in shared memory: 4096x65536 276 us
BLOCK = 128  # threads of a block that several short rows share: 65536x128 8.8 us
REGISTERS_FOR_DATA = 128  # of 255; beyond, ptxas spills
LOOP_THREADS = 512  # cross-entropy 4096x32000: 62.5 us; 1024 threads and over 32 registers 100 us
RING_BYTES = 196608  # of 227 KiB shared memory


class Form(enum.StrEnum):
    """How a row is held while its reductions run."""

    REGISTERS = "reg"
    LOOP = "loop"
    BULK = "bulk"


@dataclass(frozen=True, slots=True)
class RowConfig:
    """One way to compute the rows of a program.

    Attributes
    ----------
    form : REGISTERS keeps the row in registers; LOOP streams it once a phase; BULK is REGISTERS
        with resident blocks whose coming rows are copied into shared memory ahead.
    threads : threads a row within one block (a power of two below 32, else a multiple of 32).
    rows : rows a block; together whole warps.
    width : columns of one vector.
    cluster : blocks a row.
    unroll : LOOP: vectors a step.
    prefetch : LOOP: the next step's loads are issued before this step's arithmetic.
    stages : BULK: rows in flight a block.
    resident : blocks a multiprocessor that stay and walk over the rows; 0: one block for each
        `rows` rows.
    min_blocks : blocks a multiprocessor that ptxas must leave registers for; 0: no demand.
    load, store : cache hints (memory.py).
    online : run sums of exponentials along with their maximum.
    """

    form: Form = Form.REGISTERS
    threads: int = 256
    rows: int = 1
    width: int = 8
    cluster: int = 1
    unroll: int = 4
    prefetch: bool = False
    stages: int = 2
    resident: int = 0
    min_blocks: int = 0
    load: str = "nc"
    store: str = "wb"
    online: bool = True

    @property
    def tag(self) -> str:
        """Short name for reports: the form and what differs from the defaults."""
        parts = [f"{self.form}-t{self.threads}x{self.rows}-v{self.width}"]
        for name, letter in (("cluster", "c"), ("resident", "p"), ("min_blocks", "b")):
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            parts += [f"{letter}{value}"] if value != default else []
        if self.form is Form.LOOP:
            parts.append(f"u{self.unroll}{'p' if self.prefetch else ''}")
        return "-".join(parts + ([] if self.online else ["phases"]))


def has_clusters(hw: HardwareProfile) -> bool:
    """Whether the device has thread block clusters and bulk copies (Hopper and later)."""
    match = re.match(r"sm_(\d+)", hw.arch)
    return match is not None and int(match.group(1)) >= 90


def row_configs(program: Program, hw: HardwareProfile) -> list[RowConfig]:
    """Configurations that can run, the best guess first.

    Raises
    ------
    Unsupported
        Where the length of the rows is not known.
    """
    if not isinstance(program.columns, int):
        raise Unsupported(f"rows of symbolic length {program.columns}")
    if program.columns == 0 or (program.is_static and program.row_count == 0):
        raise Unsupported("there is nothing to reduce")
    first = _choose(program, hw)
    configs = [first]
    if first.form is Form.REGISTERS and first.cluster == 1:
        for threads in (first.threads * 2, first.threads // 2):
            if 1 <= threads <= hw.max_threads_per_block and _holds(program, threads, first.width):
                configs.append(_registers(program, threads, first.width))
    for unroll in (2, 4):
        loop = _loop(program, first.width, unroll)
        configs += [loop] if loop not in configs else []
    return configs


def _choose(program: Program, hw: HardwareProfile) -> RowConfig:
    columns, width = program.columns, vector_width(program)
    vectors = columns // width
    if columns > SHORT_ROW and _one_pass(program):
        return _loop(program, width, 2)
    per_thread = ELEMENTS_A_THREAD
    while per_thread > width and per_thread * _data_bytes(program) > 4 * REGISTERS_FOR_DATA:
        per_thread //= 2
    threads = min(_power_of_two(columns / per_thread), _power_of_two(vectors))
    if columns > SHORT_ROW * (1 if width > 1 else 2) and columns <= MEDIUM_ROW:
        threads = max(threads, 512)
    if threads <= hw.max_threads_per_block and columns <= MEDIUM_ROW:
        return _registers(program, threads, width)
    return _long(program, hw, width) or _loop(program, width, 4)


def _long(program: Program, hw: HardwareProfile, width: int) -> RowConfig | None:
    """Rows that one block cannot hold: a cluster, if the device and the program allow it."""
    columns, vectors = program.columns, program.columns // width
    if not has_clusters(hw) or not _cluster_exchange(program):
        return None
    ring = program.is_static and can_stream(program, width) and columns > LONG_ROW
    tiles = sum(bytes_of(tile.dtype) for tile in program.tiles if tile.per_row)
    for blocks in (2, 4, 8) if ring and tiles else ():
        share = columns // blocks
        if share * tiles * 2 <= min(RING_BYTES, hw.smem_per_block_bytes) and vectors % blocks == 0:
            if _holds(program, 1024 * blocks, width):
                return RowConfig(
                    Form.BULK, 1024, 1, width, blocks, stages=2, resident=1, min_blocks=1
                )
            break
    blocks = min(8, _power_of_two(columns / MEDIUM_ROW))
    if columns / blocks <= 512 * 64 and _holds(program, 512 * blocks, width):
        return RowConfig(threads=512, width=width, cluster=blocks)
    return None


def _registers(program: Program, threads: int, width: int) -> RowConfig:
    rows = max(1, BLOCK // threads) if threads <= 32 else 1
    if program.is_static:
        rows = min(rows, max(WARP // threads, _power_of_two(program.row_count)))
    return RowConfig(threads=threads, rows=rows, width=width)


def _loop(program: Program, width: int, unroll: int) -> RowConfig:
    """Rows are streamed; wide enough vectors are prefetched."""
    threads = min(LOOP_THREADS, max(32, _power_of_two(program.columns // width)))
    if width == 1:
        return RowConfig(Form.LOOP, threads, unroll=4 * unroll, width=1)
    one_pass = _one_pass(program)
    return RowConfig(
        Form.LOOP,
        threads,
        width=width,
        unroll=unroll,
        prefetch=one_pass,
        load="na" if one_pass else "nc",
        min_blocks=3 if one_pass else 0,
    )


def _one_pass(program: Program) -> bool:
    """Whether a single sweep over the row is enough, so that nothing of it need be held."""
    if any(output.full for output in program.outputs):
        return False
    return merge_online(program).phases <= 1


def _holds(program: Program, threads: int, width: int) -> bool:
    """Whether `threads` threads can hold a row in registers."""
    each = -(-program.columns // (width * threads)) * width
    return each * _data_bytes(program) <= 8 * REGISTERS_FOR_DATA


def _data_bytes(program: Program) -> int:
    """Bytes of registers a column takes: what was read, and a float32 for what is kept."""
    tiles = sum(bytes_of(tile.dtype) for tile in program.tiles)
    return tiles + (4 if program.phases > 1 else 0)


def _cluster_exchange(program: Program) -> bool:
    """Blocks of a cluster exchange float32 only."""
    return all(reduction.dtype == "float32" for reduction in program.reductions)


def _power_of_two(size: float) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(0, math.ceil(size) - 1).bit_length()
