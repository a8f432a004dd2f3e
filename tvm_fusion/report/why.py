"""Why two parts of a model are, or are not, computed in one kernel: what fusing them is worth by
the cost model, what every kernel class says of it, and the one action that would turn it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .._arguments import pair_of
from ..errors import InputError
from ..flow.planned import Planned
from ..ir.graph import OpKind
from ..plan.decide.decide import caution_of
from ..plan.explain.reasons import reached, refusals_between
from ..plan.explain.true_reasons import Apart
from ..plan.group_view import GroupView
from ..plan.legality import Costed, Evaluator
from ..plan.plan import FREE
from ..plan.refusal import Refusal, RefusalCode
from .facts import Facts, GroupReport, PairReport, RefusalReport
from .flip import flip
from .text import format_bytes, format_refusal, format_terms, format_time

NOT_ITS_KIND = ("reduction", "opaque")  # codes of classes that compute something else
MOST_NAMED = 4  # tensors and launches in a sentence
UNASKED = {
    "not neighbours": (
        "never proposed: the search joins launches along a tensor, those that read one operand, "
        "and independent ones of classes that compute side by side"
    ),
    "no gain": "proposed, and not taken: it gains less than what was fused instead",
}


def asked(planned: Planned, report: Facts, pair: str) -> Facts:
    """The report with only those groups and refusals that concern a pair, and with its answer.

    Parameters
    ----------
    planned : Planned
    report : Report
        Of it.
    pair : str
        Two names with a comma between them: of operators, groups, composites ("softmax#1") or
        modules of the model ("layers.0.mlp").

    Raises
    ------
    InputError
        `pair` is not two names, or the model knows no such name.
    """
    members = _known(planned, report)
    first, second = _names(members, pair)
    shown = {group.ops: group for group in report.groups}
    found = _Pair.of(planned, {first: members[first], second: members[second]}, shown)
    both = members[first] | members[second]
    # Indexes of the whole report's groups and refusals mean others, or none, in this one.
    kept = (g for g in report.groups if both & set(g.ops))
    groups = tuple(replace(g, same_as=None, rejected=None) for g in kept)
    answer = found.answer()
    pair = replace(answer, names=(first, second))
    return replace(report, groups=groups, repeats=(), refusals=answer.refusals, pair=pair)


def _names(known: Mapping[str, frozenset[str]], pair: str) -> tuple[str, str]:
    names = pair_of(pair)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3) or sorted(known)[:3]
            hint = " or ".join(map(repr, near))
            raise InputError(
                f"--why: nothing is called {name!r} in this model (did you mean {hint}?)"
            )
    return names


def _known(planned: Planned, report: Facts) -> dict[str, frozenset[str]]:
    """The operators that each name stands for, the most particular names last."""
    found: dict[str, set[str]] = {}
    for op in getattr(getattr(report, "graph", None), "ops", ()):
        path = op.module.split(".") if op.module else []
        for depth in range(len(path)):
            found.setdefault(".".join(path[: depth + 1]), set()).add(op.name)
    for op in planned.graph.ops:
        if op.composite:
            found.setdefault(op.composite, set()).add(op.name)
    wide = {name: frozenset(ops) for name, ops in found.items()}
    groups = {group.name: frozenset(group.ops) for group in report.groups}
    return wide | groups | {op.name: frozenset({op.name}) for op in planned.graph.ops}


@dataclass(frozen=True)
class _Pair:
    """Two sets of operators of a plan, and the launches that own them."""

    planned: Planned
    apart: Apart
    shown: Mapping[tuple[str, ...], GroupReport]
    sides: tuple[frozenset[int], frozenset[int]]

    @classmethod
    def of(
        cls,
        planned: Planned,
        names: Mapping[str, frozenset[str]],
        shown: Mapping[tuple[str, ...], GroupReport],
    ) -> _Pair:
        caution = caution_of(planned.hw, planned.policy)
        evaluator = Evaluator(planned.graph, planned.hw, planned.policy, caution=caution)
        apart = Apart(evaluator, planned.plan)
        one, *others = (frozenset(apart.groups_at(sorted(ops))) for ops in names.values())
        return cls(planned, apart, shown, (one, others[0] if others else one))

    def answer(self) -> PairReport:
        free = {i for side in self.sides for i in side if self._class(i) in FREE}
        if self.sides[0] == self.sides[1]:
            return self._one_kernel() if len(self.sides[0]) == 1 else self._many()
        if free:
            return self._free(min(free))
        return self._many()

    def _class(self, place: int) -> str:
        return self.planned.plan.groups[place].kernel_class

    def _one_kernel(self) -> PairReport:
        (place,) = self.sides[0]
        group = self.planned.plan.groups[place]
        if group.kernel_class in FREE:
            return self._free(place)
        said = f"one kernel computes both: {self._launches([place])}"
        saved = group.unfused_us - group.predicted_us
        one, apart = format_time(group.predicted_us), format_time(group.unfused_us)
        price = f"{_saving(saved)}: {one} predicted, its operators one by one {apart}"
        if group.evidence is not None:
            low, high = group.evidence.low, group.evidence.high
            price += f"; by {group.evidence.kind} {low:.2f} to {high:.2f} of the time apart"
        if group.terms:
            price += f"; {format_terms(group.terms)}"
        return PairReport(
            launches=(self.apart.label(place),),
            relation=said,
            price=price,
            saves_us=saved,
            apart_us=group.unfused_us,
            together_us=group.predicted_us,
            kernel_class=group.kernel_class,
        )

    def _free(self, place: int) -> PairReport:
        """One of the two is no launch of ours."""
        name = self.apart.label(place)
        op = self.planned.graph.ops[self.apart.number[name]]
        if op.kind is OpKind.OPAQUE:
            why = f"{name} cannot be read: {op.why_opaque}"
            refusal = _reported(Refusal(RefusalCode.OPAQUE, (name,), why))
            return PairReport((name,), f"{name} stays as it is", why, refusals=(refusal,))
        said = f"{name} is a reshape without a launch: the kernels that read it compute its indices"
        return PairReport((name,), said, "costs nothing", saves_us=0.0)

    def _many(self) -> PairReport:
        """What it would be worth to compute the launches of both in one."""
        places = sorted(self.sides[0] | self.sides[1])
        between = self._between(places)
        every = sorted({*places, *between})
        view = self.apart.together(every)
        apart_us = self.apart.apart_us(every)
        found = self.apart.evaluator.group(view.ops, view.outputs, view.duplicated)
        reasons = self.apart.reasons(view) if isinstance(found, Refusal) else []
        common = dict(
            launches=tuple(map(self.apart.label, places)),
            kernels=self._launches(places),
            relation=self._relation(places, between),
            between=tuple(map(self.apart.label, between)),
            apart_us=apart_us,
        )
        if isinstance(found, Costed):
            return self._legal(common, found, every)
        saved = max(0.0, apart_us - self.apart.limit_us(every))
        where = common["launches"]
        said = tuple(_reported(replace(r, where=where), saved) for r in reasons)
        said = self._cores(every) or said
        price = (
            f"no kernel class computes {_all(every)} in one launch; {format_time(apart_us)} apart, "
            f"one launch would save {format_time(saved)} at most"
        )
        return PairReport(**common, price=price, limit_us=apart_us - saved, refusals=said)

    def _cores(self, places: Sequence[int]) -> tuple[RefusalReport, ...]:
        """The refusals of sets of operators that only together are worth a launch."""
        found = (core for core in self.apart.cores() if set(places) <= set(self._places(core)))
        return tuple(_reported(core) for core in found)

    def _places(self, refusal: Refusal) -> tuple[int, ...]:
        return self.apart.groups_at(refusal.where)

    def _legal(self, common: dict, found: Costed, places: Sequence[int]) -> PairReport:
        together_us, apart_us = found.estimate.time_us, common["apart_us"]
        saved, name = apart_us - together_us, found.kernel.name
        price = (
            f"{_saving(saved)}: {format_time(together_us)} as one {name} kernel, "
            f"{format_time(apart_us)} apart"
        )
        groups = [self.planned.plan.groups[place] for place in places]
        said = [
            _reported(r, max(0.0, saved))
            for i, one in enumerate(groups)
            for other in groups[i + 1 :]
            for r in refusals_between(self.planned.plan, one, other)
        ]
        if not said:
            said = [_reported(self._unchosen(common["launches"], found, saved, apart_us))]
        return PairReport(
            **common,
            price=price,
            saves_us=saved,
            together_us=together_us,
            kernel_class=name,
            refusals=tuple(said),
        )

    def _unchosen(
        self, where: tuple[str, ...], found: Costed, saved: float, apart_us: float
    ) -> Refusal:
        """Why the search did not take a fusion that is possible."""
        times = (("apart_us", apart_us), ("together_us", found.estimate.time_us))
        if saved <= 0:
            launch_us = found.estimate.terms.get("launch", 0.0)
            times = (*times, ("launch_us", launch_us))
            return Refusal(RefusalCode.NOT_PROFITABLE, where, "slower together", times)
        if found.charge_us >= saved:
            why = "faster together by the model, but too close to call without a measurement"
            return Refusal(RefusalCode.UNDECIDED, where, why, times)
        neighbours = self._shared(*self.sides) or self._tensors(*self.sides)
        why = UNASKED["no gain" if neighbours else "not neighbours"]
        action = "policy: hand in a plan with both in one group (`--plan`)"
        return Refusal(RefusalCode.NOT_PROFITABLE, where, why, times, action)

    # ---- how the two stand to each other
    def _relation(self, places: Sequence[int], between: Sequence[int]) -> str:
        tensors = self._tensors(*self.sides) or self._tensors(*reversed(self.sides))
        shared = self._shared(*self.sides)
        lies = f"; between them: {self._launches(between)}" if between else ""
        if tensors:
            return f"{self._tensor_names(tensors)} between them in memory{lies}"
        if shared:
            return f"neither reads the other, both read {self._tensor_names(shared)}{lies}"
        apart = "no tensor between them and no operand in common"
        return f"not neighbours: {apart}{lies or '; neither is computed from the other'}"

    def _between(self, places: Sequence[int]) -> list[int]:
        """The launches on a path from one side to the other."""
        graph, number = self.planned.graph, self.apart.number
        sides = [
            {number[op] for place in side for op in self.planned.plan.groups[place].ops}
            for side in self.sides
        ]
        ops: set[int] = set()
        for above, below in (sides, sides[::-1]):
            ops |= reached(graph, above) & reached(graph, below, up=True)
        found = {self.apart.owner.get(graph.ops[i].name) for i in ops} - {None, *places}
        return sorted(i for i in found if self._class(i) != "view")

    def _views(self, side: Iterable[int]) -> Iterator[GroupView]:
        return (self.apart.together((place,)) for place in side)

    def _tensors(self, above: Iterable[int], below: Iterable[int]) -> list[int]:
        """Tensors that one side writes and the other reads, as they lie or through views."""
        written = {t for view in self._views(above) for t in view.outputs}
        read = {t for view in self._views(below) for t in view.inputs}
        return sorted(written & set(map(self._stored, read)))

    def _shared(self, one: Iterable[int], other: Iterable[int]) -> list[int]:
        """Operands of both sides."""
        read = [
            {self._stored(t) for v in self._views(side) for t in v.inputs} for side in (one, other)
        ]
        return sorted(read[0] & read[1])

    def _stored(self, tensor: int) -> int:
        """What a tensor is a view of."""
        graph = self.planned.graph
        while (producer := graph.tensors[tensor].producer) is not None:
            if graph.ops[producer].kind is not OpKind.VIEW:
                break
            tensor = graph.ops[producer].inputs[0]
        return tensor

    def _tensor_names(self, tensors: Sequence[int]) -> str:
        graph = self.planned.graph
        view = GroupView(graph, (), ())
        names = [f"{graph.tensors[t].name} ({format_bytes(view.tensor_bytes(t))})" for t in tensors]
        return _listed(names)

    def _launches(self, places: Iterable[int]) -> str:
        return _listed([self._kernel(place) for place in places])

    def _kernel(self, place: int) -> str:
        """A kernel by its place in the model, where that is known, and its class."""
        group, name = self.planned.plan.groups[place], self.apart.label(place)
        found = self.shown.get(group.ops)
        lines = found.lines[:2] if found else ()
        name = found.label if found and any(found.modules) else name
        return f"{name} ({', '.join((group.kernel_class, *lines))})"


def _all(places: Sequence[int]) -> str:
    return "both" if len(places) == 2 else f"these {len(places)} launches"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _saving(saved: float) -> str:
    verb = "saves" if saved >= 0 else "costs"
    return f"{verb} {format_time(abs(saved))}"


def _reported(refusal: Refusal, cost_us: float | None = None) -> RefusalReport:
    code, numbers = refusal.code.value, {k: round(v, 3) for k, v in refusal.numbers}
    cost = refusal.cost_us if refusal.cost_us is not None else cost_us
    action = refusal.action or flip(code, numbers)
    return RefusalReport(
        code, refusal.where, refusal.why, numbers, action, cost, refusal.kernel_class
    )


# ---- the answer as text


def why(report: Facts) -> str:
    """The answer of a report that was `asked` about a pair, as text: where the two are and how they
    stand to each other, the price of fusing them, the reason and the action; then the reasons of
    the other kernel classes.
    """
    pair = report.pair
    lines = [f"{' and '.join(pair.names)}: {pair.relation}"]
    lines += [f"kernels: {pair.kernels}"] if pair.kernels else []
    lines.append(f"price: {pair.price}")
    if pair.refusals:
        first, *others = pair.refusals
        by = f"{first.kernel_class}: " if first.kernel_class else ""
        lines.append(f"why apart: {by}{format_refusal(replace(first, flip=None, cost_us=None))}")
        lines.append(f"to turn it: {first.flip}")
        lines += [f"  {r.kernel_class}: {r.why}" for r in others if r.code not in NOT_ITS_KIND]
    return "\n".join(lines)
