"""Lines of MetaSchedule's files that the guard does not know, such as those of a stock tuner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .files import GUARD
from .folder_state import Findings, State
from .guard import Entry, Place
from .lines import RECORDS, WORKLOADS, RecordLine
from .records import choice_of, trial_of
from .sandbox import CannotJudge, Suspect, Verdict, judge
from .workload_lines import identity


@dataclass(frozen=True, slots=True)
class Stray:
    """A record that the guard does not know; `key` is the workload of the line it names."""

    number: int
    raw: bytes
    line: RecordLine
    key: str | None


@dataclass(slots=True)
class Reading:
    """The files of a folder as far as they are read.

    Attributes
    ----------
    state : State
    findings : Findings
    places : dict
        What the guard says of workload lines, by digest.
    positions : list
        Keys by the line of the workload file; None where a line is damaged or in doubt.
    unknown : dict
        Number and bytes of the workload lines that the guard does not know, by key.
    moved : set of int
        Numbers of workload lines that are not where the guard has them.
    strays : list of Stray
    """

    state: State
    findings: Findings
    places: dict[str, Place] = field(default_factory=dict)
    positions: list[str | None] = field(default_factory=list)
    unknown: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    moved: set[int] = field(default_factory=set)
    strays: list[Stray] = field(default_factory=list)


def take_strays(reading: Reading, missing: Sequence[Entry], day: str) -> None:
    """Take over the unknown workloads and records that TVM loads and replays; reject the others.

    Parameters
    ----------
    reading : Reading
    missing : sequence of Entry
        Trials of the guard without a record: a stray of the same choice is what is left of it.
    day : str
        The date of the trials.
    """
    sound = _sound(reading, missing)
    keys = dict.fromkeys([*reading.unknown, *(key for stray in sound if (key := stray.key))])
    of_key = {key: [stray for stray in sound if stray.key == key] for key in keys}
    suspects = [
        Suspect(reading.state.workloads[key], tuple(s.line.payload for s in strays))
        for key, strays in of_key.items()
    ]
    if not suspects:
        return
    try:
        verdicts = judge(suspects)
    except CannotJudge as error:
        reading.findings.block(GUARD, f"some lines of the other files are not in it, and {error}")
        for key in reading.unknown:
            del reading.state.workloads[key]
        return
    taken = [
        _take(key, strays, verdict, reading, day)
        for (key, strays), verdict in zip(of_key.items(), verdicts, strict=True)
    ]
    for file, count in zip((WORKLOADS, RECORDS), map(sum, zip(*taken, strict=True)), strict=True):
        if count:
            why = f"{count} lines are not in {GUARD}, and TVM takes them"
            reading.findings.repair(file, why, "taken over")


def _sound(reading: Reading, missing: Sequence[Entry]) -> list[Stray]:
    """The strays that nothing here speaks against."""
    damaged = {(entry.workload, entry.trial.kind, entry.trial.text) for entry in missing}
    state, kept, seen = reading.state, [], set()
    for stray in reading.strays:
        target = stray.line.payload[2]
        if stray.key is None:
            why = f"of line {stray.line.index + 1} of the workloads, which is damaged or not there"
        elif state.target is not None and identity(target) != identity(state.target):
            why = "of another target"
        elif stray.line.index in reading.moved:
            why = f"not in {GUARD}, and the workload's line is not where it was written"
        elif (stray.key, *choice_of(stray.line.payload)) in damaged:
            why = f"not as {GUARD} has it"
        elif (stray.key, stray.line.digest) in seen:
            why = "the record is there twice"
        else:
            seen.add((stray.key, stray.line.digest))
            state.target = state.target or target
            kept.append(stray)
            continue
        reading.findings.reject(RECORDS, stray.number, stray.raw, why)
    return kept


def _take(
    key: str, strays: Sequence[Stray], verdict: Verdict, reading: Reading, day: str
) -> tuple[int, int]:
    """Of one workload: how many lines of workloads and of records are taken over."""
    state, findings = reading.state, reading.findings
    number, raw = reading.unknown.get(key, (None, b""))
    if number is not None and verdict.workload is not None:
        findings.reject(WORKLOADS, number, raw, verdict.workload)
        del state.workloads[key]
    for stray, why in zip(strays, verdict.payloads, strict=True):
        if why is not None:
            findings.reject(RECORDS, stray.number, stray.raw, why)
            continue
        trial = trial_of(stray.line.payload, day)
        state.entries.append(Entry(key, trial, stray.line.digest))
        state.payloads[stray.line.digest] = stray.line.text
    workloads = int(number is not None and verdict.workload is None)
    return workloads, sum(why is None for why in verdict.payloads)
