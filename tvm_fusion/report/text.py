"""A report as text for the terminal: plain, or through `rich` where it is installed.

tvm_fusion on nvidia_h200
            unfused     fused    saved
launches         38        13     2.9x
bytes        812 MB    402 MB     2.0x
time         1.58 ms   1.04 ms    1.5x
verify      passed, worst error 4.1e-04

group            class      computes            launches  bytes  predicted  measured  ...
fused_rms_norm   row        add, rms_norm              1  ...
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from ..host.terminal import is_plain
from ..runtime.timing.timing import FUSED, UNFUSED, TimeReport, Verdict
from .facts import Comparison, Facts, GroupReport, RefusalReport, Verification
from .network import common_module, common_pattern

_GROUP_COLUMNS = (
    "group",
    "times",
    "class",
    "computes",
    "launches",
    "bytes",
    "saved",
    "predicted",
    "measured",
    "of apart",
    "limit",
    "registers",
    "spilled",
    "code",
    "error",
)
_LEFT_ALIGNED = 4  # the leading columns that hold words
_WIDEST_CELL = 40
_SHOWN_REFUSALS = 8
_SHOWN_TERMS = 5


def render(report: Facts) -> str:
    """Return the report as plain text."""
    parts = [summary_lines(report), _times(report)]
    if report.groups:
        parts.append(align(_group_table(report), left=_LEFT_ALIGNED))
        parts += [_terms(report), _versions(report), _early(report), _tuned(report)]
        parts += [_spilled(report)]
    parts += [_fallbacks(report), _plain(report), _layouts(report), _refusals(report.refusals)]
    return "\n\n".join(part for part in parts if part)


def show(report: Facts, file: TextIO) -> None:
    """Write the report to `file`, with a ruled table if that is a terminal and `rich` is there."""
    console = _rich_console(file)
    if console is None or not report.groups:
        print(render(report), file=file)
        return
    from rich import box
    from rich.table import Table

    columns, *rows = _group_table(report)
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    for i, column in enumerate(columns):
        words = i < _LEFT_ALIGNED and column != "times"
        table.add_column(column, justify="left" if words else "right", no_wrap=not words)
    for groups, row in zip(with_one_kernel(report.groups), rows, strict=True):
        table.add_row(*row, style="yellow" if groups[0].fallback else None)
    for part in (summary_lines(report), _times(report)):
        console.print(part, markup=False, highlight=False)
    console.print(table)
    layouts, refusals = _layouts(report), _refusals(report.refusals)
    said = (
        _terms(report),
        _versions(report),
        _tuned(report),
        _spilled(report),
        _fallbacks(report),
        _plain(report),
    )
    for part in (*said, layouts, refusals):
        if part:
            console.print(part, markup=False, highlight=False)


def format_bytes(count: float | None) -> str:
    """Return a size in B, kB, MB, GB or TB, or "-" for None."""
    return _scaled(count, 1000, ("B", "kB", "MB", "GB", "TB"))


def format_time(time_us: float | None) -> str:
    """Return a time in us, ms or s, or "-" for None."""
    return _scaled(time_us, 1000, ("us", "ms", "s"))


def format_spread(time: TimeReport) -> str:
    """Return a median with its quartiles, or "-" where there are no samples."""
    if time.median_us is None:
        return "-"
    low, high = format_time(time.low_us), format_time(time.high_us)
    return f"{format_time(time.median_us)} ({low} - {high})"


def format_terms(terms: Mapping[str, float]) -> str:
    """Return the largest terms of a prediction (microseconds, by name) in one line."""
    ordered = sorted(terms.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{name} {format_time(us)}" for name, us in ordered[:_SHOWN_TERMS]]
    return ", ".join(shown + ["..."] * (len(ordered) > _SHOWN_TERMS))


def format_refusal(refusal: RefusalReport) -> str:
    """Return one refusal in one line."""
    numbers = ", ".join(f"{k} = {_short(v)}" for k, v in refusal.numbers.items())
    where = ", ".join(refusal.where)
    said = f"{refusal.code}: {where}: {refusal.why}" + (f" ({numbers})" if numbers else "")
    cost = f"; costs {format_time(refusal.cost_us)}" if refusal.cost_us else ""
    return said + cost + (f"; {refusal.flip}" if refusal.flip else "")


def summary_lines(report: Facts) -> str:
    """Return where it runs, what was saved, and what the check says."""
    rows = [
        ("", "unfused", "fused", "saved"),
        _comparison_row("launches", report.launches, _count),
        _comparison_row("bytes", report.bytes, format_bytes),
        _time_row(report),
    ]
    if report.memory.fused is not None:
        rows.append(_comparison_row("memory", report.memory, format_bytes))
    host = report.plan.get("measured", {}).get("host")
    measured = f" (its rates measured on {host})" if host else ""
    where = f"{report.target}{measured}{_threads(report.threads)}"
    lines = [f"tvm_fusion on {where}", align(rows, left=1)]
    if report.measured_memory_bytes is not None:
        lines.append(
            f"measured  {format_bytes(report.measured_memory_bytes)} of memory at the peak"
        )
    if report.cuda_graph is not None:
        lines.append(f"graph     {report.cuda_graph}{_call_times(report.call_us)}")
    if report.verify is not None:
        outcome = "passed" if report.verify.passed else "FAILED"
        lines.append(f"verify    {outcome}, {_compared(report.verify)}")
    if report.bound is not None:
        least, share = format_time(report.bound.least_us), report.bound.within
        lines.append(f"bound     no plan is predicted below {least}: within {share:.1%} of optimal")
    if report.assumed:
        sizes = ", ".join(f"{name} = {size}" for name, size in report.assumed.items())
        lines.append(f"assumed   {sizes}, for predictions: the extents are symbolic")
    if report.unlearned is not None:
        lines.append(f"model     analytic, the learned correction is not used: {report.unlearned}")
    if rewrites := report.plan.get("rewrites"):
        lines.append(f"rewritten {', '.join(rewrites)}")
    return "\n".join(lines)


def _compared(verify: Verification) -> str:
    """What the check saw of the numbers."""
    if verify.not_finite >= 1:
        return "but no number was compared: all of an output is NaN or infinite, in float64 too"
    said = f"worst error {_short(verify.worst_error)}"
    if verify.kernels:
        said += f" of {verify.kernels} kernels, each by itself"
    if verify.on_examples:
        said += " on the example inputs, as random ones are refused"
    if verify.not_finite:
        said += f"; {verify.not_finite:.2%} of an output is NaN or infinite, in float64 too"
    if verify.source_error is not None:
        said += f"; beside {verify.source} {_short(verify.source_error)}"
    if verify.source_note is not None:
        said += f"; beside {verify.source}: {verify.source_note}"
    return said if verify.source_failure is None else verify.source_failure


def _threads(count: int | None) -> str:
    if count is None:
        return ""
    return f", {count} threads" if count > 1 else ", 1 thread"


def _call_times(pair: Comparison) -> str:
    if pair.ratio is None:
        return ""
    graph, stream = format_time(pair.fused), format_time(pair.unfused)
    return f"; a call takes {graph} on the clock, {stream} launch by launch"


def _time_row(report: Facts) -> tuple[str, ...]:
    """Medians; what they save is said only if the quartiles tell the two apart."""
    name, unfused, fused, saved = _comparison_row("time", report.time_us, format_time)
    first, second = report.times.get(FUSED), report.times.get(UNFUSED)
    if first and second and first.verdict(second) is Verdict.EVEN:
        saved = Verdict.EVEN.value
    return name, unfused, fused, saved


def _comparison_row(
    name: str, pair: Comparison, form: Callable[[float | None], str]
) -> tuple[str, ...]:
    ratio = "" if pair.ratio is None else f"{pair.ratio:.2f}x"
    return (name, form(pair.unfused), form(pair.fused), ratio)


def title(groups: Sequence[GroupReport]) -> str:
    """What groups with the same kernel are called: by the modules of the model ("layers.*.mlp"),
    else by the name of the first.
    """
    places = [common_module(group.modules) for group in groups]
    return common_pattern(places) if all(places) else groups[0].name


def computes(group: GroupReport) -> str:
    """What a group computes in a few words."""
    return group.label.rpartition(": ")[2] or ", ".join(group.composites or group.ops)


def with_one_kernel(groups: Sequence[GroupReport]) -> list[list[GroupReport]]:
    """The groups, those with the same kernel together, in the order of the first of each."""
    found: dict[int, list[GroupReport]] = {}
    for i, group in enumerate(groups):
        found.setdefault(i if group.same_as is None else group.same_as, []).append(group)
    return list(found.values())


def _group_table(report: Facts) -> list[tuple[str, ...]]:
    """Header and one row a kernel, without the columns that are empty in every row."""
    rows = [_group_row(groups) for groups in with_one_kernel(report.groups)]
    columns = zip(_GROUP_COLUMNS, *rows, strict=True)
    return list(zip(*(c for c in columns if set(c[1:]) != {"-"}), strict=True))


def _group_row(groups: Sequence[GroupReport]) -> tuple[str, ...]:
    """The numbers of groups with the same kernel, all together; what is of one kernel, once."""
    group, count = groups[0], len(groups)
    moved = sum(g.bytes_fused for g in groups)
    apart = sum(g.bytes_unfused for g in groups)  # none, where a rewrite made all of it
    saved = Comparison(moved, apart).ratio if apart else None
    errors = [g.error for g in groups if g.error is not None]
    return (
        clip(title(groups)),
        f"x{count}" if count > 1 else "-",
        "unfused" if group.fallback else group.kernel_class,
        clip(", ".join(group.composites or group.ops)),
        str(sum(g.launches for g in groups)),
        format_bytes(moved),
        "-" if saved is None else f"{saved:.1f}x",
        format_time(sum(g.predicted_us for g in groups)),
        _measured(groups),
        _evidence(group.evidence),
        "-" if group.roofline_share is None else f"{group.roofline_share:.0%}",
        _count(group.registers),
        format_bytes(group.spill_bytes) if group.spill_bytes else "-",
        format_bytes(group.code_bytes) if group.code_bytes else "-",
        _short(max(errors)) if errors else "-",
    )


def _measured(groups: Sequence[GroupReport]) -> str:
    """Median and quartiles, where there are samples; the sums of those of several."""
    times = [group.measured for group in groups]
    if None in times:
        return "-"
    low, high = (sum(getattr(t, side) for t in times) for side in ("low_us", "high_us"))
    median = sum(time.median_us for time in times)
    return f"{format_time(median)} ({format_time(low)} - {format_time(high)})"


def _evidence(evidence: Mapping[str, Any] | None) -> str:
    """The group's time as a share of that of its operations apart, and where that is from."""
    if evidence is None:
        return "-"
    kinds = {"model": "at most", "prediction": "about", "measured": "timed"}
    shown = evidence["high"] if evidence["kind"] == "model" else evidence["ratio"]
    return f"{kinds.get(evidence['kind'], evidence['kind'])} {shown:.2f}"


