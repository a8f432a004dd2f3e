"""What is computed at each score beside a factor: logits and visibility.

Tiles of keys that a tile of queries sees as a whole need no look at visibility. What logits and
visibility read of memory is loaded ahead, while the products of the tile run, two columns at once
where they lie side by side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...gpu.product_frame import coordinates
from ...gpu.product_math import lower
from ...program.expr import conjunction, convert
from .loads import Load, Point, Reader, find_loads
from .offsets import Offset, take_offsets
from .tiles import Tile, TiledAttention, TiledKernel

HIDDEN = -math.inf


@dataclass(slots=True, eq=False)
class Formulas:
    """Logit, conditions and temporaries with placeholders for their loads and offsets.

    `conditions` are those beside the bounds of the keys.
    """

    bindings: tuple
    logit: Expr | None
    conditions: tuple[Expr, ...]
    loads: tuple[Load, ...]
    offsets: tuple[Offset, ...]


def read_formulas(problem: TiledAttention, conditions: tuple[Expr, ...]) -> Formulas:
    """What has to be computed at each score."""
    attention = problem.attention
    logit = None if problem.scale is not None else attention.logit
    bindings = attention.bindings if logit is not None or conditions else ()
    bindings, (logit, *conditions), loads = find_loads(attention, bindings, (logit, *conditions))
    offsets: tuple[Offset, ...] = ()
    if logit is not None and len(attention.keys) == 1:
        bindings, logit, offsets = take_offsets(attention.keys[0], bindings, logit)
    return Formulas(bindings, logit, tuple(conditions), loads, offsets)


class Points:
    """Emits the computation for the scores of 16 queries of each warp.

    `row` and `column` are the first row and the first column (of a tile) that the thread holds.
    """

    def __init__(
        self, kernel: TiledKernel, formulas: Formulas, scores: Expr, row: Expr, column: Expr
    ):
        self.kernel, self.problem, self.formulas = kernel, kernel.problem, formulas
        self.plan, self.frame = kernel.plan, kernel.frame
        self.scores, self.first_row, self.column = scores, row, column
        self.count = self.plan.config.block_n // 8
        self.reader = Reader(kernel, formulas.loads, self.count)
        self.bounds = T.alloc_local((4,), "int32") if self.plan.points_first else None
        # Whether rows have a first key.
        self.starts = any(not bound.upper for bound in self.plan.keys.bounds)
        self.rows: list[Expr] = []
        self.tile: Tile | None = None

    # ---- a tile of queries

    def start(self, tile: Tile) -> None:
        """Emits what all keys of a tile of queries share."""
        self.tile = tile
        if not self.plan.points_first and self.formulas.logit is None:
            return
        self.rows = []
        for half in range(2):
            row = T.Bind(tile.query + self.first_row + half * 8)
            self._limits(half, row)
            # What is read for a query beyond the last is never stored.
            self.rows.append(T.Bind(tirx.Min(row, self.kernel.M - 1)))
        self.reader.rows([self._axes(half, T.int32(0)) for half in range(2)])

    def _limits(self, half: int, row: Expr) -> None:
        """The last and the first key that a row sees by the bounds."""
        if self.bounds is None:
            return
        last, first = self.kernel.N - 1, T.int32(0)
        for bound in self.plan.keys.bounds:
            rest = convert(self.frame.rewrite(bound.rest, self.tile.axes), "int32")
            at = row * T.int32(bound.slope) + rest if bound.slope else rest
            if bound.upper:
                last = T.min(last, at)
            else:
                first = T.max(first, at)
        T.buffer_store(self.bounds, last, [half])
        T.buffer_store(self.bounds, first, [2 + half])

    # ---- a tile of keys

    def ahead(self, number: Expr) -> None:
        """Emits the loads for tile `number` of keys."""
        if self.reader.reads_columns:
            base = T.Bind(number * self.plan.config.block_n + self.column)
            self.reader.columns([Point(self, half, base, self.column) for half in range(2)])

    def apply(self, number: Expr, by_point: bool) -> None:
        """Emits logits in place of scores; -inf where a key is hidden, if `by_point`."""
        formulas = self.formulas
        if formulas.logit is None and not by_point:
            return
        self.reader.settle(self.column)
        base = T.Bind(number * self.plan.config.block_n + self.column)
        offsets = [[T.Bind(o.start(self, half, base)) for o in formulas.offsets] for half in (0, 1)]
        last = first = (None, None)
        if by_point:
            last = [T.Bind(self.bounds[half] - base) for half in range(2)]
            if self.starts:
                first = [T.Bind(self.bounds[2 + half] - base) for half in range(2)]
        for i in range(self.count):
            for half in range(2):
                for v in range(2):
                    place = i * 8 + v
                    at = i * 4 + half * 2 + v
                    value, seen = self._value(i, half, v, base, offsets[half], by_point)
                    if by_point:
                        seen = conjunction(
                            T.int32(place) <= last[half],
                            None if first[half] is None else T.int32(place) >= first[half],
                            seen,
                        )
                        value = tirx.Select(seen, value, T.float32(HIDDEN))
                    T.buffer_store(self.scores, value, [at])

    def _value(
        self, i: int, half: int, v: int, base: Expr, offsets: list[Expr], by_point: bool
    ) -> tuple[Expr, Expr | None]:
        """The logit of an element, and its conditions beside the bounds."""
        formulas, score = self.formulas, self.scores[i * 4 + half * 2 + v]
        conditions = formulas.conditions if by_point else ()
        if formulas.logit is None and not conditions:
            return score, None
        env = self.point(half, base + (i * 8 + v))
        env[self.problem.attention.score] = T.Bind(score)
        for load in formulas.loads:
            env[load.var] = self.reader.value(load, i, half, v)
        for offset, start in zip(formulas.offsets, offsets, strict=True):
            env[offset.var] = start + T.float32(float(offset.step * (i * 8 + v)))
        for binding in formulas.bindings:
            env[binding.var] = T.Bind(self._evaluate(binding.value, env))
        value = score if formulas.logit is None else T.Bind(self._evaluate(formulas.logit, env))
        seen = conjunction(*(self._evaluate(c, env) for c in conditions))
        return value, seen

    def _evaluate(self, expr: Expr, env: dict[Var, Expr]) -> Expr:
        # Errors of a logit count as they are, not in relation to its size: the fast forms do.
        return lower(self.frame.rewrite(expr, env), True)

    def point(self, half: int, column: Expr, width: int = 1) -> dict[Var, Expr]:
        """The axes at a row of this thread and a column from where `width` exist."""
        if self.plan.ragged_keys:
            column = tirx.Min(column, self.kernel.N - width)
        return self._axes(half, column)

    def unclamped(self, half: int, column: Expr) -> dict[Var, Expr]:
        """The axes at a row of this thread and a column, which need not exist."""
        return self._axes(half, column)

    def _axes(self, half: int, column: Expr) -> dict[Var, Expr]:
        attention = self.problem.attention
        env = dict(self.tile.axes)
        env |= coordinates(attention.queries, self.rows[half], self.frame)
        return env | coordinates(attention.keys, column, self.frame)
