"""The two products of the decode attention: fragments of queries, scores and weighted values.

A warp has the queries of its block in registers, or reads them again at each step, and adds up the
weighted values of its keys in registers. Where the unfused graph keeps float32 weights, and a
float32 result, each weight is the sum of two halves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...gemm.mma.units import CHUNK, load_matrices, multiply
from ...gpu.access import half_of
from ...gpu.frame import then
from ...gpu.intrinsics import device_call, pack_halves
from ...gpu.product_frame import Frame, coordinates, f32, lower
from ...program.expr import HALF_DTYPES, constant, convert
from .config import MATRIX, Layout, Tile
from .problem import DecodeProblem

# Fragments of mma.m16n8k16 out of shared memory: queries, keys and values, by ldmatrix.
#
# ldmatrix hands out four 8 x 8 matrices, the rows of each by the addresses of eight lanes: two
# neighbouring matrices of keys (or queries) by two neighbouring chunks of 16 bytes.


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
        swizzled = T.bitwise_xor(chunk, tile.turn(row))
        self.starts = [
            T.Bind(line + T.bitwise_xor(swizzled, T.int32(pair)) * CHUNK)
            for pair in range(0, tile.swizzled, 2)
        ]

    def at(self, group: int, column: int) -> Expr:
        """Distance of the lane's row from the start of the stage; `column` counts 16 elements."""
        further, pair = divmod(column, len(self.starts))
        chunks = further * self.tile.swizzled
        return self.starts[pair] + (group * 2 * MATRIX * self.tile.width + chunks * CHUNK)


def _loaded(place: Expr, transposed: bool) -> Expr:
    words = T.alloc_local((4,), "uint32")
    T.evaluate(load_matrices(words.ptr_to([0]), place, transposed))
    return words


QUERIES_AHEAD = 8
"""Elements of the queries that a thread has on their way."""


