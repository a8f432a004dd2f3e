"""Which axis of a stage should run along the vectors."""

from __future__ import annotations

from functools import lru_cache

import tvm
from tvm import tirx
from tvm.ir import Expr, TensorLoad
from tvm.ir.prim.expr import BitwiseAnd, BitwiseNot, BitwiseOr, CmpExpr

from ...program.expr import bounds, constant, convert, dtype_of, is_integer, number
from .rewrite import free_variables
from .stages import Axis, Stage, analyzer_of, load_stride, points, size_of, stride

# Conditions as selections that TVM can turn into vectors.
#
#     n <= m0 + v and ids[n] == 3   ->   Select(float(n) <= float(m0 + v), Select(.., x, y), y)
#
# TVM's simplifier fails on vectors of logic and of integer comparisons; comparisons of floats are
# fine, and the same where the integers are below 2^24.

# Integers up to this are float32 numbers.
EXACT = 1 << 24


def where(condition: Expr, yes: Expr, no: Expr, analyzer: tvm.sym.Analyzer) -> Expr:
    """`yes` where the condition holds, else `no`; both are evaluated."""
    if number(condition) is not None:
        return yes if number(condition) else no
    if isinstance(condition, tirx.And | BitwiseAnd):
        return where(condition.a, where(condition.b, yes, no, analyzer), no, analyzer)
    if isinstance(condition, tirx.Or | BitwiseOr):
        return where(condition.a, yes, where(condition.b, yes, no, analyzer), analyzer)
    if isinstance(condition, tirx.Not | BitwiseNot):
        return where(condition.a, no, yes, analyzer)
    return tirx.Select(_comparison(condition, analyzer), yes, no)


def _comparison(condition: Expr, analyzer: tvm.sym.Analyzer) -> Expr:
    """A comparison of floats, where the condition can be one."""
    if not isinstance(condition, CmpExpr):
        return tirx.NE(convert(condition, "float32"), constant(0, "float32"))
    sides = (condition.a, condition.b)
    if not all(is_integer(dtype_of(x)) for x in sides):
        return condition
    if all(_is_exact(x, analyzer) for x in sides):
        return type(condition)(*(tirx.Cast("float32", x) for x in sides))
    return condition


def _is_exact(value: Expr, analyzer: tvm.sym.Analyzer) -> bool:
    low, high = bounds(value, analyzer)
    return low >= -EXACT and high <= EXACT


# A shorter axis does not fill a vector.
LEAST_LANES = 4

# Shorter axes are transposed well enough by the cache.
LEAST_TRANSPOSED = 16

# Elements that one contiguous access moves; a gather moves them one by one.
LANES = 8

# A scattered store costs more than a gathered load: `y[i, j] = x[j, i] + z[j, i]` stores in order.
SCATTER_COST = 2

# Combining the lanes of one result: a handful of dependent shuffles and additions.
FOLD_COST = 8


def lane_axis(stages: tuple[Stage, ...], candidates: list[tuple[Axis, ...]]) -> int | None:
    """Index of the best candidate: each is one axis, as every stage has it.

    The best is the one along which accesses cost least; of equals the later one.
    """
    least, chosen = float("inf"), None
    for i, axes in enumerate(candidates):
        if size_of(axes[0]) < LEAST_LANES:
            continue
        cost = sum(_cost(s, a) for s, a in zip(stages, axes, strict=True))
        if cost <= least:
            least, chosen = cost, i
    return chosen


@lru_cache(maxsize=1024)  # asked for all stages of a group whenever it grows; a stage never changes
def best_lane(stage: Stage) -> Axis | None:
    """The axis of one stage that should run along vectors."""
    domain = stage.domain
    best = lane_axis((stage,), [(a,) for a in domain])
    return None if best is None else domain[best]


def _cost(stage: Stage, axis: Axis) -> float:
    """Cost of all loads and stores, each once for every point of the axes that it depends on."""
    analyzer = analyzer_of(stage.domain)
    lanes = min(LANES, size_of(axis))
    total = 0.0
    for load in stage.reads():
        used = free_variables(load)
        times = points(a for a in stage.domain if a.var in used)
        total += times / lanes if load_stride(load, axis.var, analyzer) == 1 else times
    results = points(stage.axes)
    if not any(a is axis for a in stage.axes):
        return total + results * FOLD_COST
    contiguous = _store_stride(stage, axis, analyzer) == 1
    return total + (results / lanes if contiguous else results * SCATTER_COST)


def _store_stride(stage: Stage, axis: Axis, analyzer: tvm.sym.Analyzer) -> int | None:
    return stride(stage.buffer, [a.var for a in stage.axes], axis.var, analyzer)


# Transposing copies


def last_axis(stage: Stage) -> Axis | None:
    """The axis that stores are contiguous along."""
    return next((a for a in reversed(stage.axes) if a.size != 1), None)


def transposed_axes(stage: Stage) -> tuple[Axis, Axis] | None:
    """The axes along which a transposing copy loads and stores contiguously; None for the rest."""
    lane = last_axis(stage)
    if stage.kind is not None or lane is None:
        return None
    value = stage.values[0]
    binds = {var: bound for var, bound in stage.binds}
    while isinstance(value, tirx.Cast) or value in binds:
        value = value.value if isinstance(value, tirx.Cast) else binds.pop(value)
    if binds or not isinstance(value, TensorLoad):
        return None
    if not runs_across(stage, value, lane, analyzer_of(stage.domain)):
        return None
    return next(a for a in stage.axes if a.var.same_as(value.indices[-1])), lane


def runs_across(stage: Stage, load: TensorLoad, lane: Axis, analyzer: tvm.sym.Analyzer) -> bool:
    """Whether a load permutes axes, and is contiguous along another long one than the vectors."""
    if load_stride(load, lane.var, analyzer) in (0, 1) or not load.indices:
        return False
    by_var = {a.var: a for a in stage.domain}
    used = [i for i in load.indices if number(i) is None]
    if not all(i in by_var for i in used) or len({i for i in used}) != len(used):
        return False
    if not used or number(load.indices[-1]) is not None:
        return False
    sizes = (by_var[load.indices[-1]].size, lane.size)
    return all(s is None or s >= LEAST_TRANSPOSED for s in sizes)
