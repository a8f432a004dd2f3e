"""The three files of a folder against each other: what is sound, what is repaired, what goes.

    guard.jsonl      lines with a right checksum count
    workloads        lines whose digest is in the guard count; others are tried in a sandbox
    records          lines whose digest is in the guard go to the workload that the guard names;
                     others are tried in a sandbox (`strays`); missing ones are written again

No line without its digest in the guard reaches TVM in this process. Digests of records leave out
the number of the workload's line, so that a record finds its workload whatever the order of lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InputError
from .files import RawFile
from .folder_state import Findings, State
from .guard import GUARD, DeviceLine, Entry, Place, parse_guard
from .lines import (
    RECORDS,
    WORKLOADS,
    BadLine,
    WorkloadLine,
    check_module,
    parse_record,
    parse_workload,
)
from .strays import Reading, Stray, take_strays
from .workload_lines import identity


def reconcile(
    files: Mapping[str, RawFile], device: str | None, target: dict[str, Any] | None, day: str
) -> tuple[State, Findings]:
    """Read the files of a folder.

    Parameters
    ----------
    files : mapping
        By name: `GUARD`, `WORKLOADS`, `RECORDS`.
    device, target
        What the folder is opened for; None takes what its guard says.
    day : str
        The date of trials that only MetaSchedule's files tell of.

    Raises
    ------
    InputError
        The folder is of another device or target.
    """
    reading = Reading(State(device, target), Findings())
    _check_files(files, reading.findings)
    _read_guard(files[GUARD].lines, reading)
    _read_workloads(files[WORKLOADS].lines, reading)
    missing = _read_records(files[RECORDS].lines, reading)
    take_strays(reading, missing, day)
    _report_missing(reading, missing)
    return reading.state, reading.findings


def _check_files(files: Mapping[str, RawFile], findings: Findings) -> None:
    used = any(file.state != "missing" for file in files.values())
    for name, file in files.items():
        if file.state == "unreadable":
            findings.block(name, f"cannot be read: {file.why}")
        elif file.state == "foreign":
            findings.repair(name, "is not a file", "moved to the quarantine")
        elif file.state == "cut":
            findings.dirty = True  # its last line is judged like the others
        elif used and file.state == "missing":
            findings.repair(name, "is missing", "written again")


def _read_guard(lines: Sequence[bytes], reading: Reading) -> None:
    """The device, places of workloads, and trials; a line that is there twice counts once."""
    state, findings = reading.state, reading.findings
    seen: set[Entry] = set()
    head: DeviceLine | None = None
    for number, raw in enumerate(lines):
        try:
            found = parse_guard(raw, state.device)
        except BadLine as error:
            findings.reject(GUARD, number, raw, str(error))
            continue
        if isinstance(found, DeviceLine) and head is None:
            head = found
            _check_device(found, state)
            state.device, state.target = found.device, state.target or found.target
        elif isinstance(found, Place):
            reading.places[found.digest] = found
        elif isinstance(found, Entry) and found not in seen:
            seen.add(found)
            state.entries.append(found)
        else:
            findings.reject(GUARD, number, raw, "the line is there twice")
    if head is None and lines:
        findings.repair(GUARD, "the line that names the device is missing", "written again")
    elif head is not None and head.target is None and state.target is not None:
        findings.dirty = True


def _check_device(head: DeviceLine, state: State) -> None:
    if state.device is not None and head.device != state.device:
        raise InputError(
            f"the folder is of {head.device}, not of {state.device}: trials of one device say "
            "nothing about another; give each its own folder"
        )
    if state.target and head.target and identity(head.target) != identity(state.target):
        raise InputError(
            f"the folder is of the target {head.target}, not of {state.target}: give each target "
            "its own folder"
        )


def _read_workloads(lines: Sequence[bytes], reading: Reading) -> None:
    """Lines that the guard knows come before others with the same hash."""
    parsed = [_workload(number, raw, reading) for number, raw in enumerate(lines)]
    known = {line.key: line for line in parsed if line is not None and _placed(line, reading)}
    for number, line in enumerate(parsed):
        if line is None:
            reading.positions.append(None)
            continue
        first = known.get(line.key)
        same = first is None or first.text == line.text
        reading.positions.append(line.key if same else None)
        if not same or line.key in reading.state.workloads:
            reading.findings.reject(WORKLOADS, number, lines[number], "the workload is there twice")
            continue
        reading.state.workloads[line.key] = line
        if first is None:
            reading.unknown[line.key] = (number, lines[number])
        elif reading.places[line.digest].index != number:
            reading.moved.add(number)
    if reading.moved:
        why = "the lines are not in the order they were written in"
        reading.findings.repair(WORKLOADS, why, "put right")


def _workload(number: int, raw: bytes, reading: Reading) -> WorkloadLine | None:
    try:
        line = parse_workload(raw)
        if not _placed(line, reading):
            check_module(line)
    except BadLine as error:
        reading.findings.reject(WORKLOADS, number, raw, str(error))
        return None
    return line


def _placed(line: WorkloadLine, reading: Reading) -> bool:
    place = reading.places.get(line.digest)
    return place is not None and place.workload == line.key


def _read_records(lines: Sequence[bytes], reading: Reading) -> list[Entry]:
    """Records go to the trials of the guard; returns the trials that find none."""
    left: dict[str, list[Entry]] = {}
    for entry in reading.state.entries:
        if entry.trial.ok:
            left.setdefault(entry.record or "", []).append(entry)
    wrong = 0
    for number, raw in enumerate(lines):
        try:
            line = parse_record(raw)
        except BadLine as error:
            reading.findings.reject(RECORDS, number, raw, str(error))
            continue
        inside = 0 <= line.index < len(reading.positions)
        key = reading.positions[line.index] if inside else None
        owners = left.get(line.digest)
        if owners is None:
            reading.strays.append(Stray(number, raw, line, key))
        elif owners:
            owner = next((entry for entry in owners if entry.workload == key), owners[0])
            owners.remove(owner)
            wrong += owner.workload != key
            reading.state.payloads[line.digest] = line.text
            reading.state.target = reading.state.target or line.payload[2]
        else:
            reading.findings.reject(RECORDS, number, raw, "the record is there twice")
    if wrong:
        reading.findings.repair(RECORDS, f"{wrong} under another workload's line", "put right")
    return [entry for entries in left.values() for entry in entries]


def _report_missing(reading: Reading, missing: Sequence[Entry]) -> None:
    state = reading.state
    here = sum(entry.workload in state.workloads for entry in missing)
    if here and state.target is not None:
        reading.findings.repair(RECORDS, f"{here} missing", f"written again from {GUARD}")
    elsewhere = {e.workload for e in state.entries if e.workload not in state.workloads}
    if elsewhere:
        count = sum(entry.workload in elsewhere for entry in state.entries)
        why = f"{count} trials are of {len(elsewhere)} workloads without a line"
        reading.findings.note(WORKLOADS, f"{why}; they count, but MetaSchedule cannot see them")
