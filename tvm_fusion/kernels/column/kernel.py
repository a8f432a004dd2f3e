"""Column kernels: reductions over axes that are not the contiguous ones, with pointwise work
before, between and after.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.script import tirx as T

from ...errors import Unsupported
from .. import forms
from ..gpu.frame import Frame, kernel_frame, then
from ..program.analysis import analyze
from ..program.expr import constant, convert
from ..program.narrow import narrow_indices
from ..program.online import merge_online
from ..program.program import Extent, Program
from .config import ColumnConfig, Form
from .forms import LoopColumns, RegisterColumns
from .lanes import Lanes, find_inner, lanes_along_columns, lanes_along_rows
from .rank import column_configs, column_ranked
from .state import check

if TYPE_CHECKING:
    from ...config import HardwareProfile

__all__ = ["ColumnConfig", "column_configs", "emit_column"]


def emit_column(program: Program, config: ColumnConfig, hw: HardwareProfile) -> tirx.PrimFunc:
    """The TIRx kernel of a program that reduces over leading or middle axes.

    Parameters
    ----------
    program : with at least one reduction; its rows may be symbolic, its columns not.
    config : one of `column_configs(program, hw)`, or any that its docstring allows.

    Raises
    ------
    Unsupported
        Where the configuration does not suit the program or the device.
    """
    check(program)
    program = narrow_indices(program)
    lanes = _lanes(program, config, hw)
    if config.online and config.form is Form.LOOP:
        program = merge_online(program)
    with (
        kernel_frame(program, _grid(program, config, lanes), config.threads) as frame,
        _launch_bounds(config),
        _if_rows_exist(program, config, lanes, frame),
    ):
        form = RegisterColumns if config.form is Form.REGISTERS else LoopColumns
        form(program, config, lanes, frame).emit()
    return frame.func


def _lanes(program: Program, config: ColumnConfig, hw: HardwareProfile) -> Lanes:
    """The vectors of the configuration, if it has whole rows in its blocks."""
    if program.accumulations:
        raise Unsupported("sums over the rows beside reductions over columns")
    inner = find_inner(program)
    if config.threads > hw.max_threads_per_block:
        raise Unsupported(f"blocks of {config.threads} threads")
    if not config.lanes:
        if config.threads % hw.warp_size:
            raise Unsupported(f"rows of {config.threads} threads")
        return lanes_along_columns(program, inner, config.width)
    if config.lanes * config.width % inner:
        raise Unsupported(f"{config.lanes * config.width} lanes are no whole rows of {inner}")
    return lanes_along_rows(program, inner, config.width)


def _grid(program: Program, config: ColumnConfig, lanes: Lanes) -> Extent:
    """Blocks; at least one where the number of rows is symbolic."""
    if not lanes.along_rows:
        blocks = program.row_count
    else:
        per_block, count = config.lanes * config.width, lanes.count
        if isinstance(count, int):
            blocks = -(-count // per_block)
        else:
            one, size = (constant(x, program.index_dtype) for x in (1, per_block))
            blocks = tirx.FloorDiv(count + (size - one), size)
        for extent in program.rows[:-1]:
            blocks = blocks * extent
    if isinstance(blocks, int):
        return blocks
    return tirx.Max(blocks, constant(1, program.index_dtype))


def _if_rows_exist(
    program: Program, config: ColumnConfig, lanes: Lanes, frame: Frame
) -> contextlib.AbstractContextManager:
    """Nothing happens where a symbolic number of rows is 0 (a launch has at least one block)."""
    rows = program.row_count
    if isinstance(rows, int):
        return contextlib.nullcontext()
    return then(convert(frame.block, program.index_dtype) < rows)


def _launch_bounds(config: ColumnConfig) -> contextlib.AbstractContextManager:
    """Demand on ptxas; in the device region, since on the function it is lost in lowering."""
    if not config.min_blocks:
        return contextlib.nullcontext()
    return T.attr({"tirx.launch_bounds_min_blocks_per_sm": config.min_blocks})


WRITER = forms.Writer(
    "reductions of columns",
    analyze,
    (
        forms.Form(
            "column",
            ColumnConfig,
            column_ranked,
            lambda program, hw, config: emit_column(program, config, hw),
        ),
    ),
)
