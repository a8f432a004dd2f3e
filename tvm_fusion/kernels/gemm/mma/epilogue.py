"""The epilogue of the mma.sync GEMM: 16 rows by 16 columns of a warp's tile at a time.

A thread holds rows lane // 4 and 8 below of every 16, and columns 2 * (lane % 4) and the next of
every 8, as in the accumulators of wgmma: what is loaded beside
them is loaded, and runs of columns are reduced, as in its epilogue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...contraction.reader import Output
from ...gpu.access import affine_access, is_multiple, store_pair
from ...gpu.intrinsics import pack_halves
from ...gpu.memory import AT_ONCE, copy_out, row_word, store_row_word, words_read
from ...gpu.product_frame import Frame, Tile, coordinates, evaluate
from ...program.expr import HALF_DTYPES, bytes_of, conjunction, constant, convert
from ...program.program import Extent
from ..epilogue import reads_in_place, starts_off_words, values_by_part
from ..hopper.fetch import Fetch
from ..hopper.partials import Partials, Run
from .plan import Panel, WarpTiles
from .problem import PIECE, MmaSegment
from .units import CHUNK as CHUNK_BYTES
from .units import shared_word, store_integers, store_shared, warp_sync

PAIRED_DTYPES = ("float16", "bfloat16", "float32", "int32")

# Halves of a wide store.
WIDE = 8


class Layout:
    """Coordinates of a thread in its warp's tile; `part` is the number of the 16 rows at work.

    It has what `gemm.hopper.fetch.Fetch` and `gemm.hopper.partials.Partials` ask of a kernel, its
    plan and its problem.
    """

    def __init__(
        self, frame: Frame, segment: MmaSegment, config: WarpTiles, place: tuple[Expr, ...]
    ):
        self.kernel = self.plan = self.problem = self.grid = self
        self.frame, self.segments, self.config = frame, [segment], config
        self.columns = segment.own_columns(config.block_n)
        self.chunks = config.warp_n // PIECE
        self.thread, self.lane, self.warp_row, self.warp_column = place
        self.part = 0

    def each_segment(self, tile: Tile) -> Iterator[tuple[int, Tile]]:
        """The block's segment: it is alone."""
        yield 0, tile

    def row(self, tile: Tile, half: int) -> Expr:
        """The first row a thread holds of the present 16, or (`half` 1) the second."""
        own = self.warp_row + self.part * 16 + self.lane // 4 + half * 8
        return tile.m * self.config.block_m + convert(own, self.frame.index)

    def column(self, tile: Tile, chunk: int, group: int) -> Expr:
        """The first of a thread's two columns in a group of a piece."""
        own = self.warp_column + chunk * PIECE + group * 8 + self.lane % 4 * 2
        return tile.n * self.columns + convert(own, self.frame.index)

    def groups(self, chunk: int) -> range:
        """Groups of 8 columns in a piece."""
        return range(2)

    def ragged_rows(self, segment: MmaSegment) -> bool:
        """Whether the last row tile reaches beyond the matrix."""
        return not is_multiple(segment.M, self.config.block_m)

    def rows(self, segment: MmaSegment) -> Expr:
        """Number of rows of the matrix."""
        return self.size(segment.M)

    def ragged_columns(self, segment: MmaSegment) -> bool:
        """Whether the last column tile reaches beyond the matrix."""
        own = self.columns
        return own != self.config.block_n or not is_multiple(segment.N, own)

    def size(self, extent) -> Expr:
        """A size in the dtype of the coordinates."""
        if isinstance(extent, int):
            return constant(extent, self.frame.index)
        return convert(extent, self.frame.index)

    def exists(self, segment: MmaSegment, row: Expr) -> Expr | None:
        """Whether a row is one of the matrix; None where all are."""
        return row < self.rows(segment) if self.ragged_rows(segment) else None

    def existing_row(self, segment: MmaSegment, row: Expr) -> Expr:
        """A row to read from: what is read for one beyond the matrix is never stored."""
        return tirx.Min(row, self.rows(segment) - 1) if self.ragged_rows(segment) else row

    def existing_column(self, segment: MmaSegment, column: Expr, width: int) -> Expr:
        """A column to read `width` elements from."""
        last = self.size(segment.N) - width
        return tirx.Min(column, last) if self.ragged_columns(segment) else column

    def point(self, segment: MmaSegment, tile: Tile, row: Expr, column: Expr) -> dict[Var, Expr]:
        """The axes of the segment at an element."""
        own = segment.segment
        column = convert(column, self.frame.index)
        env = coordinates(own.batch, tile.batch, self.frame)
        env |= coordinates(own.m, row, self.frame)
        return env | coordinates(own.n, column, self.frame)


