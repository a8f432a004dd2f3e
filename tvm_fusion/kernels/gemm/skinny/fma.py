"""Skinny products on the CUDA cores: each thread sums its own terms of its own columns.

A warp's lanes lie along K (weights as (N, K)) or side by side along N (weights as (K, N)), `lanes`
of them along N; lanes of one column are summed by shuffles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...contraction.reader import Product, Segment
from ...gpu.product_frame import Frame, coordinates
from ...program.expr import constant, convert, same, substitute
from .config import WARP, SkinnyConfig
from .values import Loaded, Values, inlined, values_of

# What both ways to multiply share: where a thread stands, and the products of one sum.


@dataclass(frozen=True, slots=True, eq=False)
class Position:
    """A thread's place.

    Attributes
    ----------
    batch : the axes of the batch.
    tile : the column tile of the segment.
    share : which part of the sum the warp takes.
    across : the warp's place along the columns of the tile.
    lane : within the warp.
    """

    batch: dict[Var, Expr]
    tile: Expr
    share: Expr
    across: Expr
    lane: Expr


@dataclass(slots=True, eq=False)
class Step:
    """What one block of terms needs, on its way from memory."""

    chunk: Expr
    a: dict[tuple[int, int], Loaded]
    b: dict[tuple[int, int, int], Loaded]


@dataclass(slots=True, eq=False)
class Factors:
    """Both operands of the products of a segment.

    `shares[p]` is the first product with the same left operand as product `p`.
    """

    frame: Frame
    segment: Segment
    config: SkinnyConfig
    a: list[Values]
    b: list[Values]
    shares: list[int]

    @property
    def products(self) -> Sequence[Product]:
        """Products of the segment."""
        return self.segment.products

    def terms(self, values: Values, chunk: Expr) -> dict[Var, Expr]:
        """The axes of the sum at block number `chunk`."""
        return coordinates(values.reader.k.axes, chunk, self.frame)

    def beside(self, values: Values, unit: Expr) -> dict[Var, Expr]:
        """The rows or columns number `unit`."""
        return coordinates(values.reader.side.axes, unit, self.frame)


def shared_operands(products: Sequence[Product]) -> list[int]:
    """For each product the first one that has the same left operand."""
    found: list[int] = []
    for number, product in enumerate(products):
        mine = inlined(product.a)
        for first in dict.fromkeys(found):
            other = products[first]
            renamed = {k.var: o.var for k, o in zip(product.k, other.k, strict=False)}
            alike = [k.extent for k in product.k] == [k.extent for k in other.k]
            if alike and same(substitute(mine, renamed), inlined(other.a)):
                found.append(first)
                break
        else:
            found.append(number)
    return found


UNROLLED_ROWS = 4
"""Rows whose values are loaded ahead, like the weights."""


class FmaSum:
    """Sums of a segment in the registers of a thread: [column block, row, column of the block]."""

    def __init__(self, frame: Frame, segment: Segment, rows: int, config: SkinnyConfig):
        self.frame, self.segment, self.rows, self.config = frame, segment, rows, config
        self.factors = Factors(frame, segment, config, [], [], shared_operands(segment.products))
        for number, p in enumerate(segment.products):
            b = values_of(frame, segment, p, p.b, segment.n, config.steps, config.width)
            first = self.factors.shares[number]
            a = (
                self.factors.a[first]
                if first < number
                else values_of(frame, segment, p, p.a, segment.m, config.steps)
            )
            self.factors.b.append(b)
            self.factors.a.append(a)
        self.runs = config.columns
        self.along_k = WARP // config.lanes
        self.chunks = segment.products[0].K // config.steps

    def start(self, position: Position) -> Expr:
        """Zeroes the sums; the thread's first block of terms."""
        self.position, config = position, self.config
        self.beside = position.lane if config.lanes == WARP else position.lane % config.lanes
        size = config.columns * self.rows * config.width
        self.sums = []
        for product in self.segment.products:
            self.sums.append(T.alloc_local((size,), product.dtype))
            with T.serial(size, unroll=True) as i:
                T.buffer_store(self.sums[-1], constant(0, product.dtype), [i])
        if self.along_k == 1:
            return position.share
        return T.Bind(position.share * self.along_k + position.lane // config.lanes)

    def _column(self, c: int) -> Expr:
        """The column block number `c` of the thread, in the segment."""
        config, position = self.config, self.position
        first = position.tile * (config.warps_n * config.columns) + position.across * config.columns
        unit = (first + c) * config.lanes + (self.beside if config.lanes > 1 else 0)
        last = self.segment.N // config.width - 1
        ragged = self.segment.N % config.block_n != 0
        return T.Bind(T.min(unit, constant(last, "int32")) if ragged else unit)

    def columns(self) -> None:
        """Finds the thread's columns; what lies beyond the matrix reads the last ones."""
        self.units = [self._column(c) for c in range(self.config.columns)]

    def weights_of(self) -> Iterator[tuple[tuple[int, int, int], Values, Expr]]:
        """Key, values and column of each of the thread's runs of weights."""
        for p, values in enumerate(self.factors.b):
            for c, unit in enumerate(self.units):
                yield (p, c, 0), values, unit

    def load_rows(self, step: Step) -> None:
        """Emits the loads of the left operands of a block of terms, if they are few."""
        for p in dict.fromkeys(self.factors.shares) if self.rows <= UNROLLED_ROWS else ():
            values = self.factors.a[p]
            for m in range(self.rows):
                env = self.env(values, step.chunk, constant(m, "int32"))
                step.a[p, m] = values.load(env)

    def env(self, values: Values, chunk: Expr, unit: Expr) -> dict[Var, Expr]:
        """The axes of an operand at a block of terms and a row or column."""
        factors = self.factors
        return {
            **self.position.batch,
            **factors.terms(values, chunk),
            **factors.beside(values, unit),
        }

    def multiply(self, step: Step) -> None:
        """Adds the products of one block of terms."""
        weights = {}
        for p, values in enumerate(self.factors.b):
            for c, unit in enumerate(self.units):
                env, loaded = self.env(values, step.chunk, unit), step.b[p, c, 0]
                floats = values.floats(loaded, env)
                scales = [values.factor(part, loaded, env) for part in values.step]
                weights[p, c] = floats, scales
        for m in self._each_row():
            for first in dict.fromkeys(self.factors.shares):
                self._row(step, weights, first, m)

    def _each_row(self) -> Iterator[int | Expr]:
        if self.rows <= UNROLLED_ROWS:
            yield from range(self.rows)
            return
        with T.serial(self.rows, unroll=True) as m:
            yield m

    def _row(self, step: Step, weights: dict, first: int, m: int | Expr) -> None:
        values, config = self.factors.a[first], self.config
        row = constant(m, "int32") if isinstance(m, int) else m
        env = self.env(values, step.chunk, row)
        loaded = step.a[first, m] if isinstance(m, int) else values.load(env)
        left = values.floats(loaded, env)
        scale = values.factor(values.step[0], loaded, env)
        for p, share in enumerate(self.factors.shares):
            if share != first:
                continue
            dtype = self.segment.products[p].dtype
            for c in range(config.columns):
                right, scales = weights[p, c]
                for v in range(config.width):
                    at = (c * self.rows + m) * config.width + v
                    terms = list(zip(left, right[v :: config.width], strict=True))
                    self._add(self.sums[p], at, terms, [scale, scales[v]], dtype)

    def _add(self, sums: Expr, at: Expr | int, terms: list, scales: list, dtype: str) -> None:
        scales = [scale for scale in scales if scale is not None]
        total = None if scales else sums[at]
        for a, b in terms:
            term = convert(a, dtype) * convert(b, dtype)
            total = term if total is None else total + term
        for scale in scales:
            total = total * scale
        T.buffer_store(sums, sums[at] + total if scales else total, [at])

    def finish(self, put) -> None:
        """Sums the lanes of each column; calls ``put(product, row, column, value)``."""
        config = self.config
        size = config.columns * self.rows * config.width
        step = WARP // 2
        while step >= config.lanes:
            for sums in self.sums:
                with T.serial(size, unroll=True) as i:
                    mask = T.uint32(0xFFFFFFFF)
                    other = T.tvm_warp_shuffle_xor(mask, sums[i], step, WARP, WARP)
                    T.buffer_store(sums, sums[i] + other, [i])
            step //= 2
        with T.If(self.position.lane < config.lanes), T.Then():
            for p, sums in enumerate(self.sums):
                with T.serial(self.rows, unroll=True) as m:
                    for c in range(config.columns):
                        place = (self.position.across * config.columns + c) * config.lanes
                        unit = place + (self.beside if config.lanes > 1 else 0)
                        for v in range(config.width):
                            value = sums[(c * self.rows + m) * config.width + v]
                            put(p, m, unit * config.width + v, value)
