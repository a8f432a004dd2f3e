"""What a database holds, and what is wrong with it: `tune --db-check`."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...errors import InputError
from . import plans
from .files import QUARANTINE
from .folder_state import Problem
from .folders import device_folders
from .sandbox import CannotJudge, Suspect, judge
from .store import Database
from .workload_lines import short_key


@dataclass(frozen=True, slots=True)
class FolderReport:
    """One device's folder.

    Attributes
    ----------
    path : Path
    device : str or None
        None where no line says it.
    workloads, records, failures : int
        How many; repeated trials of one choice count.
    unchecked : int
        Choices whose numbers nobody compared: those of records that the guard does not know. They
        are no problem; nothing is chosen by them.
    plans : int
        Those that can be read.
    quarantined : int
        Files in the quarantine.
    problems : tuple of Problem
        What is wrong with the files, and what the next tuning session on the folder does about it.
    """

    path: Path
    device: str | None
    workloads: int
    records: int
    failures: int
    unchecked: int
    plans: int
    quarantined: int
    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        head = (
            f"{self.path}: {self.workloads} workloads, {self.records} records, "
            f"{self.failures} failures, {self.plans} plans, {self.quarantined} files in quarantine"
        )
        lines = [head, *(f"  {problem}" for problem in self.problems)]
        if self.unchecked:
            lines.append(
                f"  {self.unchecked} trials are unchecked (from records without a line in "
                "guard.jsonl): they count as not measured, nothing is chosen by them, and tuning "
                "measures what it needs of them again"
            )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return found | {"path": str(self.path), "problems": [str(p) for p in self.problems]}


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All folders of a database, sorted by path."""

    folders: tuple[FolderReport, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Those of all folders."""
        return tuple(problem for folder in self.folders for problem in folder.problems)

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return {"ok": self.ok, "folders": [folder.to_json() for folder in self.folders]}

    def __str__(self) -> str:
        return "\n".join(map(str, self.folders)) or "no database"


def check(path: str | Path, *, replay: bool = False) -> CheckReport:
    """Read all folders at or below a path; nothing is written or repaired.

    Parameters
    ----------
    path : path
    replay : bool
        Load each workload in a process of its own, compare its hash, and replay each record.

    Raises
    ------
    InputError
        There is no such folder.
    """
    if not Path(path).is_dir():
        raise InputError(f"there is no folder {path}")
    return CheckReport(tuple(_check_folder(x, replay) for x in device_folders(path)))


def _check_folder(folder: Path, replay: bool) -> FolderReport:
    database = Database.open(folder, None, silent=True)
    read = [plans.read_plan(folder, key) for key in plans.plan_keys(folder)]
    all_trials = database.all_trials()
    ok = sum(trial.ok for _, trial in all_trials)
    problems = [*database.problems, *(p for _, p in read if p is not None)]
    if replay:
        problems += _replay(database)
    quarantine = folder / QUARANTINE
    return FolderReport(
        folder,
        database.device,
        len(database.keys),
        ok,
        len(all_trials) - ok,
        len(database.unchecked()),
        sum(data is not None for data, _ in read),
        len(list(quarantine.iterdir())) if quarantine.is_dir() else 0,
        tuple(problems),
    )


def _replay(database: Database) -> list[Problem]:
    suspects = [
        Suspect(line, tuple(json.loads(text) for text in payloads))
        for line, payloads in database.records()
    ]
    try:
        verdicts = judge(suspects)
    except CannotJudge as error:
        return [Problem(str(database.path), str(error))]
    found = []
    for suspect, verdict in zip(suspects, verdicts, strict=True):
        where = f"workload {short_key(suspect.workload.key)}"
        found += [Problem(where, why) for why in (verdict.workload, *verdict.payloads) if why]
    return found
