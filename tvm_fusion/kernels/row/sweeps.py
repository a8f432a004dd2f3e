"""What all forms of row kernels share: threads, registers, sweeps, the order of phases."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...errors import Unsupported
from ..gpu import intrinsics as device
from ..gpu.frame import Frame, then
from ..gpu.scope import Point, RowScope
from ..gpu.transfer import load_element, load_tile, store_vector
from ..gpu.vectors import piece_bytes, vector_elements
from ..gpu.windows import Windows, needs_windows
from ..program.expr import constant, convert, dtype_of
from ..program.online import scaled_values
from ..program.program import COMBINE, Element, Extent, Output, Program, Reduction
from .config import Form, RowConfig
from .exchange import (
    Best,
    Exchange,
    Threads,
    carried,
    check_arg,
    collapse,
    identity,
    index_of,
    is_arg,
    with_initial,
)
from .steps import Chunk, Load, Step, kept_values, loads_ahead, needed_loads, only_in_rows, steps_of

# What a thread of a row kernel does with one chunk: loads it, accumulates it, stores it.


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


WARP = 32
ACCUMULATORS = 4
"""Independent accumulators a thread and reduction: they hide the latency of the additions."""


class RowKernel(RowSweeps):
    """State of one row kernel under construction; the forms derive from it.

    Attributes
    ----------
    vectors : vectors of a row (of the longest one, if they are `windows`).
    windows : how vectors lie over rows that they do not divide; None where they do.
    loads : tiles and elements that are loaded ahead.
    tile_buffers : what is loaded ahead -> register array.
    kept : value or element that stays in registers -> its array.
    accumulators : reduction -> its array.
    best : argmax or argmin -> the pairs of this thread.
    row_ok : condition under which the thread's row exists; None if it always does.
    turn : loop variable of resident blocks, else None.
    """

    keeps_rows = True

    def __init__(self, program: Program, config: RowConfig, frame: Frame) -> None:
        self.program, self.config, self.frame = program, config, frame
        self.scope = RowScope(program, frame)
        self.index = program.index_dtype
        self.analyzer = program.analyzer()
        self.windows: Windows | None = None
        if needs_windows(program, config.width):
            if config.form is Form.BULK:
                raise Unsupported(f"vectors of {config.width} in rows of {program.columns}")
            self.windows = Windows(program, config.width)
        columns = program.columns
        self.columns = columns if isinstance(columns, int) else self.scope.row(columns)
        self.vectors = self._count_vectors()
        wide = {} if self.windows else vector_elements(program, config.width)
        self.wide, self.loads = wide, loads_ahead(program, wide)
        self.careful = only_in_rows(program)
        for reduction in program.reductions:
            check_arg(reduction)
        self.ways = min(config.width, ACCUMULATORS)
        self.tile_buffers: dict[Var, Var] = {}
        self.kept: dict[Var, Var] = {}
        self.accumulators: dict[Var, Var] = {}
        self.best: dict[Var, Best] = {}
        self.row_ok: Expr | None = None
        self.turn: Expr | None = None
        self.cluster_started = config.cluster == 1
        self.threads = self._threads()
        self.scaled = scaled_values(program)

    def _count_vectors(self) -> Extent:
        if self.windows and isinstance(self.columns, int):
            return self.windows.most
        if isinstance(self.columns, int):
            return self.columns // self.config.width
        return T.truncdiv(convert(self.columns, self.index), self.config.width)

    def _threads(self) -> Threads:
        config, frame = self.config, self.frame
        if not self.cluster_started:
            T.evaluate(device.cluster_arrive())
        lane = T.Bind(T.truncmod(frame.thread, WARP))
        row, thread = 0, frame.thread
        if config.rows > 1:
            row = T.Bind(T.truncdiv(frame.thread, config.threads))
            thread = T.Bind(T.truncmod(frame.thread, config.threads))
        return Threads(config.threads, config.rows, config.cluster, thread, lane, row, frame.rank)

    # ---- rows

    @property
    def row_thread(self) -> Expr:
        """The thread's number among all threads of its row."""
        if self.config.cluster == 1:
            return self.threads.thread
        return self.frame.rank * self.config.threads + self.threads.thread

    def first_row(self) -> Expr:
        """The row of a block's first turn."""
        row = convert(self.frame.block, self.index)
        if self.config.rows > 1:
            row = row * self.config.rows + convert(self.threads.row, self.index)
        return T.Bind(row)

    def enter_row(self, row: Expr, partial: bool) -> None:
        """Coordinates of `row`; where it may not exist (`partial`), those of the last one."""
        count = self.program.row_count
        if partial:
            size = constant(count, self.index) if isinstance(count, int) else count
            self.row_ok = T.Bind(row < size)
            row = T.Bind(tirx.Min(row, size - 1))
        self.scope.set_row(row)

    def load_scalars(self) -> None:
        """What is known of the row before anything of it is loaded."""
        self.scope.load_scalars()
        if self.windows:
            self.windows.enter(self.scope, self.columns)

    @contextlib.contextmanager
    def other_row(self, row: Expr, partial: bool) -> Iterator[None]:
        """Code that works on another row than the current one (loads ahead)."""
        env, row_ok = dict(self.scope.env), self.row_ok
        self.enter_row(row, partial)
        yield
        self.scope.env, self.row_ok = env, row_ok

    # ---- sweeps

    def steps(self) -> list[Step]:
        """The sweeps of the program in order."""
        return steps_of(self.program)

    def needed(self, exprs: Iterable[Expr]) -> list[Load]:
        """What evaluating `exprs` reads now of what is loaded ahead."""
        return needed_loads(exprs, self.loads, self.scope.definitions, self.scope.ready)

    def prepare(self, exprs: Iterable[Expr]) -> list[Expr]:
        """Expressions ready to be evaluated point by point; binds what is row-level."""
        exprs = list(exprs)
        self.scope.prepare_values(exprs)
        return [self.scope.prepare(expr) for expr in exprs]

    def allocate(self, slots: int) -> None:
        """Register arrays for what is loaded ahead and for what is kept."""
        for load in self.loads:
            self.tile_buffers[load.var] = T.alloc_local((slots,), load.dtype)
        for var in kept_values(self.program) if self.keeps_rows else ():
            if var not in self.tile_buffers:
                self.kept[var] = T.alloc_local((slots,), dtype_of(var))

    def reset(self, reductions: Iterable[Reduction]) -> None:
        """Neutral accumulators."""
        for reduction in reductions:
            if is_arg(reduction):
                self.best[reduction.var] = Best(reduction, self.ways)
                continue
            partial = T.alloc_local((self.ways,), reduction.dtype)
            self.accumulators[reduction.var] = partial
            for way in range(self.ways):
                T.buffer_store(partial, identity(reduction), [way])

    # ---- exchange and row outputs

    def collapse(self, reduction: Reduction) -> None:
        """Combines the accumulators of a thread."""
        if is_arg(reduction):
            self.accumulators[reduction.var] = self.best[reduction.var].key()
        else:
            collapse(reduction, self.accumulators[reduction.var], self.ways)

    def exchange(
        self, group: list[Reduction], after_barrier: Callable[[], None] | None = None
    ) -> None:
        """Partial results of the threads -> results of the row, known to all of them."""
        if not self.cluster_started:
            self.start_cluster()

        own = {reduction.var: reduction for reduction in group}

        def finish(reduction: Reduction, result: Expr) -> None:
            reduction = own[reduction.var]
            whole = index_of(reduction, result) if is_arg(reduction) else result
            self.scope.env[reduction.var] = with_initial(reduction, whole)

        exchange = Exchange(self.threads, self.turn, finish, after_barrier or (lambda: None))
        exchange.run([(carried(r), self.accumulators[r.var]) for r in group])

    def start_cluster(self) -> None:
        """Waits until every block of the cluster runs."""
        if not self.cluster_started:
            T.evaluate(device.cluster_wait())
            self.cluster_started = True

    def store_rows(self, outputs: tuple[Output, ...]) -> None:
        """Outputs with one element a row, written by its first thread."""
        if not outputs:
            return
        first = tirx.EQ(self.row_thread, 0)
        condition = first if self.row_ok is None else tirx.And(first, self.row_ok)
        with self.scope.fork(), then(condition):
            for output in outputs:
                value = convert(self.scope.prepare(output.value), output.dtype)
                place = self.scope.row(output.offset)
                T.buffer_store(self.frame.buffers[output.param], value, [place])
