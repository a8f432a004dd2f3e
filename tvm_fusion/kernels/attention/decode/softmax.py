"""Online softmax over the scores of a step, in the registers of a warp.

A lane holds rows lane // 4 and 8 below of every 16, and keys 2 * (lane % 4) and the next of every
8, as mma.m16n8k16 leaves its sums. Logarithms are to base 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var
from tvm.script import tirx as T

from ...contraction.model import Binding, fresh_var
from ...gpu.arithmetic import LOG2E
from ...gpu.intrinsics import ex2
from ...gpu.math_functions import factors_of, product_of, split_constant
from ...gpu.product_frame import Frame, coordinates, f32, lower
from ...program.expr import (
    conjunction,
    constant,
    convert,
    dtype_of,
    is_if_then_else,
    rebuild,
    same,
    uses_any,
)
from .config import WARP, Layout
from .problem import DecodeProblem

# What logits and masks read at each point, loaded one step of keys ahead.
#
#     logit = 0.125 * score + mask[b, m, n]  ->  0.125 * score + x      x: loaded during the last
#     step
#
# A warp reads a step of keys once every few microseconds; a load where it is needed would wait for
# the memory each time. Loads that hang on the score, or stand under a condition, stay where they
# are.


def key_env(frame: Frame, problem: DecodeProblem, key: Expr) -> dict[Var, Expr]:
    """The axes of the keys at a key; those beyond the last key are taken for it."""
    last = frame.size(problem.attention.N) - constant(1, frame.index)
    place = T.Bind(T.min(convert(key, frame.index), last))
    return coordinates(problem.attention.keys, place, frame)


class LoadsAhead:
    """The loads of a lane's points in one step: `step // 4` keys by `parts` rows."""

    def __init__(self, frame: Frame, problem: DecodeProblem, parts: Sequence, step: int):
        self.frame, self.problem = frame, problem
        self.count, self.keys = len(parts), step // 4
        attention = problem.attention
        self.key_vars = [axis.var for axis in attention.keys]
        axes = (*problem.shared, *attention.queries)
        self.row_vars = [*problem.whole, *(axis.var for axis in axes)]
        self.inner = [attention.score, *(b.var for b in attention.bindings)]
        self.loads: list[TensorLoad] = []
        self.vars: list[Var] = []

    def lift(self, expr: Expr | None) -> Expr | None:
        """`expr` with variables in place of loads that can be had ahead."""
        if expr is None or is_if_then_else(expr):
            return expr
        if not isinstance(expr, TensorLoad):
            return rebuild(expr, self.lift)
        if not uses_any(expr, self.key_vars) or uses_any(expr, self.inner):
            return expr
        for load, var in zip(self.loads, self.vars, strict=True):
            if same(load, expr):
                return var
        self.loads.append(expr)
        self.vars.append(fresh_var(f"ahead{len(self.vars)}", dtype_of(expr)))
        return self.vars[-1]

    def _each(self, load: TensorLoad) -> int:
        """Values of a key: one for each row, or one for all."""
        return self.count if uses_any(load, self.row_vars) else 1

    def begin(self) -> None:
        """Declares the registers."""
        self.arrays = [
            T.alloc_local((self.keys * self._each(load),), dtype_of(load)) for load in self.loads
        ]

    def fetch(self, own: Expr, rows: Sequence[Mapping[Var, Expr]]) -> None:
        """Starts the loads for keys `own`, `own` + 1, and those 8 and more behind them."""
        for number in range(self.keys if self.loads else 0):
            env = key_env(self.frame, self.problem, own + (number // 2 * 8 + number % 2))
            for load, array in zip(self.loads, self.arrays, strict=True):
                each = self._each(load)
                for row in range(each):
                    value = self.frame.rewrite(load, {**rows[row], **env})
                    T.buffer_store(array, value, [number * each + row])

    def values(self, key: int, row: int) -> dict[Var, Expr]:
        """What was loaded for a lane's key and row of these numbers."""
        found = {}
        for load, var, array in zip(self.loads, self.vars, self.arrays, strict=True):
            each = self._each(load)
            found[var] = array[key * each + (row if each > 1 else 0)]
        return found


LOWEST = -1.0e38
"""Reference of a row that has seen no visible key: far below any logit, and finite."""


def shuffled(value: Expr, step: int) -> Expr:
    """The value of the lane whose number differs in one bit."""
    return T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), value, step, WARP, WARP)


