"""How the CUDA writer will cut a pointwise group, from sizes alone: what
`configs` ranks first, as far as the planner has to know it.
"""

from __future__ import annotations

import math

from ...config import HardwareProfile
from ...cost.analytic import resident_blocks
from ...cost.liveness import live_values
from ...plan.group_view import GroupView
from ..base import Fit
from ..group.streams import WIDEST_ACCESS, Stream, bytes_a_point, element_sizes
from ..group.traffic import Shape, group_streams

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
