"""``python -m tvm_fusion tune``: a session, and what looks after databases."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from .._arguments import model_of, policy_of
from ..config import resolve_target
from ..errors import InputError
from ..host.interrupts import INTERRUPTED
from ..host.progress import shown
from ..host.stages import Stage, stage
from .session.result import TuneResult
from .session.tune import tune

if TYPE_CHECKING:
    from .session.session import Session


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
        with shown(quiet=args.quiet), stage("preparing the session") as one:
            result = _tuned(args, partial(_watch, one))
    except KeyboardInterrupt:
        return _interrupted("before the first trial; the same command begins again")
    print(json.dumps(to_json(result)) if args.json else table(result))
    if result.interrupted:
        return _interrupted("what was measured is kept, and the same command goes on")
    return 0


def _tuned(args: argparse.Namespace, watch: Any) -> TuneResult:
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
        if args.key is not None or args.token_file is not None:
            raise InputError(
                "--key and --token-file are of the servers that --rpc finds: give both"
            )
        return None
    if args.key is None:
        raise InputError("--rpc needs --key: the name under which the servers registered")
    from .remote.client import meters_of

    return meters_of(args.rpc, args.key, args.token_file)


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
        "tasks": [asdict(task) for task in result.tasks],
    }


def table(result: TuneResult) -> str:
    """What a session did, as lines of text."""
    lines = [f"{'kernel':44} launches  trials  failed   untuned      best"]
    for t in result.tasks:
        name = t.name if t.launches else f"({t.name})"
        lines.append(
            f"{name[:44]:44} {t.launches:8d} {t.trials:7d} {t.failed:7d} "
            f"{_us(t.untuned_us):>9} {_us(t.best_us):>9}"
        )
    lines.append(f"this session: {result.done}")
    if result.failures is not None:
        lines.append(str(result.failures))
    lines.append(result.times)
    if any(not t.launches for t in result.tasks):
        lines.append("(in brackets: kernels of other ways to cut the plan)")
    return "\n".join(lines)


def _us(us: float | None) -> str:
    return "-" if us is None else f"{us:.1f}"


def _watch(one: Stage, session: Session) -> None:
    """Shows how far a session is."""
    one.title, one.total, one.done = status(session), session.settings.trials, session.trials
    one.tell()


def status(session: Session) -> str:
    """Best time, gain so far and time left, in a line."""
    best, untuned = session.total_us, session.untuned_us
    gain = f", {100 * (1 - best / untuned):.1f} % less than untuned" if untuned > best else ""
    left_s = session.limit.left_s
    left = f", {left_s / 60:.1f} min left" if math.isfinite(left_s) else ""
    partly = " (partly predicted)" if session.is_partly_predicted else ""
    return f"tuning: kernels {best:.1f} us{partly}{gain}{left}; trials"
