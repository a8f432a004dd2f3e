"""The predictions of a plan that a caller gives, made again: what the file says is not believed.

A plan is edited by moving operators between groups or by other kernel classes; times, bytes and
evidence of a group that was edited are then those of another one. A group whose numbers are the
model's keeps them, and with them what was measured of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...errors import PlanError
from ...ir.graph import FusionGraph
from ...kernels import registry
from ...transform.apply.materialize import group_views
from ..differ import clusters
from ..explain.true_reasons import label_of
from ..legality import Evaluator
from ..plan import FREE, STOCK, FusionPlan, PlannedGroup
from ..refusal import Refusal
from ..search.search import predicted_group
from .caution import Caution, by_model, judge, judged_whole, unfused_times

logger = logging.getLogger(__name__)

SAME = 1e-3
"""Share by which two predictions of one kernel may differ: plans keep four digits behind the point.
"""
MOST_NAMED = 3
NUMBERS = ("predicted_us", "unfused_us", "bytes", "unfused_bytes")


@dataclass(frozen=True, slots=True)
class Again:
    """A plan with predictions that are the cost model's, and the groups whose were others.

    Attributes
    ----------
    plan : FusionPlan
    changed : tuple of (PlannedGroup, PlannedGroup)
        As given, and as predicted.
    refused : tuple of Refusal
        Of groups that their kernel class does not take: they have no prediction, and fall back
        where they cannot be written.
    """

    plan: FusionPlan
    changed: tuple[tuple[PlannedGroup, PlannedGroup], ...] = ()
    refused: tuple[Refusal, ...] = ()

    def tell(self) -> None:
        """Warns of what was changed."""
        for refusal in self.refused:
            logger.warning(
                "the plan's group %s is none of class %s: %s. It is tried all the same, without a "
                "prediction",
                "+".join(refusal.where),
                refusal.kernel_class,
                refusal.why,
            )
        refused = {refusal.where for refusal in self.refused}
        others = [
            (old, new)
            for old, new in self.changed
            if new.ops not in refused and old.predicted_us  # 0: nothing was said
        ]
        if not others:
            return
        said = ", ".join(
            f"{label_of(new)} ({old.predicted_us:.4g} us in the file, {new.predicted_us:.4g} us)"
            for old, new in others[:MOST_NAMED]
        )
        more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        logger.warning(
            "predictions of the plan were not the model's, and are now: %s%s", said, more
        )


def predicted_again(
    graph: FusionGraph,
    evaluator: Evaluator,
    plan: FusionPlan,
    alone: Callable[[], FusionPlan],
    caution: Caution,
) -> Again:
    """A plan's groups with what the model predicts of each as the class that the plan names.

    Parameters
    ----------
    graph : FusionGraph
        That the plan was checked for.
    evaluator : Evaluator
        Of the graph.
    plan : FusionPlan
    alone : callable
        Gives the plan with nothing fused; called where a group was edited.
    caution : Caution

    Raises
    ------
    PlanError
        A group is of a class that the device does not have.
    """
    changed, refused, groups = [], [], []
    for view, group in zip(group_views(graph, plan), plan.groups, strict=True):
        again = group
        if group.kernel_class in FREE:
            again = replace(
                PlannedGroup(group.ops, group.kernel_class), recomputed=group.recomputed
            )
        else:
            _refuse_foreign(evaluator, group)
            found = evaluator.as_class(view, group.kernel_class)
            if isinstance(found, Refusal):
                refused.append(replace(found, where=group.ops, kernel_class=group.kernel_class))
                again = PlannedGroup(group.ops, group.kernel_class, group.recomputed)
            else:
                names = tuple(graph.ops[i].name for i in view.ops)
                again = predicted_group(evaluator, found, names, group.recomputed)
                again = replace(again, ops=group.ops)
        if _differs(group, again):
            changed.append((group, again))
        else:
            again = group
        groups.append(again)
    if not changed:
        return Again(plan, refused=tuple(refused))
    plan = replace(plan, groups=tuple(groups))
    return Again(
        _judged(graph, plan, alone(), caution, [new for _, new in changed], refused),
        tuple(changed),
        tuple(refused),
    )


def _refuse_foreign(evaluator: Evaluator, group: PlannedGroup) -> None:
    names = {kernel.name for kernel in evaluator.classes} | {STOCK}
    if group.kernel_class not in names:
        where = "another kind of device" if group.kernel_class in registry.names() else "nothing"
        raise PlanError(
            f"the plan has {'+'.join(group.ops)} as {group.kernel_class}, which is a kernel class "
            f"of {where}; for {evaluator.hw.name} there are {', '.join(sorted(names))}"
        )


def _differs(given: PlannedGroup, found: PlannedGroup) -> bool:
    pairs = [(getattr(given, name), getattr(found, name)) for name in NUMBERS]
    terms = given.terms.keys() | found.terms.keys()
    pairs += [(given.terms.get(name, 0.0), found.terms.get(name, 0.0)) for name in terms]
    return any(abs(a - b) > SAME * max(abs(a), abs(b), 1.0) for a, b in pairs)


def _judged(
    graph: FusionGraph,
    plan: FusionPlan,
    alone: FusionPlan,
    caution: Caution,
    edited: Sequence[PlannedGroup],
    refused: Sequence[Refusal],
) -> FusionPlan:
    """The plan with the evidence of edited groups, and of all together; a group that its class does
    not take has none.
    """
    unfused, new = unfused_times(alone), {group.ops for group in edited}
    unknown = {refusal.where for refusal in refused}
    evidence = {}
    for cluster in clusters(graph, plan):
        ops = {group.ops for group in cluster}
        if ops & new:
            ratio = None if ops & unknown else judge(cluster, unfused, caution)
            found = None if ratio is None else by_model(ratio, caution)
            evidence |= dict.fromkeys(ops, found)
    groups = tuple(
        replace(g, evidence=evidence[g.ops]) if g.ops in evidence else g for g in plan.groups
    )
    plan = replace(plan, groups=groups)
    return plan if refused else judged_whole(plan, unfused, caution)
