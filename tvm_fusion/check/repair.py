"""Where a module gives wrong numbers, as little of it as need be gives way, in this order:

1. the groups that are wrong by themselves: one of several operators is taken apart, a single
   operator gets another kernel (`other_kernels`), in the end TVM's own code;
2. the kernels of branches and of functions that stay calls, which no plan has;
3. all fusion, where the module is wrong and no group by itself;
4. all kernels of this package;
5. the lowering and the memory plan of this package: the model as TVM alone compiles it.

After each step the module is built and judged again (`compiled.check_compiled`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import relax, tirx

from ..errors import BuildError
from ..plan.plan import FALLBACK, FREE, STOCK, UNWRITTEN
from ..plan.refusal import RefusalCode
from ..transform.apply.single_group import group_modules
from ..transform.apply.write_kernels import write_kernels
from .other_kernels import OtherKernels
from .plain import plain_build
from .reference import run_reference
from .verify import GroupCase, Verification, verify_group

if TYPE_CHECKING:
    from ..compilation.compiler import Job
    from ..plan.plan import PlannedGroup
    from ..runtime.build.build import Built
    from ..transform.apply.materialize import Materialized
    from ..transform.apply.single_group import GroupModules

logger = logging.getLogger(__name__)

Step = tuple["Built", "Materialized"]


class Repair:
    """Gives a job with wrong numbers up, step by step; `plain` is its model as the reference has it
    (`plain.plain_module`).

    Attributes
    ----------
    errors : dict of str to float
        Of each group that was checked on its own, by name of its PrimFunc.
    tried : list of str
        What was run so far, in words.
    wrong : dict of str to (PlannedGroup, str)
        The groups that were wrong by themselves, by name of their PrimFunc, and why.
    alone : IRModule or None
        `plain`, once that is what is tried.
    """

    def __init__(self, job: Job, plain: tvm.IRModule) -> None:
        self.job, self._plain = job, plain
        self.errors: dict[str, float] = {}
        self.tried = ["the plan"]
        self.wrong: dict[str, tuple[PlannedGroup, str]] = {}
        self.alone: tvm.IRModule | None = None
        self._coarse = iter(self._coarse_steps())

    def step(
        self, materialized: Materialized, verification: Verification, inputs: Sequence[Any]
    ) -> Step | None:
        """The next module to try after one that is wrong as a whole on some inputs; None where none
        is left.
        """
        found = self.without_wrong_groups(materialized, inputs)
        if found is None:
            logger.warning("wrong numbers, and no group is wrong alone: %s", verification.why)
        while found is None:
            coarse = next(self._coarse, None)
            if coarse is None:
                return None
            found = coarse()
        return found

    def without_wrong_groups(
        self, materialized: Materialized, inputs: Sequence[Any]
    ) -> Step | None:
        """The module after the groups that are wrong by themselves gave way; None if none can."""
        wrong, errors = wrong_groups(self.job, materialized, inputs)
        self.errors |= errors
        gave_way = []
        for name, (group, why) in wrong.items():
            kernel_class, how = self._instead(group, materialized.mod[name])
            before = self.job.plan
            for equal in self.job.groups_of(materialized, [name]):
                self.job.cut(equal, RefusalCode.WRONG_NUMBERS, why, kernel_class)
            if how or self.job.plan != before:
                gave_way.append("+".join(group.ops) + (f" as {how}" if how else ""))
        if not gave_way:
            return None
        self.wrong |= wrong
        self.tried.append(f"another way for {', '.join(gave_way)}")
        return self.job.build_fused()

    def _instead(self, group: PlannedGroup, func: tirx.PrimFunc) -> tuple[str, str]:
        """The class that computes a single operator in place of a kernel that is wrong, and in
        which configuration where the class stays.
        """
        if len(group.ops) > 1 or group.kernel_class in UNWRITTEN:
            return STOCK, ""
        if not isinstance(self.job.tuned, OtherKernels):
            self.job.tuned = OtherKernels(self.job.tuned, self.job.hw, self.job.policy)
        with self.job.target:
            how = self.job.tuned.reject(func, group.kernel_class)
            if how is not None:
                return group.kernel_class, how
            other = self.job.tuned.falls_back(func, group.kernel_class)
        return FALLBACK if other else STOCK, ""

    def _coarse_steps(self) -> tuple[Callable[[], Step | None], ...]:
        """What gives way where no group is wrong by itself."""
        return self._without_pieces_beside, self._unfused, self._unwritten, self._without_us

    def _without_pieces_beside(self) -> Step | None:
        """The same with branches, and functions that stay calls, as TVM has them."""
        if not self.job.without_pieces_beside():
            return None
        self.tried.append("TVM's code in branches and in functions that are called")
        return self.job.build_fused()

    def _unfused(self) -> Step | None:
        """One kernel an operator, of the model as it is."""
        if all(len(group.ops) == 1 for group in self.job.plan.groups) and not self.job.plan.opened:
            return None
        self.tried.append("nothing fused")
        self.job.use_whole()
        return self.job.build_fused()

    def _unwritten(self) -> Step | None:
        """The same with TVM's code for every operator."""
        groups = tuple(_stock(group) for group in self.job.plan.groups)
        if groups == self.job.plan.groups:
            return None
        self.tried.append("TVM's code for every operator")
        self.job.plan = replace(self.job.plan, groups=groups)
        return self.job.build_fused()

    def _without_us(self) -> Step | None:
        """The model as TVM alone lowers it; reported are the launches of the step before."""
        self.tried.append("the model as TVM alone compiles it")
        try:
            found = plain_build(self._plain, self.job.target), self.job.write()[1]
        except BuildError as error:
            logger.warning("TVM alone cannot compile the model: %s", error)
            return None
        self.alone = self._plain
        return found


