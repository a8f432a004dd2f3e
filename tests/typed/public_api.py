"""Every public name, used as its types say: `test_typed.py` has mypy read this file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tvm

import tvm_fusion
from tvm_fusion import extend, transform


def compiled(mod: tvm.IRModule, target: tvm.target.Target, x: Any) -> Any:
    """The calls, and what they return."""
    found = tvm_fusion.compile(
        mod,
        target,
        policy={"rounding": "exact"},
        plan=Path("plan.json"),
        verify="groups",
        measure=False,
        time=True,
        cuda_graph={"static_outputs": True},
        database="tuned",
    )
    if isinstance(found, tvm_fusion.CompiledFunctions):
        decode: tvm_fusion.CompiledModule = found["decode"]
        return decode(x)
    path: Path = found.save("model.so")
    loaded: tvm_fusion.CompiledModule | tvm_fusion.CompiledFunctions
    loaded = tvm_fusion.CompiledModule.load(path)
    launches: int = found.launches
    outputs = found(x), loaded(x)
    return outputs, launches, found.peak_memory_bytes


def explained(mod: tvm.IRModule) -> str:
    found = tvm_fusion.explain(mod, "nvidia_h200", probe=False, bound=False)
    if isinstance(found, tvm_fusion.FunctionReports):
        return "\n".join(f"{name}: {one}" for name, one in found.items())
    report: tvm_fusion.Report = found
    group_names: list[str] = [group.name for group in report.groups]
    codes: list[str] = [refusal.code for refusal in report.refusals]
    data: dict[str, Any] = report.to_json()
    return report.full() + str((group_names, codes, data, report.launches.fused))


def tuned(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.runtime.Executable:
    result = tvm_fusion.tune(mod, target, database="tuned", minutes=1.0, trials=8)
    assert str(result)
    with tvm_fusion.TuningDatabase("tuned"):
        return tvm.compile(mod, target, relax_pipeline="tvm_fusion")


def planned(mod: tvm.IRModule) -> None:
    plans: dict[str, tvm_fusion.FusionPlan] = transform.plan(mod, "llvm", policy="conservative")
    for plan in plans.values():
        plan.save("plan.json")
        again: tvm_fusion.FusionPlan = tvm_fusion.FusionPlan.load(Path("plan.json"))
        print(again.predicted_us, [group.kernel_class for group in again.groups])


def show(fused: transform.FusedFunction) -> None:
    name: str = fused.name
    print(name, fused.report().launches.unfused)


def passes(mod: tvm.IRModule, plans: Mapping[str, tvm_fusion.FusionPlan]) -> tvm.IRModule:
    """Each pass is a pass, and returns a module."""
    each: list[tvm.transform.Pass] = [
        transform.AssignLayouts(),
        transform.Decompose(),
        transform.Plan("llvm", on_plan=show),
        transform.Materialize(plans, "llvm"),
        transform.WriteKernels("llvm", policy="default", database="tuned"),
        transform.PackConstants(),
        transform.PlanMemory(),
        transform.Fuse("llvm", policy=Path("mine.toml"), write=False, on_plan=show),
        transform.fusion_pipeline("llvm"),
    ]
    transform.register()
    fused: tvm.IRModule = transform.Fuse("llvm")(mod)
    return tvm.transform.Sequential(each)(fused)


TRAITS: int = (
    extend.MULTIPLIES
    | extend.REDUCES
    | extend.ROLLED
    | extend.SUMS_COLUMNS
    | extend.SUMS_ROWS
    | extend.TRANSPOSES
)


class Mine(extend.Family):
    name = "mine"
    needs = extend.Needs(present=extend.READABLE, absent=TRAITS)

    def accepts(
        self, group: extend.GroupView, hw: extend.HardwareProfile, policy: extend.Policy
    ) -> extend.Fit | extend.Refusal:
        if len(group.outputs) > 1:
            return group.refuse(extend.RefusalCode.SPACE_MISMATCH, "one output only", most=1.0)
        return extend.Fit(self.name, 1, 1, tuple(1.0 for _ in group.blocks))

    def traffic(
        self, group: extend.GroupView, fit: extend.Fit, hw: extend.HardwareProfile
    ) -> extend.Traffic:
        return extend.Traffic(hbm_bytes=1.0, l2_bytes=float(fit.rows))

    def resources(
        self, group: extend.GroupView, fit: extend.Fit, hw: extend.HardwareProfile
    ) -> extend.Resources:
        return extend.Resources(32, 0)

    def writer(self, hw: extend.HardwareProfile) -> extend.Writer:
        if hw.kind != "llvm":
            raise extend.Unsupported(hw.name)
        form = extend.Form("mine", type(None), lambda *_: [(None, None)], extend.write_on_cpu)
        return extend.Writer("a chain", extend.OnCPU, (form,))


def extended(drop: tvm.transform.Pass) -> None:
    with tvm_fusion.register_family(Mine(), kinds=("llvm",)) as family:
        mine: Mine = family
        print(mine.name)
    decorated: type[Mine] = tvm_fusion.register_family(Mine)
    tvm_fusion.unregister_family(decorated.name)

    registration: extend.Registration[extend.MakePass]
    registration = tvm_fusion.register_rewrite("drop", drop, rounds=True)
    registration.undo()

    @tvm_fusion.register_rewrite("drop", kinds=("cuda",))
    def make(hw: extend.HardwareProfile) -> tvm.transform.Pass:
        return drop

    make(extend.load_profile("h100"))
    assert extend.load_policy("default").name
    tvm_fusion.unregister_rewrite("drop")

    device: extend.HardwareProfile = tvm_fusion.register_profile("mine.toml").added
    tvm_fusion.unregister_profile(device.name)
    for take_out in (extend.unregister_family, extend.unregister_rewrite):
        take_out("mine")
    extend.register_family(Mine())
    extend.register_rewrite("drop", drop)
    extend.register_profile(device)
    extend.unregister_profile(device.name)


def caught(mod: tvm.IRModule) -> str | None:
    try:
        tvm_fusion.compile(mod)
    except (
        tvm_fusion.ConfigError,
        tvm_fusion.FrontendError,
        tvm_fusion.PlanError,
        tvm_fusion.TargetError,
    ) as error:
        bad: tvm_fusion.InputError = error
        return str(bad)
    except (tvm_fusion.BuildError, tvm_fusion.VerificationError) as error:
        failed: tvm_fusion.TvmFusionError = error
        return f"{tvm_fusion.__version__}: {failed}"
    return None
