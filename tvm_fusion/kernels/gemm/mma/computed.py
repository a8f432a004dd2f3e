"""Computed operands of the mma.sync GEMM: evaluated in registers between loads and shared memory.

What the elements of a chunk share is loaded once, neighbours as vectors, a step ahead of their
evaluation; loads under a condition happen with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tvm
from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var
from tvm.script import tirx as T

from ...contraction.model import INDEX, Binding, Simplifier, fresh_var
from ...contraction.reader import Axis
from ...gpu.access import is_multiple
from ...gpu.intrinsics import pack_halves
from ...gpu.memory import WIDEST, copy_in
from ...gpu.product_frame import Tile, coordinates, evaluate
from ...program.expr import (
    HALF_DTYPES,
    bytes_of,
    conjunction,
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
from ...program.program import Extent
from .operand import Loader, Unit, always, store_chunk
from .problem import rows_of
from .units import CHUNK

# What 16 bytes' worth of a computed operand's elements read, and their expressions.
#
#     (w[n, k // 8] >> (k % 8 * 4)) & 15      chunk of terms 8 q ... 8 q + 7:
#       reads w[n, q] once, as l0
#       elements l0 & 15,  (l0 >> 4) & 15,  (l0 >> 8) & 15 ...
#
# The terms (or rows) of a chunk are its number times its length plus a constant, so that divisions
# and shifts by constants fold.

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


class Compute(Loader):
    """An operand that is evaluated on its way."""

    is_async = False

    def prepare(self, tile: Tile, thread: Expr) -> None:
        super().prepare(tile, thread)
        source, operand = self.source, self.source.operand
        self.length = CHUNK // source.element
        line, others = source.k, source.rows
        if not self.panel.k_major:
            line, others = others, line
        self.line_extent = self.extent if self.panel.k_major else rows_of(source)
        ragged = not is_multiple(self.line_extent, self.length)
        shapes = {p.var: p.shape for p in self.frame.contraction.params}
        axes = [*others, *self.segment.batch]
        self.chunk = Chunk(shapes, line, axes, self.length, ragged)
        self.points = [
            self.chunk.fold(operand.bindings, operand.value, v) for v in range(self.length)
        ]
        self._assign_registers()
        self.words = T.alloc_local((4,), "uint32")
        self.stage = T.alloc_local((self.length,), source.dtype)

    def _assign_registers(self) -> None:
        """Gives each load of a chunk registers; vectors start at multiples of their width."""
        self.reads, self.slots = [], {}
        sizes: dict[str, int] = {}
        for run in self.chunk.runs:
            for d, width in run.vectors(self.chunk.factor(run)):
                first = _round_up(sizes.get(run.dtype, 0), width)
                sizes[run.dtype] = first + width
                self.reads.append((run, d, width, first))
                for v in range(width):
                    self.slots[run.elements[d + v][1]] = (run.dtype, first + v)
        self.sizes = {d: _round_up(n, WIDEST // bytes_of(d)) for d, n in sizes.items()}
        self.kept = {d: T.alloc_local((len(self.units) * n,), d) for d, n in self.sizes.items()}

    def _env(self, i: int, unit: Unit, term: Expr) -> dict[Var, Expr]:
        """What the variables of the folded expressions are for a unit."""
        flat, other = (term, unit.row) if self.panel.k_major else (unit.row, term)
        others = self.source.rows if self.panel.k_major else self.source.k
        env = self.batch | coordinates(others, other, self.frame)
        index = self.frame.index
        env[self.chunk.number] = tirx.FloorDiv(flat, constant(self.length, index))
        if self.chunk.ragged:
            last = self.frame.size(self.line_extent) - constant(1, index)
            for v, var in enumerate(self.chunk.points):
                env[var] = T.Bind(tirx.Min(flat + v, last))
        for var, (dtype, slot) in self.slots.items():
            env[var] = self.kept[dtype][i * self.sizes[dtype] + slot]
        return env

    def load(self, step: Expr) -> None:
        """Emits the loads of a step's chunks into registers."""
        for i, unit in enumerate(self.units):
            term = T.Bind(self.term(unit, step))
            with T.If(always(conjunction(self.inside(unit, term), unit.exists))), T.Then():
                env = self._env(i, unit, term)
                for run, d, width, first in self.reads:
                    self._read(run, d, width, i * self.sizes[run.dtype] + first, env)

    def _read(self, run: Run, d: int, width: int, slot: int, env: dict[Var, Expr]) -> None:
        indices = self.frame.place(run.elements[d][0], env)
        source, kept = self.frame.buffers[run.source], self.kept[run.dtype]
        if width == 1:
            T.buffer_store(kept, source[tuple(indices)], [slot])
            return
        place, size = source.ptr_to(indices), width * bytes_of(run.dtype)
        copy_in(lambda _: kept.ptr_to([slot]), lambda _: place, size, size)

    def store(self, step: Expr, stage: Expr) -> None:
        """Emits the evaluation of a step's chunks and their stores."""
        for i, unit in enumerate(self.units):
            term = T.Bind(self.term(unit, step))
            target = self.place.at(stage, unit.offset)
            with T.If(always(unit.exists)), T.Then(), T.If(always(self.inside(unit, term))):
                with T.Then():
                    self._compute(i, unit, term, target)
                with T.Else():
                    for word in range(4):
                        T.buffer_store(self.words, T.uint32(0), [word])
                    store_chunk(target, self.words.ptr_to([0]))

    def _compute(self, i: int, unit: Unit, term: Expr, target: Expr) -> None:
        env, dtype = self._env(i, unit, term), self.source.dtype
        values = []
        for v, (bindings, value) in enumerate(self.points):
            (found,) = evaluate(self.frame, bindings, [value], env, dtype in HALF_DTYPES)
            if self.chunk.ragged:
                flat = (term if self.panel.k_major else unit.row) + v
                # What stands in a Select is taken to be evaluated only if its condition holds.
                choose = tirx.if_then_else if self.chunk.lazy else T.Select
                zero = constant(0, dtype_of(found))
                found = choose(flat < self.frame.size(self.line_extent), found, zero)
            values.append(found)
        if dtype not in HALF_DTYPES:
            for v, value in enumerate(values):
                T.buffer_store(self.stage, convert(value, dtype), [v])
            store_chunk(target, self.stage.ptr_to([0]))
            return
        for word in range(4):
            pair = (convert(x, "float32") for x in values[2 * word : 2 * word + 2])
            T.buffer_store(self.words, pack_halves(dtype, *pair), [word])
        store_chunk(target, self.words.ptr_to([0]))


def _round_up(size: int, of: int) -> int:
    return -(-size // of) * of
