"""What a thread of a row kernel does with one chunk: loads it, accumulates it, stores it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..gpu.frame import then
from ..gpu.scope import Point
from ..gpu.transfer import load_element, load_tile, store_vector
from ..gpu.vectors import piece_bytes
from ..program.expr import convert, dtype_of
from ..program.program import COMBINE, Element, Output, Reduction
from .arg import is_arg
from .exchange import identity
from .loads import Load
from .steps import Chunk


class RowSweeps:
    """Work on chunks; the attributes are those of `sweeps.RowKernel`."""

    def column(self, chunk: Chunk) -> Expr:
        """First column of a chunk; negative where that lies before the row."""
        if self.windows:
            return self.windows.column(chunk.vector)
        return convert(chunk.vector, self.index) * self.config.width

    def load(
        self, load: Load, chunk: Chunk, target: Var | None = None, hint: str | None = None
    ) -> None:
        """Loads one vector of a tile or an element into its register array."""
        buffer = self.tile_buffers[load.var] if target is None else target
        place, width = (buffer, chunk.slot), self.config.width
        if isinstance(load, Element):
            self._load_element(load, chunk, place)
            return
        if hint is None:
            shared = "again" if self.turn is not None else "nc"
            hint = self.config.load if load.per_row else shared
        if self.windows:
            self.windows.load(self.scope, load, chunk.vector, place, hint, chunk.edge)
            return
        piece = piece_bytes(load.offset, load.dtype, width, self.analyzer)
        load_tile(self.scope, load, self.column(chunk), place, width, piece, hint)

    def _load_element(self, element: Element, chunk: Chunk, place: tuple[Var, Expr | int]) -> None:
        """In vectors where its columns are consecutive, else one by one."""
        column, width = self.column(chunk), self.config.width
        if element.var in self.wide:
            load_element(self.scope, self.wide[element.var], column, place, width)
            return
        source = self.scope.frame.buffers[element.param]
        for lane in range(width):
            with self.where(self.windows.holds(column + lane) if chunk.edge else None):
                point = self._point(chunk, column, lane)
                offset = point.evaluate(self.scope.bodies[element.var])
                T.buffer_store(place[0], source[offset], [place[1] + lane])

    def sweep(
        self,
        chunk: Chunk,
        reductions: Iterable[Reduction],
        outputs: Iterable[Output],
        prepared: list,
    ) -> None:
        """Accumulates and stores one chunk; `prepared` holds the bodies, then the output values."""
        reductions, outputs = list(reductions), list(outputs)
        column, width = T.Bind(self.column(chunk)), self.config.width
        if chunk.edge and self.careful:
            results = [T.alloc_local((width,), dtype_of(o.value)) for o in outputs]
        else:
            results = [[None] * width for _ in outputs]
        for lane in range(width):
            valid = T.Bind(self.windows.holds(column + lane)) if chunk.edge else None
            with self.where(valid if self.careful else None):
                select = None if self.careful else valid
                point = self._point(chunk, column, lane)
                values = [point.evaluate(expr) for expr in prepared]
                for reduction, value in zip(reductions, values, strict=False):
                    self._accumulate(reduction, chunk, lane, value, column + lane, select)
                for result, value in zip(results, values[len(reductions) :], strict=True):
                    if isinstance(result, list):
                        result[lane] = T.Bind(value)
                    else:
                        T.buffer_store(result, value, [lane])
        for output, result in zip(outputs, results, strict=True):
            self._store(output, column, [result[lane] for lane in range(width)], chunk.edge)

    def _accumulate(
        self,
        reduction: Reduction,
        chunk: Chunk,
        lane: int,
        value: Expr,
        column: Expr,
        valid: Expr | None,
    ) -> None:
        """One element; where it is not `valid`, it does not count."""
        way = lane % self.ways
        if is_arg(reduction):
            best = self.best[reduction.var]
            best.update(way, value, column, valid, in_order=not chunk.edge)
            return
        partial = self.accumulators[reduction.var]
        if valid is not None:
            value = tirx.Select(valid, value, identity(reduction))
        T.buffer_store(partial, COMBINE[reduction.kind](partial[way], value), [way])

    def _point(self, chunk: Chunk, column: Expr, lane: int) -> Point:
        place = chunk.slot + lane

        def local(var: Var) -> Expr | None:
            if var in self.tile_buffers:
                return self.tile_buffers[var][place]
            return self.kept[var][place] if var in self.scope.ready else None

        def keep(var: Var, value: Expr) -> None:
            if var in self.kept:
                T.buffer_store(self.kept[var], value, [place])

        return Point(self.scope, column + lane, local, keep)

    def _store(self, output: Output, column: Expr, values: list[Expr], edge: bool) -> None:
        if self.windows:
            piece = self.windows.piece(output)
        else:
            piece = piece_bytes(output.offset, output.dtype, self.config.width, self.analyzer)

        def vector() -> None:
            store_vector(self.scope, output, column, values, piece, self.config.store)

        def lanes() -> None:
            for lane, value in enumerate(values):
                with then(self.windows.holds(column + lane)):
                    store_vector(self.scope, output, column + lane, [value], 1)

        def store() -> None:
            if not edge:
                vector()
                return
            with T.If(self.windows.is_whole(column)):
                with T.Then():
                    vector()
                with T.Else():
                    lanes()

        self.where_row_exists(store)

    @staticmethod
    def where(condition: Expr | None) -> contextlib.AbstractContextManager:
        """Code under a condition, if there is one."""
        return contextlib.nullcontext() if condition is None else then(condition)

    def where_row_exists(self, emit: Callable[[], None]) -> None:
        """`emit` under the guard of the row, if it has one."""
        if self.row_ok is None:
            emit()
            return
        with then(self.row_ok):
            emit()
