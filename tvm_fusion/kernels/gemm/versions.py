"""Several kernels of a product whose rows are known at the call, each for a range of sizes.

Of rows the cost model is read at both ends of ranges between `ROWS`, and those versions are taken,
at most `MOST`, that lose least there against the fastest for the size. A kernel of the skinny form
is one for a number of rows, and serves fewer (`versions.for_fewer`); others know the rows of their
range. Of other sizes the model is read at `SIZES`; what a form leaves out where sizes are symbolic
is not among them.

Does not handle: several symbolic sizes in one launch that do not make its rows together.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...config import HardwareProfile, Policy
from ...errors import Unsupported
from ...ir.extents import Bounds, bounds_within, known_sizes, sizes_of
from ..contraction.model import Contraction
from ..forms import Writer
from ..gpu.product_frame import ceil_div
from ..program.expr import constant, dtype_of, number, rebuild
from ..program.extents import equal_sizes, with_values
from ..program.program import Extent
from ..versions import (
    LOSS,
    MOST,
    Branch,
    Multiple,
    Size,
    Version,
    for_fewer,
    is_empty,
    joined,
    kind_of,
    known_size,
    read_at,
    tables_by_size,
    versions_of,
)
from .hopper.config import HopperConfig
from .skinny.config import SkinnyConfig

__all__ = ["MOST", "ROWS", "SIZES", "Version", "versions_of", "write_versions"]

SIZES = (16, 64, 128, 256, 512, 1024, 4096)
ROWS = (1, 16, 64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 16384, 65536)
"""The most rows of ranges that a version may be for."""
BOX = 64  # rows of the lowest tiles
IDLE = 0.25
"""Share of the time that 64 rows behind the last cost where the TMA asks for them, beyond what the
cost model says: 129 rows of 2048 to 8192 with GELU take 23.2 us in tiles of 128 rows and 16.9 in
tiles of 64, predicted 15.6 and 15.2 (H200, 2026-11-28)."""
ONE_MORE = 0.02
"""What a version more has to save of the times of all ranges together, as a share of one."""
ONE_ROW = 8.0
"""What one row counts as, beside a range: models write a token at a time."""
LOST = 4.0
"""How often a loss beyond `LOSS` counts."""
THIN, UNFILLED, ALONG = BOX, 0.5, 0.3
"""Of at most so many rows, what tiles that leave multiprocessors idle take more than the cost model
says, for a device without any; and columns that lanes of the CUDA cores read side by side. 1 and 7
rows of 2048 to 8192 with GELU: 64 tiles of 64 x 128 take 15.6 us, 128 of 64 x 64 11.6, lanes 14.5,
predicted 11.0, 10.4 and 10.1 (H200, 2026-11-28)."""
NEAR = 1.3
"""Configurations that take longer than so many times the fastest, in all ranges, are left out."""


def write_versions(
    writer: Writer, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy
) -> tirx.PrimFunc | None:
    """The kernels of a fused PrimFunc for ranges of its one symbolic size, or of its rows where
    several sizes make them, or the one kernel within its bounds; None where it has none, or others,
    and where one kernel is as good.
    """
    exact = policy.rounding == "exact"
    size = known_size(func, passed=True)
    if size is None and len(sizes_of(func)) > 1:
        size = _rows_of_several(func, writer.read(func, exact))
    if size is None:
        return None
    bounds, whole = size.bounds, None
    if bounds.multiple > 1 and _reads_symbolic_rows(func):
        whole = Multiple.made(func, *size.vars, bounds.multiple)
    problem = writer.read(func if whole is None else whole.func, exact)
    if problem.is_static:
        return (
            None
            if bounds == Bounds()
            else joined([Branch(writer.emit(problem, hw, policy), None, "beyond")], func)
        )
    if whole is None and _has_symbolic_rows_only(problem):
        return _by_rows(writer, func, size, problem, hw, policy)
    tables = tables_by_size(writer, func, size, problem, read_at(SIZES, bounds), hw, policy)
    found = versions_of(list(tables.values()), list(tables))
    if not found and whole is not None:
        found = [Version(None, None)]  # the best guess
    if len(found) < (2 if bounds == Bounds() else 1):
        return None
    sizes = {} if whole is None else whole.sizes
    branches = []
    try:
        for version in found:
            kernel = writer.emit(problem, hw, policy, version.config)
            branches.append(Branch(kernel, size.upto(version.most), version.most, sizes))
    except Unsupported:
        return None  # the one kernel is chosen among those that can be written
    return joined(branches, func)


# ---- rows


def _has_symbolic_rows_only(problem: Contraction) -> bool:
    """Whether all segments have the same rows, their number is symbolic, and nothing else is."""
    extents = [extent for s in problem.segments for extent in (s.B, s.N)]
    extents += [product.K for product in problem.products]
    static = all(isinstance(extent, int) for extent in extents)
    return static and problem.uniform and not isinstance(problem.M, int)


@dataclass(frozen=True, slots=True)
class Point:
    """Predicted seconds and configurations, by kind, of a number of rows; the fastest of all."""

    rows: int
    times: dict[Any, tuple[float, Any]]
    best: tuple[float, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """A range of sizes, and what is predicted at both ends."""

    least: int
    most: int
    first: Point
    last: Point


@dataclass(frozen=True, slots=True)
class Way:
    """A kind of configuration as a kernel: one of the skinny form is for `most` rows, others for
    any.
    """

    kind: Any
    most: int | None = None


def _by_rows(
    writer: Writer,
    func: tirx.PrimFunc,
    size: Size,
    problem: Contraction,
    hw: HardwareProfile,
    policy: Policy,
) -> tirx.PrimFunc | None:
    """The kernels for ranges of rows; configurations that cannot be written are left out."""
    rows = Rows(size, problem.M)
    spans = list(_spans(writer, func, size, rows, hw, policy))
    left_out: set[Any] = set()
    if not _rows_are_alike(size, problem):
        kinds = (kind for span in spans for kind in (*span.first.times, *span.last.times))
        left_out |= {kind for kind in kinds if isinstance(kind, SkinnyConfig)}
    while spans:
        chosen = least_loss(spans, left_out)
        if len(set(chosen)) < (2 if size.bounds == Bounds() else 1):
            return None
        branches: list[Branch] = []
        for way in dict.fromkeys((*(w for w in chosen if w != chosen[-1]), chosen[-1])):
            served = [span for span, its in zip(spans, chosen, strict=True) if its == way]
            last = served[-1]
            config = way.kind if way.most is not None else last.last.times[way.kind][1]
            most = last.most if way != chosen[-1] else size.bounds.most
            of_range = Bounds(rows.of(served[0].least), most and rows.of(most))
            try:
                if way.most is None:
                    kernel = writer.emit(replace(problem, rows=of_range), hw, policy, config)
                else:
                    kernel = _thin(writer, func, size, problem, last.most, config, hw, policy)
            except Unsupported:
                left_out.add(way.kind)
                break
            if way == chosen[-1]:
                branches.append(Branch(kernel, None, "beyond"))
                return joined(branches, func)
            name, condition = _ranges(size, spans, [its == way for its in chosen])
            branches.append(Branch(kernel, condition, name))
    return None


def _ranges(size: Size, spans: Sequence[Span], served: Sequence[bool]) -> tuple[int | str, Expr]:
    """The name of some ranges, and the condition that a size is in one of them."""
    names: list[str] = []
    condition, least = None, None
    for place, span in enumerate(spans):
        if served[place] and least is None:
            least = span.least if place else 0
        if least is None or (place + 1 < len(spans) and served[place + 1]) or not served[place]:
            continue
        inside = size.upto(span.most)
        if least:
            inside = tirx.And(size.extent >= constant(least, dtype_of(size.extent)), inside)
        names.append(f"{least}_to_{span.most}" if names else f"upto_{span.most}")
        condition = inside if condition is None else tirx.Or(condition, inside)
        last, least = span.most, None
    return last if len(names) == 1 else "_and_".join(names), condition


def _thin(
    writer: Writer,
    func: tirx.PrimFunc,
    size: Size,
    problem: Contraction,
    most: int,
    config: SkinnyConfig,
    hw: HardwareProfile,
    policy: Policy,
) -> tirx.PrimFunc:
    """The kernel of the skinny form for a size, as one for any up to that."""
    known = writer.read(size.known(func, most), policy.rounding == "exact")
    outputs = {output.param for s in known.segments for output in s.outputs}
    kernel = for_fewer(writer.emit(known, hw, policy, config), func, problem.M, outputs)
    if kernel is None:
        raise Unsupported("few rows in parameters with other symbolic extents")
    return kernel


def _rows_are_alike(size: Size, problem: Contraction) -> bool:
    """Whether one symbolic size makes the rows, and nothing else is computed of it."""
    first, *others = size.vars
    return not others and not any(_mentions(expr, first) for expr in _expressions(problem))


def _expressions(problem: Contraction) -> Iterator[Expr]:
    """All that a contraction computes, and where it reads and stores."""
    for segment in problem.segments:
        for operand in (o for p in segment.products for o in (p.a, p.b)):
            yield from (operand.value, *(binding.value for binding in operand.bindings))
        yield from (binding.value for binding in segment.bindings)
        for output in segment.outputs:
            yield from (output.value, *output.indices)


def _mentions(expr: Expr, size: Var) -> bool:
    """Whether an expression is made of a size; the shapes of what it loads are not asked."""
    if isinstance(expr, Var):
        return expr.same_as(size)
    if isinstance(expr, TensorLoad):
        return any(_mentions(index, size) for index in expr.indices)
    found: list[bool] = []

    def visit(child: Expr) -> Expr:
        found.append(_mentions(child, size))
        return child

    rebuild(expr, visit)
    return any(found)


@dataclass(frozen=True, slots=True)
class Rows:
    """How many rows there are at a size, which all that makes it but its first factor is 1 for."""

    size: Size
    extent: Extent

    def of(self, size: int) -> int:
        """The rows at a size."""
        first, *others = self.size.vars
        return with_values(self.extent, {first: size, **dict.fromkeys(others, 1)})

    def sizes(self, rows: Sequence[int]) -> list[int]:
        """The largest sizes with at most so many rows, where these are proportional; else as many
        as rows.
        """
        some = self.size.bounds.multiple * ROWS[-1]
        each = self.of(some)
        proportional = self.of(2 * some) == 2 * each
        return [n * some // each if proportional else n for n in rows]


def _spans(
    writer: Writer,
    func: tirx.PrimFunc,
    size: Size,
    rows: Rows,
    hw: HardwareProfile,
    policy: Policy,
) -> Iterator[Span]:
    """The shortest ranges that have a version, with what is predicted of their ends: of the first
    size where it makes as many of the lowest tiles as the last, what is of that.
    """
    exact, bounds = policy.rounding == "exact", size.bounds
    ends = [n for n in read_at(rows.sizes(ROWS), bounds) if not is_empty(size.known(func, n))]

    def point(value: int) -> Point:
        known = writer.read(size.known(func, value), exact)
        times: dict[Any, tuple[float, Any]] = {}
        for seconds, config in writer.ranked(known, hw, policy):
            if seconds is not None:
                more = 1 + _thin_loss(known, config, hw)
                times.setdefault(kind_of(config), (more * seconds, config))
        return Point(rows.of(value), times, min(times.values(), key=lambda entry: entry[0]))

    before = 0
    for end in ends:
        last = first = point(end)
        least = max(before + bounds.multiple, bounds.least, 1)
        low = rows.of(least)
        if before and not bounds.hints:
            same = ceil_div(low, BOX) == ceil_div(last.rows, BOX)
            first = replace(last, rows=low) if same else point(least)
        yield Span(least, end, first, last)
        before = end


def _thin_loss(known: Contraction, config: Any, hw: HardwareProfile) -> float:
    """What a configuration takes more than predicted, as a share, where there are few rows."""
    if not isinstance(known.M, int) or known.M > THIN:
        return 0.0
    if isinstance(config, SkinnyConfig):
        return ALONG if not config.tensor and config.lanes > 1 else 0.0
    if not isinstance(config, HopperConfig):
        return 0.0
    tiles = config.split * sum(s.B * ceil_div(s.N, config.block_n) for s in known.segments)
    return UNFILLED * max(0.0, 1 - tiles / hw.num_sms)


def least_loss(spans: Sequence[Span], left_out: Collection[Any] = ()) -> list[Way]:
    """The way of each range, of which there are `MOST` at most: those that lose little, found one
    after the other, then exchanged for others as long as that gains.
    """
    points = [point for span in spans for point in (span.first, span.last)]
    at = {span.last.rows: span.last for span in spans}
    found: dict[Way, None] = {}
    for point in points:
        for kind, (seconds, _) in point.times.items():
            if seconds <= NEAR * point.best[0] and kind not in left_out:
                thin = isinstance(kind, SkinnyConfig)
                own = [rows for rows in at if kind in at[rows].times] if thin else [None]
                found |= dict.fromkeys(Way(kind, most) for most in own)
    losses = {way: [_loss(span, way, at) for span in spans] for way in found}

    def total(ways: Collection[Way]) -> float:
        each = (min(losses[way][place] for way in ways) for place in range(len(spans)))
        return sum(each) + ONE_MORE * len(ways)

    taken: list[Way] = []
    lost = math.inf
    while losses:
        others = [way for way in losses if way not in taken]
        tried = [[*taken, way] for way in others] if len(taken) < MOST else []
        tried += [[*taken[:i], way, *taken[i + 1 :]] for i in range(len(taken)) for way in others]
        tried += [[*taken[:i], *taken[i + 1 :]] for i in range(len(taken)) if len(taken) > 1]
        if not taken:
            tried = [[way] for way in others]
        best = min(tried, key=total)
        if total(best) >= lost - 1e-9 and taken:
            break
        taken, lost = best, total(best)
    if not taken or math.isinf(lost):
        return []
    return [min(taken, key=lambda way: losses[way][place]) for place in range(len(spans))]


def _loss(span: Span, way: Way, at: Mapping[int, Point]) -> float:
    """What is lost, of one, in a range by a kernel; inf where it does not serve it. Predictions
    are `at` the most rows of ranges.
    """
    lost = 0.0
    for point in (span.first, span.last):
        times = point.times if way.most is None else at[way.most].times
        if way.kind not in times or (way.most is not None and point.rows > way.most):
            return math.inf
        fastest, chosen = point.best
        more = _idle(way.kind, point.rows) - _idle(chosen, point.rows)
        loss = max(1.0, times[way.kind][0] / fastest) * (1 + IDLE * max(0, more) / BOX) - 1
        lost += (loss + (LOST - 1) * max(0.0, loss - (LOSS - 1))) / 2
    return lost * (ONE_ROW if span.last.rows == 1 else 1.0)


def _idle(config: Any, rows: int) -> int:
    """Rows behind the last one that the TMA asks for; none where all rows are one tile."""
    if not isinstance(config, HopperConfig) or rows <= config.block_m:
        return 0
    return ceil_div(rows, config.block_m) * config.block_m - rows


def _rows_of_several(func: tirx.PrimFunc, problem: Contraction) -> Size | None:
    """The product of the symbolic sizes of a function, where its rows are a multiple of it and
    nothing else is symbolic: the tokens of a batch of texts.
    """
    sizes, buffers = sizes_of(func), [p for p in func.params if isinstance(p.ty, tirx.BufferType)]
    others = [extent for s in problem.segments for extent in (s.B, s.N)]
    others += [product.K for product in problem.products]
    if len(buffers) < len(func.params) or not problem.uniform:
        return None
    if any(not isinstance(extent, int) for extent in others) or isinstance(problem.M, int):
        return None
    size = Size(tuple(sizes), Bounds())
    times = number(with_values(problem.M, dict.fromkeys(sizes, 1)))
    if times is None or not equal_sizes(problem.M, size.extent * times):
        return None
    return replace(size, bounds=bounds_within(size.extent, known_sizes(func)))


def _reads_symbolic_rows(func: tirx.PrimFunc) -> bool:
    """Whether vectors of some parameter depend on what divides the size."""
    shapes = (param.ty.shape for param in func.params if isinstance(param.ty, tirx.BufferType))
    return any(len(shape) and not isinstance(shape[-1], tirx.IntImm) for shape in shapes)
