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
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...errors import Unsupported
from ...ir.extents import ASSUMED_SYMBOLIC_EXTENT, Bounds, bounds_within, known_sizes
from ...ir.graph import COOPERATIVE_ATTR
from ..forms import Form, Ranked, Writer
from ..gpu.closed_forms import closed_forms
from ..gpu.frame import Frame, kernel_frame, then
from ..program.expr import (
    bytes_of,
    conjunction,
    constant,
    convert,
    dtype_of,
    known_factor,
    linear_form,
    number,
)
from ..program.narrow import narrow_indices
from ..program.program import Extent, Output, Program
from ..versions import Branch, Multiple, joined, read_at
from .cells import Staged, cells_of
from .config import ScanConfig, Shape, configs
from .exchange import Exchange, slots_left, staged_bytes
from .problem import read_scans

if TYPE_CHECKING:
    from ...config import HardwareProfile, Policy


COLUMNS = (256, 1 << 15)
"""At most in each range but the last, where their number is symbolic."""
ASSUMED_COLUMNS = COLUMNS[-1]
WIDEST = 8
"""Columns of the widest vectors."""


def _step(program: Program, output: Output) -> int | None:
    """Elements from a column to the next one, in this order or the other."""
    if output.place is None:
        return 1
    form = linear_form(output.place, (program.column_var,))
    step = None if form is None else number(form[0][0])
    return None if step is None else abs(int(step))


def shape_of(program: Program, longest: int = ASSUMED_COLUMNS) -> Shape:
    """What a program scans; of a symbolic number of columns so many, or nearly: as many as it is
    known to be a multiple of.
    """
    loads = (*program.tiles, *program.elements)
    sizes = [bytes_of(item.dtype) for item in (*loads, *program.outputs)]
    rows = math.prod(n if isinstance(n, int) else ASSUMED_SYMBOLIC_EXTENT for n in program.rows)
    inner = max(_step(program, output) or rows for output in program.outputs)
    beside = known_factor(program.rows[-1], program.analyzer()) if program.rows else 1
    known = isinstance(program.row_count, int) or inner == 1
    return Shape(
        rows=rows,
        columns=_number_of_columns(program, longest),
        inner=inner if known else max(inner, rows),
        beside=max(1, beside),
        narrow=min(sizes),
        point=max(1, sum(bytes_of(item.dtype) for item in loads)),
        known=isinstance(program.row_count, int),
    )


def _number_of_columns(program: Program, longest: int) -> int:
    if isinstance(program.columns, int):
        return program.columns
    factor = known_factor(program.columns, program.analyzer())
    return longest if factor % WIDEST == 0 else max(longest - factor, factor)


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
        with _if_rows_exist(program, config, frame):
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
    conditions = []
    if not isinstance(program.row_count, int):
        block = config.rows * config.vector
        conditions.append(convert(frame.block, program.index_dtype) * block < program.row_count)
    if not isinstance(program.columns, int):
        conditions.append(program.columns > 0)
    return then(conjunction(*conditions)) if conditions else nullcontext()


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


def write_scan_versions(
    writer: Writer, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy
) -> tirx.PrimFunc | None:
    """The kernels of a fused PrimFunc for ranges of a symbolic number of columns: of those that
    vectors divide, and of all; None where that number is known.
    """
    exact = policy.rounding == "exact"
    program, known = writer.read(func, exact), known_sizes(func)
    if isinstance(program.columns, int):
        return None
    bounds, branches = bounds_within(program.columns, known), []
    multiple = Multiple.dividing(func, program.columns, WIDEST)
    if shape_of(program).inner == 1 and multiple is not None:
        aligned = writer.read(multiple.func, exact)
        always = known.get(multiple.size, Bounds()).multiple % multiple.of == 0
        for config in _configs_of(aligned, bounds, hw):
            end = _upto(program, config, bounds)
            condition = end if always else conjunction(multiple.divides, end)
            name = f"of{WIDEST}_beyond" if end is None else f"of{WIDEST}_upto_{config.most}"
            kernel = emit_scan(aligned, hw, config)
            branches.append(Branch(kernel, condition, name, multiple.sizes))
        if always:
            return _joined(branches, func)
    for config in _configs_of(program, bounds, hw):
        kernel = emit_scan(program, hw, config)
        branches.append(Branch(kernel, _upto(program, config, bounds), config.most))
    return _joined(branches, func)


def _joined(branches: Sequence[Branch], func: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """All are launched alike: rows that blocks share are few."""
    if any(COOPERATIVE_ATTR in branch.kernel.attrs for branch in branches):
        branches = [replace(b, kernel=b.kernel.with_attr(COOPERATIVE_ATTR, True)) for b in branches]
    return joined(branches, func)


def _configs_of(program: Program, bounds: Bounds, hw: HardwareProfile) -> list[ScanConfig]:
    """A configuration for each range of the number of columns, one after the other."""
    found: list[ScanConfig] = []
    for most in read_at(COLUMNS, bounds):
        config = replace(configs(shape_of(program, most), hw)[0], most=most)
        if found and replace(found[-1], most=most) == config:
            found.pop()
        found.append(config)
    if bounds.most is None or bounds.most > found[-1].most:
        found[-1] = replace(found[-1], most=0)
    return found


def _upto(program: Program, config: ScanConfig, bounds: Bounds) -> Expr | None:
    """The condition for a configuration; None where it takes all that others leave."""
    if config.most in (0, bounds.most):
        return None
    return program.columns <= constant(config.most, dtype_of(program.columns))


WRITER = Writer(
    "scans",
    read_scans,
    (Form("scan", ScanConfig, _ranked, emit_scan),),
    write_scan_versions,
)
