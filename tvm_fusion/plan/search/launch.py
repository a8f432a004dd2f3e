"""One launch of a solution (`launches`): the operators it computes, the tensors it writes, what it
reads, what it costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from ...ir.graph import FusionGraph, OpKind
from ..legality import Costed, Evaluator
from ..refusal import Refusal


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
