"""Checks what the compiler built, and never lets wrong numbers through: where the module as a whole
is wrong, as little of it as need be gives way (`repair`); then times it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..report.times import FUSED, UNFUSED, TimeReport
from .allowance import Reference
from .checked_sizes import symbols_of
from .inputs import draw_count, is_extreme
from .plain import plain_module
from .reference import runner
from .repair import Repair
from .verify import Verification, judge_outputs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import tvm

    from ..compilation.compiler import Job
    from ..plan.plan import PlannedGroup
    from ..runtime.build.build import Built
    from ..transform.apply.materialize import Materialized

logger = logging.getLogger(__name__)


@dataclass
class Checked:
    """What a check ended with.

    Attributes
    ----------
    built, materialized
        The module that passed, or the last one that did not.
    verification : Verification
    group_errors : dict of str to float
        Of each group that was checked on its own, by name of its PrimFunc.
    tried : list of str
        What was run in turn until it passed; one entry where the first did.
    wrong : dict of str to (PlannedGroup, str)
        The groups that were wrong by themselves and gave way, by name of their PrimFunc, and why.
    references : sequence of Reference
        What it was held against.
    alone : IRModule or None
        The model as TVM alone lowers it, where nothing else was right.
    """

    built: Built
    materialized: Materialized
    verification: Verification
    group_errors: dict[str, float] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)
    wrong: dict[str, tuple[PlannedGroup, str]] = field(default_factory=dict)
    references: Sequence[Reference] = ()
    alone: tvm.IRModule | None = None


def check_compiled(
    job: Job, built: Built, materialized: Materialized, every_group: bool = False
) -> Checked:
    """Compares a build with float64, and what gave way in it, until one passes or none is left.

    Parameters
    ----------
    job : Job
        The compilation.
    built, materialized
        The fused module.
    every_group : bool
        Check each group on its own even if the module as a whole is right.

    Returns
    -------
    Checked
        Its `verification` has passed unless TVM's own code is wrong, too.
    """
    mod = _lowered(job)
    references = _references(job, mod)
    repair = Repair(job, mod)
    while every_group and (left := repair.without_wrong_groups(materialized, job.inputs)):
        built, materialized = left
    while True:
        verification, inputs = _judged(built, references)
        step = None if verification.passed else repair.step(materialized, verification, inputs)
        if step is None:
            found = (repair.errors, repair.tried, repair.wrong, references, repair.alone)
            return Checked(built, materialized, verification, *found)
        built, materialized = step


def checked_again(checked: Checked, built: Built, materialized: Materialized) -> Checked:
    """What a check ended with, of the same function in another build."""
    verification, _ = _judged(built, checked.references)
    return replace(checked, built=built, materialized=materialized, verification=verification)


def _references(job: Job, mod: tvm.IRModule) -> list[Reference]:
    """What TVM's lowering of the model gives on each draw of inputs; sizes that it cannot run at
    are left out.
    """
    first = Reference(mod, job.inputs, job.target)
    others = [
        first.on(job.drawn(n, mod), ceiling=not is_extreme(n)) for n in range(1, draw_count(mod))
    ]
    if symbols_of(job.mod["main"]):
        others = [reference for reference in others if _runs(reference)]
    return [first, *others]


def _runs(reference: Reference) -> bool:
    try:
        return bool(reference.outputs)
    except Exception as error:  # whatever an operator raises that gets shapes it does not take
        logger.info("not checked at sizes that the model does not take: %s", error)
        return False


def _judged(built: Built, references: Sequence[Reference]) -> tuple[Verification, Sequence[Any]]:
    """The verdict on a build on the inputs of all references, or on the first that it fails on, and
    these inputs.
    """
    run, worst = runner(built), 0.0
    for reference in references:
        found = judge_outputs(run(reference.inputs), reference)
        worst = max(worst, found.worst_error)
        if not found.passed:
            break
    return replace(found, worst_error=worst), reference.inputs


def _lowered(job: Job) -> tvm.IRModule:
    """What the reference is made from: the model as TVM lowers it, where TVM can."""
    try:
        return plain_module(job.mod, job.target)
    except Exception as error:  # TVM raises whatever an operator's legalization raises
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        logger.warning("the reference is of this package's lowering: TVM alone has %s", reason[0])
        return job.whole[0]


def time_builds(fused: Built, unfused: Built, inputs: Sequence[Any]) -> dict[str, TimeReport]:
    """Times both modules on the same inputs, interleaved."""
    from ..runtime.calls.compiled_module import CompiledModule
    from ..runtime.timing.timing import time_modules

    modules = {FUSED: CompiledModule.of(fused), UNFUSED: CompiledModule.of(unfused)}
    return {name: TimeReport.of(t) for name, t in time_modules(modules, inputs).items()}
