"""Traffic and resources that all kernel classes share: what a launch reads and writes, and what
follows from how it is cut into blocks and threads.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from ...config import HardwareProfile
from ...cost.analytic import resident_blocks
from ...cost.traffic import Resources, Traffic
from ...ir.graph import OpKind
from ...plan.group_view import GroupView
from ..base import Fit
from .footprint import footprint_bytes, index_of, operations
from .streams import WIDEST_ACCESS, Stream, requested_bytes, streams

# Threads a multiprocessor needs in flight before memory-bound code stops gaining (16-byte loads,
# Little's law at 600 ns).
THREADS_TO_FILL_SM = 512

LEAST_SHARE = 0.01
"""Of an input, below which it is not said to lie in the L2."""

WORD_BYTES = 4
SPECIAL_WORK = 12
"""Additions in a special function's slot (exp), as the CPU writer counts them."""
INSTRUCTION_BYTES = 16
PLACE_INSTRUCTIONS = 16.0
"""Division and remainder by a number known when the kernel is written, for one vector."""
CODE_AROUND = 1024
"""Bytes of code of a kernel that does nothing: its parameters, its place, its return."""


class Shape(NamedTuple):
    """How a CUDA kernel is cut.

    Attributes
    ----------
    blocks, threads : thread blocks, threads of one
    width : points of a vector
    points : points that a thread computes, written out one after the other
    registers : of a thread
    smem_bytes : shared memory of a block
    flight_bytes : bytes of loads that a thread has under way
    rounds : loads of a thread that wait for one another
    exchanges, shuffles : between the threads of a block, and steps within its warps
    reads_again : bytes of inputs that are read again in a later pass
    spills : how often a register too many is stored and loaded; 0: for every point
    staged_bytes : bytes that all blocks write to and read from shared memory
    waste : bytes that memory moves for those asked for, where runs begin within sectors
    piece : bytes of the widest access
    """

    blocks: float
    threads: int
    width: int
    points: float
    registers: int
    smem_bytes: int = 0
    flight_bytes: float = 16.0
    rounds: float = 1.0
    exchanges: float = 0.0
    shuffles: float = 0.0
    staged_bytes: float = 0.0
    reads_again: float = 0.0
    spills: float = 0.0
    waste: float = 1.0
    piece: int = WIDEST_ACCESS


def memory_traffic(
    group: GroupView, fit: Fit, hw: HardwareProfile, parallel: float = 1.0, **more
) -> Traffic:
    """Inputs once by footprint, outputs once.

    Of an input that another kernel of the function has just written, what the L2 still holds is not
    charged to the memory.
    """
    moved = _moved(group, fit, hw)
    if hw.kind == "llvm" and _is_small(moved, more.get("tensor_flops", 0.0), hw):
        parallel = 1.0 / hw.num_sms
    return Traffic(
        moved.hbm_bytes,
        moved.l2_bytes,
        moved.operations,
        parallel=parallel,
        assumed_l2=moved.assumed_l2,
        **more,
    )


def _is_small(moved: _Moved, flops: float, hw: HardwareProfile) -> bool:
    """Whether the CPU writer leaves a launch on one core."""
    from ..cpu.machine import PRODUCT_WORK, small_work

    ops = moved.operations
    work = moved.l2_bytes / WORD_BYTES + ops["arithmetic"] + SPECIAL_WORK * ops["special"]
    return work + PRODUCT_WORK * flops / 2 < small_work(hw.launch_us, hw.num_sms)


def slowed(traffic: Traffic, times: float, size: float) -> Traffic:
    """The traffic of a launch on a CPU that takes for `size` bytes `times` as long as a copy."""
    return replace(traffic, sector_bytes=traffic.l2_bytes + (times - 1.0) * size)


class _Moved(NamedTuple):
    """What a launch moves and executes, however it is cut; fields as those of `Traffic`."""

    hbm_bytes: float
    l2_bytes: float
    operations: dict[str, float]
    assumed_l2: tuple[tuple[int, float], ...]


def _moved(group: GroupView, fit: Fit, hw: HardwareProfile) -> _Moved:
    written = sum(map(group.tensor_bytes, group.outputs))
    l2 = hbm = float(written)
    assumed = []
    for t in group.inputs:
        size = footprint_bytes(group, t)
        share = resident_share(group, t, size, hw)
        l2 += size
        hbm += (1.0 - share) * size
        if share > LEAST_SHARE:
            assumed.append((t, share * size))
    return _Moved(hbm, l2, operations(group, fit.evaluations, hw.special_slots), tuple(assumed))


def resident_share(group: GroupView, tensor: int, size: float, hw: HardwareProfile) -> float:
    """Share of the `size` bytes that are read of a tensor which the L2 still holds, since another
    kernel of the function has just written it: nearly all of what is small beside the usable L2,
    half of what fills it.
    """
    graph = group.graph
    producer = graph.tensors[tensor].producer
    while producer is not None and graph.ops[producer].kind is OpKind.VIEW:
        producer = graph.tensors[graph.ops[producer].inputs[0]].producer
    if producer is None:
        return 0.0
    filled = size / (hw.l2_usable_share * hw.l2_bytes)
    return 1.0 / (1.0 + filled**hw.l2_residence_exponent)


