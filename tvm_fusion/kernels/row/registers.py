"""Row kernels that hold a row in registers.

    load the row -> sweep, reduce, exchange (once a phase) -> sweep and store

Held by less than a warp (several rows a warp), by warps of one block, or by a cluster of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext

from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...errors import Unsupported
from ..gpu.frame import then
from ..program.expr import convert
from ..program.program import Extent, Reduction, Tile
from .cost import ENDS, group_of
from .exchange import carried, finite, is_arg, rescale, warp_reduce
from .steps import Chunk, Load, Step
from .sweeps import WARP, RowKernel


class RegisterRows(RowKernel):
    """Each block computes `config.rows` rows, or a share of one row, and is done."""

    def emit(self) -> None:
        """The body of the kernel."""
        if self._ends_apart and self.stride < ENDS:
            raise Unsupported(f"ends of rows of symbolic length in {self.stride} threads")
        self.allocate(self.chunks * self.config.width)
        count = self.program.row_count
        exact = isinstance(count, int) and count % self.config.rows == 0
        self.enter_row(self.first_row(), partial=self.config.rows > 1 and not exact)
        self.load_scalars()
        self.compute(loaded=[])

    # ---- chunks

    @property
    def share(self) -> Extent:
        """Vectors that the threads of this block walk over."""
        return self.vectors

    @property
    def stride(self) -> int:
        """Threads that walk over them together."""
        return self.config.threads * self.config.cluster

    @property
    def chunks(self) -> int:
        """Vectors a thread, the last one perhaps beyond the end."""
        if self._ends_apart:
            return -(-(self.config.most // self.config.width - 1) // self.stride) + 1
        return -(-self._most() // self.stride)

    @property
    def _ends_apart(self) -> bool:
        """Whether a thread holds the vectors at the ends of a row apart from those between: where
        these are known at the call alone, and there are several.
        """
        symbolic = self.windows is not None and not isinstance(self.columns, int)
        return symbolic and self._most() > self.stride

    def _most(self) -> int:
        """Vectors of the longest row."""
        if isinstance(self.share, int):
            return self.share
        most = self.config.most
        return self.windows.most_of(most) if self.windows else -(-most // self.config.width)

    def _whole(self) -> int:
        """Vectors a thread that every row has, none of which sticks out of it."""
        if isinstance(self.share, int):
            return (self.windows.interior if self.windows else self.share) // self.stride
        vectors = self.config.least // self.config.width
        return max(vectors - bool(self.windows), 0) // self.stride

    def walker(self) -> Expr:
        """The thread's place among those that walk together."""
        return self.row_thread

    def chunk(self, step: Expr | int) -> Chunk:
        """The thread's vector number `step`."""
        return Chunk(step * self.stride + self.walker(), step * self.config.width)

    def each_chunk(self, emit: Callable[[Chunk], None]) -> None:
        """`emit` for every chunk; the last one under a guard where the row ends within it."""
        if self.windows:
            self._each_window(emit)
            return
        whole, stride = self._whole(), self.stride
        if whole == 1:
            emit(self.chunk(0))
        elif whole:
            with T.unroll(whole) as step:
                emit(self.chunk(step))
        rest = self.chunks - whole
        if rest == 1:
            with then(whole * stride + self.walker() < self.share):
                emit(self.chunk(whole))
        elif rest > 1:

            def emit_one(step: Expr) -> None:
                with then(step * stride + self.walker() < self.share):
                    emit(self.chunk(step))

            self._in_groups(emit_one, whole, rest, self.share)

    def _each_window(self, emit: Callable[[Chunk], None]) -> None:
        """`emit` for every chunk; those that may stick out of the row under guards."""
        windows, stride, width = self.windows, self.stride, self.config.width
        whole = self._whole()
        if whole == 1:
            emit(Chunk(windows.vector(self.walker(), edge=False), 0))
        elif whole:
            with T.unroll(whole) as step:
                number = step * stride + self.walker()
                emit(Chunk(windows.vector(number, edge=False), step * width))
        if self._ends_apart:
            self._each_between(emit, whole)
            return
        for step in range(whole, self.chunks):
            number = T.Bind(step * stride + self.walker())
            with then(number < windows.count):
                emit(Chunk(windows.vector(number, edge=True), step * width, edge=True))

    def _each_between(self, emit: Callable[[Chunk], None], whole: int) -> None:
        """`emit` for the vectors between the ends from a thread's number `whole` on, as many as
        there are, then for those at the ends.
        """
        windows, stride, width = self.windows, self.stride, self.config.width
        between = self.chunks - 1

        def emit_one(step: Expr) -> None:
            number = step * stride + self.walker()
            with then(number < windows.interior):
                emit(Chunk(windows.vector(number, edge=False), step * width))

        self._in_groups(emit_one, whole, between - whole, windows.interior)
        number = T.Bind(convert(self.walker(), self.index) + windows.interior)
        with then(number < windows.count):
            emit(Chunk(windows.vector(number, edge=True), between * width, edge=True))

    def _in_groups(
        self, emit: Callable[[Expr], None], first: int, count: int, end: Expr | int
    ) -> None:
        """`emit` for so many of a thread's vectors, in groups of which those that lie beyond the
        end of the row are branched around.
        """
        each = group_of(count)
        for start in range(first, first + count, each):
            begins = None if start == first else start * self.stride < end
            with (
                nullcontext() if begins is None else then(begins),
                T.unroll(min(each, first + count - start)) as step,
            ):
                emit(step + start)

    # ---- phases

    def compute(
        self, loaded: Iterable[Load], after_barrier: Callable[[], None] | None = None
    ) -> None:
        """All steps on the current row; `loaded` tiles are in registers already."""
        present = {load.var for load in loaded}

        def fetch(loads: Iterable[Load]) -> None:
            missing = [load for load in loads if load.var not in present]
            present.update(load.var for load in missing)
            if missing:
                self.each_chunk(lambda chunk: [self.load(load, chunk) for load in missing])

        self.scope.ready.clear()
        self.scope.factors.clear()
        self.scope.forget()
        fetch(load for load in self.loads if isinstance(load, Tile) and load.per_row)
        elements = [load.var for load in self.loads if not isinstance(load, Tile)]
        self.scope.prepare_values(elements)
        fetch(self.needed(elements))
        steps = self.steps()
        for number, step in enumerate(steps):
            self.scope.forget()
            if step.swept:
                fetch(self.needed(step.swept))
                self.pass_over(step.plain, step)
            relative = self._reduce_warps(step)
            group = [*step.plain, *step.running]
            if group:
                # shared vectors (gamma, bias) of the next sweep arrive while the threads meet
                following = steps[number + 1] if number + 1 < len(steps) else None
                ahead = self.needed(following.swept) if following else []
                fetch(load for load in ahead if isinstance(load, Tile) and not load.per_row)
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
            self.collapse(reduction)
            warp_reduce(carried(reduction), self.accumulators[reduction.var], width)
        if not step.running:
            return {}
        before = set(self.scope.ready)
        with self.scope.fork():
            local = {}
            for reduction in step.plain:
                if is_arg(reduction):
                    continue
                own = self.accumulators[reduction.var][0]
                is_top = any(r.online.same_as(reduction.var) for r in step.running)
                own = T.Bind(finite(own) if is_top else own)
                self.scope.env[reduction.var] = local[reduction.var] = own
            self.pass_over(step.running, None)
        for reduction in step.running:
            self.collapse(reduction)
            warp_reduce(reduction, self.accumulators[reduction.var], width)
        fresh = [var for var in self.kept if var in self.scope.ready and var not in before]
        relative = {var: self.scaled[var] for var in fresh if var in self.scaled}
        return {var: (top, local[top]) for var, top in relative.items()}

    def _correct(self, relative: dict[Var, tuple[Var, Expr]]) -> None:
        """Kept values that are relative to a warp's maximum get a factor."""
        for var, (top, old) in relative.items():
            self.scope.factors[var] = T.Bind(rescale(old, self.scope.env[top]))
