"""Where two plans of one graph differ, and plans put together from parts of both.

careful   {a} {b} {c} {d e}      region 1: {a} {b} against {a b}
hopeful   {a b}   {c} {d e}      c, d and e are the same in both
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..ir.graph import FusionGraph, OpKind
from .order import topological
from .plan import FusionPlan, PlannedGroup


@dataclass(frozen=True, slots=True)
class Region:
    """A set of operators that two plans group differently, closed under recomputation.

    Attributes
    ----------
    ops : tuple of int
        The operators, ascending; views are not counted.
    careful, hopeful : tuple of PlannedGroup
        The groups of either plan that compute them.
    """

    ops: tuple[int, ...]
    careful: tuple[PlannedGroup, ...]
    hopeful: tuple[PlannedGroup, ...]

    @property
    def gain_us(self) -> float:
        """What the hopeful groups are predicted to save."""
        return sum(g.predicted_us for g in self.careful) - sum(g.predicted_us for g in self.hopeful)


def regions(graph: FusionGraph, careful: FusionPlan, hopeful: FusionPlan) -> tuple[Region, ...]:
    """The regions in which two plans differ, the largest predicted gain first.

    Views belong to no region: a view costs nothing alone and is copied wherever it is read.
    """
    number = {op.name: op.id for op in graph.ops}
    sets = DisjointSets()
    for g in (*careful.groups, *hopeful.groups):
        sets.join(working(graph, number, g))
    parts: dict[int, tuple[list[PlannedGroup], list[PlannedGroup]]] = {}
    shapes: dict[int, tuple[set, set]] = {}
    for side, plan in enumerate((careful, hopeful)):
        for g in plan.groups:
            if ops := working(graph, number, g):
                root = sets.root(ops[0])
                parts.setdefault(root, ([], []))[side].append(g)
                shapes.setdefault(root, (set(), set()))[side].add(tuple(ops))
    members = sets.members()
    found = [
        Region(tuple(members[root]), tuple(one), tuple(other))
        for root, (one, other) in sorted(parts.items())
        if shapes[root][0] != shapes[root][1]
    ]
    return tuple(sorted(found, key=lambda r: (-round(r.gain_us, 6), r.ops)))


def clusters(graph: FusionGraph, plan: FusionPlan) -> list[tuple[PlannedGroup, ...]]:
    """Groups with an operator, in sets that recompute each other's operators."""
    number = {op.name: op.id for op in graph.ops}
    sets = DisjointSets()
    for g in plan.groups:
        sets.join(working(graph, number, g))
    found: dict[int, list[PlannedGroup]] = {}
    for g in plan.groups:
        if ops := working(graph, number, g):
            found.setdefault(sets.root(ops[0]), []).append(g)
    return [tuple(found[root]) for root in sorted(found)]


def exchanged(
    graph: FusionGraph, plan: FusionPlan, out: Iterable[PlannedGroup], into: Iterable[PlannedGroup]
) -> FusionPlan | None:
    """The plan with some groups in place of others that compute the same operators.

    None where the groups would wait for each other in a circle.
    """
    gone = {g.ops for g in out}
    kept = [g for g in plan.groups if g.ops not in gone]
    groups = in_order(graph, _settle_views(graph, [*kept, *into]))
    return None if groups is None else replace(plan, groups=groups)


def in_order(graph: FusionGraph, groups: Sequence[PlannedGroup]) -> tuple[PlannedGroup, ...] | None:
    """Groups such that each comes after those that store what it reads; None for a circle."""
    number = {op.name: op.id for op in graph.ops}
    members = [frozenset(number[n] for n in g.ops) for g in groups]
    home = {number[n]: k for k, g in enumerate(groups) for n in g.ops if n not in set(g.recomputed)}
    sources = {
        k: {home[p] for op in ops for p in graph.producers(op) if p not in ops and p in home}
        for k, ops in enumerate(members)
    }
    try:
        order = topological(sources, {k: min(ops) for k, ops in enumerate(members)})
    except ValueError:
        return None
    return tuple(groups[k] for k in order)


def _settle_views(graph: FusionGraph, groups: list[PlannedGroup]) -> list[PlannedGroup]:
    """Groups that agree on who owns each view: a group of its own wherever one that lacks the view
    reads it, else the first that holds it.
    """
    views = [op for op in graph.ops if op.kind is OpKind.VIEW]
    names = {op.name for op in views}
    found = [g for g in groups if not (len(g.ops) == 1 and g.ops[0] in names)]
    holders: dict[str, list[int]] = {}
    for k, g in enumerate(found):
        for name in g.ops:
            holders.setdefault(name, []).append(k)
    owner: dict[str, int] = {}
    alone: list[PlannedGroup] = []
    for op in reversed(views):
        inside = set(holders.get(op.name, ()))
        readers = [graph.ops[c].name for c in graph.consumers(op.id)]
        if any(k not in inside for r in readers for k in holders.get(r, ())):
            alone.append(PlannedGroup((op.name,), "view"))
            holders.setdefault(op.name, []).append(len(found) + len(alone) - 1)
        elif inside:
            owner[op.name] = min(inside)
    settled = []
    for k, g in enumerate(found):
        copies = {n for n in g.ops if n in names and owner.get(n) != k}
        kept = {n for n in g.recomputed if n not in names}
        settled.append(replace(g, recomputed=tuple(n for n in g.ops if n in copies | kept)))
    return [*settled, *alone]


def working(graph: FusionGraph, number: dict[str, int], group: PlannedGroup) -> list[int]:
    """The operators of a group that are no views."""
    ops = (number[n] for n in group.ops)
    return [i for i in ops if graph.ops[i].kind is not OpKind.VIEW]


class DisjointSets:
    """Disjoint sets of numbers; the root of a set is its least member."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def root(self, x: int) -> int:
        self._parent.setdefault(x, x)
        while self._parent[x] != x:
            self._parent[x] = self._parent[self._parent[x]]
            x = self._parent[x]
        return x

    def join(self, members: Iterable[int]) -> None:
        first, *others = sorted({self.root(m) for m in members}) or [0]
        for other in others:
            self._parent[other] = first

    def members(self) -> dict[int, list[int]]:
        """The sets by their roots, ascending."""
        found: dict[int, list[int]] = {}
        for x in sorted(self._parent):
            found.setdefault(self.root(x), []).append(x)
        return found
