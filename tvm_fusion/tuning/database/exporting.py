"""A folder that MetaSchedule opens, without the guard: `tune --db-export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...host.atomic_files import replace_file
from .folder_state import record_text
from .folders import device_folders
from .lines import RECORDS, WORKLOADS
from .store import Database


@dataclass(frozen=True, slots=True)
class Exported:
    """A written folder, and how many lines its files have."""

    path: Path
    workloads: int
    records: int

    def __str__(self) -> str:
        return f"{self.path}: {self.workloads} workloads, {self.records} records"

    def to_json(self) -> dict[str, Any]:
        """The folder as a JSON object."""
        return {"path": str(self.path), "workloads": self.workloads, "records": self.records}


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The written folders, one for each device."""

    folders: tuple[Exported, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.folders))

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return {"folders": [folder.to_json() for folder in self.folders]}


def export(path: str | Path, out: str | Path) -> ExportReport:
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
    return ExportReport(tuple(map(_export, folders, places)))


def _export(folder: Path, out: Path) -> Exported:
    found = Database.open(folder, None).records()
    records = [
        record_text(index, text) for index, (_, payloads) in enumerate(found) for text in payloads
    ]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {out}: {error.strerror or error}") from error
    replace_file(out / WORKLOADS, "".join(line.text + "\n" for line, _ in found))
    replace_file(out / RECORDS, "".join(record + "\n" for record in records))
    return Exported(out, len(found), len(records))
