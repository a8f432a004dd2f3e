"""Checks what the compiler built, and never lets wrong numbers through: where the module as a whole
is wrong, as little of it as need be gives way (`repair`); then times it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tvm

from ..flow.planned import BuiltPlan, Planned
from ..plan.plan import PlannedGroup
from ..runtime.build.build import Built
from ..runtime.calls.compiled_module import CompiledModule
from ..runtime.timing.times import FUSED, UNFUSED, TimeReport
from ..runtime.timing.timing import time_modules
from .allowance import Reference
from .checked_sizes import drawn_inputs, symbols_of
from .inputs import draw_count, is_extreme
from .plain import plain_module
from .reference import runner
from .repair import Repair
from .verify import Verification, judge_outputs

logger = logging.getLogger(__name__)


@dataclass
class Checked:
    """What a check ended with.

    Attributes
    ----------
    made : BuiltPlan
        What passed, or the last that did not.
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

    made: BuiltPlan
    verification: Verification
    group_errors: dict[str, float] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)
    wrong: dict[str, tuple[PlannedGroup, str]] = field(default_factory=dict)
    references: Sequence[Reference] = ()
    alone: tvm.IRModule | None = None


def check_compiled(made: BuiltPlan, every_group: bool = False) -> Checked:
    """Compares a build with float64, and what gave way in it, until one passes or none is left.

    Parameters
    ----------
    made : BuiltPlan
        The fused module.
    every_group : bool
        Check each group on its own even if the module as a whole is right.

    Returns
    -------
    Checked
        Its `verification` has passed unless TVM's own code is wrong, too.
    """
    mod = _lowered(made.planned)
    references = _references(made.planned, mod)
    repair, goes_on = Repair(mod), every_group
    while goes_on:
        made, goes_on = repair.without_wrong_groups(made, drawn_inputs(made.planned.mod))
    while True:
        (verification, inputs), goes_on = _judged(made.built, references), False
        if not verification.passed:
            made, goes_on = repair.step(made, verification, inputs)
        if not goes_on:
            found = (repair.errors, repair.tried, repair.wrong, references, repair.alone)
            return Checked(made, verification, *found)


def checked_again(checked: Checked, made: BuiltPlan) -> Checked:
    """What a check ended with, of the same function in another build."""
    verification, _ = _judged(made.built, checked.references)
    return replace(checked, made=made, verification=verification)


def _references(planned: Planned, mod: tvm.IRModule) -> list[Reference]:
    """What TVM's lowering of the model gives on each draw of inputs; sizes that it cannot run at
    are left out.
    """
    first = Reference(mod, drawn_inputs(planned.mod), planned.target)
    others = [
        first.on(drawn_inputs(planned.mod, n, mod), ceiling=not is_extreme(n))
        for n in range(1, draw_count(mod))
    ]
    if symbols_of(planned.mod["main"]):
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


def _lowered(planned: Planned) -> tvm.IRModule:
    """What the reference is made from: the model as TVM lowers it, where TVM can."""
    try:
        return plain_module(planned.mod, planned.target)
    except Exception as error:  # TVM raises whatever an operator's legalization raises
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        logger.warning("the reference is of this package's lowering: TVM alone has %s", reason[0])
        return planned.whole.mod


def time_builds(fused: Built, unfused: Built, inputs: Sequence[Any]) -> dict[str, TimeReport]:
    """Times both modules on the same inputs, interleaved."""
    modules = {FUSED: CompiledModule.of(fused), UNFUSED: CompiledModule.of(unfused)}
    return {name: TimeReport.of(t) for name, t in time_modules(modules, inputs).items()}
