"""What logits and masks read at each point, loaded one step of keys ahead.

    logit = 0.125 * score + mask[b, m, n]  ->  0.125 * score + x      x: loaded during the last step

A warp reads a step of keys once every few microseconds; a load where it is needed would wait for
the memory each time. Loads that hang on the score, or stand under a condition, stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm.ir import Expr, TensorLoad, Var
from tvm.script import tirx as T

from ...contraction.model import fresh_var
from ...gpu.product_frame import Frame, coordinates
from ...program.expr import constant, convert, dtype_of, is_if_then_else, rebuild, same, uses_any
from .problem import DecodeProblem


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
