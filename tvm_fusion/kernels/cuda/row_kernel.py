"""What all forms of row kernels share: threads, registers, sweeps, the order of phases."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...errors import Unsupported
from ..expr import constant, convert, dtype_of, variables
from ..online import scaled_values
from ..program import Element, Output, Program, Reduction, Tile, Value
from . import intrinsics as device
from .frame import Frame, then
from .row_config import RowConfig
from .row_exchange import COMBINE, Exchange, Threads, identity, with_initial
from .row_keep import kept_values
from .scope import Point, RowScope
from .transfer import load_tile, store_vector
from .vectors import piece_bytes

WARP = 32
ACCUMULATORS = 4
"""Independent accumulators a thread and reduction: they hide the latency of the additions."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One vector of a thread: its number within the row, and its slot in the register arrays."""

    vector: Expr
    slot: Expr | int


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What is done between two exchanges: reductions of one phase, and outputs known before it."""

    plain: tuple[Reduction, ...]
    running: tuple[Reduction, ...]
    outputs: tuple[Output, ...]
    row_outputs: tuple[Output, ...]

    @property
    def swept(self) -> list[Expr]:
        """Expressions of the first sweep."""
        return [r.body for r in self.plain] + [o.value for o in self.outputs]


class RowKernel:
    """State of one row kernel under construction; the forms derive from it.

    Attributes
    ----------
    tile_buffers : tile -> register array.
    kept : value or element that stays in registers -> its array.
    accumulators : reduction -> its array.
    row_ok : condition under which the thread's row exists; None if it always does.
    turn : loop variable of resident blocks, else None.
    """

    keeps_rows = True

    def __init__(self, program: Program, config: RowConfig, frame: Frame) -> None:
        self.program, self.config, self.frame = program, config, frame
        self.scope = RowScope(program, frame)
        self.index = program.index_dtype
        self.analyzer = program.analyzer()
        self.vectors = program.columns // config.width
        if program.columns % config.width:
            raise Unsupported(f"vectors of {config.width} in rows of {program.columns}")
        self.ways = min(config.width, ACCUMULATORS)
        self.tile_buffers: dict[Var, Var] = {}
        self.kept: dict[Var, Var] = {}
        self.accumulators: dict[Var, Var] = {}
        self.row_ok: Expr | None = None
        self.turn: Expr | None = None
        self.cluster_started = config.cluster == 1
        self.threads = self._threads()
        self.scaled = scaled_values(program)

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

    @contextlib.contextmanager
    def other_row(self, row: Expr, partial: bool) -> Iterator[None]:
        """Code that works on another row than the current one (loads ahead)."""
        env, row_ok = dict(self.scope.env), self.row_ok
        self.enter_row(row, partial)
        yield
        self.scope.env, self.row_ok = env, row_ok

    # ---- steps

    def steps(self) -> list[Step]:
        """The sweeps of the program in order."""
        program = self.program
        steps = []
        for phase in range(program.phases + 1):
            reductions = [r for r in program.reductions if r.phase == phase]
            outputs = [o for o in program.outputs if o.phase == phase]
            steps.append(
                Step(
                    tuple(r for r in reductions if r.online is None),
                    tuple(r for r in reductions if r.online is not None),
                    tuple(o for o in outputs if o.full),
                    tuple(o for o in outputs if not o.full),
                )
            )
        return steps

    def needed_tiles(self, exprs: Iterable[Expr]) -> list[Tile]:
        """Tiles that evaluating `exprs` reads now."""
        found: dict[Var, None] = {}

        def visit(expr: Expr) -> None:
            for var in variables(expr):
                item = self.scope.definitions.get(var)
                if isinstance(item, Tile):
                    found.setdefault(var)
                elif isinstance(item, Value | Element) and var not in self.scope.ready:
                    for part in _parts(item):
                        visit(part)

        for expr in exprs:
            visit(expr)
        return [tile for tile in self.program.tiles if tile.var in found]

    def prepare(self, exprs: Iterable[Expr]) -> list[Expr]:
        """Expressions ready to be evaluated point by point; binds what is row-level."""
        exprs = list(exprs)
        self.scope.prepare_values(exprs)
        return [self.scope.prepare(expr) for expr in exprs]

    # ---- sweeps

    def allocate(self, slots: int) -> None:
        """Register arrays for the tiles and for what is kept."""
        for tile in self.program.tiles:
            self.tile_buffers[tile.var] = T.alloc_local((slots,), tile.dtype)
        for var in kept_values(self.program) if self.keeps_rows else ():
            self.kept[var] = T.alloc_local((slots,), dtype_of(var))

    def reset(self, reductions: Iterable[Reduction]) -> None:
        """Neutral accumulators."""
        for reduction in reductions:
            partial = T.alloc_local((self.ways,), reduction.dtype)
            self.accumulators[reduction.var] = partial
            for way in range(self.ways):
                T.buffer_store(partial, identity(reduction), [way])

    def column(self, chunk: Chunk) -> Expr:
        """First column of a chunk."""
        return convert(chunk.vector, self.index) * self.config.width

    def load(
        self, tile: Tile, chunk: Chunk, target: Var | None = None, hint: str | None = None
    ) -> None:
        """Loads one vector of a tile into its register array."""
        if hint is None:
            shared = "again" if self.turn is not None else "nc"
            hint = self.config.load if tile.per_row else shared
        buffer = self.tile_buffers[tile.var] if target is None else target
        width = self.config.width
        piece = piece_bytes(tile.offset, tile.dtype, width, self.analyzer)
        load_tile(self.scope, tile, self.column(chunk), (buffer, chunk.slot), width, piece, hint)

    def sweep(
        self,
        chunk: Chunk,
        reductions: Iterable[Reduction],
        outputs: Iterable[Output],
        prepared: list,
    ) -> None:
        """Accumulates and stores one chunk; `prepared` holds the bodies, then the output values."""
        reductions, outputs = list(reductions), list(outputs)
        results: list[list[Expr]] = [[] for _ in outputs]
        column = self.column(chunk)
        for lane in range(self.config.width):
            point = self._point(chunk, column, lane)
            values = [point.evaluate(expr) for expr in prepared]
            for reduction, value in zip(reductions, values, strict=False):
                partial, way = self.accumulators[reduction.var], lane % self.ways
                T.buffer_store(partial, COMBINE[reduction.kind](partial[way], value), [way])
            for collected, value in zip(results, values[len(reductions) :], strict=True):
                collected.append(T.Bind(value))
        for output, values in zip(outputs, results, strict=True):
            self._store(output, column, values)

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

    def _store(self, output: Output, column: Expr, values: list[Expr]) -> None:
        piece = piece_bytes(output.offset, output.dtype, self.config.width, self.analyzer)

        def store() -> None:
            store_vector(self.scope, output, column, values, piece, self.config.store)

        self.where_row_exists(store)

    def where_row_exists(self, emit: Callable[[], None]) -> None:
        """`emit` under the guard of the row, if it has one."""
        if self.row_ok is None:
            emit()
            return
        with then(self.row_ok):
            emit()

    # ---- exchange and row outputs

    def exchange(
        self, group: list[Reduction], after_barrier: Callable[[], None] | None = None
    ) -> None:
        """Partial results of the threads -> results of the row, known to all of them."""
        if not self.cluster_started:
            self.start_cluster()

        def finish(reduction: Reduction, result: Expr) -> None:
            self.scope.env[reduction.var] = with_initial(reduction, result)

        exchange = Exchange(self.threads, self.turn, finish, after_barrier or (lambda: None))
        exchange.run([(reduction, self.accumulators[reduction.var]) for reduction in group])

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


def _parts(item: Value | Element) -> list[Expr]:
    if isinstance(item, Value):
        return [item.body]
    return [item.offset] if item.guard is None else [item.offset, item.guard]
