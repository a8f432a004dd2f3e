"""Plan search: a greedy solution of the graph, improved, as a plan.

Where the graph repeats itself (the layers of a model), a few of its periods are planned and the
others follow them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ...config import HardwareProfile, Policy
from ...cost.probe import GroupKey
from ...cost.traffic import Resources
from ...ir.graph import FusionGraph
from ..decide.caution import Caution
from ..legality import Evaluator
from ..plan import FusionPlan
from ..regions.repeats import find_repeats
from ..regions.shorten import LEAST_PERIODS, shortened
from ..structure import Structures
from .as_plan import plan_from
from .greedy import merge_greedily
from .horizontal import join_independent
from .improve import improve
from .search_state import State
from .seeds import seeded
from .solution import Solution, launches_of, total_us

TWO_ORDERS = 300  # operators up to which there is time for two orders of merging


def search(
    graph: FusionGraph,
    hw: HardwareProfile,
    policy: Policy,
    forbidden: frozenset[tuple[str, ...]] = frozenset(),
    caution: Caution | None = None,
    probed: Mapping[GroupKey, Resources] | None = None,
    structures: Structures | None = None,
) -> FusionPlan:
    """Finds a fusion plan.

    Parameters
    ----------
    graph : FusionGraph
    hw : HardwareProfile
    policy : Policy
    forbidden : frozenset of tuples of str
        Groups (names of their operators, in order) that were tried and may not be used.
    caution : Caution or None
        What fused groups are charged for the uncertainty of their predicted times; nothing for
        None.
    probed : mapping of `cost.probe.group_key` to Resources, optional
        What groups were found to need.
    structures : Structures, optional
        What is known of structures of groups; None takes what this process has found out for the
        same device and policy.

    Returns
    -------
    FusionPlan
        Every operator in exactly one owning group; groups in an order in which they can run.
    """
    evaluator = Evaluator(graph, hw, policy, forbidden, caution, probed or {}, structures)
    with _uncollected():
        return plan_from(evaluator, solve(evaluator))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pauses the collector of cyclic garbage: a search makes none, but so many objects that the
    collector would take a tenth of its time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def solve(evaluator: Evaluator) -> Solution:
    """The solution behind `search`."""
    if not evaluator.forbidden:  # these tell equal layers apart
        repeats = find_repeats(evaluator.graph, evaluator.wiring.number, LEAST_PERIODS)
        for form in shortened(evaluator.graph, repeats):
            found = form.expand(solve(evaluator.on(form.short)))
            if found is not None:
                return found
    return solve_whole(evaluator)


def solve_whole(evaluator: Evaluator) -> Solution:
    """A solution found by planning all of the graph, however it repeats itself."""
    found = greedy_solution(evaluator)
    return improve(evaluator.graph, evaluator, found, evaluator.policy)


def greedy_solution(evaluator: Evaluator) -> Solution:
    """What the greedy search alone finds, starting from the `seeds` if there are any: in a small
    graph the best of two orders, with and without them.
    """
    if len(evaluator.graph.ops) > TWO_ORDERS:
        return _greedy(seeded(evaluator) or State.unfused(evaluator), at_once=False)
    found = []
    for at_once in (False, True):
        found.append(_greedy(State.unfused(evaluator), at_once))
        if (state := seeded(evaluator)) is not None:
            found.append(_greedy(state, at_once))
    return min(found, key=lambda launches: total_us(evaluator, launches))


def _greedy(state: State, at_once: bool) -> Solution:
    evaluator = state.evaluator
    merge_greedily(state, evaluator.policy, at_once)
    join_independent(state)
    return launches_of(state)


def unfused_plan(graph: FusionGraph, hw: HardwareProfile, policy: Policy) -> FusionPlan:
    """The plan that fuses nothing."""
    evaluator = Evaluator(graph, hw, policy)
    with _uncollected():
        return plan_from(evaluator, launches_of(State.unfused(evaluator)), explain=False)
