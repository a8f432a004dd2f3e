"""Fills the report from a plan, and from what was built, checked and timed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..cost.probe import Probed, ProbeFailure
from ..cost.traffic import Resources
from ..host.threads import thread_count
from ..ir.graph import FusionGraph
from ..kernels.cpu.contraction.panels import mark_constants
from ..plan.plan import FREE, UNWRITTEN, FusionPlan, PlannedGroup
from ..transform.apply.materialize import Materialized, materialize
from ..transform.apply.pack_constants import packable_arguments
from .facts import Comparison, GroupReport, RefusalReport, Report, Verification
from .layouts import layout_reports, refusal_report

if TYPE_CHECKING:
    from tvm import tirx

    from ..check.compiled import Checked
    from ..compilation.compiler import Job
    from ..runtime.build.build import Built
    from .times import TimeReport


def planned_report(
    graph: FusionGraph,
    plan: FusionPlan,
    whole: FusionPlan,
    probed: Probed | None = None,
    unlearned: str | None = None,
    tuned: Mapping[tuple[str, ...], Mapping[str, Any]] = MappingProxyType({}),
) -> Report:
    """The report of a plan that was not built; `probed` is what is known of its kernels,
    `unlearned` why the learned correction of times is not used, and `tuned` what tuning chose for
    groups (`tuned_groups`).
    """
    by_ops = {ops: found for (ops, _), found in (probed or {}).items()}
    groups = tuple(
        _group(
            graph,
            g,
            g.ops[-1],
            launches=1,
            tuned=tuned.get(g.ops),
            **_resources(by_ops.get(g.ops)),
        )
        for g in plan.groups
        if g.kernel_class not in FREE
    )
    return Report(
        target=plan.device,
        launches=Comparison(_launches(plan), _launches(whole)),
        bytes=Comparison(_bytes(plan), _bytes(whole)),
        plan=plan.to_dict(),
        groups=groups,
        refusals=_refusals(plan),
        layouts=layout_reports(graph, plan, {}),
        unlearned=unlearned,
    )


def built_report(
    job: Job,
    built: Built,
    materialized: Materialized,
    unfused: Built | None,
    checked: Checked | None,
    times: Mapping[str, TimeReport],
) -> Report:
    """The report of a built module; launches are read off the built modules."""
    from ..runtime.calls.launch_count import count_launches

    groups = []
    for g in job.plan.groups:
        if g.kernel_class in FREE:
            continue
        name = materialized.functions.get(g.ops, g.ops[-1])
        found = [built.resources[k] for k in built.kernels.get(name, ()) if k in built.resources]
        groups.append(
            _group(
                job.graph,
                g,
                name,
                launches=len(built.kernels.get(name, ("",))),
                registers=max((k.registers for k in found), default=None),
                spill_bytes=max((k.spill_bytes for k in found), default=None),
                code_bytes=max((k.code_bytes for k in found), default=None),
                fallback=job.cuts.get(g.ops),
                error=checked.group_errors.get(name) if checked else None,
                tuned=_tuned(job, materialized, g, name),
            )
        )
    return Report(
        target=job.plan.device,
        launches=Comparison(
            count_launches(built), count_launches(unfused) if unfused else _launches(job.whole_plan)
        ),
        bytes=Comparison(_bytes(job.plan), _bytes(job.whole_plan)),
        times=times,
        plan=job.plan.to_dict(),
        groups=tuple(groups),
        refusals=_refusals(job.plan),
        layouts=layout_reports(job.graph, job.plan, materialized.functions),
        threads=thread_count() if built.target.kind.name == "llvm" else None,
        plain=built.plain,
        unlearned=job.unlearned,
        verify=checked
        and Verification(checked.verification.passed, checked.verification.worst_error),
    )


def tuned_groups(job: Job) -> dict[tuple[str, ...], Mapping[str, Any]]:
    """What tuning chose for the groups of a job whose kernels are written, or would be."""
    if job.tuned is None:
        return {}
    materialized = materialize(job.low, job.graph, job.plan)
    found = {}
    for group in (g for g in job.plan.groups if g.kernel_class not in UNWRITTEN):
        name = materialized.functions.get(group.ops)
        if (func := _task(job, materialized, group, name)) is not None:
            job.tuned.choice(func, group.kernel_class, job.policy)
            found[group.ops] = job.tuned.told(func, group.kernel_class, job.policy)
    return {ops: told for ops, told in found.items() if told is not None}


def _tuned(
    job: Job, materialized: Materialized, g: PlannedGroup, name: str | None
) -> Mapping[str, Any] | None:
    """What tuning chose for a group, if a database is used and has it."""
    func = None if job.tuned is None else _task(job, materialized, g, name)
    return None if func is None else job.tuned.told(func, g.kernel_class, job.policy)


def _task(
    job: Job, materialized: Materialized, g: PlannedGroup, name: str | None
) -> tirx.PrimFunc | None:
    """The PrimFunc of a group as it is tuned; None where there is none."""
    if g.ops not in materialized.functions:
        return None
    constants = packable_arguments(materialized.mod, job.hw).get(name, ())
    return mark_constants(materialized.mod[name], constants)


def _resources(found: Resources | ProbeFailure | None) -> dict[str, Any]:
    if found is None:
        return {}
    if isinstance(found, ProbeFailure):
        return {"fallback": f"{found.code.value}: {found.why}"}
    return {
        "registers": found.registers_per_thread,
        "spill_bytes": found.spill_bytes,
        "code_bytes": found.code_bytes,
    }


def _group(graph: FusionGraph, g: PlannedGroup, name: str, **more) -> GroupReport:
    composites = {op.name: op.composite for op in graph.ops}
    tags = (composites[op] for op in g.ops if composites.get(op))
    dominant = max(g.terms.values(), default=0.0) if g.terms else 0.0
    body = max((v for k, v in g.terms.items() if k != "launch"), default=dominant)
    return GroupReport(
        name=name,
        ops=g.ops,
        composites=tuple(dict.fromkeys(tags)),
        kernel_class=g.kernel_class,
        bytes_fused=int(g.bytes),
        bytes_unfused=int(g.unfused_bytes),
        predicted_us=g.predicted_us,
        unfused_predicted_us=g.unfused_us,
        terms=g.terms,
        roofline_share=body / g.predicted_us if g.predicted_us else None,
        evidence=g.evidence and asdict(g.evidence),
        assumed_l2=g.assumed_l2,
        **more,
    )


def _refusals(plan: FusionPlan) -> tuple[RefusalReport, ...]:
    return tuple(map(refusal_report, plan.refusals))


def _launches(plan: FusionPlan) -> int:
    return sum(g.kernel_class not in FREE for g in plan.groups)


def _bytes(plan: FusionPlan) -> int:
    return int(sum(g.bytes for g in plan.groups if g.kernel_class not in FREE))
