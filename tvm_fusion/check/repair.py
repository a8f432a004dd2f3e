"""Where a module gives wrong numbers, as little of it as need be gives way, in this order:

1. the groups that are wrong by themselves: one of several operators is taken apart, a single
   operator gets another kernel (`Others`), in the end TVM's own code;
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
from typing import Any, Protocol

import numpy as np
import tvm
from tvm import relax, tirx

from ..config import HardwareProfile, Policy
from ..errors import BuildError
from ..flow.planned import BuiltPlan, Planned
from ..ir.weights import numbers
from ..plan.plan import FALLBACK, FREE, STOCK, UNWRITTEN, PlannedGroup
from ..plan.refusal import RefusalCode
from ..transform.apply.materialize import Materialized
from ..transform.apply.region_module import GroupModules, group_modules
from ..transform.apply.write_kernels import Tuned, write_kernels
from .bounds.rounded_products import with_rounded_products
from .plain import plain_build
from .reference import run_reference
from .verify import GroupCase, Verification, verify_group

logger = logging.getLogger(__name__)


class Others(Tuned, Protocol):
    """What may compute functions whose kernels are wrong: `tuning.session.lookup`."""

    def reject(self, func: tirx.PrimFunc, class_name: str) -> str | None: ...

    def falls_back(self, func: tirx.PrimFunc, class_name: str) -> bool: ...


OthersOf = Callable[[Tuned | None, HardwareProfile, Policy], Others]


class Repair:
    """Gives fusions with wrong numbers up, step by step; `plain` is the model as the reference has
    it (`plain.plain_module`).

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

    def __init__(self, plain: tvm.IRModule, others: OthersOf) -> None:
        self._plain, self._others_of = plain, others
        self._others: Others | None = None
        self.errors: dict[str, float] = {}
        self.tried = ["the plan"]
        self.wrong: dict[str, tuple[PlannedGroup, str]] = {}
        self.alone: tvm.IRModule | None = None
        self._coarse = iter(self._coarse_steps())

    def step(
        self, made: BuiltPlan, verification: Verification, inputs: Sequence[Any]
    ) -> tuple[BuiltPlan, bool]:
        """The next module to try after one that is wrong as a whole on some inputs; whether there
        is one.
        """
        made, gave_way = self.without_wrong_groups(made, inputs)
        if gave_way:
            return made, True
        logger.warning("wrong numbers, and no group is wrong alone: %s", verification.why)
        for coarse in self._coarse:
            found = coarse(made)
            if found is not None:
                return found, True
        return made, False

    def without_wrong_groups(
        self, made: BuiltPlan, inputs: Sequence[Any]
    ) -> tuple[BuiltPlan, bool]:
        """The module after the groups that are wrong by themselves gave way; whether any could."""
        planned = made.planned
        wrong, errors = wrong_groups(planned, made.materialized, inputs)
        self.errors |= errors
        gave_way = []
        for name, (group, why) in wrong.items():
            before, func = planned.plan, made.materialized.mod[name]
            planned, kernel_class, how = self._instead(planned, group, func)
            for equal in planned.groups_of(made.materialized, [name]):
                planned = planned.cut(equal, RefusalCode.WRONG_NUMBERS, why, kernel_class)
            if how or planned.plan != before:
                gave_way.append("+".join(group.ops) + (f" as {how}" if how else ""))
        if not gave_way:
            return replace(made, planned=planned), False
        self.wrong |= wrong
        self.tried.append(f"another way for {', '.join(gave_way)}")
        return planned.build(), True

    def _instead(
        self, planned: Planned, group: PlannedGroup, func: tirx.PrimFunc
    ) -> tuple[Planned, str, str]:
        """The class that computes a single operator in place of a kernel that is wrong, and in
        which configuration where the class stays; with what chooses that.
        """
        if len(group.ops) > 1 or group.kernel_class in UNWRITTEN:
            return planned, STOCK, ""
        if self._others is None:
            self._others = self._others_of(planned.tuned, planned.hw, planned.policy)
        planned = replace(planned, tuned=self._others)
        with planned.target:
            how = self._others.reject(func, group.kernel_class)
            if how is not None:
                return planned, group.kernel_class, how
            other = self._others.falls_back(func, group.kernel_class)
        return planned, FALLBACK if other else STOCK, ""

    def _coarse_steps(self) -> tuple[Callable[[BuiltPlan], BuiltPlan | None], ...]:
        """What gives way where no group is wrong by itself."""
        return self._without_pieces_beside, self._unfused, self._unwritten, self._without_us

    def _without_pieces_beside(self, made: BuiltPlan) -> BuiltPlan | None:
        """The same with branches, and functions that stay calls, as TVM has them."""
        if not made.beside:
            return None
        self.tried.append("TVM's code in branches and in functions that are called")
        return replace(made.planned, fuses_beside=False).build()

    def _unfused(self, made: BuiltPlan) -> BuiltPlan | None:
        """One kernel an operator, of the model as it is."""
        plan = made.planned.plan
        if all(len(group.ops) == 1 for group in plan.groups) and not plan.opened:
            return None
        self.tried.append("nothing fused")
        return made.planned.as_it_is().build()

    def _unwritten(self, made: BuiltPlan) -> BuiltPlan | None:
        """The same with TVM's code for every operator."""
        plan = made.planned.plan
        groups = tuple(_stock(group) for group in plan.groups)
        if groups == plan.groups:
            return None
        self.tried.append("TVM's code for every operator")
        return replace(made.planned, plan=replace(plan, groups=groups)).build()

    def _without_us(self, made: BuiltPlan) -> BuiltPlan | None:
        """The model as TVM alone lowers it; reported are the launches of the step before."""
        self.tried.append("the model as TVM alone compiles it")
        planned = made.planned
        try:
            found = planned.write().built(plain_build(self._plain, planned.target))
        except BuildError as error:
            logger.warning("TVM alone cannot compile the model: %s", error)
            return None
        self.alone = self._plain
        return found


