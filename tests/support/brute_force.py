"""The cheapest solution of a small graph, by trying everything.

Every set of operators with every choice of what it writes is a launch, if some kernel class takes
it. A table over all sets of tensors in memory then tells how cheaply each can be reached. Shares no
code with the planner's search; only the evaluator, which is the question itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tvm_fusion.ir.graph import FusionGraph, OpKind
from tvm_fusion.plan.legality import Evaluator
from tvm_fusion.plan.refusal import Refusal

MAX_OPS = 9


@dataclass(frozen=True)
class Launches:
    """All legal launches, a row each: operators read, computed and written (bitsets), time."""

    reads: np.ndarray
    computes: np.ndarray
    writes: np.ndarray
    time_us: np.ndarray


def cheapest_us(graph: FusionGraph, evaluator: Evaluator) -> float:
    """Time of the cheapest solution, any operator recomputed as often as one likes.

    Only for graphs of at most `MAX_OPS` operators, none of them opaque, each with one result.
    """
    assert len(graph.ops) <= MAX_OPS
    assert all(op.kind is not OpKind.OPAQUE and len(op.outputs) == 1 for op in graph.ops)
    launches = _all_launches(graph, evaluator)
    size = len(graph.ops)
    results = sum(1 << op.id for op in graph.ops if graph.tensors[op.outputs[0]].is_output)
    best, last = _table(size, launches)
    ends = [m for m in range(1 << size) if m & results == results]
    end = min(ends, key=lambda m: best[m])
    if _everything_written_is_read(end, results, last, launches):
        return float(best[end])
    return _cheapest_without_unread(size, results, launches)


def _table(size: int, launches: Launches) -> tuple[np.ndarray, np.ndarray]:
    """Least time to have each set of results in memory, and the last launch on the way."""
    best, last = np.full(1 << size, np.inf), np.full(1 << size, -1)
    best[0] = 0.0
    for memory in range(1 << size):  # what is written only grows, so this order is final
        if np.isfinite(best[memory]):
            (rows,) = np.nonzero(_possible(launches, memory))
            rows = rows[np.argsort(-launches.time_us[rows], kind="stable")]  # cheapest set last
            after, times = launches.writes[rows] | memory, best[memory] + launches.time_us[rows]
            better = times < best[after]
            best[after[better]] = times[better]
            last[after[better]] = rows[better]
    return best, last


def _possible(launches: Launches, memory: int) -> np.ndarray:
    return ((launches.reads & ~memory) == 0) & ((launches.writes & memory) == 0)


def _everything_written_is_read(end: int, results: int, last, launches: Launches) -> bool:
    used, memory = results, end
    while memory:
        row = last[memory]
        used |= int(launches.reads[row])
        memory &= ~int(launches.writes[row])
    return end & ~used == 0


def _cheapest_without_unread(size: int, results: int, launches: Launches) -> float:
    """The same over (what is in memory, what of it nobody has read yet)."""
    best = np.full((1 << size, 1 << size), np.inf)
    best[0, 0] = 0.0
    for memory in range(1 << size):
        possible = _possible(launches, memory)
        reads, writes = launches.reads[possible], launches.writes[possible]
        for unread in np.nonzero(np.isfinite(best[memory]))[0]:
            after = (memory | writes, (unread & ~reads) | (writes & ~results))
            np.minimum.at(best, after, best[memory, unread] + launches.time_us[possible])
    return float(min(best[m, 0] for m in range(1 << size) if m & results == results))


def _all_launches(graph: FusionGraph, evaluator: Evaluator) -> Launches:
    rows = []
    for computes in range(1, 1 << len(graph.ops)):
        ops = [i for i in range(len(graph.ops)) if computes >> i & 1]
        reads = 0
        for i in ops:
            for t in graph.ops[i].inputs:
                producer = graph.tensors[t].producer
                if producer is not None:
                    reads |= 1 << producer
        for writes in _writes(graph, ops, computes):
            time = _time(graph, evaluator, ops, writes)
            if time is not None:
                rows.append((reads & ~computes, computes, writes, time))
    reads, computes, writes, times = zip(*rows, strict=True)
    return Launches(
        *(np.array(c, dtype=np.int64) for c in (reads, computes, writes)), np.array(times)
    )


def _writes(graph: FusionGraph, ops: list[int], computes: int) -> Iterator[int]:
    """What such a launch may write: nothing of it is computed in vain."""
    needed_by = {i: 0 for i in ops}
    for i in ops:
        for t in graph.ops[i].inputs:
            producer = graph.tensors[t].producer
            if producer in needed_by:
                needed_by[producer] |= 1 << i
    writable = computes
    if len(ops) > 1:
        for i in ops:
            if graph.ops[i].kind is OpKind.VIEW:
                writable &= ~(1 << i)
    writes = writable
    while writes:
        useful = writes
        for i in reversed(ops):
            if needed_by[i] & useful:
                useful |= 1 << i
        if useful == computes:
            yield writes
        writes = (writes - 1) & writable


def _time(graph: FusionGraph, evaluator: Evaluator, ops: list[int], writes: int) -> float | None:
    if len(ops) == 1 and graph.ops[ops[0]].kind is OpKind.VIEW:
        return 0.0
    outputs = tuple(t for i in ops if writes >> i & 1 for t in graph.ops[i].outputs)
    found = evaluator.group(tuple(ops), outputs, 0)
    return None if isinstance(found, Refusal) else found.time_us
