"""Column kernels for ranges of a number of reduced elements that is known at the call.

    if n <= 8:      blocks of 8 walkers
    elif n <= 512:  blocks of 32 walkers, 4 steps at a time
    else:           the blocks of a cluster share the columns

Does not handle: columns in registers; ranges of the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from tvm import tirx

from ...errors import Unsupported
from ...ir.extents import bounds_within, known_sizes
from .. import forms
from ..program.analysis import analyze
from ..program.expr import constant, dtype_of
from ..program.program import Program
from ..row.exchange import is_arg
from ..versions import WORTH, Branch, fewest_of, joined, read_at
from .config import ColumnConfig, Form
from .estimate import ASSUMED_ROWS, ColumnEstimate, ColumnWork
from .kernel import emit_column
from .rank import column_ranked, column_work_of, possible, small_config

if TYPE_CHECKING:
    from ...config import HardwareProfile, Policy

COLUMNS = (8, 64, 512, 2048, 8192, 32768)
MOST = 4
"""Versions: a kernel takes nvcc some 0.5 s."""
CLUSTERS = (1, 2, 4, 8)


def write_column_versions(
    writer: forms.Writer, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy
) -> tirx.PrimFunc | None:
    """The kernels of a fused PrimFunc for ranges of a symbolic number of columns, or one that is as
    good at all; None where that number is known.
    """
    program = writer.read(func, policy.rounding == "exact")
    if isinstance(program.columns, int) or not program.phases:
        return None
    known = known_sizes(func)
    try:
        work = column_work_of(program)
        rows = tuple(
            e if isinstance(e, int) else bounds_within(e, known).nearest(ASSUMED_ROWS)
            for e in program.rows
        )
        sizes = read_at(COLUMNS, bounds_within(program.columns, known))
        tables = _tables(program, replace(work, rows=rows), sizes, hw)
        found = fewest_of(tables, sizes, MOST)
        branches = []
        for version in found:
            most = version.most
            end = most and program.columns <= constant(most, dtype_of(program.columns))
            branches.append(Branch(emit_column(program, version.config, hw), end, most))
    except Unsupported:
        return None  # the one kernel says why
    return joined(branches, func) if branches else None


def _tables(
    program: Program, work: ColumnWork, sizes: list[int], hw: HardwareProfile
) -> list[forms.Ranked]:
    """Predicted seconds of configurations at each of some numbers of columns."""
    there = [replace(work, columns=columns) for columns in sizes]
    worth: dict[ColumnConfig, None] = {}
    for one in there:
        table = [(ColumnEstimate(one, c, hw).seconds, c) for c in _configs(program, one, hw)]
        least = min((seconds for seconds, _ in table), default=math.inf)
        if math.isinf(least):
            worth |= {small_config(one, hw): None}
        else:
            worth |= dict.fromkeys(c for seconds, c in table if seconds <= WORTH * least)
    return [
        sorted(((_seconds(one, c, hw), c) for c in worth), key=lambda entry: entry[0])
        for one in there
    ]


def _configs(program: Program, work: ColumnWork, hw: HardwareProfile) -> Iterator[ColumnConfig]:
    alike = all(r.dtype == "float32" and not is_arg(r) for r in program.reductions)
    clusters = CLUSTERS if hw.has_clusters and alike else CLUSTERS[:1]
    for config in possible(work, hw):
        if config.form is Form.LOOP:
            for cluster in clusters if config.lanes else CLUSTERS[:1]:
                yield replace(config, cluster=cluster)


def _seconds(work: ColumnWork, config: ColumnConfig, hw: HardwareProfile) -> float:
    """The estimate, also where a thread has fewer vectors than it could load at once."""
    turns = ColumnEstimate(work, config, hw).turns()
    return ColumnEstimate(
        work, replace(config, unroll=max(2, min(config.unroll, turns))), hw
    ).seconds


WRITER = forms.Writer(
    "reductions of columns",
    analyze,
    (
        forms.Form(
            "column",
            ColumnConfig,
            column_ranked,
            lambda program, hw, config: emit_column(program, config, hw),
        ),
    ),
    write_column_versions,
)
