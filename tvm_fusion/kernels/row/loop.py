"""Row kernels that stream a row through registers, once a phase, and hold nothing of it.

    for each step of unroll * threads vectors: load -> (prefetch the next) -> accumulate, store
    the rest of the row, vector by vector under guards

Running sums of exponentials are relative to the thread's maximum so far and rescaled when it rises.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...errors import Unsupported
from ..gpu.frame import then
from ..gpu.memory import copy_registers
from ..gpu.transfer import places
from ..program.expr import bytes_of
from ..program.program import Extent, Reduction, Tile
from .exchange import carried, collapse, finite, rescale, warp_reduce
from .steps import Chunk, Load, Step
from .sweeps import WARP, RowKernel


class LoopRows(RowKernel):
    """One block a row, or a cluster whose blocks take turns along it."""

    keeps_rows = False

    def emit(self, rolled: bool) -> None:
        """The body of the kernel; `rolled`: ptxas is not to unroll its loops."""
        config = self.config
        self.unroll = False if rolled else None
        if config.rows != 1:
            raise Unsupported("a block streams one row at a time")
        self.allocate(config.unroll * config.width)
        self.enter_row(self.first_row(), partial=False)
        self.load_scalars()
        for step in self.steps():
            self.scope.forget()
            reductions = [*step.plain, *step.running]
            if reductions or step.outputs:
                self._stream(step)
            if reductions:
                self._reduce_warps(step)
                self.exchange(reductions)
            self.store_rows(step.row_outputs)

    # ---- streaming

    def _stream(self, step: Step) -> None:
        """One pass over the row."""
        config = self.config
        self.current = self.needed(step.swept + [r.body for r in step.running])
        self.scope.prepare_values([load.var for load in self.current])
        prepared = self.prepare(step.swept)
        self.reset([*step.plain, *step.running])
        each = config.threads * config.cluster * config.unroll
        interior = self.windows.interior if self.windows else self.vectors
        total = self.windows.most if self.windows else self.vectors
        if isinstance(interior, int) and isinstance(total, int):
            whole: Extent = interior // each
            rest: Extent = -(-(total - whole * each) // each)
        else:
            whole = T.Bind(T.truncdiv(interior, each))
            rest = T.Bind(T.truncdiv(total - whole * each + (each - 1), each))
        columns_only = all(isinstance(x, Tile) or x.var in self.wide for x in self.current)
        if config.prefetch and columns_only:
            self._stream_ahead(step, prepared, whole)
        else:
            self._groups(step, prepared, 0, whole, guarded=False)
        self._groups(step, prepared, whole, rest, guarded=True)

    def _groups(
        self, step: Step, prepared: list[Expr], first: Extent, count: Extent, guarded: bool
    ) -> None:
        """`count` groups of vectors from group number `first` on."""
        unroll = self.config.unroll
        if isinstance(count, int) and count <= 1 and guarded:
            if count:
                self._group(step, prepared, first * unroll, guarded)
            return
        if isinstance(count, int) and not count:
            return
        with T.serial(count, unroll=self.unroll) as turn:
            self._group(step, prepared, (first + turn) * unroll, guarded)

    def _stream_ahead(self, step: Step, prepared: list[Expr], whole: Extent) -> None:
        """The whole groups, each with the next one's loads already on their way."""
        if isinstance(whole, int):
            if whole:
                self._pipeline(step, prepared, whole)
            return
        with then(whole > 0):
            self._pipeline(step, prepared, whole)

    def _pipeline(self, step: Step, prepared: list[Expr], whole: Extent) -> None:
        config = self.config
        slots = config.unroll * config.width
        ahead = {load.var: T.alloc_local((slots,), load.dtype) for load in self.current}

        def fetch(first: Expr | int) -> None:
            for number in range(config.unroll):
                chunk = self._chunk(first, number)
                for load in self.current:
                    self._load(load, chunk, ahead[load.var])

        fetch(0)
        with T.serial(whole, unroll=self.unroll) as turn:
            for load in self.current:
                size = bytes_of(load.dtype)
                target = places(self.tile_buffers[load.var], 0, size)
                copy_registers(target, places(ahead[load.var], 0, size), slots * size)
            fetch(tirx.Min(turn + 1, whole - 1) * config.unroll)
            self._group(step, prepared, turn * config.unroll, guarded=False, loaded=True)

    def _number(self, first: Expr | int, number: int) -> Expr:
        """Place of the thread's vector in the order in which the threads walk."""
        return (first + number) * (self.config.threads * self.config.cluster) + self.row_thread

    def _chunk(self, first: Expr | int, number: int, edge: bool = False) -> Chunk:
        vector = self._number(first, number)
        if self.windows:
            vector = self.windows.vector(vector, edge)
        return Chunk(vector, number * self.config.width, edge and self.windows is not None)

    def _load(self, load: Load, chunk: Chunk, target: Var | None = None) -> None:
        hint = self.config.load if isinstance(load, Tile) and load.per_row else "nc"
        self.load(load, chunk, target, hint)

    def _group(
        self,
        step: Step,
        prepared: list[Expr],
        first: Expr | int,
        guarded: bool,
        loaded: bool = False,
    ) -> None:
        """`unroll` vectors from number `first` on."""
        total = self.windows.count if self.windows else self.vectors

        def each(emit: Callable[[Chunk], None]) -> None:
            for number in range(self.config.unroll):
                if not guarded:
                    emit(self._chunk(first, number))
                    continue
                with then(self._number(first, number) < total):
                    emit(self._chunk(first, number, edge=True))

        if not loaded:
            each(lambda chunk: [self._load(load, chunk) for load in self.current])
        tops = self._tops(step)
        old = {top.var: T.Bind(self.accumulators[top.var][0]) for top in tops}
        each(lambda chunk: self.sweep(chunk, step.plain, step.outputs, prepared))
        if step.running:
            self._run_along(step, tops, old, each)

    @staticmethod
    def _tops(step: Step) -> list[Reduction]:
        """The maxima that running sums refer to."""
        wanted = {reduction.online for reduction in step.running}
        return [reduction for reduction in step.plain if reduction.var in wanted]

    def _run_along(
        self,
        step: Step,
        tops: list[Reduction],
        old: dict[Var, Expr],
        each: Callable[[Callable[[Chunk], None]], None],
    ) -> None:
        """Rescales the running sums to the maxima of this group, then adds the group."""
        with self.scope.fork():
            for top in tops:
                partial = self.accumulators[top.var]
                collapse(top, partial, self.ways)
                self.scope.env[top.var] = T.Bind(finite(partial[0]))
                for way in range(1, self.ways):
                    T.buffer_store(partial, partial[0], [way])
            prepared = self.prepare(r.body for r in step.running)
            for reduction in step.running:
                top = reduction.online
                factor = T.Bind(rescale(old[top], self.scope.env[top]))
                partial = self.accumulators[reduction.var]
                for way in range(self.ways):
                    T.buffer_store(partial, partial[way] * factor, [way])
            each(lambda chunk: self.sweep(chunk, step.running, (), prepared))

    # ---- threads -> warps

    def _reduce_warps(self, step: Step) -> None:
        """Registers -> warps; running sums go from their thread's maximum to their warp's."""
        width = min(WARP, self.config.threads)
        for reduction in step.plain:
            self.collapse(reduction)
        own = {top.var: T.Bind(self.accumulators[top.var][0]) for top in self._tops(step)}
        for reduction in step.plain:
            warp_reduce(carried(reduction), self.accumulators[reduction.var], width)
        for reduction in step.running:
            partial, top = self.accumulators[reduction.var], reduction.online
            collapse(reduction, partial, self.ways)
            factor = rescale(own[top], self.accumulators[top][0])
            T.buffer_store(partial, partial[0] * factor, [0])
            warp_reduce(reduction, partial, width)
