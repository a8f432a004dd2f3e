"""Launches that only change a layout, in a report: what they cost, and who refused them."""

from __future__ import annotations

from ..ir.graph import FusionGraph
from ..plan.explain.layout_changes import layout_changes, refusals_between
from ..plan.plan import FusionPlan, PlannedGroup
from ..plan.refusal import Refusal
from .facts import LayoutReport, RefusalReport
from .flip import flip


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
    return RefusalReport(code, refusal.where, refusal.why, numbers, flip(code, numbers))


def _reasons(plan: FusionPlan, first: PlannedGroup, second: PlannedGroup) -> list[RefusalReport]:
    return [refusal_report(refusal) for refusal in refusals_between(plan, first, second)]
