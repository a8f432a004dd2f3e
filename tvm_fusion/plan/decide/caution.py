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
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from ...config import Policy
from ...ir.graph import FusionGraph, OpKind
from ...kernels.registry import names

if TYPE_CHECKING:
    from ...cost.analytic import Estimate
    from ...kernels.base import Fit

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
    residual: Any = None
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
