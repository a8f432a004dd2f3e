"""The groups of a plan that can be unfused one by one, and plans with some of them only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from ..flow.planned import Planned
from ..plan.decide.decide import taken_apart
from ..plan.differ import DisjointSets, clusters
from ..plan.explain.true_reasons import label_of
from ..plan.plan import FREE, STOCK, UNWRITTEN, PlannedGroup
from ..report.assemble import planned_report
from ..transform.apply.materialize import materialize

Part = tuple[PlannedGroup, ...]
"""Groups that share a kernel, or recompute each other's operators: they are unfused together."""

Suspect = TypeVar("Suspect")


@dataclass(frozen=True)
class Parts:
    """The parts of a plan, and the plan with only some of them."""

    planned: Planned

    @cached_property
    def every(self) -> tuple[Part, ...]:
        """Those with a kernel of this package."""
        found: dict[int, list[PlannedGroup]] = {}
        sets, number = DisjointSets(), {}
        parts = clusters(self.planned.graph, self.planned.plan)
        parts = [p for p in parts if not all(g.kernel_class in UNWRITTEN for g in p)]
        for part in parts:
            sets.join(number.setdefault(self.kernel_of[g.ops], len(number)) for g in part)
        for part in parts:
            root = sets.root(number[self.kernel_of[part[0].ops]])
            found.setdefault(root, []).extend(part)
        return tuple(map(tuple, found.values()))

    @cached_property
    def kernel_of(self) -> dict[tuple[str, ...], str]:
        """The PrimFunc that computes a group; equal groups share one."""
        planned = self.planned
        functions = materialize(planned.low, planned.graph, planned.plan).functions
        return {g.ops: functions.get(g.ops, g.ops[-1]) for g in planned.plan.groups}

    @cached_property
    def labels(self) -> dict[tuple[str, ...], str]:
        """What groups are called in the model, where that is known, else by their operators."""
        groups = planned_report(self.planned).groups
        placed = {g.ops: g.label for g in groups if any(g.modules)}
        return {g.ops: placed.get(g.ops, label_of(g)) for g in self.planned.plan.groups}

    def label(self, part: Part) -> str:
        """A part in words."""
        kernels: dict[str, list[PlannedGroup]] = {}
        for group in part:
            kernels.setdefault(self.kernel_of[group.ops], []).append(group)
        return " with ".join(
            f"{self.labels[g[0].ops]} ({g[0].kernel_class})" + (f" x{len(g)}" if g[1:] else "")
            for g in kernels.values()
        )

    def is_one_kernel(self, part: Part) -> bool:
        """Whether all groups of a part are computed by one kernel."""
        return len({self.kernel_of[group.ops] for group in part}) == 1

    def only(self, kept: Collection[Part], written: bool = False) -> Planned:
        """The function with the kernels of some parts; all other operators are one launch each, of
        TVM's own code, or with `written`, of the same kernel classes.
        """
        planned = self.planned
        plan, alone = planned.plan, planned.alone
        if not written:
            alone = replace(alone, groups=tuple(map(as_stock, alone.groups)))
        gone = [g for part in self.every if part not in kept for g in part]
        plan = taken_apart(planned.graph, plan, gone, alone, ()) if gone else plan
        return replace(planned, plan=plan, fuses_beside=not gone)


def as_stock(group: PlannedGroup) -> PlannedGroup:
    """The group as TVM's own code."""
    return group if group.kernel_class in FREE else replace(group, kernel_class=STOCK)


def smallest(
    suspects: Sequence[Suspect], is_bad: Callable[[Sequence[Suspect]], bool]
) -> Sequence[Suspect]:
    """Suspects of a bad set that are bad together, none of which can be left out.

    Halves first, then smaller shares and what is left without each (Zeller and Hildebrandt,
    Simplifying and isolating failure-inducing input, 2002): about the logarithm of their number of
    questions where one suspect is to blame. `is_bad(suspects)` is taken to hold.
    """
    found, shares = list(suspects), 2
    while len(found) > 1:
        size = -(-len(found) // shares)
        pieces = [found[i : i + size] for i in range(0, len(found), size)]
        rests = [[s for s in found if s not in piece] for piece in pieces]
        bad = next((piece for piece in pieces if is_bad(piece)), None)
        if bad is not None:
            found, shares = bad, 2
            continue
        bad = None if shares == 2 else next((rest for rest in rests if is_bad(rest)), None)
        if bad is not None:
            found, shares = bad, max(shares - 1, 2)
        elif size == 1:
            break
        else:
            shares = min(2 * shares, len(found))
    return found
