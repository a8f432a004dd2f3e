"""Tiles of a direct convolution, by predicted time.

    register tile   positions x filters that are summed up in registers
    task            a block of positions and some filters, computed by one core

The model counts cycles of a core, with the constants of products (`cpu.contraction.task_tiles`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product as combinations
from math import ceil, prod

from ....errors import Unsupported
from ...cpu.contraction.task_tiles import (
    FAR_CYCLES,
    LEAST_CYCLES,
    LOAD_CYCLES,
    NEAR_BYTES,
    NEAR_CYCLES,
    PARTS,
    TASK_CYCLES,
    TILE_CYCLES,
    even_parts,
)
from ...cpu.machine import PRODUCT_WORK, Machine
from ...cpu.stages.stages import operations
from ...program.expr import bytes_of
from ..geometry import Convolution, Window
from .box import Span
from .outputs import along_filters

# The shortest vector; fewer filters a group do not fill it.
LEAST_FILTERS = 4

# Positions that lie apart by more than this are not shuffled to lie side by side.
MOST_STRIDE = 4

# Positions of a task along the last window, where there are many.
MOST_COLUMNS = 256

# Filters that meet a vector of positions while it is in a register.
MOST_FILTERS = 14

# Rows of a register tile by vectors of positions; and its vectors where it has one filter: LLVM
# writes out the taps of few channels, and keeps data that several of them meet in registers.
MOST_ROWS, LEAST_VECTORS = 8, 4

# What half a vector must save of positions: where vectors of 64 bytes take one cycle, 3 x 3 taps of
# 72 channels of 56 x 56 take 43 us with them and 52 with halves, of 32 groups of 4 channels 178
# and 262; where they take two, halves are an eighth faster.
LEAST_SAVED = 1.2

# Taps of the positions of a row below which copies of rows for one filter take longer than they
# save, and lanes for each position of a row from which on they do: on a core of a Zen 5, 3 x 3 taps
# of 512 channels of 10 x 10 (16 lanes) take 27 us so, 21 in the loops of any reduction; of 384
# channels of 14 x 14 19 and 27, of 960 of 7 x 7 28 and 64, and of 4 x 4, of which all elements are
# one vector there, 21 and 10.
LEAST_DEPTHWISE, MOST_LANES_EACH = 144, 1.15

# What a task of one filter a channel keeps in a first-level cache, beside the data that it copies,
# and cycles of beginning such a task. On a core of a Zen 5, 3 x 3 taps of 64 channels of 112 x 112
# with a stride of 2 take 104 us by whole images, 91 by 28 rows, 80 by 14 and 87 by 8; of 72
# channels of 56 x 56 with a stride of 1 43 us by whole images, 41 by 28 rows and 49 by 16.
FIRST_BYTES, FILTER_TASK_CYCLES = 24 << 10, 200

# Of a filter a channel, vectors and taps below which copies take longer than they save: 3 x 3 taps
# of 32 channels of 112 x 112 take 134 us on a core of a Zen 4, other loops 111; of 128 channels of
# 56 x 56 133 and 174.
FEW_VECTORS, MANY_TAPS = 3, 16

# Phases of a transposed convolution, each of which has loops of its own: 3 by 3.
MOST_PHASES = 9

# Positions from which on taking elements out of rows pays.
MANY_POSITIONS = 400

# Cycles of copying a vector of the data, and of beginning a row of it.
COPY_CYCLES, ROW_CYCLES = 3.0, 10.0

# Cycles of a vector of results with what stands behind it; of transposing it before; and of one
# that is stored element by element. On a core of a Zen 4, 64 filters of 27 terms at 224 x 224 take
# 2.07 ms where results lie along filters, 2.70 ms where they lie along positions.
# One that is written while it is in a register is neither stored before nor loaded: on a core of a
# Zen 5, 64 filters of 16 channels of 112 x 112 take 117 us so, 150 otherwise.
RESULT_CYCLES, TURN_CYCLES, SCATTER_CYCLES, AT_ONCE_CYCLES = 10.0, 11.0, 60.0, 6.0

# What stands behind a sum, in additions, that is written out for each vector of a register tile: a
# scale, a shift, what is added and a hard swish.
LITTLE = 16

# How often what a task keeps is fetched from afar, where it is too large to stay near.
FAR_VECTORS = 4

# Cycles of a vector of the data that begins within a cache line.
UNALIGNED_CYCLES = 2.0


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a direct convolution is cut.

    Attributes
    ----------
    lanes : int
        Elements of a vector.
    along_filters : bool
        Whether vectors are of filters rather than of positions along the last window.
    rows, columns, filters : int
        A register tile: positions along the last two windows, and filters.
    blocks : tuple of int
        Positions of a task along each window; of the outer ones 1.
    groups_of_task, filter_tasks : int
        Groups of `filters` that a task computes, and in how many tasks all of them are.
    channels : int
        Channels at a time.
    is_parallel : bool
        Whether the cores share the tasks.
    """

    lanes: int
    along_filters: bool
    rows: int
    columns: int
    filters: int
    blocks: tuple[int, ...]
    groups_of_task: int
    filter_tasks: int
    channels: int
    is_parallel: bool = True

    def packs(self, convolution: Convolution, number: int) -> bool:
        """Whether a box leaves out what no tap of a window meets: where vectors do not run along
        it, rows that are copied whole are faster.
        """
        return not self.along_filters or number + 1 < len(convolution.windows)

    def span(self, convolution: Convolution, number: int, block: int) -> Span:
        """What a block of some positions of a window reads; rows that vectors run along are taken
        apart by the stride.
        """
        apart = not self.along_filters and number + 1 == len(convolution.windows)
        packed = self.packs(convolution, number)
        return Span.of(convolution.windows[number], block, packed, apart)


