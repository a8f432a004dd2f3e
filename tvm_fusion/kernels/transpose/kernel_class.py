"""Kernel class `transpose`: pointwise work whose inputs disagree on the contiguous axis.

    y[i, j] = relu(x[j, i] + z[i, j])       x is contiguous along i; y and z are along j

Read as it comes, x costs a sector of 32 bytes for each element. Through a tile in shared memory
every byte moves once, so the traffic is that of any pointwise kernel.
"""

from __future__ import annotations

import math

from ...config import HardwareProfile, Policy
from ...cost.liveness import live_values
from ...cost.traffic import Resources, Traffic
from ...ir.extents import assumed
from ...plan.group_view import GroupView
from ...plan.refusal import Refusal, RefusalCode
from ..base import ROLLED, TRANSPOSES, Fit, Needs
from ..forms import Writer
from ..group.read_order import is_transposing
from ..group.streams import Stream, bytes_a_point
from ..group.traffic import Shape, cuda_resources, cuda_traffic, group_streams
from ..pointwise.kernel_class import BASE_REGISTERS, Pointwise, pointwise_shape

# How the CUDA writer will cut a transposing group: tiles that pass through shared memory, as
# `config` ranks first.

TILE = 64
"""Rows and columns of a tile of two-byte elements."""
THREADS = 256
TURN_ROUNDS = 1.0
"""What the way through shared memory adds to a block's time, in loads that wait for one another
(`memory_latency_s` each: 0.2 us on an H200). Of the 117 transposing launches predicted below 5 us
in tests/data/kernels_h200.jsonl half take 0.24 us or more beyond a prediction without it."""
TWO_ORDERS = 1.5
"""How many times the bytes of a launch memory is charged where one output of the whole space is
transposed and another is not. The 32 such launches in tests/data/kernels_h200.jsonl (3 to 400 MB)
take 1.15 to 1.52 times their prediction without it (10th and 90th percentile; 1.3 in the median,
1.34 of those above 10 us)."""


def staged(group: GroupView, stream: Stream, hw: HardwareProfile) -> bool:
    """Whether a read or a write that steps through memory goes through a tile: where its own
    contiguous axis fills a sector.
    """
    if stream.gathered or abs(stream.step) <= 1:
        return False
    shape = group.graph.tensors[stream.tensor].shape
    return bool(shape) and assumed(shape[-1]) * stream.size >= hw.sector_bytes


def transposed_streams(group: GroupView, fit: Fit, hw: HardwareProfile) -> tuple[Stream, ...]:
    """The reads and writes of a group as the tiles make them: what is staged runs along memory."""
    found = group_streams(group, fit)
    return tuple(s._replace(step=1) if staged(group, s, hw) else s for s in found)


def transpose_shape(group: GroupView, fit: Fit, hw: HardwareProfile) -> Shape:
    """Blocks, threads and tiles; the shape of a pointwise kernel where nothing is staged."""
    return group.once(("tiles", fit.kernel_class), lambda: _shape(group, fit, hw))


def _shape(group: GroupView, fit: Fit, hw: HardwareProfile) -> Shape:
    found = group_streams(group, fit)
    tiled = [s for s in found if staged(group, s, hw)]
    if not tiled:
        return pointwise_shape(group, fit, hw)
    narrow = min(s.size for s in tiled)
    side = 2 * TILE if narrow == 1 else TILE
    points = side * side / THREADS
    read = bytes_a_point(found, float(fit.rows * fit.columns))
    flight = min(points * read, hw.thread_bytes_in_flight)
    written = sum(s.size for s in found if s.stored)
    registers = BASE_REGISTERS + live_values(group) + flight / 4 + written * 16 / narrow / 4
    return Shape(
        blocks=float(math.ceil(fit.rows * fit.columns / (side * side))),
        threads=THREADS,
        width=max(1, 16 // narrow),
        points=points,
        registers=int(registers),
        smem_bytes=sum(side * side * s.size for s in tiled),
        flight_bytes=flight,
        rounds=max(1.0, points * read / hw.thread_bytes_in_flight) + TURN_ROUNDS,
        exchanges=1.0,
        waste=TWO_ORDERS if _has_two_orders(found, tiled) else 1.0,
        staged_bytes=2.0 * sum(s.count * s.size for s in tiled),
    )


def _has_two_orders(found: tuple[Stream, ...], tiled: list[Stream]) -> bool:
    """Whether large outputs are stored both transposed and as the kernel runs."""
    transposed = {s.stored and s in tiled for s in found if s.stored and s.own}
    return len(transposed) > 1


class Transpose(Pointwise):
    """See the module docstring.

    Accepts what `pointwise` accepts if a block reads along another axis than it writes. Where
    transposes cancel each other, what is written is the plain pointwise kernel.
    """

    name = "transpose"
    needs = Needs(TRANSPOSES, ROLLED)

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        if any(map(is_transposing, group.blocks)):
            return super().accepts(group, hw, policy)
        for block in group.blocks:
            if block.reduction is not None:
                return group.refuse(RefusalCode.REDUCTION, f"{block.name} is a reduction")
        return group.refuse(
            RefusalCode.NOT_PROFITABLE,
            "all reads run along the last axis of what is written, so a tile gains nothing",
        )

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        return cuda_resources(group, fit, transpose_shape(group, fit, hw))

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        return cuda_traffic(
            group,
            fit,
            hw,
            transpose_shape(group, fit, hw),
            transposed_streams(group, fit, hw),
        )

    def writer(self, hw: HardwareProfile) -> Writer:
        from .kernel import WRITER

        return WRITER
