"""The least time launches of a region can take, without asking the evaluator.

A launch takes the start of a launch and at least as long as its bytes need: what it reads and does
not compute, once, and what it writes. What is still to be launched in a state of the search writes
all that is needed and reads, once, every tensor from outside that the operators behind it read.

The rates are the profile's; how much faster than they say a launch may be is taken from those that
were evaluated (`scale`): the least ratio of evaluated to bounded time seen so far. A bound is
therefore as good as the launches seen, and where a later one turns out faster than the scale in use
allowed, what was excluded by it was not proven (`Least.held`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...config import HardwareProfile
from ...ir.extents import assumed_product
from ...kernels.group.footprint import footprint_bytes
from ..group_view import GroupView, dtype_bytes
from ..regions.regions import Region, behind_views
from .solution import members_of

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
