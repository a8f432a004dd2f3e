"""``python -m tvm_fusion profile``: where the time of a call goes, before and after fusion."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .._arguments import model_of, policy_of
from ..config import load_policy, resolve_target
from ..errors import InputError, PlanError
from ..host.progress import shown
from ..report.text import format_bytes
from .measured import call_once, profile
from .ncu import shown_command
from .text import text
from .trace import write_trace


def main(args: argparse.Namespace) -> int:
    """Runs the command; the exit status.

    Raises
    ------
    InputError
        An argument makes no sense, or the device is not here.
    """
    target, hw = resolve_target(args.target)
    options = _options(args)
    if args.ncu:
        if hw.kind != "cuda":
            raise InputError(
                f"--ncu: Nsight Compute counts what kernels of a GPU move, and {hw.name} is none; "
                "name one, as in --target h200"
            )
        print(shown_command(*_again(args)))
        return 0
    with shown(quiet=args.quiet):
        model = model_of(args, target)
        if args.once:
            called = call_once(model, args.target, **options)
        else:
            found = profile(model, args.target, calls=args.calls, **options)
    if args.once:
        print("\n".join(f"{one.label}: {format_bytes(one.bytes)}" for one in called))
        return 0
    if args.trace is not None:
        write_trace(args.trace, found)
        print(f"wrote {args.trace}: open it at https://ui.perfetto.dev", file=sys.stderr)
    if args.json:
        data: dict[str, Any] = {name: one.to_json() for name, one in found.items()}
        several = {"version": next(iter(data.values()))["version"], "functions": data}
        print(json.dumps(several if len(data) > 1 else data.popitem()[1], allow_nan=False))
        return 0
    for name, one in found.items():
        if len(found) > 1:
            print(f"function {name}")
        print(text(one, args.full))
    return 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """What is wrong with them is said before the model is read."""
    if args.calls < 1:
        raise InputError(f"--calls {args.calls}: at least one call has to be recorded")
    if args.plan is not None and not Path(args.plan).is_file():
        raise PlanError(f"no such plan file: {args.plan}; check the path")
    if args.trace is not None and not args.trace.absolute().parent.is_dir():
        raise InputError(f"cannot write {args.trace}: there is no such directory; make it first")
    policy = load_policy(policy_of(args.policy))
    return {"policy": policy, "plan": args.plan, "database": args.database}


def _again(args: argparse.Namespace) -> list[str]:
    """The arguments that say what to profile."""
    named = ("target", "policy", "plan", "database")
    given = [(f"--{name}", getattr(args, name)) for name in named]
    options = [word for name, value in given if value is not None for word in (name, value)]
    return [*(["--demo"] if args.demo else [args.model]), *options]
