"""Why neighbouring launches of a solution stayed apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ...cost.analytic import launch_us
from ..decide.caution import Timed
from ..group_view import GroupView
from ..legality import Costed, Evaluator
from ..refusal import Refusal, RefusalCode
from ..search.solution import (
    Solution,
    costed,
    is_kernel,
    is_opaque,
    is_view,
    members_of,
    produced_reads,
)


def reasons_apart(
    evaluator: Evaluator, launches: Solution, recomputed: tuple[int, ...]
) -> Iterator[Refusal]:
    """A refusal for each pair of launches of which one reads the other, and for each neighbour that
    cannot be read.
    """
    pairs = _Neighbours(evaluator, launches, recomputed)
    graph = evaluator.graph
    for place, launch in enumerate(launches):
        if not is_kernel(graph, launch):
            continue
        for other, views in sorted(pairs.below(place).items()):
            if is_kernel(graph, launches[other]):
                yield pairs.why_apart(place, other, views)
        for other in pairs.opaque_beside(place):
            op = graph.ops[members_of(launches[other].members)[0]]
            where = (pairs.label(place), op.name)
            yield Refusal(RefusalCode.OPAQUE, where, f"{op.name} cannot be read: {op.why_opaque}")


@dataclass
class _Neighbours:
    """Launches by their places in the solution; `views` are bitsets of the lone views between."""

    evaluator: Evaluator
    launches: Solution
    recomputed: tuple[int, ...]

    @cached_property
    def writer(self) -> dict[int, int]:
        return {t: place for place, launch in enumerate(self.launches) for t in launch.stores}

    @cached_property
    def sources(self) -> list[list[int]]:
        graph, writer = self.evaluator.graph, self.writer
        return [
            sorted({writer[t] for t in produced_reads(graph, launch) if t in writer})
            for launch in self.launches
        ]

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """Of each tensor."""
        found: dict[int, list[int]] = {}
        for place, launch in enumerate(self.launches):
            for t in produced_reads(self.evaluator.graph, launch):
                found.setdefault(t, []).append(place)
        return found

    def label(self, place: int) -> str:
        """A launch by the names of the first and the last operator it owns."""
        ops = self.evaluator.graph.ops
        launch = self.launches[place]
        own = members_of(launch.members & ~self.recomputed[place] or launch.members)
        return ops[own[0]].name if len(own) == 1 else f"{ops[own[0]].name}..{ops[own[-1]].name}"

    def below(self, place: int) -> dict[int, int]:
        """Launches other than views that read this one, with the views on the way."""
        found: dict[int, int] = {}
        stack = [(t, 0) for t in self.launches[place].stores]
        while stack:
            tensor, views = stack.pop()
            for reader in self.readers.get(tensor, ()):
                launch = self.launches[reader]
                if is_view(self.evaluator.graph, launch):
                    stack.extend((t, views | launch.members) for t in launch.stores)
                else:
                    found[reader] = found.get(reader, 0) | views
        return found

    def opaque_beside(self, place: int) -> list[int]:
        """Launches that cannot be read and read this one or are read by it, in order."""
        graph = self.evaluator.graph
        found = {other for other in self.below(place) if is_opaque(graph, self.launches[other])}
        stack = list(self.sources[place])
        while stack:
            source = stack.pop()
            if is_view(graph, self.launches[source]):
                stack.extend(self.sources[source])
            elif is_opaque(graph, self.launches[source]):
                found.add(source)
        return sorted(found)

    def why_apart(self, a: int, b: int, views: int) -> Refusal:
        where = (self.label(a), self.label(b))
        merged = self._together(a, b, views)
        if isinstance(merged, Refusal):
            return Refusal(merged.code, where, merged.why, merged.numbers)
        if self._has_path(a, b, views):
            why = (
                "a path leaves the first group and enters the second through an operator outside "
                "both"
            )
            return Refusal(RefusalCode.CYCLE, where, why)
        together = merged.estimate.time_us
        apart = sum(costed(self.evaluator, self.launches[p]).estimate.time_us for p in (a, b))
        times = {"apart_us": apart, "together_us": together}
        said = f"together {together:.1f} us, apart {apart:.1f} us"
        if together < apart and self._saves_too_little(merged):
            code, least = RefusalCode.NOT_PROFITABLE, self.evaluator.caution.min_gain
            said, times["min_gain"] = f"{said}: saves less than {least:.1%}", least
        elif merged.charge_us > 0 and together < apart:
            code, said = RefusalCode.UNDECIDED, f"{said}: too close to call without a measurement"
        else:
            code = RefusalCode.NOT_PROFITABLE
            said += self._what_grows(merged, a, b)
            evaluator = self.evaluator
            times["launch_us"] = launch_us(evaluator.hw, evaluator.policy.launch)
        numbers = tuple((name, round(value, 3)) for name, value in sorted(times.items()))
        return Refusal(code, where, said, numbers)

    def _saves_too_little(self, merged: Costed) -> bool:
        """Whether what keeps a fusion from gaining is the least share that it has to save, and not
        the doubt about its time.
        """
        caution = self.evaluator.caution
        if caution is None or merged.charge_us <= 0:
            return False
        time = merged.estimate.time_us
        least = caution.charge_of(Timed(time, time, 1.0, self.evaluator.common_us(merged)))
        return merged.charge_us <= least + 1e-9

    def _what_grows(self, merged: Costed, a: int, b: int) -> str:
        """The term of the joined launch that is most above those of the two."""
        apart = [costed(self.evaluator, self.launches[p]).estimate.terms for p in (a, b)]
        more = {
            term: time - sum(terms.get(term, 0.0) for terms in apart)
            for term, time in sorted(merged.estimate.terms.items())
        }
        term = max(more, key=lambda name: more[name], default="")
        if not term or more[term] <= 0:
            return ""
        now = merged.estimate.terms[term]
        return f"; {term} goes from {now - more[term]:.1f} to {now:.1f} us"

    def _together(self, a: int, b: int, views: int) -> Costed | Refusal:
        one, two = self.launches[a], self.launches[b]
        members = members_of(one.members | two.members | views)
        stores = {*one.stores, *two.stores}
        outputs = tuple(sorted(t for t in stores if self._is_read_outside(t, (a, b), views)))
        found = self.evaluator.group(members, outputs)
        if not isinstance(found, Refusal):
            return found
        return self.evaluator.explain(GroupView(self.evaluator.graph, members, outputs))

    def _is_read_outside(self, tensor: int, pair: tuple[int, int], views: int) -> bool:
        """Whether others read a tensor, were the pair one launch that computes the views itself."""
        if self.evaluator.graph.tensors[tensor].is_output:
            return True
        for reader in self.readers.get(tensor, ()):
            launch = self.launches[reader]
            if reader in pair:
                continue
            if not launch.members & views:
                return True
            if any(self._is_read_outside(t, pair, views) for t in launch.stores):
                return True
        return False

    def _has_path(self, a: int, b: int, views: int) -> bool:
        """Whether what reads the first launch feeds the second, through a third."""
        both = self.launches[a].members | self.launches[b].members | views
        graph = self.evaluator.graph
        targets = {
            self.writer[t]
            for i in members_of(both)
            for t in graph.ops[i].inputs
            if t in self.writer and not both >> graph.tensors[t].producer & 1
        }
        stack = [r for t in self.launches[a].stores for r in self.readers.get(t, ()) if r < b]
        seen = set(stack)
        while stack:
            place = stack.pop()
            if place in targets:
                return True
            for t in self.launches[place].stores:
                for reader in self.readers.get(t, ()):
                    if reader < b and reader not in seen:
                        seen.add(reader)
                        stack.append(reader)
        return False
