"""The stages of `Fuse` as passes of their own: `Plan`, `Materialize`, `WriteKernels`.

    plans = tvm_fusion.transform.plan(mod, target)             # edit them, save them, ...
    mod = tvm.transform.Sequential([Materialize(plans, target), WriteKernels(target)])(mod)

comes to what `Fuse(target)` makes of a module, but for kernels that cannot be written: `Fuse` plans
again without them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tvm
from tvm import tirx

from ..config import load_policy, resolve_target
from ..errors import InputError, PlanError
from ..flow.planned import PlanLike, Planned
from ..kernels.registry import families
from ..plan.plan import FusionPlan
from ..transform.apply.kernel_bodies import with_roots
from ..transform.apply.pack_constants import PackConstants, packable_arguments
from ..transform.apply.write_kernels import CLASS_ATTR, Tuned, write_kernels
from ..transform.functions.devices import Device, Part, device_of
from ..transform.functions.each_function import EachFunction, errors_named
from ..transform.functions.functions import (
    MATERIALIZE,
    PACK_CONSTANTS,
    PLAN,
    WRITE_KERNELS,
    ModulePass,
    is_enabled,
    result_of,
    with_functions,
)
from .tuned_parts import TunedParts

if TYPE_CHECKING:
    from ..report.screen import Report
    from .tuned_parts import DatabaseLike

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FusedFunction:
    """What was planned, or fused, in one function.

    Attributes
    ----------
    name : str
        The function; branches are called after it, and where its results lie on several virtual
        devices, the name ends with that of the device ("main@cuda:0").
    plan : FusionPlan
    """

    name: str
    plan: FusionPlan
    _planned: Planned

    def report(self) -> Report:
        """The plan as a report."""
        from ..report.assemble import planned_report  # with all that checks: start-up time

        return planned_report(self._planned)


def planned_stage(
    mod: tvm.IRModule, part: Part, policy: Any, plan: PlanLike = None, tuned: Tuned | None = None
) -> Planned | None:
    """The plan of a module's `main` as stage "tvm_fusion.Plan"; None where that is disabled."""

    def look(_: tvm.IRModule) -> Planned:
        return Planned.of(mod, part.target, part.hw, policy, plan, tuned)

    return result_of(PLAN, mod, look, lambda planned: mod)


