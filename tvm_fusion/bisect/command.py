"""``python -m tvm_fusion bisect``: the kernels that give wrong numbers or are slow, and a program
that shows it again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .._arguments import model_of, policy_of
from ..compilation.one_function import has_device, has_inputs
from ..compilation.tuned_parts import TunedParts
from ..config import load_policy, resolve_target
from ..errors import CHECK_FAILED, InputError, TargetError
from ..flow.functions import planned_functions
from ..flow.planned import Planned
from ..host.progress import shown
from ..host.text_files import refuse_unwritable
from .parts import Parts
from .reproducer import slow_case, told_slow, write, wrong_case
from .slow import slow_parts
from .wrong import wrong_parts


def main(args: argparse.Namespace) -> int:
    """Runs the command; the exit status is 1 where something was found.

    Raises
    ------
    InputError
        An argument makes no sense, the device is not here, or the folder cannot be written.
    """
    if args.slower and args.tolerance is not None:
        raise InputError("--tolerance is of wrong numbers: leave it, or --slower")
    if args.tolerance is not None and not args.tolerance >= 0:
        raise InputError(f"--tolerance {args.tolerance}: give a share of the largest, at least 0")
    target, _ = resolve_target(args.target)
    policy, folder = load_policy(policy_of(args.policy)), Path(args.out)
    refuse_unwritable(folder / "reproduce.py" if folder.is_dir() else folder, "reproducer")
    with shown(quiet=args.quiet):
        tuned = TunedParts(args.database).of
        functions = planned_functions(
            model_of(args, target), args.target, policy, args.plan, tuned=tuned
        )
        found = {}
        for name, planned in functions.items():
            place = folder / name if len(functions) > 1 else folder
            found[name] = _slow(planned, place) if args.slower else _wrong(planned, args, place)
    if args.json:
        print(json.dumps(found if len(found) > 1 else next(iter(found.values())), allow_nan=False))
    else:
        for name, one in found.items():
            print("\n".join([*([f"function {name}"] if len(found) > 1 else []), one["text"]]))
    sys.stdout.flush()
    return CHECK_FAILED if any(one["kernels"] for one in found.values()) else 0


def _runnable(planned: Planned) -> None:
    if not has_device(planned):
        name = planned.hw.name
        raise TargetError(
            f"bisect runs what it compiles, and this machine has no {name}; name another target"
        )
    if not has_inputs(planned):
        raise InputError(
            "no inputs can be drawn for this model, so nothing can be run; give one of tensors only"
        )


def _wrong(planned: Planned, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What gives wrong numbers, as a JSON-able dict with its text."""
    _runnable(planned)
    parts = Parts(planned)
    found = wrong_parts(parts, args.tolerance)
    count = len(parts.every)
    if not found.found:
        error = f"worst error {found.rest.worst_error:.3g}"
        return {"kernels": [], "text": f"right with all {count} kernels: {error}"}
    lines, kernels = [], []
    for number, wrong in enumerate(found.found):
        place = folder if len(found.found) == 1 else folder / str(number + 1)
        names = [parts.label(part) for part in wrong.parts]
        script = write(place, wrong_case(parts, wrong), f"{', '.join(names)}: {wrong.why}")
        lines += [f"wrong numbers: {name}" for name in names]
        lines += ["  only together, none of them by itself"] if len(names) > 1 else []
        lines += [f"  {wrong.why}", f"  to see it again: python {script}"]
        kernels.append(
            {
                "labels": names,
                "groups": [list(g.ops) for part in wrong.parts for g in part],
                "classes": [g.kernel_class for part in wrong.parts for g in part],
                "why": wrong.why,
                "error": wrong.error,
                "reproducer": str(script),
            }
        )
    state = "right" if found.rest.passed else f"still wrong: {found.rest.why}"
    lines.append(
        f"found among {count} kernels by {found.builds} builds; without {_these(lines)} the module "
        f"is {state} (worst error {found.rest.worst_error:.3g})"
    )
    return {"kernels": kernels, "builds": found.builds, "text": "\n".join(lines)}


def _these(lines: list[str]) -> str:
    return "it" if sum(line.startswith("wrong numbers: ") for line in lines) == 1 else "them"


def _slow(planned: Planned, folder: Path) -> dict[str, Any]:
    """What is slower than it need be, likewise."""
    _runnable(planned)
    parts = Parts(planned)
    found = slow_parts(parts)
    lines, kernels = told_slow(parts, found).splitlines(), []
    for number, slow in enumerate(found.found):
        place = folder if len(found.found) == 1 else folder / str(number + 1)
        said = f"{parts.label(slow.part)} loses {slow.lost_us:.3g} us"
        script = write(place, slow_case(parts, slow.part), said, slow=True)
        lines[number] = f"slower: {lines[number]}\n  to see it again: python {script}"
        kernels.append(
            {
                "label": parts.label(slow.part),
                "groups": [list(g.ops) for g in slow.part],
                "classes": [g.kernel_class for g in slow.part],
                "together_us": [
                    slow.together.low_us,
                    slow.together.median_us,
                    slow.together.high_us,
                ],
                "apart_us": [slow.apart.low_us, slow.apart.median_us, slow.apart.high_us],
                "reproducer": str(script),
            }
        )
    if found.found and found.without.median_us is not None:
        verdict = found.without.verdict(found.plan)
        lines.append(
            f"the plan's launches take {found.plan.median_us:.3g} us, without these "
            f"{found.without.median_us:.3g} us: {verdict.value} by their quartiles"
        )
    return {"kernels": kernels, "timed": found.timed, "text": "\n".join(lines)}