def _terms(report: Facts) -> str:
    """What the prediction of each group is made of, and what it takes to lie in the L2."""
    lines = []
    for groups in with_one_kernel(report.groups):
        group = groups[0]
        if group.terms:
            lines.append(f"  {clip(title(groups))}: {format_terms(group.terms)}")
        if group.assumed_l2:
            names = ", ".join(f"{n} ({format_bytes(b)})" for n, b in group.assumed_l2.items())
            lines.append(f"    from the L2: {names}")
    return "\n".join(["predicted, by term:", *lines]) if lines else ""


def _versions(report: Facts) -> str:
    """Which groups have kernels for ranges of their symbolic size."""
    found = [groups for groups in with_one_kernel(report.groups) if groups[0].versions]
    lines = [f"  {clip(title(groups))}: {', '.join(groups[0].versions)}" for groups in found]
    return "\n".join(["a kernel for each range of the symbolic size:", *lines]) if lines else ""


def _early(report: Facts) -> str:
    """How many launches begin before the kernel in front has ended."""
    count = sum(group.launches for group in report.groups if group.early)
    wait = "begin before the one in front has ended, and wait for it"
    return f"{count} of {report.launches.fused} launches {wait}" if count else ""


def _tuned(report: Facts) -> str:
    """Which kernels tuning chose, and how long they and the untuned ones take by themselves."""
    lines = []
    for group in report.groups:
        said = group.tuned
        if said is None or "instead_of" in said:
            continue
        if "stale" in said:
            outcome = f"untuned, the choice is stale: {said['stale']}"
        elif said["choice"] == "default":
            outcome = f"untuned, {format_time(said['us'])}: no choice is faster"
        else:
            times = f"{format_time(said['us'])}, untuned {format_time(said['untuned_us'])}"
            outcome = f"{said['choice']}: {times}"
        lines.append(f"  {clip(title([group]))}: {outcome}")
    return "\n".join(["tuned, each kernel by itself:", *lines]) if lines else ""


