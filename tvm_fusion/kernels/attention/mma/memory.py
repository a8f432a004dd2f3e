"""Queries, keys and values of the mma.sync attention: into shared memory, and into registers.

Tiles come by cp.async; each thread copies the same columns of every (threads / columns)-th row.
What lies beyond the rows or the head is 0 in shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...gemm.mma.operand import always
from ...gemm.mma.units import copy_async, load_matrices, shared_word
from ...gpu.frame import then
from ...gpu.product_frame import Frame
from ...program.expr import conjunction
from ..tiled.source import Lines, Source
from .config import CHUNK, Layout, SharedRows


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One copy of a thread: its row and its number in the row, its place, its address.

    `exists` is None where all threads have it.
    """

    row: Expr
    column: Expr
    place: Expr
    at: Expr
    exists: Expr | None


class TileCopy(Lines):
    """Copies of `rows` rows of an operand by all threads of a block.

    `rows`: number of rows of a tile, `shared`: how they lie in `memory`.
    """

    def __init__(
        self,
        frame: Frame,
        source: Source,
        axes: tuple,
        env: Mapping[Var, Expr],
        memory: Expr,
        shared: SharedRows,
        rows: int,
        threads: int,
    ):
        super().__init__(frame, source, axes, env)
        self.memory, self.shared, self.rows, self.threads = memory, shared, rows, threads
        self.per_row = shared.pitch // source.piece
        # Threads beside each other on one row, and rows that all of them copy at once.
        self.across = math.gcd(self.per_row, threads)
        self.lines = threads // self.across

    def start(self, thread: Expr) -> None:
        """Emits what does not change from tile to tile."""
        super().prepare()
        self.thread = thread
        self.even_share = self.rows % self.lines == 0
        self.row, self.column = T.Bind(thread // self.across), T.Bind(thread % self.across)
        self.places: dict[tuple[int, int], Expr] = {}
        if self.even_share:  # here, where all copies see what is bound
            for i in range(0, self.rows, self.lines):
                for j in range(self.per_row // self.across):
                    self._place(i, j * self.across)

    def copy(self, start: Expr | int, first: Expr, count: Expr | None) -> None:
        """Emits the copies of rows ``first ...`` to `start` bytes behind the start of `memory`.

        No row at or above `count` exists; with None, all do.
        """
        end = self.source.extent * self.source.size // self.source.piece
        for piece in self._pieces(first, count):
            inside = None if count is None else first + piece.row < count
            if end != self.per_row:
                inside = conjunction(inside, piece.column < end)
            place = self.memory.ptr_to([piece.place + start])
            call = copy_async(self.source.piece, place, self.pointer, piece.at, inside)
            with then(always(piece.exists)):
                T.evaluate(call)

    def _pieces(self, first: Expr, count: Expr | None) -> Iterator[Piece]:
        if not self.even_share:
            yield from self._counted_through(first, count)
            return
        line = T.Bind(self.at(first + self.row, self.column)) if self.evenly else None
        for i in range(0, self.rows, self.lines):
            row = self.row + i
            if line is not None:
                at = line + self.further(i)
            else:
                at = T.Bind(self.at(first + row, self.column, count))
            for j in range(self.per_row // self.across):
                step = j * self.across
                skip = T.int64(step * self.source.piece)
                yield Piece(row, self.column + step, self._place(i, step), at + skip, None)

    def _place(self, i: int, step: int) -> Expr:
        """The place of the thread's copy `i` rows and `step` columns on; swizzles repeat."""
        low = i % 8
        whole = step * self.source.piece % (self.shared.swap * CHUNK) == 0
        near = 0 if whole else step
        if (low, near) not in self.places:
            place = self._place_of(self.row + low, self.column + near)
            self.places[low, near] = T.Bind(place)
        skip = (step - near) * self.source.piece + (i - low) * self.shared.pitch
        return self.places[low, near] + skip

    def _place_of(self, row: Expr, column: Expr) -> Expr:
        byte = column * self.source.piece
        return self.shared.place(row, byte // CHUNK) + byte % CHUNK

    def _counted_through(self, first: Expr, count: Expr | None) -> Iterator[Piece]:
        """Copies numbered row by row, where threads have unequal shares of rows."""
        total = self.rows * self.per_row
        for start in range(0, total, self.threads):
            number = self.thread + start
            row, column = T.Bind(number // self.per_row), T.Bind(number % self.per_row)
            exists = number < total if start + self.threads > total else None
            at = self.at(first + row, column, count)
            yield Piece(row, column, self._place_of(row, column), at, exists)


class Matrices:
    """Where a lane reads the rows of the 8 x 8 matrices of 16 rows by 16 columns.

    `row` and `side` are the row of the 16 and the half of the columns that its address stands for.
    """

    def __init__(self, memory: Expr, shared: SharedRows, row: Expr, side: Expr):
        self.memory, self.shared = memory, shared
        self.places = [
            T.Bind(shared.place(row, side + chunk)) for chunk in range(0, shared.swap, 2)
        ]

    def load(self, into: Expr, start: Expr | int, row: int, number: int, transposed: bool) -> None:
        """Emits the load of columns ``16 * number ...`` of 16 rows from `row` (16 i) on."""
        group, chunk = divmod(2 * number, self.shared.swap)
        fixed = row * self.shared.pitch + group * self.shared.swap * CHUNK
        place = self.memory.ptr_to([self.places[chunk // 2] + (start + fixed)])
        T.evaluate(load_matrices(into, place, transposed))


class Words:
    """Where a lane reads elements of 32 bits of 8 rows by 8 columns, the rows in the order in which
    a lane holds columns of scores: 2 i and 2 i + 1 are its two elements.
    """

    def __init__(self, memory: Expr, shared: SharedRows, lane: Expr):
        self.memory, self.shared = memory, shared
        row, column = lane % 4 * 2, lane // 4
        self.places = [
            [
                T.Bind(shared.place(row + v, column // 4 + chunk) + column % 4 * 4)
                for chunk in range(0, shared.swap, 2)
            ]
            for v in range(2)
        ]

    def load(self, start: Expr | int, row: int, number: int) -> Expr:
        """Columns ``8 * number ...`` of 8 rows from `row` (8 i) on."""
        group, chunk = divmod(2 * number, self.shared.swap)
        fixed = row * self.shared.pitch + group * self.shared.swap * CHUNK
        words = T.alloc_local((2,), "uint32")
        for v, places in enumerate(self.places):
            place = self.memory.ptr_to([places[chunk // 2] + (start + fixed)])
            T.buffer_store(words, shared_word(place), [v])
        return words


class Fragments:
    """Fragments of queries (A), keys and values (B) of a warp.

    Of elements of 32 bits a matrix of ldmatrix has 8 rows by 4, and fragments are half as wide.
    `first` is the first query of the warp, `own` its first key of a tile (0 where it has all).
    """

    def __init__(self, memory: Expr, layout: Layout, lane: Expr, first: Expr, own: Expr | int):
        row, near, far = lane % 8, lane // 8 % 2, lane // 16
        self.layout = layout
        # Chunks change places alike in all groups of 16 rows.
        self.own_keys, self.own_values = (
            T.Bind(own * rows.pitch) if isinstance(own, Expr) else 0
            for rows in (layout.k, layout.v)
        )
        # ldmatrix hands out four 8 x 8 matrices, the rows of each by the addresses of eight lanes.
        self.of_queries = Matrices(memory, layout.k, T.Bind(first + near * 8 + row), far)
        self.of_keys = Matrices(memory, layout.k, T.Bind(far * 8 + row), near)
        if layout.size == 2:
            self.of_values = Matrices(memory, layout.v, T.Bind(near * 8 + row), far)
        else:
            self.of_words = Words(memory, layout.v, lane)

    def queries(self, tile: int, term: int) -> Expr:
        """16 queries by 16 terms."""
        words = T.alloc_local((4,), "uint32")
        start = self.layout.query_start
        self.of_queries.load(words.ptr_to([0]), start, tile * 16, term, False)
        return words

    def keys(self, stage: Expr, group: int, term: int) -> Expr:
        """16 keys by 16 terms: for 8 keys, then for the 8 behind them."""
        words = T.alloc_local((4,), "uint32")
        start = stage + self.own_keys
        self.of_keys.load(words.ptr_to([0]), start, group * 16, term, False)
        return words

    def values(self, stage: Expr, group: int, feature: int) -> Expr:
        """16 keys by 16 features: for 8 features, then for the 8 behind them."""
        words = T.alloc_local((4,), "uint32")
        start = stage + (self.layout.v_start + self.own_values)
        self.of_values.load(words.ptr_to([0]), start, group * 16, feature, True)
        return words

    def wide_values(self, stage: Expr, group: int, feature: int) -> Expr:
        """8 keys by 8 features of 32 bits."""
        start = stage + (self.layout.v_start + self.own_values)
        return self.of_words.load(start, group * 8, feature)
