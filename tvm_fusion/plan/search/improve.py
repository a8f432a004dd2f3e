"""Improving a solution, region by region.

A graph of few operators is one region and is solved exactly. A larger one is looked at through
windows, each a few launches that share tensors, which overlap so that every pair of neighbouring
launches stands in one of them. A window is searched by beam and, where it is small, exactly.
Windows that are structurally equal, with equal launches, are solved once.

What may be spent is counted in groups evaluated and moves tried, never in time, so that equal
graphs get equal solutions.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ...config import Policy
from ...ir.graph import FusionGraph
from ..legality import Evaluator
from ..regions.regions import Region, region_key, region_of
from .beam import Beam, parts_of, search_beam, unfused
from .exact import Found, Limits, Pricing, Spent, solve
from .solution import Launch, Solution, time_us
from .solution_draft import Working

logger = logging.getLogger(__name__)

ALWAYS_EXACT = 9  # operators up to which a region is solved exactly whatever it takes
ALWAYS_EVALUATIONS = 65536  # for that; every launch of nine operators is fewer
EVALUATIONS_PER_OP = 40  # of a graph, up to half of what the policy allows for one region
LARGE_GRAPH_EVALUATIONS_PER_OP = 2  # beyond; a greedy search asks for about five
WINDOW_EVALUATIONS = 60  # with fewer a window is hardly worth a look
MOVES_PER_EVALUATION = 3  # a move among known launches costs about a third of an evaluation
REFUSED = 2  # refused sets in a row that a launch may grow through
LEAST_GAIN = 1e-3  # of a window's time: less is not worth another plan


@dataclass(frozen=True, slots=True)
class Improved:
    """A solution, and whether it is proven that none is cheaper.

    A proof covers solutions whose launches grow through sets of which no more than two in a row are
    refused, and holds as long as no launch that was not evaluated is faster, for the bytes it has
    to move, than all that were.
    """

    launches: Solution
    proven: bool


def improve(
    graph: FusionGraph, evaluator: Evaluator, launches: Solution, policy: Policy
) -> Solution:
    """A solution that is never costlier than the given one.

    Parameters
    ----------
    graph : FusionGraph
    evaluator : Evaluator
        Of this graph; what it knows already is not asked again.
    launches : Solution
        Where to start.
    policy : Policy
        `exact_ops`, `beam_width` and `search_evaluations` bound the work, `search_evaluations` = 0
        turns it off.

    Returns
    -------
    Solution
        In an order in which it can run. The given one if nothing better was found.
    """
    return improved(graph, evaluator, launches, policy).launches


def improved(
    graph: FusionGraph, evaluator: Evaluator, launches: Solution, policy: Policy
) -> Improved:
    """`improve`, and whether the result is proven optimal: only a graph of one region can be."""
    if not policy.search_evaluations:
        return Improved(launches, False)
    run = _Improving(graph, evaluator, policy, Working.of(graph, launches))
    changed = run.all_windows()
    return Improved(run.working.solution() if changed else launches, run.proven)


@dataclass
class _Improving:
    graph: FusionGraph
    evaluator: Evaluator
    policy: Policy
    working: Working
    left: float = 0.0  # evaluations, and moves at their share of one
    known: dict = field(default_factory=dict)
    proven: bool = False  # of the last region

    def all_windows(self) -> bool:
        """Whether any window was improved."""
        ops = self.working.operators()
        if ops <= self.policy.exact_ops:
            windows = [window] if (window := tuple(self.working.kernels())) else []
        else:
            windows = sorted(
                self.working.windows(self.policy.exact_ops), key=self._time, reverse=True
            )
        most = self.policy.search_evaluations
        few, many = EVALUATIONS_PER_OP * ops, LARGE_GRAPH_EVALUATIONS_PER_OP * ops
        self.left = max(min(most // 2, few), many)
        share = max(WINDOW_EVALUATIONS, int(self.left) // max(1, len(windows)))
        changed = [self._improve(window, min(most, share)) for window in windows]
        self.proven &= ops <= self.policy.exact_ops
        return any(changed)

    def _time(self, launches: tuple[Launch, ...]) -> float:
        return sum(time_us(self.evaluator, launch) for launch in launches)

    def _improve(self, window: tuple[Launch, ...], evaluations: int) -> bool:
        """Replaces the launches of one window by better ones, if there are any."""
        window = self.working.closed(window)
        others, wanted = self.working.around(window)
        region = region_of(self.graph, window, others, wanted)
        before = tuple((region.ops_of(w.members), region.results_of(w.stores)) for w in window)
        by_name = self.evaluator.forbidden or self.evaluator.probed
        key = window if by_name else (region_key(region), before)
        time = self._time(window)
        pricing = Pricing(region, self.evaluator, evaluations)
        if key not in self.known:
            if self.left <= 0:
                return False
            self.known[key] = self._solve(region, pricing, before, time)
            self.left -= pricing.asked + pricing.tried / MOVES_PER_EVALUATION
        found = self.known[key]
        if found is None:
            return False
        new = [pricing.launch(ops, stores) for ops, stores in found.launches]
        times = [time_us(self.evaluator, launch) for launch in new]
        if None in times or sum(times) > time * (1 - LEAST_GAIN):
            return False
        self.working.replace(window, new)
        return True

    def _solve(self, region: Region, pricing: Pricing, before: tuple, time: float) -> Found | None:
        """The best solution of the region that was found, None if that is the given one."""
        size, copies = len(region.ops), self.policy.allow_rematerialisation
        if size <= ALWAYS_EXACT:
            pricing.limit = ALWAYS_EVALUATIONS
            return self._exact(region, pricing, None, time)
        evaluations = pricing.limit
        starts = [parts_of(region, before)]
        if size <= self.policy.exact_ops:
            starts.append(unfused(region))
        pricing.limit = evaluations // 2
        moves = MOVES_PER_EVALUATION * evaluations // 2
        best = search_beam(region, pricing, starts, Beam(self.policy.beam_width, moves, copies))
        pricing.limit = evaluations
        if size > self.policy.exact_ops:
            return best
        return self._exact(region, pricing, best, time)

    def _exact(
        self, region: Region, pricing: Pricing, best: Found | None, time: float
    ) -> Found | None:
        """The cheapest solution of the region, or `best` if the search ends before."""
        bound = min(time, best.time_us) if best else time
        limits = Limits(pricing.limit, pricing.limit, REFUSED, self.policy.allow_rematerialisation)
        try:
            found = solve(region, pricing, bound, limits) or best
            self.proven = pricing.least is not None and pricing.least.held
            return found
        except Spent:
            logger.debug("%d operators: not proven optimal", len(region.ops))
            return best
