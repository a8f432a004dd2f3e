"""Configurations of mixed kernels: threads a row, and how the coming rows are brought."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import Unsupported
from ..gpu.vectors import can_stream, vector_width
from ..gpu.windows import needs_windows
from ..program.expr import bytes_of
from ..program.program import Program
from .config import Form, RowConfig
from .exchange import WARP

if TYPE_CHECKING:
    from ...config import HardwareProfile

RING_BYTES = 192 * 1024
"""Shared memory for the coming rows of all blocks of a multiprocessor."""
STAGES = 4
REGISTERS_FOR_DATA = 96
"""Registers a thread for what was read, what is kept and the sums; beyond, ptxas spills."""
REGISTERS_BESIDE = 32
"""Registers a thread for addresses and temporaries."""
CLUSTERS = (1, 2, 4, 8)


def mixed_configs(program: Program, hw: HardwareProfile) -> list[RowConfig]:
    """Configurations that can run, the best guess first: as many threads as columns have vectors,
    half of them, and rows that are loaded when their turn comes.

    Raises
    ------
    Unsupported
        Where no number of threads holds the sums of a row.
    """
    if not program.is_static or not isinstance(program.columns, int) or not program.row_count:
        raise Unsupported("mixed kernels need static shapes")
    width = _width(program)
    inputs = sum(bytes_of(tile.dtype) for tile in program.tiles)
    kept = 4 * (program.phases > 1)
    held = inputs + kept + 4 * len(program.accumulations)
    wide = all(reduction.dtype == "float32" for reduction in program.reductions)
    clusters = CLUSTERS if wide else (1,)
    choices = thread_choices(program.columns, width, held, hw, clusters)
    while not choices and width > 1:  # narrower vectors divide a row among more threads
        width //= 2
        choices = thread_choices(program.columns, width, held, hw, clusters)
    if not choices:
        raise Unsupported(f"no block holds sums over {program.columns} columns")
    found = [form for choice in choices for form in _forms(program, hw, width, *choice)]
    return sorted(dict.fromkeys(found), key=lambda config: config.form is not Form.BULK)


def thread_choices(
    columns: int,
    width: int,
    held: int,
    hw: HardwareProfile,
    clusters: Sequence[int] = CLUSTERS,
) -> list[tuple[int, int]]:
    """Threads a block and blocks a row that hold a row: `held` bytes a column, in vectors of
    `width`; as few blocks as possible, the most threads first.
    """
    vectors = columns // width
    for cluster in clusters if hw.has_clusters else (1,):
        if vectors % cluster:
            continue
        found = []
        for chunks in (1, 2, 4, 8):
            threads = max(WARP, -(-vectors // (cluster * chunks * WARP)) * WARP)
            registers = min(REGISTERS_FOR_DATA, hw.registers_per_sm // threads - REGISTERS_BESIDE)
            if threads <= hw.max_threads_per_block and chunks * width * held <= 4 * registers:
                found.append((threads, cluster))
        if found:
            return found
    return []


def _forms(
    program: Program, hw: HardwareProfile, width: int, threads: int, cluster: int
) -> list[RowConfig]:
    """The ring, where the rows can be copied in bulk, and plain loads."""
    plain = RowConfig(Form.REGISTERS, threads, 1, width, cluster)
    row = sum(bytes_of(t.dtype) for t in program.tiles if t.per_row) * program.columns // cluster
    if not row or not hw.architecture.has_tma or not can_stream(program, width):
        return [plain]
    stages = ring_stages(program.rows[-1], row, threads, hw)
    if not stages:
        return [plain]
    return [dataclasses.replace(plain, form=Form.BULK, stages=stages), plain]


def ring_stages(rows: int, row_bytes: int, threads: int, hw: HardwareProfile) -> int:
    """Coming rows of `row_bytes` that a block keeps in shared memory; 0 where there is no room."""
    resident = max(1, min(8, hw.max_threads_per_sm // 2 // threads))
    stages = min(STAGES, rows, RING_BYTES // resident // max(1, row_bytes))
    return stages if stages >= 2 and row_bytes * stages <= hw.smem_per_block_bytes else 0


def _width(program: Program) -> int:
    """Columns of one vector; every row has the same columns in the same threads."""
    width = vector_width(program)
    while needs_windows(program, width):
        width //= 2
    return width
