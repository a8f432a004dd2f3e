"""How a transposing program is cut into tiles, and how threads share them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ...errors import Unsupported
from ..gpu.vectors import divides, vector_width
from ..program.expr import bytes_of
from ..program.program import Program
from .direct import DirectConfig, block_config, direct_config
from .layout import BANK, BANKS_BYTES, LANES, Layout
from .plan import Staged, staged_elements, taken, tiled_axes

if TYPE_CHECKING:
    from ...config import HardwareProfile

STATIC_SHARED_BYTES = 48 * 1024
"""What a kernel may declare without asking for more at launch."""

GROUPS = (2, 4, 8)
"""Tiles along p that blocks may walk through before they go on along the columns: what tuning tries
beside the order of the columns."""

LEAST_USED = 0.3
"""Share of a tile that must exist: axes that fill less are read better element by element."""


@dataclass(frozen=True, slots=True)
class TransposeConfig:
    """Tiles of one transposing program.

    Attributes
    ----------
    axis : number of the row axis p along which strided loads are consecutive.
    threads : threads a block.
    rows, columns : extent of a tile along p and along the columns.
    width : columns of one vector.
    lanes : threads of a warp along the columns (a power of two); the others lie along p.
    stack : consecutive rows that a thread computes together.
    early : loads of the plain tiles go out before the barrier.
    group : tiles along p that blocks walk through before they go on along the columns.
    """

    axis: int
    threads: int = 256
    rows: int = 64
    columns: int = 64
    width: int = 8
    lanes: int = 8
    stack: int = 2
    early: bool = True
    group: int = 1

    @property
    def area(self) -> tuple[int, int]:
        """Rows and columns that a warp computes at once."""
        return LANES // self.lanes * self.stack, self.lanes * self.width

    @property
    def areas(self) -> int:
        """Areas of a tile."""
        rows, columns = self.area
        return self.rows // rows * (self.columns // columns)

    def layout(self, size: int) -> Layout:
        """The shared-memory layout of a tile of elements of `size` bytes."""
        return Layout(size, self.rows, self.columns, self.width, self.lanes, self.stack)

    def shared_bytes(self, staged: list[Staged]) -> int:
        """Shared memory of a block."""
        return sum(self.layout(bytes_of(item.element.dtype)).nbytes for item in staged)

    def check(self, program: Program) -> None:
        """Raises Unsupported where the fields do not go together, or not with the program."""
        rows, columns = self.area
        if not 0 <= self.axis < len(program.rows):
            raise Unsupported(f"there is no row axis {self.axis}")
        if not divides(self.width, program.columns, program.analyzer()):
            raise Unsupported(f"vectors of {self.width} cross the end of {program.columns} columns")
        if self.rows % rows or self.columns % columns:
            raise Unsupported(f"a warp's {rows} x {columns} do not divide the tile")
        warps = self.threads // LANES
        if self.threads % LANES or self.areas % warps:
            raise Unsupported(f"{self.threads} threads do not share the tile evenly")
        known = isinstance(program.rows[self.axis], int)
        if self.group > 1 and not (known and _down(program, self) % self.group == 0):
            raise Unsupported(f"the tiles are no multiple of {self.group}")
        if LANES % self.lanes or BANKS_BYTES % self.width or self.stack & (self.stack - 1):
            raise Unsupported("lanes, width and stack must be powers of two")


def transpose_configs(
    program: Program, hw: HardwareProfile
) -> list[TransposeConfig | DirectConfig]:
    """Legal configurations, the best guess first; none where no load is worth a tile."""
    return list(_legal(program, hw))


@lru_cache(maxsize=16)  # ranked, then written
def _legal(program: Program, hw: HardwareProfile) -> tuple[TransposeConfig | DirectConfig, ...]:
    width = vector_width(program)
    for axis in tiled_axes(program, width):
        if configs := _configs(program, axis, width, hw):
            return tuple(configs)
    return ()


def _configs(
    program: Program, axis: int, width: int, hw: HardwareProfile
) -> list[TransposeConfig | DirectConfig]:
    """Those of one row axis: the whole axis in registers if it is short, tiles, the first tile
    walked otherwise, register blocks.
    """
    tiles = _tile_configs(program, axis, width, hw)
    if not all(isinstance(extent, int) for extent in (program.rows[axis], program.columns)):
        return [*tiles, *(replace(tile, early=not tile.early) for tile in tiles[:1])]
    direct, blocks = (make(program, axis, width) for make in (direct_config, block_config))
    others = _walked_otherwise(program, tiles[0]) if tiles else ()
    return [config for config in (direct, *tiles, *others, blocks) if config is not None]


def _walked_otherwise(program: Program, tile: TransposeConfig) -> Iterator[TransposeConfig]:
    """A tile with its other loads behind the barrier, and with tiles in another order."""
    yield replace(tile, early=not tile.early)
    tiles = _down(program, tile)
    yield from (replace(tile, group=group) for group in GROUPS if tiles % group == 0)


def _tile_configs(
    program: Program, axis: int, width: int, hw: HardwareProfile
) -> list[TransposeConfig]:
    staged = list(staged_elements(program, axis, width).values())
    sizes = [bytes_of(item.element.dtype) for item in staged]
    lanes = _lanes(program, width)
    stack = max(1, BANK // min(sizes))
    limit = min(STATIC_SHARED_BYTES, hw.smem_per_block_bytes)
    configs: list[TransposeConfig] = []
    for rows, columns, threads in _tiles(min(sizes)):
        tile = TransposeConfig(axis, threads, rows, columns, width, lanes, stack)
        config = _fitted(program, tile)
        fits = config.shared_bytes(staged) <= limit and _used(program, config) >= LEAST_USED
        if fits and config not in configs:
            configs.append(config)
    return sorted(configs, key=lambda c: -_busy(program, c, hw))


def _down(program: Program, config: TransposeConfig) -> int:
    """Tiles along p."""
    return math.ceil(taken(program.rows[config.axis]) / config.rows)


def _used(program: Program, config: TransposeConfig) -> float:
    """The share of the tiles' elements that exist."""
    rows, columns = taken(program.rows[config.axis]), taken(program.columns)
    padded = _down(program, config) * config.rows
    return rows * columns / (padded * math.ceil(columns / config.columns) * config.columns)


