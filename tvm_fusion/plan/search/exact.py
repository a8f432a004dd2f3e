"""The cheapest solution of a small region, rematerialisation included.

Launches are chosen from the last to the first. What the launches chosen so far read, or somebody
outside wants, and none of them writes, is still *needed*; the next launch, before all of them,
writes some of it:

    state           (needed results, results already written)
    launch          a set of operators each of which is read inside the set or writes something
                    needed; it may read nothing that is already written (a launch behind it does)
    next state      needed - written + read,  written + its results

Which results a launch writes is then known when it is chosen, and an operator that several launches
want is, launch by launch, recomputed or read. The cheapest way from what is wanted to a state in
which nothing is needed is found by Dijkstra's algorithm; states that cannot lead to less than the
best known solution are dropped.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...config import HardwareProfile
from ...ir.extents import assumed_product
from ...kernels.group.footprint import footprint_bytes
from ..group_view import GroupView, dtype_bytes
from ..legality import Evaluator
from ..refusal import Refusal, RefusalCode
from ..regions.regions import Region, behind_views
from .solution import Launch, costed, members_of

# The least time launches of a region can take, without asking the evaluator.
#
# A launch takes the start of a launch and at least as long as its bytes need: what it reads and
# does
# not compute, once, and what it writes. What is still to be launched in a state of the search
# writes
# all that is needed and reads, once, every tensor from outside that the operators behind it read.
#
# The rates are the profile's; how much faster than they say a launch may be is taken from those
# that
# were evaluated (`scale`): the least ratio of evaluated to bounded time seen so far. A bound is
# therefore as good as the launches seen, and where a later one turns out faster than the scale in
# use
# allowed, what was excluded by it was not proven (`Least.held`).

US = 1e6
MARGIN = 0.98  # of the least ratio seen


@dataclass
class Least:
    """Bounds for one region; see the module docstring."""

    region: Region
    hw: HardwareProfile
    scale: float = 1.0
    used: float = 0.0  # the largest scale a bound was made with
    start_us: float = 0.0
    outside: list[float] = field(default_factory=list)  # us to read each tensor from outside
    behind: list[int] = field(default_factory=list)  # tensors from outside each operator reads
    inner: list[float] = field(default_factory=list)  # us to read each result
    write: list[float] = field(default_factory=list)  # us to write each result
    _sums: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        hw, region = self.hw, self.region
        self.start_us = min(hw.launch_us, hw.graph_launch_us, hw.queued_launch_us)
        number: dict[int, int] = {}
        for i, op in enumerate(region.ops):
            mask = 0
            for read in region.inputs[i]:
                if read.tensor in region.results:
                    continue
                place = number.setdefault(read.tensor, len(number))
                mask |= 1 << place
                time = self._read_us(op, read.tensor)
                if place == len(self.outside):
                    self.outside.append(time)
                else:
                    self.outside[place] = min(self.outside[place], time)
            self.behind.append(mask)
        for t in region.results:
            self.inner.append(self._bytes(t) / self._rate(t) * US)
            self.write.append(self._bytes(t) / hw.hbm_bytes_per_s * US)

    def launch_us(self, ops: int, stores: int) -> float:
        """A launch by its operators and the results it writes."""
        self.used = max(self.used, self.scale)
        return self.start_us + self.scale * self._launch(ops, stores)

    def rest_us(self, needed: int) -> float:
        """All launches still to be chosen when these results are needed."""
        if not needed:
            return 0.0
        key = ("rest", needed)
        if key not in self._sums:
            self._sums[key] = self._rest(needed)
        self.used = max(self.used, self.scale)
        return self.start_us + self.scale * self._sums[key]

    def saw(self, ops: int, stores: int, time_us: float) -> None:
        """Takes note of an evaluated launch."""
        bound = self._launch(ops, stores)
        if bound > 0:
            self.scale = min(self.scale, max(0.0, MARGIN * (time_us - self.start_us) / bound))

    @property
    def held(self) -> bool:
        """Whether no launch turned out faster than the bounds in use allowed."""
        return self.used * MARGIN <= self.scale

    def _launch(self, ops: int, stores: int) -> float:
        key = (ops, stores)
        if key not in self._sums:
            reads, outside, inside = 0, 0, 0
            for i in members_of(ops):
                reads |= self.region.needs[i]
                inside |= self.region.out[i]
                outside |= self.behind[i]
            self._sums[key] = (
                sum(self.outside[k] for k in members_of(outside))
                + sum(self.inner[k] for k in members_of(reads & ~inside))
                + sum(self.write[k] for k in members_of(stores))
            )
        return self._sums[key]

    def _rest(self, needed: int) -> float:
        region, results, outside = self.region, 0, 0
        for i, out in enumerate(region.out):
            if out & needed:
                results |= region.ancestors[i]
        for i, out in enumerate(region.out):
            if out & results:
                outside |= self.behind[i]
        read = sum(self.outside[k] for k in members_of(outside))
        return read + sum(self.write[k] for k in members_of(needed))

    def _read_us(self, op: int, tensor: int) -> float:
        """By what the operator touches of it, or of a view of it."""
        graph = self.region.graph
        view = GroupView(graph, (op,), graph.ops[op].outputs)
        touched = [
            footprint_bytes(view, t)
            for t in graph.ops[op].inputs
            if behind_views(graph, t).tensor == tensor
        ]
        return min(touched) / self._rate(tensor) * US

    def _bytes(self, tensor: int) -> float:
        node = self.region.graph.tensors[tensor]
        return assumed_product(node.shape) * dtype_bytes(node.dtype)

    def _rate(self, tensor: int) -> float:
        """A tensor that a launch has just written may lie in the L2."""
        written = self.region.graph.tensors[tensor].producer is not None
        if written and self._bytes(tensor) <= self.hw.l2_bytes:
            return max(self.hw.l2_bytes_per_s, self.hw.hbm_bytes_per_s)
        return self.hw.hbm_bytes_per_s


# Refusals that more operators cannot cure.
FINAL = frozenset(
    {RefusalCode.OPAQUE, RefusalCode.REGION, RefusalCode.GROUP_SIZE, RefusalCode.PARAMETER_BYTES}
)
TOLERANCE_US = 1e-6
SETS_PER_EVALUATION = 4  # grown through without being asked about, as they cannot pay


@dataclass(frozen=True, slots=True)
class Found:
    """Launches as (operators, results written) of a region, in order.

    Attributes
    ----------
    launches : tuple of (int, int)
    time_us : float
    proven : bool
        Whether no solution is cheaper, among those whose launches grow through sets of which no
        more than `Limits.refused` in a row are refused.
    evaluations : int
        Groups the evaluator was asked for.
    """

    launches: tuple[tuple[int, int], ...]
    time_us: float
    proven: bool
    evaluations: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What a search may do.

    Attributes
    ----------
    evaluations : groups asked of the evaluator
    states : states looked at
    refused : how many refused sets in a row a launch may grow through
    rematerialise : whether an operator may be computed by several launches
    """

    evaluations: int
    states: int
    refused: int = 2
    rematerialise: bool = True


