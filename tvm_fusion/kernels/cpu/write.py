"""Writes a fused s_tir PrimFunc as CPU loops for LLVM.

The steps, each a module: read the blocks as stages; inline cheap pointwise stages; group stages
that can run tile by tile under one parallel loop; choose the tile of each group; emit the loop
nests of a tile, a contraction by register tiles over packed operands.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.tirx import ForKind

from ...config import HardwareProfile
from ..program.expr import convert, dtype_of, number
from .contraction.bfloat16_pairs import importing
from .contraction.emit import Contraction
from .contraction.emit_panels import emit_panels
from .contraction.operands import blocks, product_of, split_product
from .contraction.packing import packed_operand
from .contraction.panels import PANELS_ATTR, Panels, read_once, without_constants
from .contraction.task_tiles import Problem, packs_ahead, panels_when_compiling
from .groups import TASKS_PER_CORE, Group, is_copy_of, is_small, make_groups, single, with_copies
from .loops import Loop, Loops, seq
from .machine import Machine, machine_of
from .nests.emit_reduction import emit_nest
from .nests.nests import Nest, make_nests
from .nests.scope import Region, Scope, allocate, new_buffer
from .stages.inline import inline
from .stages.partial_sums import partial_sums
from .stages.reader import read_graph
from .stages.reshape_loops import reshape_loops, speculate
from .stages.stages import Graph, Stage
from .stages.unpadded import without_unread_padding
from .tiles import choose_tile

# The parallel loop over the tiles of a group, and the loop nests of one tile.

# Iterations of the parallel loop: tiles are dealt out in runs, each run with its own buffers.
MOST_RUNS = 64

Tile = tuple[int | None, ...]


def emit_tiles(
    group: Group, tile: Tile, kept: set[Var], packed: dict[Stage, Var], machine: Machine
) -> tirx.Stmt:
    """Compute all tiles of a group.

    Parameters
    ----------
    tile : tuple
        Length along each shared axis; None for the whole axis.
    kept : set of Var
        Buffers that outlive the group.
    packed : dict
        Right operands of contractions that were packed ahead.
    """
    loops = Loops(_index_dtype(group))
    counts = {
        d: blocks(convert(group.axis(d).extent, loops.dtype), length, loops)
        for d, length in enumerate(tile)
        if length is not None
    }
    run, step, position = _runs(product_of(counts.values(), loops), group, machine, loops)
    binds, regions = _regions(group, tile, counts, position, loops)
    allocated: list[tirx.Stmt] = []

    def body(regions: dict[Var, Region]) -> tirx.Stmt:
        scope = Scope(loops, regions, machine.scales)
        stmt = _emit_tile(group, kept, packed, scope, machine)
        allocated.extend(scope.allocated)
        return stmt

    whole, last = _both_lengths(group, regions, loops)
    if last is None:
        tiles = body(whole)
    else:
        region = next(r for r in regions.values() if r.is_dynamic)
        tiles = tirx.IfThenElse(tirx.EQ(region.extent, region.full), body(whole), body(last))
    return run.around(seq(*allocated, step.around(seq(*binds, tiles))))


def _both_lengths(
    group: Group, regions: dict[Var, Region], loops: Loops
) -> tuple[dict[Var, Region], dict[Var, Region] | None]:
    """The regions of a whole tile and of the last one, where a reduction has tiles of two lengths:
    loops of a known length leave few elements outside of vectors. Else `regions`, and None.

    On 2 cores of a Zen 4 a softmax over the middle axis of 8 x 64 x 333 takes 47 us, with loops of
    unknown length 54; sums of the columns of 500 x 1000 15.6 and 16.9.
    """
    shorter = {v: r for v, r in regions.items() if r.is_dynamic}
    ends = {number(group.axis(d, m).extent) for d, m in _axes_in(group, shorter)}
    lengths = {number(r.full) for r in shorter.values()}
    plain = all(split_product(s) is None for s in group.stages)
    reduces = any(s.kind is not None for s in group.stages)
    dims = {d for d, _ in _axes_in(group, shorter)}
    if not (plain and reduces and len(dims) == 1) or None in (*ends, *lengths):
        return regions, None
    (size,), (full,) = ends, lengths
    rest = loops.imm(int(size) % int(full))
    whole = {v: Region(r.base, r.full, r.full) for v, r in shorter.items()}
    last = {v: Region(r.base, rest, r.full) for v, r in shorter.items()}
    return regions | whole, regions | last


def _axes_in(group: Group, regions: dict[Var, Region]) -> list[tuple[int, int]]:
    """The shared axes that are among the regions, and the members that have them."""
    members, dims = range(len(group.stages)), range(len(group.shared))
    return [(d, m) for d in dims for m in members if group.axis(d, m).var in regions]


def _runs(total: Expr, group: Group, machine: Machine, loops: Loops) -> tuple[Loop, Loop, Expr]:
    """A parallel loop over runs, a loop over the tiles of one, and the number of the tile."""
    size = number(total)
    most = max(MOST_RUNS, TASKS_PER_CORE * machine.cores)
    parallel = size != 1 and not is_small(group, machine)
    wanted = 1 if not parallel else most if size is None else min(most, int(size))
    in_run = blocks(total, wanted, loops)
    runs = loops.imm(wanted)
    if size is not None:
        runs = loops.simplify(tirx.FloorDiv(total + in_run - loops.imm(1), in_run))
    run = loops.new("task", runs, ForKind.PARALLEL if parallel else ForKind.SERIAL)
    first = loops.simplify(run.value * in_run)
    left = tirx.Max(loops.imm(0), total - first)
    step = loops.new("tile", loops.simplify(tirx.Min(in_run, left)))
    return run, step, loops.simplify(first + step.value)


def _index_dtype(group: Group) -> str:
    axes = [a for s in group.stages for a in (*s.axes, *s.reduced)]
    wide = any(dtype_of(a.var) == "int64" for a in axes)
    return "int64" if wide or not axes else "int32"


def _regions(
    group: Group, tile: Tile, counts: dict[int, Expr], position: Expr, loops: Loops
) -> tuple[list[tirx.Stmt], dict[Var, Region]]:
    """What tile number `position` covers of each shared axis; and bindings of where it starts."""
    binds: list[tirx.Stmt] = []
    regions: dict[Var, Region] = {}
    for dim in reversed(counts):
        outermost = dim == next(iter(counts))
        index = position if outermost else tirx.FloorMod(position, counts[dim])
        position = loops.simplify(tirx.FloorDiv(position, counts[dim]))
        length = loops.imm(tile[dim])
        extent = convert(group.axis(dim).extent, loops.dtype)
        base = loops.new("base", extent)
        binds.append(tirx.Bind(base.var, loops.simplify(index * length)))
        size = number(extent)
        whole = tile[dim] == 1 or (size is not None and size % tile[dim] == 0)
        here = length if whole else loops.simplify(tirx.Min(length, extent - base.var))
        region = Region(base.var, here, length)
        regions.update((group.axis(dim, m).var, region) for m in range(len(group.stages)))
    return binds, regions


def _emit_tile(
    group: Group, kept: set[Var], packed: dict[Stage, Var], scope: Scope, machine: Machine
) -> tirx.Stmt:
    """All stages of a group for one tile."""
    dims = {
        group.axis(d, m).var: d for d in range(len(group.shared)) for m in range(len(group.stages))
    }
    nests = make_nests(list(group.stages), dims)
    stmts = []
    done: list[Nest] = []
    for item in nests:
        stage = item.members[0].stage
        product = split_product(stage)
        if product is not None:
            emitter = Contraction(stage, product, scope, machine, packed.get(stage))
            copy = next((n for n in nests if is_copy_of(stage, n)), None)
            if copy is not None and emitter.can_store_to(copy.members[0].stage.buffer):
                emitter.output = copy.members[0].stage.buffer
                done.append(copy)
            stmts.append(emitter.run())
            continue
        if item in done:
            continue
        stored = kept | _read_by_others(item, nests)
        _keep_local(item, stored, kept, scope)
        stmts.append(emit_nest(item, stored, scope, machine))
    return seq(*stmts)


def _read_by_others(item: Nest, nests: list[Nest]) -> set[Var]:
    others = (m for other in nests if other is not item for m in other.members)
    return {read.source for m in others for read in m.stage.reads()}


def _keep_local(item: Nest, stored: set[Var], kept: set[Var], scope: Scope) -> None:
    """Allocate what a nest leaves to the others; results of reductions are stored in any case."""
    for m in item.members:
        for buffer in m.stage.buffers:
            if buffer not in kept and (buffer in stored or m.stage.kind is not None):
                scope.keep_local(m.stage, buffer)


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
    for step in (without_unread_padding, inline, speculate, partial_sums, reshape_loops):
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
    return finished(func.with_body(body), panels)


def finished(func: tirx.PrimFunc, panels: dict[Var, tuple[Var, Panels]]) -> tirx.PrimFunc:
    """A function whose loops are written, as a kernel: scheduled, its constants in panels.

    Parameters
    ----------
    func : PrimFunc
    panels : dict
        Of each constant that it takes as panels, the buffer of these, and how they are made.
    """
    func = _taking_panels(func, panels)
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
