"""The epilogue of the Hopper GEMM, 16 columns of a warpgroup's 64 rows at a time.

A thread holds rows `lane // 4` and 8 below of its warp's 16, columns `2 * (lane % 4)` and the next of every
8 (the layout of wgmma accumulators). A piece of 16 columns is two groups of 8: four pairs of neighbouring
columns a thread, which are the four words of a stmatrix.

Deferred, the accumulators are rounded to pairs of halves at the end of a tile and the pieces are computed
between the first steps of the next tile. What an epilogue loads is fetched one piece ahead.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..contraction import Output
from ..expr import bytes_of, conjunction, convert
from .gemm_access import affine_access
from .gemm_epilogue_loads import EpilogueLoad
from .gemm_frame import coordinates
from .gemm_grid import Tile
from .gemm_hopper_plan import BOX_BYTES, CHUNK
from .gemm_hopper_problem import BOX, HopperSegment
from .gemm_hopper_state import Hopper, expect, fence_shared, wait
from .gemm_math import lower
from .gemm_words import high_half, load_word, low_half, store_pair
from .intrinsics import pack_halves

CHUNKS_PER_BOX = BOX // CHUNK

# Named barriers 0 and 1 are the block's own; each consumer warpgroup has one.
FIRST_BARRIER = 2

LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
STMATRIX = "stmatrix.sync.aligned.m8n8.x4.shared.b16"


class Epilogue:
    """Emits the epilogue of one consumer warpgroup; `sums` are its accumulators."""

    def __init__(self, kernel: Hopper, number: Expr, sums: Expr):
        self.kernel, self.plan, self.frame = kernel, kernel.plan, kernel.frame
        self.problem, self.number, self.sums = kernel.problem, number, sums
        config = self.plan.config
        self.staged, self.deferred, self.boxes = config.staged, config.deferred, config.boxes
        self.residual = self.problem.residual if self.staged else None
        self.thread = T.Bind(kernel.thread % 128)
        self.lane = T.Bind(kernel.thread % 32)
        self.warp_row = T.Bind(self.thread // 32 * 16)
        self.matrix_row = T.Bind(self.warp_row + self.lane % 16)
        self.identity = self.staged and all(map(_is_identity, self.problem.segments))
        self.words = T.alloc_local((4,), "uint32")
        self.incoming = T.alloc_local((4,), "uint32") if self.residual else None
        self.held = (
            T.alloc_local((self.plan.accumulators // 2,), "uint32") if self.deferred else None
        )
        self.place = T.alloc_local((4,), "int32") if self.deferred else None
        self.fetched = [[_storage(x) for x in self._loads(s)] for s in self.problem.segments]

    def _loads(self, segment: HopperSegment) -> tuple[EpilogueLoad, ...]:
        """Loads from global memory: a residual that cannot come by the TMA is one of them."""
        extra = () if self.staged or segment.residual is None else (segment.residual,)
        return (*segment.loads, *extra)

    # ---- called by the consumer
    def during(self, step: Expr | int, turn: Expr, tile: Tile) -> None:
        """Emits what belongs into a step: the request for the tile's residual, once."""
        if self.residual is None:
            return
        steps = self.plan.steps
        when = max(steps - 2, 0) if self.deferred else min(2, steps - 1)
        boxes = range(1) if self.deferred else range(self.boxes)
        if isinstance(step, int):
            if step == when:
                self._request(boxes, tile)
            return
        with T.If(step == when), T.Then():
            self._request(boxes, tile)

    def keep(self, turn: Expr, tile: Tile) -> None:
        """Emits the end of a tile whose epilogue comes later: round and keep."""
        for i in range(self.plan.accumulators // 2):
            word = pack_halves(self.problem.dtype, self.sums[2 * i], self.sums[2 * i + 1])
            T.buffer_store(self.held, word, [i])
        for i, value in enumerate((tile.batch, tile.m, tile.n, turn)):
            T.buffer_store(self.place, value, [i])
        self._start(tile)

    def now(self, turn: Expr, tile: Tile) -> None:
        """Emits the whole epilogue of a tile."""
        self.tile, self.turn = tile, turn
        self._start(tile)
        if self.residual is not None:
            wait(self._arrived(0), turn % 2)
        for chunk in range(self.plan.chunks):
            self._chunk(chunk, tile, turn)

    def chunk(self, chunk: int) -> None:
        """Emits one piece of the epilogue of the tile kept last."""
        place = self.place
        self._chunk(chunk, Tile(place[0], place[1], place[2]), place[3])

    def finish(self) -> None:
        """Emits the wait for the last stores, before the block ends."""
        if self.staged:
            with T.If(self.thread == 0), T.Then():
                T.evaluate(T.ptx.cp.async_.bulk.wait_group(0))

    # ---- one piece
    def _chunk(self, chunk: int, tile: Tile, turn: Expr) -> None:
        self._fetch(chunk + 1, tile)
        if not self.staged:
            self._compute(chunk, tile)
            return
        box, part = divmod(chunk, CHUNKS_PER_BOX)
        buffer = self.number * self.boxes + box % self.boxes
        if part == 0:
            self._open_box(box, turn)
        offset = (
            self.matrix_row * BOX
            + T.bitwise_xor(part * 2 + self.lane // 16, self.matrix_row % 8) * 8
        )
        target = self.kernel.shared.boxes.ptr_to([buffer, offset])
        if self.residual is not None:
            T.evaluate(T.ptx[LDMATRIX](*(self.incoming[i] for i in range(4)), target))
        if self.identity and self.deferred:
            words = [self.held[chunk * 4 + i] for i in range(4)]
        else:
            self._compute(chunk, tile)
            words = [self.words[i] for i in range(4)]
        T.evaluate(T.ptx[STMATRIX](target, *words))
        if self.residual is not None and self.deferred and part == 2:
            if box + 1 < self.plan.out_n // BOX:
                self._request([box + 1], tile)
        if part == CHUNKS_PER_BOX - 1:
            self._close_box(box, buffer, tile)

    def _open_box(self, box: int, turn: Expr) -> None:
        """The box is free, or holds the residual."""
        if self.residual is None:
            with T.If(self.thread == 0), T.Then():
                T.evaluate(T.ptx.cp.async_.bulk.wait_group.read(self.boxes - 1))
            self._sync()
        elif self.deferred:
            rounds = self.plan.out_n // BOX // self.boxes
            wait(self._arrived(box % self.boxes), (turn * rounds + box // self.boxes) % 2)

    def _close_box(self, box: int, buffer: Expr, tile: Tile) -> None:
        fence_shared()
        self._sync()
        with T.If(self.thread == 0), T.Then():
            for number, own in self.kernel.grid.each_segment(tile):
                found = self.problem.segments[number].staged_map
                source = self.kernel.shared.boxes.ptr_to([buffer, 0])
                found.store(source, self.kernel.maps.staged[number], self._box_place(box, own))
            T.evaluate(T.ptx.cp.async_.bulk.commit_group())

    def _request(self, boxes: Iterator[int], tile: Tile) -> None:
        """The TMA brings boxes of the residual once earlier stores have left them."""
        found, handle = self.problem.segments[0].residual_map, self.kernel.maps.residual
        with T.If(self.thread == 0), T.Then():
            T.evaluate(T.ptx.cp.async_.bulk.wait_group.read(0))
            if not self.deferred:
                expect(self._arrived(0), self.boxes * BOX_BYTES)
            for box in boxes:
                place = box % self.boxes
                barrier = self._arrived(place if self.deferred else 0)
                if self.deferred:
                    expect(barrier, BOX_BYTES)
                target = self.kernel.shared.boxes.ptr_to([self.number * self.boxes + place, 0])
                found.load(target, handle, self._box_place(box, tile), barrier)

    def _arrived(self, box: int) -> Expr:
        return self.kernel.shared.arrived.ptr_to([self.number * self.boxes + box])

    def _box_place(self, box: int, tile: Tile) -> dict[str, Expr]:
        row = tile.m * self.plan.config.block_m + self.number * BOX
        return {"batch": tile.batch, "m": row, "n": tile.n * self.plan.out_n + box * BOX}

    def _sync(self) -> None:
        barrier = T.cast(FIRST_BARRIER + self.number, "uint32")
        T.evaluate(T.ptx.bar.sync(barrier, T.uint32(128)))

    # ---- coordinates
    def _row(self, tile: Tile, half: int) -> Expr:
        first = tile.m * self.plan.config.block_m + self.number * BOX
        return first + self.warp_row + self.lane // 4 + half * 8

    def _column(self, tile: Tile, chunk: int, group: int) -> Expr:
        return tile.n * self.plan.out_n + chunk * CHUNK + group * 8 + self.lane % 4 * 2

    def _groups(self, chunk: int) -> range:
        """Groups of 8 columns in a piece; the last of a narrow tile may hold one."""
        return range(min(2, self.plan.out_n // 8 - 2 * chunk))

    @property
    def _ragged_rows(self) -> bool:
        return self.problem.M % self.plan.config.block_m != 0

    def _ragged_columns(self, segment: HopperSegment) -> bool:
        return segment.N % self.plan.out_n != 0

    def _point(
        self, segment: HopperSegment, tile: Tile, row: Expr, column: Expr
    ) -> dict[Var, Expr]:
        env = coordinates(segment.batch, tile.batch, self.frame)
        env |= coordinates(segment.m, row, self.frame)
        return env | coordinates(segment.n, column, self.frame)

    # ---- loads
    def _start(self, tile: Tile) -> None:
        """What is the same for all columns is loaded once a tile, the rest for the first piece."""
        if any(self._loads(s) for s in self.problem.segments):
            for number, own in self.kernel.grid.each_segment(tile):
                for load, storage in self._pairs(number):
                    if not load.per_column:
                        for half in range(2):
                            row = self._inside_row(self._row(own, half))
                            self._read(number, load, storage, [half], own, row, 0)
        self._fetch(0, tile)

    def _pairs(self, number: int) -> Iterator[tuple[EpilogueLoad, Expr]]:
        loads = self._loads(self.problem.segments[number])
        return zip(loads, self.fetched[number], strict=True)

    def _fetch(self, chunk: int, tile: Tile) -> None:
        """Loads for a piece, ahead of its computation."""
        if chunk >= self.plan.chunks:
            return
        if not any(x.per_column for s in self.problem.segments for x in self._loads(s)):
            return
        for number, own in self.kernel.grid.each_segment(tile):
            segment = self.problem.segments[number]
            for load, storage in self._pairs(number):
                if not load.per_column:
                    continue
                for group in self._groups(chunk):
                    for half in range(2 if load.per_row else 1):
                        row = self._inside_row(self._row(own, half))
                        for v in range(1 if load.paired else 2):
                            column = self._column(own, chunk, group) + v
                            if self._ragged_columns(segment):
                                last = segment.N - (2 if load.paired else 1)
                                column = tirx.Min(column, tirx.IntImm("int32", last))
                            at = _slot(load, chunk, group, half, v)
                            self._read(number, load, storage, [at], own, row, column)

    def _inside_row(self, row: Expr) -> Expr:
        """A row that exists: what is read for the others is never stored."""
        if not self._ragged_rows:
            return row
        return tirx.Min(row, tirx.IntImm("int32", self.problem.M - 1))

    def _read(
        self,
        number: int,
        load: EpilogueLoad,
        storage: Expr,
        at: list[int],
        tile: Tile,
        row: Expr,
        column: Expr | int,
    ) -> None:
        segment = self.problem.segments[number]
        column = tirx.IntImm("int32", column) if isinstance(column, int) else column
        indices = self.frame.place(load.indices, self._point(segment, tile, row, column))
        source = self.frame.buffers[load.param]
        if load.per_column and load.paired:
            T.buffer_store(storage, load_word(source.ptr_to(indices)), at)
        else:
            T.buffer_store(storage, source[tuple(indices)], at)

    def _loaded(
        self, load: EpilogueLoad, storage: Expr, chunk: int, group: int, half: int, v: int
    ) -> Expr:
        if not load.per_column:
            return convert(storage[half], str(load.var.ty.dtype))
        at = storage[
            _slot(load, chunk, group, half if load.per_row else 0, 0 if load.paired else v)
        ]
        if load.paired:
            return _half(load.dtype, at, v)
        return convert(at, str(load.var.ty.dtype))

    # ---- arithmetic
    def _compute(self, chunk: int, tile: Tile) -> None:
        """Values of a piece: the staged output's words, the other outputs' stores."""
        for number, own in self.kernel.grid.each_segment(tile):
            segment = self.problem.segments[number]
            for group in self._groups(chunk):
                for half in range(2):
                    pairs = [self._values(number, own, chunk, group, half, v) for v in range(2)]
                    for position, output in enumerate(segment.outputs):
                        low, high = (values[position] for values in pairs)
                        if self.staged and position == segment.staged:
                            word = pack_halves(output.dtype, low, high)
                            T.buffer_store(self.words, word, [group * 2 + half])
                        else:
                            self._store(segment, output, own, chunk, group, half, low, high)

    def _values(
        self, number: int, tile: Tile, chunk: int, group: int, half: int, v: int
    ) -> list[Expr]:
        """The outputs of one element."""
        segment = self.problem.segments[number]
        column = self._column(tile, chunk, group) + v
        env = self._point(segment, tile, self._row(tile, half), column)
        for position, product in enumerate(segment.products):
            at = position * (self.plan.out_n // 2) + (chunk * 2 + group) * 4 + half * 2
            if self.deferred:
                value = _half(self.problem.dtype, self.held[at // 2], v)
            else:
                value = self.sums[at + v]
            env[product.accumulator] = T.Bind(value)
        for load, storage in self._pairs(number):
            env[load.var] = T.Bind(self._loaded(load, storage, chunk, group, half, v))
        if self.residual is not None:
            word = self.incoming[group * 2 + half]
            env[self.residual.var] = T.Bind(_half(self.residual.dtype, word, v))
        halves = all(bytes_of(o.dtype) == 2 for o in segment.outputs)
        for binding in segment.bindings:
            env[binding.var] = T.Bind(self._lowered(binding.value, env, halves))
        return [self._lowered(o.value, env, halves) for o in segment.outputs]

    def _lowered(self, expr: Expr, env: dict[Var, Expr], halves: bool) -> Expr:
        value = self.frame.rewrite(expr, env)
        return value if self.problem.contraction.exact else lower(value, halves)

    def _store(
        self,
        segment: HopperSegment,
        output: Output,
        tile: Tile,
        chunk: int,
        group: int,
        half: int,
        low: Expr,
        high: Expr,
    ) -> None:
        """Stores two neighbouring columns of an output from registers, those that exist."""
        row, column = self._row(tile, half), self._column(tile, chunk, group)
        target = self.frame.output(output.param)
        above = row < self.problem.M if self._ragged_rows else None
        ragged = self._ragged_columns(segment)
        paired = self._is_paired(segment, output)
        for v, value in enumerate((low, high)):
            indices = self.frame.place(output.indices, self._point(segment, tile, row, column + v))
            condition = conjunction(above, column + v < segment.N if ragged else None)

            def put(indices=indices, value=value) -> None:
                if paired:
                    T.evaluate(store_pair(output.dtype, target.ptr_to(indices), low, high))
                else:
                    T.buffer_store(target, convert(value, output.dtype), indices)

            if condition is None:
                put()
            else:
                with T.If(condition), T.Then():
                    put()
            if paired:
                break

    def _is_paired(self, segment: HopperSegment, output: Output) -> bool:
        if output.dtype not in ("float16", "bfloat16", "float32"):
            return False
        shape = self.frame.contraction.params[output.param].shape
        access = affine_access(output.indices, shape, segment.groups)
        return access is not None and access.aligned(2, "n")


def _storage(load: EpilogueLoad) -> Expr:
    """Registers for a load: two rows, or two pieces of up to four pairs."""
    if not load.per_column:
        return T.alloc_local((2,), load.dtype)
    count = 2 * 2 * (2 if load.per_row else 1)
    return T.alloc_local(
        (count if load.paired else 2 * count,), "uint32" if load.paired else load.dtype
    )


def _slot(load: EpilogueLoad, chunk: int, group: int, half: int, v: int) -> int:
    """Where in its registers an element of a piece lies; pieces take turns."""
    rows = 2 if load.per_row else 1
    at = (chunk % 2 * 2 + group) * rows + (half if load.per_row else 0)
    return at if load.paired else at * 2 + v


def _half(dtype: str, word: Expr, v: int) -> Expr:
    return high_half(dtype, word) if v else low_half(dtype, word)


def _is_identity(segment: HopperSegment) -> bool:
    """Whether the only output is the accumulator itself, at most rounded to the output's dtype."""
    if len(segment.outputs) != 1 or len(segment.products) != 1 or segment.bindings:
        return False
    value = segment.outputs[0].value
    while isinstance(value, tirx.Cast):
        value = value.value
    return value.same_as(segment.products[0].accumulator)