class Products:
    """What a warp multiplies; `memory` holds the rings of all warps and, behind them, the queries.

    `sums` are those of each tile of rows: weighted values, [8 features, two rows, two features].
    """

    def __init__(
        self, frame: Frame, problem: DecodeProblem, layout: Layout, memory: Expr, lane: Expr
    ):
        self.frame, self.problem, self.layout, self.memory = frame, problem, layout, memory
        attention = problem.attention
        self.dtype = attention.operand_dtype
        self.tiles = -(-layout.rows // 16)
        self.halves = 1 if layout.rows == 8 else 2
        self.twice = attention.weight_dtype not in HALF_DTYPES and any(
            output.dtype not in HALF_DTYPES for output in attention.outputs
        )
        self.fragments = Fragments(layout, lane)
        self.queries: list[list[Expr]] | None = None

    # ---- queries

    def put_queries(self, unit: Mapping[Var, Expr], first_row: Expr, thread: Expr) -> None:
        """The block's queries, rounded to half precision, into shared memory; zeros beside them."""
        threads, size = self.layout.config.threads, self.tiles * 16 * self.layout.terms
        starts = list(range(0, size, threads))
        for batch in range(0, len(starts), QUERIES_AHEAD):
            own = starts[batch : batch + QUERIES_AHEAD]
            values = T.alloc_local((len(own),), self.dtype)
            elements = [T.Bind(thread + start) for start in own]
            for i, element in enumerate(elements):
                self._get_query(unit, first_row, element, own[i], values, i)
            for i, element in enumerate(elements):
                row, term = element // self.layout.terms, element % self.layout.terms
                at = self.layout.ring_bytes + row * self.layout.query_pitch + term * 2
                body = "*(unsigned short*)p = *(const unsigned short*)v;"
                place, source = self.memory.ptr_to([at]), values.ptr_to([i])
                arguments = "void* p, const void* v"
                T.evaluate(device_call("void", "store_half", arguments, body, place, source))

    def _get_query(
        self,
        unit: Mapping[Var, Expr],
        first_row: Expr,
        element: Expr,
        start: int,
        into: Expr,
        i: int,
    ) -> None:
        """Element number `element`, which is at least `start`, into a register; 0 beside them."""
        layout, problem = self.layout, self.problem
        T.buffer_store(into, constant(0, self.dtype), [i])
        if start // layout.terms >= min(problem.rows, layout.rows):
            return
        row, term = T.Bind(element // layout.terms), T.Bind(element % layout.terms)
        there = first_row + row < problem.row_count(self.frame)
        exists = tirx.And(there, row < layout.rows)
        if layout.terms != problem.attention.D:
            exists = tirx.And(exists, term < problem.attention.D)
        with then(exists):
            T.buffer_store(into, self._query(unit, first_row + row, term), [i])

    def _query(self, unit: Mapping[Var, Expr], row: Expr, term: Expr) -> Expr:
        """One element, computed as the operand says."""
        attention, frame = self.problem.attention, self.frame
        flat = T.Bind(convert(row, frame.index))
        env: dict[Var, Expr] = {
            **self.problem.row_env(dict(unit), flat, frame),
            **coordinates(attention.terms, T.Bind(convert(term, frame.index)), frame),
        }
        for binding in attention.q.bindings:
            env[binding.var] = T.Bind(lower(frame.rewrite(binding.value, env), False))
        return convert(lower(frame.rewrite(attention.q.value, env), False), self.dtype)

    def begin(self) -> None:
        """The queries into registers, where these suffice; sums of nothing."""
        if self.layout.holds_queries:
            terms = range(self.layout.terms // 16)
            self.queries = [[self._load(tile, d) for d in terms] for tile in range(self.tiles)]
        self.sums = [self._zeros(self.layout.features // 2) for _ in range(self.tiles)]

    def _load(self, tile: int, d: int) -> Expr:
        return self.fragments.queries(self.memory, self.layout.ring_bytes, tile, d)

    def _zeros(self, size: int) -> Expr:
        array = T.alloc_local((size,), "float32")
        with T.serial(size, unroll=True) as i:
            T.buffer_store(array, f32(0), [i])
        return array

    # ---- products

    def scores(self, stage: Expr) -> list[Expr]:
        """The scores of a step, by tile of rows: [8 keys, two rows, two keys]."""
        groups = self.layout.config.step // 16
        scores = [self._zeros(groups * 8) for _ in range(self.tiles)]
        for d in range(self.layout.terms // 16):
            rows = [self.queries[t][d] if self.queries else self._load(t, d) for t in self._each]
            for group in range(groups):
                keys = self.fragments.keys(self.memory, stage, group, d)
                for tile in self._each:
                    self._multiply(scores[tile], group * 8, rows[tile], keys)
        return scores

    def add(self, stage: Expr, weights: Sequence[Expr]) -> None:
        """Adds the weighted values of a step."""
        for group in range(self.layout.config.step // 16):
            parts = [self._weights(weights[tile], group) for tile in self._each]
            for e in range(self.layout.features // 16):
                values = self.fragments.values(self.memory, stage, group, e)
                for tile in self._each:
                    for part in parts[tile]:
                        self._multiply(self.sums[tile], e * 8, part, values)

    def rescale(self, factors: Mapping[tuple[int, int], Expr]) -> None:
        """Takes the sums to a new maximum, where one has grown; factors by tile and half of it."""
        changed = None
        for factor in factors.values():
            own = factor < f32(1)
            changed = own if changed is None else tirx.Or(changed, own)
        with then(changed):
            for (tile, half), factor in factors.items():
                for j in range(self.layout.features // 8):
                    for v in range(2):
                        at = j * 4 + half * 2 + v
                        T.buffer_store(self.sums[tile], self.sums[tile][at] * factor, [at])

    @property
    def _each(self) -> range:
        return range(self.tiles)

    def _multiply(self, sums: Expr, at: int, a: Expr, b: Expr) -> None:
        """Two products of a 16 x 16 fragment, side by side."""
        for half in range(2):
            into = sums.ptr_to([at + half * 4])
            left, right = a.ptr_to([0]), b.ptr_to([half * 2])
            T.evaluate(multiply(self.dtype, self.dtype, 16, into, left, right))

    def _weights(self, weights: Expr, group: int) -> list[Expr]:
        """The weights of 16 keys as a fragment of A, and what its rounding has cut off as another;
        rows that do not exist have none."""
        parts = [T.alloc_local((4,), "uint32") for _ in range(1 + self.twice)]
        for i in range(4):
            at = group * 8 + i // 2 * 4 + i % 2 * 2
            pair = [weights[at], weights[at + 1]]
            for part in parts:
                word = T.uint32(0)
                if i % 2 < self.halves:
                    word = pack_halves(self.dtype, *pair)
                T.buffer_store(part, word, [i])
                if self.twice:
                    pair = [x - half_of(self.dtype, part[i], v) for v, x in enumerate(pair)]
        return parts