def fastest_tiles(convolution: Convolution, machine: Machine) -> tuple[float, Tiles]:
    """Predicted cycles of the fastest tiles, and these.

    Raises
    ------
    Unsupported
        No form takes the convolution.
    """
    is_parallel = convolution.multiply_adds * PRODUCT_WORK >= machine.small_work
    cores = machine.cores if is_parallel else 1
    best: tuple[float, int, Tiles] | None = None
    if prod(w.expansion for w in convolution.windows) > MOST_PHASES:
        raise Unsupported("more phases of a transposed convolution than are worth their code")
    if _is_strided_product(convolution):
        raise Unsupported("a product with every second element of rows, that are taken out once")
    forms = (*_filter_tiles(convolution, machine), *_position_tiles(convolution, machine))
    for number, tiles in enumerate(forms):
        found = (_cycles(convolution, tiles, cores), number)
        if best is None or found < best[:2]:
            best = (*found, tiles)
    if best is None:
        raise Unsupported("neither filters nor positions fill vectors")
    return best[0], replace(best[2], is_parallel=is_parallel)


def _is_strided_product(convolution: Convolution) -> bool:
    """Whether one tap meets elements that lie apart, of results that lie along many positions: on a
    core of a Zen 4, 64 to 128 channels of 56 x 56 with a stride of 2 take 136 us, in other loops
    126.
    """
    one_tap = convolution.taps == 1 and convolution.windows[-1].stride > 1
    return one_tap and convolution.positions > MANY_POSITIONS and not along_filters(convolution)


def _filter_tiles(convolution: Convolution, machine: Machine) -> Iterator[Tiles]:
    """Tiles by vectors of filters: of several groups, vectors that a group is a multiple of."""
    filters, lanes = convolution.filters_of_group, _lanes(convolution, machine)
    expands = any(w.expansion > 1 for w in convolution.windows)
    if filters < LEAST_FILTERS and not expands:  # a loop over all zeros takes longest
        return
    while lanes // 2 >= max(filters, LEAST_FILTERS):
        lanes //= 2
    while convolution.groups > 1 and filters % lanes:
        lanes //= 2
    if lanes < LEAST_FILTERS:
        return
    if convolution.is_depthwise:
        apart = convolution.channel_dim < convolution.windows[-1].dim
        if apart or (filters < FEW_VECTORS * lanes and convolution.taps < MANY_TAPS):
            return
    height, width = _height_and_width(convolution)
    registers = machine.vector_registers
    vectors = ceil(filters / lanes)
    if convolution.is_depthwise:
        registers, vectors = registers // 2, 1  # the others hold data that several taps meet
    for rows, columns, number in register_tiles(registers, height, width, vectors):
        yield from _cut(convolution, Tiles(lanes, True, rows, columns, number * lanes, (), 1, 1, 1))


