"""Repeats of a graph: runs of operators that say the same again and again, as the layers of a model
do.

    embed | norm q k v ... add | norm q k v ... add | norm q k v ... add | head
          ^ start              ^ start + period                          ^ start + count * period

Each operator of a period has its like in the next: the same structure, reading what is one period
later, or the same tensors (a mask), or inputs of the function of its own (weights).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from ...ir.graph import FusionGraph

SHORTEST_PERIOD = 4  # operators
MARKS = (24, 8, 3)  # operators in a row whose next occurrence tells a period
TRIED = 4  # periods that are looked at for each length of marks
REACH = 2  # periods that an operator may read back


@dataclass(frozen=True, slots=True)
class Repeat:
    """`count` periods of `period` operators each, from operator `start` on."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.count

    def period_of(self, op: int) -> int:
        """The period an operator stands in; -1 before the first, `count` behind the last."""
        if op < self.start:
            return -1
        return min(self.count, (op - self.start) // self.period)


def find_repeats(graph: FusionGraph, numbers: tuple[int, ...], least: int) -> list[Repeat]:
    """The repeats of at least so many periods, those that cover most operators first.

    Parameters
    ----------
    graph : FusionGraph
    numbers : tuple of int
        The structure of each operator (`Wiring.number`).
    least : int
    """
    found: dict[Repeat, None] = {}
    seen: set[int] = set()
    for length in MARKS:
        for period in _periods(numbers, length):
            if period in seen or period * least > len(numbers):
                continue
            seen.add(period)
            for repeat in _runs(graph, numbers, period, least):
                if _is_closed(graph, repeat):
                    found[repeat] = None
        if found:
            break
    return sorted(found, key=lambda r: (r.period - r.period * r.count, r.period, r.start))


def _periods(numbers: tuple[int, ...], length: int) -> list[int]:
    """Distances at which rows of so many operators occur again, the most frequent first."""
    places: dict[tuple[int, ...], deque[int]] = {}
    counts: Counter[int] = Counter()
    for i in range(len(numbers) - length + 1):
        before = places.setdefault(numbers[i : i + length], deque(maxlen=2))
        counts.update(i - place for place in before)
        before.append(i)
    frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [distance for distance, _ in frequent if distance >= SHORTEST_PERIOD][:TRIED]


def _runs(
    graph: FusionGraph, numbers: tuple[int, ...], period: int, least: int
) -> Iterator[Repeat]:
    """Stretches in which each operator is like the one a period later."""
    start = 0
    for i in range(len(numbers) - period + 1):
        if i < len(numbers) - period and _alike(graph, numbers, i, i + period):
            continue
        count = (i + period - start) // period
        if count >= least:
            yield Repeat(start, period, count)
        start = i + 1


def _alike(graph: FusionGraph, numbers: tuple[int, ...], a: int, b: int) -> bool:
    if numbers[a] != numbers[b]:
        return False
    tensors, ops = graph.tensors, graph.ops
    for t, u in zip(ops[a].inputs, ops[b].inputs, strict=True):
        one, two = tensors[t].producer, tensors[u].producer
        if t == u or (one is None and two is None):
            continue
        if one is None or two is None or two - one != b - a:
            return False
        if ops[one].outputs.index(t) != ops[two].outputs.index(u):
            return False
    return True


def _is_closed(graph: FusionGraph, repeat: Repeat) -> bool:
    """Whether periods could be taken out: what they make and read is of no other concern."""
    partner: dict[tuple[int, int], int] = {}
    last = repeat.end - REACH * repeat.period
    for i in range(repeat.start, repeat.end):
        place = repeat.period_of(i)
        for t in graph.ops[i].inputs:
            producer = graph.tensors[t].producer
            inside = producer is not None and producer >= repeat.start
            if inside and place - repeat.period_of(producer) > REACH:
                return False
        if i < last and any(
            c >= repeat.end for t in graph.ops[i].outputs for c in graph.tensors[t].consumers
        ):
            return False
        if i + repeat.period < repeat.end and not _pairs(graph, repeat, i, place, partner):
            return False
    return True


def _pairs(
    graph: FusionGraph, repeat: Repeat, op: int, place: int, partner: dict[tuple[int, int], int]
) -> bool:
    """Whether each tensor an operator reads has one partner in the next period, and is that one's
    only partner.
    """
    for t, u in zip(graph.ops[op].inputs, graph.ops[op + repeat.period].inputs, strict=True):
        tensor = graph.tensors[t]
        if t == u and tensor.producer is not None and tensor.producer >= repeat.start:
            return False
        if partner.setdefault((place, t), u) != u:
            return False
        if partner.setdefault((-1 - place, u), t) != t:
            return False
        if t != u and tensor.producer is None:
            readers, later = tensor.consumers, graph.tensors[u].consumers
            if min(readers) < repeat.start or max(later) >= repeat.end:
                return False
            if tuple(c + repeat.period for c in readers) != later:
                return False  # another layer shares it
    return True
