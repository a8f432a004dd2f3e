"""What both forms of column kernels emit: vector loads, sweeps, stores."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..gpu import intrinsics as device
from ..gpu.frame import then
from ..gpu.memory import copy_in
from ..gpu.scope import Point, RowScope
from ..gpu.transfer import places, store_values
from ..program.expr import bytes_of, constant, convert, dtype_of, substitute, variables
from ..program.program import COMBINE, Output, Reduction
from ..row.exchange import WARP, Exchange, Threads, identity, is_arg, rescale, warp_reduce
from .config import ColumnConfig
from .lanes import Vector
from .state import Chunk, ColumnState

# Reductions across the walkers of a column block.
#
# Along rows every lane has its own result: registers -> the walkers of a warp (shuffles) -> shared
# memory -> the blocks of a cluster -> the lanes of a row, where a row has several. Along columns a
# block has one row.
#
# Sums that run along with a maximum (online) are rescaled whenever their partial maxima meet.

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

    `side` is the thread's place along the rows, `walker` across; a row has `inner` lanes. `rank` is
    the block's place in its cluster, of which `start` waits for all blocks to run.
    """

    config: ColumnConfig
    inner: int
    thread: Expr
    side: Expr
    walker: Expr
    finish: Finish
    rank: Expr | None = None
    start: Callable[[], None] = lambda: None

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
        if self.config.partials > 1 or self.inner > 1 or self.config.cluster > 1:
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
        if self.config.cluster > 1:
            self._among_blocks(group, memory)
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

    def _among_blocks(self, group: Group, memory: dict[Var, Var]) -> None:
        """The results of each block of the cluster in `memory` -> those of all."""
        cluster, slots = self.config.cluster, self.slots
        found = {r.var: T.alloc_shared((cluster * slots,), r.dtype) for r, _ in group}
        self.start()
        for first in range(0, slots, self.config.threads):
            item = self.thread + first
            with then(item < slots):
                for reduction, _ in group:
                    value = T.Bind(memory[reduction.var][item])
                    place = found[reduction.var].ptr_to([self.rank * slots + item])
                    for other in range(cluster):
                        T.evaluate(device.cluster_store(place, value, other))
        T.evaluate(device.cluster_sync())
        self._combine(
            group, slots, cluster, lambda item, number: item + number * slots, found, memory
        )
        T.evaluate(T.cuda.cta_sync())

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


