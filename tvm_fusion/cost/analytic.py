"""Tier 1 of the cost model: an analytic estimate of one launch from what it moves and executes.

    T = T_launch + gap + (sum_i T_i^p)^(1/p) + tail

over the terms T_i, each of which would be the time if nothing else mattered. Of the terms of one
way (memory) and of the units behind one issue port only the largest shows:

    hbm, l2       bytes over bandwidth
    flight        bytes over what the loads in flight sustain (Little's law)
    sm            sectors between the multiprocessors and the L2
    access        wavefronts of the load/store units;     smem   bytes of shared memory
    arithmetic, special, integer, conversion, tensor    operations over the unit's rate
    blocks        thread blocks that have to be started
    latency       waves of blocks, each as long as one block takes from its first load to its last
                  store: loads that wait for one another, exchanges, dependent instructions
    spill         registers that do not fit, out and back
    code          instructions that no cache holds

p is `roofline_exponent` of the device (infinity would be the classical roofline max(T_i) of
Williams et al., CACM 52(4), 2009) where blocks come in many waves and are in different phases;
those of a single wave do the same at a time, and their terms overlap little
(`single_wave_exponent`), unless they loop: in many rounds of loads warps get out of step, too. The
tail is what the last blocks leave idle. Terms that belong to a multiprocessor count for the busiest
one. All rates come from the hardware profile. A kernel class that predicts the time of its launches
itself (`Traffic.seconds`) is only charged the launch on top. CPUs have a formula of their own
(below).

One formula computes single estimates (on floats) and many at a time (on arrays).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import HardwareProfile

if TYPE_CHECKING:
    from .traffic import Resources, Traffic

# The analytic estimate of a launch on a CPU.
#
#     T = min(T_one_core, T_all_cores)        T_n = T_start(n) + (M_n^p + C_n^p)^(1/p)
#
# M is the way of the data: bytes that a cache still holds at the rate of the last-level cache, the
# others at that of the memory. A launch finds its inputs there, and the pages of its outputs, where
# all that it touches fits: a CPU's cache is large beside most kernels, and calls follow each other.
# Conversions of half precision come with loads and stores, so that the slower of both shows.
# C adds up what the instructions take: on a CPU loads aside all of them share the vector ports. p
# (`roofline_exponent`) says how far both overlap, T_start what it takes to call a kernel
# (`kernel_gap_us`) and, on all cores, to wake them (`launch_us`).
#
# Does not handle: weights that a launch finds in the cache or not depending on how much the rest of
# the model reads between two calls.

COMPUTING = ("arithmetic", "special", "integer", "tensor")
"""Terms of instructions that the operators of a group need, together or apart."""


def cpu_terms(traffic: Traffic, hw: HardwareProfile) -> tuple[dict[str, float], float]:
    """What a launch is made of, each term alone, and all of it, in seconds; "launch" among them.

    Parameters
    ----------
    traffic : Traffic
    hw : HardwareProfile
    """
    cores = max(1, hw.num_sms)
    terms = _cpu_terms(traffic, hw)
    filled = max(1.0 / cores, min(1.0, traffic.parallel))
    call, wake = hw.kernel_gap_us * 1e-6, hw.launch_us * 1e-6
    alone = {name: t * cores for name, t in terms.items()}
    alone["hbm"] = terms["hbm"]  # a core asks for nearly all that the memory gives
    together = {name: t / filled for name, t in terms.items()}
    one, all_cores = call + _body(alone, hw), call + wake + _body(together, hw)
    found, start = (alone, call) if one <= all_cores else (together, call + wake)
    return {**found, "launch": start}, min(one, all_cores)


def _cpu_terms(traffic: Traffic, hw: HardwareProfile) -> dict[str, float]:
    """Seconds on all cores, by resource."""
    ops: Mapping[str, Any] = traffic.operations
    size = max(traffic.l2_bytes, traffic.sector_bytes)
    held = resident(traffic.l2_bytes, hw)
    rate = hw.tensor_flop_per_s.get(traffic.tensor_dtype, hw.fma_per_s_f32)
    special = ops.get("special", 0.0) + ops.get("division", 0.0)
    return {
        "hbm": (1.0 - held) * size / hw.hbm_bytes_per_s,
        "l2": held * size / hw.l2_bytes_per_s,
        "arithmetic": ops.get("arithmetic", 0.0) * 2.0 / hw.fma_per_s_f32,
        "special": special / hw.special_per_s,
        "integer": ops.get("integer", 0.0) / hw.int_div_per_s,
        "conversion": ops.get("conversion", 0.0) / hw.conversion_per_s,
        "tensor": traffic.tensor_flops / (rate * traffic.tensor_efficiency),
    }


def resident(size: float, hw: HardwareProfile) -> float:
    """Share of `size` bytes, touched one after the other, that the last-level cache still holds the
    next time.
    """
    filled = size / (hw.l2_usable_share * hw.l2_bytes)
    return 1.0 / (1.0 + filled**hw.l2_residence_exponent)


def _body(terms: Mapping[str, float], hw: HardwareProfile) -> float:
    """Data and instructions, as far as they do not overlap."""
    moving = max(terms["hbm"] + terms["l2"], terms["conversion"])
    computing = sum(terms[name] for name in COMPUTING)
    most = max(moving, computing)
    if most <= 0.0:
        return 0.0
    p = hw.roofline_exponent
    return most * ((moving / most) ** p + (computing / most) ** p) ** (1.0 / p)


US = 1e6
REGISTER_STEP = 8
"""Registers are given to threads in multiples of this."""
LEAST_REGISTERS = 16
ROUNDS_A_WAVE = 8.0
"""Rounds of loads, between two exchanges, in which the warps of a block get as far out of step as
blocks do in one wave. Fitted to the column kernels of tests/data/kernels_h200.jsonl: with 4 their
errors are larger, with 16 those of sums over 4096 steps and more."""
SPILL_BYTES = 8
"""A register too many is stored and loaded, 4 bytes each."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted time of one launch in microseconds.

    Attributes
    ----------
    time_us : the prediction, launch included
    terms : what it is made of, each alone, in microseconds
    analytic_us : the analytic model's own time, before the learned residual; None if there is none
    low_us, high_us : interval that holds the measured time as often as the residual's coverage
        says; None without a residual
    computing_us : of a launch on a CPU, what its instructions take: the same loops compute an
        operator in whatever group it stands. 0 on other devices
    """

    time_us: float
    terms: Mapping[str, float] = field(hash=False)
    analytic_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    computing_us: float = 0.0

    @property
    def dominant(self) -> str:
        return max(self.terms, key=lambda k: (self.terms[k], k))

    @property
    def body_us(self) -> float:
        """The time without the launch itself."""
        return self.time_us - self.terms.get("launch", 0.0)


def launch_us(hw: HardwareProfile, launch: str) -> float:
    """What one launch costs by itself, in a stream or as a node of a CUDA graph."""
    return hw.graph_launch_us if launch == "graph" else hw.launch_us


EARLY_SAVED = 0.5
"""Share of the gap between kernels of a CUDA graph that an early launch saves: 0.51 us a kernel of
eight blocks of one token, 0.74 of a decode layer, on an H100 whose gap is taken for 1.3."""
EARLY_COST = 0.05
"""Share of its time that a kernel may lose by it (loads that are taken for constant become plain
ones): the 54 kernels of ResNet-50, 14.5 us each, lost 0.08 us
each beside the gap that was saved, on an H200."""


def pays_early(body_us: float, hw: HardwareProfile) -> bool:
    """Whether a kernel that takes `body_us` without its launch is to be launched before the one in
    front of it has ended (`runtime.build.early_launches`).
    """
    return body_us * EARLY_COST <= EARLY_SAVED * hw.graph_launch_us


def estimate(
    traffic: Traffic, resources: Resources, hw: HardwareProfile, launch: str = "stream"
) -> Estimate:
    """Predicts the time of one launch.

    Parameters
    ----------
    traffic : Traffic
        Bytes and operations of the whole launch.
    resources : Resources
        What a thread and its block need; decides how many blocks run side by side.
    hw : HardwareProfile
    launch : {"stream", "graph"}

    Returns
    -------
    Estimate
    """
    if hw.kind == "llvm":
        found, seconds = cpu_terms(traffic, hw)
        shown = {name: t * US for name, t in found.items() if t > 0}
        computing = sum(shown.get(name, 0.0) for name in COMPUTING)
        return Estimate(seconds * US, shown, computing_us=computing)
    if not traffic.launches:
        return Estimate(0.0, {})
    start = launch_us(hw, launch)
    if traffic.seconds is not None:
        shown = {name: seconds * US for name, seconds in traffic.terms.items() if seconds > 0}
        shown["launch"] = start
        return Estimate(traffic.seconds * US + start, shown)
    terms, rest, exponent = _terms(_inputs(traffic, resources, hw), hw, _FLOATS)
    body = _combined(_groups(terms, max), exponent, max)
    shown = {name: t * US for name, t in terms.items() if t > 0}
    shown |= {name: t * US for name, t in rest.items() if t > 0}
    shown["launch"] = start
    return Estimate((body + sum(rest.values())) * US + start, shown)


def estimate_many(
    launches: Sequence[tuple[Traffic, Resources]], hw: HardwareProfile, launch: str = "stream"
) -> np.ndarray:
    """`estimate(...).time_us` of many launches at once.

    Parameters
    ----------
    launches : sequence of (Traffic, Resources)
    hw : HardwareProfile
    launch : {"stream", "graph"}

    Returns
    -------
    numpy.ndarray
        Microseconds, float64 of shape [len(launches)].
    """
    if hw.kind == "llvm":
        return np.array([cpu_terms(traffic, hw)[1] * US for traffic, _ in launches])
    if not launches:
        return np.zeros(0)
    rows = np.array([_inputs(traffic, resources, hw) for traffic, resources in launches])
    terms, rest, exponent = _terms(tuple(rows.T), hw, _ARRAYS)
    body = _combined(_groups(terms, np.maximum), exponent, np.maximum)
    own = np.array([math.nan if t.seconds is None else t.seconds for t, _ in launches])
    seconds = np.where(np.isnan(own), body + sum(rest.values()), own)
    starts = np.array([launch_us(hw, launch) if t.launches else 0.0 for t, _ in launches])
    return seconds * US + starts


def resident_blocks(threads: int, registers: int, smem_bytes: int, hw: HardwareProfile) -> int:
    """Blocks that a multiprocessor holds at a time, one at least: `_resident` in whole numbers."""
    threads = max(threads, 1)
    given = -(-max(registers, LEAST_REGISTERS) // REGISTER_STEP) * REGISTER_STEP
    smem = smem_bytes + hw.smem_reserved_per_block_bytes + 1
    room = hw.max_threads_per_sm // threads, hw.registers_per_sm // (given * threads)
    return max(1, int(min(*room, hw.smem_per_sm_bytes // smem, hw.max_blocks_per_sm)))


# ---- the formula


@dataclass(frozen=True, slots=True)
class _Math:
    """The functions of the formula, on floats or on arrays."""

    low: Callable[[Any, Any], Any]
    high: Callable[[Any, Any], Any]
    ceil: Callable[[Any], Any]
    floor: Callable[[Any], Any]


_FLOATS = _Math(min, max, math.ceil, math.floor)
_ARRAYS = _Math(np.minimum, np.maximum, np.ceil, np.floor)


def _inputs(traffic: Traffic, resources: Resources, hw: HardwareProfile) -> tuple[float, ...]:
    """The numbers of the formula, in the order in which `_terms` takes them."""
    ops = traffic.operations
    threads = resources.threads
    limit = hw.max_registers_per_thread
    if threads:
        limit = min(limit, hw.registers_per_sm // threads // REGISTER_STEP * REGISTER_STEP)
    spilled = resources.spill_bytes
    if spilled is None:
        excess = 0 if hw.kind == "llvm" else resources.registers_per_thread - limit
        spilled = SPILL_BYTES * max(0, excess) * resources.turns
    tensor_rate = hw.tensor_flop_per_s.get(traffic.tensor_dtype, hw.fma_per_s_f32)
    return (
        traffic.hbm_bytes,
        traffic.l2_bytes,
        ops.get("arithmetic", 0.0),
        ops.get("special", 0.0),
        ops.get("division", 0.0),
        ops.get("integer", 0.0),
        ops.get("conversion", 0.0),
        traffic.tensor_flops / (tensor_rate * traffic.tensor_efficiency),
        max(traffic.parallel, 1e-6),
        traffic.sector_bytes,
        traffic.wavefronts,
        traffic.smem_bytes,
        traffic.exchanges,
        traffic.shuffles,
        traffic.rounds,
        traffic.blocks,
        traffic.in_flight_bytes,
        traffic.read_bytes,
        float(min(resources.registers_per_thread, limit)),
        float(resources.smem_bytes),
        float(threads),
        float(max(0.0, resources.code_bytes - hw.instruction_cache_bytes)),
        float(spilled),
    )


def _terms(
    inputs: tuple, hw: HardwareProfile, m: _Math
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """The terms that overlap, those that come on top, in seconds; and p."""
    hbm, l2, arithmetic, special, division, integer, conversion, tensor = inputs[:8]
    parallel, sectors, wavefronts, smem, exchanges, shuffles, rounds, blocks = inputs[8:16]
    in_flight, reads, registers, smem_block, threads, code, spilled = inputs[16:]
    sms = hw.num_sms
    known = m.low(blocks, 1.0)  # 0 where nothing is known of blocks, else 1
    resident = _resident(threads, registers, smem_block, hw, m)
    slots = sms * resident
    waves = m.high(blocks / slots, 1e-9)
    mean = m.high(blocks / sms, 1e-9)
    whole = m.ceil(mean) / mean
    # work of the busiest multiprocessor over that of the average one
    few = m.low(1.0, m.ceil(m.high(0.0, 1.0 - mean)))
    busiest = few * whole + (1.0 - few) * (1.0 + hw.wave_balance * (whole - 1.0))
    busiest = (1.0 - known) / parallel + known * busiest
    issued = arithmetic + special + division + integer
    issue = 2.0 / hw.fma_per_s_f32
    all_threads = m.high(blocks * threads, 1.0)
    block = (
        hw.block_start_s
        + rounds * hw.memory_latency_s
        + exchanges * hw.barrier_s
        + shuffles * hw.shuffle_s
        + (issued + conversion) / all_threads * hw.warp_issue_cycles / (hw.clock_ghz * 1e9)
    )
    turns = m.ceil(waves)
    full = m.high(1.0, waves)
    full = full + m.low(1.0, hw.wave_rounding / turns) * (turns - full)
    flying = m.high(in_flight * sms * m.low(1.0, waves), 1.0)
    flight = (
        m.low(in_flight, 1.0) * m.high(0.0, reads - flying) * hw.bytes_in_flight_latency_s / flying
    )
    terms = {
        "hbm": hbm / hw.hbm_bytes_per_s * ((1.0 - known) / parallel + known),
        "l2": m.high(l2, sectors) / hw.l2_bytes_per_s * ((1.0 - known) / parallel + known),
        "flight": flight,
        "sm": busiest * sectors / (sms * hw.sm_bytes_per_s),
        "access": busiest * wavefronts / hw.wavefronts_per_s,
        "smem": busiest * smem / hw.smem_bytes_per_s,
        "arithmetic": busiest * issued * issue,
        "special": busiest * (special + division) / hw.special_per_s,
        "integer": busiest * integer / hw.int_div_per_s,
        "conversion": busiest * conversion / hw.conversion_per_s,
        "tensor": tensor,
        "blocks": blocks / hw.blocks_per_s,
        "latency": known * full * block,
    }
    rest = {
        "gap": known * hw.kernel_gap_us / US,
        "tail": known * hw.row_tail * block * m.low(1.0, waves),
        "spill": busiest * all_threads * spilled / hw.spill_bytes_per_s,
        "code": code * m.high(blocks, 1.0) / sms / hw.code_bytes_per_s,
    }
    steps = m.high(waves, rounds / (ROUNDS_A_WAVE * (1.0 + exchanges)))
    apart = m.low(1.0, m.high(0.0, steps - 1.0) / hw.waves_to_drift)
    apart = 1.0 - known + known * apart
    alone = hw.single_wave_exponent
    return terms, rest, alone + apart * (hw.roofline_exponent - alone)


def _resident(threads: Any, registers: Any, smem: Any, hw: HardwareProfile, m: _Math) -> Any:
    """Blocks side by side on a multiprocessor."""
    threads = m.high(threads, 1.0)
    given = m.ceil(m.high(registers, LEAST_REGISTERS) / REGISTER_STEP) * REGISTER_STEP
    blocks = m.low(hw.max_threads_per_sm / threads, hw.registers_per_sm / (given * threads))
    blocks = m.low(blocks, hw.smem_per_sm_bytes / (smem + hw.smem_reserved_per_block_bytes + 1.0))
    return m.high(1.0, m.floor(m.low(blocks, float(hw.max_blocks_per_sm))))


_MEMORY = ("hbm", "l2", "flight", "sm")
_BUSY = ("access", "smem", "arithmetic", "special", "integer", "conversion", "tensor")


def _groups(terms: dict[str, Any], high: Callable[[Any, Any], Any]) -> list[Any]:
    """What bounds the way of the data, what bounds the units of a multiprocessor, and the rest."""
    groups = []
    for names in (_MEMORY, _BUSY):
        largest = terms[names[0]]
        for name in names[1:]:
            largest = high(largest, terms[name])
        groups.append(largest)
    return [*groups, terms["blocks"], terms["latency"]]


def _combined(terms: Any, exponent: Any, high: Callable[[Any, Any], Any]) -> Any:
    """(sum T_i^p)^(1/p), of the terms over the largest one."""
    largest = 1e-15
    for term in terms:
        largest = high(largest, term)
    return largest * sum((term / largest) ** exponent for term in terms) ** (1.0 / exponent)
