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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr, Var

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

LARGEST = 1 << 32
"""Results of the largest sizes that are asked about, at least of the smallest."""

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
    """

    compared: Expr
    numbers: Sequence[int]
    ends: Sequence[Values]
    starts: Sequence[Values]

    @classmethod
    def of(cls, problem: Windowed) -> _Ranges:
        """Those of a problem."""

        def results(values: Values) -> int:
            return math.prod(axis.extent for axis in problem.at(values))

        if len(problem.sizes) == 1:
            ((size, bounds),) = problem.sizes.items()
            first, *others = read_at(SIZES, bounds)
            ends = [first, *(n for n in others if results({size: n}) <= LARGEST)]
            starts = [max(bounds.least, 1), *(end + 1 for end in ends[:-1])]
            return cls(size, ends, [{size: n} for n in ends], [{size: n} for n in starts])
        points = {}
        for n in SIZES:
            values = {size: bounds.nearest(n) for size, bounds in problem.sizes.items()}
            if not points or results(values) <= LARGEST:
                points[results(values)] = values
        found = list(points.values())
        return cls(problem.results, list(points), found, found)

    @property
    def is_of_one_size(self) -> bool:
        """Whether sizes of a range are known to be between its ends."""
        return isinstance(self.compared, Var)

    def upto(self, most: int | None) -> Expr | None:
        """The condition that a call is not beyond a range; None where any is."""
        return None if most is None else self.compared <= constant(most, dtype_of(self.compared))


@dataclass(frozen=True, slots=True, eq=False)
class _Lines:
    """Windows of lines of any length, or of those that vectors divide: with `multiple`, the problem
    is over the quotient.
    """

    problem: Windowed
    multiple: Multiple | None = None

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
        for most in (MOST, MOST - 1):
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


def _branches(
    problem: Windowed, lines: Sequence[_Lines], ranges: _Ranges, most: int, hw: HardwareProfile
) -> list[Branch]:
    """At most so many kernels, and one in front of them for too few results, where these may be."""
    tables = [one.tables(ranges, hw) for one in lines]
    if len(lines) == 2 and not _saves(*tables):
        lines, tables = lines[1:], tables[1:]
    found, few = [], {}
    for one, versions in zip(lines, _fewest(tables, ranges.numbers, most), strict=True):
        is_last = one is lines[-1]
        start = 0
        for version in versions:
            known, end = one.problem, version.most
            if ranges.is_of_one_size:
                bounds = problem.sizes[ranges.compared]
                known = one.within(max(start, bounds.least), end or bounds.most)
                start = (end or 0) + 1
            for axis, least in unproven(known, version.config):
                few[axis] = max(few.get(axis, 0), least)
            kernel = write_windows(known, hw, version.config)
            divides = None if one.multiple is None or is_last else one.multiple.divides
            condition = conjunction(divides, ranges.upto(end))
            sizes = {} if one.multiple is None else one.multiple.sizes
            found.append(Branch(kernel, condition, _name(one, ranges, end), sizes))
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
    if most is None:
        return f"{divided}beyond"
    if ranges.is_of_one_size:
        return f"{divided}upto_{most}" if divided else most
    return f"{divided}upto_{most}_results"


WRITER = Writer(
    "windows",
    read_windows,
    (Form("window", WindowConfig, rank_windows, emit_windows),),
    write_window_versions,
)
