"""Folders of others, read into the content of a store: MetaSchedule's own, and those of version 1.

    database_workload.json, database_tuning_record.json    as MetaSchedule writes them
    guard.jsonl, plans/<key>.json                          beside them, in version 1 of our format

In version 1 a line of the guard, with a checksum, has each trial, and vouches for lines of the
other two. What nothing vouches for is read by TVM in a process of its own (`Judge`), and what it
replays there is taken over as unchecked, its trace as TVM wrote it again.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tvm import tirx
from tvm.s_tir.meta_schedule.database import Workload

from ...errors import InputError
from ...host.appended_files import signature
from ..measure.processes import STARTING_S, Answer, Worker, ready
from .lines import (
    BadLine,
    Content,
    Problem,
    canonical,
    check_version,
    digest,
    identity,
    is_key,
    parse,
    unpack,
)
from .metaschedule import (
    ENTRY,
    RECORDS,
    WORKLOADS,
    arguments_of,
    foreign_trial,
    hash_of,
    load,
    load_record,
)
from .replay import trace_text

GUARD, PLANS = "guard.jsonl", "plans"
OLD = "old"  # and a number: where the files of version 1 go
MOST_CRASHES = 5  # each costs the start of another process
PART_S = 5.0


class CannotJudge(InputError):
    """There is no process to try lines in: nothing is known of them."""


class Judge(AbstractContextManager):
    """Calls of functions in a process of its own, which a malformed line may end; it is started
    when it is first needed.
    """

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._crashes = 0

    def __exit__(self, *exception: object) -> None:
        if self._worker is not None:
            self._worker.stop()

    def __call__(self, function: Callable, *arguments: Any) -> Any:
        """What a function returns; BadLine where it fails, crashes, hangs, or many did before."""
        if self._worker is None:
            setup = begin, ()  # with it the process imports this module, before a line's time runs
            self._worker = Worker("the process that tries lines", setup, torch=False)
            if (answer := self._ask(ready, (), STARTING_S)).status != "ok":
                raise CannotJudge(f"{self._worker.name} does not start: {answer.why}")
        if self._crashes == MOST_CRASHES:
            raise BadLine("not tried, after other lines that crash TVM")
        answer = self._ask(function, arguments, PART_S)
        if answer.status == "ok":
            return answer.value
        if answer.status == "error":
            raise BadLine(answer.why)
        self._crashes += 1
        raise BadLine(f"TVM fails on it: {answer.status}, {answer.why}")

    def _ask(self, function: Callable, arguments: tuple, limit_s: float) -> Answer:
        try:
            self._worker.send(function, arguments, limit_s)
        except OSError as error:
            raise CannotJudge(f"{self._worker.name} does not start: {error}") from error
        return self._worker.wait()


def begin() -> None:
    """What a process is asked first."""


@lru_cache(maxsize=1)
def read_workload(key: str, module: str) -> Workload:
    """The workload, if its module is one PrimFunc with the hash that the line names; ValueError, or
    what TVM raises, else.
    """
    workload = load(key, module)
    names = [var.name_hint for var in workload.mod.functions]
    if names != [ENTRY] or not isinstance(workload.mod[ENTRY], tirx.PrimFunc):
        raise ValueError(f"the module holds {names}, not one PrimFunc called {ENTRY}")
    if (found := hash_of(workload.mod)) != key:
        raise ValueError(f"the module's structural hash is {found}, not {key}")
    return workload


def check_workload(key: str, module: str) -> None:
    """Raises as `read_workload`."""
    read_workload(key, module)


def read_record(key: str, module: str, payload: list[Any]) -> str:
    """The text of a record's trace as TVM writes it after it is replayed on its workload."""
    workload = read_workload(key, module)
    record = load_record(payload, workload)
    if payload[3] is not None and payload[3] != arguments_of(workload.mod):
        raise ValueError("the arguments are not those of the workload")
    text = trace_text(record.trace)
    if json.loads(text)[1] != payload[0][1]:  # TVM samples what is missing
        raise ValueError("the decisions of the trace are not those of its choices")
    return text


@dataclass(frozen=True, slots=True)
class Vouched:
    """What a guard says of the other two files: digests of lines that TVM may read, and of which
    workload the lines are, from 0, that records refer to.
    """

    workloads: set[str] = field(default_factory=set)
    records: set[str] = field(default_factory=set)
    keys: dict[int, str] = field(default_factory=dict)


