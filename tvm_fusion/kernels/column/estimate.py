"""The estimated time of one configuration of a column kernel.

    time = bytes / (bandwidth * rate) + exchanges
    rate = smooth minimum of  share of the moved sectors that is used
                              bytes in flight / (bandwidth * latency)
                              what the multiprocessors that have blocks can take

for the full waves of blocks and for the last, partial one. The constants are fitted to
tests/data/column_sweep_h200.json.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import tvm_ffi
from tvm.ir import Call, Expr, Var

from ...cost.liveness import held_between, peak_live
from ..program.expr import bytes_of, dtype_of, variables
from ..program.online import merge_online
from ..program.program import Element, Level, Program
from ..row.steps import kept_values
from .config import ColumnConfig, Form
from .lanes import Lanes, is_transposed, main_bytes

if TYPE_CHECKING:
    from ...config import HardwareProfile

# What the time of a column kernel depends on, as numbers: made from a program by the writer, from
# the sizes of a group by the planner, so that both rank configurations alike.

ASSUMED_ROWS = 4096  # where the number of rows is symbolic
ASSUMED_COLUMNS = 4096
REGISTER_BYTES = 4
LOADED = 0.5  # registers of a float16 that waits in a vector; compilers widen others for good
PACKED = 0.6  # the same while some are being widened


@dataclass(frozen=True, slots=True)
class ColumnWork:
    """A program with its lanes laid out.

    Attributes
    ----------
    rows : extents of the rows; an assumed one where an extent is symbolic
    known : whether the last of them is known
    columns : reduced elements of a row
    along_rows, inner : see `lanes`
    transposed : no access runs along the rows
    width : elements of the widest vectors
    element : bytes of the narrowest element that moves with the steps
    moving, still, stored : bytes of a point that are loaded at every step, loaded once, stored
    reductions, partial_bytes : how many, and bytes of one partial result of each
    phases, merged : of reductions that wait for one another, and with sums of exponentials run
        along with their maximum
    sweeps : passes over the columns where nothing is held
    loaded : registers of a point that is held as it was loaded
    held : registers of a point between two sweeps: what was loaded, or computed at a cost, before
        and is read after
    online : the same between a maximum and the sum that runs along with it; 0 without
    kept : registers of a point for temporaries that are kept on purpose
    live : values of a point that are live at once while it is computed
    """

    rows: tuple[int, ...]
    columns: int
    along_rows: bool = True
    inner: int = 1
    transposed: bool = False
    known: bool = True
    width: int = 1
    element: int = 4
    moving: int = 4
    still: int = 0
    stored: int = 0
    reductions: int = 1
    partial_bytes: int = 4
    phases: int = 1
    merged: int = 1
    sweeps: int = 1
    loaded: float = 1.0
    held: float = 1.0
    online: float = 0.0
    kept: float = 0.0
    live: int = 2


def work_of(program: Program, lanes: Lanes) -> ColumnWork:
    """The numbers of a program for one way to lay the lanes."""
    merged = merge_online(program)
    loads = lanes.loads.values()
    still = sum(bytes_of(v.dtype) for v in loads if not v.moves)
    read, stored = main_bytes(program)
    sizes = [bytes_of(v.dtype) for v in loads if v.moves]
    kept = sum(bytes_of(dtype_of(v)) / REGISTER_BYTES for v in kept_values(program))
    moving, packed = read - still, _packed(lanes)
    sources, weights = _values(program, packed)
    roots = _roots((r.phase, r.body) for r in program.reductions)
    roots += _roots((o.phase, o.value) for o in program.outputs if o.full)
    return ColumnWork(
        tuple(e if isinstance(e, int) else ASSUMED_ROWS for e in program.rows),
        program.columns if isinstance(program.columns, int) else ASSUMED_COLUMNS,
        lanes.along_rows,
        lanes.inner,
        is_transposed(program),
        all(isinstance(e, int) for e in program.rows[-1:]),
        lanes.width,
        min(sizes, default=max(1, read)),
        moving,
        still,
        stored,
        len(program.reductions),
        sum(bytes_of(reduction.dtype) for reduction in program.reductions),
        program.phases,
        merged.phases,
        _sweeps(merged),
        sum(LOADED if v.dtype == "float16" else 1.0 for v in loads if v.moves),
        held_between(sources, roots, weights),
        _online(merged, packed),
        kept,
        peak_live(sources, tuple(var for _, wanted in roots for var in wanted)),
    )


def _sweeps(merged: Program) -> int:
    """Passes over the columns when nothing is held."""
    return merged.phases + any(o.full and o.phase == merged.phases for o in merged.outputs)


def _roots(found: Iterable[tuple[int, Expr]]) -> list[tuple[int, tuple[Var, ...]]]:
    """Sweeps with the values that they end in."""
    return [(sweep, tuple(variables(expr))) for sweep, expr in found]


def _online(merged: Program, packed: frozenset[Var]) -> float:
    """Between the maxima of a group of steps and the sums that run along with them."""
    running = [r for r in merged.reductions if r.online is not None]
    if not running:
        return 0.0
    roots = _roots((0, r.body) for r in merged.reductions if r.online is None)
    roots += _roots((1, r.body) for r in running)
    sources, weights = _values(merged, packed)
    return held_between(sources, roots, weights)


def _packed(lanes: Lanes) -> frozenset[Var]:
    """Loads that stay two in a register until they are used."""
    return frozenset(
        var for var, v in lanes.loads.items() if v.dtype == "float16" and v.piece >= REGISTER_BYTES
    )


def _values(
    program: Program, packed: frozenset[Var]
) -> tuple[dict[Var, tuple[Var, ...]], dict[Var, float | None]]:
    """What a point is computed from, and the registers of each; None for what is cheap."""
    sources: dict[Var, tuple[Var, ...]] = {}
    weights: dict[Var, float | None] = {}
    for item in (*program.tiles, *program.elements):
        if not isinstance(item, Element) or program.level(item.var) == Level.ELEMENT:
            sources[item.var] = ()
            weights[item.var] = PACKED if item.var in packed else _registers(item.dtype)
    for value in program.values:
        if program.level(value.var) == Level.ELEMENT:
            calls: list[Expr] = []
            tvm_ffi.structural_walk(value.body, [(Call, calls.append)])
            sources[value.var] = tuple(variables(value.body))
            weights[value.var] = _registers(dtype_of(value.var)) if calls else None
    return sources, weights


def _registers(dtype: str) -> float:
    return max(1.0, bytes_of(dtype) / REGISTER_BYTES)


STATIC_SHARED_BYTES = 49152  # CUDA C++ Programming Guide: shared memory of a block without opt-in
REGISTER = 4
LEAST_REGISTERS = 8  # addresses, counters, and a value on its way, for which nothing is left
FEW_LIVE = 2  # values of a point that are live at once, for which those are enough
BASE_REGISTERS = 32  # addresses, coordinates, loop counters
PLACE_REGISTERS = 4  # the places of a vector along the columns, loaded and stored
BYTES_A_STEP = 128  # a thread's loads in flight: beyond, registers cost more than latency
FREE_BYTES = 64  # a thread's loads in flight in the 32 registers that ptxas takes without a demand
SOFTNESS = 6.0  # exponent of the smooth minimum of what bounds the rate
CROWD = 0.15  # exponent of the loss where one sweep has more in flight than the memory can take
SM_SHARE = 1.7  # of its share of the bandwidth, what one multiprocessor can take
SHORT_RUN = 0.85  # of the bandwidth, for runs of a single sector
RUN_BYTES = 2.0  # bytes' worth of time that each run costs beside its own
START_S = 2e-9  # until the next block of the first wave starts
ELEMENT_S = 2.5e-9  # an element of a thread's last vectors, when nothing is left to load
EXCHANGE_S = 1e-6  # two barriers and their latency
CLUSTER_S = 1e-6  # a barrier of all blocks of a cluster, and their start; an estimate
TERM_S = 8e-9  # a partial result read from shared memory
PAUSE = 1.0  # warps' worth of time in which a multiprocessor computes and has nothing in flight
PAUSE_HELD = 1 / 64  # the same, for each element that a thread holds
L2_SHARE = 0.5  # of the L2, what the blocks side by side find of their last sweep


@dataclass(frozen=True, slots=True)
class ColumnEstimate:
    """The time of one configuration, and what it makes of the device."""

    work: ColumnWork
    config: ColumnConfig
    hw: HardwareProfile

    @property
    def seconds(self) -> float:
        """Infinite where the configuration cannot run."""
        resident = self.resident()
        if not resident or self.shared_bytes() > STATIC_SHARED_BYTES:
            return math.inf
        blocks = self.blocks()
        wave = self.hw.num_sms * resident
        waves, rest = divmod(blocks, wave)
        time = waves * self._wave_seconds(wave)
        start = min(blocks, wave) * START_S
        if rest:
            alone = self._wave_seconds(rest)
            beside_others = rest / wave * time / waves if waves else alone
            time += (alone + beside_others) / 2
        start += self.together() * self.config.width * ELEMENT_S
        return start + time + -(-blocks // wave) * self.exchange_seconds()

    # ---- geometry

    @property
    def is_held(self) -> bool:
        """Whether columns stay in registers between the sweeps."""
        return self.config.form is Form.REGISTERS

    def blocks(self) -> int:
        """Of the launch."""
        rows = self.work.rows
        if not self.config.lanes:
            return math.prod(rows)
        count = rows[-1] * self.work.inner
        side_by_side = -(-count // (self.config.lanes * self.config.width))
        return side_by_side * math.prod(rows[:-1]) * self.config.cluster

    def steps(self) -> int:
        """Vectors to walk over."""
        each = self.work.inner if self.config.lanes else self.config.width
        return self.work.columns // each

    def turns(self) -> int:
        """Vectors of a thread."""
        return -(-self.steps() // (self.config.walkers * self.config.cluster))

    def registers(self) -> float:
        """Registers a thread; the accumulators and what is loaded or kept dominate."""
        config, work = self.config, self.work
        if self.is_held:
            vectors = self.turns()
            each = config.width * work.loaded
            each += 0 if config.lanes else PLACE_REGISTERS
            if config.keep:
                each += config.width * work.kept
        else:
            vectors = self.together()
            each = config.width * max(work.moving / REGISTER, work.online)
        return BASE_REGISTERS + config.width * (work.reductions + 2) + vectors * each

    def needed_registers(self) -> float:
        """Registers without which a thread spills: less than what it would like to have."""
        config, work = self.config, self.work
        vectors = self.together()
        between = max(work.loaded, work.held) if self.is_held else work.online
        accumulators = work.reductions + (not self.is_held and work.online > 0)
        beside = LEAST_REGISTERS + max(0, work.live - FEW_LIVE)
        return beside + config.width * (accumulators + vectors * between)

    def given_registers(self) -> int:
        """Registers that ptxas may give a thread."""
        threads = self.config.threads * max(1, self.config.min_blocks)
        return min(self.hw.max_registers_per_thread, self.hw.registers_per_sm // threads)

    def phases(self) -> int:
        """Exchanges that wait for one another."""
        return self.work.phases if self.is_held else self.work.merged

    def together(self) -> int:
        """Vectors that a thread loads before it waits for the first."""
        turns = self.turns()
        return turns if self.is_held else min(self.config.unroll, turns)

    def resident(self) -> int:
        """Blocks a multiprocessor; 0 where the configuration makes no sense."""
        config, hw = self.config, self.hw
        read = max(1, self.work.moving)
        if self.is_held and config.keep and not self.work.kept:
            return 0
        if self.needed_registers() > self.given_registers():
            return 0
        if not self.is_held and config.unroll > 2:
            if config.unroll * config.width * read > BYTES_A_STEP:
                return 0
            if config.unroll > self.turns():
                return 0
        walkers = config.walkers * config.cluster
        if walkers >= 2 * self.steps() and walkers > 1:
            return 0
        registers = self.registers()
        if registers > min(hw.max_registers_per_thread, hw.registers_per_sm // config.threads):
            return 0
        shared = hw.smem_per_sm_bytes // (self.shared_bytes() + hw.smem_reserved_per_block_bytes)
        by_registers = int(hw.registers_per_sm // (registers * config.threads))
        by_threads = hw.max_threads_per_sm // config.threads
        return min(by_threads, by_registers, shared, hw.max_blocks_per_sm)

    def shared_bytes(self) -> int:
        """Of a block."""
        config = self.config
        size = self.work.partial_bytes
        slots = config.lanes * config.width if config.lanes else 1
        shared = self.config.partials * slots * size + slots * size * (self.work.inner > 1)
        return shared + self.config.cluster * slots * size * (self.config.cluster > 1)

    # ---- time

    def _wave_seconds(self, blocks: int) -> float:
        """So many blocks side by side."""
        config, hw = self.config, self.hw
        read, stored = self.work.moving, self.work.stored
        size = self.steps() * max(1, config.lanes) * config.width
        if not config.lanes:
            size = self.work.columns
        size *= blocks / config.cluster
        flight = blocks * config.threads * self.thread_bytes() * self._whole_sectors()
        needed = hw.hbm_bytes_per_s * hw.bytes_in_flight_latency_s
        share = SM_SHARE * min(blocks, hw.num_sms) / hw.num_sms
        bounds = (self.used_share(), flight / needed, share)
        rate = sum(bound**-SOFTNESS for bound in bounds) ** (-1 / SOFTNESS)
        rate *= self.sustained(blocks)
        hbm, l2 = size * (read + stored), 0
        if not self.is_held:
            again = size * read * (self.work.sweeps - 1)
            kept = min(1.0, L2_SHARE * hw.l2_bytes / (size * read)) if read else 1.0
            hbm, l2 = hbm + again * (1 - kept), again * kept
        return (hbm / hw.hbm_bytes_per_s + l2 / hw.l2_bytes_per_s) / rate

    def sustained(self, blocks: float) -> float:
        """Of the rate, what so many blocks side by side keep up: they load in short runs, pause to
        exchange, or get in one another's way.
        """
        config, hw, share = self.config, self.hw, self._run_share()
        if config.lanes and self.work.sweeps == 1:
            flight = blocks * config.threads * self.thread_bytes() * self._whole_sectors()
            needed = hw.hbm_bytes_per_s * hw.bytes_in_flight_latency_s
            share *= min(1.0, needed / flight) ** CROWD
        warps = config.threads / hw.warp_size * max(1.0, blocks / hw.num_sms)
        held = self.turns() * config.width if self.is_held else 0
        return share * warps / (warps + PAUSE + PAUSE_HELD * held)

    def exchange_seconds(self) -> float:
        """Of a wave of blocks: what the others beside one do not hide."""
        beside = max(1.0, min(self.resident(), self.blocks() / self.hw.num_sms))
        return self.phases() * self._one_exchange() / beside

    def thread_bytes(self) -> int:
        """What a thread has in flight."""
        config, read = self.config, max(1, self.work.moving)
        if self.is_held:
            return self.turns() * config.width * read
        size = min(config.unroll, self.turns()) * config.width * read
        return size if config.min_blocks else min(size, FREE_BYTES)

    def used_share(self) -> float:
        """Share of the moved sectors that is used: runs that start within one touch one more."""
        if not self.config.lanes:
            return 1.0
        size, sector = self.work.element, self.hw.sector_bytes
        run = self.config.lanes * self.config.width * size
        pitch = self.work.rows[-1] * self.work.inner * size if self.work.known else size
        moved = run + sector - math.gcd(run, pitch, sector)
        return run / moved

    def _whole_sectors(self) -> float:
        """Useful bytes of the requests in flight, each of which fetches a sector at least."""
        if not self.config.lanes:
            return 1.0
        run = self.config.lanes * self.config.width * self.work.element
        return min(1.0, run / self.hw.sector_bytes)

    def _run_share(self) -> float:
        """What is left of the rate where runs are short."""
        if not self.config.lanes:
            return 1.0
        run = self.config.lanes * self.config.width * self.work.element
        share = run / (run + RUN_BYTES)
        return share if run >= 2 * self.hw.sector_bytes else share * SHORT_RUN

    def _one_exchange(self) -> float:
        config = self.config
        if config.cluster > 1:
            together = replace(self, config=replace(config, cluster=1))
            return together._one_exchange() + CLUSTER_S + config.cluster * TERM_S
        if self.config.partials == 1 and self.work.inner == 1:
            return 0.0
        items = -(-config.lanes * config.width // config.threads) if config.lanes else 1
        terms = self.config.partials * items
        terms += self.work.inner if config.lanes and self.work.inner > 1 else 0
        return EXCHANGE_S + terms * TERM_S * self.work.reductions / self.work.phases
