"""Several kernels of a function whose sizes are known at the call, each for a range of one of them:

    if n <= 64:     launch tiles of 64 x 64
    elif n <= 512:  launch tiles of 128 x 128
    else:           launch tiles of 128 x 256

One PrimFunc, whose host code compares the size. A family reads its cost model at some sizes, and as
few configurations as can be are taken of which each is at most `LOSS` slower, at each of these
sizes in its range, than the fastest.

Does not handle: configurations that tuning chose.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, Var

from ..config import HardwareProfile, Policy
from ..ir.graph import VERSIONS_ATTR
from .forms import Ranked, Writer
from .program.expr import constant, dtype_of, number, variables

LOSS = 1.03
MOST = 6  # versions
LOSSES = (LOSS, 1.06, 1.1, 1.15, 1.2, 1.25, 1.3, 1.5, 2.0, 4.0)
"""How much slower than the fastest versions may be where few are allowed."""

_ORDER = "group_m"  # in which order tiles are taken: a kernel of any size may do so in any


@dataclass(frozen=True, slots=True)
class Version:
    """A configuration and the largest size that it is for; None: any."""

    config: Any
    most: int | None


@dataclass(frozen=True, slots=True)
class Branch:
    """A kernel and when it is launched.

    Attributes
    ----------
    kernel : over the same parameters as all others, but for the names of these and of sizes.
    condition : over the sizes of the last branch's parameters; None for the last branch.
    name : of its range, as `VERSIONS_ATTR` holds it.
    sizes : what symbolic sizes of the kernel are in those of the last branch's, if others.
    """

    kernel: tirx.PrimFunc
    condition: Expr | None
    name: int | str
    sizes: Mapping[Var, Expr] = field(default_factory=dict)


def symbolic_size(func: tirx.PrimFunc) -> Var | None:
    """The one symbolic size of a function's parameters; None where there are others or none."""
    buffers = [p for p in func.params if isinstance(p.ty, tirx.BufferType)]
    extents = [e for p in buffers for e in p.ty.shape if not isinstance(e, tirx.IntImm)]
    found = list(dict.fromkeys(variables(*extents)))
    return found[0] if len(found) == 1 and len(buffers) == len(func.params) else None


def with_size(func: tirx.PrimFunc, size: Var, value: int | Expr) -> tirx.PrimFunc:
    """A fused PrimFunc at one value of its symbolic size."""
    number = constant(value, dtype_of(size)) if isinstance(value, int) else value
    renewed: dict[Var, Any] = {size: number}

    def renew(var: Var) -> Any:
        return renewed.get(var, var)

    for param in func.params:
        shape = [tvm_ffi.structural_map(e, [(Var, renew), *_FOLDS]) for e in param.ty.shape]
        renewed[param] = tirx.decl_buffer(shape, str(param.ty.dtype), param.name)
    body = tvm_ffi.structural_map(func.body, [(Var, renew), *_FOLDS])
    return tirx.PrimFunc([renewed[p] for p in func.params], body, func.ret_type, attrs=func.attrs)


def tables_by_size(
    writer: Writer,
    func: tirx.PrimFunc,
    problem: Any,
    sizes: Iterable[int],
    hw: HardwareProfile,
    policy: Policy,
) -> dict[int, Ranked]:
    """What the configurations that a `problem` of symbolic sizes can run with take at those of
    `sizes` of the one size of `func` that leave it something to compute.
    """
    exact = policy.rounding == "exact"
    allowed = {kind_of(config) for _, config in writer.ranked(problem, hw, policy)}
    found = {}
    for value in sizes:
        known = with_size(func, symbolic_size(func), value)
        if not is_empty(known):
            ranked = writer.ranked(writer.read(known, exact), hw, policy)
            found[value] = [entry for entry in ranked if kind_of(entry[1]) in allowed]
    return found


def fewest_of(tables: Sequence[Ranked], sizes: Sequence[int], most: int) -> list[Version]:
    """As `versions_of`, with the least loss of `LOSSES` that needs at most so many."""
    for loss in LOSSES:
        found = versions_of(tables, sizes, loss, most)
        if found:
            return found
    return []


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


def versions_of(
    tables: Sequence[Ranked], sizes: Sequence[int], loss: float = LOSS, most: int = MOST
) -> list[Version]:
    """The fewest versions that take at most `loss` times as long as the fastest, by predicted
    seconds at each size; none where it would be more than `most`, or nothing is predicted.
    """
    times = []
    for table in tables:
        known: dict[Any, tuple[float, Any]] = {}
        for seconds, config in table:
            if seconds is not None:
                known.setdefault(kind_of(config), (seconds, config))
        times.append(known)
    found: list[Version] = []
    start = 0
    while start < len(sizes) and all(times):
        reach = {kind: _reach(times, kind, start, loss) for kind in times[start]}
        kind = max(reach, key=lambda kind: (reach[kind], -times[start][kind][0]))
        end = reach[kind]
        found.append(Version(times[end - 1][kind][1], sizes[end - 1]))
        start = end
    if not found or len(found) > most:
        return []
    return [*found[:-1], Version(found[-1].config, None)]


def _reach(
    times: Sequence[dict[Any, tuple[float, Any]]], kind: Any, start: int, loss: float
) -> int:
    """The first size from `start` on at which a kind of configuration loses more than `loss`."""
    for place in range(start, len(times)):
        best = min(seconds for seconds, _ in times[place].values())
        if kind not in times[place] or times[place][kind][0] > loss * best:
            return place
    return len(times)


def kind_of(config: Any) -> Any:
    """A configuration but for the order of its tiles."""
    fields = getattr(config, "__dataclass_fields__", {})
    return dataclasses.replace(config, **{_ORDER: 1}) if _ORDER in fields else config


def joined(branches: Sequence[Branch]) -> tirx.PrimFunc | None:
    """One function with the kernels of branches, the first whose condition holds is launched; None
    where these cannot stand in one.
    """
    last = branches[-1].kernel
    if any(not _equal(last.attrs, branch.kernel.attrs) for branch in branches):
        return None
    body = None
    for branch in reversed(branches):
        own = _over(branch, last.params)
        body = own if body is None else tirx.IfThenElse(branch.condition, own, body)
    names = [branch.name for branch in branches[:-1]]
    whole = tirx.PrimFunc(last.params, body, last.ret_type, attrs=last.attrs)
    return whole.with_attr(VERSIONS_ATTR, names)


def preceded(kernel: tirx.PrimFunc, branch: Branch) -> tirx.PrimFunc:
    """A kernel, or several by ranges, in front of which a branch is asked for, which is over the
    parameters and sizes of `kernel`.
    """
    known = kernel.attrs.get(VERSIONS_ATTR, ())
    body = tirx.IfThenElse(branch.condition, _over(branch, kernel.params), kernel.body)
    whole = tirx.PrimFunc(kernel.params, body, kernel.ret_type, attrs=kernel.attrs)
    return whole.with_attr(VERSIONS_ATTR, [branch.name, *known])


def _over(branch: Branch, params: Sequence[Var]) -> tirx.Stmt:
    """The body of a branch's kernel over other parameters."""
    kernel = branch.kernel
    renewed = {**dict(zip(kernel.params, params, strict=True)), **branch.sizes}
    return tvm_ffi.structural_map(kernel.body, [(Var, lambda var: renewed.get(var, var))])


def _equal(some: Any, others: Any) -> bool:
    return tvm_ffi.structural_equal(some, others, map_free_vars=True)
