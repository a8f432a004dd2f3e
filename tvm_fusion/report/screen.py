"""The first screen: what was saved, how sure that is, what takes most, and what to try next.

At most 40 lines of 100 columns, whatever the model; `text.render` has the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..runtime.timing.times import FUSED, TimeReport, Verdict
from .facts import Facts, GroupReport
from .text import align, clip, format_time, render, summary_lines

COLUMNS, LINES = 100, 40
TOP = 3  # groups
LONGEST = 30  # of the name of a group, and of what it computes
NAMES = {"tvm": "TVM's default pipeline", "torch": "torch eager"}


@dataclass(frozen=True, slots=True)
class Report(Facts):
    """What was fused, why, what it saved, and how right it is; attributes as of `Facts`."""

    def __str__(self) -> str:
        return screen(self)

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
    """A row for each compiler, and the verdict."""
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
    return "\n".join([align(rows, left=1), *_verdict(report.times)])


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
    """The groups that take most: by the clock where they ran, else as predicted."""
    if not report.groups:
        return ""
    measured = all(group.measured_us is not None for group in report.groups)
    total = sum(map(_time_us, report.groups))
    kind = "measured" if measured else "predicted"
    rows = [("what takes most", "class", "computes", kind, "of all")]
    for group in sorted(report.groups, key=_time_us, reverse=True)[:TOP]:
        share = f"{_time_us(group) / total:.0%}" if total else "-"
        computes = clip(", ".join(group.composites or group.ops), LONGEST)
        written = "unfused" if group.fallback else group.kernel_class
        name = f"  {clip(group.name, LONGEST)}"
        rows.append((name, written, computes, format_time(_time_us(group)), share))
    return align(rows, left=3)


def _time_us(group: GroupReport) -> float:
    return group.predicted_us if group.measured_us is None else group.measured_us


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
