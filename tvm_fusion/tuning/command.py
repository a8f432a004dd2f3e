"""``python -m tvm_fusion tune``: a session, and what looks after databases."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._arguments import INTERRUPTED, POLICY_HELP, TARGET_HELP, model_of, policy_of
from ..config import resolve_target
from ..errors import InputError
from .session.result import TuneResult

if TYPE_CHECKING:
    from .session.session import Session


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    work = command.add_mutually_exclusive_group(required=True)
    work.add_argument("model", nargs="?", help="a .pt2, .onnx, Relax .py or Relax .json file")
    work.add_argument("--demo", action="store_true", help="a pre-norm transformer block")
    work.add_argument("--db-check", action="store_true", help="check a database, line by line")
    work.add_argument(
        "--db-merge", nargs="+", metavar="DIR", help="put databases together, into --work-dir"
    )
    work.add_argument(
        "--db-export", metavar="DIR", help="write plain MetaSchedule databases, without our checks"
    )
    work.add_argument(
        "--db-import", nargs="+", metavar="DIR", help="take MetaSchedule databases over, unchecked"
    )
    command.add_argument(
        "--work-dir", metavar="DIR", type=Path, required=True, help="the folder of the database"
    )
    command.add_argument("--target", help=TARGET_HELP)
    command.add_argument("--policy", help=POLICY_HELP)
    command.add_argument("--trials", type=int, metavar="N", help="most trials of this session")
    command.add_argument(
        "--minutes", type=float, metavar="M", help="most minutes of this session; 0 is no limit"
    )
    command.add_argument("--settings", metavar="FILE", help="a .toml file like configs/tune_*.toml")
    command.add_argument(
        "--rpc", metavar="HOST:PORT", help="measure on the servers of a TVM RPC tracker"
    )
    command.add_argument("--key", help="the key of the tracker's servers to use")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    """Does what the command line asks for; the exit status."""
    from .database import check, export, import_folders, merge

    looks_after = args.db_check or args.db_merge or args.db_export or args.db_import
    if not looks_after:
        return _session(args)
    if args.db_check:
        report = check(args.work_dir)
    elif args.db_merge:
        report = merge(args.db_merge, args.work_dir)
    elif args.db_export:
        report = export(args.work_dir, args.db_export)
    else:
        target, hw = resolve_target(args.target)
        report = import_folders(args.db_import, args.work_dir, hw, target)
    print(json.dumps(report.to_json()) if args.json else report)
    return 1 if args.db_check and report.problems else 0


def _session(args: argparse.Namespace) -> int:
    try:
        with shown() as watch:
            result = _tuned(args, watch)
    except KeyboardInterrupt:
        return _interrupted("before the first trial; the same command begins again")
    print(json.dumps(to_json(result)) if args.json else table(result))
    if result.interrupted:
        return _interrupted("what was measured is kept, and the same command goes on")
    return 0


def _tuned(args: argparse.Namespace, watch: Any) -> TuneResult:
    from .session.tune import tune

    target, _ = resolve_target(args.target)
    return tune(
        model_of(args, target),
        args.target,
        database=args.work_dir,
        settings=args.settings,
        trials=args.trials,
        minutes=args.minutes,
        policy=policy_of(args.policy),
        meters=_meters(args),
        watch=watch,
    )


def _interrupted(what: str) -> int:
    command = shlex.join(["python", "-m", "tvm_fusion", *sys.argv[1:]])
    print(f"interrupted; {what}: {command}", file=sys.stderr)
    return INTERRUPTED


def _meters(args: argparse.Namespace) -> Any:
    if args.rpc is None:
        if args.key is not None:
            raise InputError("--key names servers of the tracker that --rpc names: give both")
        return None
    if args.key is None:
        raise InputError("--rpc needs --key: the name under which the servers registered")
    from .remote.rpc import meters_of

    return meters_of(args.rpc, args.key)


def to_json(result: TuneResult) -> dict[str, Any]:
    """What a session did, as a JSON object: `trials` are of this session, those of tasks all that
    the database has; the sums of times are without the kernels that are `untimed`.
    """
    return {
        "functions": list(result.functions),
        "trials": result.trials,
        "seconds": round(result.seconds, 1),
        "interrupted": result.interrupted,
        "ended": result.ended,
        "failures": result.failures and asdict(result.failures),
        "untimed": [task.name for task in result.untimed],
        "untuned_us": round(result.untuned_us, 3),
        "best_us": round(result.best_us, 3),
        "tasks": [
            {
                "name": t.name,
                "launches": t.count,
                "trials": t.trials,
                "failed": t.failed,
                "untuned_us": t.untuned_us,
                "best_us": t.best_us,
                "choice": t.choice,
            }
            for t in result.tasks
        ],
    }


def table(result: TuneResult) -> str:
    """What a session did, as lines of text."""
    lines = [f"{'kernel':44} launches  trials  failed   untuned      best"]
    for t in result.tasks:
        name = t.name if t.count else f"({t.name})"
        lines.append(
            f"{name[:44]:44} {t.count:8d} {t.trials:7d} {t.failed:7d} "
            f"{_us(t.untuned_us):>9} {_us(t.best_us):>9}"
        )
    lines.append(f"this session: {result.trials} trials in {result.seconds:.0f} s; {result.ended}")
    if result.failures is not None:
        lines.append(str(result.failures))
    missing = f" (without {len(result.untimed)} not measured)" if result.untimed else ""
    lines.append(f"kernels {result.untuned_us:.1f} -> {result.best_us:.1f} us{missing}")
    if any(not t.count for t in result.tasks):
        lines.append("(in brackets: kernels of other ways to cut the plan)")
    return "\n".join(lines)


def _us(us: float | None) -> str:
    return "-" if us is None else f"{us:.1f}"


LINE_EVERY_S = 10.0


class Lines(AbstractContextManager):
    """A line every few seconds."""

    def __init__(self) -> None:
        self._said = 0.0

    def __exit__(self, *exception) -> None:
        return None

    def __call__(self, session: Session) -> None:
        if time.monotonic() - self._said >= LINE_EVERY_S:
            self._said = time.monotonic()
            print(status(session), file=sys.stderr, flush=True)


class Bar(AbstractContextManager):
    """A bar of `rich`."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._bar = Progress(*columns, transient=True)
        self._task = self._bar.add_task("tuning")

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *exception) -> None:
        self._bar.stop()

    def __call__(self, session: Session) -> None:
        self._bar.update(
            self._task,
            total=session.settings.trials,
            completed=session.trials,
            description=status(session),
        )


def status(session: Session) -> str:
    """Trials, best time, gain so far and time left, in a line."""
    best, untuned = session.total_us, session.untuned_us
    gain = f", {100 * (1 - best / untuned):.1f} % less than untuned" if untuned > best else ""
    left_s = session.limit.left_s
    left = f", {left_s / 60:.1f} min left" if math.isfinite(left_s) else ""
    partly = " (partly predicted)" if session.is_partly_predicted else ""
    trials = f"{session.trials} of {session.settings.trials} trials"
    return f"{trials}, kernels {best:.1f} us{partly}{gain}{left}"


def shown() -> Lines | Bar:
    """What fits standard error."""
    if sys.stderr.isatty():
        try:
            return Bar()
        except ImportError:
            pass
    return Lines()
