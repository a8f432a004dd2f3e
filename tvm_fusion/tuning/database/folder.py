"""A database folder: its state in memory kept equal to its files, under the lock."""

from __future__ import annotations

import datetime
import logging
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import InputError
from ..measure.trial_record import Trial
from . import files, guard, plans
from .folder_state import Findings, Problem, State, record_text
from .guard import GUARD, Entry
from .lines import RECORDS, WORKLOADS, WorkloadLine, canonical, digest
from .lock import LOCK, CannotLock, locked
from .reconcile import reconcile
from .records import payload_of
from .workload_lines import facts_of, load

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Addition:
    """A trial to be written, the line of its workload if there is one, and its record if it has
    one.
    """

    entry: Entry
    line: WorkloadLine | None
    payload: str | None


class Folder:
    """The files of a database and what they hold.

    Attributes
    ----------
    path : Path
    read_only : bool
    state : State
        What the files hold.
    pending : list of Addition
        Trials that are in no file: these could not be written.
    findings : Findings
        Of the last reading.
    changes : int
        Grows whenever there are other trials than before.
    silent : bool
        Log nothing of the findings.
    """

    def __init__(
        self,
        path: Path,
        device: str | None,
        target: dict[str, Any] | None,
        read_only: bool,
        silent: bool = False,
    ) -> None:
        self.path = path
        self.read_only = read_only
        self.silent = silent
        self.state = State(device, target)
        self.pending: list[Addition] = []
        self.findings = Findings()
        self.changes = 0
        self._signature: tuple[Any, ...] | None = None
        self._known: set[tuple[str, Trial]] = set()
        self._told = True

    def entries(self) -> list[Entry]:
        """All trials, in the order of the files."""
        waiting = (addition.entry for addition in self.pending)
        return [*self.state.entries, *(x for x in waiting if _what(x) not in self._known)]

    def begin(self) -> None:
        """Read the files for the first time.

        Raises
        ------
        InputError
            The folder is opened for writing, and nothing can be written to it.
        """
        if not self.read_only:
            try:
                with locked(self.path):
                    files.check_room(self.path)
                    files.sweep(self.path)
            except (CannotLock, OSError) as error:
                why = (error.__cause__ or error).strerror or error
                raise InputError(
                    f"cannot write to {self.path}: {why}. Free space on the disk or make the "
                    "folder writable, or use another one"
                ) from error
        self.refresh()

    def refresh(self) -> None:
        """Read the files if they changed, and repair them where that can be done."""
        try:
            lock = nullcontext() if self.read_only and not self._has_lock() else locked(self.path)
            with lock:
                self._read_if_changed()
                if not self.read_only and self.findings.dirty:
                    self._repair_if_possible()
        except CannotLock as error:
            self._read_if_changed()
            if not self.read_only:
                self._note(error)
        self._tell()

    def lines(self) -> dict[str, WorkloadLine]:
        """The lines of all workloads, by key."""
        waiting = {x.line.key: x.line for x in self.pending if x.line is not None}
        return {**waiting, **self.state.workloads}

    def payload(self, entry: Entry) -> str | None:
        """The text of a trial's record, without the line number of its workload."""
        waiting = (x.payload for x in self.pending if x.entry == entry)
        return self.state.payloads.get(entry.record or "") or next(waiting, None)

    def extend(self, additions: Iterable[Addition]) -> None:
        """Add trials, in memory and in the files: those that are not here yet, and those that are
        but for the line of their workload.
        """
        waiting = {_what(addition.entry) for addition in self.pending}
        for addition in additions:
            trial, line = _what(addition.entry), addition.line
            lost = line is not None and line.key not in self.state.workloads
            if trial not in waiting and (lost or trial not in self._known):
                waiting.add(trial)
                self.pending.append(addition)
                self.changes += 1
        if self.pending:
            self._flush()

    def _flush(self) -> None:
        """Write all that is pending."""
        self.check_writable()
        with self._writing():
            self._read_if_changed()
            if self.findings.blocked:
                raise InputError(f"{self.path} cannot be written: {self.findings.blocked}")
            if self.findings.dirty:
                self._repair()
            self._tell()
            self._append(self.pending)
            self.pending = []

    def save_plan(self, key: str, data: dict[str, Any]) -> None:
        """Write a plan.

        Raises
        ------
        InputError
            The folder cannot be written.
        """
        self.check_writable()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with locked(self.path):
                plans.write_plan(self.path, key, data)
        except OSError as error:
            raise InputError(f"cannot write a plan to {self.path}: {error.strerror}") from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with locked(self.path):
                yield
        except (CannotLock, OSError) as error:
            raise InputError(
                f"cannot write the trial to {self.path}: {error}: make the folder writable"
            ) from error

    def check_writable(self) -> None:
        """InputError for a folder that is opened for reading."""
        if self.read_only:
            raise InputError(f"{self.path} is opened for reading; open it for writing to add to it")

    def _append(self, additions: list[Addition]) -> None:
        """The guard's lines come before the lines that they are about: a process that ends on the
        way leaves nothing that the guard does not know.
        """
        state, device = self.state, self.state.device or ""
        lines = {x.line.key: x.line for x in additions if x.line is not None}
        new = [line for key, line in lines.items() if key not in state.workloads]
        additions = [x for x in additions if _what(x.entry) not in self._known]
        place = {key: index for index, key in enumerate([*state.workloads, *(x.key for x in new)])}
        head = [] if self._size(GUARD) else [guard.device_line(device, state.target)]
        places = [guard.workload_line(device, line, place[line.key]) for line in new]
        trials = [guard.trial_line(device, x.entry) for x in additions]
        texts = [
            record_text(place[x.entry.workload], x.payload)
            for x in additions
            if x.payload is not None and x.entry.workload in place
        ]
        pieces = [
            (GUARD, [*head, *places]),
            (WORKLOADS, [line.text for line in new]),
            (GUARD, trials),
            (RECORDS, texts),
        ]
        missing = [name for name in files.NAMES if not (self.path / name).exists()]
        written = [(n, "".join(x + "\n" for x in found)) for n, found in pieces if found]
        files.append(self.path, [*((name, "") for name in missing), *written])
        self._take(additions, new)

    def _take(self, additions: list[Addition], new: list[WorkloadLine]) -> None:
        """The state after an append."""
        state = self.state
        lost = any(entry.workload == line.key for line in new for entry in state.entries)
        state.workloads.update((line.key, line) for line in new)
        state.entries += [x.entry for x in additions]
        self._known.update(_what(x.entry) for x in additions)
        state.payloads.update(
            (x.entry.record, x.payload) for x in additions if x.entry.record and x.payload
        )
        if lost:  # trials whose workload had no line have their records written now
            self._repair()
        self._signature = files.signature(self.path)

    def _read_if_changed(self) -> None:
        signature = files.signature(self.path)
        if signature == self._signature:
            return
        found = {name: files.read(self.path / name) for name in files.NAMES}
        day = self._day()
        state, findings = reconcile(found, self.state.device, self.state.target, day)
        self.state, self.findings, self._signature = state, findings, signature
        self._known = {_what(entry) for entry in state.entries}
        self.changes += 1
        self._told = False

    def _tell(self) -> None:
        """Log the findings of the last reading, once: all where they are repaired, else that there
        are any.
        """
        problems, told = self.findings.problems, self._told or self.silent
        self._told = True
        if told or not problems:
            return
        if self.read_only:
            check = f"python -m tvm_fusion tune --db-check --work-dir {shlex.quote(str(self.path))}"
            logger.warning("%d problems in the database, listed by: %s", len(problems), check)
            return
        for problem in problems:
            logger.warning("%s: %s", self.path, problem)

    def _day(self) -> str:
        """When the file of records was last written."""
        try:
            seconds = (self.path / RECORDS).stat().st_mtime
        except OSError:
            return datetime.date.today().isoformat()
        return datetime.date.fromtimestamp(seconds).isoformat()

    def _repair_if_possible(self) -> None:
        if self.findings.blocked:
            return
        try:
            self._repair()
        except InputError as error:
            self._note(error)

    def _note(self, error: InputError) -> None:
        problem = Problem(str(self.path), f"{error}; it is only read")
        if problem not in self.findings.problems:
            self.findings.problems.append(problem)

    def _repair(self) -> None:
        self.rebuild()
        files.repair(self.path, self.state.texts(), self.findings.rejected)
        self.findings.has_repaired()
        self._signature = files.signature(self.path)

    def rebuild(self) -> None:
        """Write the records of ok trials that have none, in memory."""
        state = self.state
        for position, entry in enumerate(state.entries):
            line = state.workloads.get(entry.workload)
            there = entry.record in state.payloads or not entry.trial.ok
            if there or line is None or state.target is None:
                continue
            payload = canonical(payload_of(entry.trial, facts_of(load(line).mod), state.target))
            state.entries[position] = replace(entry, record=digest(payload))
            state.payloads[digest(payload)] = payload

    def _has_lock(self) -> bool:
        return (self.path / LOCK).exists()

    def _size(self, name: str) -> int:
        path = self.path / name
        return path.stat().st_size if path.exists() else 0


def _what(entry: Entry) -> tuple[str, Trial]:
    """By what a trial is told from others."""
    return entry.workload, entry.trial