def read_folder(folder: Path, content: Content, vouched: Vouched | None = None) -> list[Problem]:
    """Add the workloads and records of a folder of MetaSchedule to a content, as unchecked trials;
    returns what is left out.

    Records of another target than the content's are, and its own choices are passed over. Raises
    InputError where a file cannot be read, or as `CannotJudge`.
    """
    vouched, problems, keys = vouched or Vouched(), [], {}
    known = {(key, trial.kind, trial.text) for key, trial in content.entries}
    day = _day(folder / RECORDS)

    def take_workload(number: int, raw: bytes) -> None:
        match parse(raw):
            case [key, str(module)] if is_key(key):
                if digest(canonical([key, module])) not in vouched.workloads:
                    judge(check_workload, key, module)
                keys[number] = key
                content.workloads.setdefault(key, module)
            case _:
                raise BadLine("not a pair of a structural hash and a module")

    def take_record(number: int, raw: bytes) -> None:
        match parse(raw):
            case [int(index), [_, [_, *_], {"kind": str()}, list() | None] as payload]:
                if digest(canonical(payload)) in vouched.records:
                    return
            case _:
                why = "not a workload's line and a record of trace, times, target and arguments"
                raise BadLine(why)
        trial = foreign_trial(payload, day)
        key = vouched.keys.get(index, keys.get(index))
        if key not in content.workloads:
            raise BadLine(f"of line {index + 1} of the workloads, which cannot be used")
        if content.target and identity(payload[2]) != identity(content.target):
            raise BadLine("of another target")
        content.target = content.target or payload[2]
        if (key, trial.kind, trial.text) not in known:
            text = judge(read_record, key, content.workloads[key], payload)
            trial = replace(trial, text=text) if trial.kind == "trace" else trial
            content.entries[key, trial] = None

    with Judge() as judge:
        for name, take in ((WORKLOADS, take_workload), (RECORDS, take_record)):
            for number, raw in _lines(folder / name):
                try:
                    take(number, raw)
                except (ValueError, TypeError, RecursionError) as error:
                    problems.append(_left_out(name, number, error))
    return problems


def read_version_1(
    folder: Path, device: str | None, target: dict[str, Any] | None
) -> tuple[Content, list[Problem]]:
    """What a folder of version 1 holds, and what of it is left out.

    InputError as `read_folder`, and for a folder of another device, target or version.
    """
    content, vouched, problems = Content(device, target), Vouched(), []
    for number, raw in _lines(folder / GUARD):
        try:
            body = unpack(raw, 1)
            record = body.pop("record", None)
            match body:
                case {"line": "workload", "workload": key, "digest": str(text), "index": int(n)}:
                    vouched.workloads.add(text)
                    vouched.keys[n] = key
                case _:
                    content.take(body)
                    vouched.records.add(record)
        except BadLine as error:
            if number == 0:
                check_version(folder, error)
            problems.append(_left_out(GUARD, number, error))
    for path in sorted((folder / PLANS).glob("*.json")):
        try:
            body = unpack(path.read_bytes(), 1)
            content.take({"line": "plan", **body})
        except (BadLine, OSError) as error:
            problems.append(Problem(f"{PLANS}/{path.name}", str(error), "left out"))
    return content, problems + read_folder(folder, content, vouched)


def version_1_files(folder: Path) -> dict[str, Any]:
    """The files of version 1 that a folder has, each with what changes whenever it does."""
    names = (GUARD, WORKLOADS, RECORDS)
    return {name: found for name in names if (found := signature(folder / name)) is not None}


def retire(folder: Path) -> None:
    """Move the files of version 1 to a folder in it; the guard last, which vouches for the others.

    InputError if the folder cannot be written.
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
        raise InputError(
            f"cannot move the old files in {folder}: {error.strerror}; make the folder writable"
        ) from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        return enumerate(path.read_bytes().splitlines())
    except FileNotFoundError:
        return enumerate(())
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror or error}; check the path"
        ) from error


def _day(path: Path) -> str:
    """When a file was last written."""
    seconds = path.stat().st_mtime if path.exists() else 0
    return datetime.date.fromtimestamp(seconds).isoformat()


def _left_out(file: str, number: int, why: Exception) -> Problem:
    """Of a line; `number` counts from 0."""
    return Problem(f"{file} line {number + 1}", str(why), "left out")