def filled_by_threads(threads: float, hw: HardwareProfile) -> float:
    """Share of the device that so many threads keep busy."""
    if hw.kind == "llvm":
        return min(1.0, max(1.0, threads) / hw.num_sms)
    return min(1.0, max(1.0, threads) / (hw.num_sms * THREADS_TO_FILL_SM))


# ---- CUDA kernels


def group_streams(group: GroupView, fit: Fit) -> tuple[Stream, ...]:
    """The reads and writes of a group, found once."""
    space = float(fit.rows * fit.columns)
    return group.once(("streams", fit.kernel_class), lambda: streams(group, fit.evaluations, space))


def cuda_traffic(
    group: GroupView,
    fit: Fit,
    hw: HardwareProfile,
    shape: Shape,
    found: tuple[Stream, ...] | None = None,
) -> Traffic:
    """The traffic of a kernel of that shape; `found` are its reads and writes, if they are not
    those of the index maps.
    """
    moved = _moved(group, fit, hw)
    if found is None:
        found = group_streams(group, fit)
    wavefronts = sum([s.wavefronts(shape.width, shape.piece) for s in found])
    accesses = sum([s.accesses(shape.width, shape.piece) for s in found])
    sectors = requested_bytes(group, found, shape.width, hw)
    ops = moved.operations
    ops["arithmetic"] += accesses + _places(group, fit, shape)
    slots = resident_blocks(shape.threads, shape.registers, shape.smem_bytes, hw)
    return Traffic(
        hbm_bytes=moved.hbm_bytes * shape.waste
        + _wasted(found, moved.hbm_bytes, hw)
        + _missed(fit, hw, shape, slots),
        l2_bytes=moved.l2_bytes,
        operations=ops,
        read_bytes=sum([s.count * s.size for s in found if not s.stored and s.own])
        + shape.reads_again,
        sector_bytes=max(sectors, moved.l2_bytes) + shape.reads_again,
        wavefronts=wavefronts,
        smem_bytes=shape.staged_bytes,
        exchanges=shape.exchanges,
        shuffles=shape.shuffles,
        rounds=shape.rounds,
        blocks=max(1.0, shape.blocks),
        in_flight_bytes=shape.flight_bytes * shape.threads * slots,
        assumed_l2=moved.assumed_l2,
    )


def cuda_resources(group: GroupView, fit: Fit, shape: Shape) -> Resources:
    """The resources of a kernel of that shape."""
    code = CODE_AROUND + INSTRUCTION_BYTES * shape.points * instructions(group)
    return Resources(
        shape.registers,
        shape.smem_bytes,
        shape.threads,
        int(code),
        turns=shape.spills or max(1.0, shape.points),
    )


def instructions(group: GroupView) -> float:
    """Instructions that compute one point of all blocks, loads and stores included."""
    total = float(len(group.inputs) + len(group.outputs))
    for own in index_of(group).facts:
        total += own.instructions
    return total


def _places(group: GroupView, fit: Fit, shape: Shape) -> float:
    """Instructions that find places by division, where reshapes and splits are computed."""
    total = 0.0
    index = index_of(group)
    if not index.divides:
        return total
    for own, count in zip(index.facts, fit.evaluations, strict=True):
        if own.divides and count:
            total += PLACE_INSTRUCTIONS * count / shape.width
    return total


def _wasted(found: tuple[Stream, ...], hbm_bytes: float, hw: HardwareProfile) -> float:
    """Bytes that memory moves beside those asked for: neighbours of what is read a step apart."""
    total = 0.0
    for stream in found:
        if stream.gathered:
            total += stream.count * max(0, hw.sector_bytes - stream.size)
    return min(total, hbm_bytes * 8)


def _missed(fit: Fit, hw: HardwareProfile, shape: Shape, slots: int) -> float:
    """Bytes of later passes that the L2 no longer holds: the rows of all blocks side by side fill
    it.
    """
    if not shape.reads_again:
        return 0.0
    together = shape.reads_again * min(1.0, hw.num_sms * slots / shape.blocks)
    filled = together / (hw.l2_usable_share * hw.l2_bytes)
    return shape.reads_again * (1.0 - 1.0 / (1.0 + filled**hw.l2_residence_exponent))


def power_below(number: float) -> int:
    """The largest power of two that is no larger, one at least."""
    return 1 << max(0, int(math.log2(max(1.0, number))))


def clusters_on_device(cluster: int, blocks: int, hw: HardwareProfile) -> int:
    """Clusters (blocks, if they are of one) that run at a time with `blocks` on a multiprocessor.

    A cluster lies within one group of multiprocessors, of which some have a pair more than
    `sms_per_cluster_group`.
    """
    if cluster <= 2:
        return hw.num_sms * blocks // cluster
    groups = hw.num_sms // hw.sms_per_cluster_group
    return groups * (hw.sms_per_cluster_group * blocks // cluster)
