"""What stands behind the sums of a row of a thread's positions, and its stores.

Of what it reads, numbers of a filter are held for all rows, and tensors that lie as the sums do are
read ahead, several elements at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...contraction.reader import Output
from ...gemm.epilogue import EpilogueLoad, take_loads
from ...gpu.access import AffineAccess, Groups, affine_access
from ...gpu.memory import WIDEST
from ...gpu.product_frame import Frame, evaluate
from ...program.expr import bytes_of, convert, widened
from .problem import DTYPES, Direct
from .words import Elements, write

Point = Callable[[Expr | int, int], Mapping[Var, Expr]]
"""Axes of the results at a column of a thread (two summands) and a filter of it."""


@dataclass(frozen=True, slots=True)
class Run:
    """Elements that one access takes: `width` of them along filters or columns, or one."""

    along: str
    width: int


class Epilogue:
    """The outputs of a thread's `filters` at each of its rows of `columns` positions."""

    def __init__(
        self, frame: Frame, problem: Direct, filters: int, columns: int, group: int
    ) -> None:
        self.frame, self.filters, self.columns = frame, filters, columns
        segment = problem.convolution.segment
        place = problem.numbers.columns
        others = [i for i in range(len(problem.numbers.windows)) if i != place]
        self.groups: Groups = {
            "filter": problem.filter_axes,
            "column": problem.window_axes([place]),
            "other": problem.window_axes(others),
        }
        self.accumulator = problem.convolution.product.accumulator
        is_symbolic = problem.convolution.is_symbolic
        self.bindings, self.outputs, loads = take_loads(
            frame.contraction, segment, self.groups, is_symbolic
        )
        self.half = all(bytes_of(output.dtype) == 2 for output in self.outputs)
        self.group = group
        self.fixed = {x: None for x in loads if x.groups <= {"filter"}}
        self.runs: dict[EpilogueLoad | Output, Run] = {}
        for load in loads:
            if load not in self.fixed:
                self.runs[load] = self._run(load.access, load.dtype)
        for output in self.outputs:
            shape = frame.contraction.params[output.param].shape
            access = affine_access(output.indices, shape, self.groups, is_symbolic)
            self.runs[output] = self._run(access, output.dtype)
        self.ahead: dict[EpilogueLoad, Elements] = {}

    def _run(self, access: AffineAccess | None, dtype: str) -> Run:
        if access is not None and dtype in DTYPES:
            for along, most in (("filter", self.filters), ("column", self.group)):
                width = most & -most
                while width > 1:
                    if width * bytes_of(dtype) <= WIDEST and access.aligned(width, along):
                        return Run(along, width)
                    width //= 2
        return Run("nothing", 1)

    def prepare(self, env: Callable[[int], Mapping[Var, Expr]]) -> None:
        """Reads the numbers of each filter."""
        for load in self.fixed:
            held = T.alloc_local((self.filters,), widened(load.dtype))
            for f in range(self.filters):
                T.buffer_store(held, self._load(load, env(f)), [f])
            self.fixed[load] = held
        for load, run in self.runs.items():
            if isinstance(load, EpilogueLoad) and run.width > 1:
                self.ahead[load] = Elements(load.dtype, self.columns * self.filters, run.width)

    def _load(self, load: EpilogueLoad, env: Mapping[Var, Expr]) -> Expr:
        places = self.frame.place(load.indices, env)
        return convert(self.frame.buffers[load.param][tuple(places)], widened(load.dtype))

    def request(self, point: Point, inside: Callable) -> None:
        """Reads, for a row, what lies as the sums do."""
        if not self.ahead:
            return
        with T.serial(self.columns // self.group, unroll=True) as g:
            first = g * self.group
            with inside(first):
                for load, target in self.ahead.items():
                    for i, f, slot in self._starts(load, self.runs[load]):
                        indices = self.frame.place(load.indices, point(first, i)(f))
                        start = g * (self.group * self.filters) + slot
                        target.read(start, self.frame.buffers[load.param], indices)

    def _starts(self, load: EpilogueLoad, run: Run):
        """Column, filter and place of each access of a group of columns."""
        columns, filters = range(self.group), range(self.filters)
        if run.along == "filter":
            for i in columns:
                for f in filters[:: run.width]:
                    yield i, f, i * self.filters + f
            return
        for f in filters:
            for i in columns[:: run.width]:
                yield i, f, f * self.group + i

    def finish(self, sums: Callable[[Expr | int, int], Expr], point: Point, inside) -> None:
        """Computes and stores a row; `sums` of a column (two summands) and a filter."""
        with T.serial(self.columns // self.group, unroll=True) as g:
            first = g * self.group
            with inside(first):
                self._group(g, first, sums, point)

    def _group(self, g: Expr, first: Expr, sums, point: Point) -> None:
        values: dict[tuple[int, int], list[Expr]] = {}
        places: dict[tuple[int, int], Mapping[Var, Expr]] = {}
        for i in range(self.group):
            for f in range(self.filters):
                env = dict(point(first, i)(f))
                places[i, f] = dict(env)
                env[self.accumulator] = sums(first, i)(f)
                env |= {x.var: h[f] for x, h in self.fixed.items()}
                for load, run in self.runs.items():
                    if isinstance(load, EpilogueLoad):
                        env[load.var] = self._ahead(load, run, g, i, f, places[i, f])
                results = [o.value for o in self.outputs]
                values[i, f] = evaluate(self.frame, self.bindings, results, env, self.half)
        for number, output in enumerate(self.outputs):
            self._store(output, number, values, places)

    def _ahead(self, load: EpilogueLoad, run: Run, g: Expr, i: int, f: int, env) -> Expr:
        if run.width == 1:
            return T.Bind(self._load(load, env))
        slot = i * self.filters + f if run.along == "filter" else f * self.group + i
        found = self.ahead[load].value(g * (self.group * self.filters), slot)
        return convert(found, widened(load.dtype))

    def _store(self, output: Output, number: int, values, places) -> None:
        target, run = self.frame.output(output.param), self.runs[output]
        for i, f, _ in self._starts(output, run):
            points = [(i + v, f) if run.along == "column" else (i, f + v) for v in range(run.width)]
            indices = self.frame.place(output.indices, places[i, f])
            write(target, indices, [values[p][number] for p in points], output.dtype)
