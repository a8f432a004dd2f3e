"""Databases into one: `tune --db-merge`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError
from .folder_state import Problem
from .folders import device_folders
from .store import Database


@dataclass(frozen=True, slots=True)
class Merged:
    """What came of one folder of a source.

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

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return {
            "source": str(self.source),
            "into": None if self.into is None else str(self.into),
            "added": self.added,
            "present": self.present,
            "problems": [str(problem) for problem in self.problems],
        }


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What came of all folders of all sources, in their order."""

    folders: tuple[Merged, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.folders)) or "no database"

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return {"folders": [folder.to_json() for folder in self.folders]}


def merge(sources: Iterable[str | Path], into: str | Path) -> MergeReport:
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
    sources, into = [Path(x) for x in sources], Path(into)
    for source in sources:
        if not source.is_dir():
            raise InputError(f"there is no folder {source}")
    found = [folder for source in sources for folder in device_folders(source)]
    return MergeReport(tuple(_merge(folder, into) for folder in found))


def _merge(source: Path, into: Path) -> Merged:
    theirs = Database.open(source, None, silent=True)
    if theirs.device is None:
        why = "nothing says of which device it is; tune once with it, which repairs the folder"
        return Merged(source, None, 0, 0, (*theirs.problems, Problem(str(source), why)))
    place = into / theirs.device
    if place.exists() and place.samefile(source):
        return Merged(source, place, 0, len(theirs), theirs.problems)
    added, present = Database.open(place, theirs.device).take(theirs)
    return Merged(source, place, added, present, theirs.problems)
