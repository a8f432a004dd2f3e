"""The first screen: what was saved, how sure that is, what takes most, and what to try next.

At most 50 lines of 100 columns, whatever the model; `text.render` has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..runtime.timing.timing import FUSED, TimeReport, Verdict
from .facts import FORMAT_VERSION, Facts, GroupReport
from .html.write import write_html
from .text import (
    align,
    clip,
    computes,
    format_time,
    render,
    summary_lines,
    title,
    with_one_kernel,
)

# The reports of a module of several functions, one for each.


@dataclass(frozen=True, slots=True)
class FunctionReports:
    """What was done with each function of a module.

    Attributes
    ----------
    functions : Mapping of str to Report or str
        By function; text after `load`.
    version : int
        Version of the JSON format.
    """

    functions: Mapping[str, Report | str] = field(hash=False)
    version: int = FORMAT_VERSION

    def __getitem__(self, name: str) -> Report | str:
        """The report of a function; raises InputError where there is none of that name."""
        if name not in self.functions:
            known = ", ".join(self.functions)
            raise InputError(f"there is no report of a function {name!r}, but of {known}")
        return self.functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.functions)

    def __len__(self) -> int:
        return len(self.functions)

    def items(self) -> list[tuple[str, Report | str]]:
        """The reports with the names of their functions."""
        return list(self.functions.items())

    def __str__(self) -> str:
        return self._joined(str)

    def write_html(self, path: str | Path) -> None:
        """Write one page for a browser, which needs nothing else; raises InputError where the file
        cannot be written.
        """
        write_html(self.to_json(sources=True), path)

    def full(self) -> str:
        """Return everything as text; `str` gives one screen of each."""
        return self._joined(lambda found: found if isinstance(found, str) else found.full())

    def to_json(self, sources: bool = False) -> dict[str, Any]:
        """Return the reports as a JSON-able dict: `version`, and `functions` by name (see
        `Report.to_json`; text of a loaded module stays text).
        """
        functions = {
            name: found if isinstance(found, str) else found and found.to_json(sources)
            for name, found in self.functions.items()
        }
        return {"version": self.version, "functions": functions}

    def _joined(self, text: Callable[[Report | str], str]) -> str:
        parts = (f"function {name}\n{text(found)}" for name, found in self.functions.items())
        return "\n\n".join(part.rstrip("\n") for part in parts)


COLUMNS, LINES = 100, 50
TOP = 10  # groups
LONGEST = 22  # of the name of a group, and of what it computes
NAMES = {"tvm": "TVM's default pipeline", "torch": "torch eager"}


@dataclass(frozen=True, slots=True)
class Report(Facts):
    """What was fused, why, what it saved, and how right it is; attributes as of `Facts`."""

    def __str__(self) -> str:
        return screen(self)

    def write_html(self, path: str | Path) -> None:
        """Write one page for a browser, which needs nothing else; raises InputError where the file
        cannot be written.
        """
        write_html(self.to_json(sources=True), path)

    def full(self) -> str:
        """Return everything as text; `str` gives one screen of it."""
        return render(self)


def screen(report: Facts, model: str | None = None) -> str:
    """Return the short report.

    Parameters
    ----------
    model : str, optional
        What stands for the model on the command line; the hints are commands then, else calls.
    """
    parts = [
        summary_lines(report),
        _times(report),
        _top(report),
        "\n".join(["try next", *(f"  {line}" for line in _hints(report, model))]),
    ]
    lines = "\n\n".join(part for part in parts if part).splitlines()
    return "\n".join(
        line if len(line) <= COLUMNS else line[: COLUMNS - 3] + "..." for line in lines
    )


def _times(report: Facts) -> str:
    """A row for each compiler, why some have no time, and the verdict."""
    if not report.times:
        return ""
    ours = report.times.get(FUSED, TimeReport())
    rows = [("time of a call", "median", "quartiles", "of fused", "fused is")]
    for name, found in report.times.items():
        quartiles = f"{format_time(found.low_us)} - {format_time(found.high_us)}"
        ratio = "" if found is ours or not (r := ours.ratio(found)) else f"{r:.2f}x"
        verdict = None if found is ours else ours.verdict(found)
        rows.append(
            (
                f"  {clip(NAMES.get(name, name), LONGEST)}",
                format_time(found.median_us),
                "-" if found.median_us is None else quartiles,
                ratio,
                verdict.value if verdict else "",
            )
        )
    failed = [
        f"  {NAMES.get(n, n)} has no time: {t.failure}"
        for n, t in report.times.items()
        if t.failure
    ]
    return "\n".join([align(rows, left=1), *failed, *_verdict(report.times)])


def _verdict(times: dict[str, TimeReport]) -> list[str]:
    """One sentence that follows from the quartiles."""
    ours = times.get(FUSED)
    if ours is None or ours.median_us is None:
        return []
    said = []
    for verdict, words in (
        (Verdict.FASTER, "faster than"),
        (Verdict.EVEN, "no difference to"),
        (Verdict.SLOWER, "slower than"),
    ):
        found = {n: t for n, t in times.items() if n != FUSED and ours.verdict(t) is verdict}
        if found:
            said.append(f"{words} {', '.join(NAMES.get(name, name) for name in found)}")
    return [f"verdict: {'; '.join(said)}"] if said else []


def _top(report: Facts) -> str:
    """The groups that take most, those with the same kernel in one row: by the clock where all ran,
    else as predicted.
    """
    if not report.groups:
        return ""
    measured = all(group.measured is not None for group in report.groups)
    total = sum(group.time_us for group in report.groups)
    taken = sorted(
        with_one_kernel(report.groups), key=lambda groups: -sum(g.time_us for g in groups)
    )
    rows = [_top_row(groups, total, measured) for groups in taken[:TOP]]
    kind = ("measured", "quartiles") if measured else ("predicted", "")
    lines = [align([("what takes most", "", "class", "computes", *kind, "of all"), *rows], left=4)]
    if len(taken) > TOP:
        rest = sum(group.time_us for groups in taken[TOP:] for group in groups)
        lines.append(f"  {len(taken) - TOP} other kernels: {rest / total:.0%}" if total else "")
    if measured:
        runs = min(group.measured.samples for group in report.groups)
        lines.append(f"  medians of {runs} calls, each launch by itself")
    return "\n".join(lines)


def _top_row(groups: Sequence[GroupReport], total: float, measured: bool) -> tuple[str, ...]:
    """Groups with the same kernel: the sums of their medians and of their quartiles."""
    first, time_us = groups[0], sum(group.time_us for group in groups)
    quartiles = ""
    if measured:
        low = sum(group.measured.low_us for group in groups)
        high = sum(group.measured.high_us for group in groups)
        quartiles = f"{format_time(low)} - {format_time(high)}"
    return (
        f"  {clip(title(groups), LONGEST)}",
        f"x{len(groups)}" if len(groups) > 1 else "",
        "unfused" if first.fallback else first.kernel_class,
        clip(computes(first), LONGEST),
        format_time(time_us),
        quartiles,
        f"{time_us / total:.0%}" if total else "-",
    )


def _hints(report: Facts, model: str | None) -> Sequence[str]:
    doubts = sum(refusal.code == "undecided" for refusal in report.refusals)
    measure = f"times the {doubts} fusions in doubt" if doubts else "times what is in doubt"
    if doubts == 1:
        measure = "times the fusion in doubt"
    if model is None:
        rows = [
            ("print(report.full())", "all groups, predictions and refusals"),
            ("compile(..., measure=True)", measure),
            ("tvm_fusion.tune(...)", "measures other kernels, and keeps the faster ones"),
        ]
    else:
        command = "python -m tvm_fusion"
        rows = [
            (f"{command} compile {model} --full", "all groups, predictions, refusals"),
            (f"{command} compile {model} --measure", measure),
            (f"{command} tune {model} --work-dir tuned", "measures other kernels"),
        ]
    return align(rows, left=2).splitlines()