def _position_tiles(convolution: Convolution, machine: Machine) -> Iterator[Tiles]:
    """Tiles by vectors of positions, where neighbours read elements beside each other."""
    last = convolution.windows[-1]
    if convolution.is_depthwise or last.expansion > 1:
        return
    filters, (height, width) = convolution.filters_of_group, _height_and_width(convolution)
    lanes = _lanes(convolution, machine)
    while lanes > LEAST_FILTERS and lanes // 2 >= width:
        lanes //= 2
    padded, half = (ceil(width / n) * n for n in (lanes, max(LEAST_FILTERS, lanes // 2)))
    if half * LEAST_SAVED < padded:
        lanes //= 2
    if lanes < LEAST_FILTERS:
        return
    is_single = convolution.channels is None and convolution.filters is None
    if last.stride > 1:
        if not is_single or last.stride > MOST_STRIDE:
            return
    elif is_single and (height == 1 or _has_short_rows(convolution, lanes)):
        return
    for number in range(1, min(filters, MOST_FILTERS) + 1):
        if (filters % number and convolution.groups > 1) or number * 2 < min(filters, 4):
            continue
        most = (machine.vector_registers - 1) // (number + 1)
        if number == 1:
            most = max(LEAST_VECTORS, height if height <= MOST_ROWS else 0)
        for vectors in range(1, min(4, most, ceil(width / lanes)) + 1):
            rows = min(height, most // vectors, MOST_ROWS)
            tile = Tiles(lanes, False, rows, vectors * lanes, number, (), 1, 1, 1)
            yield from _cut(convolution, tile)


def _has_short_rows(convolution: Convolution, lanes: int) -> bool:
    """Whether copies of rows for one filter take longer than they save."""
    size = convolution.windows[-1].size
    if convolution.taps * size >= LEAST_DEPTHWISE:
        return False
    return size <= LEAST_FILTERS or ceil(size / lanes) * lanes > MOST_LANES_EACH * size


def _lanes(convolution: Convolution, machine: Machine) -> int:
    return machine.lanes(bytes_of(convolution.product.dtype))


def _height_and_width(convolution: Convolution) -> tuple[int, int]:
    """Positions of a phase along the last two windows."""
    *above, last = convolution.windows
    height = ceil(above[-1].size / above[-1].expansion) if above else 1
    return height, ceil(last.size / last.expansion)


def _cut(convolution: Convolution, tile: Tiles) -> Iterator[Tiles]:
    """Ways to cut a convolution in tasks, for a register tile."""
    *outer, last = convolution.windows
    above = outer[-1] if outer else None
    groups = ceil(convolution.filters_of_group / tile.filters)
    across = _lengths(last, tile.columns, [ceil(last.size / MOST_COLUMNS)])
    if not tile.along_filters:
        across = sorted({*across, *_whole_vectors(last.size, tile.lanes)})
    down = _lengths(above, tile.rows, PARTS) if above else [1]
    if above and above.expansion == 1 and _is_single(tile):
        down = sorted({*down, *(above.size // p for p in PARTS if above.size % p == 0)})
    for block, length, share in combinations(down, across, _shares(groups)):
        blocks = (*(1 for _ in outer[:-1]), *([block] if above else []), length)
        yield replace(
            tile,
            blocks=blocks,
            groups_of_task=share,
            filter_tasks=ceil(groups / share),
            channels=_channels(convolution, tile, blocks),
        )


def stores_at_once(convolution: Convolution, tiles: Tiles) -> bool:
    """Whether results that lie along positions are whole vectors of a register tile, and what
    stands behind the sums is little, so that they are written while these are in registers.
    """
    if tiles.along_filters or (along_filters(convolution) and tiles.filters > 1):
        return False
    segment = convolution.segment
    values = [o.value for o in segment.outputs] + [b.value for b in segment.bindings]
    whole = all(w.size % b == 0 for w, b in zip(convolution.windows, tiles.blocks, strict=True))
    is_one = tiles.channels == convolution.channels_of_group
    return (
        is_one and whole and tiles.blocks[-1] % tiles.lanes == 0 and operations(*values) <= LITTLE
    )


def _is_single(tile: Tiles) -> bool:
    """Whether vectors of positions meet one filter: loading them is most of the work then."""
    return not tile.along_filters and tile.filters == 1


def _shares(groups: int) -> list[int]:
    return sorted({ceil(groups / p) for p in PARTS})


def _lengths(window: Window, tile: int, parts: Iterable[int]) -> list[int]:
    """Positions of a task to try: all, or whole register tiles."""
    step = tile * window.expansion
    found = {min(window.size, ceil(ceil(window.size / p) / step) * step) for p in parts}
    return sorted(found, reverse=True)


def _whole_vectors(size: int, lanes: int) -> list[int]:
    """The longest block of whole vectors that divides the positions, if there is one."""
    lengths = range(lanes, min(size, MOST_COLUMNS) + 1, lanes)
    return [length for length in lengths if size % length == 0][-1:]


@lru_cache(maxsize=1024)
def register_tiles(
    registers: int, height: int, width: int, vectors: int
) -> list[tuple[int, int, int]]:
    """Register tiles of rows, columns and vectors of filters, the fastest for each number of
    vectors.
    """
    found = []
    for number in range(1, min(4, vectors) + 1):
        most = (registers - 1 - number) // number
        options = []
        for rows in range(1, min(height, most) + 1):
            columns = max(n for _, n in even_parts(width, most // rows))
            cycles = sum(
                n * m * filter_cycles(r * c, number)
                for (n, r), (m, c) in combinations(
                    even_parts(height, rows), even_parts(width, columns)
                )
            )
            options.append((cycles, rows, columns))
        _, rows, columns = min(options)
        found.append((rows, columns, number))
    return found


def filter_cycles(positions: int, vectors: int) -> float:
    """Cycles of a term: an element of the data for each position, some vectors of filters."""
    arithmetic = positions * vectors + LOAD_CYCLES * (positions + vectors)
    return max(arithmetic, NEAR_CYCLES * vectors, LEAST_CYCLES)


def _position_cycles(vectors: int, filters: int) -> float:
    """Cycles of a term: vectors of the data, an element of the weights for each filter."""
    arithmetic = vectors * filters + UNALIGNED_CYCLES / 2 * vectors + LOAD_CYCLES * filters
    return max(arithmetic, UNALIGNED_CYCLES * vectors, LEAST_CYCLES)


def _spans(convolution: Convolution, tile: Tiles, blocks: tuple[int, ...]) -> list[Span]:
    return [tile.span(convolution, number, block) for number, block in enumerate(blocks)]


def _channels(convolution: Convolution, tile: Tiles, blocks: tuple[int, ...]) -> int:
    """Channels at a time: as many as stay near, with the weights of a group of filters."""
    size = bytes_of(convolution.product.dtype)
    box = prod(s.extent for s in _spans(convolution, tile, blocks))
    each = size * (box + convolution.taps * tile.filters)
    channels = convolution.channels_of_group
    parts = max(1, ceil(channels * each / NEAR_BYTES))
    return ceil(channels / parts)


def _cycles(convolution: Convolution, tiles: Tiles, cores: int) -> float:
    """Predicted cycles of all tasks."""
    channels, taps = convolution.channels_of_group, convolution.taps
    windows, blocks = convolution.windows, tiles.blocks
    spans = _spans(convolution, tiles, blocks)
    phases = prod(w.expansion for w in windows)
    filters = convolution.filters_of_group
    groups = ceil(filters / tiles.filters)
    number_of = min(tiles.groups_of_task, groups)
    own = min(number_of * tiles.filters, filters)
    compute = _sums(convolution, tiles) * channels * taps * own / tiles.filters
    at_a_time = ceil(channels / tiles.channels)
    positions = prod(blocks)
    register_tiles = ceil(positions / (tiles.rows * tiles.columns)) + phases - 1
    compute += register_tiles * number_of * at_a_time * TILE_CYCLES
    held = channels * (own if convolution.is_depthwise else 1)
    box = prod(s.extent for s in spans) * held
    inner = spans[-1].extent
    if convolution.channel_dim is not None and convolution.channel_dim > windows[-1].dim:
        inner = held
    copied = box / min(tiles.lanes, inner) * COPY_CYCLES + box / inner * ROW_CYCLES
    weights = FAR_CYCLES * channels * taps * own / tiles.lanes
    result = AT_ONCE_CYCLES if stores_at_once(convolution, tiles) else RESULT_CYCLES
    results = (result + (at_a_time - 1) * NEAR_CYCLES) * positions * own / tiles.lanes
    if along_filters(convolution) != tiles.along_filters and own > 1:
        turn = TURN_CYCLES if tiles.along_filters else SCATTER_CYCLES
        results += turn * positions * own / tiles.lanes
    at_once = tiles.filters if convolution.is_depthwise else tiles.channels
    kept = box / held * min(held, at_once)
    kept += positions * tiles.filters * (tiles.groups_of_task if at_a_time > 1 else 1)
    if kept * bytes_of(convolution.product.dtype) > NEAR_BYTES:
        copied += FAR_VECTORS * FAR_CYCLES * kept / tiles.lanes
    begin = TASK_CYCLES
    if _is_single(tiles):
        begin = FILTER_TASK_CYCLES
        if kept * bytes_of(convolution.product.dtype) > FIRST_BYTES:
            copied += NEAR_CYCLES * kept / tiles.lanes
    task = begin + compute + copied + weights + results
    tasks = prod(ceil(w.size / b) for w, b in zip(windows, blocks, strict=True))
    return task * ceil(tasks * convolution.groups * tiles.filter_tasks / cores)


def _sums(convolution: Convolution, tiles: Tiles) -> float:
    """Cycles of a term of all positions of a task, for one register tile of filters."""
    *above, last = convolution.windows
    rows = ceil(tiles.blocks[-2] / above[-1].expansion) if above else 1
    columns = ceil(tiles.blocks[-1] / last.expansion)
    down = even_parts(rows, tiles.rows)
    if tiles.along_filters:
        across = even_parts(columns, tiles.columns)
        vectors = tiles.filters // tiles.lanes
        return sum(
            n * m * filter_cycles(r * c, vectors) for (n, r), (m, c) in combinations(down, across)
        )
    across = even_parts(ceil(columns / tiles.lanes), tiles.columns // tiles.lanes)
    return sum(
        n * m * _position_cycles(r * v, tiles.filters)
        for (n, r), (m, v) in combinations(down, across)
    )