class _Window(Run):
    """A run of columns that one thread reduces."""

    size = 1


class Windows:
    """Runs of columns that no thread holds: what the block has of 16 rows of each warp passes
    through shared memory (`ring`), and a thread reduces whole runs.
    """

    def __init__(self, layout: Layout, segment: MmaSegment, tile: Tile, ring: Expr):
        self.layout, self.segment, self.tile, self.ring = layout, segment, tile, ring
        self.config, self.width = layout.config, segment.window
        self.runs = [_Window(layout.frame, layout, segment, output) for output in segment.outputs]

    def put(self, position: int, chunk: int, group: int, half: int, values: list[Expr]) -> None:
        """Two neighbouring columns of an output go to shared memory."""
        layout, c = self.layout, self.config
        line = layout.warp_row // c.warp_m * 16 + layout.lane // 4 + half * 8
        column = layout.warp_column + chunk * PIECE + group * 8 + layout.lane % 4 * 2
        for v, value in enumerate(values):
            word = tirx.reinterpret("uint32", convert(value, "float32"))
            T.evaluate(store_shared(self._address(position, line, column + v), word))

    def store(self) -> None:
        """The runs of all that is there leave."""
        layout, c, index = self.layout, self.config, self.layout.frame.index
        each = layout.columns // self.width  # of a line
        total = c.warps_m * 16 * each
        for start in range(0, total, c.threads):
            number = layout.thread + start
            line, place = T.Bind(number // each), T.Bind(number % each * self.width)
            own = line // 16 * c.warp_m + layout.part * 16 + line % 16
            row = T.Bind(self.tile.m * c.block_m + convert(own, index))
            column = T.Bind(self.tile.n * layout.columns + convert(place, index))
            inside = conjunction(
                number < total if start + c.threads > total else None,
                layout.exists(self.segment, row),
                column < layout.size(self.segment.N)
                if layout.ragged_columns(self.segment)
                else None,
            )
            with T.If(tirx.IntImm("bool", 1) if inside is None else inside), T.Then():
                for position, run in enumerate(self.runs):
                    T.buffer_store(run.sums, self._element(position, line, place), [0])
                    for i in range(1, self.width):
                        run.put(0, self._element(position, line, place + i))
                    run.write(self.segment, self.tile, (row, column), run.sums[0])

    def _element(self, position: int, line: Expr, column: Expr) -> Expr:
        return tirx.reinterpret("float32", shared_word(self._address(position, line, column)))

    def _address(self, position: int, line: Expr, column: Expr) -> Expr:
        at = (line * self.config.window_line + column) * 4
        return self.ring.ptr_to([at + position * self.config.window_bytes])


class Epilogue:
    """Emits the epilogue of a block; `sums` are a thread's registers of each accumulator.

    Wide outputs pass through shared memory (`ring`, free by then), 16 rows of a warp at a time, and
    leave in stores of 16 bytes, a whole row of the warp's tile at once; so do halves whose rows
    start off 4 bytes, in aligned words; others leave in pairs. Runs of columns that are no pieces
    of a warp's are reduced there (`Windows`). Where that memory is `own`, for nothing else, warps
    do not wait for each other. With `by_parts` what is read for each element of the first 16 rows
    is asked for by `begin`, the rest 16 rows ahead.
    """

    def __init__(
        self,
        layout: Layout,
        segment: MmaSegment,
        tile: Tile,
        sums: Mapping[Var, Expr],
        ring: Expr,
        ring_size: int,
        wide: bool = True,
        own: bool = False,
        by_parts: bool = False,
    ):
        frame, config = layout.frame, layout.config
        self.frame, self.segment, self.config, self.tile = frame, segment, config, tile
        self.sums, self.ring, self.own = sums, ring, own
        self.layout = layout
        self.fetch = Fetch(layout, [segment.loads], by_parts=by_parts)
        self.windows = None if segment.window is None else Windows(layout, segment, tile, ring)
        self.partials = Partials(frame, layout) if self.windows is None else None
        self.reads_in_place = reads_in_place(segment.bindings, segment.outputs)
        self.partners = segment.segment.partners
        self.values = values_by_part(self.partners, segment.bindings, segment.outputs)
        self.paired = [self._run(output, 2, PAIRED_DTYPES) for output in segment.outputs]
        # A line of a staged output's 16 rows: a row of the warp's tile.
        self.panel = Panel(16, config.warp_n * 2, True, 2)
        self.staged: dict[int, int] = {}
        self.wide: list[int] = []
        for position, output in enumerate(segment.outputs):
            room = (len(self.staged) + 1) * config.warps * self.panel.size <= ring_size
            if not wide or not room or output.partial is not None:
                continue
            is_wide = self._run(output, WIDE, HALF_DTYPES)
            if is_wide or starts_off_words(output, self._shape(output), segment.groups):
                self.staged[position] = len(self.staged) * config.warps * self.panel.size
            if is_wide:
                self.wide.append(position)
        self.warp = T.Bind(layout.thread // 32)

    def begin(self) -> None:
        """Emits the first loads, before the sums are there."""
        self.fetch.part_ahead(0, self.tile)

    def emit(self) -> None:
        """Emits all pieces."""
        if self.windows or (self.staged and not self.own):
            T.evaluate(T.cuda.cta_sync())
        for part in range(self.config.tiles_m):
            self.layout.part = part
            if part + 1 < self.config.tiles_m:
                self.fetch.part_ahead(part + 1, self.tile)
            self.fetch.once(self.tile)
            self.fetch.ahead(0, self.tile)
            if part and self.staged:
                T.evaluate(warp_sync())
            for chunk in range(self.layout.chunks):
                self.fetch.ahead(chunk + 1, self.tile)
                self._chunk(part, chunk)
                if self.partials:
                    self.partials.close(0, self.segment, self.tile, chunk)
            if self.windows:
                T.evaluate(T.cuda.cta_sync())
                self.windows.store()
                if part + 1 < self.config.tiles_m:
                    T.evaluate(T.cuda.cta_sync())
            if self.staged:
                T.evaluate(warp_sync())
                self._flush()

    def _chunk(self, part: int, chunk: int) -> None:
        for group in range(2):
            for half in range(2):
                pair = [self._values(part, chunk, group, half, v) for v in range(2)]
                row = self.layout.row(self.tile, half)
                column = self.layout.column(self.tile, chunk, group)
                for position, output in enumerate(self.segment.outputs):
                    values = [x[position] for x in pair]
                    if self.windows:
                        self.windows.put(position, chunk, group, half, values)
                    elif output.partial is not None:
                        place = chunk, group, half
                        self.partials.add(0, position, self.tile, place, tuple(values))
                    elif position in self.staged:
                        self._put(position, chunk * 2 + group, half, values)
                    else:
                        self._store(output, self.paired[position], row, column, values)

    def _values(self, part: int, chunk: int, group: int, half: int, v: int) -> list[Expr]:
        """The outputs of one element."""
        layout, segment = self.layout, self.segment
        row, column = layout.row(self.tile, half), layout.column(self.tile, chunk, group) + v
        if self.reads_in_place:
            row = layout.existing_row(segment, row)
            column = layout.existing_column(segment, column, 1)
        env = layout.point(segment, self.tile, row, column)
        place, partners = (chunk * 2 + group) * 8 + v, self.partners
        at = self._register(part, place, half)
        env |= {accumulator: sums[at] for accumulator, sums in self.sums.items()}
        if partners is not None:
            at = self._register(part, partners.partner_of(place), half)
            for product, other in zip(segment.segment.products, partners.vars, strict=True):
                if other is not None:
                    env[other] = self.sums[product.accumulator][at]
        for load, registers in self.fetch.kept[0]:
            env[load.var] = T.Bind(self.fetch.value(load, registers, chunk, group, half, v))
        # What partial outputs sum up is as exact as what is stored.
        whole = [output for output in segment.outputs if output.partial is None]
        halves = all(bytes_of(output.dtype) == 2 for output in whole or segment.outputs)
        bindings, values = self.values[0 if partners is None else partners.part_of(place)]
        return evaluate(self.frame, bindings, values, env, halves)

    def _register(self, part: int, place: int, half: int) -> int:
        """Where a thread holds column `place` of its own: numbers 0 and 1 of every 8."""
        return (part * self.config.tiles_n + place // 8) * 4 + half * 2 + place % 8

    def _store(
        self, output: Output, paired: bool, row: Expr, column: Expr, values: list[Expr]
    ) -> None:
        """Stores two neighbouring columns of an output, those that exist."""
        layout, segment = self.layout, self.segment
        target = self.frame.output(output.param)
        for v in range(1 if paired else 2):
            point = layout.point(segment, self.tile, row, column + v)
            indices = self.frame.place(output.indices, point)
            inside = conjunction(*self._inside(row, column + v))
            with T.If(tirx.IntImm("bool", 1) if inside is None else inside), T.Then():
                if paired and output.dtype == "int32":
                    pair = (convert(x, "int32") for x in values)
                    T.evaluate(store_integers(target.ptr_to(indices), *pair))
                elif paired:
                    pair = (convert(x, "float32") for x in values)
                    T.evaluate(store_pair(output.dtype, target.ptr_to(indices), *pair))
                else:
                    T.buffer_store(target, convert(values[v], output.dtype), indices)

    def _put(self, position: int, chunk: int, half: int, values: list[Expr]) -> None:
        """Two neighbouring columns of a staged output go to the warp's part of shared memory."""
        lane, output = self.layout.lane, self.segment.outputs[position]
        at = self.panel.place(lane // 4 + half * 8, T.int32(chunk)) + lane % 4 * 4
        word = pack_halves(output.dtype, *(convert(x, "float32") for x in values))
        T.evaluate(store_shared(self._address(position, at), word))

    def _flush(self) -> None:
        """16 rows of each staged output leave."""
        layout, chunks = self.layout, self.panel.line // CHUNK_BYTES
        first = self.tile.m * self.config.block_m + convert(layout.warp_row, self.frame.index)
        start = self.tile.n * self.config.block_n + convert(layout.warp_column, self.frame.index)
        for position in self.staged:
            if position not in self.wide:
                self._flush_words(position, first, start)
        if not self.wide:
            return
        for i in range(16 * chunks // 32):
            number = layout.lane + i * 32
            line, chunk = T.Bind(number // chunks), T.Bind(number % chunks)
            row = first + convert(line + layout.part * 16, self.frame.index)
            column = start + convert(chunk * WIDE, self.frame.index)
            inside = conjunction(*self._inside(row, column))
            with T.If(tirx.IntImm("bool", 1) if inside is None else inside), T.Then():
                for position in self.wide:
                    self._move(position, line, chunk, row, column)

    def _move(self, position: int, line: Expr, chunk: Expr, row: Expr, column: Expr) -> None:
        output = self.segment.outputs[position]
        point = self.layout.point(self.segment, self.tile, row, column)
        target = self.frame.output(output.param).ptr_to(self.frame.place(output.indices, point))
        source = self._address(position, self.panel.place(line, chunk))
        copy_out(lambda _: target, lambda _: source, CHUNK_BYTES, CHUNK_BYTES)

    def _flush_words(self, position: int, first: Expr, start: Expr) -> None:
        """16 rows of an output leave in aligned words."""
        layout, segment, index = self.layout, self.segment, self.frame.index
        output, columns = segment.outputs[position], self.config.warp_n
        target, lines = self.frame.output(output.param), self._address(position, T.int32(0))
        left = layout.size(segment.N) - start
        count = T.Bind(convert(tirx.Min(layout.size(columns), left), "int32"))
        words = columns // 2  # of a line
        each = 16 * words // 32  # of a thread
        with T.If(count > 0), T.Then():
            for at in range(0, each, AT_ONCE):
                stores = []
                for i in range(at, min(at + AT_ONCE, each)):
                    number = layout.lane + i * 32
                    line, word = T.Bind(number // words), T.Bind(number % words)
                    row = first + convert(line + layout.part * 16, index)
                    exists = layout.exists(segment, row)
                    point = layout.point(
                        segment, self.tile, layout.existing_row(segment, row), start
                    )
                    place = target.ptr_to(self.frame.place(output.indices, point))
                    value = T.Bind(row_word(columns, place, lines, line, word))
                    stores.append((exists, store_row_word(columns, place, value, word, count)))
                T.evaluate(words_read())
                for exists, store in stores:
                    with T.If(tirx.IntImm("bool", 1) if exists is None else exists), T.Then():
                        T.evaluate(store)

    def _address(self, position: int, at: Expr) -> Expr:
        """Address in shared memory of a byte of this warp's part of a staged output."""
        return self.ring.ptr_to([self.warp * self.panel.size + (self.staged[position] + at)])

    def _inside(self, row: Expr, column: Expr) -> tuple[Expr | None, Expr | None]:
        """Whether a row and a column exist; None where all do."""
        layout, segment = self.layout, self.segment
        above, ragged = layout.exists(segment, row), layout.ragged_columns(segment)
        return above, column < layout.size(segment.N) if ragged else None

    def _run(self, output: Output, elements: int, dtypes: tuple[str, ...]) -> bool:
        """Whether aligned runs of columns are one access of an output."""
        access = affine_access(output.indices, self._shape(output), self.segment.groups)
        return output.dtype in dtypes and access is not None and access.aligned(elements, "n")

    def _shape(self, output: Output) -> tuple[Extent, ...] | None:
        return self.frame.contraction.params[output.param].shape
