"""Loop order of the float64 reference: large loop nests on all cores, the innermost contiguous.

    Before                                      After
    for i, j, k:                                for i in parallel:
        C[i, j] += A[i, k] * B[k, j]                for j: C[i, j] = 0
                                                    for k, j: C[i, j] += A[i, k] * B[k, j]

Every element is still summed in the same order.
"""

import math
from collections.abc import Iterable

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

_LARGE = 1 << 18  # points of an iteration space; below, building takes longer than running


def order_loops(mod: tvm.IRModule, large: int = _LARGE) -> tvm.IRModule:
    """Order the large loop nests of the unscheduled s_tir PrimFuncs in a copy of the module."""
    out = mod.clone()
    for var, func in mod.functions.items():
        if isinstance(func, tirx.PrimFunc) and _is_plain(func):
            out.update_func(var, _order(func, large))
    return out


def has_large_loops(mod: tvm.IRModule, large: int = _LARGE) -> bool:
    """Whether a PrimFunc of the module has an iteration space of many points, or one that is not
    known.
    """
    blocks: list[s_tir.SBlock] = []
    for func in mod.functions.values():
        if isinstance(func, tirx.PrimFunc):
            if not _is_plain(func):
                return True
            tvm_ffi.structural_walk(func.body, [(s_tir.SBlock, blocks.append)])
    extents = ([axis.dom.extent for axis in block.iter_vars] for block in blocks)
    return any(_points(each, large) >= large for each in extents)


def points_of(mod: tvm.IRModule, unknown: int = 8) -> int:
    """How many points the loops of a module's PrimFuncs have, with `unknown` for a symbolic
    extent.
    """
    blocks: list[s_tir.SBlock] = []
    for func in mod.functions.values():
        if isinstance(func, tirx.PrimFunc):
            tvm_ffi.structural_walk(func.body, [(s_tir.SBlock, blocks.append)])
    return sum(_points((axis.dom.extent for axis in b.iter_vars), unknown) for b in blocks)


def _points(extents: Iterable[tvm.ir.Expr], large: int) -> int:
    return math.prod(int(e) if isinstance(e, tirx.IntImm) else large for e in extents)


def _is_plain(func: tirx.PrimFunc) -> bool:
    body = func.body
    is_root = isinstance(body, s_tir.SBlockRealize) and body.block.name_hint == "root"
    return is_root and "tirx.is_scheduled" not in (func.attrs or {})


def _order(func: tirx.PrimFunc, large: int) -> tirx.PrimFunc:
    schedule = s_tir.Schedule(func)
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        loops = schedule.get_loops(block)
        extents = [schedule.get(loop).extent for loop in loops]
        if loops and _points(extents, large) >= large:
            _order_block(schedule, block, loops)
    return schedule.mod["main"]


def _order_block(schedule: s_tir.Schedule, block: SBlockRV, loops: list[LoopRV]) -> None:
    node = schedule.get(block)
    realize = schedule.get(loops[-1]).body
    if not isinstance(realize, s_tir.SBlockRealize) or len(loops) != len(node.iter_vars):
        return
    pairs = zip(loops, realize.iter_values, strict=True)
    if not all(schedule.get(loop).loop_var.same_as(value) for loop, value in pairs):
        return
    kinds = [iv.iter_type for iv in node.iter_vars]
    spatial = [x for x, kind in zip(loops, kinds, strict=True) if kind == tirx.IterVar.DataPar]
    reduced = [x for x, kind in zip(loops, kinds, strict=True) if kind == tirx.IterVar.CommReduce]
    if not spatial or len(spatial) + len(reduced) != len(loops):
        return
    column = [iv.var for iv in node.iter_vars if iv.iter_type == tirx.IterVar.DataPar][-1]
    try:
        inward = reduced and _reads_along(node, column)
        if inward:
            schedule.reorder(*spatial[:-1], *reduced, spatial[-1])
        if len(spatial) > 1 or not inward:
            schedule.parallel(spatial[0])
        if inward:
            schedule.decompose_reduction(block, reduced[0])
    except s_tir.ScheduleError:
        return  # this nest keeps its loops


def _reads_along(block: s_tir.SBlock, column: tirx.Var) -> bool:
    """Whether the block reads a tensor along `column`, so that neighbours lie side by side."""
    written = [region.source for region in block.writes]

    def visit(load: tvm.ir.TensorLoad) -> tvm_ffi.VisitInterrupt | None:
        own = any(load.source.same_as(buffer) for buffer in written)
        last = list(load.indices)[-1:]
        return tvm_ffi.VisitInterrupt() if not own and _uses(last, column) else None

    return tvm_ffi.structural_walk(block.body, (tvm.ir.TensorLoad, visit)) is not None


def _uses(value: object, var: tirx.Var) -> bool:
    def visit(other: tirx.Var) -> tvm_ffi.VisitInterrupt | None:
        return tvm_ffi.VisitInterrupt() if other.same_as(var) else None

    return tvm_ffi.structural_walk(value, (tirx.Var, visit)) is not None
