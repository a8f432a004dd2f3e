"""Several kernels of a function whose sizes are known at the call, each for a range of one of them:

    if n <= 64:     launch tiles of 64 x 64
    elif n <= 512:  launch tiles of 128 x 128
    else:           launch tiles of 128 x 256

One PrimFunc, whose host code compares the size. A family reads its cost model at some sizes, and as
few configurations as can be are taken of which each is at most `LOSS` slower, at each of these
sizes in its range, than the fastest. Of what is known of the size (`ir.extents.SIZES_ATTR`) its
bounds say at which sizes, and where it is always a multiple, kernels know that.

Does not handle: configurations that tuning chose.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, StringImm, TensorLoad, Var

from ..config import HardwareProfile, Policy
from ..ir.extents import SIZES_ATTR, Bounds, known_sizes, with_known_sizes
from ..ir.graph import VERSIONS_ATTR
from .forms import Ranked, Writer
from .gpu.ahead import READS_AHEAD
from .program.expr import (
    conjunction,
    constant,
    convert,
    dtype_of,
    linear_form,
    number,
    variables,
)
from .program.extents import equal_sizes

LOSS = 1.03
MOST = 6  # versions
LOSSES = (LOSS, 1.06, 1.1, 1.15, 1.2, 1.25, 1.3, 1.5, 2.0, 4.0)
"""How much slower than the fastest versions may be where few are allowed."""
WORTH = 1.10
"""What the fastest of a size may take at most to be asked about other sizes, of its time."""

VECTOR = 8
"""Elements of the widest vectors of most dtypes."""
SLIGHT = 0.002
"""What a version more must gain where losses are squares of logarithms: 3 % at two sizes."""
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


@dataclass(frozen=True, slots=True)
class Size:
    """A symbolic size, and which values it may have; a product of several where kernels depend on
    that alone.
    """

    vars: tuple[Var, ...]
    bounds: Bounds

    @property
    def extent(self) -> Expr:
        """How large it is."""
        return functools.reduce(operator.mul, self.vars)

    def upto(self, most: int | None) -> Expr | None:
        """The condition that it is at most so large; None where any is."""
        return None if most is None else self.extent <= constant(most, dtype_of(self.extent))

    def known(self, func: tirx.PrimFunc, value: int) -> tirx.PrimFunc:
        """A function where it has a value."""
        first, *others = self.vars
        func = with_size(func, first, value)
        for var in others:
            func = with_size(func, var, 1)
        return func


@dataclass(frozen=True, slots=True)
class Multiple:
    """A function over `quotient` in the place of a `size` that is `of` times as large."""

    func: tirx.PrimFunc
    size: Var
    quotient: Var
    of: int

    @classmethod
    def made(cls, func: tirx.PrimFunc, size: Var, of: int) -> Multiple:
        """The function for sizes that `of` divides."""
        quotient = Var(f"{size.name}_{of}", size.ty)
        whole = with_size(func, size, quotient * constant(of, dtype_of(size)))
        return cls(whole, size, quotient, of)

    @classmethod
    def dividing(cls, func: tirx.PrimFunc, extent: Expr, width: int) -> Multiple | None:
        """The function where vectors divide an extent, which is one symbolic size or a multiple of
        it; None for another one.
        """
        found = variables(extent)
        form = linear_form(extent, found) if len(found) == 1 else None
        if form is None:
            return None
        factor, rest = number(form[0][0]), number(form[1])
        if factor is None or rest != 0:
            return None
        return cls.made(func, found[0], width // math.gcd(int(factor), width))

    @property
    def divides(self) -> Expr:
        """The condition that a size is a multiple."""
        of = constant(self.of, dtype_of(self.size))
        return tirx.EQ(tirx.FloorMod(self.size, of), constant(0, dtype_of(self.size)))

    @property
    def sizes(self) -> dict[Var, Expr]:
        """The quotient, by the size."""
        return {self.quotient: tirx.FloorDiv(self.size, constant(self.of, dtype_of(self.size)))}


def known_size(func: tirx.PrimFunc, passed: bool = False) -> Size | None:
    """The one symbolic size of a function's parameters; None where there are others or none, or it
    is a parameter itself and not to be `passed`.
    """
    var = symbolic_size(func, passed)
    return None if var is None else Size((var,), known_sizes(func).get(var, Bounds()))


def read_at(sizes: Sequence[int], bounds: Bounds) -> list[int]:
    """Where the cost model is read: at those of `sizes` (at the hints, if there are any) that are
    within bounds, and at the largest of all, each for the sizes up to it. Beyond the last of
    `sizes` nothing changes.
    """
    sizes = bounds.hints or sizes
    of, most = bounds.multiple, bounds.most
    ends = [*sizes] if most is None else [*(n for n in sizes if n < most), min(most, sizes[-1])]
    ends = [n // of * of for n in ends]
    found = [n for n in dict.fromkeys(ends) if n >= max(bounds.least, 1)]
    return found or [bounds.nearest(sizes[-1])]


def symbolic_size(func: tirx.PrimFunc, passed: bool = False) -> Var | None:
    """The one symbolic size of a function's parameters; None where there are others or none, or it
    is a parameter itself, as n where all shapes have n // 8, and not to be `passed`.
    """
    buffers = [p for p in func.params if isinstance(p.ty, tirx.BufferType)]
    extents = [e for p in buffers for e in p.ty.shape if not isinstance(e, tirx.IntImm)]
    found = list(dict.fromkeys(variables(*extents)))
    if len(found) != 1:
        return None
    others = [p for p in func.params if p not in buffers]
    known = all(passed and p.same_as(found[0]) for p in others)
    return found[0] if known else None


def with_size(func: tirx.PrimFunc, size: Var, value: int | Expr) -> tirx.PrimFunc:
    """A fused PrimFunc at one value of a symbolic size."""
    number = constant(value, dtype_of(size)) if isinstance(value, int) else value
    renewed: dict[Var, Any] = {size: number}

    def renew(var: Var) -> Any:
        return renewed.get(var, var)

    for param in func.params:
        if not isinstance(param.ty, tirx.BufferType):
            continue  # a size that is passed
        shape = [tvm_ffi.structural_map(e, [(Var, renew), *_FOLDS]) for e in param.ty.shape]
        renewed[param] = tirx.decl_buffer(shape, str(param.ty.dtype), param.name)
    body = tvm_ffi.structural_map(func.body, [(Var, renew), *_FOLDS])
    params = [p if p.same_as(size) else renewed.get(p, p) for p in func.params]
    found = tirx.PrimFunc(params, body, func.ret_type, attrs=func.attrs)
    if SIZES_ATTR not in (func.attrs or {}):
        return found
    others = {var: bounds for var, bounds in known_sizes(func).items() if not var.same_as(size)}
    return with_known_sizes(found.without_attr(SIZES_ATTR), others)


def tables_by_size(
    writer: Writer,
    func: tirx.PrimFunc,
    size: Size,
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
        known = size.known(func, _whole(value) if size.bounds.multiple == 1 else value)
        if not is_empty(known):
            ranked = writer.ranked(writer.read(known, exact), hw, policy)
            found[value] = [entry for entry in ranked if kind_of(entry[1]) in allowed]
    return found


def _whole(size: int) -> int:
    """A size near this one that vectors divide: an odd bound says nothing of other sizes."""
    return max(size // VECTOR, 1) * VECTOR if size > VECTOR else size


def fewest_of(tables: Sequence[Ranked], sizes: Sequence[int], most: int) -> list[Version]:
    """As `versions_of`, with the least loss of `LOSSES` that needs at most so many."""
    for loss in LOSSES:
        found = versions_of(tables, sizes, loss, most)
        if found:
            return found
    return []


class Priced(NamedTuple):
    """What configurations lose against the fastest, as squares of logarithms: by configuration, for
    the sizes up to each of `ends`; infinite where one does not hold them.
    """

    ends: list[int]
    losses: dict[Any, list[float]]


class Chosen(NamedTuple):
    """Versions, and the sum of what they lose."""

    loss: float
    versions: list[Version]


def least_lost(priced: Priced | None, most: int) -> Chosen:
    """The versions, at most so many, that lose the least in all."""
    if priced is None:
        return Chosen(math.inf, [])
    ends, losses = priced
    best = [Chosen(0.0, []), *([Chosen(math.inf, [])] * len(ends))]
    for _ in range(most):
        renewed = list(best)
        for start in range(len(ends)):
            if math.isinf(best[start].loss):
                continue
            for stop in range(start + 1, len(ends) + 1):
                loss, config = min(
                    ((sum(own[start:stop]), config) for config, own in losses.items()),
                    key=lambda entry: entry[0],
                )
                total = best[start].loss + loss + SLIGHT
                if total < renewed[stop].loss:
                    version = Version(config, ends[stop - 1])
                    renewed[stop] = Chosen(total, [*best[start].versions, version])
        best = renewed
    loss, found = best[-1]
    return Chosen(loss, [*found[:-1], Version(found[-1].config, None)] if found else [])


def of_both_ends(tables: Mapping[int, Ranked], most: int) -> list[Version]:
    """The versions, at most so many, that lose the least at the largest size of each range and at
    that of the range before, next to which it begins; by predicted seconds at some sizes.
    """
    times, ends = [_by_kind(table) for table in tables.values()], list(tables)
    if not all(times):
        return []
    losses = {}
    for kind in dict.fromkeys(kind for known in times for kind in known):
        each = [math.inf] * len(ends)
        for place, known in enumerate(times):
            if kind in known:
                fastest = min(seconds for seconds, _ in known.values())
                each[place] = math.log(known[kind][0] / fastest) ** 2
        losses[kind] = [a + b for a, b in zip(each, [each[0], *each[:-1]], strict=True)]
    found = least_lost(Priced(ends, losses), most).versions
    served = [ends.index(version.most or ends[-1]) for version in found]
    return [
        replace(version, config=times[place][version.config][1])
        for version, place in zip(found, served, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Box:
    """A configuration, and the largest of each of two sizes that it is for; None: any."""

    config: Any
    most: tuple[int | None, int | None]


def boxes_of(tables: Mapping[tuple[int, int], Ranked], most: int = MOST) -> list[Box]:
    """Versions by two sizes, of which the first that holds both is taken; the last is for any. By
    predicted seconds at some pairs of sizes, with the least loss of `LOSSES` that needs at most so
    many.
    """
    times = {pair: _by_kind(table) for pair, table in tables.items()}
    if not times or not all(times.values()):
        return []
    for loss in LOSSES:
        found = _boxes(times, loss)
        if len(found) <= most:
            return found
    return []


def _boxes(times: Mapping[tuple[int, int], dict[Any, tuple[float, Any]]], loss: float) -> list[Box]:
    best = {pair: min(seconds for seconds, _ in known.values()) for pair, known in times.items()}
    ends = [sorted({pair[axis] for pair in times}) for axis in (0, 1)]
    left, found = set(times), []
    while left:
        choices, first = [], min(left)
        for corner in itertools.product(*ends):
            if corner[0] < first[0] or corner[1] < first[1]:
                continue
            inside = sorted(p for p in left if p[0] <= corner[0] and p[1] <= corner[1])
            for kind in times[first]:
                held = [times[p][kind][0] for p in inside if kind in times[p]]
                if len(held) == len(inside) and all(
                    seconds <= loss * best[p] for seconds, p in zip(held, inside, strict=True)
                ):
                    choices.append((len(inside), -sum(held), inside, kind, corner))
        _, _, inside, kind, corner = max(choices, key=lambda choice: choice[:2])
        last = inside[-1]
        any_of = [None if n == end[-1] else n for n, end in zip(corner, ends, strict=True)]
        found.append(Box(times[last][kind][1], (any_of[0], any_of[1])))
        left -= set(inside)
    return found


def is_empty(func: tirx.PrimFunc) -> bool:
    """Whether a parameter of known sizes has no element, as ``x[100:]`` of few rows."""
    shapes = (p.ty.shape for p in func.params if isinstance(p.ty, tirx.BufferType))
    extents = (number(extent) for shape in shapes for extent in shape)
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
    times = [_by_kind(table) for table in tables]
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


def _by_kind(table: Ranked) -> dict[Any, tuple[float, Any]]:
    """The fastest of each kind that is predicted."""
    known: dict[Any, tuple[float, Any]] = {}
    for seconds, config in table:
        if seconds is not None:
            known.setdefault(kind_of(config), (seconds, config))
    return known


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


def for_fewer(
    kernel: tirx.PrimFunc, func: tirx.PrimFunc, rows: Expr, outputs: Iterable[int]
) -> tirx.PrimFunc | None:
    """A kernel of `func` for a number of its symbolic `rows` as one for 1 to so many; None where
    its parameters have other symbolic extents, or it does not store elements of `outputs` one by
    one.

        y[i] = f(x[i])    ->    if i < n: y[i] = f(x[min(i, n - 1)])

    Right where what is stored of a row depends on no other, and not on how many there are.
    """
    axes: dict[Var, list[int]] = {}
    for param, like in zip(kernel.params, func.params, strict=True):
        shape = like.ty.shape if isinstance(like.ty, tirx.BufferType) else ()
        axes[param] = [i for i, e in enumerate(shape) if not isinstance(e, tirx.IntImm)]
        if not all(equal_sizes(shape[i], rows) for i in axes[param]):
            return None
    stored: set[Var] = set()

    def read(load: TensorLoad) -> Expr:
        indices = list(load.indices)
        for axis in axes.get(load.source, ()):
            index = indices[axis]
            last = convert(rows, dtype_of(index)) - constant(1, dtype_of(index))
            indices[axis] = tirx.Min(index, last)
        return tirx.BufferLoad(load.source, indices) if axes.get(load.source) else load

    def store(node: tirx.BufferStore) -> tirx.Stmt:
        stored.add(node.buffer)
        there = (node.indices[axis] for axis in axes.get(node.buffer, ()))
        exists = conjunction(*(index < convert(rows, dtype_of(index)) for index in there))
        return node if exists is None else tirx.IfThenElse(exists, node, None)

    body = tvm_ffi.structural_map(kernel.body, [(TensorLoad, read), (tirx.BufferStore, store)])
    whole = stored.issuperset(kernel.params[number] for number in outputs)
    return kernel.with_body(body) if whole else None


def joined(branches: Sequence[Branch], func: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """One function with the kernels of branches, the first whose condition holds is launched; None
    where these cannot stand in one. They compute `func`, and rely on the bounds of its sizes, which
    the host asks for.
    """
    last = branches[-1].kernel
    if any(not _equal(_others(last), _others(branch.kernel)) for branch in branches):
        return None
    params = last.params if not branches[-1].sizes else _like(last.params, func.params)
    body = None
    for branch in reversed(branches):
        own = _over(branch, params)
        body = own if body is None else tirx.IfThenElse(branch.condition, own, body)
    whole = tirx.PrimFunc(params, _within_bounds(func, body), last.ret_type, attrs=last.attrs)
    ahead = {int(i) for b in branches for i in b.kernel.attrs.get(READS_AHEAD, ())}
    whole = whole.with_attr(READS_AHEAD, sorted(ahead)) if ahead else whole
    names = [branch.name for branch in branches[:-1]]
    return whole.with_attr(VERSIONS_ATTR, names) if names else whole


def _others(kernel: tirx.PrimFunc) -> dict[str, Any]:
    """The attributes of a kernel but for what each may read ahead."""
    return {name: value for name, value in kernel.attrs.items() if name != READS_AHEAD}


def _like(params: Sequence[Var], others: Sequence[Var]) -> list[Var]:
    """Parameters in the shapes of others."""
    return [
        tirx.decl_buffer(other.ty.shape, str(param.ty.dtype), param.name)
        for param, other in zip(params, others, strict=True)
    ]


def _within_bounds(func: tirx.PrimFunc, body: tirx.Stmt) -> tirx.Stmt:
    """What a function does where its sizes are within their bounds; an error elsewhere."""
    stmts = []
    for size, bounds in known_sizes(func).items():
        least, most, of = (
            constant(value or 0, dtype_of(size))
            for value in (bounds.least, bounds.most, bounds.multiple)
        )
        wanted = [(size >= least, f"at least {bounds.least}")]
        if bounds.most is not None:
            wanted.append((size <= most, f"at most {bounds.most}"))
        if bounds.multiple > 1:
            is_multiple = tirx.EQ(tirx.FloorMod(size, of), constant(0, dtype_of(size)))
            wanted.append((is_multiple, f"a multiple of {bounds.multiple}"))
        if len(wanted) == 1 and not bounds.least:
            continue
        condition = conjunction(*(condition for condition, _ in wanted))
        message = f"{size.name} is not " + " and ".join(text for _, text in wanted)
        stmts.append(tirx.AssertStmt(condition, StringImm("InputError"), [StringImm(message)]))
    return tirx.SeqStmt([*stmts, body]) if stmts else body


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