def _spilled(report: Facts) -> str:
    """Which kernels are built in another configuration, since the first one spilled registers."""
    lines = []
    for group in report.groups:
        said = group.tuned
        if said is None or "instead_of" not in said:
            continue
        now, then = (
            f"{format_time(said[us])} with {said[spilled]} bytes a thread spilled"
            for us, spilled in (
                ("predicted_us", "spill_bytes"),
                ("instead_of_us", "instead_of_spill_bytes"),
            )
        )
        lines.append(f"  {clip(title([group]))}: {said['choice']}: {now}, {then} before")
    return "\n".join(["other configurations, as the first spilled:", *lines]) if lines else ""


def _times(report: Facts) -> str:
    """Medians and quartiles of all compilers, what they say of ours, and why some have none."""
    if not report.times:
        return ""
    ours = report.times.get(FUSED, TimeReport())
    rows = [("compiler", "median", "lower", "upper quartile", "samples", "of ours", "ours is")]
    for name, found in report.times.items():
        ratio, verdict = ours.ratio(found), ours.verdict(found)
        rows.append(
            (
                name,
                *map(format_time, (found.median_us, found.low_us, found.high_us)),
                str(found.samples),
                "-" if ratio is None else f"{ratio:.2f}x",
                "-" if verdict is None or name == FUSED else verdict.value,
            )
        )
    failed = [f"  {name}: {t.failure}" for name, t in report.times.items() if t.failure]
    return "\n".join([align(rows, left=1), *failed])


