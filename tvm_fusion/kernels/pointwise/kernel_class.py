"""Kernel class `pointwise`: any DAG of elementwise, broadcast and injective operators over one
index space, several outputs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from ...config import HardwareProfile, Policy
from ...cost.analytic import resident_blocks
from ...cost.liveness import live_values
from ...cost.traffic import Resources, Traffic
from ...ir.access import Block, derived
from ...ir.extents import assumed, assumed_product, product_key
from ...plan.group_view import GroupView
from ...plan.refusal import Refusal, RefusalCode
from ..base import ROLLED, Family, Fit, Needs
from ..forms import Writer
from ..group.footprint import VECTOR_ELEMENTS, evaluations, points, refuse_recompute
from ..group.read_order import is_transposing
from ..group.streams import WIDEST_ACCESS, Stream, bytes_a_point, element_sizes
from ..group.traffic import (
    Shape,
    cuda_resources,
    cuda_traffic,
    filled_by_threads,
    group_streams,
    memory_traffic,
    slowed,
)
from ..program.window import is_window_block

# How the CUDA writer will cut a pointwise group, from sizes alone: what
# `configs` ranks first, as far as the planner has to know it.

THREADS = 256
FEWEST_THREADS = 64
UNROLL = (1, 2, 4)
WIDEST_VECTOR = 32
"""Bytes of a vector of the widest dtype: two accesses."""
BASE_REGISTERS = 10
"""Registers for places and pointers (ptxas: 16 to 32 in kernels with one or two vectors)."""
WRITER_REGISTERS = 18
"""What the writer takes them for when it chooses the vectors a thread."""


def pointwise_shape(group: GroupView, fit: Fit, hw: HardwareProfile) -> Shape:
    """Blocks, threads and vectors of a pointwise kernel."""
    return group.once(("shape", fit.kernel_class), lambda: _shape(group, fit, hw))


def _shape(group: GroupView, fit: Fit, hw: HardwareProfile) -> Shape:
    found = group_streams(group, fit)
    elements = float(fit.rows * fit.columns)
    width, piece = vector(found, fit, elements)
    read = width * bytes_a_point(found, elements)
    written = width * sum(s.size for s in found if s.stored)
    live = live_values(group)
    flight = min(float(read), hw.thread_bytes_in_flight)
    # of what is stored by halves, one waits in single precision for the other
    waiting = sum(s.stored and s.size < 4 for s in found)
    registers = int(BASE_REGISTERS + live + flight / 4 + written / 4 + waiting)
    threads, unroll = THREADS, 1
    needed = hw.hbm_bytes_per_s * hw.bytes_in_flight_latency_s / hw.num_sms
    vectors = math.ceil(elements / width)
    for unroll in UNROLL:
        resident = resident_blocks(threads, int(WRITER_REGISTERS + unroll * read / 4), 0, hw)
        if resident * threads * unroll * max(1, read) >= needed:
            break
    while threads > FEWEST_THREADS and vectors < hw.num_sms * threads * unroll:
        threads //= 2
    if vectors < hw.num_sms * threads * unroll:
        unroll = 1
    gathers = any(s.gathered for s in found)
    return Shape(
        blocks=math.ceil(vectors / (threads * unroll)),
        threads=threads,
        width=width,
        points=float(width * unroll),
        registers=registers,
        flight_bytes=min(
            float(unroll * max(1, read)), max(hw.thread_bytes_in_flight, float(width))
        ),
        rounds=max(1.0, math.ceil(unroll * read / hw.thread_bytes_in_flight)) + gathers,
        piece=piece,
    )


def vector(found: tuple[Stream, ...], fit: Fit, elements: float) -> tuple[int, int]:
    """Points of a vector, and bytes of its widest access."""
    own = element_sizes(found, elements)
    narrow, wide = min(own, default=2), max((s.size for s in found), default=2)
    plain = all(s.own and s.step == 1 for s in found)
    run = elements if plain else fit.columns
    width = WIDEST_ACCESS // narrow
    while width > 1 and ((run % width and not plain) or width * wide > WIDEST_VECTOR):
        width //= 2
    if width * narrow < 8 and all(abs(s.step) <= 1 for s in found):
        # vectors across the ends of rows; what is broadcast is read element by element
        width = max(1, min(WIDEST_ACCESS // narrow, WIDEST_VECTOR // wide))
    return width, WIDEST_ACCESS


CPU_SLOWNESS_OF_TRANSPOSES = 2.4
"""On a CPU, what turns axes takes this times what copies of as many bytes do (2 cores of a Zen 4,
2026-11-24: 512 x 768 2.5, 1000 x 1001 2.4, 333 x 517 1.8, 700 x 3072 1.9, 4001 x 301 3.0, images of
8 x 64 x 28 x 28 to channels last 2.9, 16 x 128 x 64 with the last axes exchanged 1.2)."""


class Pointwise(Family):
    """See the module docstring.

    Reductions over a window (pooling) are unrolled. On CUDA, outputs of different sizes that share
    no work stand side by side: each gets its own range of blocks. Does not handle: other
    reductions; outputs of different sizes of which one is computed from another.
    """

    name = "pointwise"
    needs = Needs(absent=ROLLED)
    joins_independent = True
    writes_out_windows = True

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        for block in group.blocks:
            if block.reduction is None:
                continue
            if hw.kind == "llvm" or not is_window_block(block):
                return group.refuse(RefusalCode.REDUCTION, f"{block.name} is a reduction")
        outputs = [group.writer_of[t] for t in group.outputs]
        if not outputs:
            return group.refuse(RefusalCode.SPACE_MISMATCH, "nothing of the group is read outside")
        sizes = _sizes(outputs)
        if len(sizes) > 1 and (hw.kind == "llvm" or not _independent(group)):
            return group.refuse(
                RefusalCode.SPACE_MISMATCH,
                "the outputs have different sizes, so they share no index space",
                smallest=min(sizes.values()),
                largest=max(sizes.values()),
            )
        runs = evaluations(group)
        if refusal := refuse_recompute(group, runs, policy):
            return refusal
        if len(sizes) > 1:
            return Fit(self.name, sum(sizes.values()), 1, runs.counts, side_by_side=True)
        return Fit(self.name, *_space(outputs[0]), runs.counts)

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        if hw.kind != "llvm":
            return cuda_traffic(group, fit, hw, pointwise_shape(group, fit, hw))
        elements = fit.rows * fit.columns
        traffic = memory_traffic(
            group, fit, hw, parallel=filled_by_threads(elements / VECTOR_ELEMENTS, hw)
        )
        transposed = [b.writes[0].tensor for b in group.blocks if is_transposing(b)]
        return slowed(
            traffic, CPU_SLOWNESS_OF_TRANSPOSES, 2 * sum(map(group.tensor_bytes, transposed))
        )

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        if hw.kind != "llvm":
            return cuda_resources(group, fit, pointwise_shape(group, fit, hw))
        values = len(group.inputs) + len(group.outputs) + 2
        return Resources(24 + values * VECTOR_ELEMENTS, 0)

    def writer(self, hw: HardwareProfile) -> Writer:
        if hw.kind == "llvm":
            return super().writer(hw)
        from .kernel import WRITER

        return WRITER


def _sizes(outputs: list[Block]) -> dict[Hashable, int]:
    """Elements of one output of each size."""
    return dict(map(_size, outputs))


@derived
def _size(output: Block) -> tuple[Hashable, int]:
    extents = output.extents(output.spatial)
    return product_key(extents), assumed_product(extents)


@derived
def _space(output: Block) -> tuple[int, int]:
    """Rows and columns."""
    extents = [assumed(extent) for extent in output.extents(output.spatial)]
    return assumed_product(extents[:-1]), extents[-1] if extents else 1


def _independent(group: GroupView) -> bool:
    """Whether outputs of different sizes are computed from different blocks, but for numbers."""
    wanted: dict[int, set[Hashable]] = {}
    for t in group.outputs:
        block = group.writer_of[t]
        wanted.setdefault(t, set()).add(product_key(block.extents(block.spatial)))
    for block in reversed(group.blocks):
        sizes = set().union(*(wanted.get(w.tensor, set()) for w in block.writes))
        if len(sizes) > 1 and points(block) > 1:
            return False
        for access in block.reads:
            wanted.setdefault(access.tensor, set()).update(sizes)
    return True
