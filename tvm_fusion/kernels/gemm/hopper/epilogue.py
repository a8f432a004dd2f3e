"""The epilogue of the Hopper GEMM, 16 columns of a warpgroup's 64 rows at a time.

Deferred, the accumulators are rounded to pairs of halves at the end of a tile, and the pieces are
computed between the first steps of the next tile. The staged output goes through boxes of shared
memory (`boxes`); the other outputs are stored from registers.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...contraction.reader import Output
from ...gpu.access import affine_access, half_of, store_pair
from ...gpu.intrinsics import pack_halves
from ...gpu.memory import AT_ONCE, row_word, store_row_word, words_read
from ...gpu.product_frame import Frame, Tile, evaluate
from ...program.expr import FLOAT8_DTYPES, bytes_of, conjunction, convert
from ..epilogue import partner_vars, reads_in_place, values_by_part
from .boxes import Boxes
from .fetch import Fetch
from .layout import Layout
from .model import BOX, HopperSegment
from .partials import Partials
from .plan import CHUNK
from .state import Hopper, warpgroup_sync

# Multiplies accumulators of the Hopper GEMM by the factors of their rows, before the epilogue.
#
# What the factors are made of is loaded while the last steps of a tile run.

# Steps before the end of a tile in which the loads are issued.
STEPS_AHEAD = 2


class Scale:
    """Factors of all segments for the accumulators `sums` of a warpgroup."""

    def __init__(self, layout: Layout, fetch: Fetch, sums: Expr):
        self.layout, self.plan, self.problem = layout, layout.plan, layout.problem
        self.fetch, self.sums = fetch, sums

    def during(self, step: Expr | int, tile: Tile) -> None:
        """Emits what belongs into a step: the loads, once."""
        when = max(self.plan.least_steps - STEPS_AHEAD, 0)
        if isinstance(step, int):
            if step == when:
                self.fetch.once(tile)
            return
        with T.If(step == when), T.Then():
            self.fetch.once(tile)

    def apply(self, tile: Tile) -> None:
        """Emits the multiplication, of what this block stores."""
        for number, own in self.layout.kernel.grid.each_segment(tile):
            for half in range(2):
                for position, value in enumerate(self._values(number, own, half)):
                    start = position * (self.plan.out_n // 2)
                    for i in range(start, start + self.plan.share_n // 2):
                        if i % 4 // 2 == half:
                            T.buffer_store(self.sums, self.sums[i] * value, [i])

    def _values(self, number: int, tile: Tile, half: int) -> list[Expr]:
        """The factor of each product for one of a thread's two rows."""
        segment, layout = self.problem.segments[number], self.layout
        env = layout.point(segment, tile, layout.row(tile, half), tirx.IntImm("int32", 0))
        for load, registers in self.fetch.kept[number]:
            if not load.per_column:
                env[load.var] = T.Bind(self.fetch.value(load, registers, 0, 0, half, 0))
        factors = evaluate(layout.kernel.frame, (), segment.factors, env, False)
        return [T.Bind(value) for value in factors]


# Outputs of the Hopper GEMM whose rows the TMA cannot address, stored row by row.
#
# Where rows start off 4 bytes, what a thread holds of a row would leave in pieces of 2 bytes. So
# the columns of a box go through shared memory, and a warp stores a row of it at a time, in aligned
# words of neighbouring columns.

ROWS_OF_WARP = 16


