"""Kills tuning sessions at random moments and looks at what is left; the next ones go on.

    python -m tests.benchmarks.tuning.kills --target cuda --kills 20 --seed 1 --out FILE

Half of the moments are drawn evenly from the time that a session takes when nobody kills it; the
others come a few milliseconds after a trial was kept, or after the session began to write to its
database or to save its plan. After each kill what was kept must be in the database, and what the
session started must end. No session tries again what was kept. In the end a session of each
database is left to finish, and the model is compiled with it.

Several lanes, each with a database of its own, share the kills.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tvm_fusion.config import resolve_target

from ..record import header, write
from .killed_lane import Command, Kill, Lane

KINDS = ("time", "kept", "time", "adding", "time", "kept", "time", "saving", "time", "kept")
SETTINGS = {
    "trials": 8,
    "trials_per_task": 1000,
    "repeats": 5,
    "final_repeats": 11,
    "least_gain": 0.0,
}
UNFINISHED = ("lost", "again", "problems", "left")


def kill_sessions(
    command: Callable[[int], Command],
    place: Path,
    *,
    kills: int,
    seed: int,
    lanes: int = 1,
    settings: Mapping[str, Any] = SETTINGS,
    kinds: Sequence[str] = KINDS,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Kills sessions and returns what came of it.

    Parameters
    ----------
    command : callable
        Of a lane's number: how its sessions are begun.
    place : Path
        A folder for databases.
    kills, seed, lanes : int
    settings : mapping
        Those of the sessions that `command` begins.
    kinds : sequence of str
        Of moments, in turn.
    say : callable
        Gets a line after each kill.
    """
    repeats, trials = settings["final_repeats"], settings["trials"]
    phases_s = _phases(Lane(lanes, command(0), place, repeats))
    whole_s = phases_s["finished"]
    say(f"a session takes {whole_s:.1f} s")
    numbers = iter(range(kills))
    found: dict[int, Kill] = {}

    def work(lane: Lane) -> list[dict[str, Any]]:
        for number in numbers:
            rng = random.Random(f"{seed}/{number}")
            kill = lane.kill(kinds[number % len(kinds)], rng, whole_s, trials)
            found[number] = kill
            say(f"{number}: {'ok' if kill.ok else 'NOT OK'} {json.dumps(asdict(kill))}")
        return [*lane.finished, lane.finish()]

    with ThreadPoolExecutor(lanes) as pool:
        todo = [Lane(n, command(n), place, repeats) for n in range(lanes)]
        finished = [f for ended in pool.map(work, todo) for f in ended]
    rows = [found[number] for number in sorted(found)]
    return {
        "session_s": phases_s,
        "kills": [{"ok": kill.ok, **asdict(kill)} for kill in rows],
        "finished": finished,
        "summary": summary(rows, finished),
    }


def _phases(lane: Lane) -> dict[str, float]:
    """When the phases of a session begin that nobody kills, in seconds."""
    found: dict[str, float] = {}
    for second, what in lane.whole().told:
        found.setdefault(what.get("phase", next(iter(what))), round(second, 3))
    return found


def summary(kills: Sequence[Kill], finished: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over all kills, and whether all is as it should be."""
    whole = [not any(f[key] for key in UNFINISHED) for f in finished]
    right = [f["plan_is_saved"] and f["compiled"] for f in finished]
    return {
        "kills": len(kills),
        "phases": dict(Counter(kill.phase for kill in kills)),
        "lost": sum(k.lost for k in kills) + sum(f["lost"] for f in finished),
        "again": sum(k.again for k in kills) + sum(f["again"] for f in finished),
        "untold": sum(k.untold for k in kills),
        "survivors": sum(len(k.survivors) for k in kills),
        "longest_ended_s": max((k.ended_s for k in kills), default=0.0),
        "median_ended_s": statistics.median([k.ended_s for k in kills] or [0.0]),
        "with_problems": sum(bool(k.problems) for k in kills),
        "ok": all(k.ok for k in kills) and all(whole) and all(right),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.tuning.kills", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--target", default="llvm", help="llvm, cuda or a device")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=1, help="databases tuned side by side")
    parser.add_argument("--builders", type=int, default=1, help="of each session")
    parser.add_argument("--trials", type=int, default=SETTINGS["trials"], help="of each session")
    parser.add_argument("--workloads", default="softmax,bias_gelu", help="names, by commas")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on every large extent")
    parser.add_argument("--out", type=Path, help="write a JSON file")
    given = parser.parse_args(arguments)
    names = given.workloads.split(",")
    settings = SETTINGS | {"trials": given.trials, "builders": given.builders}
    _, hw = resolve_target(given.target)

    def command(lane: int) -> Command:
        name = names[lane % len(names)]

        def of(database: Path, compiled: bool) -> list[str]:
            options = {
                "--target": given.target,
                "--database": database,
                "--settings": json.dumps(settings),
                "--scale": given.scale,
            }
            words = [str(word) for option in options.items() for word in option]
            module = f"{__package__}.session"
            last = ["--compile"] if compiled else []
            return [sys.executable, "-m", module, name, *words, *last]

        return of

    with tempfile.TemporaryDirectory() as place:
        found = kill_sessions(
            command,
            Path(place),
            kills=given.kills,
            seed=given.seed,
            lanes=given.lanes,
            settings=settings,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    print(json.dumps(found["summary"], indent=1))
    if given.out is not None:
        head = header(hw.name, hw.kind == "cuda", given.scale, settings["repeats"])
        head = {k: v for k, v in head.items() if k != "rows"}
        write(head | {"settings": settings, "workloads": names} | found, given.out)
    return 0 if found["summary"]["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
