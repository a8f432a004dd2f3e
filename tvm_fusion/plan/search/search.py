"""Plan search: a greedy solution of the graph, improved, as a plan.

Where the graph repeats itself (the layers of a model), a few of its periods are planned and the
others follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ...config import HardwareProfile, Policy
from ...cost.probe import GroupKey
from ...cost.traffic import Resources
from ...host.collector import uncollected
from ...ir.graph import FusionGraph, OpKind
from ..decide.caution import Caution
from ..explain.reasons import reasons_apart
from ..legality import Costed, Evaluator
from ..order import topological
from ..plan import FusionPlan, PlannedGroup, versions
from ..refusal import Refusal
from ..regions.repeats import LEAST_PERIODS, find_repeats, shortened
from ..structure import Structures
from .greedy import (
    Merge,
    MoveKind,
    fusible,
    holds_independent,
    merge_gain,
    merge_greedily,
    merge_makes_cycle,
    merges_of,
)
from .improve import improve
from .search_state import State
from .solution import (
    Launch,
    Solution,
    copies,
    costed,
    is_opaque,
    is_view,
    launches_of,
    members_of,
    total_us,
)

# From a solution to the plan that users see: names, predicted times, and why not more.


def plan_from(evaluator: Evaluator, launches: Solution, explain: bool = True) -> FusionPlan:
    """The plan of a solution.

    Parameters
    ----------
    evaluator : Evaluator
    launches : Solution
    explain : bool
        Whether to say of neighbours why they stayed apart.
    """
    graph = evaluator.graph
    recomputed = copies(graph, launches)
    groups = tuple(
        _planned(evaluator, launch, bitset)
        for launch, bitset in zip(launches, recomputed, strict=True)
    )
    refusals = tuple(reasons_apart(evaluator, launches, recomputed)) if explain else ()
    names = (graph.function, graph.fingerprint(), evaluator.hw.name, evaluator.policy.name)
    return FusionPlan(*names, groups, refusals, measured=evaluator.hw.measured, versions=versions())


def _planned(evaluator: Evaluator, launch: Launch, recomputed: int) -> PlannedGroup:
    graph = evaluator.graph
    members = members_of(launch.members)
    names = tuple(graph.ops[i].name for i in members)
    copied = tuple(n for i, n in zip(members, names, strict=True) if recomputed >> i & 1)
    if is_view(graph, launch):
        return PlannedGroup(names, "view")
    if is_opaque(graph, launch):
        return PlannedGroup(names, "opaque")
    found = costed(evaluator, launch, recomputed)
    if isinstance(found, Refusal):
        raise AssertionError(f"{', '.join(names)} of the final plan are refused: {found.why}")
    return predicted_group(evaluator, found, names, copied)


def predicted_group(
    evaluator: Evaluator, found: Costed, names: tuple[str, ...], copied: tuple[str, ...]
) -> PlannedGroup:
    """The group of some operators, of which it recomputes some, with what the model predicts."""
    ops = dict(zip(names, found.view.ops, strict=True))
    alone = [_alone(evaluator, i) for name, i in ops.items() if name not in copied]
    return PlannedGroup(
        names,
        found.kernel.name,
        copied,
        round(found.estimate.time_us, 4),
        round(sum(c.time_us for c in alone if c), 4),
        float(found.bytes),
        float(sum(c.bytes for c in alone if c)),
        {k: round(v, 4) for k, v in sorted(found.estimate.terms.items())},
        *(_rounded(getattr(found.estimate, k)) for k in ("analytic_us", "low_us", "high_us")),
        assumed_l2=evaluator.assumed_l2(found),
        common_us=round(evaluator.common_us(found), 4),
    )


def _rounded(time_us: float | None) -> float | None:
    return None if time_us is None else round(time_us, 4)


def _alone(evaluator: Evaluator, op: int) -> Costed | None:
    if evaluator.graph.ops[op].kind is not OpKind.CALL_TIR:
        return None
    found = evaluator.alone(op)
    return None if isinstance(found, Refusal) else found


# Independent groups that gain by sharing a launch: the last step of the greedy search.
#
# Each group is offered to the latest few before it: what is joined was then computed at about the
# same time, and the work grows with the number of groups. Matrix products are joined first, and
# first
# with those as deep in the graph: the second products of several chains then wait for nothing but
# the
# first ones.

REACH = 4  # groups before it that a group is offered to


def join_independent(state: State) -> None:
    """Joins independent groups that gain by sharing a launch."""
    depth = _depths(state)
    for same in (True, False):
        _join(state, products=True, depth=depth if same else None)
    _join(state, products=False)
    state.changed.clear()


def _join(state: State, products: bool, depth: Mapping[int, int] | None = None) -> None:
    """Offers each group with matrix products (or without) to those before it, of its depth where
    that is given.
    """
    before: list[int] = []
    for gid in sorted(g for g in state.owned if fusible(state, g)):
        if not holds_independent(state, gid):
            continue
        if bool(state.cost(gid).fit.contractions) is not products:
            continue
        for move in _offers(state, gid, before, products):
            if depth is not None and depth[move.first] != depth[move.second]:
                continue
            gain = merge_gain(state, move, last=True)
            if gain is not None and not merge_makes_cycle(state, move):
                state.merge(move.first, move.second, move.copies)
                break
        else:
            before.append(gid)


def _offers(state: State, gid: int, before: list[int], products: bool) -> Iterator[Merge]:
    """Moves that join a group to one before it: products that share an operand come first."""
    if products:
        known = set(before)
        for move in merges_of(state, gid):
            other = move.first if move.second == gid else move.second
            if move.kind is MoveKind.SIBLING and other in known:
                yield Merge(move.kind, other, gid, move.copies)
    for other in reversed(before[-REACH:]):
        yield Merge(MoveKind.HORIZONTAL, other, gid)


def _depths(state: State) -> dict[int, int]:
    """How many kernels stand behind each other in front of each live group, at most."""
    live = sorted(g for g in state.owned if state.alive(g))
    sources = {g: state.sources(state.computed(g)) for g in live}
    found: dict[int, int] = {}
    for gid in topological(sources, {g: min(state.owned[g]) for g in live}):
        behind = max((found.get(s, 0) for s in sources[gid] if s != gid), default=0)
        found[gid] = behind + fusible(state, gid)
    return found


# Groups that the search starts from: those a kernel class knows to be worth a launch as a whole,
# though none of the groups on the way to them is.
#
# `Family.cores` gives such sets of operators.


def seeded(evaluator: Evaluator) -> State | None:
    """The state with the cores of all kernel classes as groups, or None if there are none."""
    state, found = State.unfused(evaluator), False
    for kernel in evaluator.classes:
        for core in kernel.cores(evaluator.graph):
            found |= _joined(state, core)
    return state if found else None


def _joined(state: State, core: tuple[int, ...]) -> bool:
    """Makes one group of the operators, if they are one each and a kernel class takes them."""
    ops, is_view = state.graph.ops, state.links.view
    views = frozenset(op for op in core if is_view[op])
    members = [op for op in core if op not in views]
    alone = all(state.owned.get(op) == {op} and op not in state.copied_in for op in core)
    if not alone or any(ops[op].kind is OpKind.OPAQUE for op in core):
        return False
    if isinstance(state.evaluate(frozenset(members), views, tuple(members)), Refusal):
        return False
    # In the order of the operators no group ever stands between the two that are joined: what does
    # lies on a path from the first to the last, and is in the core.
    first, *others = members
    for op in others:
        above = frozenset(view for view in views if view < op)
        state.merge(first, op, above)
    return not isinstance(state.cost(first), Refusal)


First = Callable[[Solution], None] | None

TWO_ORDERS = 300  # operators up to which there is time for two orders of merging


def search(
    graph: FusionGraph,
    hw: HardwareProfile,
    policy: Policy,
    forbidden: frozenset[tuple[str, ...]] = frozenset(),
    caution: Caution | None = None,
    probed: Mapping[GroupKey, Resources] | None = None,
    structures: Structures | None = None,
    told: Callable[[FusionPlan], None] | None = None,
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
    told : callable, optional
        Is given the plan before it is improved; not where the graph follows a short form of it.

    Returns
    -------
    FusionPlan
        Every operator in exactly one owning group; groups in an order in which they can run.
    """
    evaluator = Evaluator(graph, hw, policy, forbidden, caution, probed or {}, structures)

    def first(launches: Solution) -> None:
        told(plan_from(evaluator, launches, explain=False))

    with uncollected():
        return plan_from(evaluator, solve(evaluator, first if told else None))


