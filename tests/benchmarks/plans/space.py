"""All plans of a small graph, or a fair sample of them.

A plan is built from the results backwards: for the last tensor that is wanted and not yet written,
one launch is chosen that writes it; what that launch reads is wanted in turn. A launch is a set of
operators together with the tensors it writes; operators it computes without writing their result
may be computed by other launches, too (rematerialisation).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from tvm_fusion.errors import PlanError
from tvm_fusion.plan.plan import FusionPlan
from tvm_fusion.plan.search.solution import (
    Launch,
    Solution,
    check_solution,
    complete,
    is_kernel,
    members_of,
)
from tvm_fusion.transform.apply.materialize import group_views

from .launch_space import MAX_ENUMERATED_OPS, LaunchSpace

MAX_STEPS = 200_000  # of the enumeration; a graph with more plans is sampled


class PlanSpace(LaunchSpace):
    """Launches and plans of one graph under one model; parameters as for `LaunchSpace`."""

    def plans(
        self, cap: int = 200, seed: int = 0, always: Iterable[Solution] = ()
    ) -> list[Solution]:
        """Plans of the graph: all of them if there are at most `cap`, else a sample.

        Parameters
        ----------
        cap : int
            Most plans to return, those `always` taken apart.
        seed : int
            Of the sample.
        always : iterable of Solution
            Plans that come first, whatever the cap.
        """
        first = list(dict.fromkeys(map(self.normal, always)))
        every = self.every_plan() if len(self.kernels) <= MAX_ENUMERATED_OPS else None
        if every is None:
            every = self.random_plans(4 * cap, seed)
        rest = [p for p in every if p not in set(first)]
        if len(rest) + len(first) > cap:
            rng = random.Random(seed)
            count = max(0, cap - len(first))
            cheap = sorted(rest, key=self.predicted_us)[: count // 3]
            others = [p for p in rest if p not in set(cheap)]
            rest = cheap + rng.sample(others, min(len(others), count - len(cheap)))
        return first + rest

    def every_plan(self) -> list[Solution] | None:
        """All plans, or None if there are too many to list."""
        by_tensor: dict[int, list[Launch]] = {}
        for launch in self.launches():
            for t in launch.stores:
                by_tensor.setdefault(t, []).append(launch)
        wanted = frozenset(self._source(t.id) for t in self.graph.tensors if t.is_output)
        wanted = frozenset(t for t in wanted if self._producer(t) is not None)
        found: dict[Solution, None] = {}
        stack: list[tuple[tuple[Launch, ...], frozenset[int], frozenset[int]]] = [
            ((), wanted, frozenset())
        ]
        steps = 0
        while stack:
            steps += 1
            if steps > MAX_STEPS:
                return None
            chosen, wanted, written = stack.pop()
            missing = wanted - written
            if not missing:
                if written <= wanted and (plan := self._ordered(chosen)) is not None:
                    found.setdefault(plan)
                continue
            for launch in reversed(by_tensor.get(max(missing), ())):
                if not written.isdisjoint(launch.stores):
                    continue
                more = self._read(launch)
                stack.append(((*chosen, launch), wanted | more, written | set(launch.stores)))
        return list(found)

    def _ordered(self, launches: Iterable[Launch]) -> Solution | None:
        """The launches with lone views as a solution, or None if they are none."""
        launches = list(launches)
        owner = {
            self._producer(t): place for place, launch in enumerate(launches) for t in launch.stores
        }
        try:
            plan = complete(self.graph, [launch.members for launch in launches], owner)
            check_solution(self.graph, plan)
        except (PlanError, ValueError):
            return None
        given = {(launch.members, launch.stores) for launch in launches}
        kernels = [x for x in plan if is_kernel(self.graph, x)]
        same = len(kernels) == len(given) and all((x.members, x.stores) in given for x in kernels)
        return plan if same else None

    def normal(self, plan: Solution) -> Solution:
        """The plan in its usual order."""
        kernels = [launch for launch in plan if is_kernel(self.graph, launch)]
        ordered = self._ordered(kernels)
        if ordered is None:
            raise PlanError("these launches are no plan of the graph")
        return ordered

    def of_plan(self, plan: FusionPlan) -> Solution:
        """The launches of a FusionPlan as a solution."""
        launches = []
        for view in group_views(self.graph, plan):
            members = 0
            for op in view.ops:
                members |= 1 << op
            launches.append(Launch(members, tuple(sorted(view.outputs))))
        return self.normal(tuple(launches))

    def predicted_us(self, plan: Solution) -> float:
        """Model time of a plan; infinite if a launch is refused."""
        found = [self.costed(x) for x in plan if is_kernel(self.graph, x)]
        return float("inf") if None in found else sum(c.time_us for c in found)

    def neighbours(self, plan: Solution) -> list[Solution]:
        """Plans that differ in one group: two launches joined, one taken apart, an operator moved
        or computed twice.
        """
        sets = [self._ops(x) for x in plan if is_kernel(self.graph, x)]
        found: dict[Solution, None] = {}
        for changed in self._changes(sets):
            solution = self._of_sets(changed)
            if solution is not None and solution != plan:
                found.setdefault(solution)
        return list(found)

    def _ops(self, launch: Launch) -> int:
        return sum(1 << op for op in members_of(launch.members) if op in self.sources)

    def _changes(self, sets: list[int]) -> Iterator[list[int]]:
        for i, a in enumerate(sets):
            others = sets[:i] + sets[i + 1 :]
            members = members_of(a)
            if len(members) > 1:
                yield [*others, *(1 << op for op in members)]
                for op in members:
                    yield [*others, a & ~(1 << op), 1 << op]
                for cut in members[1:]:
                    low = a & ((1 << cut) - 1)
                    yield [*others, low, a & ~low]
            for j, b in enumerate(sets):
                if i < j:
                    rest = [s for k, s in enumerate(sets) if k not in (i, j)]
                    yield [*rest, a | b]
                if i != j:
                    rest = [s for k, s in enumerate(sets) if k not in (i, j)]
                    for op in members:
                        if any(self.readers.get(t, 0) & b for t in self.graph.ops[op].outputs):
                            yield [*rest, a & ~(1 << op), b | 1 << op]
                            yield [*rest, a, b | 1 << op]

    def _of_sets(self, sets: Iterable[int]) -> Solution | None:
        """The plan of launches that compute these operators; those that nobody needs are left
        out.
        """
        kept = sorted({s for s in sets if s})
        for _ in range(len(kept) + 1):
            launches = [Launch(self._stores(s)[0], ()) for s in kept]
            try:
                plan = complete(self.graph, [x.members for x in launches], self._owners(kept))
            except (PlanError, ValueError):
                return None
            used = [x for x in plan if is_kernel(self.graph, x) and x.stores]
            trimmed = sorted({self._needed(x) for x in used})
            if trimmed == kept:
                break
            kept = trimmed
        try:
            check_solution(self.graph, plan)
        except PlanError:
            return None
        legal = all(self.costed(x) is not None for x in plan if is_kernel(self.graph, x))
        return plan if legal else None

    def _owners(self, sets: list[int]) -> dict[int, int]:
        """An operator that stands in several launches is written by that with the fewest others."""
        owner: dict[int, int] = {}
        for place in sorted(range(len(sets)), key=lambda k: (-sets[k].bit_count(), -k)):
            owner |= dict.fromkeys(members_of(sets[place]), place)
        return owner

    def random_plans(self, count: int, seed: int = 0) -> list[Solution]:
        """Plans found by random changes, started from the unfused plan; all different."""
        rng = random.Random(seed)
        start = self.unfused()
        found: dict[Solution, None] = {start: None}
        for _ in range(4 * count):
            if len(found) >= count:
                break
            plan = start
            for _ in range(rng.randint(1, len(self.kernels))):
                plan = self._random_change(plan, rng) or plan
                found.setdefault(plan)
        return list(found)[:count]

    def _random_change(self, plan: Solution, rng: random.Random) -> Solution | None:
        """Mostly a join of a launch with one that reads what it writes."""
        kernels = [x for x in plan if is_kernel(self.graph, x)]
        sets = [self._ops(x) for x in kernels]
        edges = [
            (i, j)
            for i, x in enumerate(kernels)
            for j, y in enumerate(kernels)
            if i != j and not self._read(y).isdisjoint(x.stores)
        ]
        if edges and rng.random() < 0.85:
            i, j = rng.choice(edges)
            rest = [s for k, s in enumerate(sets) if k not in (i, j)]
            copy = rng.random() < 0.15
            return self._of_sets([*rest, *([sets[i]] if copy else []), sets[i] | sets[j]])
        changes = list(self._changes(sets))
        return self._of_sets(rng.choice(changes)) if changes else None

    def unfused(self) -> Solution:
        """Every operator alone."""
        plan = complete(self.graph, [1 << op for op in self.kernels])
        check_solution(self.graph, plan)
        return plan