class Softmax:
    """Running maximum and sum of weights of a lane's rows."""

    def __init__(self, frame: Frame, problem: DecodeProblem, layout: Layout, lane: Expr):
        self.frame, self.problem, self.layout, self.lane = frame, problem, layout, lane
        attention = problem.attention
        self.halves = 1 if layout.rows == 8 else 2
        self.tiles = -(-layout.rows // 16)
        self.parts = [(tile, half) for tile in range(self.tiles) for half in range(self.halves)]
        scale, factors = split_constant(factors_of(attention.logit))
        self.scale = scale * LOG2E
        self.ahead = LoadsAhead(frame, problem, self.parts, layout.config.step)
        self.logit = self.ahead.lift(product_of(factors))
        self.rest = self.ahead.lift(problem.range.rest)
        self.bindings = [Binding(b.var, self.ahead.lift(b.value)) for b in attention.bindings]
        asked = [self.logit, self.rest, *(b.value for b in self.bindings), *self.ahead.loads]
        keys = [axis.var for axis in attention.keys]
        self.keyed = any(e is not None and uses_any(e, keys) for e in asked)
        axes = (*attention.batch, *attention.queries)
        self.rowed = any(e is not None and uses_any(e, [a.var for a in axes]) for e in asked)

    def begin(self, unit: Mapping[Var, Expr], first_row: Expr) -> None:
        """Emits the coordinates of a lane's rows, and empty sums."""
        count, problem = len(self.parts), self.problem
        self.rows: list[Mapping[Var, Expr]] = []
        for tile, half in self.parts:
            env: Mapping[Var, Expr] = unit
            if self.rowed:
                row = first_row + (self.lane // 4 + (tile * 16 + half * 8))
                last = problem.row_count(self.frame)
                last = constant(last - 1, "int32") if isinstance(last, int) else last - 1
                row = T.Bind(convert(T.min(row, last), self.frame.index))
                env = problem.row_env(unit, row, self.frame)
            self.rows.append(env)
        self.ahead.begin()
        self.top = T.alloc_local((count,), "float32")
        self.sum = T.alloc_local((count,), "float32")
        for i in range(count):
            T.buffer_store(self.top, f32(LOWEST), [i])
            T.buffer_store(self.sum, f32(0), [i])

    def fetch(self, first: Expr) -> None:
        """Starts the loads of what logits and conditions of keys from `first` on are made of."""
        self.ahead.fetch(T.Bind(first + self.lane % 4 * 2), self.rows)

    def logits(
        self, scores: Sequence[Expr], first: Expr, least: Expr | None, below: Expr | None
    ) -> None:
        """Turns the scores of keys from `first` on into logits.

        `scores` holds the sums of each tile of rows. Keys below `least` and at or above `below` are
        hidden, and those that the conditions hide: -inf.
        """
        own = T.Bind(first + self.lane % 4 * 2)
        for j in range(self.columns):
            for v in range(2):
                key = own + (j * 8 + v)
                bounds = conjunction(
                    None if below is None else key < below,
                    None if least is None else key >= least,
                )
                inside = None if bounds is None else T.Bind(bounds)
                env: dict[Var, Expr] = {}
                if self.keyed:
                    env = key_env(self.frame, self.problem, key)
                for number, (tile, half) in enumerate(self.parts):
                    at = j * 4 + half * 2 + v
                    loaded = self.ahead.values(j * 2 + v, number)
                    self._logit(scores[tile], at, {**self.rows[number], **env, **loaded}, inside)

    def weights(self, scores: Sequence[Expr]) -> list[Expr]:
        """Turns logits into weights; for each of a lane's rows, the factor of what was added up."""
        factors = []
        for number, (tile, half) in enumerate(self.parts):
            places = [(j * 4 + half * 2 + v) for j in range(self.columns) for v in range(2)]
            values = [scores[tile][at] for at in places]
            peak = values[0]
            for value in values[1:]:
                peak = tirx.Max(peak, value)
            peak = T.Bind(peak)
            for step in (1, 2):
                peak = T.Bind(tirx.Max(peak, shuffled(peak, step)))
            top = T.Bind(tirx.Max(self.top[number], peak))
            factor = T.Bind(ex2(self.top[number] - top))
            T.buffer_store(self.top, top, [number])
            total = self.sum[number] * factor
            for at in places:
                T.buffer_store(scores[tile], ex2(scores[tile][at] - top), [at])
                total = total + scores[tile][at]
            T.buffer_store(self.sum, total, [number])
            factors.append(factor)
        return factors

    @property
    def columns(self) -> int:
        """Groups of 8 keys of a step."""
        return self.layout.config.step // 8

    def _logit(self, scores: Expr, at: int, env: dict[Var, Expr], inside: Expr | None) -> None:
        """The logit of one score in its place, -inf where the key is hidden."""
        env[self.problem.attention.score] = T.Bind(scores[at])
        for binding in self.bindings:
            env[binding.var] = T.Bind(self._value(binding.value, env))
        value = f32(self.scale)
        if self.logit is not None:
            value = self._value(self.logit, env) * value
        rest = self.rest
        visible = conjunction(inside, None if rest is None else self._value(rest, env))
        if visible is not None:
            value = tirx.Select(visible, value, f32(float("-inf")))
        T.buffer_store(scores, value, [at])

    def _value(self, expr: Expr, env: Mapping[Var, Expr]) -> Expr:
        return lower(self.frame.rewrite(expr, env), False)

    def finish(self) -> None:
        """The sums over all lanes of a row."""
        for number in range(len(self.parts)):
            for step in (1, 2):
                value = self.sum[number] + shuffled(self.sum[number], step)
                T.buffer_store(self.sum, value, [number])
