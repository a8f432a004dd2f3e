"""Tiles of a direct convolution, by predicted time.

    register tile   positions x vectors of filters that are summed up in registers
    task            a block of positions and some vectors of filters, computed by one core

The model counts cycles of a core, with the constants of products (`cpu.contraction.task_tiles`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
from ...program.expr import bytes_of
from ..geometry import Convolution, Window
from .box import Span

# Fewer filters a group do not fill a vector.
LEAST_FILTERS = 4

# Positions of a task along the last window, where there are many.
MOST_COLUMNS = 256

# Cycles of copying a vector of the data, and of beginning a row of it.
COPY_CYCLES, ROW_CYCLES = 3.0, 10.0

# Cycles of a vector of results: stored, transposed, and stored again with what stands behind it.
RESULT_CYCLES = 8.0


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a direct convolution is cut.

    Attributes
    ----------
    lanes : int
        Filters of a vector.
    rows, columns, vectors : int
        A register tile: positions along the last two windows, vectors of filters.
    blocks : tuple of int
        Positions of a task along each window; of the outer ones 1.
    groups_of_task, filter_tasks : int
        Groups of `vectors` that a task computes, and in how many tasks all of them are.
    channels : int
        Channels at a time.
    is_parallel : bool
        Whether the cores share the tasks.
    """

    lanes: int
    rows: int
    columns: int
    vectors: int
    blocks: tuple[int, ...]
    groups_of_task: int
    filter_tasks: int
    channels: int
    is_parallel: bool = True


def filter_lanes(convolution: Convolution, machine: Machine) -> int:
    """Filters of a vector: a power of two; of several groups, one that divides a group's filters.

    Raises
    ------
    Unsupported
        A group has too few filters.
    """
    filters = convolution.filters_of_group
    lanes = machine.lanes(bytes_of(convolution.product.dtype))
    if filters < LEAST_FILTERS:
        raise Unsupported(f"{filters} filters a group, which fill no vector")
    while lanes // 2 >= filters:
        lanes //= 2
    while convolution.groups > 1 and filters % lanes:
        lanes //= 2
    if lanes < LEAST_FILTERS:
        raise Unsupported(f"{filters} filters a group, which fill no vectors")
    return lanes


def direct_tiles(convolution: Convolution, machine: Machine) -> Tiles:
    """The tiles with the least predicted time.

    Raises
    ------
    Unsupported
        A group has too few filters for vectors of them.
    """
    lanes = filter_lanes(convolution, machine)
    is_parallel = convolution.multiply_adds * PRODUCT_WORK >= machine.small_work
    best: tuple[float, int, Tiles] | None = None
    for number, tiles in enumerate(_candidates(convolution, lanes, machine)):
        cycles = _cycles(convolution, tiles, machine, is_parallel)
        if best is None or (cycles, number) < best[:2]:
            best = (cycles, number, tiles)
    assert best is not None
    found = best[2]
    return Tiles(*(getattr(found, n) for n in Tiles.__slots__[:-1]), is_parallel)


def _candidates(convolution: Convolution, lanes: int, machine: Machine) -> Iterator[Tiles]:
    *outer, last = convolution.windows
    above = outer[-1] if outer else None
    vectors = ceil(convolution.filters_of_group / lanes)
    height = ceil(above.size / above.expansion) if above else 1
    width = ceil(last.size / last.expansion)
    tiles = _register_tiles(machine.vector_registers, height, width, vectors)
    for rows, columns, number in tiles:
        groups = ceil(vectors / number)
        across = _lengths(last, columns, [ceil(last.size / MOST_COLUMNS)])
        down = _lengths(above, rows, PARTS) if above else [1]
        shares = sorted({ceil(groups / p) for p in PARTS})
        for block, length, share in combinations(down, across, shares):
            blocks = (*(1 for _ in outer[:-1]), *([block] if above else []), length)
            channels = _channels(convolution, blocks, number * lanes)
            yield Tiles(
                lanes,
                rows,
                columns,
                number,
                blocks,
                share,
                ceil(groups / share),
                channels,
            )


