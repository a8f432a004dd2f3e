"""Kernels of windows for ranges of a size that is known at the call.

    if n % 8 == 0 and n <= 96:  4 x 1 results a thread, of places loaded as vectors
    elif n % 8 == 0:            4 x 2
    elif n <= 64:               1 x 1, of places loaded one by one
    else:                       2 x 4

Lines that vectors divide have versions of their own where their length is symbolic. Of several
symbolic sizes the number of results is compared, and sizes are taken to grow together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from tvm import tirx
from tvm.ir import Expr, PrimType, Var

from ...errors import Unsupported
from ...ir.extents import Bounds
from ..forms import Form, Ranked, Writer
from ..program.expr import bytes_of, conjunction, constant, dtype_of
from ..versions import LOSSES, MOST, Branch, Multiple, Version, joined, read_at, versions_of
from .config import WIDEST_ACCESS, WindowConfig, fits, ranked
from .kernel import alignment, emit_windows, rank_windows, unproven, work_of, write_windows
from .problem import Windowed, read_windows

if TYPE_CHECKING:
    from ...config import HardwareProfile, Policy

SIZES = (1, 2, 3, *(n << exponent for exponent in range(15) for n in (4, 6)))
GAIN = 0.01
"""Of the time of some size, what vectors must save to have versions of their own."""

Values = Mapping[Var, int]


@dataclass(frozen=True, slots=True, eq=False)
class _Ranges:
    """The ranges that are asked about: each up to a number that the host compares.

    Attributes
    ----------
    compared : a size, or the results of several.
    numbers : the largest of each range.
    ends : the values of the sizes there.
    starts : and where a range begins; as at its end where that is not known of several sizes.
    narrow : sizes up to which all places are numbers of 32 bits; None where all are, or where no
        bound helps.
    """

    compared: Expr
    numbers: Sequence[int]
    ends: Sequence[Values]
    starts: Sequence[Values]
    narrow: int | None

    @classmethod
    def of(cls, problem: Windowed) -> _Ranges:
        """Those of a problem."""
        narrow = _narrow(problem)
        sizes = SIZES if narrow is None else [n for n in SIZES if n <= narrow]
        if len(problem.sizes) == 1:
            ((size, bounds),) = problem.sizes.items()
            ends = read_at(sizes, bounds)
            starts = [max(bounds.least, 1), *(end + 1 for end in ends[:-1])]
            return cls(size, ends, [{size: n} for n in ends], [{size: n} for n in starts], narrow)
        points = {}
        for n in sizes:
            values = {size: bounds.nearest(n) for size, bounds in problem.sizes.items()}
            points[math.prod(axis.extent for axis in problem.at(values))] = values
        found = list(points.values())
        return cls(problem.results, list(points), found, found, narrow)

    @property
    def is_of_one_size(self) -> bool:
        """Whether sizes of a range are known to be between its ends."""
        return isinstance(self.compared, Var)

    def upto(self, most: int | None, sizes: Iterable[Var]) -> Expr | None:
        """The condition that a call is not beyond a range, and its `sizes` narrow; None where any
        is.
        """
        limits = [] if most is None else [(self.compared, most)]
        if self.narrow is not None and (most is None or not self.is_of_one_size):
            limits += [(size, self.narrow) for size in sizes]
        return conjunction(*(of <= constant(end, dtype_of(of)) for of, end in limits))


def _narrow(problem: Windowed) -> int | None:
    """The largest of `SIZES` up to which int32 counts all places; None where no bound is needed, or
    none helps.
    """
    if _is_narrow(problem):
        return None
    least = max(bounds.least for bounds in problem.sizes.values())
    return max((n for n in SIZES if n >= least and _is_narrow(_upto(problem, n))), default=None)


def _is_narrow(problem: Windowed) -> bool:
    sizes = {size: Var(size.name, PrimType("int32")) for size in problem.sizes}
    return problem.narrowed(sizes).body.index_dtype == "int32"


def _upto(problem: Windowed, most: int, quotients: Mapping[Var, int] | None = None) -> Windowed:
    """The problem where no size is larger, and no quotient than its own largest."""
    sizes = {}
    for size, bounds in problem.sizes.items():
        own = (quotients or {}).get(size, most)
        sizes[size] = replace(bounds, most=min(own, bounds.most or own))
    return replace(problem, sizes=sizes)


@dataclass(frozen=True, slots=True, eq=False)
class _Lines:
    """Windows of lines of any length, or of those that vectors divide: with `multiple`, the problem
    is over the quotient.
    """

    problem: Windowed
    multiple: Multiple | None = None

    @property
    def renamed(self) -> Mapping[Var, Expr]:
        """What its sizes are in the function's, if others."""
        return {} if self.multiple is None else self.multiple.sizes

    def at(self, values: Values) -> dict[Var, int]:
        """Values of its sizes where the function's have `values`."""
        found = dict(values)
        if self.multiple is not None:
            quotient, of = self.multiple.quotient, self.multiple.of
            found[quotient] = max(found.pop(self.multiple.size) // of, 1)
        return found

    def tables(self, ranges: _Ranges, hw: HardwareProfile) -> list[Ranked]:
        """What configurations that suit all of a range take at its end, with their launch."""
        found, launch = [], hw.graph_launch_us / 1e6
        for end, start in zip(ranges.ends, ranges.starts, strict=True):
            first = self.problem.at(self.at(start))
            entries = ranked(work_of(self.problem, self.at(end)), hw)
            found.append([(body + launch, c) for body, c in entries if fits(first, c)])
        return found

    def upto(self, most: int) -> Windowed:
        """The problem where no size of the function's is larger."""
        if self.multiple is None:
            return _upto(self.problem, most)
        return _upto(self.problem, most, {self.multiple.quotient: most // self.multiple.of})

    def within(self, least: int, most: int | None) -> Windowed:
        """The problem where its one size is between bounds."""
        ((size, bounds),) = self.problem.sizes.items()
        of = 1 if self.multiple is None else self.multiple.of
        known = Bounds(-(-least // of), None if most is None else most // of, bounds.multiple)
        return replace(self.problem, sizes={size: known})


def write_window_versions(
    writer: Writer, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy
) -> tirx.PrimFunc | None:
    """The kernels of a fused PrimFunc for ranges of its symbolic sizes; None where all are known,
    and where one kernel says why there is none.
    """
    exact = policy.rounding == "exact"
    problem = writer.read(func, exact)
    if problem.is_static:
        return None
    ranges, lines = _Ranges.of(problem), [_Lines(problem)]
    multiple = _multiple_of(func, problem)
    if multiple is not None:
        divided = replace(writer.read(multiple.func, exact), sizes=_quotients(problem, multiple))
        always = problem.sizes[multiple.size].multiple % multiple.of == 0
        lines = [_Lines(divided, multiple), *([] if always else lines)]
    try:
        for most in (MOST, MOST - 1, MOST - 2):
            branches = _branches(problem, lines, ranges, most, hw)
            if len(branches) <= MOST:
                break
    except Unsupported:
        return None
    return joined(branches, func) if branches else None


def _multiple_of(func: tirx.PrimFunc, problem: Windowed) -> Multiple | None:
    """The function for lines of places that vectors divide; None where their length is known."""
    body, known = problem.body, problem.analyzer(problem.body)
    for item in (*body.tiles, *body.elements):
        length = body.params[item.param].shape[-1]
        if not isinstance(length, int) and alignment(body, item, known) is not None:
            return Multiple.dividing(func, length, WIDEST_ACCESS // bytes_of(item.dtype))
    return None


def _quotients(problem: Windowed, multiple: Multiple) -> dict[Var, Bounds]:
    """The bounds of sizes with a quotient in the place of one."""
    found = dict(problem.sizes)
    bounds, of = found.pop(multiple.size), multiple.of
    most = None if bounds.most is None else bounds.most // of
    return {multiple.quotient: Bounds(-(-bounds.least // of), most), **found}


class _Served(NamedTuple):
    """What one kernel is for."""

    lines: _Lines
    problem: Windowed
    config: WindowConfig
    condition: Expr | None
    name: int | str


def _served(
    problem: Windowed,
    lines: Sequence[_Lines],
    tables: Sequence[Sequence[Ranked]],
    ranges: _Ranges,
    most: int,
) -> Iterator[_Served]:
    """What each of at most so many kernels is for; behind them what int32 does not count."""
    config = None
    for one, versions in zip(lines, _fewest(tables, ranges.numbers, most), strict=True):
        divides = None if one.multiple is None or one is lines[-1] else one.multiple.divides
        start = 0
        for version in versions:
            end, known, config = version.most, one.problem, version.config
            if ranges.is_of_one_size:
                bounds = problem.sizes[ranges.compared]
                known = one.within(max(start, bounds.least), end or ranges.narrow or bounds.most)
                start = (end or 0) + 1
            elif ranges.narrow is not None:
                known = one.upto(ranges.narrow)
            condition = conjunction(divides, ranges.upto(end, problem.sizes))
            yield _Served(one, known, config, condition, _name(one, ranges, end))
    if config is not None and ranges.narrow is not None:
        known = one.problem
        if ranges.is_of_one_size:
            known = one.within(ranges.narrow + 1, problem.sizes[ranges.compared].most)
        yield _Served(one, known, config, None, "beyond")


def _branches(
    problem: Windowed, lines: Sequence[_Lines], ranges: _Ranges, most: int, hw: HardwareProfile
) -> list[Branch]:
    """At most so many kernels, and one in front of them for too few results, where these may be."""
    tables = [one.tables(ranges, hw) for one in lines]
    if len(lines) == 2 and not _saves(*tables):
        lines, tables = lines[1:], tables[1:]
    found: list[Branch] = []
    few: dict[int, int] = {}
    for one in _served(problem, lines, tables, ranges, most):
        for axis, least in unproven(one.problem, one.config):
            few[axis] = max(few.get(axis, 0), least)
        kernel = write_windows(one.problem, hw, one.config)
        found.append(Branch(kernel, one.condition, one.name, one.lines.renamed))
    if few and found:
        config = min(tables[-1][0], key=lambda entry: entry[1].width * entry[1].tall)[1]
        extents = ((problem.axes[axis].extent, least) for axis, least in few.items())
        less = [extent < constant(least, dtype_of(extent)) for extent, least in extents]
        condition = less[0] if len(less) == 1 else tirx.Or(*less)
        found.insert(0, Branch(emit_windows(problem, hw, config), condition, max(few.values()) - 1))
    return found


def _saves(divided: Sequence[Ranked], every: Sequence[Ranked]) -> bool:
    """Whether vectors save time anywhere."""
    pairs = zip(divided, every, strict=True)
    return any(some and some[0][0] < (1 - GAIN) * others[0][0] for some, others in pairs)


def _fewest(
    tables: Sequence[Sequence[Ranked]], numbers: Sequence[int], most: int
) -> list[list[Version]]:
    """The versions of each kind of lines, with the least loss that needs at most so many in all."""
    for loss in LOSSES:
        found = [versions_of(of, numbers, loss) for of in tables]
        if all(found) and sum(map(len, found)) <= most:
            return found
    return [[] for _ in tables]


def _name(lines: _Lines, ranges: _Ranges, most: int | None) -> int | str:
    divided = "" if lines.multiple is None else f"of{lines.multiple.of}_"
    if most is None and ranges.narrow is None:
        return f"{divided}beyond"
    if most is None or ranges.is_of_one_size:
        end = most or ranges.narrow
        return f"{divided}upto_{end}" if divided else end
    return f"{divided}upto_{most}_results"


WRITER = Writer(
    "windows",
    read_windows,
    (Form("window", WindowConfig, rank_windows, emit_windows),),
    write_window_versions,
)
