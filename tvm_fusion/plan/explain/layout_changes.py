"""Launches of a plan that do nothing but change a layout, and why no neighbour absorbed them.

A permutation or copy becomes a launch of its own where no kernel beside it takes it into its
addressing. Each neighbour has its refusal in the plan; those that a plan does not hold any more,
since groups around were cut or exchanged after the search, are asked for again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...config import HardwareProfile, Policy
from ...ir.extents import product_key
from ...ir.graph import FusionGraph, Op, OpKind
from ..group_view import GroupView
from ..legality import Evaluator
from ..plan import FusionPlan, PlannedGroup
from ..refusal import Refusal, RefusalCode

_NO_KERNEL = ("view", "opaque")


@dataclass(frozen=True, slots=True)
class LayoutChange:
    """A launch that computes nothing.

    Attributes
    ----------
    group : PlannedGroup
    before, after : tuple of PlannedGroup
        The launches that write what it reads, and that read what it writes; views are looked
        through.
    inputs, outputs : tuple of str
        Tensors that it reads of the model's inputs and constants, and writes as results.
    """

    group: PlannedGroup
    before: tuple[PlannedGroup, ...]
    after: tuple[PlannedGroup, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def layout_changes(graph: FusionGraph, plan: FusionPlan) -> tuple[LayoutChange, ...]:
    """The launches of a plan that change layouts only, in order."""
    numbers = {op.name: op.id for op in graph.ops}
    found = []
    for group in plan.groups:
        ops = [graph.ops[numbers[name]] for name in group.ops]
        if group.kernel_class not in _NO_KERNEL and all(moves_only(graph, op) for op in ops):
            found.append(_surrounded(graph, plan, group, ops))
    return tuple(found)


def moves_only(graph: FusionGraph, op: Op) -> bool:
    """Whether an operator writes each element of one tensor as it is, once, in some order."""
    if op.kind is OpKind.OPAQUE or len(op.inputs) != 1 or len(op.outputs) != 1:
        return False
    if any(b.counts or b.reduction is not None or b.compares for b in op.blocks):
        return False
    source, result = (graph.tensors[t] for t in (*op.inputs, *op.outputs))
    same = product_key(source.shape) == product_key(result.shape)
    return same and source.dtype == result.dtype


def refusals_between(
    plan: FusionPlan, first: PlannedGroup, second: PlannedGroup
) -> Iterator[Refusal]:
    """The plan's refusals that name both launches: by an operator each owns, alone or as the end of
    "first..last".
    """
    own = [set(g.ops) - set(g.recomputed) or set(g.ops) for g in (first, second)]
    for refusal in plan.refusals:
        ends = [set(place.split("..")) for place in refusal.where]
        met = [{i for i, end in enumerate(ends) if end & names} for names in own]
        if all(met) and len(met[0] | met[1]) > 1:
            yield refusal


def with_layout_reasons(
    graph: FusionGraph, hw: HardwareProfile, policy: Policy, plan: FusionPlan
) -> FusionPlan:
    """The plan with a refusal for each neighbour of its layout changes; the same plan if it has all
    of them.
    """
    evaluator, missing = None, []
    for change in layout_changes(graph, plan):
        pairs = [(group, change.group) for group in change.before]
        pairs += [(change.group, group) for group in change.after]
        for first, second in pairs:
            if not any(refusals_between(plan, first, second)):
                evaluator = evaluator or Evaluator(graph, hw, policy)
                missing.append(_asked(evaluator, first, second))
    return replace(plan, refusals=(*plan.refusals, *missing)) if missing else plan


def _asked(evaluator: Evaluator, first: PlannedGroup, second: PlannedGroup) -> Refusal:
    """Why two launches are not one."""
    graph = evaluator.graph
    numbers = {op.name: op.id for op in graph.ops}
    names = {*first.ops, *second.ops}
    below = _reached(graph, {numbers[name] for name in first.ops})
    above = _reached(graph, {numbers[name] for name in second.ops}, up=True)
    views = {i for i in below & above if graph.ops[i].kind is OpKind.VIEW}
    members = tuple(sorted({numbers[name] for name in names} | views))
    where = tuple(group.ops[-1] for group in (first, second))
    for i in members:
        if graph.ops[i].kind is OpKind.OPAQUE:
            why = f"{graph.ops[i].name} cannot be read: {graph.ops[i].why_opaque}"
            return Refusal(RefusalCode.OPAQUE, where, why)
    outputs = tuple(
        t
        for i in members
        for t in graph.ops[i].outputs
        if graph.tensors[t].is_output or not set(graph.tensors[t].consumers) <= set(members)
    )
    found = evaluator.group(members, outputs)
    if isinstance(found, Refusal):
        found = evaluator.explain(GroupView(graph, members, outputs))
        return replace(found, where=where)
    apart, together = first.predicted_us + second.predicted_us, found.estimate.time_us
    said = f"together {together:.1f} us, apart {apart:.1f} us"
    doubt = together < apart
    code = RefusalCode.UNDECIDED if doubt else RefusalCode.NOT_PROFITABLE
    said += ": too close to call without a measurement" if doubt else ""
    times = (("apart_us", round(apart, 3)), ("together_us", round(together, 3)))
    return Refusal(code, where, said, times)


def _reached(graph: FusionGraph, ops: set[int], up: bool = False) -> set[int]:
    bitsets = graph.ancestors if up else graph.descendants
    return {i for i in range(len(graph.ops)) if any(bitsets[op] >> i & 1 for op in ops)}


def _surrounded(
    graph: FusionGraph, plan: FusionPlan, group: PlannedGroup, ops: list[Op]
) -> LayoutChange:
    inside = {op.id for op in ops}
    written = {t for op in ops for t in op.outputs}
    before: dict[tuple, PlannedGroup] = {}
    after: dict[tuple, PlannedGroup] = {}
    inputs: dict[str, None] = {}
    waiting = [t for op in ops for t in op.inputs if t not in written]
    while waiting:
        tensor = graph.tensors[waiting.pop(0)]
        if tensor.producer is None:
            inputs[tensor.name] = None
            continue
        producer = graph.ops[tensor.producer]
        owner = plan.group_of(producer.name)
        if owner is None or owner.kernel_class == "view":
            waiting += producer.inputs
        else:
            before[owner.ops] = owner
    waiting, outputs = sorted(written), []
    while waiting:
        tensor = graph.tensors[waiting.pop(0)]
        outputs += [tensor.name] if tensor.is_output else []
        for reader in (graph.ops[c] for c in tensor.consumers if c not in inside):
            holders = [g for g in plan.groups if reader.name in g.ops and g.ops != group.ops]
            made = graph.ops[tensor.producer].name
            holders = [g for g in holders if made not in g.ops]
            if not holders or all(g.kernel_class == "view" for g in holders):
                waiting += reader.outputs
            after |= {g.ops: g for g in holders if g.kernel_class != "view"}
    return LayoutChange(
        group, tuple(before.values()), tuple(after.values()), tuple(inputs), tuple(outputs)
    )
