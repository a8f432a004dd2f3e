"""Pointwise kernels whose inputs disagree on the contiguous axis, through shared-memory tiles.

Outputs over other axes (the siblings of a program) get their own range of blocks, each part in its
own form: tiles where a load is worth one, else plain vectors.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.script import tirx as T

from ...errors import Unsupported
from ..forms import Form, Ranked, Writer
from ..gpu.closed_forms import closed_forms
from ..gpu.frame import kernel_frame
from ..gpu.memory import WIDEST
from ..pointwise.kernel import dispatch, emit_pointwise, pointwise_config, pointwise_configs
from ..pointwise.part import PointwiseConfig, PointwisePart
from ..program.analysis import analyze
from ..program.expr import conjunction, constant, dtype_of
from ..program.narrow import narrow_indices
from ..program.program import Program
from ..versions import VECTOR, Branch, Multiple, joined
from .config import STATIC_SHARED_BYTES, TransposeConfig, transpose_configs
from .direct import DirectConfig, DirectPart
from .layout import LANES
from .part import TransposePart

if TYPE_CHECKING:
    from ...config import HardwareProfile, Policy

__all__ = [
    "DirectConfig",
    "TransposeConfig",
    "emit_transpose",
    "transpose_choices",
    "transpose_configs",
    "wants_tiles",
]

Tiles = TransposeConfig | DirectConfig
Config = Tiles | PointwiseConfig
Part = TransposePart | DirectPart | PointwisePart


SHORT = 8
"""Of a symbolic axis so short, elements are read one by one: a tile would be nearly empty."""


def wants_tiles(program: Program, hw: HardwareProfile) -> bool:
    """Whether a load of the program, or of a sibling, is worth a tile."""
    return any(_tiles(program, hw))


def transpose_choices(program: Program, hw: HardwareProfile) -> list[Config]:
    """What `emit_transpose` can be asked for, the best guess first: tiles where a load of the
    program is worth one, else vectors, in blocks that suit the tiles of its siblings.
    """
    return _choices(program, _tiles(program, hw), hw)


def _tiles(program: Program, hw: HardwareProfile) -> list[list[Tiles]]:
    """The configurations with tiles of the program and of each sibling."""
    return [transpose_configs(part, hw) for part in (program, *program.siblings)]


def _choices(program: Program, tiles: list[list[Tiles]], hw: HardwareProfile) -> list[Config]:
    own, *others = tiles
    if own:
        return own
    vectors = pointwise_configs(program, hw)
    first = next((configs[0] for configs in others if configs), None)
    if first is None:
        return vectors
    return list(dict.fromkeys(dataclasses.replace(c, threads=first.threads) for c in vectors))


def emit_transpose(
    program: Program, hw: HardwareProfile, config: Config | None = None
) -> tirx.PrimFunc:
    """The TIRx kernel of a pointwise program with strided loads, and of its siblings.

    Parameters
    ----------
    config : of the program (its siblings take their best guess with as many threads); without one,
        the best guess, and where no load is worth a tile, the plain pointwise kernel.

    Raises
    ------
    Unsupported
        For reductions, empty outputs, grids beyond 2**31 - 1 blocks, and for a `config` that does
        not go with the program.
    """
    programs = (program, *program.siblings)
    for part in programs:
        if part.phases or part.accumulations:
            raise Unsupported("the program reduces")
        if part.is_static and not part.row_count * part.columns:
            raise Unsupported("an output is empty")
        if any(output.place is not None for output in part.outputs):
            raise Unsupported("the columns of an output are not consecutive")
    found = _tiles(program, hw)
    if not any(found) and not isinstance(config, Tiles):
        return emit_pointwise(program, hw, config)
    if config is None:
        config = _choices(program, found, hw)[0]
    threads = config.threads
    chosen = [config, *(_with_threads(configs, threads) for configs in found[1:])]
    parts = [_part(p, c, threads, hw) for p, c in zip(programs, chosen, strict=True)]
    shared = max(getattr(part, "shared_bytes", 0) for part in parts)
    if shared > STATIC_SHARED_BYTES:
        raise Unsupported(f"{shared} bytes of shared memory")
    grid = sum(part.blocks for part in parts)
    if not isinstance(grid, int):
        grid = tirx.Max(grid, constant(1, dtype_of(grid)))
    with kernel_frame(program, grid, threads) as frame:
        if shared:
            memory = T.alloc_buffer((shared,), "uint8", scope="shared", align=8 * WIDEST)
        for part in parts:
            if isinstance(part, TransposePart):
                part.memory = memory
        dispatch(frame, parts, frame.block)
    return frame.func


def _with_threads(configs: list[Config], threads: int) -> Config | None:
    """The first of the configurations whose tile `threads` threads can share."""
    for config in configs:
        if isinstance(config, TransposeConfig) and config.areas % (threads // LANES):
            continue
        return dataclasses.replace(config, threads=threads)
    return None


def _part(program: Program, config: Config | None, threads: int, hw: HardwareProfile) -> Part:
    """The part in its form."""
    narrow = closed_forms(narrow_indices(program))
    if isinstance(config, TransposeConfig):
        return TransposePart(narrow, config)
    if isinstance(config, DirectConfig):
        return DirectPart(narrow, config)
    if config is None:
        config = dataclasses.replace(pointwise_config(program, hw), threads=threads)
    return PointwisePart(narrow, config)


def _ranked(program: Program, hw: HardwareProfile, policy: Policy) -> Ranked:
    """The choices, none with a time: nothing predicts tiles apart."""
    return [(None, config) for config in transpose_choices(program, hw)]


def write_transpose_versions(
    writer: Writer, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy
) -> tirx.PrimFunc | None:
    """The kernels of a fused PrimFunc whose tiles lie along symbolic axes: where one is short,
    where vectors divide both, where they divide that of the rows, and for all sizes; None where
    there is no such axis.
    """
    exact = policy.rounding == "exact"
    program = writer.read(func, exact)
    config = next(iter(transpose_configs(program, hw)), None)
    if program.is_static or not isinstance(config, TransposeConfig):
        return None
    extents = {"rows_": program.rows[config.axis], "": program.columns}
    branches: list[Branch] = []
    whole, conditions, sizes = func, [], {}
    for what, extent in extents.items():
        multiple = None if isinstance(extent, int) else Multiple.dividing(whole, extent, VECTOR)
        if multiple is not None:
            whole = multiple.func
            conditions = [*conditions, multiple.divides]
            sizes = {**sizes, **multiple.sizes}
            kernel = emit_transpose(writer.read(whole, exact), hw)
            name = f"of{VECTOR}_{what}beyond"
            branches.insert(0, Branch(kernel, conjunction(*conditions), name, dict(sizes)))
    unknown = [extent for extent in extents.values() if not isinstance(extent, int)]
    if not unknown:
        return None
    short = functools.reduce(tirx.Or, [e <= constant(SHORT, dtype_of(e)) for e in unknown])
    plain = emit_transpose(program, hw, pointwise_config(program, hw))
    branches.insert(0, Branch(plain, short, SHORT))
    return joined([*branches, Branch(emit_transpose(program, hw), None, 0)], func)


WRITER = Writer(
    "pointwise work with strided loads",
    analyze,
    (
        Form(
            "transpose",
            (TransposeConfig, DirectConfig, PointwiseConfig),
            _ranked,
            emit_transpose,
        ),
    ),
    write_transpose_versions,
)