def _fallbacks(report: Facts) -> str:
    by_reason: dict[str, list[str]] = {}
    for group in report.groups:
        if group.fallback:
            by_reason.setdefault(group.fallback, []).append(title([group]))
    lines = [f"  {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    return "\n".join(["run unfused:", *lines]) if lines else ""


def _plain(report: Facts) -> str:
    """Kernels that no rule could schedule, and how they run."""
    lines = [f"  {clip(name)}: {how}" for name, how in report.plain.items()]
    return "\n".join(["slow, for want of a schedule:", *lines]) if lines else ""


def _layouts(report: Facts) -> str:
    """Launches that only change a layout: what each costs, and why no other absorbed it."""
    lines = []
    for change in report.layouts:
        cost = f"{format_time(change.predicted_us)}, {format_bytes(change.bytes)}"
        readers = f", read by {change.readers} launches" if change.readers > 1 else ""
        lines.append(f"  {clip(change.name)}: {cost}{readers}")
        for name in change.reads:
            lines.append(f"    it reads {name}, an input: no kernel before it writes that")
        for name in change.writes:
            lines.append(f"    it writes {name}, a result in this order of axes")
        lines += [f"    {format_refusal(refusal)}" for refusal in change.neighbours]
    return "\n".join(["launches that only change a layout:", *lines]) if lines else ""


def _refusals(refusals: Sequence[RefusalReport]) -> str:
    if not refusals:
        return ""
    counts = Counter(refusal.code for refusal in refusals)
    summary = ", ".join(f"{count} {code}" for code, count in sorted(counts.items()))
    lines = [f"not fused ({summary}):"]
    every = _of_equal_layers(refusals)
    for first, *others in every[:_SHOWN_REFUSALS]:
        costs = [refusal.cost_us or 0.0 for refusal in (first, *others)]
        total = f", {format_time(sum(costs))} in all" if sum(costs) else ""
        times = f"x{len(costs)}{total}: " if others else ""
        lines.append(f"  {times}{format_refusal(first)}")
    hidden = sum(map(len, every[_SHOWN_REFUSALS:]))
    return "\n".join([*lines, f"  and {hidden} more; --json has them all"] if hidden else lines)


def _of_equal_layers(refusals: Sequence[RefusalReport]) -> list[list[RefusalReport]]:
    """Refusals in sets that differ by numbers in names only, those that cost most in all first."""
    found: dict[Any, list[RefusalReport]] = {}
    for refusal in refusals:
        names = [re.sub(r"\d+", "", text) for text in (*refusal.where, refusal.why)]
        numbers = tuple(sorted(refusal.numbers.items()))
        found.setdefault((refusal.code, *names, numbers, refusal.flip), []).append(refusal)
    cost = {key: sum(refusal.cost_us or 0.0 for refusal in many) for key, many in found.items()}
    return [found[key] for key in sorted(found, key=lambda key: -cost[key])]


def align(rows: Sequence[Sequence[str]], left: int) -> str:
    """Pad cells to columns: the first `left` ones to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _scaled(value: float | None, step: int, units: Sequence[str]) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    for unit in units[:-1]:
        # 999.5 would be printed with three digits as 1000.
        if abs(value) < step - 0.5:
            return f"{value:.3g} {unit}"
        value /= step
    return f"{value:.3g} {units[-1]}" if abs(value) < step else f"{value:.0f} {units[-1]}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def clip(text: str, widest: int = _WIDEST_CELL) -> str:
    """Return a text, its end left out if it is long."""
    return text if len(text) <= widest else text[: widest - 3] + "..."


def _rich_console(file: TextIO) -> Any | None:
    if is_plain(file):
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=file)