def _lengths(window: Window, tile: int, parts) -> list[int]:
    """Positions of a task to try: all, or whole register tiles."""
    step = tile * window.expansion
    found = {min(window.size, ceil(ceil(window.size / p) / step) * step) for p in parts}
    return sorted(found, reverse=True)


@lru_cache(maxsize=1024)
def _register_tiles(
    registers: int, height: int, width: int, vectors: int
) -> list[tuple[int, int, int]]:
    """Register tiles of rows, columns and vectors, the fastest for each number of vectors."""
    found = []
    for number in range(1, min(4, vectors) + 1):
        most = (registers - 1 - number) // number
        options = []
        for rows in range(1, min(height, most) + 1):
            columns = max(n for _, n in even_parts(width, most // rows))
            cycles = sum(
                n * m * _term_cycles(r * c, number)
                for (n, r), (m, c) in combinations(
                    even_parts(height, rows), even_parts(width, most // rows)
                )
            )
            options.append((cycles, rows, columns))
        _, rows, columns = min(options)
        found.append((rows, columns, number))
    return found


def _term_cycles(positions: int, vectors: int) -> float:
    arithmetic = positions * vectors + LOAD_CYCLES * (positions + vectors)
    return max(arithmetic, NEAR_CYCLES * vectors, LEAST_CYCLES)


def _channels(convolution: Convolution, blocks: tuple[int, ...], filters: int) -> int:
    """Channels at a time: as many as stay near, with the weights of a group of vectors."""
    size = bytes_of(convolution.product.dtype)
    spans = [Span.of(w, b) for w, b in zip(convolution.windows, blocks, strict=True)]
    each = size * (prod(s.extent for s in spans) + convolution.taps * filters)
    channels = convolution.channels_of_group
    parts = max(1, ceil(channels * each / NEAR_BYTES))
    return ceil(channels / parts)


def _cycles(convolution: Convolution, tiles: Tiles, machine: Machine, is_parallel: bool) -> float:
    """Predicted cycles of all tasks."""
    channels, taps = convolution.channels_of_group, convolution.taps
    spans = [Span.of(w, b) for w, b in zip(convolution.windows, tiles.blocks, strict=True)]
    phases = prod(w.expansion for w in convolution.windows)
    terms = channels * taps / phases
    vectors = ceil(convolution.filters_of_group / tiles.lanes)
    groups = ceil(vectors / tiles.vectors)
    number_of = min(tiles.groups_of_task, groups)
    wide = number_of * tiles.vectors - (
        groups * tiles.vectors - vectors if number_of == groups else 0
    )
    *_, across = spans
    rows = ceil(tiles.blocks[-2] / spans[-2].window.expansion) if len(spans) > 1 else 1
    columns = ceil(tiles.blocks[-1] / across.window.expansion)
    compute = number = 0.0
    for (n, r), (m, c) in combinations(
        even_parts(rows, tiles.rows), even_parts(columns, tiles.columns)
    ):
        compute += n * m * _term_cycles(r * c, tiles.vectors)
        number += n * m
    compute *= phases * wide / tiles.vectors * terms
    tiling = number * phases * number_of * ceil(channels / tiles.channels) * TILE_CYCLES
    box = [s.extent for s in spans]
    inner = box[-1] if convolution.channel_dim != max(_dims(convolution)) else channels
    elements = prod(box) * channels
    copied = elements / tiles.lanes * COPY_CYCLES + elements / inner * ROW_CYCLES
    weights = FAR_CYCLES * channels * taps * wide
    results = RESULT_CYCLES * prod(tiles.blocks) * wide * ceil(channels / tiles.channels)
    task = TASK_CYCLES + compute + tiling + copied + weights + results
    blocks = [ceil(w.size / b) for w, b in zip(convolution.windows, tiles.blocks, strict=True)]
    tasks = prod(blocks) * convolution.groups * tiles.filter_tasks
    return task * (ceil(tasks / machine.cores) if is_parallel else tasks)


def _dims(convolution: Convolution) -> list[int]:
    return [*(w.dim for w in convolution.windows), convolution.channel_dim or 0]
