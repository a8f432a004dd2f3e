"""The state of a column kernel: threads and their lanes, steps, registers.

A thread owns `width` lanes (neighbours in memory) and walks over the vectors of its columns. Every
lane has a scope of its own: its row, and what is known of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...errors import Unsupported
from ..gpu.frame import Frame
from ..gpu.scope import Point, RowScope
from ..program.expr import constant, convert, dtype_of, variables
from ..program.program import Element, Output, Program, Reduction, Tile, Value
from ..row.exchange import Best, check_arg, identity, is_arg
from ..row.steps import kept_values
from .config import ColumnConfig
from .lanes import Lanes


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What is done between two exchanges: reductions of one phase, outputs known before it.

    Outputs come with their position in the program.
    """

    plain: tuple[Reduction, ...]
    running: tuple[Reduction, ...]
    outputs: tuple[tuple[int, Output], ...]
    row_outputs: tuple[tuple[int, Output], ...]

    @property
    def swept(self) -> list[Expr]:
        """Expressions of the first sweep."""
        return [r.body for r in self.plain] + [o.value for _, o in self.outputs]


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One vector of a thread: its number among the steps, and its slot in the register arrays."""

    step: Expr
    slot: Expr | int


class ColumnState:
    """State of one column kernel under construction; `ColumnKernel` derives from it.

    Attributes
    ----------
    scopes : one for each lane of a thread.
    first : the thread's first lane along the rows (clamped to where there are lanes).
    rows : the row of each lane.
    whole : condition under which all lanes of the thread exist; None if they always do.
    mine : condition under which the lanes are the thread's own to store; None if they always are.
    buffers : vector loads -> register array; kept : values -> register array.
    accumulators : reduction -> one for each lane; best : those of reductions that give an index.
    backwards : the sweep under way goes from the last column to the first.
    cluster_runs : whether all blocks that share the columns are known to run.
    """

    def __init__(self, program: Program, config: ColumnConfig, lanes: Lanes, frame: Frame) -> None:
        self.program, self.config, self.lanes, self.frame = program, config, lanes, frame
        self.index = program.index_dtype
        self.scopes = [RowScope(program, frame) for _ in range(config.width)]
        self.buffers: dict[Var, Var] = {}
        self.kept: dict[Var, Var] = {}
        self.accumulators: dict[Var, Var] = {}
        self.best: dict[Var, Best] = {}
        self.backwards = False
        self.whole: Expr | None = None
        self.mine: Expr | None = None
        self.cluster_runs = config.cluster == 1
        self._place_threads()

    # ---- threads

    @property
    def walkers(self) -> int:
        """Threads that share the steps of a row."""
        return self.config.walkers * self.config.cluster

    def _place_threads(self) -> None:
        """Which lanes the thread has, and which rows they belong to."""
        config, thread, block = self.config, self.frame.thread, self.frame.block
        block = convert(block, self.index)
        if not self.lanes.along_rows:
            self.walker, self.side = thread, constant(0, "int32")
            for scope in self.scopes:
                scope.set_row(block)
            self.first = constant(0, self.index)
            return
        self.walker = T.Bind(T.truncdiv(thread, config.lanes))
        self.side = T.Bind(T.truncmod(thread, config.lanes))
        per_block = config.lanes * config.width
        blocks = _blocks(self.lanes.count, per_block, self.index)
        other = T.Bind(T.truncdiv(block, blocks))
        start = T.truncmod(block, blocks) * per_block
        first = T.Bind(start + convert(self.side, self.index) * config.width)
        self.lane_numbers = self._existing_lanes(first, per_block)
        self.first = self.lane_numbers[0]
        axes = list(range(len(self.program.rows) - 1))
        for scope, lane in zip(self.scopes, self.lane_numbers, strict=True):
            scope.set_row(other, list(axes))
            inner = self.lanes.inner
            row = lane if inner == 1 else T.Bind(T.truncdiv(lane, inner))
            scope.env[self.program.row_vars[-1]] = row

    def _existing_lanes(self, first: Expr, per_block: int) -> list[Expr]:
        """The thread's lanes; where there are none left, the last ones once more."""
        count, width = self.lanes.count, self.config.width
        known = isinstance(count, int)
        size = constant(count, self.index) if known else convert(count, self.index)
        if known and count % width == 0:
            if count % per_block:
                self.mine = T.Bind(first < size)
                first = T.Bind(tirx.Min(first, size - width))
            return [first if w == 0 else T.Bind(first + w) for w in range(width)]
        self.mine = T.Bind(first < size)
        if width > 1:
            self.whole = T.Bind(first + width <= size)
        return [T.Bind(tirx.Min(first + w, size - 1)) for w in range(width)]

    # ---- steps

    def steps(self) -> list[Step]:
        """The sweeps of the program in order."""
        program, found = self.program, []
        for phase in range(program.phases + 1):
            reductions = [r for r in program.reductions if r.phase == phase]
            outputs = [(p, o) for p, o in enumerate(program.outputs) if o.phase == phase]
            found.append(
                Step(
                    tuple(r for r in reductions if r.online is None),
                    tuple(r for r in reductions if r.online is not None),
                    tuple(item for item in outputs if item[1].full),
                    tuple(item for item in outputs if not item[1].full),
                )
            )
        return found

    def needed(self, exprs: Iterable[Expr]) -> list[Var]:
        """Vector loads that evaluating `exprs` reads now."""
        found: dict[Var, None] = {}

        def visit(expr: Expr) -> None:
            for var in variables(expr):
                item = self.scopes[0].definitions.get(var)
                if var in self.lanes.loads:
                    found.setdefault(var)
                elif isinstance(item, Value | Element) and var not in self.scopes[0].ready:
                    for part in _parts(item):
                        visit(part)

        for expr in exprs:
            visit(expr)
        return [var for var in self.lanes.loads if var in found]

    def prepare(self, exprs: Iterable[Expr]) -> list[list[Expr]]:
        """For each lane, expressions ready to be evaluated; binds what is row-level."""
        exprs = list(exprs)
        for scope in self.scopes:
            scope.prepare_values(exprs)
        return [[scope.prepare(expr) for expr in exprs] for scope in self.scopes]

    def forget(self) -> None:
        """Starts a part of the kernel in which nothing is hoisted yet."""
        for scope in self.scopes:
            scope.forget()

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        """A part of the kernel after which row-level knowledge is as it was before."""
        with contextlib.ExitStack() as stack:
            for scope in self.scopes:
                stack.enter_context(scope.fork())
            yield

    # ---- registers

    def allocate(self, slots: int) -> None:
        """Register arrays for the vector loads and for what is kept."""
        width = self.config.width
        for var, vector in self.lanes.loads.items():
            size = slots if vector.moves else width
            self.buffers[var] = T.alloc_local((size,), vector.dtype)
        if self.config.keep:
            for var in kept_values(self.program):
                self.kept[var] = T.alloc_local((slots,), dtype_of(var))

    def reset(self, reductions: Iterable[Reduction]) -> None:
        """Neutral accumulators."""
        for reduction in reductions:
            if is_arg(reduction):
                self.best[reduction.var] = Best(reduction, self.config.width)
                continue
            partial = T.alloc_local((self.config.width,), reduction.dtype)
            self.accumulators[reduction.var] = partial
            for w in range(self.config.width):
                T.buffer_store(partial, identity(reduction), [w])

    # ---- points

    def column(self, chunk: Chunk, w: int) -> Expr:
        """The column of a lane."""
        lanes, width = self.lanes, self.config.width
        if not lanes.along_rows:
            return chunk.step * width + w
        if lanes.inner == 1:
            return chunk.step
        lane = self.lane_numbers[w]
        return chunk.step * lanes.inner + T.truncmod(lane, lanes.inner)

    def point(self, chunk: Chunk, w: int) -> Point:
        place, scope = chunk.slot + w, self.scopes[w]

        def local(var: Var) -> Expr | None:
            if var in self.buffers:
                return self.buffers[var][place if self.lanes.loads[var].moves else w]
            return self.kept[var][place] if var in scope.ready else None

        def keep(var: Var, value: Expr) -> None:
            if var in self.kept:
                T.buffer_store(self.kept[var], value, [place])

        return Point(scope, self.column(chunk, w), local, keep)


def _blocks(count: int | Expr, per_block: int, dtype: str) -> int | Expr:
    """Blocks along the lanes."""
    if isinstance(count, int):
        return -(-count // per_block)
    size = constant(per_block, dtype)
    return T.truncdiv(convert(count, dtype) + (size - 1), size)


def _parts(item: Value | Element | Tile) -> list[Expr]:
    if isinstance(item, Value):
        return [item.body]
    return [item.offset] if item.guard is None else [item.offset, item.guard]


def check(program: Program) -> None:
    """Refuses what no column kernel can do."""
    if not program.phases:
        raise Unsupported("the program does not reduce")
    if program.siblings or program.accumulations:
        raise Unsupported("programs beside the columns, or sums over their rows")
    for reduction in program.reductions:
        check_arg(reduction)
