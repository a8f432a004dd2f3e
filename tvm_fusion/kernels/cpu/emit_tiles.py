"""The parallel loop over the tiles of a group, and the loop nests of one tile."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.tirx import ForKind

from ..program.expr import convert, dtype_of, number
from .contraction.accumulators import is_copy_of
from .contraction.emit import Contraction
from .contraction.operands import split_product
from .contraction.sides import blocks, product_of
from .groups import TASKS_PER_CORE, Group, is_small
from .loops import Loop, Loops, seq
from .machine import Machine
from .nests.emit_nest import emit_nest
from .nests.nests import Nest, make_nests
from .nests.scope import Region, Scope
from .stages.stages import Stage

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