class Spent(Exception):
    """The limit of evaluations is reached."""


@dataclass
class Pricing:
    """Times of launches of a region, each asked for once."""

    region: Region
    evaluator: Evaluator
    limit: int
    asked: int = 0
    tried: int = 0  # moves of the beam search
    least: Least | None = None
    known: dict[tuple[int, int], tuple[float | None, bool]] = field(default_factory=dict)

    def time_us(self, ops: int, stores: int) -> float | None:
        """None if no kernel class takes the launch."""
        return self.look(ops, stores)[0]

    def look(self, ops: int, stores: int) -> tuple[float | None, bool]:
        """The time, and whether a larger launch may be accepted if this one is refused."""
        key = (ops, stores)
        if key not in self.known:
            self.known[key] = self._ask(ops, stores)
        return self.known[key]

    def launch(self, ops: int, stores: int) -> Launch:
        """The launch as the evaluator takes it, views included."""
        tensors = self.region.tensors(stores)
        shared = plain = self.region.members(ops)
        if self.region.has_views:
            plain = self.region.members(ops, shared=False)
        if shared != plain:
            times = [self._time(Launch(m, tensors)) for m in (shared, plain)]
            if times[0] is None or (times[1] is not None and times[1] < times[0]):
                return Launch(plain, tensors)
        return Launch(shared, tensors)

    def _time(self, launch: Launch) -> float | None:
        found = costed(self.evaluator, launch)
        return None if isinstance(found, Refusal) else found.time_us

    def _ask(self, ops: int, stores: int) -> tuple[float | None, bool]:
        if self.asked >= self.limit:
            raise Spent
        self.asked += 1
        found = costed(self.evaluator, self.launch(ops, stores))
        if isinstance(found, Refusal):
            return None, found.code not in FINAL
        if self.least is not None:
            self.least.saw(ops, stores, found.time_us)
        return found.time_us, True


def solve(region: Region, pricing: Pricing, bound_us: float, limits: Limits) -> Found | None:
    """The cheapest solution below `bound_us`.

    Returns
    -------
    Found or None
        None if there is none below the bound (then `bound_us` is optimal), or if the limits ended
        the search; `Spent` tells the two apart.

    Raises
    ------
    Spent
        A limit ended the search: of evaluations, of states, or of sets of operators, of which there
        are 2^n where none reads what another writes.
    """
    if pricing.least is None:
        pricing.least = Least(region, pricing.evaluator.hw)
        for (ops, stores), (time, _) in pricing.known.items():
            if time is not None:
                pricing.least.saw(ops, stores, time)
    return _Search(region, pricing, bound_us, limits, pricing.least).run()


