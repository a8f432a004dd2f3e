"""Pointwise kernels: any number of outputs in one launch, 16 bytes an access, a flat grid.

Outputs that run over other axes (the siblings of a program) get their own range of blocks:

    if block < n: compute the program   else: compute the sibling, as its block number block - n
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...errors import Unsupported
from ..forms import Form, Writer
from ..gpu.closed_forms import closed_forms
from ..gpu.frame import Frame, kernel_frame
from ..program.analysis import analyze
from ..program.expr import constant, convert, dtype_of
from ..program.narrow import narrow_indices
from ..program.program import Program
from .configs import pointwise_config, pointwise_configs, pointwise_ranked
from .part import PointwiseConfig, PointwisePart

if TYPE_CHECKING:
    from ...config import HardwareProfile

__all__ = ["PointwiseConfig", "emit_pointwise", "pointwise_config", "pointwise_configs"]


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
