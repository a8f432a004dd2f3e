"""Writes a fused s_tir PrimFunc as CPU loops for LLVM."""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var
from tvm.tirx import ForKind

from ...config import HardwareProfile
from ..expr import convert, dtype_of, number
from .contraction_tiles import Problem, packs_ahead, register_tile
from .emit_contraction import emit_contraction
from .emit_nest import emit_nest
from .groups import SMALL_WORK, Group, group_work, make_groups, single
from .inline import inline
from .loops import Loops, seq
from .machine import Machine, machine_of
from .nests import Nest, make_nests
from .operands import split_product
from .pack_ahead import packed_operand
from .partial_sums import partial_sums
from .reshape_loops import reshape_loops
from .rewrite import Rewriter, rebuild
from .scope import Region, Scope, allocate, new_buffer
from .speculate import speculate
from .stages import Graph, Stage, read_graph
from .tiles import choose_tile

# Iterations of the parallel loop: tiles are dealt out in this many runs, each with its own buffers.
MOST_TASKS = 64


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
        The CPU; the current target, else this computer.

    Returns
    -------
    PrimFunc
        Same parameters; for the `s_tir` pipeline.

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
    body = seq(
        *(allocate(b) for b in temporaries),
        *(_emit_group(g, graph, temporaries, machine) for g in groups),
    )
    func = func.with_body(body)
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


def _emit_group(group: Group, graph: Graph, temporaries: list[Var], machine: Machine) -> tirx.Stmt:
    kept = {*graph.params, *temporaries}
    group = _with_copies(group, kept)
    tile = choose_tile(group, machine)
    packed = _packed_ahead(group, tile, machine)
    main = _emit_tiles(group, tile, kept, {s: p.buffer for s, p in packed.items()}, machine)
    stmts: list[tirx.Stmt] = []
    for stage in packed.values():
        before = single(stage)
        pack_tile = choose_tile(before, machine)
        stmts.append(allocate(stage.buffer))
        stmts.append(_emit_tiles(before, pack_tile, {*kept, stage.buffer}, {}, machine))
    return seq(*stmts, main)


def _packed_ahead(
    group: Group, tile: tuple[int | None, ...], machine: Machine
) -> dict[Stage, Stage]:
    """For each contraction whose right operand is packed ahead, the stage that packs it."""
    packed = {}
    for member, stage in enumerate(group.stages):
        product = split_product(stage)
        if product is None:
            continue
        problem = Problem(group, member, product, machine)
        if packs_ahead(problem, list(tile)):
            _, width = register_tile(machine, dtype_of(stage.values[0]))
            packed[stage] = packed_operand(stage, product, width)
    return packed


def _emit_tiles(
    group: Group,
    tile: tuple[int | None, ...],
    kept: set[Var],
    packed: dict[Stage, Var],
    machine: Machine,
) -> tirx.Stmt:
    """The parallel loop over the tiles of a group."""
    loops = Loops(_index_dtype(group))
    grid: list[tuple[int, Expr]] = []
    for dim, length in enumerate(tile):
        if length is not None:
            extent = convert(group.axis(dim).extent, loops.dtype)
            grid.append((dim, loops.simplify(_ceil_div(extent, length, loops))))
    total = loops.imm(1)
    for _, count in grid:
        total = loops.simplify(total * count)
    parallel = group_work(group) >= SMALL_WORK and number(total) != 1
    chunk_count: Expr = loops.imm(1)
    if parallel:
        size = number(total)
        chunk_count = loops.imm(MOST_TASKS if size is None else min(MOST_TASKS, int(size)))
    per_chunk = loops.simplify(tirx.FloorDiv(total + chunk_count - loops.imm(1), chunk_count))
    if number(total) is not None:
        chunk_count = loops.simplify(tirx.FloorDiv(total + per_chunk - loops.imm(1), per_chunk))
    chunk = loops.new("task", chunk_count, ForKind.PARALLEL if parallel else ForKind.SERIAL)
    first = loops.simplify(chunk.value * per_chunk)
    left = tirx.Max(loops.imm(0), total - first)
    inside = loops.simplify(tirx.Min(per_chunk, left))
    step = loops.new("tile", inside)
    position = loops.simplify(first + step.value)
    binds, regions = _regions(group, tile, grid, position, loops)
    scope = Scope(loops, regions)
    body = _emit_tile(group, kept, packed, scope, machine)
    return chunk.around(seq(*scope.allocated, step.around(seq(*binds, body))))


