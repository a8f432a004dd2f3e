"""Fills the report from a plan, and from what was built, checked and timed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tvm import tirx

from ..check.checked_sizes import symbols_of
from ..check.compiled import Checked
from ..cost.learned.learned import unused_residual
from ..cost.probe import Probed, ProbeFailure
from ..cost.traffic import Resources
from ..flow.planned import BuiltPlan, Planned
from ..host.threads import thread_count
from ..ir.extents import ASSUMED_SYMBOLIC_EXTENT
from ..ir.graph import FusionGraph
from ..kernels.cpu.contraction.panels import mark_constants
from ..plan.explain.reasons import layout_changes, refusals_between
from ..plan.explain.true_reasons import true_reasons
from ..plan.plan import FREE, UNWRITTEN, FusionPlan, PlannedGroup
from ..plan.refusal import Refusal
from ..runtime.build.version_names import launches_of, versions_among
from ..runtime.calls.launch_count import count_launches
from ..runtime.timing.timing import TimeReport, bound, wall_times
from ..transform.apply.materialize import Materialized, materialize
from ..transform.apply.pack_constants import packable_arguments
from .facts import Comparison, GroupReport, LayoutReport, RefusalReport, Verification
from .flip import flip
from .network import DeviceReport, Network, bytes_apart
from .screen import Report
from .sources import SourceReport, sources_of

if TYPE_CHECKING:
    from ..runtime.calls.compiled_module import CompiledModule


def planned_report(planned: Planned, probed: Probed | None = None) -> Report:
    """The report of a plan that was not built; `probed` is what is known of its kernels."""
    graph, plan, whole = planned.graph, planned.plan, planned.whole.alone
    told = with_true_reasons(planned)
    tuned = tuned_groups(planned)
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

    def sources() -> dict[str, SourceReport]:
        materialized = materialize(planned.low, graph, plan)
        found = sources_of(planned, materialized)
        names = {g.ops[-1]: materialized.functions.get(g.ops) for g in plan.groups}
        return {last: found[name] for last, name in names.items() if name in found}

    return Report(
        **_of_model(planned, told, groups, sources),
        target=plan.device,
        launches=Comparison(_launches(plan), _launches(whole)),
        bytes=Comparison(_bytes(plan), _bytes(whole)),
        plan=plan.to_dict(),
        layouts=layout_reports(graph, told, {}),
        unlearned=_unlearned(planned),
    )


def built_report(
    made: BuiltPlan,
    unfused_launches: int | None = None,
    verify: Verification | None = None,
    group_errors: Mapping[str, float] | None = None,
    times: Mapping[str, TimeReport] | None = None,
    launches: int | None = None,
) -> Report:
    """The report of a built module.

    Parameters
    ----------
    made : BuiltPlan
    unfused_launches : int, optional
        Of the unfused module if it was built; else its plan says how many.
    verify : Verification, optional
    group_errors : mapping of str to float, optional
        Of groups that were checked on their own, by name of their PrimFunc.
    times : mapping of str to TimeReport, optional
    launches : int, optional
        Of a module that was loaded; others are counted.
    """
    planned, built, materialized = made.planned, made.built, made.materialized
    plan, whole, told = planned.plan, planned.whole.alone, with_true_reasons(planned)
    groups = []
    for g in plan.groups:
        if g.kernel_class in FREE:
            continue
        name = materialized.functions.get(g.ops, g.ops[-1])
        found = [built.resources[k] for k in built.kernels.get(name, ()) if k in built.resources]
        groups.append(
            _group(
                planned.graph,
                g,
                name,
                launches=launches_of(built.kernels.get(name, ("",))),
                early=not built.early.isdisjoint(built.kernels.get(name, ())),
                versions=versions_among(built.kernels.get(name, ())),
                registers=max((k.registers for k in found), default=None),
                spill_bytes=max((k.spill_bytes for k in found), default=None),
                code_bytes=max((k.code_bytes for k in found), default=None),
                fallback=planned.cuts.get(g.ops),
                error=(group_errors or {}).get(name),
                tuned=_tuned(planned, materialized, g, name),
            )
        )
    sources = partial(sources_of, planned, materialized, built)
    return Report(
        **_of_model(planned, told, groups, sources),
        target=plan.device,
        launches=Comparison(
            count_launches(built) if launches is None else launches,
            _launches(whole) if unfused_launches is None else unfused_launches,
        ),
        bytes=Comparison(_bytes(plan), _bytes(whole)),
        times=times or {},
        plan=plan.to_dict(),
        layouts=layout_reports(planned.graph, told, materialized.functions),
        threads=thread_count() if built.target.kind.name == "llvm" else None,
        plain=built.plain,
        unlearned=_unlearned(planned),
        verify=verify,
    )


def verification_of(checked: Checked | None) -> Verification | None:
    """What a check found."""
    return checked and Verification(
        checked.verification.passed,
        checked.verification.worst_error,
        checked.verification.not_finite,
        kernels=checked.kernels,
        on_examples=checked.on_examples,
    )


def _of_model(
    planned: Planned,
    told: FusionPlan,
    groups: Sequence[GroupReport],
    sources: Callable[[], dict[str, SourceReport]],
) -> dict[str, Any]:
    """What a report says of the model: its graph, and the groups' places in it. `told` is the plan
    with the reasons that are told.
    """
    network = Network(planned.graph, planned.plan, planned.source.origins)
    whole = planned.whole
    apart, elsewhere = bytes_apart(network, whole.graph, whole.alone)
    refusals = tuple(map(refusal_report, told.refusals))
    placed = zip(groups, network.launched, network.same_as(), apart, strict=True)
    return {
        "groups": tuple(
            replace(
                group,
                bytes_unfused=size,
                same_as=same,
                rejected=_rejected(group, refusals),
                **network.facts(planned_group),
            )
            for group, planned_group, same, size in placed
        ),
        "refusals": refusals,
        "device": DeviceReport.of(planned.hw),
        "graph": network.report(),
        "repeats": network.repeats(),
        "timeline": {
            "fused": network.timeline(),
            "unfused": Network(whole.graph, whole.alone, {}).timeline(),
        },
        "bytes_elsewhere": elsewhere,
        "assumed": dict.fromkeys(symbols_of(planned.mod["main"]), ASSUMED_SYMBOLIC_EXTENT),
        "sources": sources,
    }


def _rejected(group: GroupReport, refusals: Sequence[RefusalReport]) -> int | None:
    """The first refusal that names an operator of a group, or the group by its ends."""
    names = {group.name, *group.ops, f"{group.ops[0]}..{group.ops[-1]}"}
    return next((i for i, r in enumerate(refusals) if names & set(r.where)), None)


def _unlearned(planned: Planned) -> str | None:
    """Why the device's learned residual is not used, if it has one that is not."""
    return unused_residual(planned.hw) if planned.policy.learned else None