@dataclass
class _Search:
    region: Region
    pricing: Pricing
    bound_us: float
    limits: Limits
    least: Least
    grown: int = 0  # sets of operators that launches were grown through

    def run(self) -> Found | None:
        start = (self.region.wanted, 0)
        best: dict[tuple[int, int], float] = {start: 0.0}
        came: dict[tuple[int, int], tuple] = {}
        heap = [(0.0, 0.0, *start)]
        looked = 0
        while heap:
            _, spent_us, *state = heapq.heappop(heap)
            needed, written = state = tuple(state)
            if spent_us > best[state]:
                continue
            if not needed:
                return self._found(state, spent_us, came)
            looked += 1
            if looked > self.limits.states:
                raise Spent
            for ops, stores, time in self._launches(needed, written, spent_us):
                total = spent_us + time
                nxt = self._next(ops, stores, needed, written)
                if nxt is None or total >= best.get(nxt, float("inf")) - TOLERANCE_US:
                    continue
                least = total + self.least.rest_us(nxt[0])
                if least < self.bound_us - TOLERANCE_US:
                    best[nxt] = total
                    came[nxt] = (state, ops, stores)
                    heapq.heappush(heap, (least, total, *nxt))
        return None

    def _found(self, state: tuple[int, int], time: float, came: dict) -> Found:
        launches = []
        while state in came:
            state, ops, stores = came[state]
            launches.append((ops, stores))
        return Found(tuple(launches), time, self.least.held, self.pricing.asked)

    def _next(self, ops: int, stores: int, needed: int, written: int) -> tuple[int, int] | None:
        """The state after a launch, None if the launch may not stand here."""
        region = self.region
        reads, before, inside, own = 0, 0, 0, 0
        for i in members_of(ops):
            reads |= region.needs[i]
            before |= region.before[i]
            inside |= region.out[i]
            if region.out[i] & stores:
                own |= region.out[i]
        reads &= ~inside
        now_written = written | own
        if reads & written or before & now_written:
            return None
        now_needed = (needed & ~stores) | reads | before
        behind = self._behind(now_needed)
        if behind & inside and not self.limits.rematerialise:
            return None
        return now_needed, now_written & behind

    def _behind(self, needed: int) -> int:
        """Results that launches still to be chosen will compute."""
        found = 0
        for i, out in enumerate(self.region.out):
            if out & needed:
                found |= self.region.ancestors[i]
        return found

    def _hopeless(self, ops: int, stores: int, needed: int, reads: int, spent_us: float) -> bool:
        """Whether no solution with this launch can be below the bound, whatever it costs."""
        rest = self.least.rest_us((needed & ~stores) | reads)
        least = spent_us + self.least.launch_us(ops, stores) + rest
        return least >= self.bound_us - TOLERANCE_US

    def _launches(
        self, needed: int, written: int, spent_us: float
    ) -> Iterator[tuple[int, int, float]]:
        """All launches that may come next: (operators, results written, time)."""
        region = self.region
        stack = [(1 << i, 0) for i, out in enumerate(region.out) if out & needed]
        fewest: dict[int, int] = {}  # refused sets in a row on the best way to each set
        while stack:
            ops, refused = stack.pop()
            if fewest.get(ops, refused + 1) <= refused:
                continue
            self.grown += 1
            if self.grown > SETS_PER_EVALUATION * self.limits.evaluations:
                raise Spent
            first = ops not in fewest
            fewest[ops] = refused
            stores, reads, inside = 0, 0, 0
            for i in members_of(ops):
                inside |= region.out[i]
                stores |= region.out[i] & needed
                reads |= region.needs[i]
            outer = reads & ~inside
            if not outer & written and not self._hopeless(ops, stores, needed, outer, spent_us):
                time, curable = self.pricing.look(ops, stores)
                if first and time is not None:
                    yield ops, stores, time
                if first:
                    yield from self._fewer_stores(ops, stores, reads)
                refused = refused + 1 if time is None else 0
                if not curable or refused > self.limits.refused:
                    continue
            for i, out in enumerate(region.out):
                if not ops >> i & 1 and out & (reads | needed):
                    stack.append((ops | 1 << i, refused))

    def _fewer_stores(self, ops: int, stores: int, reads: int) -> Iterator[tuple[int, int, float]]:
        """The same launch where another one writes some of what it computes on its way."""
        inner = [i for i in members_of(ops) if self.region.out[i] & stores & reads]
        for dropped in range(1, 1 << len(inner)):
            less = stores
            for k in members_of(dropped):
                less &= ~self.region.out[inner[k]]
            time = self.pricing.time_us(ops, less) if less else None
            if time is not None:
                yield ops, less, time
