"""Row kernels for ranges of a size that is known at the call.

    if n % 8 == 0 and n <= 128:   eight rows of 16 threads a block, each in registers
    elif n % 8 == 0 and n <= 2048:  a row of 128 threads, in registers
    elif n <= 1024: ...           the same for rows that start anywhere in memory
    else:                         a row of 256 threads that stream it

Of rows of symbolic length, that length is compared; where only their number is symbolic, that is.
A symbolic number of rows of symbolic length counts as `work.ASSUMED_EXTENT`.

Does not handle: rows in shared memory (`Form.BULK`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from tvm import tirx
from tvm.ir import Expr, Var

from ...errors import Unsupported
from ..forms import Writer
from ..gpu.vectors import divides, vector_width
from ..program.analysis import analyze
from ..program.expr import constant, dtype_of, linear_form, number, variables
from ..program.program import Program
from ..versions import MOST, Branch, Version, fewest_of, joined, with_size
from .candidates import bounded, candidates_of, ranked, work_of
from .config import Form, RowConfig
from .cost import estimate_rows
from .kernel import emit_row

if TYPE_CHECKING:
    from ...config import HardwareProfile, Policy

COLUMNS = tuple(1 << exponent for exponent in range(5, 17))
ROWS = (4, 16, 64, 256, 1024, 4096, 16384)
WORTH = 1.10
"""What the fastest of a size may take at most to be asked about other sizes, of its time."""
ALIGNED, ANYWHERE, OF_ROWS = 3, 3, 3
"""Most versions for lengths that vectors divide and registers hold, for others, and for numbers of
rows; together as many as `versions.MOST`. A kernel takes nvcc some 0.5 s.
"""


class _Multiple(NamedTuple):
    """Rows whose length is a multiple: their program, over `quotient` in the place of `size`."""

    func: tirx.PrimFunc
    size: Var
    quotient: Var
    of: int


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
            branches = _of_rows(program, hw)
        else:
            branches = _of_lengths(func, program, hw, exact)
    except Unsupported:
        return None  # the one kernel says why
    if len(branches) > 1:
        return joined(branches)
    return branches[0].kernel if branches else None


def _of_rows(program: Program, hw: HardwareProfile) -> list[Branch]:
    """Kernels for ranges of the number of rows."""
    work = work_of(program, hw)
    tables = []
    for rows in ROWS:
        there = replace(work, rows=rows)
        tables.append(ranked(candidates_of(program, there, hw), there, hw))
    found = fewest_of(tables, ROWS, OF_ROWS)
    rows = program.row_count
    return [
        Branch(emit_row(program, version.config, hw), _upto(rows, version.most), version.most)
        for version in found
    ]


def _of_lengths(
    func: tirx.PrimFunc, program: Program, hw: HardwareProfile, exact: bool
) -> list[Branch]:
    """Kernels for ranges of the length of rows: of those that vectors divide, and of all."""
    widest = vector_width(program, tail=True)
    if divides(widest, program.columns, program.analyzer()):
        return list(_branches(program, program.columns, hw, MOST))
    branches: list[Branch] = []
    multiple = _multiple(func, program, widest)
    if multiple is not None:
        aligned = analyze(multiple.func, exact)
        of = constant(multiple.of, dtype_of(multiple.size))
        condition = tirx.EQ(tirx.FloorMod(multiple.size, of), constant(0, dtype_of(multiple.size)))
        sizes = {multiple.quotient: tirx.FloorDiv(multiple.size, of)}
        for branch in _branches(aligned, program.columns, hw, ALIGNED + 1):
            if branch.condition is None:
                break  # as good where rows start anywhere: they are streamed
            both = tirx.And(condition, branch.condition)
            name = f"of{widest}_upto_{branch.name}"
            branches.append(Branch(branch.kernel, both, name, sizes))
    anywhere = list(_branches(program, program.columns, hw, ANYWHERE))
    return [*branches, *anywhere] if anywhere else []


def _multiple(func: tirx.PrimFunc, program: Program, widest: int) -> _Multiple | None:
    """The function where rows of one symbolic size, or a multiple of it, divide into vectors."""
    found = variables(program.columns)
    form = linear_form(program.columns, found) if len(found) == 1 else None
    if form is None:
        return None
    factor, rest = number(form[0][0]), number(form[1])
    if factor is None or rest != 0:
        return None
    of = widest // math.gcd(int(factor), widest)
    quotient = Var(f"{found[0].name}_{of}", found[0].ty)
    size = quotient * constant(of, dtype_of(found[0]))
    return _Multiple(with_size(func, found[0], size), found[0], quotient, of)


def _branches(program: Program, columns: Expr, hw: HardwareProfile, most: int) -> Iterator[Branch]:
    """Kernels for ranges of the length; the last is for any."""
    found = fewest_of(length_tables(program, hw), COLUMNS, most)
    if found and found[-1].config.most:
        # no row beyond those that were asked about fits into registers for sure
        streamed = _streamed(program, hw)
        last = replace(found[-1], most=found[-1].config.most)
        found = [*found[:-1], last, Version(streamed, None)]
    least = 0
    for version in found:
        config = version.config
        if config.most:
            config = replace(config, least=least)
        kernel = emit_row(program, config, hw)
        yield Branch(kernel, _upto(columns, version.most), version.most)
        least = (version.most or 0) + 1


def length_tables(program: Program, hw: HardwareProfile) -> list[list[tuple[float, RowConfig]]]:
    """Predicted seconds of configurations at each of `COLUMNS`, with a bound where they hold a row
    that long.
    """
    work = work_of(program, hw)
    there = [replace(work, columns=columns) for columns in COLUMNS]
    worth: dict[RowConfig, None] = {}
    for one in there:
        table = ranked(candidates_of(program, one, hw), one, hw)
        most = WORTH * min(seconds for seconds, _ in table)
        worth |= dict.fromkeys(config for seconds, config in table if seconds <= most)
    configs = list(bounded(worth, COLUMNS, work, hw))
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


def _streamed(program: Program, hw: HardwareProfile) -> RowConfig:
    """The best guess for rows longer than all of `COLUMNS`."""
    longest = replace(work_of(program, hw), columns=COLUMNS[-1])
    configs = candidates_of(program, longest, hw)
    return ranked([c for c in configs if c.form is Form.LOOP], longest, hw)[0][1]


def _upto(size: Expr, most: int | None) -> Expr | None:
    return None if most is None else size <= constant(most, dtype_of(size))
