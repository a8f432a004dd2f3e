"""`Fuse` for a user's own pass pipeline, and the Relax pipeline registered as "tvm_fusion".

seq = tvm.transform.Sequential([..., tvm_fusion.transform.Fuse("h200"), ...])

tvm.compile(mod, target, relax_pipeline=relax.get_pipeline("tvm_fusion", target=target))
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm
from tvm import relax, tirx

from ..config import load_policy
from ..errors import InputError, PlanError, TvmFusionError
from ..ir.reader import has_opaque_pattern
from ..plan.plan import FusionPlan
from .branches import inline_branches, lift_branches
from .devices import Part, device_of, parts_of
from .function_apart import (
    ENTRY,
    FunctionApart,
    has_dataflow,
    own_functions,
    put_back,
    without_unused,
)
from .functions import expressions_of
from .hidden_calls import HiddenCalls
from .kernel_bodies import with_roots

if TYPE_CHECKING:
    from ..job import Job
    from ..report.model import Report
    from .write_kernels import Tuned

logger = logging.getLogger(__name__)

Plans = FusionPlan | str | Path | Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class FusedFunction:
    """What `Fuse` did to one function.

    Attributes
    ----------
    name : str
        The function; branches are called after it.
    plan : FusionPlan
    """

    name: str
    plan: FusionPlan
    _job: Job

    def report(self) -> Report:
        """The plan as a report."""
        return self._job.planned_report()


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.Fuse")
class Fuse:
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
    database : str or Path, optional
        A folder that `tvm_fusion.tune` made, whose kernels are used.
    write : bool
        False leaves the fused PrimFuncs without schedules, for TVM's tuners, which can do nothing
        about written kernels. A later `Fuse` writes what they leave.
    on_plan : callable, optional
        Called with a `FusedFunction` for each function that kernels were written for.

    Raises
    ------
    TargetError
        The target is not that of `Target.current()`, or none that is known.
    PlanError
        `plan` belongs to another function, or the module has several.

    Examples
    --------
    >>> fuse = Fuse("llvm", on_plan=lambda fused: print(fused.name, len(fused.plan.groups)))
    >>> fuse(mod)                                                          # doctest: +SKIP
    decode 2
    prefill 3
    """

    def __init__(
        self,
        target: Any = None,
        *,
        policy: Any = None,
        plan: Plans = None,
        database: str | Path | None = None,
        write: bool = True,
        on_plan: Callable[[FusedFunction], Any] | None = None,
    ) -> None:
        self.target = target
        self.write = write
        self.policy = load_policy(policy)
        self.plan = plan
        self.database = database
        self.on_plan = on_plan
        self._opened: dict[str, Tuned] = {}  # the database, by target

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with kernels; `mod` itself where none is written."""
        if not own_functions(mod):
            return mod
        self._opened.clear()  # tuning may have gone on since the last run
        device = device_of(self.target, mod)
        fused, branches = lift_branches(_without_nesting(mod))
        functions = own_functions(fused)
        if self.plan is not None and len(functions) > 1:
            names = ", ".join(gvar.name_hint for gvar in functions)
            raise PlanError(f"Fuse was given one plan for a module of several functions: {names}")
        written = False
        for gvar in functions:
            for part in parts_of(fused[gvar], device):
                with _named(mod, gvar):
                    changed = self._fused(fused, gvar, part)
                written |= changed is not None
                fused = fused if changed is None else changed
        if not written:
            return mod
        return with_roots(without_unused(inline_branches(fused, branches), mod))

    def _fused(self, mod: tvm.IRModule, gvar: tvm.ir.GlobalVar, part: Part) -> tvm.IRModule | None:
        """The module with one part of a function fused; None where no kernel is written for it."""
        from ..job import Job

        apart = FunctionApart.of(mod, gvar)
        seen = HiddenCalls.of(apart.mod, ENTRY, lambda ty: not part.holds(ty))
        tuned = self._tuned(part)
        job = Job.from_module(seen.mod, part.target, part.hw, self.policy, self.plan, tuned)
        changed = job.fuse() if self.write else job.fused_functions()
        if not _new_functions(changed, seen.mod, self.write):
            return None
        if self.on_plan is not None:
            self.on_plan(FusedFunction(gvar.name_hint, job.plan, job))
        changed = seen.shown(changed, ENTRY)
        if not has_dataflow(mod[gvar]):  # passes that want none may come next
            changed = relax.transform.ToNonDataflow()(changed)
        return put_back(mod, apart, changed, part.target if part.place else None)

    def _tuned(self, part: Part) -> Tuned | None:
        """The kernels that tuning chose for a device; None without a database."""
        if self.database is None:
            return None
        name = str(part.target)
        if name not in self._opened:
            from ..tuning.lookup import tuned_kernels

            self._opened[name] = tuned_kernels(self.database, part.hw, part.target)
        return self._opened[name]


@contextmanager
def _named(mod: tvm.IRModule, gvar: tvm.ir.GlobalVar) -> Iterator[None]:
    """Errors within name the pass and the function; those of a module that is not well formed say
    that it is not.
    """
    try:
        yield
    except TvmFusionError as error:
        error.add_note(f"in tvm_fusion.Fuse, function {gvar.name_hint}")
        raise
    except Exception as error:
        try:
            relax.analysis.well_formed(mod)
        except Exception as why:
            reason = str(why).strip().splitlines()[-1]
            raise InputError(
                f"tvm_fusion.Fuse, function {gvar.name_hint}: the module is not well formed: "
                f"{reason}. Look for the pass that made it so with relax.analysis.well_formed"
            ) from error
        raise


def _new_functions(mod: tvm.IRModule, before: tvm.IRModule, kernels: bool) -> bool:
    """Whether a module has PrimFuncs, or `kernels` of ours, that were not there before."""
    known = {gvar.name_hint: func for gvar, func in before.functions_items()}
    return any(
        isinstance(func, tirx.PrimFunc)
        and not func.same_as(known.get(gvar.name_hint))
        and (not kernels or has_opaque_pattern(func))
        for gvar, func in mod.functions_items()
    )


def _without_nesting(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with functions inside of functions as functions of their own."""
    bodies = (mod[gvar].body for gvar in own_functions(mod))
    nested = any(expressions_of(body, relax.Function) for body in bodies)
    return relax.transform.LambdaLift()(mod) if nested else mod


def fusion_pipeline(
    target: Any = None,
    *,
    policy: Any = None,
    plan: Plans = None,
    database: str | Path | None = None,
    on_plan: Callable[[FusedFunction], Any] | None = None,
) -> tvm.transform.Pass:
    """The Relax pipeline "tvm_fusion": `Fuse`, then the lowering to VM calls.

    Parameters as for `Fuse`; without a target it is that of the build.
    """
    fuse = Fuse(target, policy=policy, plan=plan, database=database, on_plan=on_plan)

    @tvm.transform.module_pass(opt_level=0, name="tvm_fusion")
    def pipeline(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        from ..runtime.pipeline import lowering_pipeline

        own, _ = device_of(target, mod)
        with own:
            return lowering_pipeline(own)(fuse(mod))

    return pipeline


def register() -> None:
    """Registers the Relax pipeline, and the lowering of its kernels."""
    from ..runtime.pipeline import register_tir_pipelines

    register_tir_pipelines()
    if "tvm_fusion" not in relax.pipeline.PIPELINE_MAP:
        relax.register_pipeline("tvm_fusion")(fusion_pipeline)
