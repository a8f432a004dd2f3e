"""`Fuse` for a user's own pass pipeline, and the Relax pipeline registered as "tvm_fusion".

seq = tvm.transform.Sequential([..., tvm_fusion.transform.Fuse("h200"), ...])

tvm.compile(mod, target, relax_pipeline=relax.get_pipeline("tvm_fusion", target=target))
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import tvm
from tvm import relax, tirx

from ..config import load_policy
from ..errors import PlanError
from ..flow.planned import PlanLike
from ..host.logs import is_observed
from ..ir.reader import has_opaque_pattern
from ..runtime.build.lowering import lowering_pipeline, register_tir_pipelines
from ..transform.apply import tuner_warning
from ..transform.apply.kernel_bodies import with_roots
from ..transform.functions.devices import Part, device_of
from ..transform.functions.each_function import EachFunction
from ..transform.functions.functions import FUSE, WRITE_KERNELS, ModulePass, is_enabled
from .planning_stages import FusedFunction, planned_stage
from .tuned_parts import TunedParts

if TYPE_CHECKING:
    from .tuned_parts import DatabaseLike


@tvm.transform.module_pass(opt_level=0, name=FUSE)
class Fuse(ModulePass):
    """Lowers, plans, fuses and writes kernels: the module afterwards holds one PrimFunc a launch.

    Every Relax function is planned by itself, private and nested ones too, and so are the branches
    of an `If`. Functions that belong to others (`Composite`, `Codegen`, `Primitive`) stay as they
    are, and so does a function that no kernel was written for: TVM's own passes lower and fuse it
    as without this package. The kernels are marked, so that no later pass fuses or schedules them
    again, and TVM's default build lowers them wherever `tvm_fusion` was imported. Running the pass
    on its own output changes nothing, since written kernels are opaque.

    Parameters
    ----------
    target : str, dict, Path, tvm.target.Target or None
        See `tvm_fusion.compile`; None takes `Target.current()`, else that of the module's virtual
        devices, else the machine's.
    policy : optional
        See `tvm_fusion.compile`.
    plan : FusionPlan, path, dict or None
        A plan to run instead of searching one, for a module of one function.
    database : str, Path or TuningDatabase, optional
        What `tvm_fusion.tune` found, whose kernels are used; by default the `TuningDatabase` that
        is current (`with database:`) when the pass runs, if there is one. Other databases of
        MetaSchedule change nothing.
    write : bool
        False leaves the fused PrimFuncs without schedules, for TVM's tuners, which can do nothing
        about written kernels, and leave them out with a warning. A later `Fuse` writes what they
        leave.
    on_plan : callable, optional
        Called with a `FusedFunction` for each function that kernels were written for.

    Raises
    ------
    TargetError
        The target is not that of `Target.current()`, or none that is known.
    PlanError
        `plan` belongs to another function, or the module has several.
    InputError
        The module is not well formed; `database` is none, or has nothing of the target. (That a
        current database has nothing of it, or a given one of a virtual device, is logged.)

    Examples
    --------
    >>> fuse = Fuse("llvm", on_plan=lambda fused: print(fused.name, len(fused.plan.groups)))
    >>> fuse(mod)                                                          # doctest: +SKIP
    decode 2
    prefill 3

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

    After ``Fuse("llvm")``::

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
        self,
        target: Any = None,
        *,
        policy: Any = None,
        plan: PlanLike = None,
        database: DatabaseLike = None,
        write: bool = True,
        on_plan: Callable[[FusedFunction], Any] | None = None,
    ) -> None:
        self.target = target
        self.write = write
        self.policy = load_policy(policy)
        self.plan = plan
        self.database = database
        self.on_plan = on_plan

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with kernels; `mod` itself where none is written."""
        tuned = TunedParts(self.database)  # tuning may have gone on since the last run
        functions = EachFunction.of(FUSE, mod, self.target)
        if self.plan is not None and len(functions.pieces) > 1:
            names = ", ".join(functions.pieces)
            raise PlanError(
                f"Fuse was given one plan for a module of several functions: {names}"
                "; give none, or `Materialize` one for each"
            )
        fused = functions.changed(partial(self._fused, tuned))
        return mod if fused.same_as(mod) else with_roots(fused)

    def _fused(
        self, tuned: TunedParts, name: str, mod: tvm.IRModule, part: Part
    ) -> tvm.IRModule | None:
        """The module with one piece fused; None where no kernel is written for it."""
        own = tuned.of(part.target, part.hw, needed=part.place is None)
        planned = planned_stage(mod, part, self.policy, self.plan, own)
        if planned is None:
            return None
        if is_observed():
            from .observed import observe_plan  # takes more than passes need

            observe_plan(planned)
        write = self.write and is_enabled(WRITE_KERNELS)
        changed = planned.fuse() if write else planned.fused_functions()
        if not _new_functions(changed, mod, write):
            return None
        if self.on_plan is not None:
            self.on_plan(FusedFunction(name, planned.plan, planned))
        return changed


def _new_functions(mod: tvm.IRModule, before: tvm.IRModule, kernels: bool) -> bool:
    """Whether a module has PrimFuncs, or `kernels` of ours, that were not there before."""
    known = {gvar.name_hint: func for gvar, func in before.functions_items()}
    return any(
        isinstance(func, tirx.PrimFunc)
        and not func.same_as(known.get(gvar.name_hint))
        and (not kernels or has_opaque_pattern(func))
        for gvar, func in mod.functions_items()
    )


def fusion_pipeline(
    target: Any = None,
    *,
    policy: Any = None,
    plan: PlanLike = None,
    database: DatabaseLike = None,
    on_plan: Callable[[FusedFunction], Any] | None = None,
) -> tvm.transform.Pass:
    """The Relax pipeline "tvm_fusion": `Fuse`, then the lowering to VM calls.

    Parameters as for `Fuse`; without a target it is that of the build.
    """
    fuse = Fuse(target, policy=policy, plan=plan, database=database, on_plan=on_plan)

    @tvm.transform.module_pass(opt_level=0, name="tvm_fusion")
    def pipeline(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        own, _ = device_of(target, mod)
        with own:
            return lowering_pipeline(own)(fuse(mod))

    return pipeline


def register() -> None:
    """Registers the Relax pipeline, the lowering of its kernels, and what tuners are told."""
    register_tir_pipelines()
    tuner_warning.register()
    if "tvm_fusion" not in relax.pipeline.PIPELINE_MAP:
        relax.register_pipeline("tvm_fusion")(fusion_pipeline)
