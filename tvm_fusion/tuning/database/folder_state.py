"""What a database folder holds, in memory, and the texts of its files."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from . import guard
from .files import Rejected
from .guard import GUARD, Entry
from .lines import RECORDS, WORKLOADS, WorkloadLine


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with the files of a database.

    Attributes
    ----------
    where, why : str
    remedy : str
        What tuning does about it, such as "taken out"; empty where it stays as it is.
    mended : bool
        Whether that is done.
    """

    where: str
    why: str
    remedy: str = ""
    mended: bool = False

    def __str__(self) -> str:
        if not self.remedy:
            return f"{self.where}: {self.why}"
        done = self.remedy if self.mended else f"would be {self.remedy} by the next tune"
        return f"{self.where}: {self.why}; {done}"


@dataclass(slots=True)
class State:
    """The content of a folder.

    Attributes
    ----------
    device : str or None
        What the folder is of; None where nothing says it.
    target : dict or None
        The target as JSON.
    workloads : dict
        Lines by their key, in the order of the file.
    entries : list of Entry
        Trials in the order of the file.
    payloads : dict
        Texts of records, without the line number of the workload, by their digest.
    """

    device: str | None = None
    target: dict[str, Any] | None = None
    workloads: dict[str, WorkloadLine] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    payloads: dict[str, str] = field(default_factory=dict)

    def texts(self) -> dict[str, str]:
        """The files, each as one text."""
        device = self.device or ""
        place = {key: index for index, key in enumerate(self.workloads)}
        lines = {
            GUARD: [
                guard.device_line(device, self.target),
                *(guard.workload_line(device, w, place[w.key]) for w in self.workloads.values()),
                *(guard.trial_line(device, entry) for entry in self.entries),
            ],
            WORKLOADS: [workload.text for workload in self.workloads.values()],
            RECORDS: [
                record_text(place[entry.workload], self.payloads[entry.record])
                for entry in self.entries
                if entry.workload in place and entry.record in self.payloads
            ],
        }
        return {name: "".join(line + "\n" for line in found) for name, found in lines.items()}


def record_text(index: int, payload: str) -> str:
    """The line of a record."""
    return f"[{index},{payload}]"


@dataclass(slots=True)
class Findings:
    """What is wrong with the files of a folder, gathered while they are read.

    Attributes
    ----------
    problems : list of Problem
    rejected : list of Rejected
        Lines that go to the quarantine.
    dirty : bool
        The files are to be written anew.
    blocked : str
        Why they must not be; empty where they may.
    """

    problems: list[Problem] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    dirty: bool = False
    blocked: str = ""

    def reject(self, file: str, number: int, raw: bytes, why: str) -> None:
        """Take a line out; `number` counts from 0."""
        self.rejected.append(Rejected(file, number + 1, raw, why))
        self.repair(f"{file} line {number + 1}", why, "taken out")

    def repair(self, where: str, why: str, remedy: str) -> None:
        """Something that writing the files anew puts right."""
        self.problems.append(Problem(where, why, remedy))
        self.dirty = True

    def has_repaired(self) -> None:
        """The files are written anew."""
        self.problems = [replace(p, mended=bool(p.remedy)) for p in self.problems]
        self.rejected, self.dirty = [], False

    def note(self, where: str, why: str) -> None:
        """Something that stays as it is."""
        self.problems.append(Problem(where, why))

    def block(self, where: str, why: str) -> None:
        """Something that no file may be written with."""
        self.problems.append(Problem(where, why))
        self.blocked = f"{where}: {why}"
