"""How far a predicted gain can be trusted: the interval of a fusion's time over the time of its
operators apart, and what the search is charged for it.

Times of one device by one model err together, so the *ratio* of two predictions is better known
than either. Where the device has a learned residual, `ratio_quantile` says by what factor measured
ratios exceeded predicted ones (conformal, for a share `coverage` of the fusions that were
measured); elsewhere the policy says it. It is taken over close calls: a ratio of 0.3 is further off
than one of 0.9, since more of the two times is different work, but it has further to go to a loss,
and counting its error against a ratio of 0.9 would cut what is nearly certain. The launch itself is
counted, not predicted, and is left out of the factor.

On a CPU the instructions of an operator are the same in whatever group it stands: what they take
has the same error together and apart, so that it hides neither a gain nor a loss however large it
is. It is left out of the factor too, and of the least share that a fusion has to save: both apply
to what differs (data, launches, what is computed again). Where one operator is nearly all of a
group (a sum, and the division that makes it a mean) its data is the same together and apart, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from ...config import Policy
from ...ir.graph import FusionGraph, OpKind
from ...kernels.registry import names
from ..differ import clusters
from ..plan import Evidence, FusionPlan, PlannedGroup

if TYPE_CHECKING:
    from ...cost.analytic import Estimate
    from ...kernels.base import Fit

# What the intervals of a plan's groups say together: of one fusion, of the whole plan.


def unfused_times(alone: FusionPlan) -> dict[str, float]:
    """The predicted time of every operator that is a launch of its own, by name."""
    free = ("view", "opaque")
    return {g.ops[0]: g.predicted_us for g in alone.groups if g.kernel_class not in free}


def judge(
    cluster: Iterable[PlannedGroup], unfused: Mapping[str, float], caution: Caution
) -> Ratio | None:
    """The interval of the time of some groups over that of their operators apart.

    Parameters
    ----------
    cluster : iterable of PlannedGroup
        Groups that recompute each other's operators.
    unfused : mapping of str to float
        Time of every operator by itself (`unfused_times`).
    caution : Caution

    Returns
    -------
    Ratio or None
        None if nothing is fused.
    """
    cluster = tuple(cluster)
    apart_us = sum({op: unfused[op] for g in cluster for op in g.ops if op in unfused}.values())
    if apart_us <= 0 or not any(is_fusion(g, unfused) for g in cluster):
        return None
    return ratio_of(launches_of(cluster, unfused, caution), apart_us)


def charged_us(
    groups: Iterable[PlannedGroup], unfused: Mapping[str, float], caution: Caution
) -> float:
    """The time of some groups at the upper end of what it may be, in microseconds."""
    groups = tuple(groups)
    total = 0.0
    for g, launch in zip(groups, launches_of(groups, unfused, caution), strict=True):
        total += launch.time_us + (caution.charge_of(launch) if is_fusion(g, unfused) else 0.0)
    return total


def is_fusion(group: PlannedGroup, unfused: Mapping[str, float]) -> bool:
    """Whether a group computes several operators that are launches of their own."""
    return sum(op in unfused for op in group.ops) > 1


def launches_of(
    groups: Iterable[PlannedGroup], unfused: Mapping[str, float], caution: Caution
) -> list[Timed]:
    """Each group as its caution sees it; the factor of one operator is 1."""
    found = []
    for g in groups:
        corrected = is_corrected(g.predicted_us, g.analytic_us)
        factor = caution.factor(g.kernel_class, corrected) if is_fusion(g, unfused) else 1.0
        found.append(Timed(g.predicted_us, g.terms.get(LAUNCH, 0.0), factor, g.common_us))
    return found


def judged_whole(plan: FusionPlan, unfused: Mapping[str, float], caution: Caution) -> FusionPlan:
    """The plan with the evidence of all its groups together, by the model."""
    ratio = judge(plan.groups, unfused, caution)
    return replace(plan, evidence=ratio and by_model(ratio, caution))


def measured_whole(
    graph: FusionGraph, plan: FusionPlan, unfused: Mapping[str, float], caution: Caution
) -> FusionPlan:
    """The plan with the evidence of all its groups together, those that were timed by their
    times; "measured" only if all fusions were.
    """
    ratio = whole_ratio(graph, plan, unfused, caution, sum(unfused.values()))
    fused = [c for c in clusters(graph, plan) if judge(c, unfused, caution)]
    if not fused:
        return replace(plan, evidence=None)
    evidence = by_model(ratio, caution)
    if all(_timed(c) for c in fused):
        evidence = replace(evidence, kind="measured")
    return replace(plan, evidence=evidence)


def whole_ratio(
    graph: FusionGraph,
    plan: FusionPlan,
    unfused: Mapping[str, float],
    caution: Caution,
    unfused_us: float,
) -> Ratio:
    """The interval of a plan's time over `unfused_us`.

    What was timed takes its measured share of its operators' time; where it was timed beside sure
    fusions, that is an upper bound.

    Parameters
    ----------
    graph : FusionGraph
    plan : FusionPlan
    unfused : mapping of str to float
        Time of every operator by itself (`unfused_times`).
    caution : Caution
    unfused_us : float
        Predicted time of what the plan is compared with.
    """
    value = low = high = 0.0
    for cluster in clusters(graph, plan):
        timed = _timed(cluster)
        if timed is not None:
            base = sum({op: unfused[op] for g in cluster for op in g.ops if op in unfused}.values())
            part = Ratio(base * timed.ratio, base * timed.low, base * timed.high)
        else:
            part = ratio_of(launches_of(cluster, unfused, caution), 1.0)
        value, low, high = value + part.value, low + part.low, high + part.high
    scale = max(unfused_us, 1e-9)
    return Ratio(value / scale, low / scale, high / scale)


def _timed(cluster: Iterable[PlannedGroup]) -> Evidence | None:
    """The measurement of a cluster, which its groups share."""
    found = (g.evidence for g in cluster if g.evidence is not None)
    return next((e for e in found if e.kind == "measured"), None)


def by_model(ratio: Ratio, caution: Caution) -> Evidence:
    """An interval of the model as evidence."""
    kind = "prediction" if caution.is_none else "model"
    numbers = (round(x, 4) for x in (ratio.value, ratio.low, ratio.high))
    return Evidence(kind, ratio.verdict.value, *numbers)


LAUNCH = "launch"  # the term of an estimate that no factor applies to


class Verdict(Enum):
    """What the interval of together / apart says about a fusion."""

    SURE = "sure"
    UNDECIDED = "undecided"
    LOSING = "losing"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time together over time apart: the prediction, and the interval around it; `common` is the
    share of the time apart that both spend on the same work.
    """

    value: float
    low: float
    high: float
    common: float = 0.0

    @property
    def verdict(self) -> Verdict:
        if self.high <= 1.0:
            return Verdict.SURE
        return Verdict.LOSING if self.low > 1.0 else Verdict.UNDECIDED


