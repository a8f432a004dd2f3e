"""Repeats of a graph: runs of operators that say the same again and again, as the layers of a model
do.

    embed | norm q k v ... add | norm q k v ... add | norm q k v ... add | head
          ^ start              ^ start + period                          ^ start + count * period

Each operator of a period has its like in the next: the same structure, reading what is one period
later, or the same tensors (a mask), or inputs of the function of its own (weights).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ...errors import PlanError
from ...ir.graph import FusionGraph, Op
from ..legality import Evaluator
from ..search.solution import Launch, Solution, check_solution, in_order, members_of, time_us

# Planning a graph that repeats itself: a few periods are planned, the others follow.
#
#     prefix 0 1 2 3 ... 31 suffix     the graph
#     prefix 0 1           30 31 suffix     the short one: period 30 reads period 1
#     launches that start in period 1, and the same for 2 ... 29
#
# The launches that start in the period before the gap have to be those that start in the period
# behind it, one period earlier: what lies between is then periodic, too.


@dataclass(frozen=True, slots=True)
class Shortened:
    """A graph without some periods of a repeat.

    Attributes
    ----------
    graph, short : the graph, and the one without the periods
    repeat : the repeat in the graph
    head, tail : how many of its first and last periods the short one has
    """

    graph: FusionGraph
    short: FusionGraph
    repeat: Repeat
    head: int
    tail: int

    @staticmethod
    def of(graph: FusionGraph, repeat: Repeat, head: int, tail: int) -> Shortened:
        short = _without(graph, repeat, repeat.count - head - tail, head)
        return Shortened(graph, short, repeat, head, tail)

    @property
    def missing(self) -> int:
        """Periods taken out."""
        return self.repeat.count - self.head - self.tail

    def expand(self, launches: Solution, evaluator: Evaluator | None = None) -> Solution | None:
        """The solution of the whole graph that a solution of the short one stands for; None if that
        is not periodic, or if a launch that has parts in all periods is refused by the evaluator of
        the whole graph.
        """
        for start_of in (self._start, self._first_inside):
            starts = {launch: start_of(launch) for launch in launches}
            through = [self._through(x) for x, start in starts.items() if start is None]
            if None in through:
                continue
            if evaluator is not None and any(time_us(evaluator, x) is None for x in through):
                continue
            starts = {launch: start for launch, start in starts.items() if start is not None}
            if (found := self._expanded(starts, through)) is not None:
                return found
        return None

    def _expanded(self, starts: Mapping[Launch, int], through: list[Launch]) -> Solution | None:
        """The same, of launches and the periods in which they start, and of those that have parts
        in all periods of the whole graph.
        """
        period = self.repeat.period
        before = {x for x, start in starts.items() if start == self.head - 1}
        behind = {x for x, start in starts.items() if start == self.head}
        if {self._moved(self.short, x, period) for x in before} != behind:
            return None
        whole = list(through)
        for launch, start in starts.items():
            copies = range(self.missing + 1) if start == self.head - 1 else (0,)
            if start >= self.head:
                copies = (self.missing,)
            whole += [self._moved(self.graph, launch, n * period) for n in copies]
        try:
            found = in_order(self.graph, whole)
            check_solution(self.graph, found)
        except (PlanError, ValueError):
            return None
        return found

    @property
    def _kept(self) -> Repeat:
        """The repeat in the short graph."""
        return Repeat(self.repeat.start, self.repeat.period, self.head + self.tail)

    def _start(self, launch: Launch) -> int | None:
        """The period in which a launch starts; None if it spans too many to be periodic."""
        first = (launch.members & -launch.members).bit_length() - 1
        start, end = (self._kept.period_of(op) for op in (first, launch.members.bit_length() - 1))
        if start >= self.head:
            return start
        most = self.head - 1 if start < 0 else start + 1
        return start if end <= most else None

    def _first_inside(self, launch: Launch) -> int | None:
        """The same, but what is computed again of operators in front of all periods (a mask) is of
        no period.
        """
        inside = launch.members >> self.repeat.start << self.repeat.start
        if inside in (0, launch.members):
            return self._start(launch)
        return self._start(Launch(inside, launch.stores))

    def _through(self, launch: Launch) -> Launch | None:
        """A launch that has equal parts in the periods beside the gap (counters of all layers),
        with such parts in those that are missing; None where they are not equal, one reads what
        another computes, or there are none.
        """
        period, start = self.repeat.period, self.repeat.start
        gap = start + self.head * period
        parts = [self._part(launch, gap - period), self._part(launch, gap)]
        if parts[0] != parts[1] or not parts[0][0]:
            return None
        before = launch.members >> start << start & (1 << gap) - 1
        if any(self.short.ancestors[gap + op] & before for op in members_of(parts[1][0])):
            return None
        (members, places), by = parts[0], self.missing * period
        behind = launch.members >> gap
        whole = launch.members ^ behind << gap | behind << gap + by
        stores = [(op + by if op >= gap else op, place) for op, place in self._places(launch)]
        for first in range(gap, gap + by, period):
            whole |= members << first
            stores += [(op + first, place) for op, place in places]
        tensors = (self.graph.ops[op].outputs[place] for op, place in stores)
        return Launch(whole, tuple(sorted(tensors)))

    def _part(self, launch: Launch, first: int) -> tuple[int, list[tuple[int, int]]]:
        """What a launch computes and stores in the period from an operator on, counted from it."""
        period = self.repeat.period
        places = ((op - first, place) for op, place in self._places(launch))
        inside = [(op, place) for op, place in places if 0 <= op < period]
        return launch.members >> first & (1 << period) - 1, inside

    def _places(self, launch: Launch) -> list[tuple[int, int]]:
        """What a launch stores: operators of the short graph, and which of their results."""
        makers = [(self.short.tensors[t].producer, t) for t in launch.stores]
        return [(op, self.short.ops[op].outputs.index(t)) for op, t in makers]

    def _moved(self, target: FusionGraph, launch: Launch, by: int) -> Launch:
        """A launch of the operators so many further on; those in front of all periods stay."""
        start, stores = self.repeat.start, []
        for op, place in self._places(launch):
            op += by if op >= start else 0
            if op >= len(target.ops):
                return Launch(0, ())
            stores.append(target.ops[op].outputs[place])
        inside = launch.members >> start << start
        return Launch(launch.members ^ inside | inside << by, tuple(stores))


def shortened(graph: FusionGraph, repeats: list[Repeat], tries: int = 2) -> Iterator[Shortened]:
    """Short forms of a graph that are worth planning, the shortest first."""
    for repeat in repeats[:tries]:
        for head, tail in KEPT:
            if repeat.count >= head + tail + LEAST_MISSING:
                yield Shortened.of(graph, repeat, head, tail)


KEPT = ((2, 2), (3, 3))  # first and last periods that are planned
LEAST_MISSING = 2  # periods; fewer are planned as fast as they are left out
LEAST_PERIODS = min(map(sum, KEPT)) + LEAST_MISSING


def _without(graph: FusionGraph, repeat: Repeat, periods: int, head: int) -> FusionGraph:
    """The graph without some periods behind the first `head` ones; what read the last of them reads
    the last one that is left.
    """
    first = repeat.start + head * repeat.period
    count = periods * repeat.period
    ops = [op for op in graph.ops if not first <= op.id < first + count]
    gone = {t for op in graph.ops[first : first + count] for t in _made(op)}
    kept = [t for t in graph.tensors if t.id not in gone]
    number = {t.id: n for n, t in enumerate(kept)}
    for op in graph.ops[max(first, repeat.start + count) : first + count]:
        for t, like in zip(op.outputs, graph.ops[op.id - count].outputs, strict=True):
            number[t] = number[like]
    new = [_renumbered(op, n, number) for n, op in enumerate(ops)]
    place = {op.id: n for n, op in enumerate(ops)}
    consumers: dict[int, list[int]] = {}
    for op in new:
        for t in op.inputs:
            consumers.setdefault(t, []).append(op.id)
    tensors = tuple(
        replace(
            t,
            id=n,
            producer=None if t.producer is None else place[t.producer],
            consumers=tuple(consumers.get(n, ())),
        )
        for n, t in enumerate(kept)
    )
    return with_reach(FusionGraph(graph.function, tuple(new), tensors, (), ()))


def _made(op: Op) -> set[int]:
    return {*op.outputs, *(w.tensor for b in op.blocks for w in b.writes)}


def _renumbered(op: Op, number: int, tensors: dict[int, int]) -> Op:
    blocks = tuple(
        replace(
            b,
            reads=tuple(a.remap(tensors) for a in b.reads),
            writes=tuple(a.remap(tensors) for a in b.writes),
        )
        for b in op.blocks
    )
    inputs, outputs = (tuple(tensors[t] for t in ids) for ids in (op.inputs, op.outputs))
    return replace(op, id=number, inputs=inputs, outputs=outputs, blocks=blocks)


def with_reach(graph: FusionGraph) -> FusionGraph:
    """The graph with its bitsets of ancestors and descendants."""
    above = [0] * len(graph.ops)
    for op in graph.ops:
        for p in graph.producers(op.id):
            above[op.id] |= above[p] | 1 << p
    below = [0] * len(graph.ops)
    for op in reversed(graph.ops):
        for c in graph.consumers(op.id):
            below[op.id] |= below[c] | 1 << c
    return replace(graph, ancestors=tuple(above), descendants=tuple(below))


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
