"""Random torch programs, planned for GPUs and run on the CPU emulator, beside torch in float64.

    python -m tests.emulated_programs --programs 1000 --seed 0 --out FILE

does what the ordinary suite does with a few. Programs are written in batches, whose kernels g++
compiles together.
"""

from __future__ import annotations

import argparse
import collections
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import cuda_on_cpu
from tests.module_on_cpu import EmulatedModule
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.frontends import load
from tvm_fusion.fuzz.draw import draw_program
from tvm_fusion.fuzz.judge import (
    REFUSED,
    Run,
    Verdict,
    as_array,
    as_tensor,
    judged_run,
)
from tvm_fusion.fuzz.program import Program
from tvm_fusion.fuzz.reduce import reduced
from tvm_fusion.job import Job

PROFILES = ("nvidia_a100", "nvidia_rtx4090", "nvidia_h100", "nvidia_h200")
BATCH = 8


@dataclass(frozen=True)
class Outcome:
    """What became of a program on a device."""

    program: Program
    device: str
    verdict: Verdict
    kernels: int = 0


def emulated(program: Program, device: str) -> Outcome:
    """The outcome of one program."""
    (outcome,) = emulated_together([(program, device)])
    return outcome


def emulated_together(programs: Iterable[tuple[Program, str]]) -> list[Outcome]:
    """The outcomes of programs, each for a device, whose kernels are compiled together."""
    written = [(program, device, _written(program, device)) for program, device in programs]
    modules = [module for *_, module in written if isinstance(module, EmulatedModule)]
    cuda_on_cpu.compile_together(text for module in modules for text in module.texts())
    return [
        Outcome(program, device, *_judged(program, module)) for program, device, module in written
    ]


def emulated_seeds(seeds: Iterable[int], statements: int) -> Iterator[Outcome]:
    """The outcomes of the programs of seeds, for the devices in turn."""
    keys = [(seed, PROFILES[seed % len(PROFILES)]) for seed in seeds]
    for first in range(0, len(keys), BATCH):
        part = keys[first : first + BATCH]
        yield from emulated_together((draw_program(s, statements), device) for s, device in part)


def explained(outcome: Outcome, seconds: float = 120.0) -> str:
    """The outcome, and the program, reduced: for the message of a failed test."""
    program, device = outcome.program, outcome.device
    small = reduced(program, lambda p: emulated(p, device).verdict.like(outcome.verdict), seconds)
    title = f"Seed {program.seed} for {device}: {outcome.verdict.kind}."
    return f"{outcome.verdict}\n{small.standalone(device, title)}"


def _written(program: Program, device: str) -> EmulatedModule | Exception:
    hw = load_profile(device)
    try:
        mod = load(program.module(), program.arguments())
        return EmulatedModule.of(Job.from_module(mod, hw.to_target(), hw, load_policy(None)))
    except Exception as error:  # the boundary of a program: judged below
        return error


def _judged(program: Program, module: EmulatedModule | Exception) -> tuple[Verdict, int]:
    def build() -> Run:
        if isinstance(module, Exception):
            raise module
        return lambda given: [as_tensor(x) for x in module([as_array(x) for x in given])]

    verdict = judged_run(program, build, [program.arguments()])
    return verdict, 0 if isinstance(module, Exception) else len(module.kernels)


# ---- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--statements", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.programs)
    outcomes = []
    for outcome in emulated_seeds(seeds, options.statements):
        outcomes.append(outcome)
        if outcome.verdict.failed:
            print(explained(outcome), flush=True)
    text = json.dumps(summary(outcomes, vars(options)), indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


def summary(outcomes: Sequence[Outcome], options: dict) -> dict:
    """Counts, refusals and failures."""
    refused = collections.Counter(
        o.verdict.why[:120] for o in outcomes if o.verdict.kind == REFUSED
    )
    command = "python -m tests.emulated_programs --programs {programs} --seed {seed}"
    return {
        "command": (command + " --statements {statements}").format(**options),
        "devices": PROFILES,
        "programs": len(outcomes),
        "kernels": sum(o.kernels for o in outcomes),
        "counts": dict(collections.Counter(o.verdict.kind for o in outcomes)),
        "refused": dict(refused.most_common()),
        "failed": [
            f"{o.program.seed} {o.device}: {o.verdict.kind}: {o.verdict.why}"
            for o in outcomes
            if o.verdict.failed
        ],
    }


if __name__ == "__main__":
    main()