class Timed(NamedTuple):
    """A launch as its caution sees it: its time, what the launch itself takes of it, by what factor
    the rest may be off, and how much of that is spent on the same work as apart.
    """

    time_us: float
    launch_us: float
    factor: float
    common_us: float = 0.0


@dataclass(frozen=True)
class Caution:
    """By what factor the ratio of together to apart may be worse than predicted.

    Attributes
    ----------
    unknown, unknown_gemm : float
        Where no residual corrected the time: for groups in general, and for those around matrix
        products.
    coverage : float
        How often a fusion that is taken has to gain; 0 takes every prediction as it is.
    min_gain : float
        Share of the predicted time of its operators that a fusion has to save at least.
    residual : cost.learned.learned.Residual or None
        Its `ratio_quantile(coverage, kernel_class, close=True)` is the factor of the groups whose
        time it corrected.
    """

    unknown: float
    unknown_gemm: float
    coverage: float = 0.9
    residual: Any = field(default=None, hash=False)
    min_gain: float = 0.0
    _products: frozenset[str] = field(
        default_factory=lambda: names(lambda family: family.is_product), repr=False, compare=False
    )
    _learned: dict[str, float] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, policy: Policy, residual: Any = None, guessed: bool = False) -> Caution:
        """The caution that a policy asks for, with the device's residual or None; more of it for a
        device whose rates are guessed.
        """
        factors = (policy.unknown_ratio, policy.unknown_ratio_gemm)
        if guessed:
            factors = tuple(max(factor, policy.unmeasured_ratio) for factor in factors)
        return cls(*factors, policy.coverage, residual, policy.min_gain)

    @property
    def is_none(self) -> bool:
        """Whether predictions alone decide."""
        without_factor = self.residual is None and max(self.unknown, self.unknown_gemm) <= 1
        return self.coverage <= 0 or without_factor

    def factor(self, kernel_class: str, corrected: bool) -> float:
        """The factor of a group, its time corrected by the residual or not."""
        if self.is_none:
            return 1.0
        unknown = self.unknown_gemm if kernel_class in self._products else self.unknown
        if self.residual is None or not corrected:
            return unknown
        if kernel_class not in self._learned:
            found = self.residual.ratio_quantile(self.coverage, kernel_class, close=True)
            self._learned[kernel_class] = found if math.isfinite(found) else unknown
        return self._learned[kernel_class]

    def charge_us(self, fit: Fit, estimate: Estimate, common_us: float = 0.0) -> float:
        """What the search adds to the predicted time of a fused group, in microseconds;
        `common_us` of it are spent on the same work as apart.
        """
        factor = self.factor(fit.kernel_class, is_corrected(estimate.time_us, estimate.analytic_us))
        launch_us = estimate.terms.get(LAUNCH, 0.0)
        return self.charge_of(Timed(estimate.time_us, launch_us, factor, common_us))

    def charge_of(self, launch: Timed) -> float:
        """The charge of a fused launch: what it may take longer than predicted, or what it has to
        gain at least, whichever is more.
        """
        differs = launch.time_us - launch.common_us
        in_doubt = (launch.factor - 1.0) * (differs - launch.launch_us)
        return max(in_doubt, differs * self.min_gain / (1.0 - self.min_gain))

    def gains_too_little(self, ratio: Ratio) -> bool:
        """Whether a fusion saves less than the least share, however sure it is."""
        return ratio.value - ratio.common > (1.0 - self.min_gain) * (1.0 - ratio.common)


def is_corrected(time_us: float, analytic_us: float | None) -> bool:
    """Whether the residual had a say in a time: outside its training data it leaves the analytic
    one as it is.
    """
    return analytic_us is not None and analytic_us != time_us


def ratio_of(together: Iterable[Timed], apart_us: float) -> Ratio:
    """The interval of a fusion's time over that of its operators apart.

    Parameters
    ----------
    together : iterable of Timed
        Each launch of the fusion, a launch of one operator with a factor of 1.
    apart_us : float
    """
    low = value = high = common = 0.0
    for launch in (Timed(*launch) for launch in together):
        sure = launch.launch_us + launch.common_us
        body = launch.time_us - sure
        value += launch.time_us
        low += sure + body / launch.factor
        high += sure + body * launch.factor
        common += launch.common_us
    return Ratio(value / apart_us, low / apart_us, high / apart_us, common / apart_us)


def is_fused(graph: FusionGraph, ops: Iterable[int]) -> bool:
    """Whether these operators are more than one launch when nothing is fused."""
    return sum(graph.ops[i].kind is OpKind.CALL_TIR for i in ops) > 1
