"""What 16 bytes' worth of a computed operand's elements read, and their expressions.

    (w[n, k // 8] >> (k % 8 * 4)) & 15      chunk of terms 8 q ... 8 q + 7:
      reads w[n, q] once, as l0
      elements l0 & 15,  (l0 >> 4) & 15,  (l0 >> 8) & 15 ...

The terms (or rows) of a chunk are its number times its length plus a constant, so that divisions
and shifts by constants fold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tvm
from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...contraction.index import Simplifier
from ...contraction.model import INDEX, Binding, fresh_var
from ...contraction.reader import Axis, Extent
from ...gpu.memory import WIDEST
from ...program.expr import (
    bytes_of,
    constant,
    convert,
    dtype_of,
    flatten,
    is_if_then_else,
    is_integer,
    known_factor,
    number,
    rebuild,
    substitute,
)

# More chunks than any operand has.
MAX_CHUNKS = 1 << 30


@dataclass(slots=True, eq=False)
class Run:
    """Elements of one parameter at constant distances from each other.

    `elements` has, by distance, the indices and the placeholder of each.
    """

    source: Var
    dtype: str
    start: Expr
    elements: dict[int, tuple[tuple[Expr, ...], Var]] = field(default_factory=dict)

    def vectors(self, factor: int) -> list[tuple[int, int]]:
        """(distance, width) of loads that read all elements and nothing else."""
        found, wanted = [], set(self.elements)
        for d in sorted(self.elements):
            if d not in wanted:
                continue
            width = WIDEST // bytes_of(self.dtype)
            while width > 1 and (
                factor % width or d % width or not {*range(d, d + width)} <= wanted
            ):
                width //= 2
            wanted -= {*range(d, d + width)}
            found.append((d, width))
        return found


class Chunk:
    """The expressions of one chunk: `number` is its number, `runs` what it reads.

    `ragged`: a chunk may reach beyond the last point; its points are then variables of their own
    (`points`), cut off at the last. `lazy`: some loads stay under their condition.
    """

    def __init__(
        self,
        shapes: Mapping[Var, Sequence[Extent]],
        line: Sequence[Axis],
        others: Sequence[Axis],
        length: int,
        ragged: bool,
    ):
        self.shapes, self.ragged, self.lazy = shapes, ragged, False
        self.number = fresh_var("q", INDEX)
        self.points = [fresh_var(f"c{v}", INDEX) for v in range(length)]
        axes = [*line, *others, Axis(self.number, MAX_CHUNKS)]
        self.simplify = Simplifier(axes)
        self.analyzer = tvm.sym.Analyzer()
        self.runs: list[Run] = []
        self.env = []
        for v in range(length):
            flat = self.points[v] if ragged else self.number * length + v
            self.env.append(_index_coordinates(line, flat))

    def fold(self, bindings: Sequence[Binding], value: Expr, v: int) -> tuple[list[Binding], Expr]:
        """Bindings and value at point `v`, placeholders in place of loads."""
        env = dict(self.env[v])
        folded = [Binding(b.var, self._visit(substitute(b.value, env))) for b in bindings]
        return folded, self._visit(substitute(value, env))

    def _visit(self, expr: Expr, conditional: bool = False) -> Expr:
        if isinstance(expr, TensorLoad):
            indices = tuple(
                self.simplify(convert(self._visit(i, conditional), INDEX)) for i in expr.indices
            )
            if conditional:
                self.lazy = True
                return tirx.BufferLoad(expr.source, list(indices))
            return self._read(expr, indices)
        if isinstance(expr, Var):
            return expr
        if is_if_then_else(expr):
            condition = self._visit(expr.args[0], conditional)
            branches = [self._visit(branch, True) for branch in expr.args[1:]]
            return tirx.if_then_else(condition, *branches)
        expr = rebuild(expr, lambda e: self._visit(e, conditional))
        return self.simplify(expr) if is_integer(dtype_of(expr)) else expr

    def _read(self, load: TensorLoad, indices: tuple[Expr, ...]) -> Var:
        at = flatten(indices, self.shapes[load.source], INDEX)
        for run in self.runs:
            if run.source.same_as(load.source):
                distance = number(self.simplify(at - run.start))
                if distance is not None:
                    break
        else:
            run, distance = Run(load.source, dtype_of(load), self.simplify(at)), 0
            self.runs.append(run)
        if distance not in run.elements:
            var = fresh_var(f"l{len(self.runs)}_{len(run.elements)}", dtype_of(load))
            run.elements[distance] = (indices, var)
        return run.elements[distance][1]

    def factor(self, run: Run) -> int:
        """Largest number known to divide the place of the element at distance 0."""
        return known_factor(self.analyzer.simplify(run.start), self.analyzer)


def _index_coordinates(axes: Sequence[Axis], flat: Expr) -> dict[Var, Expr]:
    env: dict[Var, Expr] = {}
    for position in range(len(axes) - 1, -1, -1):
        extent = axes[position].extent
        size = constant(extent, INDEX) if isinstance(extent, int) else convert(extent, INDEX)
        env[axes[position].var] = flat if position == 0 else tirx.FloorMod(flat, size)
        flat = tirx.FloorDiv(flat, size)
    return env