def _stock(group: PlannedGroup) -> PlannedGroup:
    return group if group.kernel_class in UNWRITTEN else replace(group, kernel_class=STOCK)


def wrong_groups(
    planned: Planned, materialized: Materialized, inputs: Sequence[Any]
) -> tuple[dict[str, tuple[PlannedGroup, str]], dict[str, float]]:
    """The groups whose own numbers are wrong, with the reason, and the error of each group, by name
    of its PrimFunc.
    """
    groups = {n: g for n, g in materialized.groups.items() if g.kernel_class not in FREE}
    cases = {
        n: group_modules(planned.low, planned.graph, planned.plan, g) for n, g in groups.items()
    }
    values = captured_values(planned, cases.values(), inputs)
    wrong, errors = {}, {}
    for name, case in cases.items():
        found = _verified(planned, groups[name], case, values)
        errors[name] = found.worst_error
        if not found.passed:
            wrong[name] = (groups[name], found.why)
    return wrong, errors


def _verified(
    planned: Planned, group: PlannedGroup, case: GroupModules, values: Callable[[Any], Any]
) -> Verification:
    """The verdict on one group, on what the float64 reference of the model gives it."""
    classes = {case.kernel: group.kernel_class}
    with planned.target:
        written = write_kernels(
            case.fused, classes, planned.hw, planned.policy, tuned=planned.tuned
        )
    arguments = tuple(values(e) for e in case.inputs)
    unfused = with_rounded_products(case.unfused, planned.policy)
    return verify_group(GroupCase(case.kernel, written.mod, unfused, arguments), planned.target)


def captured_values(
    planned: Planned, cases: Iterable[GroupModules], inputs: Sequence[Any]
) -> Callable[[Any], Any]:
    """A function from an input of a group to its value in the float64 reference run."""
    main = planned.low["main"]
    params = {hash(p): x for p, x in zip(main.params, inputs, strict=True)}
    bound = {hash(b.var): b.var for block in main.body.blocks for b in block.bindings}
    names = dict.fromkeys(v.name for v in _variables(cases) if hash(v) in bound)
    outputs = run_reference(planned.low, inputs, capture=list(names), target=planned.target)
    captured = dict(zip(names, outputs[len(outputs) - len(names) :], strict=True))
    symbols = _symbol_values(main, inputs)

    def value(e: Any) -> Any:
        if isinstance(e, tvm.ir.GenericConst):
            return numbers(e)
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
