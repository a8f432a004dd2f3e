"""Row kernels that hold a row in registers.

    load the row -> sweep, reduce, exchange (once a phase) -> sweep and store

Held by less than a warp (several rows a warp), by warps of one block, or by a cluster of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..program import Reduction, Tile
from .frame import then
from .row_exchange import collapse, finite, rescale, warp_reduce
from .row_kernel import WARP, Chunk, RowKernel, Step


class RegisterRows(RowKernel):
    """Each block computes `config.rows` rows, or a share of one row, and is done."""

    def emit(self) -> None:
        """The body of the kernel."""
        self.allocate(self.chunks * self.config.width)
        count = self.program.row_count
        exact = isinstance(count, int) and count % self.config.rows == 0
        self.enter_row(self.first_row(), partial=self.config.rows > 1 and not exact)
        self.scope.load_scalars()
        self.compute(loaded=[])

    # ---- chunks

    @property
    def share(self) -> int:
        """Vectors that the threads of this block walk over."""
        return self.vectors

    @property
    def stride(self) -> int:
        """Threads that walk over them together."""
        return self.config.threads * self.config.cluster

    @property
    def chunks(self) -> int:
        """Vectors a thread, the last one perhaps beyond the end."""
        return -(-self.share // self.stride)

    def walker(self) -> Expr:
        """The thread's place among those that walk together."""
        return self.row_thread

    def chunk(self, step: Expr | int) -> Chunk:
        """The thread's vector number `step`."""
        return Chunk(step * self.stride + self.walker(), step * self.config.width)

    def each_chunk(self, emit: Callable[[Chunk], None]) -> None:
        """`emit` for every chunk; the last one under a guard where the row ends within it."""
        whole = self.share // self.stride
        if whole == 1:
            emit(self.chunk(0))
        elif whole:
            with T.unroll(whole) as step:
                emit(self.chunk(step))
        if whole < self.chunks:
            with then(whole * self.stride + self.walker() < self.share):
                emit(self.chunk(whole))

    # ---- phases

    def compute(
        self, loaded: Iterable[Tile], after_barrier: Callable[[], None] | None = None
    ) -> None:
        """All steps on the current row; `loaded` tiles are in registers already."""
        present = {tile.var for tile in loaded}

        def fetch(tiles: Iterable[Tile]) -> None:
            missing = [tile for tile in tiles if tile.var not in present]
            present.update(tile.var for tile in missing)
            if missing:
                self.each_chunk(lambda chunk: [self.load(tile, chunk) for tile in missing])

        self.scope.ready.clear()
        self.scope.factors.clear()
        fetch(tile for tile in self.program.tiles if tile.per_row)
        steps = self.steps()
        for number, step in enumerate(steps):
            self.scope.forget()
            if step.swept:
                fetch(self.needed_tiles(step.swept))
                self.pass_over(step.plain, step)
            relative = self._reduce_warps(step)
            group = [*step.plain, *step.running]
            if group:
                # shared vectors (gamma, bias) of the next sweep arrive while the threads meet
                following = steps[number + 1] if number + 1 < len(steps) else None
                ahead = self.needed_tiles(following.swept) if following else []
                fetch(tile for tile in ahead if not tile.per_row)
                self.exchange(group, after_barrier)
                after_barrier = None
                self._correct(relative)
            self.store_rows(step.row_outputs)

    def pass_over(self, reductions: Iterable[Reduction], step: Step | None) -> None:
        """One sweep over the row: accumulates `reductions`, stores the outputs of `step`."""
        reductions = list(reductions)
        outputs = step.outputs if step else ()
        exprs = [r.body for r in reductions] + [o.value for o in outputs]
        prepared = self.prepare(exprs)
        self.reset(reductions)
        self.each_chunk(lambda chunk: self.sweep(chunk, reductions, outputs, prepared))
        self.scope.ready.update(var for var in self.kept if var in self.scope.bodies)

    def _reduce_warps(self, step: Step) -> dict[Var, tuple[Var, Expr]]:
        """Registers -> warps. Running sums use their warp's maximum.

        Returns the values kept meanwhile that are relative to such a maximum, with it.
        """
        width = min(WARP, self.config.threads)
        for reduction in step.plain:
            partial = self.accumulators[reduction.var]
            collapse(reduction, partial, self.ways)
            warp_reduce(reduction, partial, width)
        if not step.running:
            return {}
        before = set(self.scope.ready)
        with self.scope.fork():
            local = {}
            for reduction in step.plain:
                own = self.accumulators[reduction.var][0]
                is_top = any(r.online.same_as(reduction.var) for r in step.running)
                own = T.Bind(finite(own) if is_top else own)
                self.scope.env[reduction.var] = local[reduction.var] = own
            self.pass_over(step.running, None)
        for reduction in step.running:
            partial = self.accumulators[reduction.var]
            collapse(reduction, partial, self.ways)
            warp_reduce(reduction, partial, width)
        fresh = [var for var in self.kept if var in self.scope.ready and var not in before]
        relative = {var: self.scaled[var] for var in fresh if var in self.scaled}
        return {var: (top, local[top]) for var, top in relative.items()}

    def _correct(self, relative: dict[Var, tuple[Var, Expr]]) -> None:
        """Kept values that are relative to a warp's maximum get a factor."""
        for var, (top, old) in relative.items():
            self.scope.factors[var] = T.Bind(rescale(old, self.scope.env[top]))