def _busy(program: Program, config: TransposeConfig, hw: HardwareProfile) -> int:
    """Multiprocessors that get a tile; half of them are as good as all."""
    if not program.is_static:
        return hw.num_sms // 2
    down = math.ceil(program.rows[config.axis] / config.rows)
    across = math.ceil(program.columns / config.columns)
    outer = program.row_count // program.rows[config.axis]
    return min(outer * down * across, hw.num_sms // 2)


def _tiles(size: int) -> Iterator[tuple[int, int, int]]:
    """Rows, columns and threads of tiles to try."""
    if size == 1:
        yield 128, 128, 256
        yield 64, 128, 128
    yield 64, 64, 256
    yield 64, 64, 128
    yield 64, 128, 256
    yield 128, 64, 256
    yield 32, 64, 128
    yield 32, 32, 64
    yield 16, 32, 32


def _lanes(program: Program, width: int) -> int:
    """Lanes along the columns: a line of 128 bytes of the narrowest output, or all columns.

    All 32 only for single columns: with vectors, writing the tile would meet four to a bank.
    """
    narrowest = min((bytes_of(o.dtype) for o in program.outputs), default=1)
    wanted = BANKS_BYTES // (width * narrowest)
    needed = _power_of_two(-(-taken(program.columns) // width))
    return max(1, min(wanted, needed, LANES if width == 1 else LANES // 2))


def _fitted(program: Program, config: TransposeConfig) -> TransposeConfig:
    """The tile no longer than the axes, the lost threads given to the other axis."""
    area_rows, area_columns = config.area
    elements = config.rows * config.columns
    down, across = (_power_of_two(taken(e)) for e in (program.rows[config.axis], program.columns))
    rows = max(area_rows, min(config.rows, down))
    columns = max(area_columns, min(config.columns, across))
    if rows < config.rows:
        columns = min(elements // rows, max(area_columns, across))
    elif columns < config.columns:
        extent = down
        rows = min(elements // columns, max(area_rows, extent))
    rows, columns = max(rows, area_rows), max(columns, area_columns)
    areas = rows // area_rows * (columns // area_columns)
    return replace(config, rows=rows, columns=columns, threads=min(config.threads, areas * LANES))


def _power_of_two(extent: int) -> int:
    return 1 << (extent - 1).bit_length()
