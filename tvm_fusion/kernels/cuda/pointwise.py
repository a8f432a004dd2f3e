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
from ..expr import bytes_of, constant, convert, dtype_of, linear_form, number
from ..narrow import narrow_indices
from ..program import Element, Program
from .frame import Frame, kernel_frame
from .pointwise_part import LANES, PointwiseConfig, PointwisePart
from .vectors import vector_elements, vector_width

if TYPE_CHECKING:
    from ...config import HardwareProfile

__all__ = ["PointwiseConfig", "emit_pointwise", "pointwise_config"]


def pointwise_config(program: Program, hw: HardwareProfile) -> PointwiseConfig:
    """The best guess.

    Blocks of 256 threads, smaller ones where that leaves multiprocessors without work; lanes
    across rows where more bytes are read consecutively that way.
    """
    width = vector_width(program, tail=not program.rows)
    threads = 256
    if program.is_static:
        vectors = -(-program.row_count * program.columns // width)
        while threads > 64 and vectors < threads * hw.num_sms:
            threads //= 2
    threads = min(threads, hw.max_threads_per_block)
    return PointwiseConfig(threads, width, across=_axis_to_walk(program, width))


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
        if part.is_static and not part.row_count * part.columns:
            raise Unsupported("an output is empty")
        guess = dataclasses.replace(pointwise_config(part, hw), threads=config.threads)
        parts.append(PointwisePart(narrow_indices(part), config if part is program else guess))
    grid = sum(part.blocks for part in parts)
    if not isinstance(grid, int):
        grid = tirx.Max(grid, constant(1, dtype_of(grid)))
    with kernel_frame(program, grid, config.threads) as frame:
        _dispatch(frame, parts, frame.block)
    return frame.func


def _dispatch(frame: Frame, parts: list[PointwisePart], block: Expr) -> None:
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
            _dispatch(frame, others, T.Bind(block - count))


def _axis_to_walk(program: Program, width: int) -> int | None:
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
