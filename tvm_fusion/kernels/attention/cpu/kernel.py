"""Attention on a CPU: queries along the vectors, keys by blocks, scores in the first-level cache.

    for each attention and tile of queries, in parallel:
        qt[d, v] = scale * q                                     v: the queries of the tile
        for each block of keys that a query of the tile sees:
            s[n, v] = sum_d k[n, d] * qt[d, v]                   register tiles
            s[n, v] = the logit; -inf where the key is hidden
            m'[v] = max(m[v], max_n s[n, v])
            s[n, v] = exp(s[n, v] - m'[v])
            l[v] = exp(m[v] - m'[v]) * l[v] + sum_n s[n, v]
            o[e, v] = exp(m[v] - m'[v]) * o[e, v] + sum_n v[n, e] * s[n, v]     register tiles
        y[v, e] = o[e, v] / l[v]

One number of a key or value meets a vector of queries, so keys and values are read where they lie,
nothing but the queries is packed, and no reduction crosses the lanes of a vector. The running
maximum and sum are those of Milakov and Gimelshein (Online normalizer calculation for softmax,
2018).

Where the CPU has AVX-512 BF16, products of bfloat16 take two terms at a time (see `pairs`): those
of queries, which are not scaled then, with keys that lie along the terms; and those of weights,
if the graph rounds them as well, with pairs of values that are copied side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var
from tvm.tirx import ForKind

from ...contraction.model import Axis, Extent, Operand
from ...cpu.contraction.bfloat16_pairs import (
    PAIR,
    dot,
    importing,
    neighbours,
    pair_at,
    pair_of,
    rounded_bits,
)
from ...cpu.loops import Loop, Loops, nest, pieces, seq
from ...cpu.machine import Machine
from ...cpu.math import f32, round_to_bfloat16
from ...cpu.nests.point import has_vector_form
from ...cpu.nests.scope import Scope, allocate, new_buffer
from ...cpu.stages.lanes import where
from ...cpu.stages.resolve import Point, Resolve
from ...cpu.stages.stages import offset
from ...program.expr import convert, dtype_of, number, same, unflatten, variables
from ..read.bounds import Bound, key_range
from ..read.model import Attention
from .tile import attention_tile

# The smallest float32: below every score, and its difference to -inf is -inf.
LOWEST = -3.4028234663852886e38
INFINITY = float("inf")


def write_attention(func: tirx.PrimFunc, attention: Attention, machine: Machine) -> tirx.PrimFunc:
    """Write an attention as scheduled loops for LLVM.

    Parameters
    ----------
    func : tirx.PrimFunc
        What the attention was read from: gives the parameters.
    attention : Attention
        Terms and features of known sizes; float32 or half precision; anything else may be symbolic.
    machine : Machine

    Returns
    -------
    tirx.PrimFunc
        Same parameters; for the `s_tir` pipeline.

    Raises
    ------
    Unsupported
        For symbolic terms or features, or no queries to fill a vector with.
    """
    body = _Writer(attention, machine).run()
    func = func.with_body(body)
    for key, value in (("tirx.is_scheduled", True), ("op_pattern", 8), ("tirx.noalias", True)):
        func = func.with_attr(key, value)
    return func


class _Writer:
    """The loops of one attention; a method writes one line of the module's docstring."""

    def __init__(self, attention: Attention, machine: Machine) -> None:
        self.attention = attention
        self.tile = attention_tile(attention.M, attention.D, attention.E, machine)
        self.loops = Loops("int64")
        self.scope = Scope(self.loops, {}, machine.scales)
        self.range = key_range(attention)
        self.scale = _plain_scale(attention)
        self.M, self.N = self._size(attention.M), self._size(attention.N)
        self.pairs_terms = machine.dots_pairs and self._terms_lie_in_pairs()
        self.pairs_keys = machine.dots_pairs and self._weights_are_rounded()
        if self.pairs_terms and self.scale != 1.0:
            self.scale = None

    def _size(self, extent: Extent) -> Expr:
        return self.loops.imm(extent) if isinstance(extent, int) else convert(extent, "int64")

    def imm(self, value: int) -> Expr:
        """An index constant."""
        return self.loops.imm(value)

    def _terms_lie_in_pairs(self) -> bool:
        """Whether scores are sums over pairs: of plain bfloat16, contiguous in the keys."""
        attention = self.attention
        if not (_is_plain(attention.q) and _is_plain(attention.k)) or attention.D % 2:
            return False
        pair = self.loops.new("d", attention.D // 2).value
        first, second = (
            self._load(attention.k, self._along(attention.terms, pair * self.imm(2) + self.imm(n)))
            for n in range(2)
        )
        apart = offset(second.source, list(second.indices))
        apart = apart - offset(first.source, list(first.indices))
        return number(self.loops.simplify(apart)) == 1

    def _weights_are_rounded(self) -> bool:
        """Whether results are sums over pairs: of weights that the graph rounds, plain values."""
        return self.attention.weight_dtype == "bfloat16" and _is_plain(self.attention.v)

    # ---- the parallel loop

    def run(self) -> tirx.Stmt:
        """All tiles of all attentions."""
        width = self.imm(self.tile.queries)
        self.tiles = self.loops.simplify(tirx.FloorDiv(self.M + width - self.imm(1), width))
        total = self.loops.simplify(self._size(self.attention.B) * self.tiles)
        task = self.loops.new("task", total, ForKind.PARALLEL)
        binds: list[tirx.Stmt] = []
        self._place(task.value, binds)
        self._allocate()
        body = seq(self._start(), self._keys(), self._finish())
        tasks = task.around(seq(*binds, *self.scope.allocated, body))
        return importing(tasks) if self.pairs_terms or self.pairs_keys else tasks

    def _place(self, task: Expr, binds: list[tirx.Stmt]) -> None:
        """Which attention and which queries a task is about.

        Where later queries see more keys, tiles come from both ends in turn: tasks go to threads in
        runs, and each run has about the same work then.
        """
        at = self.loops.simplify(tirx.FloorMod(task, self.tiles))
        if any(bound.slope for bound in self.range.bounds):
            half, last = tirx.FloorDiv(at, self.imm(2)), self.tiles - self.imm(1)
            even = tirx.EQ(tirx.FloorMod(at, self.imm(2)), self.imm(0))
            at = tirx.Select(even, half, last - half)
        self.first = self._bound("query", at * self.imm(self.tile.queries), self.M, binds)
        left = self.M - self.first
        self.count = self._bound(
            "queries", tirx.Min(left, self.imm(self.tile.queries)), self.tile.queries + 1, binds
        )
        batch = self.loops.simplify(tirx.FloorDiv(task, self.tiles))
        values = unflatten(batch, [a.extent for a in self.attention.batch], self.loops.analyzer)
        self.env: dict[Var, Expr] = {}
        for axis, value in zip(self.attention.batch, values, strict=True):
            self.env[axis.var] = self._bound(str(axis.var), value, axis.extent, binds)

    def _bound(self, name: str, value: Expr, extent: Expr | int, binds: list[tirx.Stmt]) -> Expr:
        """A variable for an index from 0 to `extent`."""
        value = self.loops.simplify(value)
        if number(value) is not None:
            return value
        extent = extent if isinstance(extent, int) else convert(extent, "int64")
        var = self.loops.new(name, extent).var
        binds.append(tirx.Bind(var, value))
        return var

    def _allocate(self) -> None:
        attention, tile = self.attention, self.tile
        self.rows = [self.imm(v * tile.lanes) for v in range(tile.vectors)]
        width = tile.queries
        terms = (attention.D // 2, PAIR) if self.pairs_terms else (attention.D, "float32")
        self.q = self.scope.allocate("queries", [terms[0], width], terms[1])
        self.s = self.scope.allocate("scores", [tile.keys, width], "float32")
        self.o = self.scope.allocate("results", [attention.E, width], "float32")
        self.m, self.new, self.l, self.shrink = (
            self.scope.allocate(name, [width], "float32")
            for name in ("largest", "larger", "sums", "shrink")
        )
        self.staged_k = None
        if not self.pairs_terms:
            self.staged_k = self._staged("keys", attention.k, attention.D)
        if self.pairs_keys:
            pairs = (tile.keys + 1) // 2
            self.p = self.scope.allocate("weights", [pairs, width], PAIR)
            self.staged_v = self.scope.allocate("values", [pairs, attention.E], PAIR)
        else:
            self.staged_v = self._staged("values", attention.v, attention.E)

    def _staged(self, name: str, operand: Operand, length: int) -> Var | None:
        """A float32 copy of a block of keys or values; None where they are read in place."""
        load = operand.load
        if load is not None and dtype_of(load) == "float32" and not operand.bindings:
            return None
        return self.scope.allocate(name, [self.tile.keys, length], "float32")

    # ---- the tile of queries

    def _start(self) -> tirx.Stmt:
        """The queries as columns; no keys seen yet. Queries beyond the end repeat the last one."""
        term = self.loops.new("d", self.q.ty.shape[0])
        query = self.loops.new("v", self.tile.queries)
        at = tirx.Min(self.first + query.value, self.M - self.imm(1))
        value, ops = self._query(self.env | self._along(self.attention.queries, at), term.value)
        store = tirx.BufferStore(self.q, value, [term.value, query.value])
        feature = self.loops.new("e", self.attention.E)
        zero = self._vectors(lambda v: tirx.BufferStore(self.o, f32(0), [feature.value, v]))
        return seq(
            nest([query, term], [*ops, store]),
            feature.around(zero),
            self._vectors(lambda v: tirx.BufferStore(self.m, f32(LOWEST), [v])),
            self._vectors(lambda v: tirx.BufferStore(self.l, f32(0), [v])),
        )

    def _query(self, env: dict[Var, Expr], term: Expr) -> tuple[Expr, list]:
        """A term of a query, scaled; or a pair of them as they are."""
        attention = self.attention

        def element(at: Expr) -> Expr:
            return self._load(attention.q, env | self._along(attention.terms, at))

        if self.pairs_terms:
            return pair_at(term, self.imm(attention.D), True, element), []
        value, ops = self._value(attention.q, env | self._along(attention.terms, term))
        return value if self.scale in (None, 1.0) else value * f32(self.scale), ops

    def _keys(self) -> tirx.Stmt:
        """The blocks of keys that a query of the tile may see."""
        binds: list[tirx.Stmt] = []
        first, whole_first, whole_end, end = self._seen(binds)
        size = self.imm(self.tile.keys)
        blocks = tirx.FloorDiv(end - first + size - self.imm(1), size)
        block = self.loops.new("block", self.loops.simplify(blocks))
        inner: list[tirx.Stmt] = []
        start = self._bound("key", first + block.value * size, self.N, inner)
        count = self._bound("count", tirx.Min(size, end - start), self.tile.keys + 1, inner)
        looked = self._logits(start, count, hides=True)
        plain = self._logits(start, count, hides=False)
        if whole_end is not None:
            whole = tirx.And(tirx.GE(start, whole_first), tirx.LE(start + count, whole_end))
            logits = tirx.IfThenElse(whole, seq(plain), looked)
        else:
            logits = plain if self.attention.visible is None else looked
        body = seq(
            *inner,
            self._copies(start, count),
            self._scores(start, count),
            logits,
            self._weights(count),
            self._results(start, count),
        )
        return seq(*binds, block.around(body))

    def _seen(self, binds: list[tirx.Stmt]) -> tuple[Expr, Expr | None, Expr | None, Expr]:
        """Keys from `first` to `end` may be seen; from `whole_first` to `whole_end`, by all."""
        last = self.first + self.count - self.imm(1)
        first, end = self.imm(0), self.N
        whole_first, whole_end = first, end
        for bound in self.range.bounds:
            low, high = self._ends(bound, last, binds)
            if bound.upper:
                end = tirx.Min(end, high + self.imm(1))
                whole_end = tirx.Min(whole_end, low + self.imm(1))
            else:
                first, whole_first = tirx.Max(first, low), tirx.Max(whole_first, high)
        end = self._bound("end", tirx.Max(end, self.imm(0)), self.N + self.imm(1), binds)
        first = self._bound("begin", tirx.Min(first, end), self.N + self.imm(1), binds)
        if self.range.rest or not self.range.bounds:
            return first, None, None, end
        return first, whole_first, whole_end, end

    def _ends(self, bound: Bound, last: Expr, binds: list[tirx.Stmt]) -> tuple[Expr, Expr]:
        """The least and the largest bound of the tile's queries."""
        rest = convert(self._resolved(bound.rest, self.env, binds), "int64")
        ends = [self.imm(bound.slope) * row + rest for row in (self.first, last)]
        low, high = ends if bound.slope >= 0 else reversed(ends)
        return self.loops.simplify(low), self.loops.simplify(high)

    # ---- a block of keys

    def _copies(self, start: Expr, count: Expr) -> tirx.Stmt:
        """Keys and values in float32, where they are not read in place."""
        parts = []
        for operand, staged, axes, length in (
            (self.attention.k, self.staged_k, self.attention.terms, self.attention.D),
            (self.attention.v, self.staged_v, self.attention.features, self.attention.E),
        ):
            if staged is None:
                continue
            pairs = staged is self.staged_v and self.pairs_keys
            key = self.loops.new("n", self._pairs(count) if pairs else count)
            element = self._pair_of_values(start, count, key.value) if pairs else None
            copy = self._copy(operand, staged, start, key.value, axes, length, element)
            parts.append(key.around(copy))
        return seq(*parts)

    def _pairs(self, count: Expr) -> Expr:
        return self.loops.simplify(tirx.FloorDiv(count + self.imm(1), self.imm(2)))

    def _pair_of_values(self, start: Expr, count: Expr, pair: Expr) -> Callable[[Expr], Expr]:
        """A feature of two values; of one and a zero behind an odd number of them."""
        attention = self.attention

        def feature(at: Expr) -> Expr:
            def element(key: Expr) -> Expr:
                env = self.env | self._along(attention.keys, start + key)
                return self._load(attention.v, env | self._along(attention.features, at))

            return pair_at(pair, count, False, element)

        return feature

    def _copy(
        self,
        operand: Operand,
        staged: Var,
        start: Expr,
        key: Expr,
        axes: Sequence[Axis],
        length: int,
        element: Callable[[Expr], Expr] | None,
    ) -> tirx.Stmt:
        """One key or value, or what `element` makes of several, in pieces of vectors."""
        env = self.env | self._along(self.attention.keys, start + key)

        def piece(first: int, width: int) -> tirx.Stmt:
            lane = self.loops.new("v", width, ForKind.VECTORIZED)
            at = self.imm(first) + lane.value
            if element is None:
                value, ops = self._value(operand, env | self._along(axes, at), lane)
            else:
                value, ops = element(at), []
            ops = [*ops, tirx.BufferStore(staged, value, [key, at])]
            return nest([lane if has_vector_form(ops) else _serial(lane)], ops)

        return seq(*(piece(first, width) for first, width in pieces(length, self.tile.lanes)))

    def _scores(self, start: Expr, count: Expr) -> tirx.Stmt:
        """s = k q: register tiles of keys by vectors of queries.

        A tile beyond the last key reads that one again; nobody reads its scores.
        """
        height = self.tile.score_rows
        tiles = tirx.FloorDiv(count + self.imm(height - 1), self.imm(height))
        index = self.loops.new("i", self.loops.simplify(tiles))
        first = index.value * self.imm(height)
        rows = [self.loops.simplify(first + self.imm(r)) for r in range(height)]
        whole = isinstance(self.attention.N, int) and self.attention.N % self.tile.keys == 0
        binds: list[tirx.Stmt] = []
        keys = []
        for row in rows:
            at = start + row
            if not (whole and not self.range.bounds):
                at = tirx.Min(at, self.N - self.imm(1))
            keys.append(self._bound("key", at, self.N, binds))

        def left(r: int, term: Expr) -> Expr:
            if self.staged_k is not None:
                row = tirx.Min(rows[r], count - self.imm(1))
                return tirx.BufferLoad(self.staged_k, [row, term])
            env = self.env | self._along(self.attention.keys, keys[r])
            if self.pairs_terms:
                env |= self._along(self.attention.terms, term * self.imm(2))
                return neighbours(self._load(self.attention.k, env), 1)
            return self._value(self.attention.k, env | self._along(self.attention.terms, term))[0]

        def right(term: Expr, v: Expr) -> Expr:
            return tirx.BufferLoad(self.q, [term, v])

        terms = self.q.ty.shape[0]
        tile = self._register_tile(height, terms, left, right, None, self.pairs_terms)
        stores = self._tile_stores(height, tile[1], lambda r, v, x: self._score(rows[r], v, x))
        return index.around(seq(*binds, tile[0], *stores))

    def _score(self, row: Expr, v: Expr, value: Expr) -> tirx.Stmt:
        return tirx.BufferStore(self.s, value, [row, v])

    def _logits(self, start: Expr, count: Expr, hides: bool) -> tirx.Stmt:
        """The logits in place of the scores, with what they read of masks and biases."""
        hides = hides and self.attention.visible is not None
        if self.scale is not None and not hides:
            return seq()
        key = self.loops.new("n", count)

        def point(lane: Loop, first: Expr) -> tirx.Stmt:
            at = self.loops.simplify(first + lane.value)
            query = tirx.Min(self.first + at, self.M - self.imm(1))
            env = self.env | self._along(self.attention.keys, start + key.value)
            env |= self._along(self.attention.queries, query)
            score = tirx.BufferLoad(self.s, [key.value, at])
            return self._logit(env, score, lane, [key.value, at], hides)

        return key.around(self._by_vector(point))

    def _logit(
        self, env: dict[Var, Expr], score: Expr, lane: Loop, at: list[Expr], hides: bool
    ) -> tirx.Stmt:
        """One vector of logits; by element where TVM has no vectors of what is in it."""
        attention, point = self.attention, Point(lane)
        resolve = Resolve(self.scope, {**env, attention.score: score}, point)
        for binding in attention.bindings:
            resolve.env[binding.var] = resolve.bind(binding.var.name, resolve(binding.value))
        ops = point.ops
        if self.scale is None:
            logit = convert(resolve(attention.logit), "float32")
            ops.append(tirx.BufferStore(self.s, logit, at))
        if hides:
            visible = resolve(attention.visible)
            # Of the stored logit: TVM's simplifier would look at its tree once a selection.
            shown = where(visible, score, f32(-INFINITY), self.loops.analyzer)
            ops.append(tirx.BufferStore(self.s, shown, at))
        return nest([lane if has_vector_form(ops) else _serial(lane)], ops)

    def _weights(self, count: Expr) -> tirx.Stmt:
        """Weights in place of the logits; how much earlier ones shrink; the new sums."""
        key, other = self.loops.new("n", count), self.loops.new("n", count)

        def load(buffer: Var, *at: Expr) -> Expr:
            return tirx.BufferLoad(buffer, list(at))

        def larger(v: Expr) -> tirx.Stmt:
            value = tirx.Max(load(self.new, v), load(self.s, key.value, v))
            return tirx.BufferStore(self.new, value, [v])

        def shrink(lane: Loop, first: Expr) -> tirx.Stmt:
            v, point = self.loops.simplify(first + lane.value), Point(lane)
            resolve = Resolve(self.scope, {}, point)
            apart = resolve.bind("apart", load(self.m, v) - load(self.new, v))
            value = resolve.bind("shrink", resolve(tirx.exp(apart)))
            stores = [
                tirx.BufferStore(self.shrink, value, [v]),
                tirx.BufferStore(self.l, load(self.l, v) * value, [v]),
                tirx.BufferStore(self.m, load(self.new, v), [v]),
            ]
            return nest([lane], [*point.ops, *stores])

        def weigh(lane: Loop, first: Expr) -> tirx.Stmt:
            v, point = self.loops.simplify(first + lane.value), Point(lane)
            resolve = Resolve(self.scope, {}, point)
            apart = resolve.bind("apart", load(self.s, other.value, v) - load(self.m, v))
            value = resolve.bind("weight", resolve(tirx.exp(apart)))
            stores = [
                tirx.BufferStore(self.s, value, [other.value, v]),
                tirx.BufferStore(self.l, load(self.l, v) + value, [v]),
            ]
            return nest([lane], [*point.ops, *stores])

        return seq(
            self._vectors(lambda v: tirx.BufferStore(self.new, load(self.m, v), [v])),
            key.around(self._vectors(larger)),
            self._by_vector(shrink),
            other.around(self._by_vector(weigh)),
            self._pairs_of_weights(count) if self.pairs_keys else None,
        )

    def _pairs_of_weights(self, count: Expr) -> tirx.Stmt:
        """The weights rounded, two keys side by side; a zero behind an odd number of them."""
        pair = self.loops.new("n", self._pairs(count))

        def store(v: Expr) -> tirx.Stmt:
            def element(key: Expr) -> Expr:
                weight = tirx.BufferLoad(self.s, [self.loops.simplify(key), v])
                return rounded_bits(round_to_bfloat16(weight))

            value = pair_of(pair.value, count, False, element)
            return tirx.BufferStore(self.p, value, [pair.value, v])

        return pair.around(self._vectors(store))

    def _results(self, start: Expr, count: Expr) -> tirx.Stmt:
        """o = shrink * o + v s: register tiles of features by vectors of queries."""
        return seq(
            *(
                self._features(start, count, first, number_of, height)
                for first, number_of, height in _runs(self.attention.E, self.tile.result_rows)
            )
        )

    def _features(
        self, start: Expr, count: Expr, first: int, number_of: int, height: int
    ) -> tirx.Stmt:
        """`number_of` register tiles of `height` features from the feature `first` on."""
        index = self.loops.new("i", number_of)
        base = self.imm(first) + index.value * self.imm(height)
        rows = [self.loops.simplify(base + self.imm(r)) for r in range(height)]

        def left(r: int, key: Expr) -> Expr:
            if self.staged_v is not None:
                return tirx.BufferLoad(self.staged_v, [key, rows[r]])
            env = self.env | self._along(self.attention.keys, start + key)
            env |= self._along(self.attention.features, rows[r])
            return self._value(self.attention.v, env)[0]

        def right(key: Expr, v: Expr) -> Expr:
            return tirx.BufferLoad(self.p if self.pairs_keys else self.s, [key, v])

        def shrunk(r: int, v: Expr) -> Expr:
            return tirx.BufferLoad(self.o, [rows[r], v]) * tirx.BufferLoad(self.shrink, [v])

        steps = self._pairs(count) if self.pairs_keys else count
        tile = self._register_tile(height, steps, left, right, shrunk, self.pairs_keys)
        stores = self._tile_stores(
            height, tile[1], lambda r, v, x: tirx.BufferStore(self.o, x, [rows[r], v])
        )
        return index.around(seq(tile[0], *stores))

    # ---- register tiles

    def _register_tile(
        self,
        height: int,
        steps: Expr,
        left: Callable[[int, Expr], Expr],
        right: Callable[[Expr, Expr], Expr],
        start: Callable[[int, Expr], Expr] | None,
        paired: bool,
    ) -> tuple[tirx.Stmt, Var]:
        """``acc[r, v] = start + sum over steps of left[r] * right[v]``, and the buffer of it.

        Each statement is about one vector, so that LLVM keeps all of them in registers.
        """
        lanes = self.tile.lanes
        size = [self.imm(height * self.tile.vectors), self.imm(lanes)]
        acc = new_buffer("acc", size, "float32")
        step = self.loops.new("k", steps)

        def each(value: Callable[[int, Expr, list[Expr]], Expr]) -> list[tirx.Stmt]:
            stmts = []
            for r in range(height):
                for c, first in enumerate(self.rows):
                    lane = self.loops.new("v", lanes, ForKind.VECTORIZED)
                    at = [self.imm(r * self.tile.vectors + c), lane.value]
                    v = self.loops.simplify(first + lane.value)
                    stmts.append(lane.around(tirx.BufferStore(acc, value(r, v, at), at)))
            return stmts

        def begin(r: int, v: Expr, at: list[Expr]) -> Expr:
            return f32(0) if start is None else start(r, v)

        def add(r: int, v: Expr, at: list[Expr]) -> Expr:
            product = left(r, step.value) * right(step.value, v)
            return tirx.BufferLoad(acc, at) + product

        def add_pairs() -> list[tirx.Stmt]:
            zero, one = self.imm(0), self.imm(1)
            stmts = []
            for r in range(height):
                for c, first in enumerate(self.rows):
                    at = [self.imm(r * self.tile.vectors + c), tirx.Ramp(zero, one, lanes)]
                    vector = right(step.value, tirx.Ramp(first, one, lanes))
                    value = dot(tirx.BufferLoad(acc, at), left(r, step.value), vector)
                    stmts.append(tirx.BufferStore(acc, value, at))
            return stmts

        body = add_pairs() if paired else each(add)
        return seq(allocate(acc), *each(begin), step.around(seq(*body))), acc

    def _tile_stores(
        self, height: int, acc: Var, store: Callable[[int, Expr, Expr], tirx.Stmt]
    ) -> list[tirx.Stmt]:
        stmts = []
        for r in range(height):
            for c, first in enumerate(self.rows):
                lane = self.loops.new("v", self.tile.lanes, ForKind.VECTORIZED)
                value = tirx.BufferLoad(acc, [self.imm(r * self.tile.vectors + c), lane.value])
                v = self.loops.simplify(first + lane.value)
                stmts.append(lane.around(store(r, v, value)))
        return stmts

    # ---- outputs

    def _finish(self) -> tirx.Stmt:
        """The averages, as the outputs want them."""
        attention = self.attention
        feature = self.loops.new("e", attention.E)

        def inverse(v: Expr) -> tirx.Stmt:
            total = tirx.BufferLoad(self.l, [v])
            # A row that sees no key has the result 0; a sum that is no number stays none.
            value = tirx.Select(tirx.EQ(total, f32(0)), f32(0), f32(1) / total)
            return tirx.BufferStore(self.shrink, value, [v])

        def divide(v: Expr) -> tirx.Stmt:
            at = [feature.value, v]
            value = tirx.BufferLoad(self.o, at) * tirx.BufferLoad(self.shrink, [v])
            return tirx.BufferStore(self.o, value, at)

        query = self.loops.new("i", self.count)
        env = self.env | self._along(attention.queries, self.first + query.value)
        return seq(
            self._vectors(inverse),
            feature.around(self._vectors(divide)),
            query.around(seq(self._row_outputs(env, query.value), self._outputs(env, query.value))),
        )

    def _lse(self, at: Expr) -> Expr:
        """The logarithm of the sum of a row's weights: -inf of none."""
        return tirx.log(tirx.BufferLoad(self.l, [at])) + tirx.BufferLoad(self.m, [at])

    def _row_outputs(self, env: dict[Var, Expr], at: Expr) -> tirx.Stmt:
        if not self.attention.row_outputs:
            return seq()
        point = Point()
        resolve = Resolve(self.scope, env, point)
        env[self.attention.lse] = resolve.bind("lse", resolve(self._lse(at)))
        for output in self.attention.row_outputs:
            self._store(output, resolve)
        return nest([], point.ops)

    def _outputs(self, env: dict[Var, Expr], at: Expr) -> tirx.Stmt:
        """The outputs of a query, feature by feature."""
        attention, point = self.attention, Point()
        feature = self.loops.new("e", attention.E)
        env = env | self._along(attention.features, feature.value)
        resolve = Resolve(self.scope, env, point)
        result = tirx.BufferLoad(self.o, [feature.value, at])
        env[attention.result] = resolve.bind("result", result)
        values = [b.value for b in attention.output_bindings]
        values += [o.value for o in attention.outputs]
        if attention.lse in variables(*values):
            env[attention.lse] = resolve.bind("lse", resolve(self._lse(at)))
        for binding in attention.output_bindings:
            env[binding.var] = resolve.bind(binding.var.name, resolve(binding.value))
        for output in attention.outputs:
            self._store(output, resolve)
        return nest([feature], point.ops)

    def _store(self, output, resolve: Resolve) -> None:
        buffer = self.attention.params[output.param].var
        value = convert(resolve(output.value), output.dtype)
        indices = [self.loops.simplify(resolve(i)) for i in output.indices]
        resolve.point.ops.append(tirx.BufferStore(buffer, value, indices))

    # ---- helpers

    def _along(self, axes: Sequence[Axis], flat: Expr) -> dict[Var, Expr]:
        """What the axes are at point number `flat` of all of them."""
        at = unflatten(flat, [a.extent for a in axes], self.loops.analyzer)
        return {a.var: i for a, i in zip(axes, at, strict=True)}

    def _value(
        self, operand: Operand, env: dict[Var, Expr], lane: Loop | None = None
    ) -> tuple[Expr, list]:
        """An operand at a point, in float32, and the statements that compute it."""
        point = Point(lane)
        resolve = Resolve(self.scope, dict(env), point)
        for binding in operand.bindings:
            resolve.env[binding.var] = resolve.bind(binding.var.name, resolve(binding.value))
        return convert(resolve(operand.value), "float32"), point.ops

    def _load(self, operand: Operand, env: dict[Var, Expr]) -> TensorLoad:
        """What a plain operand loads at a point."""
        return Resolve(self.scope, dict(env), Point())(operand.load)

    def _resolved(self, expr: Expr, env: dict[Var, Expr], binds: list[tirx.Stmt]) -> Expr:
        point = Point()
        value = Resolve(self.scope, dict(env), point)(expr)
        binds.extend(point.ops)
        return value

    def _vectors(self, body: Callable[[Expr], tirx.Stmt]) -> tirx.Stmt:
        """A statement for each vector of queries."""
        return self._by_vector(
            lambda lane, first: lane.around(body(self.loops.simplify(first + lane.value)))
        )

    def _by_vector(self, body: Callable[[Loop, Expr], tirx.Stmt]) -> tirx.Stmt:
        lanes = self.tile.lanes
        return seq(
            *(body(self.loops.new("v", lanes, ForKind.VECTORIZED), first) for first in self.rows)
        )


def _runs(length: int, height: int) -> list[tuple[int, int, int]]:
    """First row, number and height of equal register tiles; the rest has one of its own."""
    whole, rest = divmod(length, height)
    runs = [(0, whole, height)] if whole else []
    return [*runs, (whole * height, 1, rest)] if rest else runs


def _serial(loop: Loop) -> Loop:
    return Loop(loop.var, loop.extent)


def _is_plain(operand: Operand) -> bool:
    """Whether an operand is bfloat16 as it lies in memory."""
    load = operand.load
    return load is not None and dtype_of(load) == "bfloat16" and not operand.bindings


def _plain_scale(attention: Attention) -> float | None:
    """The factor of a logit that is a multiple of the score; None for any other logit."""
    logit = attention.logit
    if attention.bindings and not logit.same_as(attention.score):
        used = set(variables(logit))
        if used != {attention.score}:
            return None
    if same(logit, attention.score):
        return 1.0
    if isinstance(logit, tirx.Mul):
        for a, b in ((logit.a, logit.b), (logit.b, logit.a)):
            if same(a, attention.score) and number(b) is not None:
                return float(number(b))
    return None
