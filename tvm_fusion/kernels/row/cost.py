"""How long a row kernel takes: an analytic estimate that ranks configurations.

    T = gap + (T_memory^p + T_latency^p + T_issue^p + ...)^(1/p)

T_memory is what moves over HBM or L2 at full bandwidth. T_latency is Little's law from the other
side: the time one block takes from its start to its end, while all multiprocessors are full of
such blocks, times the number of waves. Few or slow blocks leave the memory idle, and it is the
larger of the two. The other terms are the issue slots, the special-function units, the load/store
units and the block scheduler.

That holds while the blocks of a multiprocessor are in different phases. Those of a single wave are
in the same one, and so is a block that has its multiprocessor to itself: their phases add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...cost.analytic import US, Estimate
from ..group.traffic import clusters_on_device
from ..program.program import Program
from .config import WARP, Form, RowConfig
from .work import RowWork, Sweep, row_work

if TYPE_CHECKING:
    from ...config import HardwareProfile

# What a block of a row kernel needs, and how many fit on a multiprocessor.

BASE_REGISTERS = 15
STREAMING_REGISTERS = 24
"""Addresses, coordinates, accumulators; more of them in loops."""
IN_FLIGHT = 32
"""Elements that a single sweep has in registers at a time."""
AHEAD = 48
"""Elements that a thread may hold for the compiler to load shared vectors ahead."""
REGISTER_STEP = 8
"""Registers are given to threads in multiples of this."""
GROUPS = 4
"""In so many groups a thread holds its vectors of a row of symbolic length."""
ENDS = 4
"""Threads that hold the vectors at the ends of a row apart from the others: there are three."""
SPILLED_BYTES = 24
"""Bytes moved for a register too many: it is stored and loaded several times, once a sweep."""
PARTIAL_BYTES = 4 * WARP


@dataclass(frozen=True, slots=True)
class RowResources:
    """Registers a thread, bytes of an element that do not fit into them, shared memory a block,
    blocks that are on the device at a time.
    """

    registers: float
    spilled_bytes: float
    shared_bytes: int
    slots: int


def row_resources(work: RowWork, config: RowConfig, hw: HardwareProfile) -> RowResources:
    """Estimates the resources of a configuration."""
    wanted = wanted_registers(work, config)
    threads = config.threads * config.rows
    limit = registers_limit(config, hw)
    registers = min(wanted, limit)
    given = -(-max(registers, 16) // REGISTER_STEP) * REGISTER_STEP
    spilled = 0.0
    if wanted > limit:
        excess = (wanted - limit) / max(1, elements_a_thread(work, config))
        spilled = SPILLED_BYTES * excess
    shared = PARTIAL_BYTES + ring_bytes(work, config)
    blocks = min(
        hw.max_blocks_per_sm,
        hw.max_threads_per_sm // threads,
        int(hw.registers_per_sm // (given * threads)),
        hw.smem_per_sm_bytes // (shared + hw.smem_reserved_per_block_bytes),
    )
    if config.form is Form.BULK:
        blocks = min(blocks, config.resident)
    slots = clusters_on_device(config.cluster, blocks, hw) * config.cluster
    return RowResources(registers, spilled, shared, slots)


def registers_limit(config: RowConfig, hw: HardwareProfile) -> float:
    """Registers that ptxas may use."""
    blocks = max(1, config.min_blocks)
    share = hw.registers_per_sm // (config.threads * config.rows * blocks)
    return min(hw.max_registers_per_thread, share // REGISTER_STEP * REGISTER_STEP)


def group_of(count: int) -> int:
    """Vectors of a thread of a group, where a thread has `count` for the longest row."""
    return -(-count // GROUPS)


def elements_a_thread(work: RowWork, config: RowConfig) -> int:
    """Columns that a thread holds at a time."""
    if config.form is Form.LOOP:
        return config.unroll * config.width
    return chunks_a_thread(work, config, config.most or work.columns) * config.width


def chunks_a_thread(work: RowWork, config: RowConfig, columns: int) -> int:
    """Vectors of a thread where rows are so long. Of rows of symbolic length that start anywhere,
    the vectors at both ends are apart from the others where a thread holds several.
    """
    threads = config.threads * config.cluster
    found = work.chunks(config.width, threads, columns)
    apart = config.most and work.accesses[config.width].slack
    return found + bool(apart and work.chunks(config.width, threads, config.most) > 1)


def wanted_registers(work: RowWork, config: RowConfig) -> float:
    """Registers without any limit; checked against ptxas on an H200's kernels.

    What a later sweep reads stays in registers, widened (ptxas converts halves once). Of the
    vectors that all rows share, about half are there, packed, while a thread holds little; all of
    them in clusters; and both of the two that windows move together. A single sweep needs no more
    than what is in flight.
    """
    elements = elements_a_thread(work, config)
    if config.form is Form.LOOP:
        return STREAMING_REGISTERS + elements
    if not work.held_again(config.runs_online):
        return BASE_REGISTERS + min(elements, IN_FLIGHT) * work.streamed / 4
    moved = work.accesses[config.width].moved
    held = max(work.streamed / 4, work.kept / 4, 1.0) + moved / 4
    if config.cluster > 1:
        held += work.shared / 4
    elif elements <= AHEAD:
        held += work.shared / 8
    base = STREAMING_REGISTERS if config.form is Form.BULK else BASE_REGISTERS
    return base + elements * held


def ring_bytes(work: RowWork, config: RowConfig) -> int:
    """Shared memory of the rows in flight."""
    if config.form is not Form.BULK:
        return 0
    return config.stages * (work.columns // config.cluster) * work.streamed


def row_time_us(program: Program, config: RowConfig, hw: HardwareProfile) -> Estimate:
    """Predicted time of one launch, and its terms, each alone, in microseconds."""
    work = row_work(program, [config.width], hw.special_slots)
    return estimate_rows(work, config, hw)


def estimate_rows(work: RowWork, config: RowConfig, hw: HardwareProfile) -> Estimate:
    """`row_time_us` for work that is known already."""
    return _Model(work, config, hw).estimate()


LINE_BYTES = 128
RESCALING = 12.0
"""Operations that take running sums to a new maximum."""
STREAMING_EXPONENT = 1.57
"""How far the terms of one sweep of a streaming kernel overlap while all blocks are in it."""
WAVES_TO_DRIFT = 3.64
"""Waves until the blocks of a multiprocessor are in different phases."""
PREFETCHED = 0.5
"""Share of a load that prefetching hides; other warps hide most of it anyway."""
CLUSTER_STARTS = 4.0
"""How many times longer a block of a cluster takes to start than one alone."""
SPECIAL_SLOTS = 4.0
"""Issue slots of a warp in which the special-function unit completes one operation."""


class _Model:
    """One configuration of one program on one device."""

    def __init__(self, work: RowWork, config: RowConfig, hw: HardwareProfile) -> None:
        self.work, self.config, self.hw = work, config, hw
        self.sweeps = work.sweeps(config.runs_online, config.form is not Form.LOOP)
        self.resources: RowResources = row_resources(work, config, hw)
        self.cycle = 1 / (hw.clock_ghz * 1e9)
        self.chunks = chunks_a_thread(work, config, work.columns)
        if config.most:  # what lies beyond the end of the row is predicated within a group
            most = chunks_a_thread(work, config, config.most)
            each = group_of(most)
            self.chunks = min(most, -(-self.chunks // each) * each)
        self.each = self.chunks * config.width
        self.blocks = -(-work.rows // config.rows) * config.cluster
        self.streams = config.form is Form.LOOP or not work.held_again(config.runs_online)
        self.warps = max(1, config.threads * config.rows // WARP)
        self.slots = self.resources.slots
        self.waves = self.blocks / max(1, self.slots)
        self.apart = self._apart()

    def _apart(self) -> float:
        """How far blocks of one multiprocessor are in different phases, 0 to 1. One that has it to
        itself never overlaps with another; within a single sweep the warps of a block do not wait
        for one another either.
        """
        if self.config.form is Form.LOOP and self.single_sweep:
            return 1.0
        drifted = min(1.0, max(0.0, self.waves - 1.0) / WAVES_TO_DRIFT)
        return drifted * (1.0 - 1.0 / max(1.0, self.slots / self.hw.num_sms))

    @property
    def single_sweep(self) -> bool:
        """Whether the row is gone over once."""
        return sum(1 for sweep in self.sweeps if sweep.streamed or sweep.stored) == 1

    def estimate(self) -> Estimate:
        hw, work = self.hw, self.work
        elements = work.rows * work.columns
        balance = self._balance()
        arithmetic, special = self._operations()
        once, again = self._bytes()
        lane_share = self._lane_share()
        terms = {
            "hbm": once / hw.hbm_bytes_per_s * self._loss(),
            "l2": (once + again) / hw.l2_bytes_per_s,
            "sm": balance * (once + again) / (hw.num_sms * hw.sm_bytes_per_s),
            "issue": balance * elements * arithmetic * lane_share / (hw.fma_per_s_f32 / 2),
            "special": balance * elements * special * lane_share / hw.special_per_s,
            "access": balance * self._wavefronts(lane_share) / hw.wavefronts_per_s,
            "blocks": self._started_blocks() / self._start_rate(),
            "latency": self._latency(),
        }
        body = self._combined(terms)
        terms["spill"] = elements * self.resources.spilled_bytes / hw.l2_bytes_per_s
        body += self._tail() + terms["spill"]
        shown = {name: t * US for name, t in terms.items() if t > 0}
        shown["gap"] = hw.kernel_gap_us
        return Estimate(body * US + hw.kernel_gap_us, shown)

    def _combined(self, terms: dict[str, float]) -> float:
        """All terms overlap among many waves of blocks. The blocks of a single wave do the same at
        a time: only what they stream overlaps with what they compute. Their starts come on top.
        """
        memory = max(terms[name] for name in ("hbm", "l2", "sm"))
        busy = max(terms[name] for name in ("issue", "special", "access"))
        parts = [memory, busy, terms["blocks"], terms["latency"]]
        together = _norm(parts, self.hw.row_exponent)
        if self.config.form is Form.LOOP:
            alone = self._in_turns(memory, busy)
        elif self.streams:
            steps = -(-self.each // self._in_flight(self.sweeps[0]))
            alone = _norm(parts, STREAMING_EXPONENT) + busy / steps
        else:
            alone = terms["latency"] + busy
        alone += terms["blocks"]
        return self.apart * together + (1.0 - self.apart) * max(alone, together)

    def _in_turns(self, memory: float, busy: float) -> float:
        """LOOP: one sweep after the other, each bound by what it moves, computes or waits for."""
        sweeps = [s for s in self.sweeps if s.streamed or s.stored] or self.sweeps[:1]
        moved = [float(s.stored) for s in sweeps]
        moved[0] += self.work.streamed
        computed = [s.arithmetic + SPECIAL_SLOTS * s.special for s in sweeps]
        waves = self._waves()
        start = self.hw.block_start_s + self.work.lookups * self.hw.memory_latency_s
        time = waves * start
        for order, sweep in enumerate(sweeps):
            parts = [
                memory * moved[order] / max(1.0, sum(moved)),
                busy * computed[order] / max(1.0, sum(computed)),
                waves * (self._streamed(sweep, order == 0) + self._exchange(sweep)),
            ]
            time += _norm(parts, STREAMING_EXPONENT)
        return time

    # ---- throughput

    def _loss(self) -> float:
        """HBM time over that at full bandwidth: the blocks of a cluster wait for one another
        between sweeps.
        """
        exchanges = self.work.held_again(self.config.runs_online)
        if not exchanges or self.config.form is Form.BULK:
            return 1.0
        return 1.0 + self.hw.cluster_loss * math.log2(self.config.cluster)

    def _started_blocks(self) -> float:
        return min(self.blocks, self.slots) if self.config.form is Form.BULK else self.blocks

    def _start_rate(self) -> float:
        """Blocks that start in a second; those of a cluster do together."""
        return self.hw.blocks_per_s / (1.0 if self.config.cluster == 1 else CLUSTER_STARTS)

    def _balance(self) -> float:
        """Work of the busiest multiprocessor over that of the average one."""
        blocks = self._started_blocks()
        mean = blocks / self.hw.num_sms
        return math.ceil(mean) / mean if mean < 1 else 1 + 0.5 * (math.ceil(mean) / mean - 1)

    def _lane_share(self) -> float:
        """Columns that the threads walk over for each column of the row."""
        return self.each * self.config.threads * self.config.cluster / self.work.columns

    def _operations(self) -> tuple[float, float]:
        """Instructions and special slots of an element."""
        accesses = self.work.accesses[self.config.width]
        arithmetic = sum(s.arithmetic for s in self.sweeps) + accesses.count + accesses.moves
        special = sum(s.special for s in self.sweeps)
        if self.config.form is Form.LOOP:
            # each step rescales what runs along to the maximum so far
            steps = sum(s.running for s in self.sweeps) / (self.config.unroll * self.config.width)
            arithmetic += RESCALING * steps
            special += steps
        return arithmetic, special

    def _wavefronts(self, lane_share: float) -> float:
        """Passes through the load/store units: 128 bytes, one line of memory."""
        accesses = self.work.accesses[self.config.width]
        moves = [*accesses.shared, *accesses.loads, *accesses.stores]
        if self.config.form is Form.LOOP:
            moves += list(accesses.loads) * (sum(1 for s in self.sweeps if s.streamed) - 1)
        each = sum(count * self._passes(count, piece) / WARP for count, piece in moves)
        return self.work.rows * (self.work.columns * each * lane_share + accesses.single)

    def _passes(self, count: float, piece: int) -> float:
        """Passes of a warp's load of pieces of so many bytes, `count` for an element: what it reads
        of several rows is in lines of their own, unless a row's pieces are in several lines as it
        is. They lie apart where a thread has several of its vector's place.
        """
        threads = min(WARP, self.config.threads)
        apart = count * piece * self.config.width / LINE_BYTES
        rows = WARP // threads * max(1.0, threads * apart) / max(1.0, WARP * apart)
        return max(1.0, piece * WARP / LINE_BYTES) * rows

    def _bytes(self) -> tuple[float, float]:
        """Bytes that HBM moves, and those that only the L2 does."""
        work, config, hw = self.work, self.config, self.hw
        elements = work.rows * work.columns
        once = elements * (work.streamed - work.reread + work.stored)
        once += work.rows * work.row_bytes
        once += work.columns * work.shared
        blocks = self.slots / hw.num_sms
        again = elements * work.shared / config.rows
        again *= _missed(work.columns * work.shared / config.cluster, hw.smem_per_sm_bytes)
        again += elements * work.reread
        if config.form is not Form.LOOP:
            return once, again
        repeated = elements * max(0, sum(s.streamed for s in self.sweeps) - work.streamed)
        row = work.columns * (work.streamed + work.stored)
        rows = min(work.rows, self.slots / config.cluster)
        own = work.columns * work.streamed / config.cluster
        outside = repeated * _missed(own * blocks, hw.smem_per_sm_bytes)
        missed = _missed(rows * row, hw.row_l2_share * hw.l2_bytes)
        return once + missed * outside, again + outside

    # ---- latency

    def _latency(self) -> float:
        """Waves of blocks, each as long as one block takes."""
        config, hw = self.config, self.hw
        if config.form is Form.BULK:
            turns = math.ceil(self.waves)
            load = hw.memory_latency_s
            rest = self._chain(loads=False)
            service = self._service()
            turn = max(load, rest) + 0.5 * service if config.stages > 1 else load + rest + service
            return self.hw.block_start_s + load + turns * turn
        waves = self._waves()
        time = waves * (self.hw.block_start_s + self._chain(loads=True) + self._idle())
        if config.cluster > 1:
            # the next cluster waits until all its places are free
            time += (waves - 1.0) * hw.cluster_start_s
        return time

    def _waves(self) -> float:
        """Waves of blocks, of which the last need not be full."""
        whole, waves = math.ceil(self.waves), max(1.0, self.waves)
        return waves + min(1.0, self.hw.wave_rounding / whole) * (whole - waves)

    def _idle(self) -> float:
        """What the memory takes for a block that cannot compute meanwhile: it holds its row."""
        if self.streams:
            return self._service() / self.warps
        # the blocks of the first wave load at the same time, later ones at their own
        blocks = self.slots / self.hw.num_sms
        return self._service() / max(1.0, 1.0 + (blocks - 1.0) * self.apart)

    def _service(self) -> float:
        """Time that the memory takes for the bytes of one block, shared by all multiprocessors."""
        once, again = self._bytes()
        hw, blocks = self.hw, self.blocks
        hbm = once / blocks * min(hw.num_sms, blocks) / hw.hbm_bytes_per_s
        return max(hbm, (once + again) / blocks / hw.sm_bytes_per_s)

    def _chain(self, loads: bool) -> float:
        """Time of one block from its first load to its last store, alone on the device."""
        config, hw, work = self.config, self.hw, self.work
        time = work.lookups * hw.memory_latency_s
        if config.form is Form.LOOP:
            fresh = True
            for sweep in self.sweeps:
                time += self._streamed(sweep, fresh) + self._exchange(sweep)
                fresh = fresh and not sweep.streamed
            return time
        time += hw.memory_latency_s if loads else 0.0
        if loads and not work.held_again(config.runs_online):
            # the compiler moves no loads over stores
            rounds = math.ceil(self.each * work.streamed / hw.thread_bytes_in_flight)
            rounds = self.chunks if work.stored else rounds
            time += (rounds - 1) * hw.memory_latency_s
        for sweep in self.sweeps:
            time += self.each * self._thread_operations(sweep.arithmetic, sweep.special)
            time += self._exchange(sweep)
        return time + self.each * self._thread_operations(work.accesses[config.width].count)

    def _thread_operations(self, arithmetic: float, special: float = 0.0) -> float:
        """Time of a thread's operations when its warp has the scheduler for itself."""
        return (arithmetic + special) * self.hw.warp_issue_cycles * self.cycle

    def _streamed(self, sweep: Sweep, fresh: bool) -> float:
        """LOOP: one pass over the row; only the first finds nothing of it in a cache."""
        config, hw = self.config, self.hw
        if not (sweep.streamed or sweep.stored):
            return 0.0
        elements = self._in_flight(sweep)
        steps = max(1, -(-self.each // elements))
        elements = min(elements, self.each)
        work = elements * self._thread_operations(sweep.arithmetic, sweep.special)
        load = hw.memory_latency_s if fresh else hw.l2_latency_s
        if config.prefetch:
            return steps * (load + work) - (steps - 1) * PREFETCHED * min(load, work)
        return steps * (load + work)

    def _in_flight(self, sweep: Sweep) -> int:
        """Elements that a thread loads at a time: those of one step, or of some unrolled ones."""
        config = self.config
        elements = config.unroll * config.width
        if config.form is not Form.LOOP or config.prefetch:
            return elements
        if sweep.running or sweep.stored:
            return elements
        return max(elements, int(self.hw.thread_bytes_in_flight / max(1, sweep.streamed)))

    def _exchange(self, sweep: Sweep) -> float:
        """Partial results of threads -> results of the row."""
        config, hw = self.config, self.hw
        if not sweep.reductions:
            return 0.0
        shuffles = sweep.reductions * int(math.log2(min(WARP, config.threads)))
        partials = config.threads * config.cluster // WARP
        time = 0.0
        if partials > 1:
            shuffles += sweep.reductions * (2 + min(5, int(math.log2(partials))))
            time = hw.barrier_s
            if config.cluster > 1:
                time = hw.cluster_barrier_s + hw.remote_store_s * partials * sweep.reductions
        return time + shuffles * hw.shuffle_s

    def _tail(self) -> float:
        """What the last blocks leave idle, where the memory is the limit."""
        if self.config.form is Form.BULK:
            return 0.0
        return self.hw.row_tail * self._chain(loads=True) * min(1.0, self.waves)


def _norm(values: Iterable[float], exponent: float) -> float:
    values = list(values)
    largest = max(values)
    return largest * sum((v / largest) ** exponent for v in values) ** (1 / exponent)


def _missed(size: float, cache: float) -> float:
    """Share of `size` bytes, read again and again, that a cache does not hold."""
    return max(0.0, 1.0 - cache / size) if size else 0.0
