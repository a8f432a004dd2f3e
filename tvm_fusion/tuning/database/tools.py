"""What looks after databases: `tune --db-check`, `--db-merge`, `--db-export`, `--db-import`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import tvm

from ...config.hardware import HardwareProfile
from ...errors import InputError
from ...host.atomic_files import replace_file
from .folders import device_folders, find_database
from .foreign import read_folder
from .lines import Content, Problem, canonical
from .metaschedule import RECORDS, WORKLOADS, short_key
from .replay import CannotJudge, Suspect, judge
from .store import DAMAGED, Database


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
        Choices whose numbers nobody compared: those of records of MetaSchedule. They are no
        problem; nothing is chosen by them.
    plans : int
    quarantined : int
        Lines that were taken out because they were damaged.
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
        lines = [
            f"{self.path}: {self.workloads} workloads, {self.records} records, "
            f"{self.failures} failures, {self.plans} plans, {self.quarantined} lines in {DAMAGED}",
            *(f"  {problem}" for problem in self.problems),
        ]
        if self.unchecked:
            lines.append(
                f"  {self.unchecked} trials are unchecked (from records of MetaSchedule): they "
                "count as not measured, nothing is chosen by them, and tuning measures what it "
                "needs of them again"
            )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Taken:
    """What came of one folder that was merged or imported.

    Attributes
    ----------
    source : Path
    into : Path or None
        None where nothing is taken: see `problems`.
    added, present : int
        Trials that are written, and that were there already.
    problems : tuple of Problem
        What is wrong with the source's files.
    """

    source: Path
    into: Path | None
    added: int
    present: int
    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        head = f"{self.source}: {self.added} trials added, {self.present} there already"
        return "\n".join([head, *(f"  {problem}" for problem in self.problems)])


@dataclass(frozen=True, slots=True)
class Exported:
    """A written folder, and how many lines its files have."""

    path: Path
    workloads: int
    records: int
    problems: tuple[Problem, ...] = ()

    def __str__(self) -> str:
        return f"{self.path}: {self.workloads} workloads, {self.records} records"


Of = TypeVar("Of", FolderReport, Taken, Exported)


@dataclass(frozen=True, slots=True)
class Report(Generic[Of]):
    """What was found, or done, for each folder."""

    folders: tuple[Of, ...]

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
        rows = [{f.name: _plain(getattr(x, f.name)) for f in fields(x)} for x in self.folders]
        return {"ok": self.ok, "folders": rows}

    def __str__(self) -> str:
        return "\n".join(map(str, self.folders)) or "no database"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [str(x) for x in value]
    return str(value) if isinstance(value, Path) else value


def check(path: str | Path, *, replay: bool = False) -> Report[FolderReport]:
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
    return Report(tuple(_check(folder, replay) for folder in _folders(path)))


def _check(folder: Path, replay: bool) -> FolderReport:
    database = Database.open(folder, None, silent=True)
    trials = database.all_trials()
    ok = sum(trial.ok for _, trial in trials)
    damaged = folder / DAMAGED
    return FolderReport(
        folder,
        database.device,
        len(database.keys),
        ok,
        len(trials) - ok,
        len(database.unchecked()),
        len(database.plan_keys()),
        damaged.read_bytes().count(b"\n") if damaged.exists() else 0,
        (*database.problems, *(_replay(database) if replay else ())),
    )


def _replay(database: Database) -> Sequence[Problem]:
    suspects = [Suspect(key, module, tuple(found)) for key, module, found in database.records()]
    try:
        verdicts = judge(suspects)
    except CannotJudge as error:
        return [Problem(str(database.path), str(error))]
    return [
        Problem(f"workload {short_key(suspect.key)}", why)
        for suspect, verdict in zip(suspects, verdicts, strict=True)
        for why in (verdict.workload, *verdict.payloads)
        if why
    ]


def merge(sources: Iterable[str | Path], into: str | Path) -> Report[Taken]:
    """Add the trials and plans of databases to another one; folders of different devices, targets
    or versions stay apart, and the sources as they are.

    Parameters
    ----------
    sources : paths
        Databases, or folders of one device.
    into : path
        A database; it is made.

    Raises
    ------
    InputError
        A source is not there, or `into` cannot be written.
    """
    found = [folder for source in sources for folder in _folders(source)]
    return Report(tuple(_merge(folder, Path(into)) for folder in found))


def _merge(source: Path, into: Path) -> Taken:
    theirs = Database.open(source, None, silent=True)
    if theirs.device is None:
        why = (
            "nothing says of which device it is: tune once with it, which repairs the folder, or "
            "take a database of MetaSchedule over by --db-import"
        )
        return Taken(source, None, 0, 0, (*theirs.problems, Problem(str(source), why)))
    place = into / theirs.device
    if place.exists() and place.samefile(source):
        return Taken(source, place, 0, len(theirs), theirs.problems)
    return _take(source, Database.open(place, theirs.device), theirs.content(), theirs.problems)


def _take(source: Path, into: Database, found: Content, problems: Sequence[Problem]) -> Taken:
    added = into.take(found)
    return Taken(source, into.path, added, len(found.entries) - added, tuple(problems))


def export(path: str | Path, out: str | Path) -> Report[Exported]:
    """Write the ok trials, one for each choice, as `JSONDatabase(work_dir=...)` reads them.

    Parameters
    ----------
    path : path
        A database, or the folder of one device in it.
    out : path
        For one device this folder; for several, one folder in it for each, with the same name.

    Raises
    ------
    InputError
        There is no database, or `out` holds one, or cannot be written.
    """
    folders = device_folders(path) if Path(path).is_dir() else []
    if not folders:
        raise InputError(f"there is no database {path}")
    out = Path(out)
    places = [out if len(folders) == 1 else out / folder.name for folder in folders]
    for place in places:
        if device_folders(place):
            raise InputError(f"{place} holds a database already: name a folder without one")
    return Report(tuple(map(_export, folders, places)))


def _export(folder: Path, out: Path) -> Exported:
    found = Database.open(folder, None).records()
    workloads = [canonical([key, module]) for key, module, _ in found]
    records = [
        canonical([number, payload])
        for number, (*_, payloads) in enumerate(found)
        for payload in payloads
    ]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {out}: {error.strerror or error}") from error
    for name, lines in ((WORKLOADS, workloads), (RECORDS, records)):
        replace_file(out / name, "".join(line + "\n" for line in lines))
    return Exported(out, len(workloads), len(records))


def import_folders(
    sources: Iterable[str | Path],
    into: str | Path,
    hw: HardwareProfile,
    target: tvm.target.Target,
) -> Report[Taken]:
    """Add the records of MetaSchedule's own folders (`JSONDatabase`) to a database, as unchecked
    trials of a device: nothing is chosen by them until tuning measures them.

    Parameters
    ----------
    sources : paths
        Folders with `database_workload.json` and `database_tuning_record.json`; they stay as they
        are.
    into : path
        A database; it is made.
    hw, target
        The device that the records are of; those of other targets are left out.

    Raises
    ------
    InputError
        A source is not there, or `into` cannot be written.
    """
    sources = [Path(source) for source in sources]
    for source in sources:
        if not (source / WORKLOADS).is_file():
            raise InputError(f"there is no database of MetaSchedule in {source}: no {WORKLOADS}")
    database = find_database(into, hw, target)
    return Report(tuple(_import(source, database) for source in sources))


def _import(source: Path, into: Database) -> Taken:
    found = Content(into.device, into.target)
    problems = read_folder(source, found)
    return _take(source, into, found, problems)


def _folders(path: str | Path) -> list[Path]:
    if not Path(path).is_dir():
        raise InputError(f"there is no folder {path}")
    return device_folders(path)
