"""``python -m tvm_fusion fuzz``: random programs on a target, beside torch in float64."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError
from ..host.progress import shown
from ..host.stages import stage

if TYPE_CHECKING:
    from .verdict import Verdict

FAILED = 1
WRITE_EVERY_S = 20.0  # what is known so far, for a run that is stopped


def main(args: argparse.Namespace) -> int:
    """Runs programs; the exit status is 1 if one of them failed.

    Raises
    ------
    InputError
        There is no torch, or a number makes no sense.
    TargetError
        This machine lacks the device.
    """
    if importlib.util.find_spec("torch") is None:
        raise InputError(
            "fuzz: its programs are those of torch, which is not installed: "
            "pip install 'tvm_fusion[torch]'"
        )
    if min(args.minutes, args.processes) <= 0 or args.statements < 1:
        raise InputError("fuzz: --minutes, --processes and --statements have to be above 0")
    from ..calibrate.profile_file import described
    from ..config import resolve_target
    from .campaign import Campaign, Runner

    _, hw = resolve_target(args.target)
    campaign = Campaign(args.target, described(hw), args.statements)
    command = "python -m tvm_fusion fuzz " + shlex.join(_given(args))
    written = time.monotonic()

    def told(seed: int, verdict: Verdict) -> None:
        nonlocal written
        programs.step()
        if verdict.failed:
            print(f"seed {seed}: {verdict.kind}: {verdict.why}", file=sys.stderr, flush=True)
        if args.out is not None and time.monotonic() > written + WRITE_EVERY_S:
            _write(args.out, campaign, campaign.to_json(command))
            written = time.monotonic()

    with shown(quiet=args.quiet), Runner(args.target, args.processes) as runner:
        with stage("programs run") as programs:
            runner.run(campaign, args.seed, args.minutes * 60, told)
        runner.reduce(campaign, args.reduce)
    result = campaign.to_json(command)
    if args.out is not None:
        _write(args.out, campaign, result)
    print(json.dumps(result, indent=1) if args.json else _text(campaign))
    return FAILED if any(v.failed for v in campaign.verdicts.values()) else 0


def _given(args: argparse.Namespace) -> list[str]:
    names = ("target", "minutes", "seed", "statements", "processes")
    return [word for name in names for word in (f"--{name}", str(getattr(args, name)))]


def _write(folder: Path, campaign, result: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fuzz.json").write_text(json.dumps(result, indent=1) + "\n")
    for failure in campaign.failures:
        title = f"Seed {failure.seed} on {campaign.target}: {failure.verdict.kind}."
        text = failure.program.standalone(campaign.target, title)
        (folder / f"test_seed_{failure.seed}.py").write_text(text)


def _text(campaign) -> str:
    counts = ", ".join(f"{count} {kind}" for kind, count in campaign.counts().items())
    lines = [f"{len(campaign.verdicts)} programs on {campaign.target}: {counts}"]
    for why, seeds in campaign.refusals().items():
        lines.append(f"  refused {len(seeds)} ({seeds[0]}, ...): {why}")
    for failure in campaign.failures:
        title = f"# seed {failure.seed}: {failure.verdict.kind}: {failure.verdict.why}"
        inputs = (f"# {i.name} = {i.code}" for i in failure.program.inputs)
        lines += ["", title, *inputs, failure.program.source()]
    return "\n".join(lines)
