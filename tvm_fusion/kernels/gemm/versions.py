"""Several kernels of a product whose rows are known at the call, each for a range of sizes:

    if n <= 64:     launch tiles of 64 x 64
    elif n <= 512:  launch tiles of 128 x 128
    else:           launch tiles of 128 x 256

One PrimFunc, whose host code compares the size. The cost model is read at `SIZES`; as few
configurations as can be are taken of which each is at most `LOSS` slower, at each of these sizes in
its range, than the fastest. What a form leaves out where sizes are symbolic is not among them.

Does not handle: several symbolic sizes in one launch, and configurations that tuning chose.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, Var

from ...config import HardwareProfile, Policy
from ...errors import Unsupported
from ...ir.graph import VERSIONS_ATTR
from ..forms import Ranked, Writer
from ..program.expr import constant, dtype_of, number, variables

SIZES = (16, 64, 128, 256, 512, 1024, 4096)
LOSS = 1.03
MOST = 6  # versions

_ORDER = "group_m"  # in which order tiles are taken: a kernel of any size may do so in any


@dataclass(frozen=True, slots=True)
class Version:
    """A configuration and the largest size that it is for; None: any."""

    config: Any
    most: int | None


def write_versions(
    writer: Writer, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy
) -> tirx.PrimFunc | None:
    """The kernels of a fused PrimFunc for ranges of its one symbolic size; None where it has none
    or several, and where one kernel is as good.
    """
    size = symbolic_size(func)
    if size is None:
        return None
    exact = policy.rounding == "exact"
    problem = writer.read(func, exact)
    allowed = {_kind(config) for _, config in writer.ranked(problem, hw, policy)}
    values, tables = [], []
    for value in SIZES:
        known = with_size(func, size, value)
        if is_empty(known):
            continue
        ranked = writer.ranked(writer.read(known, exact), hw, policy)
        tables.append([entry for entry in ranked if _kind(entry[1]) in allowed])
        values.append(value)
    found = versions_of(tables, values)
    if len(found) < 2:
        return None
    try:
        kernels = [writer.emit(problem, hw, policy, version.config) for version in found]
    except Unsupported:
        return None  # the one kernel is chosen among those that can be written
    return _joined(kernels, found)


def symbolic_size(func: tirx.PrimFunc) -> Var | None:
    """The one symbolic size of a function's parameters; None where there are others or none."""
    buffers = [p for p in func.params if isinstance(p.ty, tirx.BufferType)]
    extents = [e for p in buffers for e in p.ty.shape if not isinstance(e, tirx.IntImm)]
    found = list(dict.fromkeys(variables(*extents)))
    return found[0] if len(found) == 1 and len(buffers) == len(func.params) else None


def with_size(func: tirx.PrimFunc, size: Var, value: int) -> tirx.PrimFunc:
    """A fused PrimFunc at one value of its symbolic size."""
    number = constant(value, dtype_of(size))
    renewed: dict[Var, Any] = {size: number}

    def renew(var: Var) -> Any:
        return renewed.get(var, var)

    for param in func.params:
        shape = [tvm_ffi.structural_map(e, [(Var, renew), *_FOLDS]) for e in param.ty.shape]
        renewed[param] = tirx.decl_buffer(shape, str(param.ty.dtype), param.name)
    body = tvm_ffi.structural_map(func.body, [(Var, renew), *_FOLDS])
    return tirx.PrimFunc([renewed[p] for p in func.params], body, func.ret_type, attrs=func.attrs)


def is_empty(func: tirx.PrimFunc) -> bool:
    """Whether a parameter of known sizes has no element, as ``x[100:]`` of few rows."""
    extents = (number(extent) for param in func.params for extent in param.ty.shape)
    return any(extent is not None and extent < 1 for extent in extents)


def _folded(operation: Callable[[int, int], int]) -> Callable[[Expr], Expr]:
    """What makes a number of an operation on two: ``n * 196`` at a value of n."""

    def fold(expr: Expr) -> Expr:
        if isinstance(expr.a, tirx.IntImm) and isinstance(expr.b, tirx.IntImm):
            return constant(operation(int(expr.a.value), int(expr.b.value)), dtype_of(expr.a))
        return expr

    return fold


_FOLDS = [
    (tirx.Add, _folded(operator.add)),
    (tirx.Sub, _folded(operator.sub)),
    (tirx.Mul, _folded(operator.mul)),
    (tirx.FloorDiv, _folded(operator.floordiv)),
    (tirx.FloorMod, _folded(operator.mod)),
    (tirx.Min, _folded(min)),
    (tirx.Max, _folded(max)),
]


def versions_of(tables: Sequence[Ranked], sizes: Sequence[int]) -> list[Version]:
    """The fewest versions that lose at most `LOSS`, by predicted seconds at each size; none where
    it would be more than `MOST`, or nothing is predicted.
    """
    times = []
    for table in tables:
        known: dict[Any, tuple[float, Any]] = {}
        for seconds, config in table:
            if seconds is not None:
                known.setdefault(_kind(config), (seconds, config))
        times.append(known)
    found: list[Version] = []
    start = 0
    while start < len(sizes) and all(times):
        reach = {kind: _reach(times, kind, start) for kind in times[start]}
        kind = max(reach, key=lambda kind: (reach[kind], -times[start][kind][0]))
        end = reach[kind]
        found.append(Version(times[end - 1][kind][1], sizes[end - 1]))
        start = end
    if not found or len(found) > MOST:
        return []
    return [*found[:-1], Version(found[-1].config, None)]


def _reach(times: Sequence[dict[Any, tuple[float, Any]]], kind: Any, start: int) -> int:
    """The first size from `start` on at which a kind of configuration loses more than `LOSS`."""
    for place in range(start, len(times)):
        best = min(seconds for seconds, _ in times[place].values())
        if kind not in times[place] or times[place][kind][0] > LOSS * best:
            return place
    return len(times)


def _kind(config: Any) -> Any:
    """A configuration but for the order of its tiles."""
    fields = getattr(config, "__dataclass_fields__", {})
    return dataclasses.replace(config, **{_ORDER: 1}) if _ORDER in fields else config


def _joined(kernels: Sequence[tirx.PrimFunc], versions: Sequence[Version]) -> tirx.PrimFunc | None:
    """One function with the kernels of versions; None where these cannot stand in one."""
    first, size = kernels[0], symbolic_size(kernels[0])
    if size is None or any(not _equal(first.attrs, kernel.attrs) for kernel in kernels):
        return None
    body = None
    for kernel, version in reversed(list(zip(kernels, versions, strict=True))):
        own = _over(kernel, first.params, size)
        if body is None:
            body = own
        else:
            body = tirx.IfThenElse(size <= constant(version.most, dtype_of(size)), own, body)
    ranges = [version.most for version in versions[:-1]]
    joined = tirx.PrimFunc(first.params, body, first.ret_type, attrs=first.attrs)
    return joined.with_attr(VERSIONS_ATTR, ranges)


def _over(kernel: tirx.PrimFunc, params: Sequence[Var], size: Var) -> tirx.Stmt:
    """The body of a kernel over the parameters, and the size, of another one."""
    renewed = dict(zip(kernel.params, params, strict=True))
    renewed[symbolic_size(kernel)] = size
    return tvm_ffi.structural_map(kernel.body, [(Var, lambda var: renewed.get(var, var))])


def _equal(some: Any, others: Any) -> bool:
    return tvm_ffi.structural_equal(some, others, map_free_vars=True)
