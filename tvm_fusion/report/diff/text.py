"""A difference as text of 100 columns: totals with quartiles, kernels that changed, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from textwrap import fill

from ...runtime.timing.timing import TimeReport, Verdict
from ..text import align, clip, format_bytes, format_refusal, format_spread, format_time
from .changes import Difference, KernelChange

COLUMNS = 100
MOST_KERNELS, MOST_REFUSALS = 15, 5
LONGEST = 44  # of a kernel's name
INDENT = " " * 6
WRAP = {"break_long_words": True, "break_on_hyphens": False, "replace_whitespace": False}


def text(found: Difference, full: bool = False) -> str:
    """The difference, of long lists the beginning; all with `full`."""
    parts = [_head(found), _totals(found), _kernels(found, full)]
    for title, refusals in (("refusals that came", found.came), ("refusals that went", found.went)):
        lines = [format_refusal(r) for r in refusals]
        parts.append(_list(f"{title} ({len(lines)})", lines, not full and MOST_REFUSALS))
    lines = "\n\n".join(part for part in parts if part).splitlines()
    return "\n".join(fill(x, COLUMNS, subsequent_indent=INDENT, **WRAP) if x else x for x in lines)


def _head(found: Difference) -> str:
    lines = [f"from {found.before.name} to {found.after.name}"]
    lines += [f"  {name}: {a or 'none'} -> {b or 'none'}" for name, (a, b) in found.made.items()]
    if found.only_before or found.only_after:
        gone, new = len(found.only_before), len(found.only_after)
        lines.append(f"  operators: {found.matched} in both, {gone} gone, {new} new")
    return "\n".join(lines)


def _totals(found: Difference) -> str:
    a, b = found.before, found.after
    rows = [
        ("", "before", "after", "change"),
        ("launches", str(a.launches), str(b.launches), _signed(b.launches - a.launches, str)),
        ("bytes", format_bytes(a.bytes), format_bytes(b.bytes), _share(a.bytes, b.bytes)),
        (
            "predicted",
            format_time(a.predicted_us),
            format_time(b.predicted_us),
            _share(a.predicted_us, b.predicted_us),
        ),
    ]
    if a.time.median_us is not None or b.time.median_us is not None:
        rows.append(("measured", *map(format_spread, (a.time, b.time)), _measured(a.time, b.time)))
    return align(rows, left=1)


def _measured(before: TimeReport, after: TimeReport) -> str:
    verdict = after.verdict(before)
    if verdict is None:
        return "-"
    if verdict is Verdict.EVEN:
        return "no difference measured"
    return _share(before.median_us, after.median_us)


def _share(before: float, after: float) -> str:
    if not before:
        return "-"
    change = after / before - 1
    return "same" if abs(change) < 5e-4 else f"{change:+.1%}"


def _signed(number: int, form: Callable[[int], str]) -> str:
    return "same" if not number else f"{'+' if number > 0 else ''}{form(number)}"


def _kernels(found: Difference, full: bool) -> str:
    """Changed kernels, equal changes (of equal layers) in one line."""
    changed, same = found.changed, len(found.kernels) - len(found.changed)
    if not changed:
        slower = [k for k in found.kernels if k.times and _told(k)]
        said = f"the same {same} kernels"
        rows = [f"  {_name(k.before)}: {_told(k)}" for k in slower[:MOST_KERNELS]]
        return "\n".join([said, *rows])
    counts: dict[tuple, list[KernelChange]] = {}
    for change in changed:
        counts.setdefault(_kind(change), []).append(change)
    lines = [_line(many) for many in counts.values()]
    return _list(f"kernels that differ ({same} do not)", lines, not full and MOST_KERNELS)


def _kind(change: KernelChange) -> tuple:
    """What changes of equal layers have in common."""
    sides = [
        tuple((re.sub(r"\d+", "", k.label), k.kernel_class) for k in side)
        for side in (change.before, change.after)
    ]
    return change.change, *sides, tuple(round(us, 1) for us in change.predicted_us)


def _line(changes: Sequence[KernelChange]) -> str:
    change = changes[0]
    times = f" x{len(changes)}" if len(changes) > 1 else ""
    sides = [_name(side) for side in (change.before, change.after) if side]
    if len(sides) == 2 and len(change.before) == len(change.after) == 1:
        classes = [side[0].kernel_class for side in (change.before, change.after)]
        where = f"{clip(change.after[0].label, LONGEST)} ({' -> '.join(dict.fromkeys(classes))})"
    else:
        where = " -> ".join(sides)
    return f"{change.change.value}{times}: {_told(change) or _predicted(change)}: {where}"


def _predicted(change: KernelChange) -> str:
    before, after = change.predicted_us
    if not change.before or not change.after:
        return f"{format_time(before or after)} predicted"
    return f"{format_time(before)} -> {format_time(after)} predicted"


def _told(change: KernelChange) -> str:
    """What was measured, where that is known of all kernels."""
    if change.times is None:
        return ""
    before, after = change.times
    said = _measured(before, after)
    return f"{format_time(before.median_us)} -> {format_time(after.median_us)}, {said}"


def _name(kernels: Iterable) -> str:
    kernels = list(kernels)
    shown = [f"{clip(k.label, LONGEST)} ({k.kernel_class})" for k in kernels[:3]]
    more = f" and {len(kernels) - 3} more" if len(kernels) > 3 else ""
    return " + ".join(shown) + more


def _list(title: str, lines: Sequence[str], most: int | bool) -> str:
    if not lines:
        return ""
    shown = lines[:most] if most else lines
    hidden = len(lines) - len(shown)
    more = [f"  and {hidden} more; --full has them all"] if hidden else []
    return "\n".join([f"{title}:", *(f"  {line}" for line in shown), *more])
