"""Random torch programs, planned for GPUs and run on the CPU emulator, beside torch in float64.

    python -m tests.support.emulated_programs --programs 1000 --seed 0 --out FILE

does what the ordinary suite does with a few. Programs are written in batches, whose kernels g++
compiles together.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tvm
from tvm import relax

from tests.support import cuda_on_cpu
from tests.support.module_on_cpu import EmulatedModule
from tvm_fusion.config import Policy, load_policy, load_profile
from tvm_fusion.errors import TvmFusionError
from tvm_fusion.flow.planned import Planned
from tvm_fusion.frontends import load
from tvm_fusion.fuzz.campaign import draw_program, reduced
from tvm_fusion.fuzz.torch_program import Program
from tvm_fusion.fuzz.verdict import REFUSED, Run, Verdict, as_array, as_tensor, judged_run
from tvm_fusion.transform.functions.functions import with_functions

PROFILES = ("nvidia_a100", "nvidia_rtx4090", "nvidia_h100", "nvidia_h200")
POLICY = dataclasses.replace(load_policy(None), probe="off")  # no nvcc decides on the plans
GREEDY = dataclasses.replace(POLICY, search_evaluations=0)  # half of what a small graph takes
BATCH = 8
IN_STEP = "torch.cumsum("  # TVM's scan counts on lanes in step: right on an H100, not on fibers


@dataclass(frozen=True)
class Outcome:
    """What became of a program on a device."""

    program: Program
    device: str
    verdict: Verdict
    kernels: int = 0
    policy: Policy = POLICY


def emulated(program: Program, device: str, policy: Policy = POLICY) -> Outcome:
    """The outcome of one program."""
    (outcome,) = emulated_together([(program, device)], policy)
    return outcome


def emulated_together(
    programs: Iterable[tuple[Program, str]], policy: Policy = POLICY
) -> list[Outcome]:
    """The outcomes of programs, each for a device, which are exported and whose kernels are
    compiled together.
    """
    pairs = list(programs)
    loaded = _loaded_together([program for program, _ in pairs])
    written = [(p, d, _written(mod, d, policy)) for (p, d), mod in zip(pairs, loaded, strict=True)]
    modules = [module for *_, module in written if isinstance(module, EmulatedModule)]
    cuda_on_cpu.compile_together(text for module in modules for text in module.texts())
    return [
        Outcome(program, device, *_judged(program, module), policy)
        for program, device, module in written
    ]


def emulated_seeds(
    seeds: Iterable[int], statements: int, policy: Policy = POLICY, batch: int = BATCH
) -> Iterator[Outcome]:
    """The outcomes of the programs of seeds, for the devices in turn, without `IN_STEP` ones."""
    keys = [(seed, PROFILES[seed % len(PROFILES)]) for seed in seeds]
    for first in range(0, len(keys), batch):
        part = [(draw_program(s, statements), d) for s, d in keys[first : first + batch]]
        yield from emulated_together([(p, d) for p, d in part if not _in_step(p)], policy)


def _in_step(program: Program) -> bool:
    return any(IN_STEP in statement.code for statement in program.statements)


def explained(outcome: Outcome, seconds: float = 120.0) -> str:
    """The outcome, and the program, reduced: for the message of a failed test."""
    program, device, policy = outcome.program, outcome.device, outcome.policy
    small = reduced(
        program, lambda p: emulated(p, device, policy).verdict.like(outcome.verdict), seconds
    )
    title = f"Seed {program.seed} for {device}: {outcome.verdict.kind}."
    return f"{outcome.verdict}\n{small.standalone(device, title)}"


class _Side(torch.nn.Module):
    """Programs side by side, which share nothing: torch takes seconds for each export."""

    def __init__(self, programs: Sequence[Program]) -> None:
        super().__init__()
        self.counts = [len(p.inputs) for p in programs]
        self.parts = torch.nn.ModuleList(p.module() for p in programs)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(inputs)
        counted = zip(self.counts, self.parts, strict=True)
        return tuple(x for n, part in counted for x in part(*itertools.islice(given, n)))


def _loaded_together(programs: Sequence[Program]) -> list[tvm.IRModule | Exception]:
    """The module of each program; where not all can be converted, each by itself."""
    if len(programs) > 1:
        try:
            mod = load(_Side(programs), tuple(x for p in programs for x in p.arguments()))
            return list(_parts(mod, programs))
        except TvmFusionError:
            pass
    return [_loaded(program) for program in programs]


def _loaded(program: Program) -> tvm.IRModule | Exception:
    try:
        return load(program.module(), program.arguments())
    except Exception as error:  # the boundary of a program: judged below
        return error


def _parts(mod: tvm.IRModule, programs: Sequence[Program]) -> Iterator[tvm.IRModule]:
    """The functions of programs side by side, each in a module of its own."""
    main = mod["main"]
    (block,) = main.body.blocks
    *bindings, last = block.bindings
    params, results = iter(main.params), iter(last.value.fields)
    for program in programs:
        own = list(itertools.islice(params, len(program.inputs)))
        value = relax.Tuple(list(itertools.islice(results, len(program.results))))
        out = relax.Var("out", relax.TupleType([field.ty for field in value.fields]))
        block = relax.DataflowBlock([*bindings, relax.VarBinding(out, value)])
        function = relax.Function(own, relax.SeqExpr([block], out), out.ty)
        function = relax.analysis.remove_all_unused(function)
        function = relax.utils.copy_with_new_vars(function)
        main = {mod.get_global_var("main"): function.with_attr("global_symbol", "main")}
        yield relax.transform.DeadCodeElimination()(with_functions(mod, {**mod.functions, **main}))


def _written(
    mod: tvm.IRModule | Exception, device: str, policy: Policy
) -> EmulatedModule | Exception:
    if isinstance(mod, Exception):
        return mod
    hw = load_profile(device)
    try:
        return EmulatedModule.of(Planned.of(mod, hw.to_target(), hw, policy))
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
    command = "python -m tests.support.emulated_programs --programs {programs} --seed {seed}"
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
