"""How results of windows are split over threads, and what that takes.

A thread computes `tall` x `width` results: neighbours along the last axis, and along the last other
axis that windows slide on. It loads the places that all of them look at once, reduces along every
other axis place by place, and then along the columns.

    3 x 3, stride 2, width 4, tall 2:     5 rows of 9 places for 8 results; 45 loads, not 72
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...config import HardwareProfile
from ...cost.analytic import estimate, resident_blocks
from ...cost.traffic import Resources, Traffic
from .sliding import Sliding

LANES = 32
LINE = 128
WIDEST_ACCESS = 16
THREADS = (256, 128)
FEWEST_THREADS = 64
WIDTHS = (16, 8, 4, 2, 1)
TALL = (1, 2, 4)
MOST_PLACES = 96
"""Partial results of a thread: each takes a register, beside those of loads and addresses."""
UNROLLED = 512
"""Elements of windows that a thread computes one after the other in straight code; beyond, the
taps of all axes but the columns are a loop."""
BASE_REGISTERS = 24
PLACE_INSTRUCTIONS = 40.0
"""A thread's place by division by sizes known when the kernel is written, and its addresses."""
ROW_INSTRUCTIONS = 8.0
"""Address and bounds of one row of places."""
STORED = 1.45
"""As `group.streams.STORED`: what the L2 takes for a sector that is written."""


@dataclass(frozen=True, slots=True)
class WindowConfig:
    """How results are split over threads.

    Attributes
    ----------
    threads : of a block.
    width : neighbouring results of a thread along the columns.
    tall : such rows of a thread.
    """

    threads: int = 256
    width: int = 8
    tall: int = 1


@dataclass(frozen=True, slots=True)
class Operations:
    """Instructions by pipe, of one evaluation."""

    arithmetic: float = 0.0
    special: float = 0.0
    division: float = 0.0
    conversion: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """What windows take, however they are cut.

    Attributes
    ----------
    axes : of the results, of numbers.
    multiple : what the columns are known to be a multiple of.
    loads : of each input that is read place by place, bytes of an element.
    stores : of each output, bytes of an element.
    beside : bytes that a result reads apart from windows.
    pitch : what the elements from a row of places to the next are a multiple of.
    first : elements from a multiple of the widest access to a row's first place.
    before, after : what is computed of a place, and of a result.
    bytes_moved : bytes that memory moves in any case.
    l2_bytes : those that the L2 does.
    assumed_l2 : as in `Traffic`.
    """

    axes: tuple[Sliding, ...]
    multiple: int
    loads: tuple[int, ...]
    stores: tuple[int, ...]
    beside: float
    pitch: int
    first: int
    before: Operations
    after: Operations
    bytes_moved: float
    l2_bytes: float
    assumed_l2: tuple[tuple[int, float], ...] = ()

    @property
    def results(self) -> int:
        return math.prod(axis.extent for axis in self.axes)


def tall_axis(axes: Sequence[Sliding]) -> int | None:
    """The last axis but the columns that windows slide on."""
    return next((n for n in reversed(range(len(axes) - 1)) if axes[n].slides), None)


def outer_taps(axes: Sequence[Sliding]) -> int:
    """Elements of a window along the axes other than the columns and the tall one."""
    tall = tall_axis(axes)
    return math.prod(a.taps for n, a in enumerate(axes[:-1]) if n != tall)


def rows_of(axes: Sequence[Sliding], config: WindowConfig) -> int:
    """Rows of places that a thread loads."""
    tall = tall_axis(axes)
    each = 1 if tall is None else len(axes[tall].needed(config.tall))
    return each * outer_taps(axes)


def is_straight(axes: Sequence[Sliding], config: WindowConfig) -> bool:
    """Whether all that a thread computes is written out."""
    places = len(axes[-1].needed(config.width))
    return rows_of(axes, config) * places <= UNROLLED


