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
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir.meta_schedule.database import MemoryDatabase, Workload

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
from ..measure.trial_record import LASTING, Trial
from .foreign import GUARD, OLD, check_version, is_version_1, read_version_1, retire
from .lines import BadLine, Content, Problem, canonical, identity
from .metaschedule import (
    ENTRY,
    check_replay,
    load,
    load_record,
    payload_of,
    target_json,
    workload_key,
    workload_text,
)

logger = logging.getLogger(__name__)

TRIALS, DAMAGED = "trials.jsonl", "damaged.jsonl"


class Database:
    """The trials of one device, TVM and compiler; `Database.open` reads a folder.

    A trial is on disk when `add` returns. The file is read and written under a lock that is held
    for single appends, so that several processes may tune on one folder; `add` and `refresh` see
    what the others wrote. Damaged lines cost themselves only: see `problems`.
    """

    def __init__(
        self,
        path: Path,
        device: str | None,
        target: dict[str, Any] | None,
        read_only: bool,
        silent: bool,
    ) -> None:
        self.path, self.read_only, self.silent = path, read_only, silent
        self.changes = 0
        """Grows whenever there are other trials than before."""
        self._mutex = threading.RLock()
        self._given = device, target
        self._content = Content(device, target)
        self._pending = Content()  # what is in no file: it could not be written, or must not be
        self._problems: list[Problem] = []  # of the file
        self._moved: list[Problem] = []  # of files of version 1
        self._signature: tuple[int, int, int] | None = None
        self._is_read = False
        self._lines, self._end = 0, 0  # that are read
        self._loaded: dict[str, Workload] = {}
        self._kept: dict[str, dict[tuple[str, str], Trial]] = {}
        self._kept_at = -1

    @classmethod
    def open(
        cls,
        folder: str | Path,
        device: str | None,
        *,
        target: tvm.target.Target | None = None,
        read_only: bool = False,
        silent: bool = False,
    ) -> Database:
        """Read a folder; damaged lines go to `damaged.jsonl`, and a folder of version 1 becomes one
        of this version.

        Parameters
        ----------
        folder : path
            Of one device: see `find_database`. It is made unless `read_only`.
        device : str or None
            The name of the device, which all lines carry; None takes what the folder says, and
            only reads.
        target : tvm.target.Target, optional
            Of all trials; by default what the folder says, else that of the first trial added.
        read_only : bool
            Write nothing: what is damaged stays in the file.
        silent : bool
            Log no problems: who opens it tells of them.

        Raises
        ------
        InputError
            The path is not a folder, or cannot be made, read or written; the folder is of another
            device or target, or of another version of the format; another process holds its lock
            for a minute.
        """
        path = Path(folder)
        read_only = read_only or device is None
        if path.exists() and not path.is_dir():
            raise InputError(f"{path} is not a folder: a database is a folder of files")
        of = None if target is None else target_json(target)
        found = cls(path, device, of, read_only, silent)
        found._begin()
        return found

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
        return (*self._moved, *self._problems, *self._orphans())

    @property
    def keys(self) -> tuple[str, ...]:
        """`workload_key` of all workloads, in the order of the lines."""
        return tuple(dict.fromkeys([*self.modules(), *(key for key, _ in self.all_trials())]))

    def modules(self) -> dict[str, str]:
        """Base64 of the modules of all workloads whose lines are there, by their keys."""
        with self._mutex:
            return self._content.workloads | self._pending.workloads

    def workloads(self) -> tuple[tirx.PrimFunc, ...]:
        """The workloads, in the order of the lines, without those whose lines are lost."""
        return tuple(self._load(key, module).mod[ENTRY] for key, module in self.modules().items())

    def __len__(self) -> int:
        """How many trials there are, failures and repeated ones too."""
        return len(self.all_trials())

    def all_trials(self) -> list[tuple[str, Trial]]:
        """Keys of workloads and trials, repeated ones too, in the order of the lines."""
        with self._mutex:
            return list(self._content.entries | self._pending.entries)

    def trials(self, workload: tirx.PrimFunc | str) -> tuple[Trial, ...]:
        """The trials of a workload or of its key, one for each choice, in the order of the lines.

        Of several trials of a choice the latest counts that is checked and "ok" or "wrong", for
        these speak of the kernel; where there is none, the latest.
        """
        key = workload if isinstance(workload, str) else workload_key(workload)
        with self._mutex:
            if self._kept_at != self.changes:
                self._kept, self._kept_at = _kept(self.all_trials()), self.changes
            return tuple(self._kept.get(key, {}).values())

    def unchecked(self) -> list[tuple[str, Trial]]:
        """Keys of workloads and trials that count and are not checked."""
        return [(key, t) for key in self.keys for t in self.trials(key) if not t.checked]

    def best(self, workload: tirx.PrimFunc | str) -> Trial | None:
        """The fastest checked trial; of equally fast ones the first by kind and text."""
        ok = [trial for trial in self.trials(workload) if trial.ok and trial.checked]
        return min(ok, key=lambda trial: (trial.us, trial.kind, trial.text), default=None)

    def plan_keys(self) -> list[str]:
        """The keys of the plans, sorted."""
        with self._mutex:
            return sorted(self._content.plans | self._pending.plans)

    def plan(self, key: str) -> dict[str, Any] | None:
        """The plan of a key, as the latest process wrote it."""
        self.refresh()
        with self._mutex:
            return (self._content.plans | self._pending.plans).get(key)

    def add(self, workload: tirx.PrimFunc, target: tvm.target.Target, trial: Trial) -> None:
        """Write a trial; when this returns, it is on disk. An equal trial is written once.

        Raises
        ------
        InputError
            The file cannot be written: nothing of the trial is left in it, it stays in memory, and
            the next call writes it too. Or the trial does not belong here: another target, a
            workload without a root block, a trace that does not replay on it.
        """
        self._check_writable()
        with self._mutex:
            target = self._same_target(target_json(target))
            key = workload_key(workload)
            module = self.modules().get(key) or workload_text(workload)
            if trial.ok and trial.kind == "trace":
                loaded = self._load(key, module)
                check_replay(payload_of(trial, loaded.mod, target), loaded)
            self._content.target = target
            self._extend(Content(workloads={key: module}, entries={(key, trial): None}))

    def save_plan(self, key: str, data: dict[str, Any]) -> None:
        """Keep a plan in place of an earlier one.

        InputError if the file cannot be written, ValueError if it is not JSON of finite numbers.
        """
        self._check_writable()
        with self._mutex:
            self._extend(Content(plans={key: json.loads(json.dumps(data, allow_nan=False))}))

    def take(self, other: Content) -> int:
        """Add all trials of another content, and the plans that are not here; returns how many
        trials are added.

        InputError if it is of another device or target, or if the file cannot be written.
        """
        self._check_writable()
        if other.device is None or other.device != self.device:
            raise InputError(f"trials of {other.device} are none of {self.path}, {self.device}")
        with self._mutex:
            if other.target is not None:
                self._content.target = self._same_target(other.target)
            before, known = len(self), self.plan_keys()
            plans = {key: plan for key, plan in other.plans.items() if key not in known}
            self._extend(replace(other, plans=plans))
            return len(self) - before

    def content(self) -> Content:
        """All that it holds."""
        with self._mutex:
            found = Content(self.device, self.target)
            for part in (self._content, self._pending):
                found.update(part)
            return found

    def records(self, kind: str | None = None) -> list[tuple[str, str, list[list[Any]]]]:
        """Keys and modules of workloads with their records as MetaSchedule has them, one for each
        choice with a time; of one kind, or all.
        """
        found = []
        with self._mutex:
            for key, module in self.modules().items():
                ok = [t for t in self.trials(key) if t.ok and kind in (None, t.kind)]
                if ok and self.target is not None:
                    mod = self._load(key, module).mod
                    found.append((key, module, [payload_of(t, mod, self.target) for t in ok]))
        return found

    def metaschedule(self, kind: str | None = None) -> MemoryDatabase:
        """The `records` in MetaSchedule's own database."""
        found = MemoryDatabase()
        with self._mutex:
            for key, module, payloads in self.records(kind):
                workload = found.commit_workload(self._load(key, module).mod)
                for payload in payloads:
                    found.commit_tuning_record(load_record(payload, workload))
        return found

    def refresh(self) -> None:
        """Read what other processes wrote since the last reading or writing; raises as `open`."""
        unlocked = self.read_only and not (self.path / LOCK).exists()
        with self._mutex:
            try:
                with nullcontext() if unlocked else locked(self.path):
                    self._read()
            except CannotLock:
                if not self.read_only:
                    raise
                self._read()

    def _begin(self) -> None:
        if not self.read_only:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"cannot make {self.path}: {error.strerror or error}") from error
            try:
                with locked(self.path):
                    check_room(self.path, (TRIALS, DAMAGED))
            except (CannotLock, OSError) as error:
                why = (error.__cause__ or error).strerror or error
                raise InputError(
                    f"cannot write to {self.path}: {why}. Free space on the disk or make the "
                    "folder writable, or use another one"
                ) from error
        self.refresh()
        if is_version_1(self.path):
            self._take_version_1()
            self._tell(self._moved)

    def _take_version_1(self) -> None:
        """Take over what a folder of version 1 holds: in memory only, where nothing is written."""
        if self.read_only:
            self._read_version_1()
            return
        with locked(self.path):
            if is_version_1(self.path):  # still: another process may have done it
                self._read_version_1()
                self._flush()
                retire(self.path)
                self._moved = [replace(p, mended=True) for p in self._moved]

    def _read_version_1(self) -> None:
        found, problems = read_version_1(self.path, self.device, self.target)
        self._given = found.device, found.target
        self._content.device, self._content.target = self._given
        said = f"version 1 of the format: {len(found.entries)} trials, {len(found.plans)} plans"
        remedy = f"put into {TRIALS}, the old files into {OLD}.<n>"
        self._moved = [Problem(GUARD, said, remedy), *problems]
        self._pending.update(found)
        self.changes += 1

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
        for line in lines:
            self._content.take(line.encode())
        self._lines += len(lines)
        self._seen()
        self._pending = Content()

    def _read(self) -> None:
        """Read what is new in the file, and repair it if it may be written; under the lock."""
        before, found = self._signature, signature(self.path / TRIALS)
        if self._is_read and found == before:
            return
        was_read, self._is_read = self._is_read, False  # again from the start if this fails
        self._signature = found
        grown = was_read and before and found and before[0] == found[0] and found[1] > self._end
        if not (grown and self._read_from(self._end)):
            self._content = Content(self._given[0], self._content.target or self._given[1])
            self._problems, self._lines = [], 0
            self._read_from(0)
            self._tell([*self._problems, *self._orphans()])
        self._is_read = True
        self.changes += 1

    def _read_from(self, start: int) -> bool:
        """Read the lines from a place on; False where something is wrong with those of a part."""
        content, rejected = self._content, []
        data = read_from(self.path / TRIALS, start)
        lines = data.split(b"\n")
        cut = bool(lines[-1])
        lines = lines if cut else lines[:-1]
        for number, raw in enumerate(lines, 1 + self._lines):
            try:
                content.take(raw)
            except BadLine as error:
                if number == 1:
                    check_version(self.path, error.version)
                rejected.append((number, raw, str(error)))
        nameless = bool(lines) and content.head is None
        if start and (cut or rejected or nameless):
            return False
        self._lines, self._end = self._lines + len(lines), start + len(data)
        bad = {number: why for number, _, why in rejected}
        self._problems += [
            Problem(f"{TRIALS} line {number}", why, "taken out") for number, why in bad.items()
        ]
        if nameless:
            why = "the line that names the device is missing"
            self._problems.append(Problem(TRIALS, why, "written again"))
        if (cut or rejected or nameless) and not self.read_only:
            self._repair([raw for n, raw in enumerate(lines, 1) if n not in bad], rejected)
        return True

    def _repair(self, sound: list[bytes], rejected: list[tuple[int, bytes, str]]) -> None:
        """Write the file anew, the damaged lines to their own first: no step loses any."""
        append(self.path / DAMAGED, "".join(map(_described, rejected)).encode())
        head = self._content.lines(Content()) if self._content.head is None else []
        replace_file(self.path / TRIALS, "".join([*head, *(raw.decode() + "\n" for raw in sound)]))
        for line in head:
            self._content.take(line.encode())
        self._lines = len(head) + len(sound)
        self._seen()
        self._problems = [replace(p, mended=True) for p in self._problems]

    def _seen(self) -> None:
        """The file is known as it is now."""
        self._signature = signature(self.path / TRIALS)
        self._end = self._signature[1] if self._signature else 0

    def _orphans(self) -> list[Problem]:
        modules = self.modules()
        lost = [key for key, _ in self.all_trials() if key not in modules]
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

    def _check_writable(self) -> None:
        if self.read_only:
            raise InputError(f"{self.path} is opened for reading; open it for writing to add to it")

    def _same_target(self, target: dict[str, Any]) -> dict[str, Any]:
        ours = self.target
        if ours is not None and identity(ours) != identity(target):
            raise InputError(f"{self.path} is of the target {ours}, not of {target}")
        return ours or target

    def _load(self, key: str, module: str) -> Workload:
        if key not in self._loaded:
            self._loaded[key] = load(key, module)
        return self._loaded[key]


def _described(rejected: tuple[int, bytes, str]) -> str:
    number, raw, why = rejected
    text = raw.decode("utf-8", "surrogateescape")
    return canonical({"line": number, "why": why, "text": text}) + "\n"


def _kept(entries: list[tuple[str, Trial]]) -> dict[str, dict[tuple[str, str], Trial]]:
    """By workload and choice, the trial that counts: see `Database.trials`."""
    found: dict[str, dict[tuple[str, str], Trial]] = {}
    for key, trial in entries:
        of_workload = found.setdefault(key, {})
        old = of_workload.get((trial.kind, trial.text))
        if old is None or _lasts(trial) or not _lasts(old):
            of_workload[trial.kind, trial.text] = trial
    return found


def _lasts(trial: Trial) -> bool:
    """Whether it speaks of the kernel, whatever came of the choice later."""
    return trial.checked and trial.status in LASTING
