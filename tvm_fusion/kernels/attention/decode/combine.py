"""What the warps of a block, and the blocks of a cluster, have found becomes the outputs.

    warp    (o, m, l): sums of weighted values, maximum, sum of weights of the keys it has seen
    block   M = max m, o = sum 2^(m - M) o, l = sum 2^(m - M) l over its warps, in shared memory
    cluster every block owns a share of the elements: the others store theirs into its memory

The stores to other blocks are the only ones, in front of the only barrier of the cluster: nobody
reads another block's memory, so that a block may end when it has written its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...contraction.reader import Output
from ...gpu.frame import then
from ...gpu.intrinsics import cluster_store, cluster_sync, cluster_wait, ex2, rcp
from ...gpu.product_frame import Frame, coordinates, f32, lower
from ...program.expr import constant, convert
from .config import Layout
from .problem import DecodeProblem
from .softmax import Softmax

LN2 = 0.6931471805599453
UNROLL = 4
"""Elements that a thread finishes together, where it has many."""


class Combine:
    """The end of a kernel; `parts` and `stats` are the shared memory of the block's warps."""

    def __init__(
        self,
        frame: Frame,
        problem: DecodeProblem,
        layout: Layout,
        memory: tuple[Expr, Expr, Expr | None],
        thread: Expr,
        rank: Expr | None,
    ):
        self.frame, self.problem, self.layout = frame, problem, layout
        self.parts, self.stats, self.landing = memory
        self.thread, self.rank = thread, rank
        self.warps, self.split = layout.config.warps, layout.config.split
        self.features = problem.attention.E
        self.used = problem.rows if problem.chunks == 1 else layout.rows
        self.elements = self.used * self.features
        self.share = -(-self.elements // self.split)

    def publish(self, softmax: Softmax, sums: list[Expr], lane: Expr, warp: Expr) -> None:
        """A warp's results into the memory of its block."""
        rows, pitch = self.layout.rows, self.layout.part_pitch
        base = T.Bind(warp * rows + lane // 4)
        for number, (tile, half) in enumerate(softmax.parts):
            row = base + (tile * 16 + half * 8)
            with then(lane % 4 == 0):
                T.buffer_store(self.stats, softmax.top[number], [row * 2])
                T.buffer_store(self.stats, softmax.sum[number], [row * 2 + 1])
            for j in range(self.layout.features // 8):
                for v in range(2):
                    place = row * pitch + (lane % 4 * 2 + (j * 8 + v))
                    T.buffer_store(self.parts, sums[tile][j * 4 + half * 2 + v], [place])

    def emit(self, unit: Mapping[Var, Expr], first_row: Expr) -> None:
        """The outputs, once all warps of the block have published."""
        self.unit, self.first_row = unit, first_row
        if self.split == 1:
            self._each(self.elements, self._alone)
            return
        T.evaluate(cluster_wait())
        self._send_stats()
        self._each(self.elements, self._send)
        T.evaluate(cluster_sync())
        self._each(self.share, self._own)

    def _each(self, count: int, emit: Callable[[Expr], None]) -> None:
        """`emit` for all numbers below `count`, shared out over the threads."""
        threads = self.layout.config.threads
        rounds = count // threads
        looped = rounds // UNROLL if rounds > UNROLL else 0
        if looped:
            with T.serial(0, looped, unroll=False) as i:
                base = T.Bind(self.thread + i * (UNROLL * threads))
                for turn in range(UNROLL):
                    emit(T.Bind(base + turn * threads))
        for turn in range(looped * UNROLL, rounds):
            emit(T.Bind(self.thread + turn * threads))
        if count % threads:
            number = T.Bind(self.thread + rounds * threads)
            with then(number < count):
                emit(number)

    # ---- within a block

    def _of_block(self, row: Expr) -> tuple[list[Expr], Expr, Expr]:
        """The factor of each warp's results of a row, the row's maximum and sum of weights."""
        read = [T.Bind((row + warp * self.layout.rows) * 2) for warp in range(self.warps)]
        return _joined([(self.stats[at], self.stats[at + 1]) for at in read])

    def _value(self, factors: list[Expr], row: Expr, column: Expr) -> Expr:
        """What the block has added up of an element."""
        total = None
        for warp, factor in enumerate(factors):
            at = (row + warp * self.layout.rows) * self.layout.part_pitch + column
            term = self.parts[at] * factor
            total = term if total is None else total + term
        return T.Bind(total)

    def _alone(self, number: Expr) -> None:
        row, column = T.Bind(number // self.features), T.Bind(number % self.features)
        factors, top, weights = self._of_block(row)
        self._write(row, column, self._value(factors, row, column), top, weights)

    # ---- within a cluster: [block, element of the share], then [block, row, maximum and sum]

    def _stat(self, block: Expr | int, row: Expr) -> Expr:
        return self.split * self.share + (block * self.used + row) * 2

    def _send_stats(self) -> None:
        rows = self.used

        def emit(number: Expr) -> None:
            row, target = T.Bind(number % rows), T.Bind(number // rows)
            _, top, weights = self._of_block(row)
            at = T.Bind(self._stat(self.rank, row))
            for i, value in enumerate((top, weights)):
                T.evaluate(cluster_store(self.landing.ptr_to([at + i]), value, target))

        self._each(rows * self.split, emit)

    def _send(self, number: Expr) -> None:
        row, column = T.Bind(number // self.features), T.Bind(number % self.features)
        factors, _, _ = self._of_block(row)
        target = T.Bind(number // self.share)
        at = self.rank * self.share + number % self.share
        value = self._value(factors, row, column)
        T.evaluate(cluster_store(self.landing.ptr_to([at]), value, target))

    def _own(self, number: Expr) -> None:
        """An element of the block's own share."""
        element = T.Bind(self.rank * self.share + number)
        row, column = T.Bind(element // self.features), T.Bind(element % self.features)
        with then(element < self.elements):
            read = [T.Bind(self._stat(block, row)) for block in range(self.split)]
            stats = [(self.landing[at], self.landing[at + 1]) for at in read]
            factors, top, weights = _joined(stats)
            total = None
            for block, factor in enumerate(factors):
                term = self.landing[number + block * self.share] * factor
                total = term if total is None else total + term
            self._write(row, column, T.Bind(total), top, weights)

    # ---- outputs

    def _write(self, row: Expr, column: Expr, total: Expr, top: Expr, weights: Expr) -> None:
        """The outputs of one element of the block, where its row exists."""
        problem = self.problem
        count = problem.row_count(self.frame)
        if isinstance(count, int) and problem.chunks * self.used == count:
            self._outputs(row, column, total, top, weights)
            return
        with then(self.first_row + row < count):
            self._outputs(row, column, total, top, weights)

    def _outputs(self, row: Expr, column: Expr, total: Expr, top: Expr, weights: Expr) -> None:
        problem, frame = self.problem, self.frame
        attention = problem.attention
        flat = T.Bind(convert(self.first_row + row, frame.index))
        env = {
            **problem.row_env(dict(self.unit), flat, frame),
            **coordinates(attention.features, convert(column, frame.index), frame),
        }
        empty = T.Bind(tirx.EQ(weights, f32(0)))
        env[attention.result] = T.Bind(tirx.Select(empty, f32(0), total * rcp(weights)))
        log = tirx.Select(empty, f32(float("-inf")), (top + T.log2(weights)) * f32(LN2))
        env[attention.lse] = T.Bind(log)
        if attention.row_outputs:
            with then(tirx.EQ(column, 0)):
                self._store(attention.row_outputs, env)
        for binding in attention.output_bindings:
            env[binding.var] = T.Bind(lower(frame.rewrite(binding.value, env), False))
        self._store(attention.outputs, env)

    def _store(self, outputs: tuple[Output, ...], env: Mapping[Var, Expr]) -> None:
        for output in outputs:
            value = lower(self.frame.rewrite(output.value, env), False)
            place = self.frame.place(output.indices, env)
            T.buffer_store(self.frame.output(output.param), convert(value, output.dtype), place)


def _joined(stats: list[tuple[Expr, Expr]]) -> tuple[list[Expr], Expr, Expr]:
    """The factors that take partial results to their common maximum; this, and the sum."""
    tops = [T.Bind(top) for top, _ in stats]
    top = tops[0]
    for other in tops[1:]:
        top = tirx.Max(top, other)
    top = T.Bind(top)
    factors = [T.Bind(ex2(other - top)) for other in tops]
    weights = constant(0, "float32")
    for factor, (_, part) in zip(factors, stats, strict=True):
        weights = weights + part * factor
    return factors, top, T.Bind(weights)
