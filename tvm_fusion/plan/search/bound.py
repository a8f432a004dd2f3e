"""A lower bound of all solutions of a graph, as a 0-1 program over its launches.

    minimise    sum of time(l) x(l)             over all launches l = (operators, results written)
    such that   s(t) = sum of x(l) that write t        s(t) <= 1
                s(t) = 1                               for each result of the graph
                x(l) <= s(t)                           for each tensor t that l reads

Nothing keeps chosen launches from waiting for each other, so the optimum may be no solution, and is
a bound. The launches are those that grow operator by operator through sets of which no more than
two in a row are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...config import HardwareProfile, Policy
from ...errors import PlanError
from ...ir.graph import FusionGraph, bits
from ..legality import Evaluator
from ..plan import FusionPlan
from ..regions.regions import Region, region_of
from .exact import Pricing, Spent
from .solution import Solution, complete, members_of, total_us
from .solution_draft import Working

REFUSED = 2
MOST_LAUNCHES = 50_000


@dataclass(frozen=True, slots=True)
class Bound:
    """How far a solution can be from the cheapest one.

    Attributes
    ----------
    least_us : float
        No solution takes less.
    time_us : float
        What the given one takes.
    launches : int
        Launches of the program.
    """

    least_us: float
    time_us: float
    launches: int

    @property
    def within(self) -> float:
        """The share of the least time that the solution may be above it."""
        return max(0.0, self.time_us / self.least_us - 1.0) if self.least_us > 0 else 0.0


def bound_of_plan(
    graph: FusionGraph, hw: HardwareProfile, policy: Policy, plan: FusionPlan
) -> Bound | None:
    """`lower_bound` for a plan: what no other plan of the graph under this policy is predicted to
    beat.
    """
    number = {op.name: op.id for op in graph.ops}
    members, owner = [], {}
    for group in plan.groups:
        if group.kernel_class == "view":
            continue
        own = [number[name] for name in group.ops if name not in group.recomputed]
        owner.update(dict.fromkeys(own, len(members)))
        members.append(bits(number[name] for name in group.ops))
    return lower_bound(graph, Evaluator(graph, hw, policy), complete(graph, members, owner))


def lower_bound(
    graph: FusionGraph,
    evaluator: Evaluator,
    launches: Solution,
    most_launches: int = MOST_LAUNCHES,
) -> Bound | None:
    """Bounds the predicted time of all solutions of a graph.

    Parameters
    ----------
    graph : FusionGraph
    evaluator : Evaluator
    launches : Solution
        A solution to compare.
    most_launches : int
        Groups the evaluator is asked for at most: about 15 operators that all fuse have 50,000.

    Returns
    -------
    Bound or None
        None if the graph has more launches.

    Raises
    ------
    ImportError
        SciPy is not installed.
    PlanError
        The solver found no optimum.
    """
    milp = _solver()
    working = Working.of(graph, launches)
    kernels = working.kernels()
    time = total_us(evaluator, launches)
    if not kernels:
        return Bound(0.0, time, 0)
    region = region_of(graph, kernels, working.order, working.around(kernels)[1])
    pricing = Pricing(region, evaluator, most_launches)
    try:
        rows = list(_launches(region, pricing))
    except Spent:
        return None
    return Bound(_solve(milp, region, rows), time, len(rows))


def _solver() -> Any:
    try:
        from scipy import optimize
    except ImportError as error:
        raise ImportError(
            "the lower bound of a plan needs SciPy: python -m pip install 'tvm_fusion[bound]'"
        ) from error
    return optimize


def _launches(region: Region, pricing: Pricing) -> Iterator[tuple[int, int, float]]:
    """All launches: (results read, results written, time)."""
    count = len(region.ops)
    stack = [(1 << i, 0) for i in range(count)]
    fewest: dict[int, int] = {}
    while stack:
        ops, refused = stack.pop()
        if fewest.get(ops, refused + 1) <= refused:
            continue
        first, accepted, curable = ops not in fewest, False, False
        fewest[ops] = refused
        reads, inside = 0, 0
        for i in members_of(ops):
            reads |= region.needs[i]
            inside |= region.out[i]
        for stores in _stores(region, ops, reads):
            time, larger = pricing.look(ops, stores)
            curable |= larger
            if time is not None:
                accepted = True
                if first:
                    yield reads & ~inside, stores, time
        refused = 0 if accepted else refused + 1
        if curable and refused <= REFUSED:
            stack += [(ops | 1 << i, refused) for i in range(count) if not ops >> i & 1]


def _stores(region: Region, ops: int, reads: int) -> Iterator[int]:
    """What a launch may write: all that nobody reads inside, and any of the rest."""
    ends, inner = 0, []
    for i in members_of(ops):
        out = region.out[i]
        if not out & reads:
            ends |= out
        else:
            inner.append(out)
    for chosen in range(1 << len(inner)):
        stores = ends
        for k in members_of(chosen):
            stores |= inner[k]
        yield stores


def _solve(optimize: Any, region: Region, rows: list[tuple[int, int, float]]) -> float:
    import numpy as np
    from scipy.sparse import coo_array

    count, tensors = len(rows), len(region.results)
    entries: list[tuple[int, int, float]] = []  # (constraint, variable, factor)
    low, high = [0.0] * tensors, [0.0] * tensors
    for t in range(tensors):
        entries.append((t, count + t, -1.0))
    for k, (reads, stores, _) in enumerate(rows):
        entries += [(t, k, 1.0) for t in members_of(stores)]
        for t in members_of(reads):
            entries += [(len(low), k, -1.0), (len(low), count + t, 1.0)]
            low.append(0.0)
            high.append(np.inf)
    where, which, factors = zip(*entries, strict=True)
    matrix = coo_array((factors, (where, which)), shape=(len(low), count + tensors)).tocsr()
    least = np.zeros(count + tensors)
    for t in members_of(region.wanted):
        least[count + t] = 1.0
    costs = np.array([time for *_, time in rows] + [0.0] * tensors)
    found = optimize.milp(
        costs,
        constraints=optimize.LinearConstraint(matrix, low, high),
        bounds=optimize.Bounds(least, np.ones(count + tensors)),
        integrality=np.ones(count + tensors),
    )
    if not found.success:
        raise PlanError(f"no lower bound of the plan: {found.message}; leave --bound out")
    return float(found.fun)
