"""Reductions across the walkers of a column block.

Along rows every lane has its own result: registers -> the walkers of a warp (shuffles) -> shared
memory -> the lanes of a row, where a row has several. Along columns a block has one row.

Sums that run along with a maximum (online) are rescaled whenever their partial maxima meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..gpu.frame import then
from ..program.program import COMBINE, Reduction
from ..row.exchange import WARP, Exchange, Threads, identity, rescale, warp_reduce
from .config import ColumnConfig

FEW_TERMS = 16
"""Up to here the loop over partial results is unrolled whole."""

Group = Sequence[tuple[Reduction, Var]]
"""Reductions with their accumulators, one for each lane of the thread; maxima before the sums that
refer to them."""

Finish = Callable[[Reduction, int, Expr], None]
"""Told of the result of a reduction for each lane of the thread."""


def in_order(group: Group) -> list[tuple[Reduction, Var]]:
    """The group with maxima before the sums that refer to them."""
    return sorted(group, key=lambda item: item[0].online is not None)


@dataclass(frozen=True, slots=True, eq=False)
class LaneExchange:
    """Exchange where lanes lie along the rows.

    `side` is the thread's place along the rows, `walker` across; a row has `inner` lanes.
    """

    config: ColumnConfig
    inner: int
    thread: Expr
    side: Expr
    walker: Expr
    finish: Finish

    @property
    def lanes(self) -> int:
        """Threads side by side along the rows."""
        return self.config.lanes

    @property
    def width(self) -> int:
        """Lanes of a thread."""
        return self.config.width

    @property
    def slots(self) -> int:
        """Lanes of the block."""
        return self.lanes * self.width

    def run(self, group: Group) -> None:
        """Exchanges the accumulators of `group`."""
        group = in_order(group)
        if self.config.by_shuffle > 1:
            self._shuffle(group)
        results = {r.var: (lambda w, p=partial: p[w]) for r, partial in group}
        if self.config.partials > 1 or self.inner > 1:
            results = self._through_memory(group)
        for reduction, _ in group:
            for w in range(self.width):
                self.finish(reduction, w, T.Bind(results[reduction.var](w)))

    # ---- walkers of a warp

    def _shuffle(self, group: Group) -> None:
        tops = {r.online for r, _ in group if r.online is not None}
        for w in range(self.width):
            own: dict[Var, Expr] = {}
            best: dict[Var, Expr] = {}
            for reduction, partial in group:
                if reduction.var in tops:
                    own[reduction.var] = T.Bind(partial[w])
                if reduction.online is not None:
                    factor = rescale(own[reduction.online], best[reduction.online])
                    T.buffer_store(partial, partial[w] * factor, [w])
                step = self.lanes
                while step < WARP:
                    mask = T.uint32(0xFFFFFFFF)
                    other = T.tvm_warp_shuffle_xor(mask, partial[w], step, WARP, WARP)
                    T.buffer_store(partial, COMBINE[reduction.kind](partial[w], other), [w])
                    step *= 2
                if reduction.var in tops:
                    best[reduction.var] = partial[w]

    # ---- shared memory

    def _through_memory(self, group: Group) -> dict[Var, Callable[[int], Expr]]:
        """Readers of each reduction's result by lane."""
        by_shuffle, partials = self.config.by_shuffle, self.config.partials
        memory = {r.var: T.alloc_shared((partials * self.slots,), r.dtype) for r, _ in group}
        writes = tirx.const(True, "bool")
        number = self.walker
        if by_shuffle > 1:
            number = T.truncdiv(self.walker, by_shuffle)
            writes = tirx.EQ(T.truncmod(self.walker, by_shuffle), 0)
        with then(writes):
            for reduction, partial in group:
                for w in range(self.width):
                    place = number * self.slots + w * self.lanes + self.side
                    T.buffer_store(memory[reduction.var], partial[w], [place])
        T.evaluate(T.cuda.cta_sync())
        if partials > 1:
            self._combine(
                group,
                self.slots,
                partials,
                lambda item, number: item + number * self.slots,
                memory,
                memory,
            )
            T.evaluate(T.cuda.cta_sync())
        if self.inner == 1:
            return {
                r.var: (lambda w, m=memory[r.var]: m[self.side + w * self.lanes]) for r, _ in group
            }
        rows = self.slots // self.inner
        results = {r.var: T.alloc_shared((rows,), r.dtype) for r, _ in group}
        self._combine(
            group,
            rows,
            self.inner,
            lambda item, number: self._slot(item * self.inner + number),
            memory,
            results,
        )
        T.evaluate(T.cuda.cta_sync())

        def reader(values: Var) -> Callable[[int], Expr]:
            return lambda w: values[T.truncdiv(self.side * self.width + w, self.inner)]

        return {r.var: reader(results[r.var]) for r, _ in group}

    def _slot(self, lane: Expr) -> Expr:
        """Where a lane's results lie: neighbouring threads in neighbouring banks."""
        if self.width == 1:
            return lane
        return T.truncmod(lane, self.width) * self.lanes + T.truncdiv(lane, self.width)

    def _combine(
        self,
        group: Group,
        items: int,
        count: int,
        place: Callable[[Expr, Expr], Expr],
        source: dict[Var, Var],
        target: dict[Var, Var],
    ) -> None:
        """``target[item] = kind over number < count of source[place(item, number)]``."""
        for first in range(0, items, self.config.threads):
            item = self.thread + first
            inside = items - first >= self.config.threads
            with then(tirx.const(True, "bool") if inside else item < items):
                done: dict[Var, Expr] = {}
                for reduction, _ in group:
                    self._combine_one(reduction, item, count, place, source, done)
                for var, result in done.items():
                    T.buffer_store(target[var], result, [item])

    def _combine_one(
        self,
        reduction: Reduction,
        item: Expr,
        count: int,
        place: Callable[[Expr, Expr], Expr],
        source: dict[Var, Var],
        done: dict[Var, Expr],
    ) -> None:
        result = T.alloc_local((1,), reduction.dtype)
        T.buffer_store(result, identity(reduction), [0])
        top = reduction.online
        with T.serial(count) if count > FEW_TERMS else T.unroll(count) as number:
            at = place(item, number)
            term = source[reduction.var][at]
            if top is not None:
                term = term * rescale(source[top][at], done[top])
            T.buffer_store(result, COMBINE[reduction.kind](result[0], term), [0])
        done[reduction.var] = T.Bind(result[0])


