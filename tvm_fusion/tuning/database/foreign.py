"""Folders of others, read into the content of a store: MetaSchedule's own, and those of version 1.

    database_workload.json, database_tuning_record.json    as MetaSchedule writes them
    guard.jsonl, plans/<key>.json                          beside them, in version 1 of our format

In version 1 a line of the guard, with a checksum, had each trial, and the digests of the lines of
workloads. What nothing vouches for is tried by `replay.judge`, and what TVM replays is taken over
as unchecked.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ...errors import InputError
from ..measure.trial_record import Trial
from .lines import (
    VERSION,
    BadLine,
    Content,
    Problem,
    canonical,
    digest,
    identity,
    is_key,
    parse,
    tag,
    trial_of,
    unpack,
)
from .metaschedule import RECORDS, WORKLOADS, foreign_trial
from .replay import Suspect, judge

GUARD, PLANS = "guard.jsonl", "plans"
OLD = "old"  # and a number: where the files of version 1 go

Stray = tuple[int, str, Trial, list[Any]]
"""Number of the line, key of the workload, trial and record."""


def read_folder(
    folder: Path,
    content: Content,
    places: Mapping[str, tuple[str, int]] | None = None,
    records: Collection[str] = (),
) -> list[Problem]:
    """Add the workloads and records of a folder of MetaSchedule to a content, as unchecked trials.

    Parameters
    ----------
    folder : Path
    content : Content
        Its target is that of the records to take; None takes that of the first.
    places : mapping, optional
        By digest of a line of workloads that can be trusted: key and number from 0.
    records : collection of str
        Digests of records that the content has.

    Returns
    -------
    list of Problem
        What is left out.

    Raises
    ------
    InputError
        A file cannot be read, or there is no process to try lines in (`CannotJudge`).
    """
    problems: list[Problem] = []
    keys, unknown = _workloads(folder, content, places or {}, problems)
    strays = _strays(folder, content, keys, records, problems)
    wanted = dict.fromkeys([*(key for key, _ in unknown.values()), *(key for _, key, *_ in strays)])
    modules = content.workloads | dict(unknown.values())
    of_key = {key: [stray for stray in strays if stray[1] == key] for key in wanted}
    suspects = [
        Suspect(key, modules[key], tuple(payload for *_, payload in found))
        for key, found in of_key.items()
    ]
    number_of = {key: number for number, (key, _) in unknown.items()}
    for suspect, verdict in zip(suspects, judge(suspects) if suspects else (), strict=True):
        if verdict.workload is None:
            content.workloads[suspect.key] = suspect.module
        elif suspect.key in number_of:
            problems.append(_left_out(WORKLOADS, number_of[suspect.key], verdict.workload))
        for (number, key, trial, _), why in zip(of_key[suspect.key], verdict.payloads, strict=True):
            if why is None:
                content.entries[key, trial] = None
            else:
                problems.append(_left_out(RECORDS, number, why))
    return problems


def read_version_1(
    folder: Path, device: str | None, target: dict[str, Any] | None
) -> tuple[Content, list[Problem]]:
    """What a folder of version 1 holds, and what of it is left out.

    Raises
    ------
    InputError
        As `read_folder`; or the folder is of another device or target than these, or of another
        version.
    """
    content, problems = Content(device, target), []
    places: dict[str, tuple[str, int]] = {}
    records: set[str] = set()
    for number, raw in enumerate(_lines(folder / GUARD)):
        try:
            match unpack(raw, 1):
                case {"line": "device", "device": str(name), "target": dict() | None as found}:
                    content.name((name, found))
                case {"device": found} if content.device and found != tag(content.device):
                    raise BadLine("of another device")
                case {"line": "workload", "workload": key, "digest": str(text), "index": int(n)}:
                    places[text] = key, n
                case {
                    "line": "trial",
                    "device": _,
                    "workload": key,
                    "record": record,
                    **fields,
                } if is_key(key):
                    content.entries[key, trial_of(fields)] = None
                    records.add(record)
                case body:
                    raise BadLine(f"no line of kind {body.get('line')!r}")
        except BadLine as error:
            if number == 0:
                check_version(folder, error.version)
            problems.append(_left_out(GUARD, number, str(error)))
    for path in sorted((folder / PLANS).glob("*.json")):
        try:
            body = unpack(path.read_bytes(), 1)
            content.plans[str(body["key"])] = dict(body["plan"])
        except (BadLine, KeyError, TypeError, ValueError, OSError) as error:
            problems.append(Problem(f"{PLANS}/{path.name}", str(error), "left out"))
    return content, problems + read_folder(folder, content, places, records)


def is_version_1(folder: Path) -> bool:
    """Whether a folder has files of version 1."""
    return any((folder / name).exists() for name in (GUARD, WORKLOADS, RECORDS))


def retire(folder: Path) -> Path:
    """Move the files of version 1 to a folder in it; the guard last, which vouches for the others.

    Raises
    ------
    InputError
        The folder cannot be written.
    """
    number = 1
    while (place := folder / f"{OLD}.{number}").exists():
        number += 1
    try:
        place.mkdir()
        for name in (RECORDS, WORKLOADS, PLANS, GUARD):
            if (folder / name).exists():
                os.replace(folder / name, place / name)
    except OSError as error:
        raise InputError(f"cannot move the old files in {folder}: {error.strerror}") from error
    return place


def check_version(folder: Path, version: Any) -> None:
    """InputError for a version of the format that cannot be read; None is no version."""
    if isinstance(version, int):
        raise InputError(
            f"{folder} has version {version} of the format, and this tvm_fusion reads version "
            f"{VERSION}: use the tvm_fusion that made it, or tune into another folder"
        )


def _workloads(
    folder: Path,
    content: Content,
    places: Mapping[str, tuple[str, int]],
    problems: list[Problem],
) -> tuple[list[str | None], dict[int, tuple[str, str]]]:
    """Keys by line, None where a line is damaged or not where it was written; and by number of the
    line those workloads that nothing vouches for. The others go to the content.
    """
    keys: list[str | None] = []
    unknown: dict[int, tuple[str, str]] = {}
    for number, raw in enumerate(_lines(folder / WORKLOADS)):
        try:
            key, module = _workload(raw)
        except BadLine as error:
            keys.append(None)
            problems.append(_left_out(WORKLOADS, number, str(error)))
            continue
        place = places.get(digest(canonical([key, module])))
        if place is None or place[0] != key:
            unknown[number] = key, module
            keys.append(key)
        else:
            content.workloads.setdefault(key, module)
            keys.append(key if place[1] == number else None)
    for number, (key, _) in list(unknown.items()):
        if key in content.workloads or keys.index(key) != number:
            keys[number] = None
            del unknown[number]
            problems.append(_left_out(WORKLOADS, number, "the workload is there twice"))
    return keys, unknown


def _strays(
    folder: Path,
    content: Content,
    keys: list[str | None],
    records: Collection[str],
    problems: list[Problem],
) -> list[Stray]:
    """The records of choices that the content does not have, as far as they are sound."""
    known = {(key, trial.kind, trial.text) for key, trial in content.entries}
    found: dict[tuple[str, Trial], Stray] = {}
    day = _day(folder / RECORDS)
    for number, raw in enumerate(_lines(folder / RECORDS)):
        try:
            index, payload = _record(raw)
            if digest(canonical(payload)) in records:
                continue
            trial = foreign_trial(payload, day)
            key = keys[index] if 0 <= index < len(keys) else None
            if key is None:
                raise BadLine(f"of line {index + 1} of the workloads, which cannot be used")
            if content.target and identity(payload[2]) != identity(content.target):
                raise BadLine("of another target")
        except (ValueError, TypeError) as error:
            problems.append(_left_out(RECORDS, number, str(error)))
            continue
        content.target = content.target or payload[2]
        if (key, trial.kind, trial.text) not in known:
            found.setdefault((key, trial), (number, key, trial, payload))
    return list(found.values())


def _workload(raw: bytes) -> tuple[str, str]:
    match parse(raw):
        case [key, str(module)] if is_key(key):
            return key, module
    raise BadLine("not a pair of a structural hash and a module")


def _record(raw: bytes) -> tuple[int, list[Any]]:
    match parse(raw):
        case [int(index), [_, [_, *_], {"kind": str()}, list() | None] as payload]:
            return index, payload
    raise BadLine("not a workload's line and a record of trace, times, target and arguments")


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def _day(path: Path) -> str:
    """When a file was last written."""
    seconds = path.stat().st_mtime if path.exists() else 0
    return datetime.date.fromtimestamp(seconds).isoformat()


def _left_out(file: str, number: int, why: str) -> Problem:
    """Of a line; `number` counts from 0."""
    return Problem(f"{file} line {number + 1}", why, "left out")
