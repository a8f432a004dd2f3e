"""Why two operations are, or are not, computed in one kernel."""

from dataclasses import replace
from itertools import permutations

from ..config.toml import nearest
from ..errors import InputError
from .facts import GroupReport, RefusalReport
from .screen import FunctionReports, Report
from .text import format_refusal, format_terms, format_time


def why(report: Report | FunctionReports, pair: str) -> str:
    """Return the reasons about a pair, one a line; of several functions, for each that has both.

    Parameters
    ----------
    pair : str
        Two names of operations, groups or composites with a comma between them.

    Raises
    ------
    InputError
        `pair` is not two names, or the report knows no such name.
    """
    if isinstance(report, FunctionReports):
        known = restrict(report, pair)
        return "\n".join(f"function {n}: {why(report[n], pair)}" for n in known)
    first, second = _names(report, pair)
    together = [g for g in report.groups if first in _members(g) and second in _members(g)]
    lines = [_together(group) for group in together]
    lines += [format_refusal(refusal) for refusal in _refusals_of(report, first, second)]
    if not lines:
        lines = [f"{first} and {second} are in different kernels and were no candidate for fusion"]
    return "\n".join(lines)


def _together(group: GroupReport) -> str:
    said = [f"one kernel computes both: {group.name} ({group.kernel_class})"]
    if group.predicted_us:
        one, apart = format_time(group.predicted_us), format_time(group.unfused_predicted_us)
        said.append(f"predicted {one}, its operators one by one {apart}")
    if group.evidence is not None:
        low, high = group.evidence["low"], group.evidence["high"]
        kind = group.evidence["kind"]
        said.append(f"by {kind} {low:.2f} to {high:.2f} of the time apart")
    if group.terms:
        said.append(format_terms(group.terms))
    return "; ".join(said)


def restrict(report: Report | FunctionReports, pair: str) -> Report | FunctionReports:
    """Return the report with only those groups and refusals that concern a pair; of several
    functions, those that have both.
    """
    if isinstance(report, FunctionReports):
        return _restricted_functions(report, pair)
    first, second = _names(report, pair)
    groups = [g for g in report.groups if _members(g) & {first, second}]
    return replace(
        report, groups=tuple(groups), refusals=tuple(_refusals_of(report, first, second))
    )


def _restricted_functions(reports: FunctionReports, pair: str) -> FunctionReports:
    found: dict[str, Report] = {}
    unknown: InputError | None = None
    for name, report in reports.items():
        try:
            found[name] = restrict(report, pair)
        except InputError as error:
            unknown = unknown or error
    if unknown is not None and not found:
        raise unknown
    return FunctionReports(found)


def _names(report: Report, pair: str) -> tuple[str, str]:
    names = [name.strip() for name in pair.split(",")]
    if len(names) != 2 or not all(names):
        raise InputError(f"--why takes two names with a comma between them, got {pair!r}")
    known = {name for group in report.groups for name in _members(group)}
    known |= {end for refusal in report.refusals for place in refusal.where for end in _ends(place)}
    for name in names:
        if name not in known:
            hint = nearest(name, sorted(known))
            raise InputError(f"--why: no operation {name!r} in this model{hint}")
    return names[0], names[1]


def _refusals_of(report: Report, first: str, second: str) -> list[RefusalReport]:
    """Refusals that keep the two apart, each meant by its own name or by that of its group."""
    first_names, second_names = _aliases(report, first), _aliases(report, second)
    return [
        refusal
        for refusal in report.refusals
        if any(
            first_names & _ends(place) and second_names & _ends(other)
            for place, other in permutations(refusal.where, 2)
        )
    ]


def _aliases(report: Report, name: str) -> set[str]:
    """The name, its groups and, if it names a group or a composite, the operations in it."""
    names = {name}
    for group in report.groups:
        if name in group.ops:
            names |= {group.name, f"{group.ops[0]}..{group.ops[-1]}"}
        elif name in _members(group):
            names |= {group.name, *group.ops}
    return names


def _ends(place: str) -> set[str]:
    """A place of a refusal, an operation or "first..last" of a group, and the operations in it."""
    return {place, *place.split("..")}


def _members(group: GroupReport) -> set[str]:
    return {group.name, *group.ops, *group.composites}
