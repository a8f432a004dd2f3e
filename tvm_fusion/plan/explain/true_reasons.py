"""The reasons that users see: of each refusal of a plan what it costs, and what the kernel class
says that came closest.

The search keeps the first reason that it needs, pair by pair. Here all classes are asked again
about what stayed apart, and about the sets of operators that a class knows to be worth a launch as
a whole (`Family.cores`): that attention in float32 is three launches is no matter of a product and
a softmax, but of the class that takes all three in half precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ...config import HardwareProfile, Policy
from ...cost.analytic import COMPUTING, launch_us
from ...ir.graph import FusionGraph, OpKind
from ..group_view import GroupView
from ..legality import Evaluator
from ..plan import FusionPlan, PlannedGroup
from ..refusal import Refusal, RefusalCode
from .reasons import reached

MOST_ASKED = 200
"""Refusals whose classes are asked again, the dearest first: asking takes about a millisecond."""

SAID_ONCE = frozenset(
    {
        RefusalCode.CYCLE,
        RefusalCode.UNDECIDED,
        RefusalCode.SLOWER,
        RefusalCode.BUILD,
        RefusalCode.WRONG_NUMBERS,
    }
)
"""Codes of which no kernel class knows more."""

WORK_TERMS = (*COMPUTING, "tensor", "fma", "operations", "integer")
"""Terms of a prediction that a fused launch has, too; those of memory and launches it may save."""


def true_reasons(
    graph: FusionGraph, hw: HardwareProfile, policy: Policy, plan: FusionPlan
) -> tuple[Refusal, ...]:
    """The refusals of a plan with what each costs and the reason of the class that came closest,
    the dearest first; pairs of launches that are parts of one refused core are one refusal.
    """
    asked = Apart(Evaluator(graph, hw, policy), plan)
    cores = list(asked.cores())
    whole = [asked.groups_at(core.where) for core in cores]
    found = cores + [
        replace(refusal, cost_us=asked.cost_us(refusal))
        for refusal in plan.refusals
        if not asked.is_stale(refusal)
        and not any(asked.is_within(refusal, groups) for groups in whole)
    ]
    found.sort(
        key=lambda refusal: -1.0 if refusal.cost_us is None else refusal.cost_us, reverse=True
    )
    return tuple(asked.closest(r) for r in found[:MOST_ASKED]) + tuple(found[MOST_ASKED:])


@dataclass
class Apart:
    """What a plan left apart: launches by their places in the plan."""

    evaluator: Evaluator
    plan: FusionPlan

    @cached_property
    def number(self) -> dict[str, int]:
        return {op.name: op.id for op in self.evaluator.graph.ops}

    @cached_property
    def owner(self) -> dict[str, int]:
        """The launch that owns an operator."""
        groups = enumerate(self.plan.groups)
        return {op: place for place, g in groups for op in g.ops if op not in g.recomputed}

    def groups_at(self, where: Iterable[str]) -> tuple[int, ...]:
        """The launches that the places of a refusal name; those that the plan does not have any
        more are left out.
        """
        names = (place.split("..")[0] for place in where)
        return tuple(sorted({self.owner[name] for name in names if name in self.owner}))

    def label(self, place: int) -> str:
        """A launch by the first and the last operator that it owns."""
        return label_of(self.plan.groups[place])

    def together(self, places: Iterable[int]) -> GroupView:
        """Launches as one, with the views between them."""
        groups = [self.plan.groups[place] for place in places]
        owned = {self.number[op] for g in groups for op in g.ops if op not in g.recomputed}
        return self.view(owned | {self.number[op] for g in groups for op in g.ops}, owned)

    def view(self, members: set[int], owned: set[int] | None = None) -> GroupView:
        """Operators as one launch, with the views between them; those it owns write results."""
        graph = self.evaluator.graph
        between = reached(graph, members) & reached(graph, members, up=True)
        members = members | {i for i in between if graph.ops[i].kind is OpKind.VIEW}
        owned = members if owned is None else owned
        outputs = [t for i in sorted(owned) for t in graph.ops[i].outputs]
        outputs = [t for t in outputs if self._is_read_outside(t, members)]
        copied = sum(1 << i for i in members - owned if graph.ops[i].kind is not OpKind.VIEW)
        return GroupView(graph, tuple(sorted(members)), tuple(outputs), copied)

    def _is_read_outside(self, tensor: int, members: set[int]) -> bool:
        """Whether others read a tensor, through views or as a result."""
        graph = self.evaluator.graph
        if graph.ops[graph.tensors[tensor].producer].kind is OpKind.VIEW:
            return False
        waiting = [tensor]
        while waiting:
            found = graph.tensors[waiting.pop()]
            if found.is_output:
                return True
            for reader in map(graph.ops.__getitem__, found.consumers):
                if reader.kind is OpKind.VIEW:
                    waiting += reader.outputs
                elif reader.id not in members:
                    return True
        return False

    def cost_us(self, refusal: Refusal) -> float | None:
        """What a refusal costs by the model: what fusing would have saved where that is known, else
        what the launches take beyond the limit of one. None where the plan has no such launches.
        """
        times = dict(refusal.numbers)
        if {"apart_us", "together_us"} <= times.keys():
            return max(0.0, times["apart_us"] - times["together_us"])
        places = self.groups_at(refusal.where)
        if len(places) < 2 or refusal.code is RefusalCode.OPAQUE:
            return None
        return self.lost_us(places)

    def lost_us(self, places: tuple[int, ...]) -> float:
        """What launches take beyond one that computes all: beyond its predicted time where a class
        takes them, else beyond the limit of one.
        """
        view, apart_us = self.together(places), self.apart_us(places)
        found = self.evaluator.group(view.ops, view.outputs, view.duplicated)
        one = self.limit_us(places) if isinstance(found, Refusal) else found.estimate.time_us
        return max(0.0, apart_us - one)

    def apart_us(self, places: Iterable[int]) -> float:
        return sum(self.plan.groups[place].predicted_us for place in places)

    def limit_us(self, places: Iterable[int]) -> float:
        """The least time of one launch that does the work of some and moves what they share with
        others: one launch, and memory or work, whichever takes longer.
        """
        hw, view = self.evaluator.hw, self.together(places)
        moved = sum(map(view.tensor_bytes, (*view.inputs, *view.outputs))) / hw.hbm_bytes_per_s
        kinds = [_work_us(self.plan.groups[place]) for place in places]
        # a core takes its instructions one after the other, the units of a GPU work at a time
        work = sum(map(sum if hw.kind == "llvm" else max, kinds))
        return launch_us(hw, self.evaluator.policy.launch) + max(moved * 1e6, work)

    def cores(self) -> Iterator[Refusal]:
        """A refusal for each core of a class that no class takes and that is several launches."""
        graph = self.evaluator.graph
        for kernel in self.evaluator.classes:
            for core in kernel.cores(graph):
                places = self.groups_at(graph.ops[i].name for i in core)
                places = tuple(p for p in places if self.plan.groups[p].kernel_class != "view")
                if len(places) < 2:
                    continue
                said = [r for r in self.reasons(self.view(set(core))) if r.action is not None]
                if said:
                    where = tuple(map(self.label, places))
                    yield replace(said[0], where=where, cost_us=self.lost_us(places))

    def reasons(self, view: GroupView) -> list[Refusal]:
        """Why each kernel class refuses a group, the closest first; empty if one takes it."""
        for i in view.ops:
            op = self.evaluator.graph.ops[i]
            if op.kind is OpKind.OPAQUE:
                return [
                    view.refuse(RefusalCode.OPAQUE, f"{op.name} cannot be read: {op.why_opaque}")
                ]
        return self.evaluator.reasons(view)

    def is_stale(self, refusal: Refusal) -> bool:
        """Whether what it keeps apart is one launch by now, in a plan that was edited."""
        names = [name for place in refusal.where for name in place.split("..")]
        owners = {self.owner.get(name) for name in names}
        return len(names) > 1 and len(owners) == 1 and None not in owners

    def is_within(self, refusal: Refusal, groups: tuple[int, ...]) -> bool:
        """Whether a refusal by a class keeps only launches of a refused core apart."""
        places = self.groups_at(refusal.where)
        by_class = refusal.code not in SAID_ONCE and not _is_priced(refusal)
        return by_class and len(places) > 1 and set(places) <= set(groups)

    def closest(self, refusal: Refusal) -> Refusal:
        """A refusal with the reason of the class that came closest, where classes have one."""
        places = self.groups_at(refusal.where)
        if refusal.action or refusal.code in SAID_ONCE or _is_priced(refusal) or len(places) < 2:
            return refusal
        said = self.reasons(self.together(places))
        return replace(said[0], where=refusal.where, cost_us=refusal.cost_us) if said else refusal


def label_of(group: PlannedGroup) -> str:
    """A launch by the first and the last operator that it owns."""
    own = [op for op in group.ops if op not in group.recomputed] or list(group.ops)
    return own[0] if len(own) == 1 else f"{own[0]}..{own[-1]}"


def _is_priced(refusal: Refusal) -> bool:
    return any(name == "together_us" for name, _ in refusal.numbers)


def _work_us(group: PlannedGroup) -> list[float]:
    """What a launch works, by kind, in microseconds."""
    return [0.0, *(us for name, us in group.terms.items() if name in WORK_TERMS)]
