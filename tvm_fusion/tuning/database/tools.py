"""What looks after databases: `tune --db-check`, `--db-merge`, `--db-export`, `--db-import`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm.s_tir.meta_schedule.database import JSONDatabase

from ...config.hardware import HardwareProfile
from ...errors import InputError
from .folders import device_folders, find_database
from .foreign import read_folder
from .lines import Content, Problem
from .metaschedule import WORKLOADS
from .store import DAMAGED, Database


@dataclass(frozen=True, slots=True)
class FolderReport:
    """What was found in one device's folder, or came of it.

    Attributes
    ----------
    device : str or None
        None where nothing says it.
    counts : mapping of str to int
        Of a check: `workloads`, `records` and `failures` (repeated trials of one choice count),
        `unchecked` choices, `plans`, and `quarantined` lines. Of a merge or an import: trials
        `added`, and `present` already. Of an export: `workloads` and `records`.
    problems, notes : tuples of Problem, of str
        What is wrong with the files, and what tuning does about it; what is no problem.
    """

    path: Path
    device: str | None
    counts: Mapping[str, int]
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        said = {"problems": [*map(str, self.problems)], "notes": list(self.notes)}
        return {"path": str(self.path), "device": self.device, **self.counts, **said}

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        more = (f"  {line}" for line in (*self.problems, *self.notes))
        return "\n".join([f"{self.path}: {counts}", *more])


@dataclass(frozen=True, slots=True)
class Report:
    """What was found, or done, for each folder."""

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


def check(path: str | Path) -> Report:
    """Read all folders at or below a path, InputError if there is none; nothing is written."""
    return Report(tuple(map(_check, _folders(path))))


def _check(folder: Path) -> FolderReport:
    database = Database(folder, None, silent=True)
    found, damaged, notes = database.content(), folder / DAMAGED, []
    ok = sum(trial.ok for _, trial in found.entries)
    unchecked = sum(not trial.checked for _, trial in database.counted())
    if database.version_1:
        notes.append(str(database.version_1))
    if unchecked:
        notes.append(
            f"{unchecked} trials are unchecked (from records of MetaSchedule): they count as not "
            "measured, nothing is chosen by them, and tuning measures what it needs of them again"
        )
    counts = {
        "workloads": len({*found.workloads, *(key for key, _ in found.entries)}),
        "records": ok,
        "failures": len(found.entries) - ok,
        "unchecked": unchecked,
        "plans": len(found.plans),
        "quarantined": damaged.read_bytes().count(b"\n") if damaged.exists() else 0,
    }
    return FolderReport(folder, database.device, counts, database.problems, tuple(notes))


def merge(sources: Iterable[str | Path], into: str | Path) -> Report:
    """Add the trials and plans of databases, or of folders of one device, to another database; it
    is made. Folders of different devices, targets or versions stay apart, the sources as they are.
    InputError if a source is not there, or `into` cannot be written.
    """
    found = [folder for source in sources for folder in _folders(source)]
    return Report(tuple(_merge(folder, Path(into)) for folder in found))


def _merge(source: Path, into: Path) -> FolderReport:
    theirs = Database(source, None, silent=True)
    content, problems = theirs.content(), theirs.problems
    if theirs.device is None:
        why = (
            "nothing says of which device it is: tune once with it, which repairs the folder, or "
            "take a database of MetaSchedule over by --db-import"
        )
        return _taken(source, Content(), 0, [*problems, Problem(str(source), why)])
    place = into / theirs.device
    if place.exists() and place.samefile(source):
        return _taken(source, content, 0, problems)
    return _taken(source, content, Database(place, theirs.device).take(content), problems)


def _taken(source: Path, found: Content, added: int, problems: Iterable[Problem]) -> FolderReport:
    counts = {"added": added, "present": len(found.entries) - added}
    return FolderReport(source, found.device, counts, tuple(problems))


def export(path: str | Path, out: str | Path) -> Report:
    """Write the ok trials, one for each choice, as `JSONDatabase(work_dir=...)` reads them.

    Parameters
    ----------
    path : path
        A database, or the folder of one device in it.
    out : path
        For one device this folder; for several, one folder in it for each, with the same name.
        InputError if it holds a database, or cannot be written.
    """
    folders = device_folders(path) if Path(path).is_dir() else []
    if not folders:
        raise InputError(f"there is no database {path}; check the path")
    out = Path(out)
    places = [out if len(folders) == 1 else out / folder.name for folder in folders]
    for place in places:
        if device_folders(place):
            raise InputError(f"{place} holds a database already: name a folder without one")
    return Report(tuple(map(_export, folders, places)))


def _export(folder: Path, out: Path) -> FolderReport:
    database = Database(folder, None)
    found = database.tuning_records()
    counts = {"workloads": len(found), "records": sum(map(len, found.values()))}
    try:
        out.mkdir(parents=True, exist_ok=True)
        stock = JSONDatabase(work_dir=str(out))
        for records in found.values():
            stock.commit_workload(records[0].workload.mod)
            for record in records:
                stock.commit_tuning_record(record)
        written = len(JSONDatabase(work_dir=str(out)))  # TVM does not notice a full disk
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"cannot write {out}: {error}; name another folder") from error
    if written != counts["records"]:
        raise InputError(
            f"cannot write {out}: it has {written} of {counts['records']} records"
            "; free space on the disk"
        )
    return FolderReport(out, database.device, counts)


def import_folders(
    sources: Iterable[str | Path],
    into: str | Path,
    hw: HardwareProfile,
    target: tvm.target.Target,
) -> Report:
    """Add the records of MetaSchedule's own folders (`JSONDatabase`) to a database as unchecked
    trials of a device: nothing is chosen by them until tuning measures them. The database is made;
    records of other targets are left out. InputError if a source is not there, or `into` cannot be
    written.
    """
    sources = [Path(source) for source in sources]
    for source in sources:
        if not (source / WORKLOADS).is_file():
            raise InputError(
                f"there is no database of MetaSchedule in {source}: no {WORKLOADS}"
                "; name the folder of one"
            )
    database = find_database(into, hw, target)
    return Report(tuple(_import(source, database) for source in sources))


def _import(source: Path, into: Database) -> FolderReport:
    found = Content(into.device, into.target)
    problems = read_folder(source, found)
    return _taken(source, found, into.take(found), problems)


def _folders(path: str | Path) -> list[Path]:
    if not Path(path).is_dir():
        raise InputError(f"there is no folder {path}; check the path")
    return device_folders(path)
