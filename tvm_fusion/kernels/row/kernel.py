"""Row kernels: reductions over columns with pointwise work before, between and after."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tvm import tirx

from ...errors import Unsupported
from ..gpu.closed_forms import closed_forms
from ..gpu.frame import Frame, kernel_frame, launch_bounds, then
from ..group.traffic import clusters_on_device
from ..program.expr import constant, convert, dtype_of
from ..program.narrow import narrow_indices
from ..program.online import merge_online
from ..program.program import Extent, Program
from .bulk import BulkRows
from .candidates import row_configs
from .config import Form, RowConfig
from .exchange import WARP
from .loop import LoopRows
from .registers import RegisterRows

if TYPE_CHECKING:
    from ...config import HardwareProfile

__all__ = ["RowConfig", "emit_row", "row_configs"]


def emit_row(program: Program, config: RowConfig, hw: HardwareProfile) -> tirx.PrimFunc:
    """The TIRx kernel of a program with reductions.

    Parameters
    ----------
    program : with at least one reduction; its rows may be symbolic, its columns in LOOP form and
        in REGISTERS with a bound (`config.most`).
    config : one of `row_configs(program, hw)`, or any that its docstring allows.

    Raises
    ------
    Unsupported
        Where the configuration does not suit the program or the device.
    """
    _check(program, config, hw)
    program = closed_forms(narrow_indices(program))
    if config.runs_online:
        program = merge_online(program)
    clusters, turns = _grid(program, config, hw)
    threads = config.threads * config.rows
    with (
        kernel_frame(program, clusters, threads, config.cluster) as frame,
        launch_bounds(config.min_blocks),
        _if_rows_exist(program, config, frame),
    ):
        if config.form is Form.LOOP:
            LoopRows(program, config, frame).emit(hw.architecture.is_unrolled_to_spills)
        elif config.form is Form.BULK:
            BulkRows(program, config, frame).emit_turns(clusters, turns)
        else:
            RegisterRows(program, config, frame).emit()
    return frame.func


def _check(program: Program, config: RowConfig, hw: HardwareProfile) -> None:
    if not program.phases:
        raise Unsupported("the program does not reduce")
    bounded = config.form is Form.REGISTERS and config.most > 0
    if not isinstance(program.columns, int) and config.form is not Form.LOOP and not bounded:
        raise Unsupported(f"rows of symbolic length {program.columns}")
    if program.accumulations:
        raise Unsupported("sums over the rows")
    if any(output.place is not None for output in program.outputs):
        raise Unsupported("an output whose rows are not consecutive in memory")
    if config.threads * config.rows > hw.max_threads_per_block:
        raise Unsupported(f"blocks of {config.threads * config.rows} threads")
    power_of_two = config.threads & (config.threads - 1) == 0
    if (not power_of_two and config.threads % WARP) or config.threads * config.rows % WARP:
        raise Unsupported(f"{config.rows} rows of {config.threads} threads")
    if config.cluster > 1 and not hw.architecture.has_clusters:
        raise Unsupported(f"{hw.arch} has no thread block clusters")
    if config.form is Form.BULK and not hw.architecture.has_tma:
        raise Unsupported(f"{hw.arch} has no bulk copies")
    if config.cluster > 1 and any(r.dtype != "float32" for r in program.reductions):
        raise Unsupported("clusters exchange float32 only")


def _grid(program: Program, config: RowConfig, hw: HardwareProfile) -> tuple[Extent, int]:
    """Clusters (or blocks), and how many rows each computes one after the other."""
    rows = program.row_count
    if config.form is Form.BULK:
        turns = -(-rows // max(1, clusters_on_device(config.cluster, config.resident, hw)))
        return -(-rows // turns), turns
    if isinstance(rows, int):
        return -(-rows // config.rows), 1
    one, count = (constant(size, dtype_of(rows)) for size in (1, config.rows))
    return tirx.Max(tirx.FloorDiv(rows + (count - one), count), one), 1


def _if_rows_exist(
    program: Program, config: RowConfig, frame: Frame
) -> contextlib.AbstractContextManager:
    """Nothing happens where a symbolic number of rows is 0 (a launch has at least one block)."""
    rows = program.row_count
    if isinstance(rows, int):
        return contextlib.nullcontext()
    return then(convert(frame.block, program.index_dtype) * config.rows < rows)
