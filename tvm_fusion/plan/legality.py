"""Legality and predicted cost of one group, over all kernel classes, remembered by content and by
structure.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import NamedTuple

from ..config import HardwareProfile, Policy
from ..cost.analytic import Estimate, estimate
from ..cost.learned.learned import Residual, load_residual
from ..cost.probe import GroupKey
from ..cost.traffic import Resources
from ..errors import TooDeep
from ..ir.graph import FusionGraph, OpKind
from ..kernels.base import READABLE, SCANS, Family, Fit, together
from ..kernels.fallback import Fallback, Stock
from ..kernels.registry import families, is_ours
from .decide.caution import Caution, is_fused
from .group_view import GroupView
from .order import Links
from .refusal import Refusal, RefusalCode
from .structure import Structures, Wiring, structures_for

logger = logging.getLogger(__name__)

NEGLIGIBLE = 0.01
"""Share of an operator's time below which those around it do not change what its loops take: a sum
and the division that makes it a mean."""


STOCK = Stock()

NOT_OF_A_CLASS = (RecursionError, MemoryError, TooDeep)
"""Errors that are handled elsewhere: a deep graph is tried again with more stack."""


AssumedL2 = tuple[tuple[int, float], ...]
"""Places among the tensors that a group touches, and bytes of them that are taken to lie in the
L2."""


class Costed(NamedTuple):
    """A legal group with its kernel class and predicted time."""

    view: GroupView
    kernel: Family
    fit: Fit
    estimate: Estimate
    bytes: float
    assumed_l2: AssumedL2 = ()
    charge_us: float = 0.0  # for what a fused group's prediction may be wrong by (`Caution`)

    @property
    def time_us(self) -> float:
        """What the search minimises: the predicted time, and the charge for its uncertainty."""
        return self.estimate.time_us + self.charge_us


class _Shared(NamedTuple):
    """What equal groups have in common."""

    kernel: Family
    fit: Fit
    estimate: Estimate
    bytes: float
    assumed_l2: AssumedL2


@dataclass
class Evaluator:
    """Legality and cost of groups, remembered by content and by structure.

    Attributes
    ----------
    graph, hw, policy
        What is planned, for what, and how.
    forbidden : frozenset of tuples of str
        Groups, by the names of their operators, that may not be used.
    caution : Caution or None
        What fused groups are charged for the uncertainty of their predicted times.
    probed : mapping of `cost.probe.group_key` to Resources
        What groups were found to need; it is not estimated.
    structures : Structures or None
        What is known of structures of groups; None takes what this process knows for the same
        device and policy.
    """

    graph: FusionGraph
    hw: HardwareProfile
    policy: Policy
    forbidden: frozenset[tuple[str, ...]] = frozenset()
    caution: Caution | None = None
    probed: Mapping[GroupKey, Resources] = field(default_factory=dict)
    structures: Structures | None = None
    _seen: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.structures is None:
            self.structures = structures_for(self.hw, self.policy, self.classes, self.residual)

    @cached_property
    def links(self) -> Links:
        return Links.of(self.graph)

    @cached_property
    def wiring(self) -> Wiring:
        return Wiring(self.graph, self.hw, self.structures)

    @cached_property
    def facts(self) -> dict[tuple[int, ...], Resources]:
        """`probed` by structure: equal groups of other layers need the same."""
        number = {op.name: op.id for op in self.graph.ops} if self.probed else {}
        found = {}
        for (names, written), needed in self.probed.items():
            if not all(name in number for name in names):
                continue
            ops = tuple(number[name] for name in names)
            made = {self.graph.tensors[t].name: t for i in ops for t in self.graph.ops[i].outputs}
            if all(name in made for name in written):
                found[self.wiring.key(ops, tuple(made[name] for name in written))] = needed
        return found

    @cached_property
    def classes(self) -> tuple[Family, ...]:
        return families(self.hw)

    @cached_property
    def residual(self) -> Residual | None:
        return load_residual(self.hw) if self.policy.learned else None

    def group(
        self, ops: tuple[int, ...], outputs: tuple[int, ...], duplicated: int = 0
    ) -> Costed | Refusal:
        """Kernel class and predicted time of a group, or why it is none.

        Parameters
        ----------
        ops : tuple of int
            Operators, ascending.
        outputs : tuple of int
            Tensors that are read outside, ascending.
        duplicated : int
            Bitset of those operators that another group owns.

        Returns
        -------
        Costed or Refusal
            A refusal says no more than the search needs: it may name the operators of an equal
            group, and not the most telling reason. `explain` does.
        """
        key = (ops, outputs, duplicated)
        found = self._seen.get(key)
        if found is None:
            found = self._find(GroupView(self.graph, ops, outputs, duplicated))
            self._seen[key] = found
        return found

    def on(self, graph: FusionGraph) -> Evaluator:
        """An evaluator of another graph that shares what is known of structures."""
        other = replace(self, graph=graph, _seen={})
        other.__dict__.update(classes=self.classes, residual=self.residual, facts=self.facts)
        return other

    def alone(self, op: int) -> Costed | Refusal:
        """One operator as its own kernel."""
        return self.group((op,), self.graph.ops[op].outputs)

    def as_class(self, view: GroupView, kernel_class: str) -> Costed | Refusal:
        """A group as a launch of one kernel class, whatever the others say."""
        if kernel_class == STOCK.name:
            kernel: Family = STOCK
        else:
            kernel = next(k for k in self.classes if k.name == kernel_class)
        needed = self.facts.get(self.wiring.key(view.ops, view.outputs))
        return self._rebound(view, self._answer(kernel, view, needed))

    def explain(self, refused: GroupView) -> Refusal:
        """Why no kernel class takes a group: of all their reasons, the most telling one.

        Raises
        ------
        ValueError
            The group is legal.
        """
        if refusal := self._refuse(refused):
            return refusal
        found = [self._answer(kernel, refused) for kernel in self.classes]
        if not all(isinstance(answer, Refusal) for answer in found):
            raise ValueError(f"{', '.join(refused.names)} can be one launch")
        return most_telling(found)

    def reasons(self, refused: GroupView) -> list[Refusal]:
        """Why each kernel class refuses a group, the class that came closest first; empty if one
        takes it.

        A class came closest where it lacks one thing only (`Refusal.action`). Of the others this
        package's come before those of users, those that ask for operators such as the group has
        (`Family.needs`) and know it as their kind before others, and one that asks for more before
        one that asks for less.
        """
        if refusal := self._refuse(refused):
            return [refusal]
        traits, found = self.traits(refused), []
        for kernel in self.classes:
            if kernel.name == Fallback.name and len(refused.ops) > 1:
                continue
            answer = self._answer(kernel, refused)
            if not isinstance(answer, Refusal):
                return []
            near = (
                answer.action is None,
                not is_ours(kernel),
                not kernel.needs.allow(traits),
                answer.code not in _TELLING,
                -kernel.needs.count,
                _TELLING.index(answer.code) if answer.code in _TELLING else 0,
            )
            found.append((near, replace(answer, kernel_class=kernel.name)))
        return [answer for _, answer in sorted(found, key=lambda entry: entry[0])]

    def traits(self, view: GroupView) -> int:
        """The traits of a group's operators (`kernels.base`)."""
        return reduce(together, map(self.wiring.traits.__getitem__, view.ops), 0)

    def _answer(
        self, kernel: Family, view: GroupView, needed: Resources | None = None
    ) -> _Shared | Refusal:
        """What one class says of a group; no fault of a class may end a compile."""
        if self.traits(view) & SCANS and not kernel.needs.scans:
            return view.refuse(RefusalCode.REDUCTION, f"class {kernel.name} computes no scans")
        try:
            fit = kernel.accepts(view, self.hw, self.policy)
            return self._costed(view, kernel, fit, needed) if isinstance(fit, Fit) else fit
        except Exception as error:
            if isinstance(error, NOT_OF_A_CLASS):
                raise
            return _class_failed(view, kernel, error)

    def common_us(self, costed: Costed) -> float:
        """What of a group's time goes into the work that its operators take one by one."""
        return self._common_us(costed.view, costed.fit.kernel_class, costed.estimate)

    def _common_us(self, view: GroupView, kernel_class: str, together: Estimate) -> float:
        """The instructions of all operators; everything where one operator is nearly all of it."""
        if not together.computing_us:
            return 0.0
        found = (self.alone(op) for op in view.ops if self.graph.ops[op].kind is OpKind.CALL_TIR)
        alone = [costed for costed in found if not isinstance(costed, Refusal)]
        common = min(together.computing_us, sum(c.estimate.computing_us for c in alone))
        most = max(alone, key=lambda c: c.estimate.body_us, default=None)
        if most is not None and most.fit.kernel_class == kernel_class:
            others = sum(c.estimate.body_us for c in alone) - most.estimate.body_us
            if others <= NEGLIGIBLE * most.estimate.body_us:
                common = max(common, most.estimate.body_us)
        return min(common, together.body_us)

    def assumed_l2(self, costed: Costed) -> dict[str, float]:
        """Bytes of inputs, by tensor, that the estimate takes to lie in the L2."""
        touched = self.wiring.touched_by(costed.view.ops)
        found = ((touched[place], size) for place, size in costed.assumed_l2)
        return {self.graph.tensors[t].name: round(size) for t, size in found if size >= 1}

    def _find(self, view: GroupView) -> Costed | Refusal:
        if refusal := self._refuse(view):
            return refusal
        known, key = self.structures.known, self.wiring.key(view.ops, view.outputs)
        if key in self.facts:
            return self._rebound(view, self._evaluate(view, self.facts[key]))
        if key not in known:
            known[key] = self._evaluate(view)
        return self._rebound(view, known[key])

    def _rebound(self, view: GroupView, found: _Shared | Refusal) -> Costed | Refusal:
        """What is known of an equal group, for this one (without what the view has worked out: it
        would fill the memory).
        """
        if isinstance(found, Refusal):
            return found
        view = GroupView(view.graph, view.ops, view.outputs, view.duplicated)
        charge = 0.0
        if self.caution is not None and is_fused(self.graph, view.ops):
            common = self._common_us(view, found.fit.kernel_class, found.estimate)
            charge = self.caution.charge_us(found.fit, found.estimate, common)
        return Costed(view, *found, charge)

    def _evaluate(self, view: GroupView, needed: Resources | None = None) -> _Shared | Refusal:
        """The class that takes a group, and its time; `needed` is what it was found to need."""
        refusal, failed = NO_CLASS, False
        for kernel in self._askable(view):
            answer = self._answer(kernel, view, needed)
            if not isinstance(answer, Refusal):
                return answer
            refusal = answer
            failed |= answer.code is RefusalCode.CLASS_ERROR
        return self._answer(STOCK, view, needed) if failed and len(view.ops) == 1 else refusal

    def _askable(self, view: GroupView) -> Iterator[Family]:
        """The classes that may take the group, in order."""
        traits = self.traits(view)
        if not traits & READABLE:  # what cannot be read falls back
            yield self.classes[-1]
            return
        for kernel in self.classes:
            if kernel.name == Fallback.name and len(view.ops) > 1:
                continue
            if kernel.needs.allow(traits):
                yield kernel

    def _costed(
        self, view: GroupView, kernel: Family, fit: Fit, needed: Resources | None
    ) -> _Shared:
        traffic = kernel.traffic(view, fit, self.hw)
        resources = needed or kernel.resources(view, fit, self.hw)
        cost = estimate(traffic, resources, self.hw, self.policy.launch)
        if self.residual is not None and traffic.launches:
            cost = self.residual.apply(fit.kernel_class, fit, traffic, resources, cost, self.hw)
        place = {t: n for n, t in enumerate(self.wiring.touched_by(view.ops))}
        assumed_l2 = tuple((place[t], size) for t, size in traffic.assumed_l2)
        return _Shared(kernel, fit, cost, traffic.l2_bytes, assumed_l2)

    def _refuse(self, view: GroupView) -> Refusal | None:
        """Refusals that no kernel class is asked about."""
        ops, working = self.graph.ops, self.wiring.working
        if len(view.ops) > 1:
            first = ops[view.ops[0]].region
            places = set(map(self.wiring.places.__getitem__, view.ops))
            for i in view.ops if len(places) > 1 or None in places else ():
                op = ops[i]
                if op.kind is OpKind.OPAQUE:
                    return view.refuse(
                        RefusalCode.OPAQUE, f"{op.name} cannot be read: {op.why_opaque}"
                    )
                if op.region != first:
                    return view.refuse(
                        RefusalCode.REGION, "the operators stand in different dataflow blocks"
                    )
            if self.forbidden and view.names in self.forbidden:
                return view.refuse(RefusalCode.WRITER, "this group was tried and could not be used")
        count = sum(map(working.__getitem__, view.ops))
        if count > self.policy.max_group_ops:
            return view.refuse(
                RefusalCode.GROUP_SIZE,
                "the group computes more operators than the policy allows",
                ops=count,
                allowed=self.policy.max_group_ops,
            )
        return self._refuse_parameters(view)

    def _refuse_parameters(self, view: GroupView) -> Refusal | None:
        most = sum(map(self.wiring.touches.__getitem__, view.ops))
        if 8 * most <= self.hw.kernel_param_bytes:
            return None
        parameters = 8 * (len(view.inputs) + len(view.outputs))
        if len(view.ops) > 1 and parameters > self.hw.kernel_param_bytes:
            return view.refuse(
                RefusalCode.PARAMETER_BYTES,
                "the kernel's parameters do not fit",
                bytes=parameters,
                allowed=self.hw.kernel_param_bytes,
            )
        return None


NO_CLASS = Refusal(
    RefusalCode.REDUCTION, (), "no kernel class takes reductions and turns of these kinds together"
)


_TELLING = (
    RefusalCode.RECOMPUTE,
    RefusalCode.OFF_ROW,
    RefusalCode.NOT_TRAILING,
    RefusalCode.EPILOGUE,
    RefusalCode.PROLOGUE,
    RefusalCode.SEVERAL_CONTRACTIONS,
    RefusalCode.SPACE_MISMATCH,
)


def most_telling(refusals: list[Refusal]) -> Refusal:
    """Of the refusals of all kernel classes, the one that came closest to accepting."""
    order = {code: i for i, code in enumerate(_TELLING)}
    return min(refusals, key=lambda r: order.get(r.code, len(order)))


def _class_failed(view: GroupView, kernel: Family, error: Exception) -> Refusal:
    """The refusal in place of an answer that a class failed to give."""
    why = f"{type(error).__name__}: {error}"
    names = ", ".join(view.names)
    logger.warning(
        "kernel class %s fails on %s and is not used for it: %s", kernel.name, names, why
    )
    return view.refuse(RefusalCode.CLASS_ERROR, f"kernel class {kernel.name} failed: {why}")
