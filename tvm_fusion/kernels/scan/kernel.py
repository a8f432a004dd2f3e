"""Scans in one pass: a thread combines its columns, the threads of a row exchange what theirs come
to, and what is carried from turn to turn stands before them.

    for each turn of threads * width columns:
        compute the bodies, load those of the next turn; values[l] = values[l - 1] + body
        before = carry + those of the threads to the left        shuffles, shared memory
        carry  = carry + those of all
            scan   = before + values[l]; compute and store the outputs

Few long rows are shared by blocks that all run at once: the launch is cooperative, and `before` and
`carry` count what the row's other blocks come to, which each leaves in global memory in front of a
barrier of the grid. Memory is gone through once, and the order of sums does not depend on which
block is first (Merrill and Garland, Single-pass Parallel Prefix Scan with Decoupled Look-back,
2016, do not wait for all, and add in the order of arrival).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.script import tirx as T

from ...errors import Unsupported
from ...ir.extents import ASSUMED_SYMBOLIC_EXTENT
from ...ir.graph import COOPERATIVE_ATTR
from ..forms import Form, Ranked, Writer
from ..gpu.closed_forms import closed_forms
from ..gpu.frame import Frame, kernel_frame, then
from ..program.expr import bytes_of, constant, convert, dtype_of, known_factor, linear_form, number
from ..program.narrow import narrow_indices
from ..program.program import Extent, Output, Program
from .cells import Staged, cells_of
from .config import ScanConfig, Shape, configs
from .exchange import Exchange, slots_left, staged_bytes
from .problem import read_scans

if TYPE_CHECKING:
    from ...config import HardwareProfile, Policy


def _step(program: Program, output: Output) -> int | None:
    """Elements from a column to the next one, in this order or the other."""
    if output.place is None:
        return 1
    form = linear_form(output.place, (program.column_var,))
    step = None if form is None else number(form[0][0])
    return None if step is None else abs(int(step))


def shape_of(program: Program) -> Shape:
    """What a program scans."""
    loads = (*program.tiles, *program.elements)
    sizes = [bytes_of(item.dtype) for item in (*loads, *program.outputs)]
    rows = math.prod(n if isinstance(n, int) else ASSUMED_SYMBOLIC_EXTENT for n in program.rows)
    inner = max(_step(program, output) or rows for output in program.outputs)
    beside = known_factor(program.rows[-1], program.analyzer()) if program.rows else 1
    known = isinstance(program.row_count, int) or inner == 1
    return Shape(
        rows=rows,
        columns=program.columns,
        inner=inner if known else max(inner, rows),
        beside=max(1, beside),
        narrow=min(sizes),
        point=max(1, sum(bytes_of(item.dtype) for item in loads)),
        known=isinstance(program.row_count, int),
    )


def scan_configs(program: Program, hw: HardwareProfile) -> list[ScanConfig]:
    """Configurations of a program, the best guess first."""
    return configs(shape_of(program), hw)


def _ranked(program: Program, hw: HardwareProfile, policy: Policy) -> Ranked:
    return [(None, config) for config in scan_configs(program, hw)]


def emit_scan(program: Program, hw: HardwareProfile, config: ScanConfig) -> tirx.PrimFunc:
    """The TIRx kernel of a program with scans.

    Raises
    ------
    Unsupported
        The configuration does not suit the device.
    """
    if config.block > hw.max_threads_per_block:
        raise Unsupported(f"blocks of {config.block} threads")
    staged = staged_bytes(config, {scan.dtype for scan in program.scans})
    if staged > hw.smem_per_block_bytes:
        raise Unsupported(f"{staged} bytes of shared memory")
    program = closed_forms(narrow_indices(program))
    grid = _grid(program.row_count, config)
    if config.blocks == 1:
        with (
            kernel_frame(program, grid, config.block) as frame,
            _if_rows_exist(program, config, frame),
        ):
            _emit_turns(program, config, frame)
        return frame.func
    left = [(grid * slots_left(config), scan.dtype) for scan in program.scans]
    with kernel_frame(program, grid * config.blocks, config.block, scratch=left) as frame:
        block = frame.block
        frame.rank = T.Bind(T.truncmod(block, config.blocks))
        frame.block = T.Bind(T.truncdiv(block, config.blocks))
        _emit_turns(program, config, frame)
    return frame.func.with_attr(COOPERATIVE_ATTR, True)


def _grid(rows: Extent, config: ScanConfig) -> Extent:
    """Groups of rows; one where a symbolic number of rows is 0."""
    block = config.rows * config.vector
    if isinstance(rows, int):
        return -(-rows // block)
    one, count = (constant(size, dtype_of(rows)) for size in (1, block))
    return tirx.Max(tirx.FloorDiv(rows + (count - one), count), one)


def _if_rows_exist(
    program: Program, config: ScanConfig, frame: Frame
) -> AbstractContextManager[None]:
    if isinstance(program.row_count, int):
        return nullcontext()
    block = config.rows * config.vector
    return then(convert(frame.block, program.index_dtype) * block < program.row_count)


def _emit_turns(program: Program, config: ScanConfig, frame: Frame) -> None:
    """The body of a kernel."""
    layout = cells_of(program, config, frame)
    bodies = [scan.body for scan in program.scans]
    values = [output.value for output in program.outputs]
    prepared = []
    for scope in layout.scopes:
        scope.prepare_values([*bodies, *values])
        prepared.append([[scope.prepare(expr) for expr in part] for part in (bodies, values)])
    left = frame.scratch or [None] * len(program.scans)
    exchanges = [
        Exchange(scan, layout.at, place) for scan, place in zip(program.scans, left, strict=True)
    ]
    slots = layout.slots() if isinstance(layout, Staged) else []
    layout.start()
    with T.serial(layout.turns) as turn:
        cells = layout.of_turn(turn)
        for n, exchange in enumerate(exchanges):
            elements = [cell.point.evaluate(prepared[cell.scope][0][n]) for cell in cells]
            if isinstance(layout, Staged):
                found = layout.staging.exchanged(exchange, turn, slots, elements)
            else:
                found = exchange.run(turn, elements)
            for cell, value in zip(cells, found, strict=True):
                cell.point.known[exchange.scan.var] = value
        for n, output in enumerate(program.outputs):
            found = [T.Bind(cell.point.evaluate(prepared[cell.scope][1][n])) for cell in cells]
            layout.store(output, cells, found)


WRITER = Writer("scans", read_scans, (Form("scan", ScanConfig, _ranked, emit_scan),))
