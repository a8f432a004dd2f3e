"""The public functions of a model of any kind, each with a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm

from ..config import HardwareProfile, Policy, load_policy, resolve_target
from ..config.toml import nearest
from ..errors import InputError, PlanError
from ..frontends import load_functions
from ..host.stages import stage
from ..ir.extents import Bounds, bounds_of, named_sizes
from ..ir.weights import with_stand_ins
from ..plan.plan import FusionPlan, load_plans
from ..transform.apply.write_kernels import Tuned
from ..transform.layouts.memory_formats import takes_formats
from .planned import PlanLike, Planned, read_plan
from .unlowered import operators_named

Plans = PlanLike | Mapping[str, PlanLike]
TunedOf = Callable[[tvm.target.Target, HardwareProfile], Tuned | None]


@dataclass(frozen=True)
class ReadModel:
    """The public functions of a model by name, and what each is compiled for.

    Attributes
    ----------
    mods : dict of str to IRModule
        Each as the `main` of a module of its own, with stand-ins for its weights (`ir.weights`).
    target : tvm.target.Target
    hw : HardwareProfile
    policy : Policy
    plans : dict of str to FusionPlan or None
        Those that the caller gave.
    tuned : Tuned or None
    """

    mods: dict[str, tvm.IRModule]
    target: tvm.target.Target
    hw: HardwareProfile
    policy: Policy
    plans: dict[str, FusionPlan | None]
    tuned: Tuned | None

    def planned(self) -> dict[str, Planned]:
        """Each with a plan."""
        found, to = {}, (self.target, self.hw, self.policy)
        for name, mod in self.mods.items():
            with errors_naming(name), operators_named(mod, self.target):
                found[name] = Planned.of(mod, *to, self.plans[name], self.tuned, name)
        return found


def read_functions(
    model: Any,
    target: Any = None,
    policy: Any = None,
    plan: Plans = None,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    tuned: TunedOf | None = None,
) -> ReadModel:
    """The functions of a model by name, `main` where there is one; what a caller may have mistyped
    is checked before the model is read. `tuned` gives what tuning chose for a device; the other
    parameters are those of `compilation.compiler.compile`.
    """
    tvm_target, hw = resolve_target(target)
    policy, given = load_policy(policy), _read_plans(plan)
    chosen = tuned(tvm_target, hw) if tuned is not None else None
    how = {"dynamic_shapes": dynamic_shapes, "keep_formats": takes_formats(tvm_target)}
    with stage("reading the model"):
        mods = with_stand_ins(load_functions(model, example_inputs, **how))
    _check_sizes(policy, mods)
    plans = _plan_of_each(given, list(mods))
    return ReadModel(mods, tvm_target, hw, policy, plans, chosen)


def planned_functions(
    model: Any, target: Any = None, *options: Any, **more: Any
) -> dict[str, Planned]:
    """As `read_functions`, each with a plan."""
    return read_functions(model, target, *options, **more).planned()


def planned_function(model: Any, target: Any = None, *options: Any, **more: Any) -> Planned:
    """As `planned_functions` of a model of one function.

    Raises
    ------
    InputError
        The model has several functions.
    """
    found = planned_functions(model, target, *options, **more)
    if len(found) > 1:
        raise InputError(
            f"the model has several functions: {', '.join(found)}; give one of them as a model"
        )
    return next(iter(found.values()))


@contextmanager
def errors_naming(function: str) -> Iterator[None]:
    """Errors of the caller's within say which function they are about."""
    try:
        yield
    except InputError as error:
        if function == "main":
            raise
        raise type(error)(f"function {function}: {error}") from error


def _check_sizes(policy: Policy, mods: Mapping[str, tvm.IRModule]) -> None:
    """Raises InputError where the policy names a size that no function has, or a value that it
    never has.
    """
    mains = [mod["main"] for mod in mods.values()]
    known = dict.fromkeys(name for main in mains for name in named_sizes(main))
    for name, values in policy.sizes:
        if name not in known:
            has = f"its sizes: {', '.join(known)}" if known else "it has no symbolic size"
            raise InputError(
                f"policy: sizes: the model has no {name!r}{nearest(name, known)}; {has}"
            )
        for main in mains:
            bounds = bounds_of(main).get(named_sizes(main).get(name, ""), Bounds())
            refused = [(n, why) for n in values if (why := bounds.refusal(n)) is not None]
            if refused:
                raise InputError(
                    f"policy: sizes: {name} is never {refused[0][0]}: {refused[0][1]}; take it out"
                )


def _read_plans(plan: Plans) -> FusionPlan | dict[str, FusionPlan | None] | None:
    """A plan, or plans by function, of any form that callers may give."""
    if isinstance(plan, str | Path):
        return load_plans(plan)
    if not isinstance(plan, Mapping) or "groups" in plan:
        return read_plan(plan)
    return {str(name): read_plan(one) for name, one in plan.items()}


def _plan_of_each(given: Any, functions: list[str]) -> dict[str, FusionPlan | None]:
    if not isinstance(given, dict):
        if given is not None and len(functions) > 1:
            raise PlanError(
                f"one plan was given for a model of several functions ({', '.join(functions)}): "
                "give a plan for each, by name"
            )
        return dict.fromkeys(functions, given)
    strange = sorted(set(given) - set(functions))
    if strange:
        raise PlanError(
            f"a plan for {', '.join(strange)}, but the functions of the model are "
            f"{', '.join(functions)}"
            "; give plans of this model"
        )
    return {name: given.get(name) for name in functions}
