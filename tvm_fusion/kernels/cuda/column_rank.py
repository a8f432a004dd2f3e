"""Ranks the configurations of a column kernel by an estimate of their time.

    time = bytes / (bandwidth * rate) + exchanges
    rate = smooth minimum of  share of the moved sectors that is used
                              bytes in flight / (bandwidth * latency)
                              what the multiprocessors that have blocks can take

for the full waves of blocks and for the last, partial one. The constants are fitted to
tests/data/column_sweep_h200.json.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...errors import Unsupported
from ..expr import bytes_of, dtype_of
from ..narrow import narrow_indices
from ..online import merge_online
from ..program import Program
from .column_config import ColumnConfig, Form
from .column_lanes import (
    Lanes,
    find_inner,
    is_turned,
    lanes_along_columns,
    lanes_along_rows,
    main_bytes,
    widths,
)
from .column_state import check
from .memory import WIDEST
from .row_keep import kept_values

if TYPE_CHECKING:
    from ...config import HardwareProfile

STATIC_SHARED_BYTES = 49152  # CUDA C++ Programming Guide: shared memory of a block without opt-in
ASSUMED_ROWS = 4096  # where the number of rows is symbolic
BASE_REGISTERS = 32  # addresses, coordinates, loop counters
PLACE_REGISTERS = 4  # the places of a vector along the columns, loaded and stored
BYTES_A_STEP = 128  # a thread's loads in flight: beyond, registers cost more than latency
LEAST_THREADS = 256  # a multiprocessor; without a demand ptxas aims at more, and spills a little
ROOMY_THREADS = 512  # a multiprocessor that ptxas may leave 128 registers a thread
FREE_BYTES = 64  # a thread's loads in flight in the 32 registers that ptxas takes without a demand
SOFTNESS = 6.0  # exponent of the smooth minimum of what bounds the rate
CROWD = 0.15  # exponent of the loss where one sweep has more in flight than the memory can take
SM_SHARE = 1.7  # of its share of the bandwidth, what one multiprocessor can take
SHORT_RUN = 0.85  # of the bandwidth, for runs of a single sector
RUN_BYTES = 2.0  # bytes' worth of time that each run costs beside its own
START_S = 2e-9  # until the next block of the first wave starts
ELEMENT_S = 2.5e-9  # an element of a thread's last vectors, when nothing is left to load
EXCHANGE_S = 1e-6  # two barriers and their latency
TERM_S = 8e-9  # a partial result read from shared memory
LONGEST_RUN = 512  # bytes of neighbouring columns from which on a row is a block's own
PAUSE = 1.0  # warps' worth of time in which a multiprocessor computes and has nothing in flight
PAUSE_HELD = 1 / 64  # the same, for each element that a thread holds
L2_SHARE = 0.5  # of the L2, what the blocks side by side find of their last sweep
SMALL_THREADS = 128  # a block, where there is less to do than that many threads could
BEST = 8


def column_configs(program: Program, hw: HardwareProfile) -> list[ColumnConfig]:
    """Configurations that can run, the best guess first.

    Raises
    ------
    Unsupported
        Where no column kernel computes the program well: there are no rows along memory.
    """
    check(program)
    if program.columns == 0 or (program.is_static and program.row_count == 0):
        raise Unsupported("there is nothing to reduce")
    program = narrow_indices(program)
    ranked = [
        (_Estimate(program, lanes, config, hw).seconds, number, config)
        for number, (lanes, config) in enumerate(_possible(program, hw))
    ]
    ranked = sorted(item for item in ranked if math.isfinite(item[0]))
    return [config for _, _, config in ranked[:BEST]] or list(_small(program, hw))


def estimated_seconds(program: Program, config: ColumnConfig, hw: HardwareProfile) -> float:
    """The estimate by which configurations are ranked; infinite where one cannot run."""
    program = narrow_indices(program)
    find = lanes_along_rows if config.lanes else lanes_along_columns
    lanes = find(program, find_inner(program), config.width)
    return _Estimate(program, lanes, config, hw).seconds


def _possible(program: Program, hw: HardwareProfile) -> Iterator[tuple[Lanes, ColumnConfig]]:
    """All configurations worth an estimate."""
    inner = find_inner(program)
    lanes = _widest(program, inner)
    sweeps = _sweeps(program)
    unit = inner // math.gcd(inner, lanes.width) if lanes.along_rows else 1
    most = 1 if is_turned(program) else _lanes_side_by_side(lanes)
    for threads in (128, 256, 512, 1024):
        for side in (unit << shift for shift in range(8)) if lanes.along_rows else (0,):
            if side > max(unit, most) or side > threads:
                break
            warps = hw.warp_size // math.gcd(hw.warp_size, max(1, side))
            walkers = max(1, threads // max(1, side))
            walkers = walkers // warps * warps or walkers
            plain = ColumnConfig(lanes=side, walkers=walkers, width=lanes.width)
            if plain.threads > hw.max_threads_per_block:
                continue
            if sweeps > 1:
                yield from _held(program, lanes, plain, hw)
            for unroll, demand in itertools.product((2, 4, 8, 16), _demands(plain, sweeps)):
                yield lanes, replace(plain, unroll=unroll, min_blocks=demand)


def _small(program: Program, hw: HardwareProfile) -> Iterator[ColumnConfig]:
    """For tensors that do not even fill a block of 128 threads: no more threads than elements."""
    lanes = _widest(program, find_inner(program))
    if not lanes.along_rows:
        yield ColumnConfig(lanes=0, walkers=hw.warp_size, width=lanes.width, unroll=1)
        return
    unit = lanes.inner // math.gcd(lanes.inner, lanes.width)
    side = unit * max(1, min(_lanes_side_by_side(lanes), hw.warp_size) // unit)
    walkers = max(1, min(lanes.steps, SMALL_THREADS // side))
    yield ColumnConfig(lanes=side, walkers=walkers, width=lanes.width, unroll=1)


def _demands(config: ColumnConfig, sweeps: int) -> tuple[int, ...]:
    """Blocks a multiprocessor to ask ptxas for: one sweep may do without."""
    if sweeps > 1:
        return (max(1, LEAST_THREADS // config.threads),)
    roomy = max(2, ROOMY_THREADS // config.threads)
    return (roomy, 0) if config.threads <= ROOMY_THREADS else (0,)


def _held(
    program: Program, lanes: Lanes, plain: ColumnConfig, hw: HardwareProfile
) -> Iterator[tuple[Lanes, ColumnConfig]]:
    """Columns in registers; also by twice the threads with half the vectors each."""
    plain = replace(plain, form=Form.REGISTERS)
    yield lanes, plain
    yield lanes, replace(plain, keep=True)
    halved = replace(plain, lanes=2 * plain.lanes, width=plain.width // 2)
    if halved.lanes and halved.width and halved.threads <= hw.max_threads_per_block:
        yield lanes_along_rows(program, lanes.inner, halved.width), halved


def _lanes_side_by_side(lanes: Lanes) -> int:
    """Threads that all lanes take, as a power of two."""
    if not isinstance(lanes.count, int):
        return 32
    return 1 << (-(-lanes.count // lanes.width) - 1).bit_length()


def _widest(program: Program, inner: int) -> Lanes:
    """The widest vectors that are single accesses (or 16 bytes each)."""
    narrow = min((bytes_of(t.dtype) for t in (*program.tiles, *program.elements)), default=1)
    for width in widths(program):
        along_columns = inner > 1 and inner % width == 0 and inner * narrow >= LONGEST_RUN
        find = lanes_along_columns if along_columns else lanes_along_rows
        lanes = find(program, inner, width)
        moving = [v for v in (*lanes.loads.values(), *lanes.outputs.values()) if v.moves]
        if all(v.piece >= min(WIDEST, width * bytes_of(v.dtype)) for v in moving):
            return lanes
    raise Unsupported("there is no vector")


def _sweeps(program: Program) -> int:
    """Passes over the columns when nothing is held."""
    merged = merge_online(program)
    full = any(o.full and o.phase == merged.phases for o in merged.outputs)
    return merged.phases + full


@dataclass(frozen=True, slots=True)
class _Estimate:
    """The time of one configuration."""

    program: Program
    lanes: Lanes
    config: ColumnConfig
    hw: HardwareProfile

    @property
    def seconds(self) -> float:
        """Infinite where the configuration cannot run."""
        resident = self._resident()
        if not resident or self._shared_bytes() > STATIC_SHARED_BYTES:
            return math.inf
        blocks = self._blocks()
        wave = self.hw.num_sms * resident
        waves, rest = divmod(blocks, wave)
        time = waves * self._wave_seconds(wave)
        start = min(blocks, wave) * START_S
        if rest:
            alone = self._wave_seconds(rest)
            beside_others = rest / wave * time / waves if waves else alone
            time += (alone + beside_others) / 2
        phases = self.program.phases if self._held() else merge_online(self.program).phases
        turns = -(-blocks // wave)
        beside = max(1.0, min(resident, blocks / self.hw.num_sms))
        held = self._turns() if self._held() else min(self.config.unroll, self._turns())
        start += held * self.config.width * ELEMENT_S
        return start + time + turns * phases * self._exchange_seconds() / beside

    # ---- geometry

    def _held(self) -> bool:
        return self.config.form is Form.REGISTERS

    def _blocks(self) -> int:
        rows = [extent if isinstance(extent, int) else ASSUMED_ROWS for extent in self.program.rows]
        if not self.config.lanes:
            return math.prod(rows)
        count = rows[-1] * self.lanes.inner
        return -(-count // (self.config.lanes * self.config.width)) * math.prod(rows[:-1])

    def _turns(self) -> int:
        return -(-self.lanes.steps // self.config.walkers)

    def _still_bytes(self) -> int:
        """Bytes of a lane that are the same at every step."""
        return sum(bytes_of(v.dtype) for v in self.lanes.loads.values() if not v.moves)

    def _moving_bytes(self) -> int:
        """Bytes of a point that are read again at every step."""
        return main_bytes(self.program)[0] - self._still_bytes()

    def _registers(self) -> float:
        """Registers a thread; the accumulators and what is loaded or kept dominate."""
        config, loads = self.config, self.lanes.loads.values()
        if self._held():
            # compilers hold what is cheap to widen in its wide form
            wide = sum(0.5 if v.dtype == "float16" else 1 for v in loads if v.moves)
            places = 0 if config.lanes else PLACE_REGISTERS
            vectors, each = self._turns(), config.width * wide + places
        else:
            vectors = min(config.unroll, self._turns())
            each = config.width * self._moving_bytes() / 4
        held = vectors * each
        if self._held() and config.keep:
            kept = [4 * bytes_of(dtype_of(v)) / 16 for v in kept_values(self.program)]
            held += vectors * config.width * sum(kept)
        return BASE_REGISTERS + config.width * (len(self.program.reductions) + 2) + held

    def _resident(self) -> int:
        """Blocks a multiprocessor; 0 where the configuration makes no sense."""
        config, hw = self.config, self.hw
        read = max(1, self._moving_bytes())
        if self._held() and config.keep and not kept_values(self.program):
            return 0
        if not self._held() and config.unroll > 2:
            if config.unroll * config.width * read > BYTES_A_STEP:
                return 0
            if config.unroll > self._turns():
                return 0
        if config.walkers >= 2 * self.lanes.steps and config.walkers > 1:
            return 0
        registers = self._registers()
        if registers > min(hw.max_registers_per_thread, hw.registers_per_sm // config.threads):
            return 0
        shared = hw.smem_per_sm_bytes // (self._shared_bytes() + hw.smem_reserved_per_block_bytes)
        by_registers = int(hw.registers_per_sm // (registers * config.threads))
        by_threads = hw.max_threads_per_sm // config.threads
        return min(by_threads, by_registers, shared, hw.max_blocks_per_sm)

    def _partials(self) -> int:
        config, warp = self.config, self.hw.warp_size
        if not config.lanes:
            return config.threads // warp
        power = config.lanes & (config.lanes - 1) == 0
        shuffled = warp // config.lanes if power and config.lanes < warp <= config.threads else 1
        return -(-config.walkers // shuffled)

    def _shared_bytes(self) -> int:
        config = self.config
        size = sum(bytes_of(reduction.dtype) for reduction in self.program.reductions)
        slots = config.lanes * config.width if config.lanes else 1
        return self._partials() * slots * size + slots * size * (self.lanes.inner > 1)

    # ---- time

    def _wave_seconds(self, blocks: int) -> float:
        """So many blocks side by side."""
        config, hw = self.config, self.hw
        read, stored = self._moving_bytes(), main_bytes(self.program)[1]
        size = self.lanes.steps * max(1, config.lanes) * config.width
        if not config.lanes:
            size = self.program.columns
        size *= blocks
        flight = blocks * config.threads * self._thread_bytes() * self._whole_sectors()
        needed = hw.hbm_bytes_per_s * hw.bytes_in_flight_latency_s
        share = SM_SHARE * min(blocks, hw.num_sms) / hw.num_sms
        bounds = (self._coalescing(), flight / needed, share)
        rate = sum(bound**-SOFTNESS for bound in bounds) ** (-1 / SOFTNESS)
        if config.lanes and _sweeps(self.program) == 1:
            rate *= min(1.0, needed / flight) ** CROWD
        warps = config.threads / hw.warp_size * max(1.0, blocks / hw.num_sms)
        held = self._turns() * config.width if self._held() else 0
        rate *= warps / (warps + PAUSE + PAUSE_HELD * held) * self._run_share()
        hbm, l2 = size * (read + stored), 0
        if not self._held():
            again = size * read * (_sweeps(self.program) - 1)
            kept = min(1.0, L2_SHARE * hw.l2_bytes / (size * read)) if read else 1.0
            hbm, l2 = hbm + again * (1 - kept), again * kept
        return (hbm / hw.hbm_bytes_per_s + l2 / hw.l2_bytes_per_s) / rate

    def _thread_bytes(self) -> int:
        """What a thread has in flight."""
        config, read = self.config, max(1, self._moving_bytes())
        if self._held():
            return self._turns() * config.width * read
        size = min(config.unroll, self._turns()) * config.width * read
        return size if config.min_blocks else min(size, FREE_BYTES)

    def _coalescing(self) -> float:
        """Share of the moved sectors that is used: runs that start within one touch one more."""
        if not self.config.lanes:
            return 1.0
        size, sector = self._element_bytes(), self.hw.sector_bytes
        run = self.config.lanes * self.config.width * size
        pitch = self.lanes.count * size if isinstance(self.lanes.count, int) else size
        moved = run + sector - math.gcd(run, pitch, sector)
        return run / moved

    def _whole_sectors(self) -> float:
        """Useful bytes of the requests in flight, each of which fetches a sector at least."""
        if not self.config.lanes:
            return 1.0
        run = self.config.lanes * self.config.width * self._element_bytes()
        return min(1.0, run / self.hw.sector_bytes)

    def _run_share(self) -> float:
        """What is left of the rate where runs are short."""
        if not self.config.lanes:
            return 1.0
        run = self.config.lanes * self.config.width * self._element_bytes()
        share = run / (run + RUN_BYTES)
        return share if run >= 2 * self.hw.sector_bytes else share * SHORT_RUN

    def _element_bytes(self) -> int:
        sizes = [bytes_of(v.dtype) for v in self.lanes.loads.values() if v.moves]
        return min(sizes, default=max(1, main_bytes(self.program)[0]))

    def _exchange_seconds(self) -> float:
        config = self.config
        if self._partials() == 1 and self.lanes.inner == 1:
            return 0.0
        items = -(-config.lanes * config.width // config.threads) if config.lanes else 1
        terms = self._partials() * items
        terms += self.lanes.inner if config.lanes and self.lanes.inner > 1 else 0
        return EXCHANGE_S + terms * TERM_S * len(self.program.reductions) / self.program.phases
