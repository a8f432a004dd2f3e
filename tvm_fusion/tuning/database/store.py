"""Database: the trials of one device, in files that MetaSchedule can open too."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx

from ...errors import InputError
from ..measure.trial_record import LASTING, Trial
from . import plans
from .folder import Addition, Folder
from .folder_state import Problem
from .guard import Entry
from .lines import WorkloadLine, canonical, digest
from .open_folder import check_version
from .records import payload_of
from .workload_lines import (
    ENTRY,
    check_replay,
    facts_of,
    identity,
    line_of,
    load,
    load_record,
    target_json,
    workload_key,
)

logger = logging.getLogger(__name__)


class Database:
    """The trials of one device, TVM and compiler; `Database.open` reads a folder.

    Files are read and written under a lock that is held for single appends, so that several
    processes may tune on one folder; `add` and `refresh` see what the others wrote. Whatever lies
    in the files, opening them raises nothing for it: see `problems`.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._mutex = threading.RLock()
        self._later: list[Problem] = []
        self._lines: dict[str, WorkloadLine] = {}
        self._functions: dict[str, tirx.PrimFunc] = {}
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
        """Read a folder; what is damaged is repaired, or goes to its quarantine.

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
            Write nothing: what is damaged stays in the files.
        silent : bool
            Log no problems: who opens it tells of them.

        Raises
        ------
        InputError
            The path is not a folder, or cannot be made or written; the folder is of another device
            or target, or of another version of the format; another process holds its lock for a
            minute.
        """
        path = Path(folder)
        read_only = read_only or device is None
        if path.exists() and not path.is_dir():
            raise InputError(f"{path} is not a folder: a database is a folder of files")
        check_version(path)
        if not read_only:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"cannot make {path}: {error.strerror or error}") from error
        of = None if target is None else target_json(target)
        found = Folder(path, device, of, read_only, silent)
        found.begin()
        return cls(found)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def path(self) -> Path:
        """The folder."""
        return self._folder.path

    @property
    def device(self) -> str | None:
        """What the folder is of."""
        return self._folder.state.device

    @property
    def target(self) -> dict[str, Any] | None:
        """The target of its trials as JSON."""
        return self._folder.state.target

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong with the files, as of their last reading, and with plans asked for."""
        return (*self._folder.findings.problems, *self._later)

    @property
    def changes(self) -> int:
        """Grows whenever there are other trials than before."""
        return self._folder.changes

    @property
    def keys(self) -> tuple[str, ...]:
        """`workload_key` of all workloads, in the order of the files."""
        with self._mutex:
            keys = (entry.workload for entry in self._folder.entries())
            return tuple(dict.fromkeys([*self._folder.state.workloads, *keys]))

    def workloads(self) -> tuple[tirx.PrimFunc, ...]:
        """The workloads, in the order of the files, without those whose lines are lost."""
        with self._mutex:
            for key, line in self._folder.lines().items():
                if key not in self._functions:
                    self._functions[key] = load(line).mod[ENTRY]
            return tuple(self._functions[key] for key in self._folder.lines())

    def __len__(self) -> int:
        """How many trials there are, failures and repeated ones too."""
        return len(self._folder.entries())

    def trials(self, workload: tirx.PrimFunc | str) -> tuple[Trial, ...]:
        """The trials of a workload or of its key, one for each choice, in the order of the files.

        Of several trials of a choice the latest counts that is checked and "ok" or "wrong", for
        these speak of the kernel; where there is none, the latest.
        """
        key = workload if isinstance(workload, str) else workload_key(workload)
        with self._mutex:
            if self._kept_at != self._folder.changes:
                self._kept, self._kept_at = _kept(self._folder.entries()), self._folder.changes
            return tuple(self._kept.get(key, {}).values())

    def all_trials(self) -> list[tuple[str, Trial]]:
        """Keys of workloads and trials, repeated ones too, in the order of the files."""
        return [(entry.workload, entry.trial) for entry in self._folder.entries()]

    def unchecked(self) -> list[tuple[str, Trial]]:
        """Keys of workloads and trials that count and are not checked."""
        return [(key, t) for key in self.keys for t in self.trials(key) if not t.checked]

    def best(self, workload: tirx.PrimFunc | str) -> Trial | None:
        """The fastest checked trial; of equally fast ones the first by kind and text."""
        ok = [trial for trial in self.trials(workload) if trial.ok and trial.checked]
        return min(ok, key=lambda trial: (trial.us, trial.kind, trial.text), default=None)

    def add(self, workload: tirx.PrimFunc, target: tvm.target.Target, trial: Trial) -> None:
        """Write a trial; when this returns, it is on disk. An equal trial is written once.

        Raises
        ------
        InputError
            The files cannot be written: nothing of the trial is left in them, it stays in memory,
            and the next call writes it too. Or the trial does not belong here: another target, a
            workload without a root block, a trace that does not replay on it.
        """
        with self._mutex:
            state = self._folder.state
            state.target = self._same_target(target_json(target))
            line, payload = self._line(workload), None
            if trial.ok:
                loaded = load(line)
                value = payload_of(trial, facts_of(loaded.mod), state.target)
                check_replay(value, loaded)
                payload = canonical(value)
            entry = Entry(line.key, trial, None if payload is None else digest(payload))
            self._folder.extend([Addition(entry, line, payload)])

    def take(self, other: Database) -> tuple[int, int]:
        """Add all trials of another database of the same device, and the plans that are not here.

        Returns
        -------
        tuple of int
            How many trials are added, and how many were here already.

        Raises
        ------
        InputError
            It is of another device or target, or the files cannot be written.
        """
        if other.device is None or other.device != self.device:
            raise InputError(f"{other.path} is of {other.device}, {self.path} of {self.device}")
        with self._mutex:
            if other.target is not None:
                self._folder.state.target = self._same_target(other.target)
            other._folder.rebuild()
            theirs, before = other._folder.state, len(self)
            additions = [
                Addition(x, theirs.workloads.get(x.workload), theirs.payloads.get(x.record or ""))
                for x in theirs.entries
            ]
            self._folder.extend(additions)
            for key in plans.plan_keys(other.path):
                if self.plan(key) is None and (data := other.plan(key)) is not None:
                    self.save_plan(key, data)
            added = len(self) - before
            return added, len(additions) - added

    def refresh(self) -> None:
        """Read what other processes wrote since files were last read or written."""
        with self._mutex:
            self._folder.refresh()

    def metaschedule(self, kind: str | None = None) -> Any:
        """The best ok trials as a `MemoryDatabase` of MetaSchedule: those of one kind, or all."""
        from tvm.s_tir.meta_schedule.database import MemoryDatabase

        found = MemoryDatabase()
        with self._mutex:
            for line, payloads in self.records(kind):
                workload = found.commit_workload(load(line).mod)
                for payload in payloads:
                    found.commit_tuning_record(load_record(json.loads(payload), workload))
        return found

    def records(self, kind: str | None = None) -> list[tuple[WorkloadLine, list[str]]]:
        """The lines of MetaSchedule's files, one record for each choice with a time: workloads
        that have any, with their records less the line number of the workload.
        """
        with self._mutex:
            self._folder.rebuild()
            texts = {
                (entry.workload, entry.trial): self._folder.payload(entry)
                for entry in self._folder.entries()
            }
            found = []
            for key, line in self._folder.lines().items():
                ok = [t for t in self.trials(key) if t.ok and kind in (None, t.kind)]
                payloads = [text for trial in ok if (text := texts[key, trial]) is not None]
                if payloads:
                    found.append((line, payloads))
            return found

    def save_plan(self, key: str, data: dict[str, Any]) -> None:
        """Keep a plan; InputError if the folder cannot be written."""
        self._folder.save_plan(key, data)

    def plan(self, key: str) -> dict[str, Any] | None:
        """The plan of a key; a damaged one counts as missing and is a problem."""
        data, problem = plans.read_plan(self.path, key)
        if problem is not None:
            if not self._folder.read_only:
                problem = replace(problem, mended=plans.set_aside(self.path, key))
            self._later.append(problem)
            if not self._folder.silent:
                logger.warning("%s: %s", self.path, problem)
        return data

    def _line(self, workload: tirx.PrimFunc) -> WorkloadLine:
        key = workload_key(workload)
        if key not in self._lines:
            self._lines[key] = self._folder.lines().get(key) or line_of(workload)
        return self._lines[key]

    def _same_target(self, target: dict[str, Any]) -> dict[str, Any]:
        ours = self.target
        if ours is not None and identity(ours) != identity(target):
            raise InputError(f"{self.path} is of the target {ours}, not of {target}")
        return ours or target


def _kept(entries: list[Entry]) -> dict[str, dict[tuple[str, str], Trial]]:
    """By workload and choice, the trial that counts: see `Database.trials`."""
    found: dict[str, dict[tuple[str, str], Trial]] = {}
    for entry in entries:
        of_workload, trial = found.setdefault(entry.workload, {}), entry.trial
        old = of_workload.get((trial.kind, trial.text))
        if old is None or _lasts(trial) or not _lasts(old):
            of_workload[trial.kind, trial.text] = trial
    return found


def _lasts(trial: Trial) -> bool:
    """Whether it speaks of the kernel, whatever came of the choice later."""
    return trial.checked and trial.status in LASTING