class ColumnKernel(ColumnState):
    """Emits the parts of a column kernel; the forms derive from it and order them."""

    # ---- vectors

    def load_still(self, wanted: Iterable[Var]) -> None:
        """Loads the vectors that are the same at every step."""
        for var in wanted:
            if not self.lanes.loads[var].moves:
                zero = constant(0, self.index)
                self._load_vector(self.lanes.loads[var], zero, (self.buffers[var], 0))

    def load(self, wanted: Iterable[Var], chunk: Chunk) -> None:
        """Loads the vectors of one chunk."""
        for var in wanted:
            vector = self.lanes.loads[var]
            if vector.moves:
                shared = self._shared_by_lanes(vector, chunk)
                self._load_vector(vector, chunk.step, (self.buffers[var], chunk.slot), shared)

    def prepare_starts(self, wanted: Iterable[Var]) -> None:
        """Binds, outside of the loops, what the places of gathered vectors are computed from."""
        self.scopes[0].prepare_values(self.lanes.loads[var].start for var in wanted)

    def _shared_by_lanes(self, vector: Vector, chunk: Chunk) -> dict[Var, Expr]:
        """Placeholders in the place of a vector (the indices of a gather)."""
        scope, point = self.scopes[0], self.point(chunk, 0)
        used = [
            v for v in variables(vector.start) if v in scope.per_element & set(scope.definitions)
        ]
        return {var: point.evaluate(var) for var in used}

    def _start(
        self,
        vector: Vector,
        step: Expr,
        lane: Expr,
        scope: RowScope,
        shared: Mapping[Var, Expr] = MappingProxyType({}),
    ) -> Expr:
        """The element of a vector that a lane has."""
        here = {self.lanes.step: step, self.lanes.lane: lane, **shared}
        return scope.row(substitute(vector.start, here))

    def _load_vector(
        self,
        vector: Vector,
        step: Expr,
        target: tuple[Var, Expr | int],
        shared: Mapping[Var, Expr] = MappingProxyType({}),
    ) -> None:
        (buffer, slot), width = target, self.config.width
        source, size = self.frame.buffers[vector.param], bytes_of(vector.dtype)

        def together() -> None:
            start = self._start(vector, step, self.first, self.scopes[0], shared)
            if width == 1:
                T.buffer_store(buffer, source[start], [slot])
                return
            copy_in(
                places(buffer, slot, size),
                places(source, start, size),
                width * size,
                vector.piece,
                self.config.load,
            )

        def one_by_one() -> None:
            for w, (lane, scope) in enumerate(zip(self.lane_numbers, self.scopes, strict=True)):
                start = self._start(vector, step, lane, scope, shared)
                T.buffer_store(buffer, source[start], [slot + w])

        self._whole_or_not(together, one_by_one)

    def _whole_or_not(self, together: Callable[[], None], one_by_one: Callable[[], None]) -> None:
        if self.whole is None:
            together()
            return
        with T.If(self.whole):
            with T.Then():
                together()
            with T.Else():
                one_by_one()

    def load_scalars(self) -> None:
        """Loads what is the same for a whole row: vectors of rows, or element by element."""
        for scalar in self.program.scalars:
            vector = self.lanes.scalars.get(scalar.var)
            if vector is not None:
                target = T.alloc_local((self.config.width,), scalar.dtype)
                self._load_vector(vector, constant(0, self.index), (target, 0))
            for w, scope in enumerate(self.scopes):
                value = (
                    scope.load(scalar.param, scope.row(scalar.offset), scalar.dtype)
                    if vector is None
                    else convert(target[w], dtype_of(scalar.var))
                )
                scope.env[scalar.var] = T.Bind(value)

    # ---- sweeps

    def sweep(
        self,
        chunk: Chunk,
        reductions: Iterable[Reduction],
        outputs: Iterable[tuple[int, Output]],
        prepared: list[list[Expr]],
    ) -> None:
        """Accumulates and stores one chunk; `prepared`: bodies, then output values, by lane."""
        reductions, outputs = list(reductions), list(outputs)
        results: list[list[Expr]] = [[] for _ in outputs]
        points = []
        for w, exprs in enumerate(prepared):
            point = self.point(chunk, w)
            points.append(point)
            values = [point.evaluate(expr) for expr in exprs]
            for reduction, value in zip(reductions, values, strict=False):
                if is_arg(reduction):
                    in_order = not self.backwards
                    self.best[reduction.var].update(w, value, point.column, None, in_order)
                    continue
                partial = self.accumulators[reduction.var]
                T.buffer_store(partial, COMBINE[reduction.kind](partial[w], value), [w])
            for collected, value in zip(results, values[len(reductions) :], strict=True):
                collected.append(T.Bind(value))
        for (position, output), values in zip(outputs, results, strict=True):
            self._store(position, output, chunk, values, points)

    def _store(
        self, position: int, output: Output, chunk: Chunk, values: list[Expr], points: list[Point]
    ) -> None:
        """Stores the lanes of a full output."""
        vector = self.lanes.outputs.get(position)
        target = self.frame.buffers[output.param]

        def together() -> None:
            start = self._start(vector, chunk.step, self.first, self.scopes[0])
            store_values(target, start, values, output.dtype, vector.piece, self.config.store)

        def one_by_one() -> None:
            for w, (value, point, scope) in enumerate(
                zip(values, points, self.scopes, strict=True)
            ):
                place = output.offset + self.program.column_var
                place = scope.row(place if output.place is None else output.place)
                place = substitute(place, {self.program.column_var: point.column})
                with self._if_lane_exists(w):
                    T.buffer_store(target, convert(value, output.dtype), [place])

        with self._if_mine():
            if vector is None:
                one_by_one()
            else:
                self._whole_or_not(together, one_by_one)

    def _if_mine(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.mine is None else then(self.mine)

    def _if_lane_exists(self, w: int) -> contextlib.AbstractContextManager:
        """Of clamped lanes only the first one stores."""
        if self.whole is None or w == 0:
            return contextlib.nullcontext()
        return then(self.lane_numbers[w - 1] < self.lane_numbers[w])

    # ---- row outputs

    def store_rows(self, outputs: Iterable[tuple[int, Output]]) -> None:
        """Outputs with one element a row, written by the first walker."""
        outputs = list(outputs)
        if not outputs:
            return
        first = tirx.EQ(self.walker, 0)
        if self.config.cluster > 1:
            first = tirx.And(first, tirx.EQ(self.frame.rank, 0))
        with self.fork(), then(first), self._if_mine():
            for position, output in outputs:
                self._store_row(position, output)

    def _store_row(self, position: int, output: Output) -> None:
        target, vector = self.frame.buffers[output.param], self.lanes.outputs.get(position)
        wanted = range(self.config.width if self.lanes.along_rows else 1)
        values = [self.scopes[w].prepare(output.value) for w in wanted]

        def together() -> None:
            zero = constant(0, self.index)
            start = self._start(vector, zero, self.first, self.scopes[0])
            store_values(target, start, values, output.dtype, vector.piece, self.config.store)

        def one_by_one() -> None:
            for w, value in zip(wanted, values, strict=True):
                place = self.scopes[w].row(output.offset)
                with self._if_lane_exists(w), self._if_row_starts(w):
                    T.buffer_store(target, convert(value, output.dtype), [place])

        if vector is None:
            one_by_one()
        else:
            self._whole_or_not(together, one_by_one)

    def _if_row_starts(self, w: int) -> contextlib.AbstractContextManager:
        """Of the lanes of a row only the first one stores."""
        if not self.lanes.along_rows or self.lanes.inner == 1:
            return contextlib.nullcontext()
        return then(tirx.EQ(T.truncmod(self.lane_numbers[w], self.lanes.inner), 0))
