"""Tuning sessions of one database, killed one after the other, and what is left after each."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tvm_fusion.tuning.database import Database, check, device_folders
from tvm_fusion.tuning.measure.processes import PREFIX

from .killed_session import WatchedSession

JITTER_S = 0.05  # longer than an append takes, with the checks before it
DRAWS = 10  # of a moment, where sessions end before it

Command = Callable[[Path, bool], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Moment:
    """When to kill: at a time, or some time after what the session says for the n-th time."""

    kind: str
    seconds: float
    count: int = 0

    @classmethod
    def draw(cls, kind: str, rng: random.Random, whole_s: float, trials: int) -> Moment:
        """A moment of a session of `whole_s` seconds and some trials."""
        if kind == "time":
            return cls(kind, rng.uniform(0.0, whole_s))
        count = 1 if kind == "saving" else 1 + rng.randrange(trials)
        return cls(kind, rng.uniform(0.0, JITTER_S), count)

    def wait(self, session: WatchedSession) -> bool:
        """Waits for the moment; whether the session runs then."""
        if self.kind == "time":
            return session.wait_until(self.seconds)
        wanted = {"kept": None} if self.kind == "kept" else {"phase": self.kind}
        return session.wait_for(wanted, self.count) and session.wait_until(
            session.seconds + self.seconds
        )


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill.

    Attributes
    ----------
    kind : of its moment: "time", "kept", "adding" or "saving"
    moment_s : since the session began
    phase : what the session told of last
    before : trials that were kept and told of until then, in this database
    lost : of these, those that the database does not have
    untold : trials in the database that no session told of: killed before it could
    again : trials of this session that were kept before it began
    processes : that the session had started when they were last counted
    survivors : processes of the session that did not end in `PATIENCE_S`
    ended_s : until all of them ended
    problems : what is wrong with the files
    repaired : whether opening a copy puts them right and keeps all trials
    draws : moments that were drawn; sessions ended before all but the last
    """

    lane: int
    kind: str
    moment_s: float
    phase: str
    before: int
    lost: int
    untold: int
    again: int
    processes: int
    survivors: tuple[str, ...]
    ended_s: float
    problems: tuple[str, ...]
    repaired: bool
    draws: int

    @property
    def ok(self) -> bool:
        """Whether nothing but the running trial was lost, and nothing is left over."""
        return not (self.lost or self.again or self.survivors) and self.repaired


@dataclass
class Lane:
    """Sessions one after the other on one database.

    Parameters
    ----------
    number : int
    command : callable
        The command of a session on a database; it compiles the model, too, if the second argument
        says so.
    place : Path
        A folder for the databases and for temporary files.
    final_repeats : int
    """

    number: int
    command: Command
    place: Path
    final_repeats: int
    told: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    databases: int = 0
    finished: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.temporary = self.place / f"tmp{self.number}"
        self.temporary.mkdir(parents=True)
        self.begin()

    def begin(self) -> None:
        """A new database."""
        self.databases += 1
        self.database = self.place / f"{self.number}.{self.databases}"
        self.told, self.kept = set(), set()

    def whole(self) -> WatchedSession:
        """A session from begin to end."""
        session = WatchedSession(self.command(self.database, False), self.temporary)
        session.finish()
        return session

    def kill(self, kind: str, rng: random.Random, whole_s: float, trials: int) -> Kill:
        """One session that is killed at a moment; sessions that end before it count as going on."""
        for draws in range(1, DRAWS + 1):
            moment = Moment.draw(kind, rng, whole_s, trials)
            session = WatchedSession(self.command(self.database, False), self.temporary)
            if moment.wait(session):
                at_s = session.seconds
                session.kill()
                return self._judged(kind, at_s, session, draws)
            session.finish()
            self._note(session)
            if session.fact("finished")["trials"] == 0:
                self.finished.append(self.finish())
                self.begin()
        raise RuntimeError(f"{DRAWS} sessions ended before the moments to kill them")

    def _judged(self, kind: str, at_s: float, session: WatchedSession, draws: int) -> Kill:
        survivors, ended_s = session.survivors()
        known = self.told | self.kept
        again = self._note(session)
        found = trials_of(self.database)
        problems = check(self.database).problems if self.database.exists() else ()
        self.kept = found
        return Kill(
            lane=self.number,
            kind=kind,
            moment_s=round(at_s, 4),
            phase=session.phase,
            before=len(self.told),
            lost=len((self.told | known) - found),
            untold=len(found - known - self.told),
            again=again,
            processes=session.processes,
            survivors=tuple(survivors),
            ended_s=round(ended_s, 3),
            problems=tuple(map(str, problems)),
            repaired=self._is_repaired(found),
            draws=draws,
        )

    def _note(self, session: WatchedSession) -> int:
        """Takes what a session told; how many trials were kept before, finals apart."""
        before = {_choice(text) for text in self.told | self.kept}
        new = [json.dumps(what) for what in session.kept]
        self.told.update(new)
        firsts = [x for x in new if len(json.loads(x)[1]["samples_us"]) != self.final_repeats]
        return sum(_choice(text) in before for text in firsts)

    def _is_repaired(self, found: set[str]) -> bool:
        """Whether a session that opens the database puts it right; tried on a copy."""
        if not self.database.exists():
            return not found
        with tempfile.TemporaryDirectory(dir=self.place) as place:
            copy = Path(place) / "copy"
            shutil.copytree(self.database, copy)
            for folder in device_folders(copy):
                Database(folder, Database(folder, None).device or folder.name)
            left = [p for p in copy.rglob(".*") if p.is_file()]
            return check(copy).ok and trials_of(copy) == found and not left

    def finish(self) -> dict[str, Any]:
        """A session that nobody kills, and the model compiled with its database."""
        session = WatchedSession(self.command(self.database, True), self.temporary)
        session.finish()
        again = self._note(session)
        plan, compiled = session.fact("finished")["plan"], session.fact("compiled")
        found = check(self.database)
        return {
            "lane": self.number,
            "database": self.databases,
            "told": len(self.told),
            "lost": len((self.told | self.kept) - trials_of(self.database)),
            "again": again,
            "problems": [str(problem) for problem in found.problems],
            "plan_is_saved": any(plan == _like(plan, p) for p in plans_of(self.database)),
            "compiled": compiled["passed"] and compiled["same_plan"],
            "left": sorted(p.name for p in self.temporary.iterdir() if p.name.startswith(PREFIX)),
        }


def _choice(text: str) -> tuple[str, str, str]:
    key, trial = json.loads(text)
    return key, trial["kind"], trial["text"]


def trials_of(database: Path) -> set[str]:
    """Keys and trials of a database, each as JSON, without writing to it."""
    return {
        json.dumps([key, trial.as_dict()])
        for folder in (device_folders(database) if database.exists() else ())
        for key, trial in Database(folder, None).content().entries
    }


def plans_of(database: Path) -> list[dict[str, Any]]:
    """The plans of a database."""
    stores = [Database(folder, None) for folder in device_folders(database)]
    return [store.plan(key) for store in stores for key in sorted(store.content().plans)]


def _like(plan: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """A saved plan without what is kept beside it."""
    return {key: saved[key] for key in plan if key in saved}