@tvm.transform.module_pass(opt_level=0, name=PLAN)
class Plan(ModulePass):
    """Plans each function of a module and hands out the plans; the module stays as it is.

    Parameters
    ----------
    target, policy, database
        As for `Fuse`; of a database the plans that tuning settled count.
    on_plan : callable
        Called with a `FusedFunction` for each function.

    Raises
    ------
    TargetError, InputError
        See `Fuse`.

    Examples
    --------
    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(x: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
                with R.dataflow():
                    lv = R.nn.relu(x)
                    y = R.add(lv, x)
                    R.output(y)
                return y

    After ``Plan("llvm", on_plan=lambda p: print(p.name, [g.ops for g in p.plan.groups]))``::

        @I.ir_module
        class After:
            @R.function
            def main(x: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
                with R.dataflow():
                    lv = R.nn.relu(x)
                    y = R.add(lv, x)
                    R.output(y)
                return y
    """

    def __init__(
        self,
        target: Any = None,
        *,
        policy: Any = None,
        database: DatabaseLike = None,
        on_plan: Callable[[FusedFunction], Any],
    ) -> None:
        self.target, self.policy = target, load_policy(policy)
        self.database, self.on_plan = database, on_plan

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod`."""
        tuned = TunedParts(self.database)

        def look(name: str, apart: tvm.IRModule, part: Part) -> tvm.IRModule | None:
            own = tuned.of(part.target, part.hw, needed=part.place is None)
            planned = Planned.of(apart, part.target, part.hw, self.policy, tuned=own)
            self.on_plan(FusedFunction(name, planned.plan, planned))
            # what another device does in this function is planned behind it
            return None if part.alone else planned.fused_functions()

        EachFunction.of(PLAN, mod, self.target).changed(look)
        return mod


def plan(
    mod: tvm.IRModule, target: Any = None, *, policy: Any = None, database: DatabaseLike = None
) -> dict[str, FusionPlan]:
    """The plans of a module's functions, by name (see `FusedFunction.name`); `Plan` as a function.

    Parameters
    ----------
    mod : IRModule
        It is left unchanged.
    target, policy, database
        As for `Plan`.

    Returns
    -------
    dict of str to FusionPlan
        What `Materialize` takes; times are in microseconds.

    Raises
    ------
    TargetError, InputError
        See `Fuse`.

    Examples
    --------
    >>> plans = plan(mod, "llvm")                                          # doctest: +SKIP
    >>> [group.ops for group in plans["decode"].groups]                    # doctest: +SKIP
    """
    found: dict[str, FusionPlan] = {}
    options = {"policy": policy, "database": database}
    Plan(target, **options, on_plan=lambda p: found.update({p.name: p.plan}))(mod)
    return found


@tvm.transform.module_pass(opt_level=0, name=MATERIALIZE)
class Materialize(ModulePass):
    """Makes one PrimFunc, without a schedule, of each group of a plan.

    Functions are lowered as they were for planning. The PrimFuncs carry the kernel class that the
    plan gives them as attribute "tvm_fusion.kernel_class", for `WriteKernels`.

    Parameters
    ----------
    plans : FusionPlan, or mapping of str to FusionPlan
        What `plan` returned, or the plan of the only function. Functions without one stay as they
        are.
    target, policy
        What the plans were made with.

    Raises
    ------
    PlanError
        A plan was made for another function, or names one that the module does not have, or
        `plans` are none.
    TargetError
        See `Fuse`.
    InputError
        The module is not well formed.

    Examples
    --------
    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(x: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
                with R.dataflow():
                    lv = R.nn.relu(x)
                    y = R.add(lv, x)
                    R.output(y)
                return y

    After ``Materialize(plan(Before, "llvm"), "llvm")``::

        @I.ir_module
        class After:
            @T.prim_func(private=True, s_tir=True)
            def fused_relu_add(x: T.Buffer((T.int64(8),)), y: T.Buffer((T.int64(8),))):
                T.func_attr({"tirx.noalias": True, "tvm_fusion.kernel_class": "pointwise"})
                relu = T.sblock_alloc_buffer((T.int64(8),))
                for i in range(T.int64(8)):
                    with T.sblock("compute"):
                        v = T.axis.spatial(T.int64(8), i)
                        relu[v] = T.max(x[v], T.float32(0.0))
                for i in range(T.int64(8)):
                    with T.sblock("T_add"):
                        v = T.axis.spatial(T.int64(8), i)
                        y[v] = relu[v] + x[v]

            @R.function
            def main(x: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
                cls = After
                with R.dataflow():
                    y = R.call_tir(cls.fused_relu_add, (x,), out_ty=R.Tensor((8,), "float32"))
                    R.output(y)
                return y
    """

    def __init__(
        self,
        plans: FusionPlan | Mapping[str, FusionPlan],
        target: Any = None,
        *,
        policy: Any = None,
    ) -> None:
        if not isinstance(plans, FusionPlan | Mapping):
            raise PlanError(
                f"{MATERIALIZE}: plans are a FusionPlan, or one for each function by name (see "
                f"`plan`), not a {type(plans).__name__}; give one of these"
            )
        self.plans, self.target, self.policy = plans, target, load_policy(policy)

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod` with a PrimFunc for each group."""
        functions = EachFunction.of(MATERIALIZE, mod, self.target)
        plans = self._by_name(list(functions.pieces))

        def apply(name: str, apart: tvm.IRModule, part: Part) -> tvm.IRModule | None:
            if name not in plans:
                return None
            planned = Planned.of(apart, part.target, part.hw, self.policy, plans[name])
            return planned.fused_functions(mark_classes=True)

        return functions.changed(apply)

    def _by_name(self, names: list[str]) -> Mapping[str, FusionPlan]:
        if isinstance(self.plans, FusionPlan):
            if len(names) != 1:
                raise PlanError(
                    f"{MATERIALIZE} was given one plan for a module of several functions: "
                    f"{', '.join(names)}. Give it a plan for each, by name"
                )
            return {names[0]: self.plans}
        strange = sorted(set(self.plans) - set(names))
        if strange:
            raise PlanError(
                f"{MATERIALIZE}: a plan for {', '.join(strange)}, but the functions of the module "
                f"are {', '.join(names) or 'none'}"
                "; give plans of this module"
            )
        return self.plans


@tvm.transform.module_pass(opt_level=0, name=WRITE_KERNELS)
class WriteKernels(ModulePass):
    """Writes the kernels of the PrimFuncs that `Materialize` made.

    A PrimFunc that its class cannot write stays without a schedule, for TVM's own, and is logged as
    a warning.

    Parameters
    ----------
    target, policy
        As for `Materialize`. A PrimFunc with attribute "target" is written for that.
    database
        As for `Fuse`.

    Raises
    ------
    TargetError
        See `Fuse`.
    InputError
        A kernel class does not exist for the target: the plan was made for another one; or see
        `Fuse` for `database`.

    Examples
    --------
    Before::

        @I.ir_module
        class Before:
            @T.prim_func(private=True, s_tir=True)
            def fused_relu_add(x: T.Buffer((T.int64(8),)), y: T.Buffer((T.int64(8),))):
                T.func_attr({"tirx.noalias": True, "tvm_fusion.kernel_class": "pointwise"})
                relu = T.sblock_alloc_buffer((T.int64(8),))
                for i in range(T.int64(8)):
                    with T.sblock("compute"):
                        v = T.axis.spatial(T.int64(8), i)
                        relu[v] = T.max(x[v], T.float32(0.0))
                for i in range(T.int64(8)):
                    with T.sblock("T_add"):
                        v = T.axis.spatial(T.int64(8), i)
                        y[v] = relu[v] + x[v]

            @R.function
            def main(x: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
                cls = Before
                with R.dataflow():
                    y = R.call_tir(cls.fused_relu_add, (x,), out_ty=R.Tensor((8,), "float32"))
                    R.output(y)
                return y

    After ``WriteKernels("llvm")``::

        @I.ir_module
        class After:
            @T.prim_func(private=True, s_tir=True)
            def fused_relu_add(x: T.Buffer((T.int64(8),)), y: T.Buffer((T.int64(8),))):
                T.func_attr({"op_pattern": 8, "tirx.is_scheduled": True, "tirx.noalias": True})
                with T.sblock("root"):
                    T.reads()
                    T.writes()
                    with T.sblock("tvm_fusion_kernel"):
                        T.reads()
                        T.writes()
                        T.sblock_attr({"schedule_rule": "tvm_fusion.written"})
                        for v in T.vectorized(T.int64(8)):
                            relu: T.let[T.float32] = T.max(x[v], T.float32(0.0))
                            total: T.let[T.float32] = relu + x[v]
                            y[v] = total

            @R.function
            def main(x: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
                cls = After
                with R.dataflow():
                    y = R.call_tir(cls.fused_relu_add, (x,), out_ty=R.Tensor((8,), "float32"))
                    R.output(y)
                return y
    """

    def __init__(
        self, target: Any = None, *, policy: Any = None, database: DatabaseLike = None
    ) -> None:
        self.target, self.policy, self.database = target, load_policy(policy), database

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod` with kernels; `mod` itself where no PrimFunc waits for one."""
        waiting = {
            gvar: str(func.attrs[CLASS_ATTR])
            for gvar, func in mod.functions_items()
            if isinstance(func, tirx.PrimFunc) and CLASS_ATTR in func.attrs
        }
        if not waiting:
            return mod
        with errors_named(mod, WRITE_KERNELS):
            device = device_of(self.target, mod)
        by_target: dict[str, list[tvm.ir.GlobalVar]] = {}
        for gvar in waiting:
            target = mod[gvar].attrs.get("target", device[0])
            by_target.setdefault(str(target), []).append(gvar)
        bare = {gvar: mod[gvar].without_attr(CLASS_ATTR) for gvar in waiting}
        written = with_functions(mod, dict(mod.functions_items()) | bare)
        tuned = TunedParts(self.database)
        for gvars in by_target.values():
            own = mod[gvars[0]].attrs.get("target")
            classes = {gvar.name_hint: waiting[gvar] for gvar in gvars}
            target, hw = device if own is None else resolve_target(own)
            chosen = tuned.of(target, hw, needed=own is None)
            written = self._written(written, classes, (target, hw), chosen)
        return with_roots(tvm.transform.Sequential([PackConstants()])(written))

    def _written(
        self, mod: tvm.IRModule, classes: Mapping[str, str], device: Device, tuned: Tuned | None
    ) -> tvm.IRModule:
        """The module with the kernels of one device."""
        target, hw = device
        here = {found.name for found in families(hw)}
        for name, class_name in classes.items():
            if class_name not in here:
                raise InputError(
                    f"{WRITE_KERNELS}: {name} is to be a kernel of class {class_name}, which "
                    f"{hw.name} does not have: give a plan that was made for it"
                )
        constants = packable_arguments(mod, hw) if is_enabled(PACK_CONSTANTS) else {}
        with target:
            written = write_kernels(mod, classes, hw, self.policy, tuned=tuned, constants=constants)
        for name, why in written.failures.items():
            logger.warning("%s stays without a schedule: %s", name, why)
        return written.mod