def pieces_of(needed: Sequence[int], first: int, widest: int) -> list[tuple[int, int]]:
    """Loads of a run of places, as first place and number: powers of two, aligned in memory.

    Parameters
    ----------
    needed : places, ascending; those between them may be loaded, no others.
    first : where place 0 lies behind a multiple of `widest`.
    widest : elements of the widest access.
    """
    found, wanted, last = [], set(needed), needed[-1]
    place = needed[0]
    while place <= last:
        if place not in wanted:
            place += 1
            continue
        size = widest
        while size > 1 and ((first + place) % size or place + size - 1 > last):
            size //= 2
        while size > 1 and sum(n in wanted for n in range(place, place + size)) < 2:
            size //= 2
        found.append((place, size))
        place += size
    return found


def widest_piece(
    columns: Sliding, multiple: int, config: WindowConfig, size: int, pitch: int
) -> int:
    """Elements of the widest access to places of `size` bytes: where all threads begin alike."""
    if multiple % config.width:
        return 1
    step = columns.stride * config.width
    return max(1, min(WIDEST_ACCESS // size, _power_in(math.gcd(step, pitch))))


def _power_in(number: int) -> int:
    return number & -number if number else 1 << 30


def ranked(work: Work, hw: HardwareProfile) -> list[tuple[float, WindowConfig]]:
    """Predicted seconds of one launch, without what the launch itself takes, and configurations;
    the best first.
    """
    found = []
    for width, tall, threads in itertools.product(WIDTHS, TALL, THREADS):
        config = WindowConfig(threads, width, tall)
        if fits(work.axes, config) and threads <= hw.max_threads_per_block:
            found.append((predicted(work, config, hw), config))
    return sorted(found, key=lambda entry: entry[0])


def least_results(axes: Sequence[Sliding], config: WindowConfig) -> Iterator[tuple[int, int]]:
    """Axes, and the results along each that a thread computes: where there are less, it cannot."""
    tall = tall_axis(axes)
    yield len(axes) - 1, config.width
    if tall is not None:
        yield tall, config.tall


def fits(axes: Sequence[Sliding], config: WindowConfig) -> bool:
    """Whether a thread can compute so many results; axes of symbolic size may have as many."""
    tall = tall_axis(axes)
    for axis, least in least_results(axes, config):
        if isinstance(axes[axis].extent, int) and axes[axis].extent < least:
            return False
    if tall is None and config.tall > 1:
        return False
    places = len(axes[-1].needed(config.width))
    if config.tall * places > MOST_PLACES:
        return False
    if config.tall == 1:
        return True
    return is_straight(axes, config) and axes[tall].stride < axes[tall].taps * axes[tall].dilation


def predicted(work: Work, config: WindowConfig, hw: HardwareProfile) -> float:
    """Seconds of one launch, without what the launch itself takes."""
    resources = resources_of(work, config, hw)
    return estimate(_traffic(work, config, resources, hw), resources, hw).body_us / 1e6


def threads_of(work: Work, config: WindowConfig) -> float:
    """Threads of the launch that compute something."""
    tall = tall_axis(work.axes)
    count = math.ceil(work.axes[-1].extent / config.width)
    for n, axis in enumerate(work.axes[:-1]):
        count *= math.ceil(axis.extent / config.tall) if n == tall else axis.extent
    return float(count)


def traffic_of(work: Work, config: WindowConfig, hw: HardwareProfile) -> Traffic:
    """What a launch moves and executes."""
    return _traffic(work, config, resources_of(work, config, hw), hw)


def _traffic(
    work: Work, config: WindowConfig, resources: Resources, hw: HardwareProfile
) -> Traffic:
    axes, threads = work.axes, threads_of(work, config)
    rows, needed = rows_of(axes, config), axes[-1].needed(config.width)
    places, results = rows * len(needed), config.width * config.tall
    accesses = wavefronts = 0.0
    for size in work.loads:
        pieces = _pieces(work, config, size)
        accesses += rows * len(pieces)
        wavefronts += rows * sum(_wavefronts(work, config, size, n) for _, n in pieces)
    for size in work.stores:
        wide = min(WIDEST_ACCESS, config.width * size) if _whole(work, config) else size
        count = config.tall * config.width * size / wide
        accesses += count
        lines = max(LANES * wide / LINE, min(LANES, LANES * config.width * size / LINE))
        wavefronts += count * max(1.0, lines)
    wavefronts += results * work.beside * LANES / LINE
    combined = _combined(work, config)
    arithmetic = (
        PLACE_INSTRUCTIONS
        + rows * ROW_INSTRUCTIONS
        + accesses
        + places * (1.0 + work.before.arithmetic)
        + combined
        + results * (1.0 + work.after.arithmetic)
    )
    operations = {
        "arithmetic": threads * arithmetic,
        "special": threads * (places * work.before.special + results * work.after.special),
        "division": threads * (places * work.before.division + results * work.after.division),
        "conversion": threads * (places * work.before.conversion + results * work.after.conversion),
    }
    slots = resident_blocks(config.threads, resources.registers_per_thread, 0, hw)
    loaded = sum(size * len(needed) for size in work.loads)
    flying = min(float(rows * loaded), hw.thread_bytes_in_flight)
    written = sum(work.stores) * work.results
    read = work.l2_bytes - written
    again = _read_again(work, config)
    return Traffic(
        hbm_bytes=work.bytes_moved,
        l2_bytes=work.l2_bytes,
        operations=operations,
        read_bytes=read,
        sector_bytes=read * again + STORED * written,
        wavefronts=threads / LANES * wavefronts,
        rounds=max(1.0, math.ceil(rows * loaded / hw.thread_bytes_in_flight)),
        blocks=max(1.0, math.ceil(threads / config.threads)),
        in_flight_bytes=flying * config.threads * slots,
        assumed_l2=work.assumed_l2,
    )


def resources_of(work: Work, config: WindowConfig, hw: HardwareProfile) -> Resources:
    """Registers of a thread, and the code."""
    axes = work.axes
    places = len(axes[-1].needed(config.width))
    flying = min(sum(work.loads) * places * rows_of(axes, config), hw.thread_bytes_in_flight)
    registers = BASE_REGISTERS + config.tall * places + flying / 4
    straight = rows_of(axes, config) if is_straight(axes, config) else 1
    code = 16 * (straight * places * (4 + work.before.arithmetic) + _combined(work, config))
    return Resources(int(registers), 0, config.threads, int(code))


def _whole(work: Work, config: WindowConfig) -> bool:
    return work.multiple % config.width == 0


def _pieces(work: Work, config: WindowConfig, size: int) -> list[tuple[int, int]]:
    widest = widest_piece(work.axes[-1], work.multiple, config, size, work.pitch)
    return pieces_of(work.axes[-1].needed(config.width), work.first, widest)


def _wavefronts(work: Work, config: WindowConfig, size: int, elements: int) -> float:
    """Passes of a warp's access: threads lie as far apart as what each of them looks at."""
    apart = work.axes[-1].stride * config.width * size
    return max(1.0, min(float(LANES), LANES * max(apart, elements * size) / LINE))


def _combined(work: Work, config: WindowConfig) -> float:
    """Instructions of a thread that combine elements."""
    columns, tall = work.axes[-1], tall_axis(work.axes)
    taps = outer_taps(work.axes) * (1 if tall is None else work.axes[tall].taps)
    along = min(columns.taps - 1.0, 2.0 * math.log2(columns.taps) + 1) if columns.slides else 0.0
    return config.tall * (taps * len(columns.needed(config.width)) + config.width * along)


def _read_again(work: Work, config: WindowConfig) -> float:
    """How often a place is asked of the L2: what one block looks at twice is in its L1."""
    tall, columns = tall_axis(work.axes), work.axes[-1]
    times = 1.0
    for n, axis in enumerate(work.axes[:-1]):
        if not axis.slides:
            continue
        together = 1.0
        if n == tall:
            rows = config.threads * config.width / columns.extent
            together = min(float(axis.extent), max(1.0, rows) * config.tall)
        seen = axis.seen(math.ceil(together))
        times *= max(1.0, seen * axis.extent / (together * axis.seen(axis.extent)))
    return times
