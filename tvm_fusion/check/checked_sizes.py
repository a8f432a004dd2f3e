"""The inputs that a module is checked on, and at which values of its symbolic sizes: small and odd
ones, and those below, at and above a power of two, as far as the module allows and its reference is
quick.

Even draws give all symbols one size, odd ones give each another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from ..ir.extents import LOWER_BOUNDS_ATTR, MULTIPLES_ATTR, UPPER_BOUNDS_ATTR
from ..transform.functions.functions import operator_name
from .inputs import random_inputs

SIZES = (5, 17, 32, 1, 31, 65)
SMALL = (5, 9, 8, 1, 7, 3)  # where loops of `SIZES` are too long

# Of all loops of a module, 20 ms in float64, and nine times that where bounds are asked for.
MOST_POINTS = 1 << 21

# Inputs, and the most points of all loops, of which a core computes some 1e8 a second in float64.
# The end of the last row of a masked sum is decided by two elements: one input in four hides there
# that the mask is gone.
SHORT = 1 << 23
MOST_AT_SIZES = 1 << 25  # of all sizes beside those of the draws together
_DRAWS = ((6, SHORT), (2, 1 << 27), (1, math.inf))

_BY_PLACE = frozenset(
    f"relax.{name}"
    for name in (
        *("take", "gather_elements", "gather_nd", "index_tensor"),
        *("strided_slice", "dynamic_strided_slice"),
    )
)
_MOVES = ("relax.astype", "relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten")


def drawn_inputs(
    mod: tvm.IRModule, number: int = 0, lowered: tvm.IRModule | None = None
) -> list[Any]:
    """Random inputs of `main` for checks and timing, by the number of the draw; some are extreme
    near the ends of each axis (`is_extreme`). Parameters as for `checked_sizes`.
    """
    sizes = checked_sizes(mod["main"], number, lowered)
    return random_inputs(mod["main"], number, sizes, extreme=is_extreme(number))


def inputs_at(
    mod: tvm.IRModule, sizes: Iterable[int], lowered: tvm.IRModule
) -> Iterator[list[Any]]:
    """Random inputs of `main` with all symbolic sizes at each of some values, the smallest first,
    as far as the module allows these and the references of all are quick.
    """
    main, left, seen = mod["main"], MOST_AT_SIZES, set()
    for size in sorted(sizes):
        found = _sizes(main, symbols_of(main), (size,), 0)
        left -= points_of(lowered, max(found.values(), default=1))
        if left < 0:
            return
        if tuple(found.values()) not in seen:
            seen.add(tuple(found.values()))
            yield random_inputs(main, 0, found)


def assumed_inputs(mod: tvm.IRModule, size: int) -> tuple[list[Any], dict[str, int]]:
    """Random inputs of `main` with all symbolic sizes at one value, as far as the module allows it,
    and the sizes by symbol.
    """
    sizes = _sizes(mod["main"], symbols_of(mod["main"]), (size,), 0)
    return random_inputs(mod["main"], 0, sizes), sizes


def symbols_of(func: relax.Function) -> list[str]:
    """The names of the symbolic sizes in the parameters of a function, in order."""
    names = (v.name for p in func.params for v in relax.analysis.tir_vars_in_type(p.ty))
    return list(dict.fromkeys(names))


def checked_sizes(
    func: relax.Function, number: int, lowered: tvm.IRModule | None = None
) -> dict[str, int]:
    """The sizes of a draw of inputs, by symbol.

    Parameters
    ----------
    func : relax.Function
        `main` of a model; its `tir_var_lower_bound` and `tir_var_upper_bound` are kept.
    number : int
        Of the draw; the first has all sizes at 5.
    lowered : IRModule, optional
        The model as the reference runs it, which says how long its loops are.
    """
    symbols = symbols_of(func)
    found = _sizes(func, symbols, SIZES, number)
    if lowered is None or not found:
        return found
    quick = points_of(lowered, max(found.values())) <= MOST_POINTS
    return found if quick else _sizes(func, symbols, SMALL, number)


def _sizes(
    func: relax.Function, symbols: list[str], sizes: tuple[int, ...], number: int
) -> dict[str, int]:
    attrs = LOWER_BOUNDS_ATTR, UPPER_BOUNDS_ATTR, MULTIPLES_ATTR
    lower, upper, multiples = (_numbers(func, name) for name in attrs)
    most = min(_rows_read_by_place(func), default=max(sizes))
    found = {}
    for i, name in enumerate(symbols):
        size = sizes[(number + (i if number % 2 else 0)) % len(sizes)]
        size = max(min(size, most), lower.get(name, 1))
        found[name] = _multiple(min(size, upper.get(name, size)), multiples.get(name, 1))
    return found


def _multiple(size: int, of: int) -> int:
    """The largest multiple that is not above a size, or the first one."""
    return max(size // of, 1) * of


def _numbers(func: relax.Function, name: str) -> dict[str, int]:
    attrs = func.attrs or {}
    return {str(k): int(v) for k, v in attrs[name].items()} if name in attrs else {}


def _rows_read_by_place(func: relax.Function) -> Iterator[int]:
    """Known extents of tensors of which as much is read as a symbolic size says (a table of
    positions, a mask that is cut out of a larger one).
    """
    given = set(func.params)  # drawn within bounds, with what only moves them
    for binding in (b for block in func.body.blocks for b in block.bindings):
        call = getattr(binding, "value", None)
        name = operator_name(call)
        if name in _MOVES and call.args[0] in given:
            given.add(binding.var)
        if name not in _BY_PLACE or (name == "relax.take" and call.args[1] in given):
            continue
        data = getattr(call.args[0].ty, "shape", None)
        if isinstance(data, relax.ShapeExpr) and relax.analysis.tir_vars_in_type(binding.var.ty):
            yield from (int(e) for e in data.values if isinstance(e, tirx.IntImm) and int(e) > 1)


def draw_count(mod: tvm.IRModule) -> int:
    """On how many inputs a module is checked: on several where its float64 reference takes
    milliseconds, on one where it takes seconds.
    """
    points = points_of(mod)
    return next(count for count, most in _DRAWS if points <= most)


def is_extreme(number: int) -> bool:
    """Whether a draw is extreme near the ends of each axis: every other one."""
    return number % 2 == 1


# ---- Loop order of the float64 reference: large loop nests on all cores, the innermost contiguous.
#
#     Before                                      After
#     for i, j, k:                                for i in parallel:
#         C[i, j] += A[i, k] * B[k, j]                for j: C[i, j] = 0
#                                                     for k, j: C[i, j] += A[i, k] * B[k, j]
#
# Every element is still summed in the same order.

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


def points_of_run(mod: tvm.IRModule, unknown: int = 8) -> int:
    """As `points_of`, of one run of `main`: a PrimFunc counts as often as it is called."""
    known: dict[str, int] = {}

    def points(call: Any) -> int:
        if operator_name(call) != "relax.call_tir":
            return 0
        name = call.args[0].name_hint
        if name not in known:
            known[name] = points_of(tvm.IRModule({name: mod[name]}), unknown)
        return known[name]

    bindings = (b for block in mod["main"].body.blocks for b in block.bindings)
    return sum(points(getattr(binding, "value", None)) for binding in bindings)


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
