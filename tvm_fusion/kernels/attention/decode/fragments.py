"""Fragments of mma.m16n8k16 out of shared memory: queries, keys and values, by ldmatrix.

ldmatrix hands out four 8 x 8 matrices, the rows of each by the addresses of eight lanes: two
neighbouring matrices of keys (or queries) by two neighbouring chunks of 16 bytes.
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script import tirx as T

from ...gemm.mma.units import CHUNK, load_matrices
from .config import MATRIX, Layout, Tile


class Fragments:
    """Where the lanes of a warp read the fragments of queries, keys and values."""

    def __init__(self, layout: Layout, lane: Expr):
        self.layout = layout
        row, low, high = lane % MATRIX, lane // MATRIX % 2, lane // (2 * MATRIX)
        self.query = T.Bind((low * MATRIX + row) * layout.query_pitch + high * CHUNK)
        self.key = _Matrices(layout.keys, row, high, low)
        self.value = _Matrices(layout.values, row, low, high)

    def queries(self, memory: Expr, start: int, tile: int, term: int) -> Expr:
        """16 rows by 16 terms: a fragment of A."""
        at = start + tile * 16 * self.layout.query_pitch + term * 2 * CHUNK
        return _loaded(memory.ptr_to([self.query + at]), False)

    def keys(self, ring: Expr, stage: Expr, group: int, term: int) -> Expr:
        """16 keys by 16 terms: fragments of B for 8 keys, then for the 8 behind them."""
        return _loaded(ring.ptr_to([stage + self.key.at(group, term)]), False)

    def values(self, ring: Expr, stage: Expr, group: int, feature: int) -> Expr:
        """16 keys by 16 features: fragments of B for 8 features, then for the 8 behind them."""
        return _loaded(ring.ptr_to([stage + self.value.at(group, feature)]), True)


class _Matrices:
    """Rows of the four matrices of 16 keys and 16 columns, as one lane addresses them."""

    def __init__(self, tile: Tile, row: Expr, matrix: Expr, chunk: Expr):
        """`row` within the lane's matrix; its `matrix` of keys and its `chunk`, 0 or 1."""
        self.tile = tile
        line = (row + matrix * MATRIX) * tile.width + tile.start
        turned = T.bitwise_xor(chunk, tile.turn(row))
        self.starts = [
            T.Bind(line + T.bitwise_xor(turned, T.int32(pair)) * CHUNK)
            for pair in range(0, tile.turned, 2)
        ]

    def at(self, group: int, column: int) -> Expr:
        """Distance of the lane's row from the start of the stage; `column` counts 16 elements."""
        further, pair = divmod(column, len(self.starts))
        chunks = further * self.tile.turned
        return self.starts[pair] + (group * 2 * MATRIX * self.tile.width + chunks * CHUNK)


def _loaded(place: Expr, transposed: bool) -> Expr:
    words = T.alloc_local((4,), "uint32")
    T.evaluate(load_matrices(words.ptr_to([0]), place, transposed))
    return words