def store_rows(
    frame: Frame, layout: Layout, segment: HopperSegment, output: Output, tile: Tile, box: int
) -> None:
    """Emits the stores of a box that all threads of the warpgroup have written."""
    plan, target = layout.plan, frame.output(output.param)
    column = T.Bind(layout.first_column(tile) + box * BOX)
    count = T.Bind(tirx.Min(T.int32(min(BOX, plan.share_n - box * BOX)), segment.N - column))
    source = layout.kernel.shared.boxes.ptr_to([layout.number, 0])
    top = tile.m * plan.config.block_m + layout.number * BOX
    warpgroup_sync(layout.number)
    inside = column < segment.N if layout.ragged_columns(segment) else tirx.IntImm("bool", 1)
    with T.If(inside), T.Then():
        for first in range(0, ROWS_OF_WARP, AT_ONCE):
            rows = [T.Bind(layout.warp_row + i) for i in range(first, first + AT_ONCE)]
            places = []
            for own in rows:
                row = layout.existing_row(segment, top + own)
                point = layout.point(segment, tile, row, column)
                places.append(target.ptr_to(frame.place(output.indices, point)))
            words = [
                T.Bind(row_word(BOX, place, source, own, layout.lane))
                for place, own in zip(places, rows, strict=True)
            ]
            T.evaluate(words_read())
            for place, own, word in zip(places, rows, words, strict=True):
                exists = layout.exists(segment, top + own)
                with T.If(tirx.IntImm("bool", 1) if exists is None else exists), T.Then():
                    T.evaluate(store_row_word(BOX, place, word, layout.lane, count))
    warpgroup_sync(layout.number)


CHUNKS_PER_BOX = BOX // CHUNK

LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
STMATRIX = "stmatrix.sync.aligned.m8n8.x4.shared.b16"

PAIRED_DTYPES = ("float16", "bfloat16", "float32", *FLOAT8_DTYPES)


