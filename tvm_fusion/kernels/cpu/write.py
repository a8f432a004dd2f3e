"""Writes a fused s_tir PrimFunc as CPU loops for LLVM.

The steps, each a module: read the blocks as stages; inline cheap pointwise stages; group stages
that can run tile by tile under one parallel loop; choose the tile of each group; emit the loop
nests of a tile, a contraction by register tiles over packed operands.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm import tirx
from tvm.ir import Var

from ...config import HardwareProfile
from ..program.expr import dtype_of
from .contraction.accumulators import with_copies
from .contraction.bfloat16_pairs import importing
from .contraction.emit_panels import emit_panels
from .contraction.operands import split_product
from .contraction.pack_ahead import packed_operand
from .contraction.panels import PANELS_ATTR, Panels, read_once, without_constants
from .contraction.task_tiles import Problem, packs_ahead, panels_when_compiling
from .emit_tiles import emit_tiles
from .groups import Group, make_groups, single
from .loops import seq
from .machine import Machine, machine_of
from .nests.scope import allocate, new_buffer
from .stages.inline import inline
from .stages.partial_sums import partial_sums
from .stages.reader import read_graph
from .stages.reshape_loops import reshape_loops
from .stages.speculate import speculate
from .stages.stages import Graph, Stage
from .tiles import choose_tile


def write_cpu(
    func: tirx.PrimFunc, exact: bool = False, hw: HardwareProfile | None = None
) -> tirx.PrimFunc:
    """Write `func` as scheduled loops.

    Parameters
    ----------
    func : PrimFunc
        Blocks of tensor expressions, as FuseTIR leaves them: inputs, outputs, and maybe scalars.
    exact : bool
        Round 16-bit floats after every operation, as the unfused graph does, instead of only where
        they are stored to a parameter. Sums run in float32 in either mode.
    hw : HardwareProfile, optional
        The CPU where there is no current target; without both, this computer.

    Returns
    -------
    PrimFunc
        Same parameters, but for constants that it takes as panels (see `panels`); for the `s_tir`
        pipeline.

    Raises
    ------
    Unsupported
        Where `func` holds more than tensor expressions: external calls, scatters, loops in blocks.
    """
    machine = machine_of(hw)
    graph = read_graph(func, exact)
    for step in (inline, speculate, partial_sums, reshape_loops):
        graph = step(graph)
    groups = make_groups(graph, machine)
    temporaries = _temporaries(graph, groups)
    panels: dict[Var, tuple[Var, Panels]] = {}
    body = seq(
        *(allocate(b) for b in temporaries),
        *(_emit_group(g, graph, temporaries, panels, machine) for g in groups),
    )
    if any(p.paired for g in groups for p in _problems(g, machine)):
        body = importing(body)
    func = _taking_panels(func.with_body(body), panels)
    for key, value in (("tirx.is_scheduled", True), ("op_pattern", 8), ("tirx.noalias", True)):
        func = func.with_attr(key, value)
    return func


def _temporaries(graph: Graph, groups: list[Group]) -> list[Var]:
    """Buffers that one group leaves to another."""
    home = {b: i for i, g in enumerate(groups) for s in g.stages for b in s.buffers}
    found: dict[Var, Var] = {}
    for i, g in enumerate(groups):
        for s in g.stages:
            for read in s.reads():
                key = read.source
                if home.get(key, i) != i and not graph.is_param(read.source):
                    found[key] = read.source
    return list(found.values())


def _taking_panels(func: tirx.PrimFunc, panels: dict[Var, tuple[Var, Panels]]) -> tirx.PrimFunc:
    """The function with panels in place of constants, and how to make them."""
    func = without_constants(func)
    if not panels:
        return func
    params = [panels[p][0] if p in panels else p for p in func.params]
    how = [[i, *panels[p][1].numbers()] for i, p in enumerate(func.params) if p in panels]
    func = tirx.PrimFunc(params, func.body, func.ret_type, func.attrs)
    return func.with_attr(PANELS_ATTR, how)


def _emit_group(
    group: Group,
    graph: Graph,
    temporaries: list[Var],
    panels: dict[Var, tuple[Var, Panels]],
    machine: Machine,
) -> tirx.Stmt:
    """The loops of a group; `panels` gets the constants that it takes as panels."""
    kept = {*graph.params, *temporaries}
    group = with_copies(group, kept)
    tile = choose_tile(group, machine)
    packed = _packed_ahead(group, tile, kept, machine)
    ready = {s: buffer for s, (buffer, _) in packed.items()}
    for stage, (constant, how) in _constant_panels(group, tile, graph, machine).items():
        shape = how.shape(int(n) for n in constant.ty.shape)
        dtype = how.dtype(dtype_of(constant))
        buffer = new_buffer(f"{constant.name}_panels", list(shape), dtype)
        panels[constant] = (buffer, how)
        ready[stage] = buffer
    main = emit_tiles(group, tile, kept, ready, machine)
    stmts: list[tirx.Stmt] = []
    for buffer, pack in packed.values():
        stmts.extend((allocate(buffer), pack))
    return seq(*stmts, main)


def _problems(group: Group, machine: Machine) -> Iterator[Problem]:
    """The contractions of a group."""
    for member, stage in enumerate(group.stages):
        product = split_product(stage)
        if product is not None:
            yield Problem(group, member, product, machine)


def _packed_ahead(
    group: Group, tile: tuple[int | None, ...], kept: set[Var], machine: Machine
) -> dict[Stage, tuple[Var, tirx.Stmt]]:
    """For each contraction whose right operand is packed ahead, the panels and what fills them."""
    found = {}
    for p in _problems(group, machine):
        if packs_ahead(p, list(tile)):
            ready = emit_panels(p.stage, p.product, p.lanes, p.paired)
            found[p.stage] = ready or _pack_by_stage(p, kept, machine)
    return found


def _pack_by_stage(p: Problem, kept: set[Var], machine: Machine) -> tuple[Var, tirx.Stmt]:
    """Panels of an operand that is computed."""
    before = single(packed_operand(p.stage, p.product, p.lanes, p.paired))
    (stage,) = before.stages
    tile = choose_tile(before, machine)
    return stage.buffer, emit_tiles(before, tile, {*kept, stage.buffer}, {}, machine)


def _constant_panels(
    group: Group, tile: tuple[int | None, ...], graph: Graph, machine: Machine
) -> dict[Stage, tuple[Var, Panels]]:
    """The constants that contractions take as panels: those that nothing else reads."""
    found = {}
    for p in _problems(group, machine):
        panels = panels_when_compiling(p, list(tile))
        if panels is not None and read_once([panels[0]], graph):
            found[p.stage] = panels
    return found
