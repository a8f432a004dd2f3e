"""Checks a fusion plan against the graph it was made for: can it run, and does it compute what the
graph does. Works from graph and plan alone and shares no code with the planner.
"""

from __future__ import annotations

from tvm_fusion.config import HardwareProfile, Policy
from tvm_fusion.ir.graph import FusionGraph, OpKind
from tvm_fusion.kernels.base import Fit
from tvm_fusion.kernels.registry import family
from tvm_fusion.plan.group_view import GroupView


def problems_of(graph: FusionGraph, plan, hw: HardwareProfile, policy: Policy) -> list[str]:
    """What is wrong with a plan, in words; empty for a legal plan.

    Parameters
    ----------
    graph : FusionGraph
    plan : FusionPlan
        Its groups have to be in an order in which they can run.
    hw : HardwareProfile
    policy : Policy
    """
    number = {op.name: op.id for op in graph.ops}
    unknown = sorted({n for g in plan.groups for n in (*g.ops, *g.recomputed)} - set(number))
    if unknown:
        return [f"{name} is no operator of the graph" for name in unknown]
    groups = [[number[n] for n in g.ops] for g in plan.groups]
    copies = [{number[n] for n in g.recomputed} for g in plan.groups]
    found = _marks(graph, groups, copies)
    reads = [_reads(graph, ops) for ops in groups]
    writes = _writes(graph, groups, copies, reads)
    found += _order(graph, groups, reads, writes)
    for place, group in enumerate(plan.groups):
        found += _kind(graph, group, groups[place])
        if group.kernel_class not in ("view", "opaque"):
            found += _vain(graph, groups[place], writes[place])
            found += _kernel(graph, group, groups[place], copies[place], writes[place], hw, policy)
    return found


def plan_writes(graph: FusionGraph, plan) -> list[tuple[int, ...]]:
    """The tensors each group of a plan writes."""
    number = {op.name: op.id for op in graph.ops}
    groups = [[number[n] for n in g.ops] for g in plan.groups]
    copies = [{number[n] for n in g.recomputed} for g in plan.groups]
    return _writes(graph, groups, copies, [_reads(graph, ops) for ops in groups])


def _reads(graph: FusionGraph, ops: list[int]) -> set[int]:
    """Tensors of other operators that a group needs."""
    made = {t for i in ops for t in graph.ops[i].outputs}
    return {
        t
        for i in ops
        for t in graph.ops[i].inputs
        if graph.tensors[t].producer is not None and t not in made
    }


def _writes(graph: FusionGraph, groups, copies, reads) -> list[tuple[int, ...]]:
    wanted = {t.id for t in graph.tensors if t.is_output}.union(*reads)
    return [
        tuple(
            t for i in sorted(ops) if i not in copied for t in graph.ops[i].outputs if t in wanted
        )
        for ops, copied in zip(groups, copies, strict=True)
    ]


def _marks(graph: FusionGraph, groups, copies) -> list[str]:
    """Each operator has one owner, whoever recomputes it does not own it, all work is done."""
    found = []
    owners: dict[int, int] = {}
    for ops, copied in zip(groups, copies, strict=True):
        if len(set(ops)) != len(ops):
            found.append(f"{[graph.ops[i].name for i in ops]} names an operator twice")
        if not copied <= set(ops):
            found.append("a group recomputes what it does not compute")
        for i in ops:
            owners[i] = owners.get(i, 0) + (i not in copied)
    for i, count in sorted(owners.items()):
        if count != 1:
            found.append(f"{graph.ops[i].name} has {count} owners")
    missing = [
        op.name
        for op in graph.ops
        if op.id not in owners and (op.kind is OpKind.OPAQUE or _is_result(graph, op.id))
    ]
    return found + [f"{name} is computed by no group" for name in missing]


def _is_result(graph: FusionGraph, op: int) -> bool:
    return any(graph.tensors[t].is_output for t in graph.ops[op].outputs)


def _order(graph: FusionGraph, groups, reads, writes) -> list[str]:
    """What a group reads is written before; what the graph returns is written at all."""
    found, memory = [], set()
    for ops, read, written in zip(groups, reads, writes, strict=True):
        for t in sorted(read - memory):
            where = graph.ops[ops[0]].name
            found.append(f"{where} reads {graph.tensors[t].name} before it is written")
        memory.update(written)
    results = {t.id for t in graph.tensors if t.is_output and t.producer is not None}
    return found + [f"{graph.tensors[t].name} is not written" for t in sorted(results - memory)]


def _kind(graph: FusionGraph, group, ops: list[int]) -> list[str]:
    kinds = {graph.ops[i].kind for i in ops}
    found = []
    if len({graph.ops[i].region for i in ops}) > 1:
        found.append(f"{group.ops} spans several dataflow blocks")
    if OpKind.OPAQUE in kinds and (len(ops) > 1 or group.kernel_class != "opaque"):
        found.append(f"{group.ops} treats an opaque operator as a kernel")
    if group.kernel_class == "opaque" and kinds != {OpKind.OPAQUE}:
        found.append(f"{group.ops} is not opaque")
    if (group.kernel_class == "view") != (kinds == {OpKind.VIEW} and len(ops) == 1):
        found.append(f"{group.ops}: {group.kernel_class} is not what a lone view is")
    return found


def _vain(graph: FusionGraph, ops: list[int], writes: tuple[int, ...]) -> list[str]:
    """Nothing is computed that neither is written nor leads to something that is."""
    wanted, found = set(writes), []
    for i in sorted(ops, reverse=True):
        if wanted.isdisjoint(graph.ops[i].outputs):
            found.append(f"{graph.ops[i].name} is computed in vain")
        wanted.update(graph.ops[i].inputs)
    return found


def _kernel(graph, group, ops, copied, writes, hw, policy) -> list[str]:
    view = GroupView(graph, tuple(sorted(ops)), writes, sum(1 << i for i in copied))
    fit = family(group.kernel_class).accepts(view, hw, policy)
    if not isinstance(fit, Fit):
        return [f"{group.kernel_class} refuses {group.ops}: {fit.why}"]
    return []
