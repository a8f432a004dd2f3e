"""Launches and solutions: what improving the search works on.

A launch computes a set of operators and writes some of their results. A solution of a graph is a
tuple of launches, in an order in which they can run, such that

    every tensor that a launch reads and does not compute is written by an earlier launch,
    the results of the graph are written, and nothing is written that nobody reads,
    an operator has one launch that writes its results (all of those that are read),
    opaque operators and what only renames indices (views) stand alone, or, views, as a copy in
    each launch that wants them; their result is never written by a launch of several operators.

An operator may be computed by several launches (rematerialisation). A lone view costs nothing, an
opaque operator costs the same in every solution and counts as nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from ...errors import PlanError
from ...ir.graph import FusionGraph, OpKind
from ..legality import Costed, Evaluator
from ..order import topological
from ..refusal import Refusal
from .search_state import State

# One launch of a solution (`launches`): the operators it computes, the tensors it writes, what it
# reads, what it costs.


class Launch(NamedTuple):
    """One launch: the bitset of operators it computes and the tensors it writes, ascending."""

    members: int
    stores: tuple[int, ...]


Solution = tuple[Launch, ...]


@lru_cache(maxsize=1 << 13)
def members_of(bitset: int) -> tuple[int, ...]:
    """The operators of a bitset, ascending."""
    first = max((bitset & -bitset).bit_length() - 1, 0)
    rest, found = bitset >> first, []  # a launch far into a graph is a short bitset, moved
    while rest:
        low = rest & -rest
        found.append(first + low.bit_length() - 1)
        rest ^= low
    return tuple(found)


def is_view(graph: FusionGraph, launch: Launch) -> bool:
    """Whether the launch is one lone view, which needs no kernel."""
    return _is_lone(graph, launch, OpKind.VIEW)


def is_opaque(graph: FusionGraph, launch: Launch) -> bool:
    return _is_lone(graph, launch, OpKind.OPAQUE)


def is_kernel(graph: FusionGraph, launch: Launch) -> bool:
    """Whether the launch costs anything the planner decides about."""
    return not (is_view(graph, launch) or is_opaque(graph, launch))


def _is_lone(graph: FusionGraph, launch: Launch, kind: OpKind) -> bool:
    members = launch.members
    return members & (members - 1) == 0 and graph.ops[members.bit_length() - 1].kind is kind


def costed(evaluator: Evaluator, launch: Launch, duplicated: int = 0) -> Costed | Refusal:
    """What the evaluator says of a launch; `duplicated` are the members another launch owns."""
    return evaluator.group(members_of(launch.members), launch.stores, duplicated)


def time_us(evaluator: Evaluator, launch: Launch) -> float | None:
    """Predicted time of a launch, None if no kernel class takes it."""
    if not is_kernel(evaluator.graph, launch):
        return 0.0
    found = costed(evaluator, launch)
    return None if isinstance(found, Refusal) else found.time_us


def total_us(evaluator: Evaluator, launches: Iterable[Launch]) -> float:
    """Predicted time of a solution; infinite if one of its launches is refused."""
    times = [time_us(evaluator, launch) for launch in launches]
    return sum(times) if None not in times else float("inf")


def reads(graph: FusionGraph, launch: Launch) -> tuple[int, ...]:
    """Tensors the launch reads from memory, each once."""
    found: dict[int, None] = {}
    members = members_of(launch.members)
    inside = set(members)
    for op in members:
        for t in graph.ops[op].inputs:
            if graph.tensors[t].producer not in inside:
                found[t] = None
    return tuple(found)


def produced_reads(graph: FusionGraph, launch: Launch) -> Iterator[int]:
    """Those tensors it reads that are no inputs of the function."""
    return (t for t in reads(graph, launch) if graph.tensors[t].producer is not None)


def wanted_tensors(graph: FusionGraph, launches: Iterable[Launch]) -> set[int]:
    """Tensors that have to be in memory: results, and what a launch reads."""
    wanted = {t.id for t in graph.tensors if t.is_output and t.producer is not None}
    for launch in launches:
        wanted.update(produced_reads(graph, launch))
    return wanted


# Whether launches are a solution: what `launches` says of one, checked.


def check_solution(
    graph: FusionGraph, launches: Solution, evaluator: Evaluator | None = None
) -> None:
    """Raises PlanError unless the launches are a solution in order (see `launches`) and,
    where an evaluator is given, some kernel class takes each of them.
    """
    done: set[int] = set()
    wanted = wanted_tensors(graph, launches)
    for launch in launches:
        _check_launch(graph, launch, done, wanted)
        done.update(launch.stores)
        if evaluator is not None and time_us(evaluator, launch) is None:
            refusal = costed(evaluator, launch)
            raise PlanError(f"{_names(graph, launch)} is refused: {refusal.why}; leave it out")
    if missing := sorted(wanted - done):
        raise PlanError(f"{graph.tensors[missing[0]].name} is written by no launch; add one")
    opaque = {op.id for op in graph.ops if op.kind is OpKind.OPAQUE}
    computed = {op for launch in launches for op in members_of(launch.members)}
    if missing := sorted(opaque - computed):
        raise PlanError(f"{graph.ops[missing[0]].name} is in no launch; add one")
    _check_owners(graph, launches)


def _check_launch(graph: FusionGraph, launch: Launch, done: set[int], wanted: set[int]) -> None:
    where = _names(graph, launch)
    ops = [graph.ops[i] for i in members_of(launch.members)]
    if len(ops) > 1:
        if any(op.kind is OpKind.OPAQUE for op in ops):
            raise PlanError(f"{where} holds an operator that cannot be read; leave it out")
        if len({op.region for op in ops}) > 1:
            raise PlanError(f"{where} spans several dataflow blocks; take it apart")
    for t in produced_reads(graph, launch):
        if t not in done:
            raise PlanError(
                f"{where} reads {graph.tensors[t].name} before it is written; put its writer first"
            )
    if not launch.stores and not is_opaque(graph, launch):
        raise PlanError(f"{where} writes nothing; leave it out")
    for t in launch.stores:
        producer, name = graph.tensors[t].producer, graph.tensors[t].name
        if producer is None or not launch.members >> producer & 1:
            raise PlanError(f"{where} writes {name}, which it does not compute; leave it out")
        if t in done:
            raise PlanError(f"{name} is written twice; leave one out")
        if t not in wanted:
            raise PlanError(f"{where} writes {name}, which nobody reads; leave it out")
        if len(ops) > 1 and graph.ops[producer].kind is OpKind.VIEW:
            raise PlanError(f"{where} writes {name}, which is a view; leave it out")


def _check_owners(graph: FusionGraph, launches: Solution) -> None:
    home: dict[int, int] = {}
    for place, launch in enumerate(launches):
        for t in launch.stores:
            producer = graph.tensors[t].producer
            if home.setdefault(producer, place) != place:
                raise PlanError(
                    f"the results of {graph.ops[producer].name} have two writers; leave one out"
                )


def _names(graph: FusionGraph, launch: Launch) -> str:
    return "{" + ", ".join(graph.ops[i].name for i in members_of(launch.members)) + "}"


def launches_of(state: State) -> Solution:
    """The live groups of a search state as a solution, without what they compute in vain.

    What a group has to write may have changed since it was made; where no kernel class takes it any
    more it is taken apart.
    """
    graph, found, broken = state.graph, [], []
    for gid in sorted(state.owned):
        if not state.alive(gid):
            continue
        costed = state.cost(gid)
        if isinstance(costed, Refusal):
            broken += sorted(op for op in state.owned[gid] if state.live[op])
            continue
        members = 0
        for op in costed.view.ops:
            members |= 1 << op
        found.append(Launch(members, tuple(sorted(costed.view.outputs))))
    if broken:
        return _taken_apart(state.evaluator, found, broken)
    lean = without_waste(graph, found)
    if lean == found or total_us(state.evaluator, lean) > total_us(state.evaluator, found):
        lean = found
    return in_order(graph, lean)


def _taken_apart(evaluator: Evaluator, launches: list[Launch], broken: list[int]) -> Solution:
    """The solution of these launches and, each alone, of the operators in `broken`. Launches that
    are refused, now that others read more of them, are taken apart in turn.
    """
    graph = evaluator.graph
    kernels = [launch for launch in launches if not is_view(graph, launch)]
    while True:
        owner = {graph.tensors[t].producer: w.members for w in kernels for t in w.stores}
        sets = [w.members for w in kernels]
        waiting = list(broken)
        while waiting:  # what is read and not written yet is computed alone, too
            op = waiting.pop()
            if op not in owner and graph.ops[op].kind is not OpKind.VIEW:
                owner[op] = 1 << op
                sets.append(1 << op)
            waiting += [p for p in graph.producers(op) if p not in owner]
        try:
            places = {op: sets.index(members) for op, members in owner.items()}
            lean = without_waste(graph, list(complete(graph, sets, places)))
        except ValueError:  # a circle: all operators alone
            return launches_of(State.unfused(evaluator))
        kernels = [w for w in lean if not is_view(graph, w)]
        refused = [w for w in kernels if time_us(evaluator, w) is None]
        if not refused:
            return in_order(graph, lean)
        broken = sorted({op for w in refused for op in members_of(w.members)})
        kernels = [w for w in kernels if w not in refused]


def without_waste(graph: FusionGraph, launches: list[Launch]) -> list[Launch]:
    """The launches without members whose results nobody reads, and without stores that are then
    read no more.
    """
    while True:
        wanted = wanted_tensors(graph, launches)
        lean = [_useful(graph, launch, wanted) for launch in launches]
        lean = [launch for launch in lean if launch.members]
        if lean == launches:
            return lean
        launches = lean


def _useful(graph: FusionGraph, launch: Launch, wanted: set[int]) -> Launch:
    stores = tuple(t for t in launch.stores if t in wanted)
    if is_opaque(graph, launch):
        return Launch(launch.members, stores)
    needed, members = set(stores), 0
    for op in reversed(members_of(launch.members)):
        if not needed.isdisjoint(graph.ops[op].outputs):
            members |= 1 << op
            needed.update(graph.ops[op].inputs)
    return Launch(members, stores)


def owners(graph: FusionGraph, launches: Solution) -> dict[int, int]:
    """The launch (its place) that owns each operator: the one that writes its results, else the
    first that computes it. In every other launch that computes it, it is a recomputed copy.
    """
    found: dict[int, int] = {}
    for place, launch in enumerate(launches):
        for t in launch.stores:
            found[graph.tensors[t].producer] = place
    for place, launch in enumerate(launches):
        for op in members_of(launch.members):
            found.setdefault(op, place)
    return found


def copies(graph: FusionGraph, launches: Solution) -> tuple[int, ...]:
    """For each launch the bitset of members that another launch owns."""
    home = owners(graph, launches)
    return tuple(
        sum(1 << op for op in members_of(launch.members) if home[op] != place)
        for place, launch in enumerate(launches)
    )


def in_order(graph: FusionGraph, launches: Iterable[Launch]) -> Solution:
    """The launches such that each comes after those that write what it reads; of those that are
    ready, the one with the first operator first.

    Raises
    ------
    ValueError
        Launches depend on each other in a circle.
    """
    given = sorted(launches, key=lambda launch: (launch.stores, launch.members))
    writer = {t: place for place, launch in enumerate(given) for t in launch.stores}
    sources = {
        place: {writer[t] for t in produced_reads(graph, launch) if t in writer}
        for place, launch in enumerate(given)
    }
    return tuple(given[place] for place in topological(sources, _ranks(graph, given)))


def _ranks(graph: FusionGraph, launches: list[Launch]) -> dict[int, int]:
    """By the first operator whose result is written; an opaque one may write nothing."""
    first = (
        graph.tensors[launch.stores[0]].producer
        if launch.stores
        else launch.members.bit_length() - 1
        for launch in launches
    )
    return dict(enumerate(first))


def complete(
    graph: FusionGraph, members: Iterable[int], owner: Mapping[int, int] | None = None
) -> Solution:
    """A solution from the members of its kernels and opaque operators: stores and lone views are
    worked out.

    Parameters
    ----------
    graph : FusionGraph
    members : iterable of int
        One bitset for each launch other than lone views.
    owner : mapping of int to int, optional
        The bitset (its place) that writes an operator's results, where it is not the first that
        computes it.

    Raises
    ------
    PlanError
        A tensor is read that no launch computes.
    ValueError
        Launches depend on each other in a circle.
    """
    sets = list(members)
    bare = [Launch(m, ()) for m in sets]
    wanted = wanted_tensors(graph, bare)
    views = lone_views(graph, wanted)
    wanted |= {t for v in views for t in produced_reads(graph, v)}
    home: dict[int, int] = {}
    for place, m in enumerate(sets):
        for op in members_of(m):
            home.setdefault(op, place)
    home.update(owner or {})
    stores: list[list[int]] = [[] for _ in sets]
    for t in sorted(wanted):
        producer = graph.tensors[t].producer
        if graph.ops[producer].kind is OpKind.VIEW:
            continue
        if producer not in home:
            raise PlanError(f"{graph.tensors[t].name} is read and no launch computes it; add one")
        stores[home[producer]].append(t)
    kernels = [Launch(m, tuple(s)) for m, s in zip(sets, stores, strict=True)]
    return in_order(graph, [*kernels, *views])


def lone_views(graph: FusionGraph, wanted: Iterable[int]) -> list[Launch]:
    """The views that stand alone, where these tensors are to be in memory."""
    found: dict[int, Launch] = {}
    stack = sorted(wanted)
    while stack:
        t = stack.pop()
        producer = graph.tensors[t].producer
        if producer is None or graph.ops[producer].kind is not OpKind.VIEW:
            continue
        if producer not in found:
            found[producer] = Launch(1 << producer, (t,))
            stack.extend(graph.ops[producer].inputs)
    return [found[v] for v in sorted(found)]
