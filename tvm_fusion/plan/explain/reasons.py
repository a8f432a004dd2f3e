"""Why launches of a solution stayed apart, and which of them do nothing but change a layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ...config import HardwareProfile, Policy
from ...cost.analytic import launch_us
from ...ir.extents import product_key
from ...ir.graph import FusionGraph, Op, OpKind
from ..decide.caution import Timed
from ..group_view import GroupView
from ..legality import Costed, Evaluator
from ..plan import FREE, FusionPlan, PlannedGroup
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

# Launches of a plan that do nothing but change a layout, and why no neighbour absorbed them.
#
# A permutation or copy becomes a launch of its own where no kernel beside it takes it into its
# addressing. Each neighbour has its refusal in the plan; those that a plan does not hold any more,
# since groups around were cut or exchanged after the search, are asked for again.


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
        if group.kernel_class not in FREE and all(moves_only(graph, op) for op in ops):
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
    below = reached(graph, {numbers[name] for name in first.ops})
    above = reached(graph, {numbers[name] for name in second.ops}, up=True)
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


def reached(graph: FusionGraph, ops: set[int], up: bool = False) -> set[int]:
    """The operators below some, or above them."""
    bitsets = graph.ancestors if up else graph.descendants
    every = 0
    for op in ops:
        every |= bitsets[op]
    return {i for i in range(every.bit_length()) if every >> i & 1}


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