class Epilogue:
    """Emits the epilogue of one consumer warpgroup; `sums` are its accumulators."""

    def __init__(self, kernel: Hopper, number: Expr, sums: Expr):
        self.kernel, self.plan, self.problem = kernel, kernel.plan, kernel.problem
        self.frame, self.sums = kernel.frame, sums
        config = self.plan.config
        self.staged, self.deferred = config.staged, config.deferred
        self.residual = self.problem.residual if self.staged else None
        self.layout = Layout(kernel, number)
        # Where a tile is kept, pairs of columns leave no registers for what the next piece reads:
        # it is loaded where it is used. Steps are long enough for that.
        paired = any(segment.partners is not None for segment in self.problem.segments)
        loads = [self._loads(segment) for segment in self.problem.segments]
        self.fetch = Fetch(self.layout, loads, self.deferred and paired)
        kept = self.problem.kept_dtype
        self.identity = self.staged and all(_is_identity(s, kept) for s in self.problem.segments)
        self.partials = Partials(self.frame, self.layout)
        self.values = [
            values_by_part(s.partners, s.bindings, s.outputs) for s in self.problem.segments
        ]
        scaled = any(segment.factors for segment in self.problem.segments)
        self.factors = Scale(self.layout, self.fetch, sums) if scaled else None
        self.words = T.alloc_local((4,), "uint32")
        self.boxes = Boxes(kernel, self.layout) if self.staged else None
        self.incoming = self.held = self.place = None
        if self.residual is not None:
            self.incoming = T.alloc_local((4,), "uint32")
        if self.deferred:
            self.held = T.alloc_local((self.plan.accumulators // 2,), "uint32")
            self.place = T.alloc_local((5,), "int32")

    def _loads(self, segment: HopperSegment) -> tuple:
        """Loads from global memory: a residual that the TMA does not bring is one of them."""
        extra = () if self.staged or segment.residual is None else (segment.residual,)
        return (*segment.loads, *extra)

    # ---- called by the consumer

    def start(self) -> None:
        """Emits what comes before the first tile: the request for its residual, if ahead."""
        if self.boxes is not None:
            self.boxes.start()

    def during(self, step: Expr | int, tile: Tile) -> None:
        """Emits what belongs into a step: the request for the tile's residual, once."""
        if self.factors is not None:
            self.factors.during(step, tile)
        if self.boxes is not None:
            self.boxes.during(step, tile)

    def keep(self, turn: Expr, tile: Tile) -> None:
        """Emits the end of a tile whose epilogue comes later: round and keep."""
        self.scale(tile)
        for i in range(self.plan.accumulators // 2):
            word = pack_halves(self.problem.kept_dtype, self.sums[2 * i], self.sums[2 * i + 1])
            T.buffer_store(self.held, word, [i])
        place = (tile.batch, tile.m, tile.n, turn, tile.segment)
        for i, value in enumerate(place if tile.segment is not None else place[:-1]):
            T.buffer_store(self.place, value, [i])
        self.prepare(tile)

    def prepare(self, tile: Tile) -> None:
        """Emits the loads that the epilogue of a tile starts from."""
        if self.factors is None:
            self.fetch.once(tile)
        self.fetch.ahead(0, tile)

    def scale(self, tile: Tile) -> None:
        """Emits the multiplication of the accumulators by factors that all columns share."""
        if self.factors is not None:
            self.factors.apply(tile)

    def now(self, turn: Expr, tile: Tile) -> None:
        """Emits the whole epilogue of a tile."""
        if self.boxes is not None:
            self.boxes.await_residual(turn)
        if self.problem.has_windows and self._stores_elements():
            # of 1,500 positions a line, channels first, 15 kB of code for 234 (sm_90a)
            tile = tile.in_registers()
        for chunk in range(self.plan.chunks):
            self._chunk(chunk, tile, turn)

    def _stores_elements(self) -> bool:
        """Whether outputs are stored from registers."""
        return not self.staged or any(len(s.outputs) > 1 for s in self.problem.segments)

    def chunk(self, chunk: int) -> None:
        """Emits one piece of the epilogue of the tile kept last."""
        batch, m, n, turn = (self.place[i] for i in range(4))
        segment = None if self.problem.shared else self.place[4]
        self._chunk(chunk, Tile(batch, m, n, segment), turn)

    def finish(self) -> None:
        """Emits the wait for the last stores, before the block ends."""
        if self.boxes is not None:
            self.boxes.finish()

    # ---- one piece

    def _chunk(self, chunk: int, tile: Tile, turn: Expr) -> None:
        self.fetch.ahead(chunk + 1, tile)
        if not self.staged:
            self._compute(chunk, tile)
            return
        box, part = divmod(chunk, CHUNKS_PER_BOX)
        buffer = self.boxes.buffer(box, turn)
        if part == 0:
            self.boxes.open(box, turn)
        target = self.kernel.shared.boxes.ptr_to([buffer, self.layout.matrix_offset(part)])
        if self.residual is not None:
            T.evaluate(T.ptx[LDMATRIX](*(self.incoming[i] for i in range(4)), target))
        words = self.words
        if self.identity and self.deferred:
            words = [self.held[chunk * 4 + i] for i in range(4)]
        else:
            self._compute(chunk, tile)
        T.evaluate(T.ptx[STMATRIX](target, *(words[i] for i in range(4))))
        more = self.residual is not None and box + 1 < self.plan.share_n // BOX
        if more and self.deferred and part == 2:
            self.boxes.request([box + 1], tile)
        if part == CHUNKS_PER_BOX - 1:
            self.boxes.close(box, buffer, tile)

    # ---- arithmetic

    def _compute(self, chunk: int, tile: Tile) -> None:
        """Values of a piece: the staged output's words, the other outputs' stores."""
        for number, own in self.kernel.grid.each_segment(tile):
            segment, by_rows = self.problem.segments[number], self.plan.by_rows[number]
            for group in self.layout.groups(chunk):
                for half in range(2):
                    pair = [self._values(number, own, chunk, group, half, v) for v in range(2)]
                    for position, output in enumerate(segment.outputs):
                        low, high = (values[position] for values in pair)
                        if output.partial is not None:
                            place = chunk, group, half
                            self.partials.add(number, position, own, place, (low, high))
                        elif position == (segment.staged if self.staged else by_rows):
                            word = pack_halves(output.dtype, low, high)
                            T.buffer_store(self.words, word, [group * 2 + half])
                        else:
                            at = (self.layout.row(own, half), self.layout.column(own, chunk, group))
                            self._store(segment, output, own, at, (low, high))
            self.partials.close(number, segment, own, chunk)
            if by_rows is not None:
                self._put_by_rows(segment, segment.outputs[by_rows], own, chunk)

    def _put_by_rows(self, segment: HopperSegment, output: Output, tile: Tile, chunk: int) -> None:
        """Puts the words of a piece into the box, and stores the box behind its last piece."""
        box, part = divmod(chunk, CHUNKS_PER_BOX)
        place = [self.layout.number, self.layout.matrix_offset(part)]
        target = self.kernel.shared.boxes.ptr_to(place)
        T.evaluate(T.ptx[STMATRIX](target, *(self.words[i] for i in range(4))))
        if part == CHUNKS_PER_BOX - 1 or chunk == self.plan.chunks - 1:
            store_rows(self.frame, self.layout, segment, output, tile, box)

    def _values(
        self, number: int, tile: Tile, chunk: int, group: int, half: int, v: int
    ) -> list[Expr]:
        """The outputs of one element."""
        segment, layout = self.problem.segments[number], self.layout
        self.fetch.now(number, tile, (chunk, group, half, v))
        row, column = layout.row(tile, half), layout.column(tile, chunk, group) + v
        if reads_in_place(segment.bindings, segment.outputs):
            row = layout.existing_row(segment, row)
            column = layout.existing_column(segment, column, 1)
        env = layout.point(segment, tile, row, column)
        place, partners = (chunk * 2 + group) * 8 + v, segment.partners
        others = partner_vars(partners, len(segment.products))
        for position, (product, other) in enumerate(zip(segment.products, others, strict=True)):
            env[product.accumulator] = T.Bind(self._sum(position, place, half))
            if other is not None:
                pair = self._sum(position, partners.partner_of(place), half)
                env[other] = T.Bind(pair)
        for load, registers in self.fetch.kept[number]:
            env[load.var] = T.Bind(self.fetch.value(load, registers, chunk, group, half, v))
        if self.residual is not None:
            word = self.incoming[group * 2 + half]
            own = segment.residual
            env[own.var] = T.Bind(half_of(own.dtype, word, v))
        halves = all(bytes_of(dtype) == 2 for dtype in _stored_dtypes(segment))
        part = 0 if partners is None else partners.part_of(place)
        bindings, values = self.values[number][part]
        return evaluate(self.frame, bindings, values, env, halves)

    def _sum(self, product: int, place: int, half: int) -> Expr:
        """A thread's accumulator for column `place` of its own: numbers 0 and 1 of every 8."""
        at = product * (self.plan.out_n // 2) + place // 8 * 4 + half * 2
        if self.deferred:
            return half_of(self.problem.kept_dtype, self.held[at // 2], place % 8)
        return self.sums[at + place % 8]

    def _store(
        self,
        segment: HopperSegment,
        output: Output,
        tile: Tile,
        at: tuple[Expr, Expr],
        pair: tuple[Expr, Expr],
    ) -> None:
        """Stores two neighbouring columns of an output from registers, those that exist."""
        row, column = at
        target = self.frame.output(output.param)
        above = self.layout.exists(segment, row)
        ragged = self.layout.ragged_columns(segment)
        paired = self._is_paired(segment, output)
        for v in range(1 if paired else 2):
            point = self.layout.point(segment, tile, row, column + v)
            indices = self.frame.place(output.indices, point)
            inside = conjunction(above, column + v < segment.N if ragged else None)
            with T.If(tirx.IntImm("bool", 1) if inside is None else inside), T.Then():
                if paired:
                    T.evaluate(store_pair(output.dtype, target.ptr_to(indices), *pair))
                else:
                    T.buffer_store(target, convert(pair[v], output.dtype), indices)

    def _is_paired(self, segment: HopperSegment, output: Output) -> bool:
        """Whether columns 2 i and 2 i + 1 are one aligned access."""
        shape = self.frame.contraction.params[output.param].shape
        access = affine_access(output.indices, shape, segment.groups)
        aligned = access is not None and access.aligned(2, "n")
        return aligned and output.dtype in PAIRED_DTYPES


def _stored_dtypes(segment: HopperSegment) -> list[str]:
    """The dtypes that decide how exact an epilogue has to be: a partial sums up what the unfused
    graph stores.
    """
    whole = [output.dtype for output in segment.outputs if output.partial is None]
    return whole or [product.stored_dtype for product in segment.products]


def _is_identity(segment: HopperSegment, kept: str | None) -> bool:
    """Whether the only output is the accumulator itself, as it is kept."""
    if len(segment.outputs) != 1 or len(segment.products) != 1 or segment.bindings:
        return False
    value = segment.outputs[0].value
    if segment.outputs[0].dtype != kept:
        return False
    while isinstance(value, tirx.Cast):
        value = value.value
    return value.same_as(segment.products[0].accumulator)