def tuned_groups(planned: Planned) -> dict[tuple[str, ...], Mapping[str, Any]]:
    """What tuning chose for the groups whose kernels are written, or would be."""
    if planned.tuned is None:
        return {}
    materialized = materialize(planned.low, planned.graph, planned.plan)
    found = {}
    for group in (g for g in planned.plan.groups if g.kernel_class not in UNWRITTEN):
        name = materialized.functions.get(group.ops)
        if (func := _task(planned, materialized, group, name)) is not None:
            planned.tuned.choice(func, group.kernel_class, planned.policy)
            found[group.ops] = planned.tuned.told(func, group.kernel_class, planned.policy)
    return {ops: told for ops, told in found.items() if told is not None}


def _tuned(
    planned: Planned, materialized: Materialized, g: PlannedGroup, name: str | None
) -> Mapping[str, Any] | None:
    """What tuning chose for a group, if a database is used and has it."""
    func = None if planned.tuned is None else _task(planned, materialized, g, name)
    return None if func is None else planned.tuned.told(func, g.kernel_class, planned.policy)


def _task(
    planned: Planned, materialized: Materialized, g: PlannedGroup, name: str | None
) -> tirx.PrimFunc | None:
    """The PrimFunc of a group as it is tuned; None where there is none."""
    if g.ops not in materialized.functions:
        return None
    constants = packable_arguments(materialized.mod, planned.hw).get(name, ())
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
        bytes_unfused=int(g.unfused_bytes),  # until it is known what the model has in its place
        predicted_us=g.predicted_us,
        unfused_predicted_us=g.unfused_us,
        terms=g.terms,
        roofline_share=body / g.predicted_us if g.predicted_us else None,
        evidence=g.evidence and asdict(g.evidence),
        assumed_l2=g.assumed_l2,
        **more,
    )