@dataclass(frozen=True, slots=True, eq=False)
class RowExchange:
    """Exchange where all threads of the block, and all their lanes, belong to one row."""

    threads: int
    width: int
    thread: Expr
    finish: Finish

    def run(self, group: Group) -> None:
        """Exchanges the accumulators of `group`."""
        group = in_order(group)
        self._collapse(group)
        lane = T.Bind(T.truncmod(self.thread, WARP))

        def finish(reduction: Reduction, result: Expr) -> None:
            for w in range(self.width):
                self.finish(reduction, w, result)

        threads = Threads(self.threads, 1, 1, self.thread, lane, 0, None)
        Exchange(threads, None, finish, lambda: None).run(list(group))

    def _collapse(self, group: Group) -> None:
        """Lanes -> thread -> warp."""
        tops = {r.online for r, _ in group if r.online is not None}
        own: dict[Var, list[Expr]] = {}
        best: dict[Var, Expr] = {}
        for reduction, partial in group:
            if reduction.var in tops:
                own[reduction.var] = [T.Bind(partial[w]) for w in range(self.width)]
            combine = COMBINE[reduction.kind]
            for w in range(self.width):
                value = partial[w]
                if reduction.online is not None:
                    old = own[reduction.online][w]
                    value = value * rescale(old, best[reduction.online])
                T.buffer_store(partial, combine(partial[0], value) if w else value, [0])
            warp_reduce(reduction, partial, min(WARP, self.threads))
            if reduction.var in tops:
                best[reduction.var] = partial[0]
