"""Skinny products on tensor cores: sixteen columns of the result are the rows of an mma.m16n8k16.

Four threads share a sum, each with its own run of `steps` consecutive terms: any order of the terms
will do as long as both operands have the same, so that a thread's 16 bytes of weights are its
fragments as they lie. Rows of the result (up to 8 a tile, two tiles) are the columns of the mma.
Which column of the result is which row of the mma is free, too: a thread may read `width` columns
side by side, of weights that lie along the columns.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...contraction.reader import Segment
from ...gpu.intrinsics import device_call
from ...gpu.product_frame import Frame
from ...program.expr import constant
from .config import SkinnyConfig
from .fma import Factors, Position, Step, shared_operands
from .halves import Halves, Pair
from .values import Values, values_of

LANES = 4  # threads that share a sum
TILE_N, TILE_M = 16, 8  # columns and rows of the result in one mma


def mma(dtype: str, sums: Expr, a: list[Expr], b: list[Expr]) -> Expr:
    """``sums += a b`` of 16 x 16 by 16 x 8 halves; `sums` is the address of four float32."""
    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    names = ", ".join(f"%{i}" for i in range(4))
    body = (
        f'asm("mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{names}}}, '
        f'{{%4, %5, %6, %7}}, {{%8, %9}}, {{{names}}};" '
        ': "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) '
        ': "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));'
    )
    words = ", ".join(f"unsigned {name}" for name in ("a0", "a1", "a2", "a3", "b0", "b1"))
    return device_call("void", f"skinny_mma_{kind}", f"float* d, {words}", body, sums, *a, *b)


def common_order(columns: list[Halves]) -> list[Pair]:
    """Which points of every column come in one register."""
    orders = [each.order() for each in columns]
    first = orders[0]
    same = all(order == first for order in orders)
    return first if same else [(p, p + 1) for p in range(0, 2 * len(first), 2)]


class MmaSum:
    """Sums of a segment: [16 columns, tile of rows, two columns by two rows]."""

    def __init__(self, frame: Frame, segment: Segment, rows: int, config: SkinnyConfig):
        self.frame, self.segment, self.rows, self.config = frame, segment, rows, config
        self.dtype = config.tensor
        self.factors = Factors(frame, segment, config, [], [], shared_operands(segment.products))
        kept = {"steps": config.steps, "lanes": LANES, "half": self.dtype}
        for number, p in enumerate(segment.products):
            first = self.factors.shares[number]
            a = (
                self.factors.a[first]
                if first < number
                else values_of(frame, segment, p, p.a, segment.m, summed=False, **kept)
            )
            self.factors.a.append(a)
            b = values_of(frame, segment, p, p.b, segment.n, width=config.width, **kept)
            self.factors.b.append(b)
        self.rows_of = [Halves(values, self.dtype) for values in self.factors.a]
        self.weights = [
            [Halves(values, self.dtype, v) for v in range(config.width)]
            for values in self.factors.b
        ]
        self.tiles = -(-rows // TILE_M)
        self.runs = config.runs
        self.along_k = 1
        self.chunks = segment.products[0].K // (config.steps * LANES)

    def start(self, position: Position) -> Expr:
        """Zeroes the sums; the warp's first block of terms."""
        self.position = position
        self.group, self.thread = T.Bind(position.lane // LANES), T.Bind(position.lane % LANES)
        size = self.config.columns * self.tiles * 4
        self.sums = []
        for _ in self.segment.products:
            self.sums.append(T.alloc_local((size,), "float32"))
            with T.serial(size, unroll=True) as i:
                T.buffer_store(self.sums[-1], constant(0, "float32"), [i])
        return position.share

    def columns(self) -> None:
        """The thread's columns and rows; what lies beyond the matrix reads the last ones."""
        config, position = self.config, self.position
        ragged = self.segment.N % config.block_n != 0
        last = constant(self.segment.N // config.width - 1, "int32")
        first = position.tile * (config.block_n // config.width) + position.across * (
            config.columns * TILE_N // config.width
        )
        units = [first + run * TILE_M + self.group for run in range(self.runs)]
        self.units = [T.Bind(T.min(unit, last) if ragged else unit) for unit in units]
        limit = constant(self.rows - 1, "int32")
        self.lines = [
            T.Bind(T.min(self.group + tile * TILE_M, limit) if self.rows > 1 else limit)
            for tile in range(self.tiles)
        ]

    def weights_of(self) -> Iterator[tuple[tuple[int, int, int], Values, Expr]]:
        """Key, values and column of each of the thread's runs of weights."""
        for p, values in enumerate(self.factors.b):
            for run, unit in enumerate(self.units):
                yield (p, run, 0), values, unit

    def load_rows(self, step: Step) -> None:
        """Emits the loads of the left operands of a block of terms."""
        for p in dict.fromkeys(self.factors.shares):
            values = self.factors.a[p]
            for tile, line in enumerate(self.lines):
                step.a[p, tile] = values.load(self.env(values, step.chunk, line))

    def env(self, values: Values, chunk: Expr, unit: Expr) -> dict[Var, Expr]:
        """The axes of an operand at a block of terms and a row or column."""
        factors = self.factors
        env = {
            **self.position.batch,
            **factors.terms(values, chunk),
            **factors.beside(values, unit),
        }
        return env | {values.reader.k.lane: self.thread}

    def multiply(self, step: Step) -> None:
        """Adds the products of one block of terms."""
        left: dict[tuple, list[Expr]] = {}
        for p, halves in enumerate(self.weights):
            order, share = common_order(halves), self.factors.shares[p]
            for tile, line in enumerate(self.lines):
                key = share, tile, tuple(order)
                if key not in left:
                    env = self.env(self.factors.a[share], step.chunk, line)
                    left[key] = self.rows_of[share].scaled(step.a[share, tile], env, order)
            for c in range(self.config.columns):
                rows = [left[share, tile, tuple(order)] for tile in range(self.tiles)]
                self._block(step, p, c, order, rows)

    def _block(self, step: Step, p: int, c: int, order: list[Pair], rows: list[list[Expr]]) -> None:
        """Sixteen columns of one product, all rows."""
        values, weights, scales = self.factors.b[p], [], []
        for half in range(2):
            run, v = divmod(2 * c + half, self.config.width)
            loaded = step.b[p, run, 0]
            env = self.env(values, step.chunk, self.units[run])
            weights.append(self.weights[p][v].scaled(loaded, env, order))
            scales.append(values.factor(values.step[v], loaded, env))
        low, high = weights
        for tile, line in enumerate(rows):
            at = (c * self.tiles + tile) * 4
            sums, start = self.sums[p], at
            if scales[0] is not None:
                sums, start = T.alloc_local((4,), "float32"), 0
                for i in range(4):
                    T.buffer_store(sums, constant(0, "float32"), [i])
            for i in range(0, len(order), 2):
                a = [low[i], high[i], low[i + 1], high[i + 1]]
                T.evaluate(mma(self.dtype, sums.ptr_to([start]), a, line[i : i + 2]))
            if scales[0] is not None:
                for i in range(4):
                    value = self.sums[p][at + i] + sums[i] * scales[i // 2]
                    T.buffer_store(self.sums[p], value, [at + i])

    def finish(self, put) -> None:
        """Calls ``put(product, row, column, value)`` for the sums of rows that exist."""
        for p, sums in enumerate(self.sums):
            for tile in range(self.tiles):
                for i in range(2):
                    row = T.Bind(self.thread * 2 + (tile * TILE_M + i))
                    with T.If(row < self.rows), T.Then():
                        for c in range(self.config.columns):
                            for half in range(2):
                                place = self.position.across * (self.config.columns * TILE_N)
                                run, v = divmod(2 * c + half, self.config.width)
                                place = place + (run * TILE_M + self.group) * self.config.width
                                at = (c * self.tiles + tile) * 4 + 2 * half + i
                                put(p, row, place + v, sums[at])