def solve(evaluator: Evaluator, first: First = None) -> Solution:
    """The solution behind `search`; `first` is given the one that is improved."""
    return _solved(evaluator, {}, first)


def _solved(evaluator: Evaluator, known: dict[tuple, Solution], first: First = None) -> Solution:
    """The same; `known` has the solutions of short forms: forms of other lengths have them, too."""
    if not evaluator.forbidden:  # these tell equal layers apart
        repeats = find_repeats(evaluator.graph, evaluator.wiring.number, LEAST_PERIODS)
        for form in shortened(evaluator.graph, repeats):
            wired = tuple((op.name, op.inputs) for op in form.short.ops)
            if wired not in known:
                known[wired] = _solved(evaluator.on(form.short), known)
            found = form.expand(known[wired], evaluator)
            if found is not None:
                return found
    return solve_whole(evaluator, first)


def solve_whole(evaluator: Evaluator, first: First = None) -> Solution:
    """A solution found by planning all of the graph, however it repeats itself; that of an equal
    graph, if there was one: a model and one of few of its layers have the same short form.
    """
    caution = evaluator.caution
    by_names = evaluator.forbidden or evaluator.probed
    if by_names or (caution is not None and caution.residual is not evaluator.residual):
        return _improved(evaluator, first)
    graph, key = evaluator.graph, (caution, evaluator.wiring.whole())
    known = evaluator.structures.solved.get(key)
    if known is not None:
        return tuple(Launch(x, tuple(graph.ops[op].outputs[n] for op, n in y)) for x, y in known)
    found = _improved(evaluator, first)
    places = {t: (op.id, n) for op in graph.ops for n, t in enumerate(op.outputs)}
    places = tuple((x.members, tuple(map(places.__getitem__, x.stores))) for x in found)
    evaluator.structures.keep_solved(key, places)
    return found


def _improved(evaluator: Evaluator, first: First) -> Solution:
    found = greedy_solution(evaluator)
    if first is not None:
        first(found)
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
    with uncollected():
        return plan_from(evaluator, launches_of(State.unfused(evaluator)), explain=False)