def with_true_reasons(planned: Planned) -> FusionPlan:
    """The plan with its refusals as users see them."""
    plan = planned.plan
    refusals = true_reasons(planned.graph, planned.hw, planned.policy, plan)
    return replace(plan, refusals=refusals)


def _launches(plan: FusionPlan) -> int:
    return sum(g.kernel_class not in FREE for g in plan.groups)


def _bytes(plan: FusionPlan) -> int:
    return int(sum(g.bytes for g in plan.groups if g.kernel_class not in FREE))


# ---- Launches that only change a layout, in a report: what they cost, and who refused them.


def layout_reports(
    graph: FusionGraph, plan: FusionPlan, names: dict[tuple[str, ...], str]
) -> tuple[LayoutReport, ...]:
    """The layout changes of a plan; `names` are those of PrimFuncs, by the group's operators."""
    return tuple(
        LayoutReport(
            name=names.get(change.group.ops, change.group.ops[-1]),
            ops=change.group.ops,
            predicted_us=change.group.predicted_us,
            bytes=int(change.group.bytes),
            reads=change.inputs,
            writes=change.outputs,
            neighbours=(
                *(r for g in change.before for r in _reasons(plan, g, change.group)),
                *(r for g in change.after for r in _reasons(plan, change.group, g)),
            ),
            readers=len(change.after),
        )
        for change in layout_changes(graph, plan)
    )


def refusal_report(refusal: Refusal) -> RefusalReport:
    """A refusal of the plan, with what would turn it."""
    code, numbers = refusal.code.value, dict(refusal.numbers)
    action = refusal.action or flip(code, numbers)
    return RefusalReport(
        code,
        refusal.where,
        refusal.why,
        numbers,
        action,
        refusal.cost_us,
        refusal.kernel_class,
    )


def _reasons(plan: FusionPlan, first: PlannedGroup, second: PlannedGroup) -> list[RefusalReport]:
    return [refusal_report(refusal) for refusal in refusals_between(plan, first, second)]


# ---- What a call costs beside its kernels: device memory, and time on the host.

logger = logging.getLogger(__name__)


def calls_of(compiled: CompiledModule, inputs: Sequence[Any] | None, time: bool) -> dict[str, Any]:
    """What a report says of the memory and the CUDA graph of a call.

    Parameters
    ----------
    compiled : CompiledModule
        With its `cuda_graph` set.
    inputs : sequence or None
        To run it with, where there is a device.
    time : bool
        Time calls with and without a graph.
    """
    found: dict[str, Any] = {}
    runs_on_gpu = inputs is not None and compiled.target.kind.name == "cuda"
    if runs_on_gpu and compiled.peak_memory_bytes is not None:  # else at sizes that are nobody's
        found["measured_memory_bytes"] = compiled.measure_peak_memory(*inputs)
    if compiled.cuda_graph is None:
        return found
    host_us = Comparison()
    if inputs is not None and compiled.cuda_graph_refusal is None:
        host_us = _captured_and_timed(compiled, inputs, time)
    why = compiled.cuda_graph_refusal
    if why is not None:
        logger.warning("no CUDA graph: %s", why)
    state = _captured_when(compiled) if why is None else f"not captured: {why}"
    return {**found, "cuda_graph": state, "call_us": host_us}


def _captured_when(compiled: CompiledModule) -> str:
    if not compiled.signature.is_symbolic:
        return "captured at the first call"
    kept = compiled.cuda_graph.max_shapes
    return f"captured at the second call of a size, for at most {kept} sizes at a time"


def _captured_and_timed(compiled: CompiledModule, inputs: Sequence[Any], time: bool) -> Comparison:
    """Capture a call, to know whether that works; wall-clock time of calls with a graph and
    without.
    """
    graph = bound(compiled, inputs)
    if not time or compiled.cuda_graph_refusal is not None:
        return Comparison()
    options, compiled.cuda_graph = compiled.cuda_graph, False
    try:
        stream = bound(compiled, inputs)
    finally:
        compiled.cuda_graph = options
    times = wall_times({"graph": graph, "stream": stream}, wait=compiled.device.sync)
    return Comparison(times["graph"].median_us, times["stream"].median_us)
