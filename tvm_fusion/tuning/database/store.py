"""Database: the trials of one device, in one file that is only appended to.

D/<device folder>/
    trials.jsonl     a line with a checksum for each workload, trial and plan (`lines`)
    damaged.jsonl    what was wrong with it, with reasons
    lock             held for an append or a reading, never for a trial
    old.<n>/         the files of version 1, which `trials.jsonl` has the content of
"""

from __future__ import annotations

import json
import logging
import shlex
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir.meta_schedule.database import TuningRecord, Workload

from ...errors import InputError
from ...host.appended_files import (
    LOCK,
    CannotLock,
    append,
    check_room,
    locked,
    read_from,
    signature,
)
from ...host.atomic_files import replace_file
from ...host.cache_folder import is_open
from .foreign import GUARD, OLD, read_version_1, retire, version_1_files
from .lines import BadLine, Content, Problem, canonical, check_version, identity, unpack
from .metaschedule import (
    ENTRY,
    load,
    load_record,
    payload_of,
    target_json,
    workload_key,
    workload_text,
)
from .trial import LASTING, Trial

logger = logging.getLogger(__name__)

TRIALS, DAMAGED = "trials.jsonl", "damaged.jsonl"
UNREAD = (0, 0, 0)  # the signature of no file


class Database:
    """The trials of one device, TVM and compiler.

    A trial is on disk when `add` returns. The file is read and written under a lock that is held
    for single appends, so that several processes may tune on one folder; `add` and `refresh` see
    what the others wrote. A damaged line costs itself only: it goes to `damaged.jsonl` (see
    `problems`). A folder of version 1 becomes one of this version.

    Parameters
    ----------
    folder : path
        Of one device (`find_database`); it is made unless `read_only`.
    device : str or None
        The device's name, which all lines carry; None takes what the folder says, and only reads.
    target : tvm.target.Target, optional
        By default what the folder says, else that of the first trial added.
    read_only : bool
        Write nothing: what is damaged stays in the file.
    silent : bool
        Log no problems: who opens it tells of them.

    Raises
    ------
    InputError
        The path is not a folder, or cannot be made, read or written; all users may write to it; it
        is of another device, target or version of the format; another process holds its lock for a
        minute.
    """

    def __init__(
        self,
        folder: str | Path,
        device: str | None,
        *,
        target: tvm.target.Target | None = None,
        read_only: bool = False,
        silent: bool = False,
    ) -> None:
        self.path, self.silent = Path(folder), silent
        self.read_only = read_only or device is None
        if self.path.exists() and not self.path.is_dir():
            raise InputError(
                f"{self.path} is not a folder: a database is a folder of files; name a folder"
            )
        if self.path.exists() and is_open(self.path):
            raise InputError(
                f"{self.path}: all users may write to it, so that its plans and kernels may be of "
                "anybody: take the permission away (chmod o-w), or name another folder"
            )
        self.changes = 0  # grows whenever there are other trials than before
        self.version_1: Problem | None = None  # that the folder was one when it was opened
        self._mutex = threading.RLock()
        self._given = device, None if target is None else target_json(target)
        self._content = Content(*self._given)  # of the file
        self._pending = Content()  # what is in no file: it could not be written, or must not be
        self._problems: list[Problem] = []  # of the file
        self._left_out: list[Problem] = []  # of files of version 1
        self._signature: tuple[int, int, int] | None = UNREAD
        self._lines = self._end = 0  # that are read
        self._loaded: dict[str, Workload] = {}
        self._kept: dict[str, dict[tuple[str, str], Trial]] = {}
        self._kept_at = -1
        if not self.read_only:
            self._make()
        self.refresh()
        self._take_version_1()

    def __str__(self) -> str:
        return str(self.path)

    @property
    def device(self) -> str | None:
        """What the folder is of."""
        return self._content.device

    @property
    def target(self) -> dict[str, Any] | None:
        """The target of its trials as JSON."""
        return self._content.target

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong with the files, as of their last reading."""
        return (*self._left_out, *self._problems, *self._orphans())

    def content(self) -> Content:
        """All that it holds; not to be changed."""
        with self._mutex:
            if self._pending == Content():
                return self._content
            found = Content(self.device, self.target)
            found.update(self._content)
            found.update(self._pending)
            return found

    def __len__(self) -> int:
        """How many trials there are, failures and repeated ones too."""
        return len(self.content().entries)

    def workloads(self) -> tuple[tirx.PrimFunc, ...]:
        """The workloads, in the order of the lines, without those whose lines are lost."""
        return tuple(self._load(key).mod[ENTRY] for key in list(self.content().workloads))

    def trials(self, workload: tirx.PrimFunc | str) -> tuple[Trial, ...]:
        """The trials of a workload or of its key, one for each choice, in the order of the lines.

        Of several trials of a choice the latest counts that is checked and "ok" or "wrong", for
        these speak of the kernel; where there is none, the latest.
        """
        key = workload if isinstance(workload, str) else workload_key(workload)
        with self._mutex:
            return tuple(self._counting().get(key, {}).values())

    def counted(self) -> list[tuple[str, Trial]]:
        """The keys of all workloads with their `trials`."""
        with self._mutex:
            return [(key, t) for key, kept in self._counting().items() for t in kept.values()]

    def _counting(self) -> dict[str, dict[tuple[str, str], Trial]]:
        if self._kept_at != self.changes:
            self._kept, self._kept_at = {}, self.changes
            for key, trial in self.content().entries:
                kept = self._kept.setdefault(key, {})
                old = kept.get((trial.kind, trial.text))
                if old is None or _lasts(trial) or not _lasts(old):
                    kept[trial.kind, trial.text] = trial
        return self._kept

    def plan(self, key: str) -> dict[str, Any] | None:
        """The plan of a key, as the latest process wrote it."""
        self.refresh()
        return self.content().plans.get(key)

    def records(self) -> Iterator[tuple[str, list[list[Any]]]]:
        """Keys of workloads with their records as MetaSchedule has them, one for each choice with a
        time; none while nothing says the target.
        """
        for key in list(self.content().workloads) if self.target else ():
            mod = self._load(key).mod
            found = [payload_of(trial, mod, self.target) for trial in self.trials(key) if trial.ok]
            if found:
                yield key, found

    def tuning_records(self) -> dict[str, list[TuningRecord]]:
        """The `records` as MetaSchedule's own objects."""
        return {
            key: [load_record(payload, self._load(key)) for payload in payloads]
            for key, payloads in self.records()
        }

    def add(self, workload: tirx.PrimFunc, target: tvm.target.Target, trial: Trial) -> None:
        """Write a trial; when this returns, it is on disk. An equal trial is written once.

        Raises
        ------
        InputError
            The file cannot be written: nothing of the trial is left in it, it stays in memory, and
            the next call writes it too. Or the trial does not belong here: another target, a
            workload without a root block.
        """
        with self._writing():
            target = self._same_target(target_json(target))
            key = workload_key(workload)
            module = self.content().workloads.get(key) or workload_text(workload)
            self._content.target = target
            self._extend(Content(workloads={key: module}, entries={(key, trial): None}))

    def save_plan(self, key: str, data: dict[str, Any]) -> None:
        """Keep a plan in place of an earlier one.

        InputError if the file cannot be written, ValueError if it is not JSON of finite numbers.
        """
        with self._writing():
            self._extend(Content(plans={key: json.loads(json.dumps(data, allow_nan=False))}))

    def take(self, other: Content) -> int:
        """Add all trials of another content, and the plans that are not here; returns how many
        trials are added.

        InputError if it is of another device or target, or if the file cannot be written.
        """
        with self._writing():
            if other.device is None or other.device != self.device:
                raise InputError(
                    f"trials of {other.device} are none of {self.path}, {self.device}"
                    "; merge databases of one device"
                )
            if other.target is not None:
                self._content.target = self._same_target(other.target)
            before, known = len(self), self.content().plans
            plans = {key: plan for key, plan in other.plans.items() if key not in known}
            self._extend(replace(other, plans=plans))
            return len(self) - before

    def refresh(self) -> None:
        """Read what other processes wrote since the last reading or writing; raises as the class
        does.
        """
        unlocked = self.read_only and not (self.path / LOCK).exists()
        with self._mutex:
            try:
                with nullcontext() if unlocked else locked(self.path):
                    self._read()
            except CannotLock:
                if not self.read_only:
                    raise
                self._read()

    def _make(self) -> None:
        """Make the folder, and see whether it can be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot make {self.path}: {error.strerror or error}; name another folder"
            ) from error
        try:
            with locked(self.path):
                check_room(self.path, (TRIALS, DAMAGED))
        except (CannotLock, OSError) as error:
            why = (error.__cause__ or error).strerror or error
            raise InputError(
                f"cannot write to {self.path}: {why}. Free space on the disk or make the folder "
                "writable, or use another one"
            ) from error

    def _take_version_1(self) -> None:
        """Take over what a folder of version 1 holds: in memory only, where nothing is written.

        Its lines are judged without the lock, and again if the files have changed meanwhile.
        """
        while before := version_1_files(self.path):
            found, left_out = read_version_1(self.path, self.device, self.target)
            with nullcontext() if self.read_only else locked(self.path):
                if version_1_files(self.path) != before:
                    continue
                said = f"version 1 of the format, {len(found.entries)} trials, {len(found.plans)}"
                remedy = f"put into {TRIALS}, the old files into {OLD}.<n>"
                self.version_1 = Problem(GUARD, f"{said} plans", remedy, not self.read_only)
                self._left_out = [replace(p, mended=not self.read_only) for p in left_out]
                self._given = found.device, found.target
                self._content.device, self._content.target = self._given
                self._pending.update(found)
                self.changes += 1
                if not self.read_only:
                    self._flush()
                    retire(self.path)
            self._tell([*([] if self.read_only else [self.version_1]), *self._left_out])
            if self.read_only:
                return

    def _writing(self) -> threading.RLock:
        if self.read_only:
            raise InputError(f"{self.path} is opened for reading; open it for writing to add to it")
        return self._mutex

    def _extend(self, more: Content) -> None:
        """Add to what is pending, and write all of it."""
        self._pending.update(more)
        self.changes += 1
        with suppress(OSError):  # the lock says why
            self.path.mkdir(parents=True, exist_ok=True)
        with locked(self.path):
            self._flush()

    def _flush(self) -> None:
        """Write what is pending; under the lock."""
        self._read()
        lines = self._content.lines(self._pending)
        append(self.path / TRIALS, "".join(lines).encode())
        self._content.update(self._pending)
        self._content.head = self.device or "", self.target
        self._lines += len(lines)
        self._seen()
        self._pending = Content()

    def _read(self) -> None:
        """Read what is new in the file, and repair it if it may be written; under the lock."""
        before, found = self._signature, signature(self.path / TRIALS)
        if found == before:
            return
        self._signature = UNREAD  # again from the start if this fails
        grown = before and found and before[0] == found[0] and found[1] > self._end
        if not (grown and self._read_from(self._end)):
            self._content = Content(self._given[0], self._content.target or self._given[1])
            self._problems, self._lines = [], 0
            self._read_from(0)
            self._tell([*self._problems, *self._orphans()])
        if self._signature is UNREAD:
            self._signature = found
        self.changes += 1

    def _read_from(self, start: int) -> bool:
        """Read the lines from a place on; False where something is wrong with those of a part."""
        content, bad = self._content, {}
        data = read_from(self.path / TRIALS, start)
        lines = data.split(b"\n")
        cut = bool(lines[-1])
        lines = lines if cut else lines[:-1]
        for number, raw in enumerate(lines, 1 + self._lines):
            try:
                content.take(unpack(raw))
            except BadLine as error:
                if number == 1:
                    check_version(self.path, error)
                bad[number] = str(error)
        nameless = bool(lines) and content.head is None
        damaged = cut or bad or nameless
        if start and damaged:
            return False
        self._lines, self._end = self._lines + len(lines), start + len(data)
        self._problems += [
            Problem(f"{TRIALS} line {number}", why, "taken out") for number, why in bad.items()
        ]
        if nameless:
            why = "the line that names the device is missing"
            self._problems.append(Problem(TRIALS, why, "written again"))
        if damaged and not self.read_only:
            self._repair(dict(enumerate(lines, 1)), bad)
        return True

    def _repair(self, lines: dict[int, bytes], bad: dict[int, str]) -> None:
        """Write the file anew, the damaged lines to their own first: no step loses any."""
        append(self.path / DAMAGED, _described(lines, bad).encode())
        head = []
        if self._content.head is None:
            head = self._content.lines(Content())
            self._content.head = self.device or "", self.target
        sound = [raw.decode() + "\n" for number, raw in lines.items() if number not in bad]
        replace_file(self.path / TRIALS, "".join([*head, *sound]))
        self._lines = len(head) + len(sound)
        self._seen()
        self._problems = [replace(p, mended=True) for p in self._problems]

    def _seen(self) -> None:
        """The file is known as it is now."""
        self._signature = signature(self.path / TRIALS)
        self._end = self._signature[1] if self._signature else 0

    def _orphans(self) -> list[Problem]:
        with self._mutex:
            found = self.content()
            lost = [key for key, _ in found.entries if key not in found.workloads]
        why = (
            f"{len(lost)} trials are of {len(set(lost))} workloads without a line; they count, but "
            "MetaSchedule cannot see them"
        )
        return [Problem(TRIALS, why)] if lost else []

    def _tell(self, problems: list[Problem]) -> None:
        """Log what is wrong: all where it is repaired, else that there is something."""
        if self.silent or not problems:
            return
        if self.read_only:
            check = f"python -m tvm_fusion tune --db-check --work-dir {shlex.quote(str(self.path))}"
            logger.warning("%d problems in the database, listed by: %s", len(problems), check)
            return
        for problem in problems:
            logger.warning("%s: %s", self.path, problem)

    def _same_target(self, target: dict[str, Any]) -> dict[str, Any]:
        ours = self.target
        if ours is not None and identity(ours) != identity(target):
            raise InputError(
                f"{self.path} is of the target {ours}, not of {target}"
                "; give that target, or another folder"
            )
        return ours or target

    def _load(self, key: str) -> Workload:
        if key not in self._loaded:
            self._loaded[key] = load(key, self.content().workloads[key])
        return self._loaded[key]


def _described(lines: dict[int, bytes], bad: dict[int, str]) -> str:
    """Damaged lines with the reasons."""
    said = [
        {"line": n, "why": why, "text": lines[n].decode("utf-8", "surrogateescape")}
        for n, why in bad.items()
    ]
    return "".join(canonical(one) + "\n" for one in said)


def _lasts(trial: Trial) -> bool:
    """Whether it speaks of the kernel, whatever came of the choice later."""
    return trial.checked and trial.status in LASTING
