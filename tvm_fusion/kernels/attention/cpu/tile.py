"""Tiles of an attention on a CPU: queries by vectors, keys by what the first-level cache holds."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ....errors import Unsupported
from ...contraction.model import Extent
from ...cpu.machine import Machine
from ...cpu.stages.stages import ASSUMED_EXTENT

# With fewer queries most lanes of a vector would stand idle.
LEAST_QUERIES = 8

# Keys of a block: their scores are 16 KB for 32 queries. With 32, 64 and 128 keys an attention of 8
# heads, 512 queries and keys, 64 terms ran at 180, 176 and 192 GFLOP/s (causal: 89, 157, 172) on 2
# cores of a Zen 4, whose products reach 220.
KEYS = 128
MOST_ROWS = 8


# Vectors of queries of a register tile, and what a product takes beside one of two: with a single
# vector each broadcast number is used once.
VECTORS = {1: 1.3, 2: 1.0, 4: 1.0}


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """What one task holds.

    Attributes
    ----------
    lanes : float32 elements of a vector.
    vectors : vectors of queries.
    keys : keys of a block, whole register tiles.
    score_rows : keys of a register tile of scores.
    result_rows : features of a register tile of results.
    """

    lanes: int
    vectors: int
    keys: int
    score_rows: int
    result_rows: int

    @property
    def queries(self) -> int:
        """Queries of a task."""
        return self.lanes * self.vectors


def attention_tile(
    queries: Extent, terms: Extent, features: Extent, machine: Machine
) -> AttentionTile:
    """The tile with the least work in vectors that are not full.

    Raises
    ------
    Unsupported
        Symbolic terms or features, or too few queries.
    """
    if not isinstance(terms, int) or not isinstance(features, int):
        raise Unsupported("attention with a symbolic number of terms or features")
    count = queries if isinstance(queries, int) else ASSUMED_EXTENT
    if count < LEAST_QUERIES:
        raise Unsupported(f"{count} queries, which fill no vector")
    lanes = machine.lanes(4)
    vectors = _vectors(count, lanes)
    rows = min(MOST_ROWS, (machine.vector_registers - vectors - 1) // vectors)
    return AttentionTile(lanes, vectors, KEYS // rows * rows, rows, min(rows, features))


def padded_queries(queries: int, lanes: int) -> tuple[int, int]:
    """The queries that vectors of `lanes` compute for so many, and the number of tiles."""
    width = _vectors(queries, lanes) * lanes
    return ceil(queries / width) * width, ceil(queries / width)


def _vectors(queries: int, lanes: int) -> int:
    """Vectors of a tile of queries."""

    def time(vectors: int) -> float:
        return ceil(queries / (vectors * lanes)) * vectors * VECTORS[vectors]

    return min(VECTORS, key=lambda vectors: (time(vectors), vectors))
