"""Column kernels: reductions over axes that are not the contiguous ones, with pointwise work
before, between and after.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...errors import Unsupported
from ..gpu import intrinsics as device
from ..gpu.frame import Frame, kernel_frame, launch_bounds, then
from ..program.expr import constant, convert
from ..program.narrow import narrow_indices
from ..program.online import merge_online
from ..program.program import Extent, Program, Reduction
from ..row.exchange import carried, finite, index_of, is_arg, rescale, with_initial
from .config import ColumnConfig, Form
from .lanes import Lanes, find_inner, lanes_along_columns, lanes_along_rows
from .state import Chunk, Step, check
from .sweeps import ColumnKernel, LaneExchange, RowExchange

if TYPE_CHECKING:
    from ...config import HardwareProfile

# The two forms of column kernels: columns held in registers, or read once a phase.


class ColumnForm(ColumnKernel):
    """What follows the sweeps of a phase."""

    def exchange(self, group: Iterable[Reduction]) -> None:
        """Partial results of the walkers -> results of the rows, known to all of them."""
        config = self.config
        group = list(group)
        own = {reduction.var: reduction for reduction in group}
        for reduction in filter(is_arg, group):
            self.accumulators[reduction.var] = self.best[reduction.var].keys()
        pairs = [(carried(reduction), self.accumulators[reduction.var]) for reduction in group]

        def finish(reduction: Reduction, w: int, result: Expr) -> None:
            reduction = own[reduction.var]
            whole = index_of(reduction, result) if is_arg(reduction) else result
            self.scopes[w].env[reduction.var] = with_initial(reduction, whole)

        if self.lanes.along_rows:
            LaneExchange(
                config,
                self.lanes.inner,
                self.frame.thread,
                self.side,
                self.walker,
                finish,
                self.frame.rank,
                self.start_cluster,
            ).run(pairs)
        else:
            RowExchange(config.walkers, config.width, self.frame.thread, finish).run(pairs)

    def step_number(self, turn: Expr | int) -> Expr:
        """The step that the thread is at in a turn of all walkers."""
        first = self.walker
        if self.config.cluster > 1:
            first = first + self.frame.rank * self.config.walkers
        return convert(first, self.index) + turn * self.walkers

    def start_cluster(self) -> None:
        """Waits until every block of the cluster runs."""
        if not self.cluster_runs:
            T.evaluate(device.cluster_wait())
            self.cluster_runs = True

    @property
    def turns(self) -> int:
        """Turns in which every walker has a step."""
        return self.lanes.steps // self.walkers

    @property
    def has_rest(self) -> bool:
        """Whether some walkers have one step more."""
        return self.lanes.steps % self.walkers != 0


class RegisterColumns(ColumnForm):
    """Every vector is loaded once and held."""

    def emit(self) -> None:
        """The body of the kernel."""
        self.load_scalars()
        self.allocate((self.turns + self.has_rest) * self.config.width)
        present: set[Var] = set()

        def fetch(wanted: Iterable[Var]) -> None:
            missing = [var for var in wanted if var not in present]
            present.update(missing)
            self.load_still(missing)
            self.prepare_starts(missing)
            if any(self.lanes.loads[var].moves for var in missing):
                self.each_chunk(lambda chunk: self.load(missing, chunk))

        for step in self.steps():
            self.forget()
            if step.swept:
                fetch(self.needed(step.swept))
                prepared = self.prepare(step.swept)
                self.reset(step.plain)
                self._pass_over(step, prepared)
            if step.plain:
                self.exchange(step.plain)
            self.store_rows(step.row_outputs)

    def _pass_over(self, step: Step, prepared: list[list[Expr]]) -> None:
        self.each_chunk(lambda chunk: self.sweep(chunk, step.plain, step.outputs, prepared))
        for scope in self.scopes:
            scope.ready.update(var for var in self.kept if var in scope.bodies)

    def each_chunk(self, emit: Callable[[Chunk], None]) -> None:
        """`emit` for every vector of the thread; the last one guarded where some have none."""
        turns, width = self.turns, self.config.width
        if turns == 1:
            emit(Chunk(self.step_number(0), 0))
        elif turns:
            with T.unroll(turns) as turn:
                emit(Chunk(self.step_number(turn), turn * width))
        if self.has_rest:
            last = self.step_number(turns)
            with then(last < self.lanes.steps):
                emit(Chunk(last, turns * width))


class LoopColumns(ColumnForm):
    """Vectors are loaded in every phase, a few ahead of the arithmetic; nothing is held.

    Every other sweep runs backwards: what was read last is still in the caches.
    """

    def emit(self, rolled: bool) -> None:
        """The body of the kernel; `rolled`: ptxas is not to unroll its loops."""
        self.unroll = False if rolled else None
        self.load_scalars()
        self.allocate(self.config.unroll * self.config.width)
        sweeps = 0
        for step in self.steps():
            self.forget()
            reductions = [*step.plain, *step.running]
            if reductions or step.outputs:
                self._stream(step, backwards=sweeps % 2 == 1)
                sweeps += 1
            if reductions:
                self.exchange(reductions)
            self.store_rows(step.row_outputs)

    def _stream(self, step: Step, backwards: bool) -> None:
        """One pass over the columns."""
        wanted = self.needed([*step.swept, *(r.body for r in step.running)])
        self.load_still(wanted)
        self.prepare_starts(wanted)
        prepared = self.prepare(step.swept)
        self.backwards = backwards
        self.reset([*step.plain, *step.running])
        unroll = self.config.unroll
        if isinstance(self.lanes.steps, int):
            groups = self.turns // unroll
            rest = self.turns - groups * unroll + self.has_rest
        else:
            each = constant(self.walkers * unroll, self.index)
            groups = T.Bind(T.truncdiv(convert(self.lanes.steps, self.index), each))
            rest = unroll

        def whole_groups() -> None:
            if not isinstance(groups, int) or groups:
                with T.serial(groups, unroll=self.unroll) as turn:
                    group = groups - 1 - turn if backwards else turn
                    self._group(step, wanted, prepared, group * unroll, unroll, guarded=False)

        def last_ones() -> None:
            if rest:
                self._group(step, wanted, prepared, groups * unroll, rest, guarded=True)

        for part in (last_ones, whole_groups) if backwards else (whole_groups, last_ones):
            part()

    def _group(
        self,
        step: Step,
        wanted: list[Var],
        prepared: list[list[Expr]],
        first: Expr | int,
        count: int,
        guarded: bool,
    ) -> None:
        """`count` vectors of the thread from turn `first` on."""
        width = self.config.width

        def each(emit: Callable[[Chunk], None]) -> None:
            with T.unroll(count) as number:
                chunk = Chunk(self.step_number(first + number), number * width)
                if not guarded:
                    emit(chunk)
                    return
                with then(chunk.step < self.lanes.steps):
                    emit(chunk)

        each(lambda chunk: self.load(wanted, chunk))
        tops = [r for r in step.plain if any(r.var.same_as(x.online) for x in step.running)]
        old = {top.var: self._values(top) for top in tops}
        each(lambda chunk: self.sweep(chunk, step.plain, step.outputs, prepared))
        if step.running:
            self._run_along(step, tops, old, each)

    def _values(self, reduction: Reduction) -> list[Expr]:
        """The accumulators of a reduction now."""
        partial = self.accumulators[reduction.var]
        return [T.Bind(partial[w]) for w in range(self.config.width)]

    def _run_along(
        self,
        step: Step,
        tops: list[Reduction],
        old: dict[Var, list[Expr]],
        each: Callable[[Callable[[Chunk], None]], None],
    ) -> None:
        """Rescales the running sums to the maxima of this group, then adds the group."""
        with self.fork():
            for top in tops:
                for scope, value in zip(self.scopes, self._values(top), strict=True):
                    scope.env[top.var] = T.Bind(finite(value))
            prepared = self.prepare(r.body for r in step.running)
            for reduction in step.running:
                partial, top = self.accumulators[reduction.var], reduction.online
                for w, scope in enumerate(self.scopes):
                    factor = rescale(old[top][w], scope.env[top])
                    T.buffer_store(partial, tirx.Mul(partial[w], factor), [w])
            each(lambda chunk: self.sweep(chunk, step.running, (), prepared))


def emit_column(program: Program, config: ColumnConfig, hw: HardwareProfile) -> tirx.PrimFunc:
    """The TIRx kernel of a program that reduces over leading or middle axes.

    Parameters
    ----------
    program : with at least one reduction; its rows may be symbolic, and its columns in the form
        LOOP.
    config : one of `column_configs(program, hw)`, or any that its docstring allows.

    Raises
    ------
    Unsupported
        Where the configuration does not suit the program or the device.
    """
    check(program)
    program = narrow_indices(program)
    lanes = _lanes(program, config, hw)
    if config.online and config.form is Form.LOOP:
        program = merge_online(program)
    with (
        kernel_frame(
            program, _grid(program, config, lanes), config.threads, config.cluster
        ) as frame,
        launch_bounds(config.min_blocks),
        _if_rows_exist(program, config, lanes, frame),
    ):
        if config.cluster > 1:
            T.evaluate(device.cluster_arrive())
        if config.form is Form.REGISTERS:
            RegisterColumns(program, config, lanes, frame).emit()
        else:
            rolled = hw.architecture.is_unrolled_to_spills
            LoopColumns(program, config, lanes, frame).emit(rolled)
    return frame.func


def _lanes(program: Program, config: ColumnConfig, hw: HardwareProfile) -> Lanes:
    """The vectors of the configuration, if it has whole rows in its blocks."""
    if program.accumulations:
        raise Unsupported("sums over the rows beside reductions over columns")
    inner = find_inner(program)
    if not isinstance(program.columns, int) and config.form is Form.REGISTERS:
        raise Unsupported(f"registers for columns of symbolic length {program.columns}")
    if config.cluster > 1:
        _check_cluster(program, config, hw)
    if config.threads > hw.max_threads_per_block:
        raise Unsupported(f"blocks of {config.threads} threads")
    if not config.lanes:
        if config.threads % hw.warp_size:
            raise Unsupported(f"rows of {config.threads} threads")
        return lanes_along_columns(program, inner, config.width)
    if config.lanes * config.width % inner:
        raise Unsupported(f"{config.lanes * config.width} lanes are no whole rows of {inner}")
    return lanes_along_rows(program, inner, config.width)


def _check_cluster(program: Program, config: ColumnConfig, hw: HardwareProfile) -> None:
    if not hw.architecture.has_clusters:
        raise Unsupported(f"{hw.arch} has no thread block clusters")
    if not config.lanes:
        raise Unsupported("clusters share columns whose lanes lie along the rows")
    if any(is_arg(r) or r.dtype != "float32" for r in program.reductions):
        raise Unsupported("clusters exchange float32 only")


def _grid(program: Program, config: ColumnConfig, lanes: Lanes) -> Extent:
    """Blocks; at least one where the number of rows is symbolic."""
    if not lanes.along_rows:
        blocks = program.row_count
    else:
        per_block, count = config.lanes * config.width, lanes.count
        if isinstance(count, int):
            blocks = -(-count // per_block)
        else:
            one, size = (constant(x, program.index_dtype) for x in (1, per_block))
            blocks = tirx.FloorDiv(count + (size - one), size)
        for extent in program.rows[:-1]:
            blocks = blocks * extent
    if isinstance(blocks, int):
        return blocks
    return tirx.Max(blocks, constant(1, program.index_dtype))


def _if_rows_exist(
    program: Program, config: ColumnConfig, lanes: Lanes, frame: Frame
) -> contextlib.AbstractContextManager:
    """Nothing happens where a symbolic number of rows is 0 (a launch has at least one block)."""
    rows = program.row_count
    if isinstance(rows, int):
        return contextlib.nullcontext()
    return then(convert(frame.block, program.index_dtype) < rows)