def _ceil_div(extent: Expr, length: int, loops: Loops) -> Expr:
    return tirx.FloorDiv(extent + loops.imm(length - 1), loops.imm(length))


def _index_dtype(group: Group) -> str:
    axes = [a for s in group.stages for a in (*s.axes, *s.reduced)]
    wide = any(dtype_of(a.var) == "int64" for a in axes)
    return "int64" if wide or not axes else "int32"


def _regions(
    group: Group,
    tile: tuple[int | None, ...],
    grid: list[tuple[int, Expr]],
    position: Expr,
    loops: Loops,
) -> tuple[list[tirx.Stmt], dict[Var, Region]]:
    """The part of each shared axis that tile number `position` covers, and bindings of where it starts."""
    binds: list[tirx.Stmt] = []
    regions: dict[Var, Region] = {}
    for dim, count in reversed(grid):
        index = position if dim == grid[0][0] else tirx.FloorMod(position, count)
        position = loops.simplify(tirx.FloorDiv(position, count))
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
    stages = list(group.stages)
    nests = make_nests(stages, dims)
    stmts = []
    for item in nests:
        stmts.append(_emit_item(item, nests, kept, packed, scope, machine))
    return seq(*stmts)


def _emit_item(
    item: Nest,
    nests: list[Nest],
    kept: set[Var],
    packed: dict[Stage, Var],
    scope: Scope,
    machine: Machine,
) -> tirx.Stmt:
    stage = item.members[0].stage
    product = split_product(stage)
    if product is not None:
        return emit_contraction(stage, product, scope, machine, packed.get(stage))
    stored = set(kept)
    for other in nests:
        if other is not item:
            stored.update(r.source for m in other.members for r in m.stage.reads())
    for m in item.members:
        for buffer in m.stage.buffers:
            if (buffer in stored and buffer not in kept) or (
                m.stage.kind is not None and buffer not in stored
            ):
                scope.keep_local(m.stage, buffer)
    return emit_nest(item, stored, scope, machine)


def _with_copies(group: Group, kept: set[Var]) -> Group:
    """Let contractions write to a buffer of the tile, and copy from there what others need.

    C = sum(A * B)                  acc = sum(A * B); C = acc
    D = f(C)                ->      D = f(acc)
    """
    stages: list[Stage] = []
    shared: list[list[int]] = [[] for _ in group.shared]
    moved: dict[Var, Var] = {}

    def add(stage: Stage, member: int) -> None:
        stages.append(stage)
        for positions, out in zip(group.shared, shared, strict=True):
            out.append(positions[member])

    for member, stage in enumerate(group.stages):
        stage = _reading(stage, moved)
        buffer = stage.buffer
        if split_product(stage) is None or buffer not in kept:
            add(stage, member)
            continue
        dtype = dtype_of(stage.values[0])
        alias = new_buffer(f"{buffer.name}_tile", list(buffer.ty.shape), dtype)
        moved[buffer] = alias
        add(replace(stage, buffers=(alias,)), member)
        axes = tuple(replace(a, var=Var(a.var.name, a.var.ty)) for a in stage.axes)
        value = tirx.BufferLoad(alias, [a.var for a in axes])
        add(Stage(f"{stage.name}_copy", (buffer,), axes, (), (value,)), member)
    return Group(tuple(stages), tuple(tuple(s) for s in shared))


def _reading(stage: Stage, moved: dict[Var, Var]) -> Stage:
    """`stage` with loads of the moved buffers redirected."""
    if not moved:
        return stage
    redirect = _Redirect(moved)
    return replace(
        stage,
        binds=tuple((v, redirect(e)) for v, e in stage.binds),
        values=tuple(redirect(v) for v in stage.values),
    )


class _Redirect(Rewriter):
    def __init__(self, moved: dict[Var, Var]) -> None:
        super().__init__()
        self.moved = moved

    def visit(self, expr: Expr) -> Expr:
        expr = rebuild(expr, self)
        if isinstance(expr, TensorLoad) and expr.source in self.moved:
            load = tirx.BufferLoad(self.moved[expr.source], list(expr.indices))
            return convert(load, dtype_of(expr))
        return expr
