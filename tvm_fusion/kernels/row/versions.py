"""Row kernels for ranges of a size that is known at the call.

    if n <= 8:                    a row of 2 threads, element by element
    elif n <= 32:                 a row of 8 threads
    elif n % 8 == 0 and n <= 128: eight rows of 16 threads a block, each in registers
    elif n % 8 == 0 and n <= 2048:  a row of 128 threads, in registers
    elif n <= 1024: ...           the same for rows that start anywhere in memory
    else:                         a row of 256 threads that stream it

Of rows of symbolic length, that length is compared; where only their number is symbolic, that is.
A symbolic number of rows of symbolic length counts as `work.ASSUMED_EXTENT`, or what of its bounds
is nearest.

Does not handle: rows in shared memory (`Form.BULK`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from tvm import tirx
from tvm.ir import Expr

from ...errors import Unsupported
from ...ir.extents import Bounds, bounds_within, known_sizes
from ..forms import Writer
from ..gpu.vectors import divides, vector_width
from ..program.analysis import analyze
from ..program.expr import conjunction, constant, dtype_of
from ..program.program import Program
from ..versions import (
    MOST,
    WORTH,
    Branch,
    Chosen,
    Multiple,
    Priced,
    Version,
    fewest_of,
    joined,
    least_lost,
    read_at,
)
from .candidates import bounded, candidates_of, ranked, work_of
from .config import Form, RowConfig
from .cost import estimate_rows
from .kernel import emit_row
from .work import ASSUMED_EXTENT, RowWork, row_work

if TYPE_CHECKING:
    from ...config import HardwareProfile, Policy

COLUMNS = tuple(1 << exponent for exponent in range(5, 17))
ROWS = (4, 16, 64, 256, 1024, 4096, 16384)
ANYWHERE, OF_ROWS = 3, 3
"""Most versions for lengths of which it is not asked whether vectors divide them, and for numbers
of rows. A kernel takes nvcc some 0.5 s.
"""
SHORTEST, SHORT = 8, 32
"""Rows of so few columns are computed element by element, wherever they start. Softmax of 4096 rows
of 1 and 7: 1.34 and 1.41 us by 2 threads a row, 1.68 by those for 32 (H200, 2026-11-28)."""


class _Lengths(NamedTuple):
    """The length of rows, which it may be, and how many rows there are, or are taken to be."""

    columns: Expr
    bounds: Bounds
    rows: int

    @property
    def ends(self) -> list[int]:
        """Those that are asked about."""
        return read_at(COLUMNS, self.bounds)

    @property
    def are_held(self) -> bool:
        """Whether no row is longer than those that are asked about."""
        most, of = self.bounds.most, self.bounds.multiple
        return most is not None and most // of * of <= self.ends[-1]


def write_row_versions(
    writer: Writer, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy
) -> tirx.PrimFunc | None:
    """The kernels of a fused PrimFunc for ranges of a symbolic size, or one that is as good at all;
    None where it has none.
    """
    exact = policy.rounding == "exact"
    program = writer.read(func, exact)
    if program.is_static or not program.phases:
        return None
    try:
        if isinstance(program.columns, int):
            branches = _of_rows(func, program, hw)
        else:
            branches = _of_lengths(func, program, hw, exact)
    except Unsupported:
        return None  # the one kernel says why
    return joined(branches, func) if branches else None


def _of_rows(func: tirx.PrimFunc, program: Program, hw: HardwareProfile) -> list[Branch]:
    """Kernels for ranges of the number of rows."""
    work, rows = work_of(program, hw), program.row_count
    tables, numbers = [], read_at(ROWS, bounds_within(rows, known_sizes(func)))
    for number_of_rows in numbers:
        there = replace(work, rows=number_of_rows)
        tables.append(ranked(candidates_of(program, there, hw), there, hw))
    found = fewest_of(tables, numbers, OF_ROWS)
    return [
        Branch(emit_row(program, version.config, hw), _upto(rows, version.most), version.most)
        for version in found
    ]


def _of_lengths(
    func: tirx.PrimFunc, program: Program, hw: HardwareProfile, exact: bool
) -> list[Branch]:
    """Kernels for ranges of the length of rows: of those that vectors divide, and of all."""
    known, widest = known_sizes(func), vector_width(program, tail=True)
    rows = bounds_within(program.row_count, known).nearest(ASSUMED_EXTENT)
    lengths = _Lengths(program.columns, bounds_within(program.columns, known), rows)
    always = divides(widest, program.columns, program.analyzer())
    if always:
        found = least_lost(_priced(program, lengths, hw), MOST)
        return list(_kernels(program, lengths, found, hw, lengths.bounds.least))
    multiple = Multiple.dividing(func, program.columns, widest)
    if multiple is None:
        found = least_lost(_priced(program, lengths, hw), ANYWHERE)
        return list(_kernels(program, lengths, found, hw, lengths.bounds.least))
    aligned = analyze(multiple.func, exact)
    if known.get(multiple.size, Bounds()).multiple % multiple.of == 0:
        found = least_lost(_priced(aligned, lengths, hw), MOST)
        kernels = _kernels(aligned, lengths, found, hw, lengths.bounds.least)
        return [replace(branch, sizes=multiple.sizes) for branch in kernels]
    branches, least = list(_short(program, lengths, hw)), lengths.bounds.least
    if branches:
        least = max(least, SHORT + 1)
        lengths = lengths._replace(bounds=replace(lengths.bounds, least=least))
        if branches[-1].condition is None:
            return branches
    left = MOST - bool(branches) - (0 if lengths.are_held else 1)
    of_all, of_some = _priced(program, lengths, hw), _priced(aligned, lengths, hw)
    if not (of_all and of_some):
        return []
    shares = [
        (least_lost(of_some, some), least_lost(of_all, left - some)) for some in range(1, left)
    ]
    some, every = min(shares, key=lambda share: share[0].loss + share[1].loss)
    for branch in _kernels(aligned, lengths, some, hw, least):
        if branch.condition is None and not lengths.are_held:
            break  # as good where rows start anywhere: they are streamed
        both = conjunction(multiple.divides, branch.condition)
        end = "beyond" if branch.condition is None else f"upto_{branch.name}"
        branches.append(Branch(branch.kernel, both, f"of{widest}_{end}", multiple.sizes))
    return [*branches, *_kernels(program, lengths, every, hw, least)]


def _short(program: Program, lengths: _Lengths, hw: HardwareProfile) -> Iterator[Branch]:
    """The kernels for the shortest rows, element by element; none where no row is so short."""
    bounds = lengths.bounds
    if bounds.least > SHORT or bounds.hints:
        return
    one = row_work(program, [1], hw.special_slots)
    least = bounds.least
    for most, threads, asked in (
        (SHORTEST, (2,), (1, SHORTEST)),
        (SHORT, (4, 8, 16, 32), (1, 8, SHORT)),
    ):
        if max(least, bounds.multiple) > most:
            continue
        there = [replace(one, rows=lengths.rows, columns=columns) for columns in asked]
        configs = [
            RowConfig(threads=t, rows=block // t, width=1, most=most)
            for t in threads
            for block in (64, 128, 256)
        ]
        config = min(
            configs, key=lambda c: sum(math.log(estimate_rows(w, c, hw).time_us) for w in there)
        )
        kernel = emit_row(program, replace(config, least=least), hw)
        every = bounds.most is not None and bounds.most <= most
        yield Branch(kernel, None if every else _upto(lengths.columns, most), most)
        if every:
            return
        least = most + 1


def _priced(program: Program, lengths: _Lengths, hw: HardwareProfile) -> Priced | None:
    """The configurations of a program at both ends of each range between lengths; None where there
    is none.
    """
    ends, work = lengths.ends, replace(work_of(program, hw), rows=lengths.rows)
    starts = [max(lengths.bounds.least, 1), *(end + 1 for end in ends[:-1])]
    tables = [
        {config: seconds for seconds, config in table}
        for table in length_tables(
            program, work, [n for both in zip(starts, ends, strict=True) for n in both], hw, ends
        )
    ]
    if not all(tables):
        return None
    losses = {}
    for config in dict.fromkeys(config for table in tables for config in table):
        each = [
            math.log(table[config] / min(table.values())) if config in table else math.inf
            for table in tables
        ]
        losses[config] = [a * a + b * b for a, b in zip(each[::2], each[1::2], strict=True)]
    return Priced(ends, losses)


def _kernels(
    program: Program, lengths: _Lengths, chosen: Chosen, hw: HardwareProfile, least: int
) -> Iterator[Branch]:
    """Kernels for ranges of the length; the last is for any."""
    found = chosen.versions
    if found and found[-1].config.most:
        last = replace(found[-1], most=found[-1].config.most)
        found = [*found[:-1], last]
        if not lengths.are_held:
            # no row beyond those that were asked about fits into registers for sure
            work = replace(work_of(program, hw), rows=lengths.rows)
            longest = replace(work, columns=lengths.bounds.nearest(COLUMNS[-1]))
            found.append(Version(_streamed(program, longest, hw), None))
    for place, version in enumerate(found, 1):
        config = version.config
        if config.most:
            config = replace(config, least=least)
        kernel = emit_row(program, config, hw)
        end = None if place == len(found) else version.most
        yield Branch(kernel, _upto(lengths.columns, end), end)
        least = (version.most or 0) + 1


def length_tables(
    program: Program,
    work: RowWork,
    lengths: Sequence[int],
    hw: HardwareProfile,
    ends: Sequence[int] | None = None,
) -> list[list[tuple[float, RowConfig]]]:
    """Predicted seconds of configurations at each of some lengths, with one of `ends` (the lengths
    themselves) as a bound where they hold a row that long.
    """
    there = [replace(work, columns=columns) for columns in lengths]
    worth: dict[RowConfig, None] = {}
    for one in there:
        table = ranked(candidates_of(program, one, hw), one, hw)
        most = WORTH * min(seconds for seconds, _ in table)
        worth |= dict.fromkeys(config for seconds, config in table if seconds <= most)
    configs = list(bounded(worth, ends or lengths, work, hw))
    return [
        sorted(
            (
                (estimate_rows(one, config, hw).time_us / 1e6, config)
                for config in configs
                if not config.most or config.most >= one.columns
            ),
            key=lambda entry: entry[0],
        )
        for one in there
    ]


def _streamed(program: Program, longest: RowWork, hw: HardwareProfile) -> RowConfig:
    """The best guess for rows longer than those that were asked about."""
    configs = candidates_of(program, longest, hw)
    return ranked([c for c in configs if c.form is Form.LOOP], longest, hw)[0][1]


def _upto(size: Expr, most: int | None) -> Expr | None:
    return None if most is None else size <= constant(most, dtype_of(size))
