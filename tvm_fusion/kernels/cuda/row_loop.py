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
from ..expr import bytes_of
from ..program import Reduction, Tile
from .frame import then
from .memory import copy_registers
from .row_exchange import collapse, finite, rescale, warp_reduce
from .row_kernel import WARP, Chunk, RowKernel, Step
from .transfer import places


class LoopRows(RowKernel):
    """One block a row."""

    keeps_rows = False

    def emit(self) -> None:
        """The body of the kernel."""
        config = self.config
        if config.rows != 1 or config.cluster != 1:
            raise Unsupported("a streamed row belongs to one block")
        self.allocate(config.unroll * config.width)
        self.enter_row(self.first_row(), partial=False)
        self.scope.load_scalars()
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
        self.tiles = self.needed_tiles(step.swept + [r.body for r in step.running])
        prepared = self.prepare(step.swept)
        self.reset([*step.plain, *step.running])
        stride = config.threads * config.unroll
        whole = self.vectors // stride
        if whole and config.prefetch:
            self._stream_ahead(step, prepared, whole)
        elif whole:
            with T.serial(whole) as turn:
                self._group(step, prepared, turn * config.unroll, guarded=False)
        if whole * stride < self.vectors:
            self._group(step, prepared, whole * config.unroll, guarded=True)

    def _stream_ahead(self, step: Step, prepared: list[Expr], whole: int) -> None:
        """The whole steps, each with the next one's loads already on their way."""
        config = self.config
        slots = config.unroll * config.width
        ahead = {tile.var: T.alloc_local((slots,), tile.dtype) for tile in self.tiles}

        def fetch(first: Expr | int) -> None:
            for number in range(config.unroll):
                for tile in self.tiles:
                    self._load(tile, self._chunk(first, number), ahead[tile.var])

        fetch(0)
        with T.serial(whole) as turn:
            for tile in self.tiles:
                size = bytes_of(tile.dtype)
                target = places(self.tile_buffers[tile.var], 0, size)
                copy_registers(target, places(ahead[tile.var], 0, size), slots * size)
            fetch(tirx.Min(turn + 1, whole - 1) * config.unroll)
            self._group(step, prepared, turn * config.unroll, guarded=False, loaded=True)

    def _chunk(self, first: Expr | int, number: int) -> Chunk:
        vector = (first + number) * self.config.threads + self.threads.thread
        return Chunk(vector, number * self.config.width)

    def _load(self, tile: Tile, chunk: Chunk, target: Var | None = None) -> None:
        self.load(tile, chunk, target, self.config.load if tile.per_row else "nc")

    def _group(
        self,
        step: Step,
        prepared: list[Expr],
        first: Expr | int,
        guarded: bool,
        loaded: bool = False,
    ) -> None:
        """`unroll` vectors from number `first` on."""
        chunks = [self._chunk(first, number) for number in range(self.config.unroll)]

        def each(emit: Callable[[Chunk], None]) -> None:
            for chunk in chunks:
                if not guarded:
                    emit(chunk)
                    continue
                with then(chunk.vector < self.vectors):
                    emit(chunk)

        if not loaded:
            each(lambda chunk: [self._load(tile, chunk) for tile in self.tiles])
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
            collapse(reduction, self.accumulators[reduction.var], self.ways)
        own = {top.var: T.Bind(self.accumulators[top.var][0]) for top in self._tops(step)}
        for reduction in step.plain:
            warp_reduce(reduction, self.accumulators[reduction.var], width)
        for reduction in step.running:
            partial, top = self.accumulators[reduction.var], reduction.online
            collapse(reduction, partial, self.ways)
            factor = rescale(own[top], self.accumulators[top][0])
            T.buffer_store(partial, partial[0] * factor, [0])
            warp_reduce(reduction, partial, width)