def _stock(group: PlannedGroup) -> PlannedGroup:
    return group if group.kernel_class in UNWRITTEN else replace(group, kernel_class=STOCK)


def wrong_groups(
    job: Job, materialized: Materialized, inputs: Sequence[Any]
) -> tuple[dict[str, tuple[PlannedGroup, str]], dict[str, float]]:
    """The groups whose own numbers are wrong, with the reason, and the error of each group, by name
    of its PrimFunc.
    """
    groups = {n: g for n, g in materialized.groups.items() if g.kernel_class not in FREE}
    cases = {n: group_modules(job.low, job.graph, job.plan, g) for n, g in groups.items()}
    values = _captured(job, cases.values(), inputs)
    wrong, errors = {}, {}
    for name, case in cases.items():
        found = _verified(job, groups[name], case, values)
        errors[name] = found.worst_error
        if not found.passed:
            wrong[name] = (groups[name], found.why)
    return wrong, errors


def _verified(
    job: Job, group: PlannedGroup, case: GroupModules, values: Callable[[Any], Any]
) -> Verification:
    """The verdict on one group, on what the float64 reference of the model gives it."""
    classes = {case.kernel: group.kernel_class}
    with job.target:
        written = write_kernels(case.fused, classes, job.hw, job.policy, tuned=job.tuned)
    arguments = tuple(values(e) for e in case.inputs)
    return verify_group(GroupCase(case.kernel, written.mod, case.unfused, arguments), job.target)


def _captured(
    job: Job, cases: Iterable[GroupModules], inputs: Sequence[Any]
) -> Callable[[Any], Any]:
    """A function from an input of a group to its value in the float64 reference run."""
    main = job.low["main"]
    params = {hash(p): x for p, x in zip(main.params, inputs, strict=True)}
    bound = {hash(b.var): b.var for block in main.body.blocks for b in block.bindings}
    names = dict.fromkeys(v.name for v in _variables(cases) if hash(v) in bound)
    outputs = run_reference(job.low, inputs, capture=list(names), target=job.target)
    captured = dict(zip(names, outputs[len(outputs) - len(names) :], strict=True))
    symbols = _symbol_values(main, inputs)

    def value(e: Any) -> Any:
        if isinstance(e, tvm.ir.GenericConst):
            return e.value.numpy()
        if isinstance(e, relax.ShapeExpr):
            return tuple(symbols[hash(v)] for v in e.values)
        return captured[e.name] if hash(e) in bound else params[hash(e)]

    return value


def _variables(cases: Iterable[GroupModules]) -> Iterator[relax.Var]:
    return (e for case in cases for e in case.inputs if isinstance(e, relax.Var))


def _symbol_values(main: relax.Function, inputs: Sequence[Any]) -> dict[int, int]:
    found = {}
    for param, x in zip(main.params, inputs, strict=True):
        shape = getattr(param.ty, "shape", None)
        if isinstance(shape, relax.ShapeExpr):
            for symbol, extent in zip(shape.values, np.shape(x), strict=True):
                found[hash(symbol)] = int(extent)
    return found
