"""What both forms of column kernels emit: vector loads, sweeps, stores."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..gpu.frame import then
from ..gpu.memory import copy_in
from ..gpu.scope import Point, RowScope
from ..gpu.transfer import places, store_values
from ..program.expr import bytes_of, constant, convert, dtype_of, substitute, variables
from ..program.program import COMBINE, Output, Reduction
from .lanes import Vector
from .state import Chunk, ColumnState


class ColumnKernel(ColumnState):
    """Emits the parts of a column kernel; the forms derive from it and order them."""

    # ---- vectors

    def load_still(self, wanted: Iterable[Var]) -> None:
        """Loads the vectors that are the same at every step."""
        for var in wanted:
            if not self.lanes.loads[var].moves:
                zero = constant(0, self.index)
                self._load_vector(self.lanes.loads[var], zero, (self.buffers[var], 0))

    def load(self, wanted: Iterable[Var], chunk: Chunk) -> None:
        """Loads the vectors of one chunk."""
        for var in wanted:
            vector = self.lanes.loads[var]
            if vector.moves:
                shared = self._shared_by_lanes(vector, chunk)
                self._load_vector(vector, chunk.step, (self.buffers[var], chunk.slot), shared)

    def prepare_starts(self, wanted: Iterable[Var]) -> None:
        """Binds, outside of the loops, what the places of gathered vectors are computed from."""
        self.scopes[0].prepare_values(self.lanes.loads[var].start for var in wanted)

    def _shared_by_lanes(self, vector: Vector, chunk: Chunk) -> dict[Var, Expr]:
        """Placeholders in the place of a vector (the indices of a gather)."""
        scope, point = self.scopes[0], self.point(chunk, 0)
        used = [
            v for v in variables(vector.start) if v in scope.per_element & set(scope.definitions)
        ]
        return {var: point.evaluate(var) for var in used}

    def _start(
        self,
        vector: Vector,
        step: Expr,
        lane: Expr,
        scope: RowScope,
        shared: Mapping[Var, Expr] = MappingProxyType({}),
    ) -> Expr:
        """The element of a vector that a lane has."""
        here = {self.lanes.step: step, self.lanes.lane: lane, **shared}
        return scope.row(substitute(vector.start, here))

    def _load_vector(
        self,
        vector: Vector,
        step: Expr,
        target: tuple[Var, Expr | int],
        shared: Mapping[Var, Expr] = MappingProxyType({}),
    ) -> None:
        (buffer, slot), width = target, self.config.width
        source, size = self.frame.buffers[vector.param], bytes_of(vector.dtype)

        def together() -> None:
            start = self._start(vector, step, self.first, self.scopes[0], shared)
            if width == 1:
                T.buffer_store(buffer, source[start], [slot])
                return
            copy_in(
                places(buffer, slot, size),
                places(source, start, size),
                width * size,
                vector.piece,
                self.config.load,
            )

        def one_by_one() -> None:
            for w, (lane, scope) in enumerate(zip(self.lane_numbers, self.scopes, strict=True)):
                start = self._start(vector, step, lane, scope, shared)
                T.buffer_store(buffer, source[start], [slot + w])

        self._whole_or_not(together, one_by_one)

    def _whole_or_not(self, together: Callable[[], None], one_by_one: Callable[[], None]) -> None:
        if self.whole is None:
            together()
            return
        with T.If(self.whole):
            with T.Then():
                together()
            with T.Else():
                one_by_one()

    def load_scalars(self) -> None:
        """Loads what is the same for a whole row: vectors of rows, or element by element."""
        for scalar in self.program.scalars:
            vector = self.lanes.scalars.get(scalar.var)
            if vector is not None:
                target = T.alloc_local((self.config.width,), scalar.dtype)
                self._load_vector(vector, constant(0, self.index), (target, 0))
            for w, scope in enumerate(self.scopes):
                value = (
                    scope.load(scalar.param, scope.row(scalar.offset), scalar.dtype)
                    if vector is None
                    else convert(target[w], dtype_of(scalar.var))
                )
                scope.env[scalar.var] = T.Bind(value)

    # ---- sweeps

    def sweep(
        self,
        chunk: Chunk,
        reductions: Iterable[Reduction],
        outputs: Iterable[tuple[int, Output]],
        prepared: list[list[Expr]],
    ) -> None:
        """Accumulates and stores one chunk; `prepared`: bodies, then output values, by lane."""
        reductions, outputs = list(reductions), list(outputs)
        results: list[list[Expr]] = [[] for _ in outputs]
        points = []
        for w, exprs in enumerate(prepared):
            point = self.point(chunk, w)
            points.append(point)
            values = [point.evaluate(expr) for expr in exprs]
            for reduction, value in zip(reductions, values, strict=False):
                partial = self.accumulators[reduction.var]
                T.buffer_store(partial, COMBINE[reduction.kind](partial[w], value), [w])
            for collected, value in zip(results, values[len(reductions) :], strict=True):
                collected.append(T.Bind(value))
        for (position, output), values in zip(outputs, results, strict=True):
            self._store(position, output, chunk, values, points)

    def _store(
        self, position: int, output: Output, chunk: Chunk, values: list[Expr], points: list[Point]
    ) -> None:
        """Stores the lanes of a full output."""
        vector = self.lanes.outputs.get(position)
        target = self.frame.buffers[output.param]

        def together() -> None:
            start = self._start(vector, chunk.step, self.first, self.scopes[0])
            store_values(target, start, values, output.dtype, vector.piece, self.config.store)

        def one_by_one() -> None:
            for w, (value, point, scope) in enumerate(
                zip(values, points, self.scopes, strict=True)
            ):
                place = output.offset + self.program.column_var
                place = scope.row(place if output.place is None else output.place)
                place = substitute(place, {self.program.column_var: point.column})
                with self._if_lane_exists(w):
                    T.buffer_store(target, convert(value, output.dtype), [place])

        with self._if_mine():
            if vector is None:
                one_by_one()
            else:
                self._whole_or_not(together, one_by_one)

    def _if_mine(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.mine is None else then(self.mine)

    def _if_lane_exists(self, w: int) -> contextlib.AbstractContextManager:
        """Of clamped lanes only the first one stores."""
        if self.whole is None or w == 0:
            return contextlib.nullcontext()
        return then(self.lane_numbers[w - 1] < self.lane_numbers[w])

    # ---- row outputs

    def store_rows(self, outputs: Iterable[tuple[int, Output]]) -> None:
        """Outputs with one element a row, written by the first walker."""
        outputs = list(outputs)
        if not outputs:
            return
        with self.fork(), then(tirx.EQ(self.walker, 0)), self._if_mine():
            for position, output in outputs:
                self._store_row(position, output)

    def _store_row(self, position: int, output: Output) -> None:
        target, vector = self.frame.buffers[output.param], self.lanes.outputs.get(position)
        wanted = range(self.config.width if self.lanes.along_rows else 1)
        values = [self.scopes[w].prepare(output.value) for w in wanted]

        def together() -> None:
            zero = constant(0, self.index)
            start = self._start(vector, zero, self.first, self.scopes[0])
            store_values(target, start, values, output.dtype, vector.piece, self.config.store)

        def one_by_one() -> None:
            for w, value in zip(wanted, values, strict=True):
                place = self.scopes[w].row(output.offset)
                with self._if_lane_exists(w), self._if_row_starts(w):
                    T.buffer_store(target, convert(value, output.dtype), [place])

        if vector is None:
            one_by_one()
        else:
            self._whole_or_not(together, one_by_one)

    def _if_row_starts(self, w: int) -> contextlib.AbstractContextManager:
        """Of the lanes of a row only the first one stores."""
        if not self.lanes.along_rows or self.lanes.inner == 1:
            return contextlib.nullcontext()
        return then(tirx.EQ(T.truncmod(self.lane_numbers[w], self.lanes.inner), 0))
