"""Checks what the compiler built: the whole module first, group by group where it is wrong or where
the caller asks; then times it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import relax

from ..kernels.base import RefusalCode
from ..report.times import FUSED, UNFUSED, TimeReport
from ..runtime.entry import entry_of
from ..transform.single_group import group_modules
from ..transform.write_kernels import write_kernels
from .bounds import Reference
from .precision import computed_dtypes
from .reference import flatten, run_reference, to_argument
from .verify import GroupCase, Verification, judge_outputs, verify_group

if TYPE_CHECKING:
    from ..compiler import Job
    from ..plan.plan import PlannedGroup
    from ..runtime.build import Built
    from ..transform.materialize import Materialized

logger = logging.getLogger(__name__)


@dataclass
class Checked:
    """The build that passed (or the last one that did not), the unfused build, and what was
    found.
    """

    built: Built
    materialized: Materialized
    unfused: Built
    verification: Verification
    group_errors: dict[str, float] = field(default_factory=dict)


def check_compiled(
    job: Job,
    built: Built,
    materialized: Materialized,
    every_group: bool = False,
    unfused: Built | None = None,
) -> Checked:
    """Compares a build with float64; groups with wrong numbers are cut and the rest is built
    again.

    Parameters
    ----------
    job : Job
        The compilation.
    built, materialized
        The fused module.
    every_group : bool
        Check each group on its own even if the module as a whole is right.
    unfused : Built or None
        The unfused module, if it is there already.
    """
    whole = job.whole[0]
    inputs = job.inputs
    reference = Reference(whole, inputs, job.target)
    unfused = unfused or job.build_unfused()
    plain = run_built(unfused, inputs)
    dtypes = computed_dtypes(whole)
    errors: dict[str, float] = {}
    if every_group:
        wrong, errors = wrong_groups(job, materialized, inputs)
        if wrong:
            built, materialized = _without(job, wrong)
    while True:
        verification = judge_outputs(run_built(built, inputs), plain, reference, computed_in=dtypes)
        if verification.passed:
            break
        wrong, _ = wrong_groups(job, materialized, inputs)
        if not wrong:
            logger.error("wrong numbers, and each group alone is right: %s", verification.why)
            break
        built, materialized = _without(job, wrong)
    return Checked(built, materialized, unfused, verification, errors)


def _without(job: Job, wrong: dict[str, tuple[PlannedGroup, str]]):
    for group, why in wrong.values():
        job.cut(group, RefusalCode.WRONG_NUMBERS, why)
    return job.build_fused()


def run_built(built: Built, inputs: Sequence[Any]) -> list[np.ndarray]:
    """Runs `main` of a build once and returns its outputs as a flat list of arrays."""
    device = tvm.runtime.device_from_target(built.target)
    main = entry_of(built.executable, device)
    return flatten(main(*[to_argument(x, device=device) for x in inputs]))


def wrong_groups(job: Job, materialized: Materialized, inputs: Sequence[Any]):
    """The fused groups whose own numbers are wrong, with the reason, and the error of each group by
    name of its PrimFunc.
    """
    fused = {n: g for n, g in materialized.groups.items() if len(g.ops) > 1}
    cases = {n: group_modules(job.low, job.graph, job.plan, g) for n, g in fused.items()}
    values = _captured(job, cases.values(), inputs)
    wrong, errors = {}, {}
    for name, case in cases.items():
        group = fused[name]
        classes = {case.kernel: group.kernel_class}
        with job.target:
            written = write_kernels(case.fused, classes, job.hw, job.policy)
        arguments = tuple(values(e) for e in case.inputs)
        verification = verify_group(
            GroupCase(name, written.mod, case.unfused, arguments), job.target
        )
        errors[name] = verification.worst_error
        if not verification.passed:
            wrong[name] = (group, verification.why)
    return wrong, errors


def _captured(job: Job, cases, inputs: Sequence[Any]):
    """A function from an input of a group to its value in the float64 reference run."""
    main = job.low["main"]
    params = {hash(p): x for p, x in zip(main.params, inputs, strict=True)}
    bound = {hash(b.var): b.var for block in main.body.blocks for b in block.bindings}
    names = dict.fromkeys(
        e.name for c in cases for e in c.inputs if isinstance(e, relax.Var) and hash(e) in bound
    )
    outputs = run_reference(job.low, inputs, capture=list(names), target=job.target)
    captured = dict(zip(names, outputs[len(outputs) - len(names) :], strict=True))
    symbols = _symbol_values(main, inputs)

    def value(e) -> Any:
        if isinstance(e, tvm.ir.GenericConst):
            return e.value.numpy()
        if isinstance(e, relax.ShapeExpr):
            return tuple(symbols[hash(v)] for v in e.values)
        return captured[e.name] if hash(e) in bound else params[hash(e)]

    return value


def _symbol_values(main: relax.Function, inputs: Sequence[Any]) -> dict[int, int]:
    found = {}
    for param, x in zip(main.params, inputs, strict=True):
        shape = getattr(param.ty, "shape", None)
        if isinstance(shape, relax.ShapeExpr):
            for symbol, extent in zip(shape.values, np.shape(x), strict=True):
                found[hash(symbol)] = int(extent)
    return found


def time_builds(fused: Built, unfused: Built, inputs: Sequence[Any]) -> dict[str, TimeReport]:
    """Times both modules on the same inputs, interleaved."""
    from ..runtime.module import CompiledModule
    from ..runtime.timing import time_modules

    modules = {FUSED: CompiledModule.of(fused), UNFUSED: CompiledModule.of(unfused)}
    return {name: TimeReport.of(t) for name, t in time_modules(modules, inputs).items()}
