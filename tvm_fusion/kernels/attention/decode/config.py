"""Configurations of the decode attention, and the shared memory that they take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm.ir import Expr

from ...gemm.mma.units import CHUNK

WARP = 32
TILE_ROWS = 16
"""Rows of an mma.m16n8k16."""
MATRIX = 8
"""Rows of a matrix of ldmatrix."""
MAX_FEATURES = 256
"""Features whose sums, of one tile of rows or of two of half the size, fit into registers."""
MAX_CLUSTER = 8
"""Blocks of a cluster that every device with clusters takes (CUDA C++ Programming Guide)."""
HELD = 200
"""Registers for sums, scores and queries of a lane, beside which ptxas spills nothing (of 255)."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the keys of one attention are divided.

    Attributes
    ----------
    split : blocks of a cluster that share the keys; 1 for no cluster.
    warps : warps of a block; each has keys of its own, and a ring of its own that they arrive in.
    step : keys that a warp takes at a time, a multiple of 16.
    stages : steps in a warp's ring; one less of them are on their way while one is at work.
    queries : the most that there are of a symbolic number, for which the kernel is written; 0: the
        number is known.
    """

    split: int
    warps: int
    step: int
    stages: int
    queries: int = 0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * WARP

    @property
    def tiles_in_flight(self) -> int:
        """Steps that all warps of a block have on their way at any time."""
        return self.warps * (self.stages - 1)


@dataclass(frozen=True, slots=True)
class Tile:
    """The keys (or the values) of a step in shared memory, in bytes: rows without gaps.

    Chunk c of row r lies in the place of chunk ``c ^ turn(r)``, so that chunk c of the 8 rows of a
    matrix lies in 8 different groups of banks. A turn stays within as many chunks as divide both a
    row and the 8 of a line of 128 bytes:

        8 chunks (heads of 64, 128, 192, 256)    turn(r) = r % 8
        4        (32, 96, 160, 224)              turn(r) = r % 8 // 2
        2        (16, 48, 80, 112 ...)           turn(r) = r % 8 // 4

    Attributes
    ----------
    width : of a row, an even number of chunks.
    rows : keys of a step.
    start : of the first row, within a stage.
    """

    width: int
    rows: int
    start: int

    @property
    def swizzled(self) -> int:
        """Chunks within which a turn stays."""
        return math.gcd(self.width // CHUNK, MATRIX)

    @property
    def size(self) -> int:
        """All rows."""
        return self.rows * self.width

    def turn(self, row: Expr) -> Expr:
        """Of a row, in chunks."""
        return row % MATRIX // (MATRIX // self.swizzled)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things lie in the shared memory of a block; sizes in bytes unless named otherwise.

    Attributes
    ----------
    terms, features : extents of the head, padded to 16.
    rows : rows of a block, padded to 8 or to a multiple of 16.
    """

    config: DecodeConfig
    terms: int
    features: int
    rows: int

    @property
    def keys(self) -> Tile:
        """The keys of a step."""
        return Tile(self.terms * 2, self.config.step, 0)

    @property
    def values(self) -> Tile:
        """The values of a step, behind the keys."""
        return Tile(self.features * 2, self.config.step, self.keys.size)

    @property
    def query_pitch(self) -> int:
        """Bytes from a query to the next: an odd number of chunks."""
        return self.terms * 2 + CHUNK

    @property
    def stage_bytes(self) -> int:
        """Keys and values of one step."""
        return self.keys.size + self.values.size

    @property
    def ring_bytes(self) -> int:
        """The rings of all warps."""
        return self.config.warps * self.config.stages * self.stage_bytes

    @property
    def holds_queries(self) -> bool:
        """Whether a lane keeps its fragments of the queries in registers; else they are read again
        at each step."""
        tiles = -(-self.rows // TILE_ROWS)
        return tiles * ((self.features + self.config.step) // 2 + self.terms // 4) <= HELD

    @property
    def query_bytes(self) -> int:
        """The queries, always whole tiles."""
        return -(-self.rows // TILE_ROWS) * TILE_ROWS * self.query_pitch

    @property
    def part_pitch(self) -> int:
        """float32 from a row to the next in what the warps add up: 8 banks further each."""
        return self.features + 8

    @property
    def part_bytes(self) -> int:
        """The unfinished results of all warps."""
        return self.config.warps * self.rows * self.part_pitch * 4

    @property
    def stat_bytes(self) -> int:
        """Maximum and sum of weights of each row and warp."""
        return self.config.warps * self.rows * 2 * 4

    @property
    def dynamic_bytes(self) -> int:
        """Results take the place of the rings and the queries once these have been read."""
        return max(self.ring_bytes + self.query_bytes, self.part_bytes) + self.stat_bytes

    def landing_floats(self, features: int) -> int:
        """float32 that the blocks of a cluster store into one of them: a share of the results of
        each, and maximum and sum of each row."""
        split = self.config.split
        return 0 if split == 1 else split * (-(-self.rows * features // split) + 2 * self.rows)

    def smem_bytes(self, features: int) -> int:
        """All shared memory of a block."""
        return self.dynamic_bytes + 4 * self.landing_floats(features)


def block_rows(rows: int, features: int) -> int:
    """Rows of a block, for a unit of `rows`: all of them, or an even part."""
    most = 2 * TILE_ROWS if 2 * features <= MAX_FEATURES else TILE_ROWS
    each = -(-rows // -(-rows // most))
    return 8 if each <= 8 else -(-each // TILE_ROWS) * TILE_ROWS
