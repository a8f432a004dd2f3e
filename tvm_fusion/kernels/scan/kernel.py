"""Scans in one pass: a thread combines its columns, the threads of a row exchange what theirs come
to, and what is carried from turn to turn stands before them.

    for each turn of threads * width columns:
        load, compute the bodies; values[l] = values[l - 1] + body
        before = carry + those of the threads to the left        shuffles, shared memory
        carry  = carry + those of all
        scan   = before + values[l]; compute and store the outputs

Nothing is loaded beyond a row's end: threads there read its last elements again, count as neutral,
and store nothing. Rows that do not exist are the last one, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...errors import Unsupported
from ...ir.extents import ASSUMED_SYMBOLIC_EXTENT
from ..forms import Form, Ranked, Writer
from ..gpu.closed_forms import closed_forms
from ..gpu.frame import Frame, kernel_frame, then
from ..gpu.scope import Point, RowScope
from ..gpu.transfer import load_element, load_tile, store_values, store_vector
from ..gpu.vectors import piece_bytes, vector_elements
from ..program.expr import (
    bytes_of,
    constant,
    convert,
    dtype_of,
    linear_form,
    number,
    substitute,
)
from ..program.narrow import narrow_indices
from ..program.program import COMBINE, Extent, Output, Program, ReduceKind, Scan
from .config import WARP, ScanConfig, configs
from .problem import read_scans

if TYPE_CHECKING:
    from ...config import HardwareProfile, Policy


def is_contiguous(program: Program) -> bool:
    """Whether columns are neighbours in what is written, in this order or the other."""
    return all(_step(program, output) in (1, -1) for output in program.outputs)


def _step(program: Program, output: Output) -> float | None:
    """Elements from a column to the next one."""
    if output.place is None:
        return 1
    form = linear_form(output.place, (program.column_var,))
    return None if form is None else number(form[0][0])


def scan_configs(program: Program, hw: HardwareProfile) -> list[ScanConfig]:
    """Configurations of a program, the best guess first."""
    sizes = [bytes_of(item.dtype) for item in (*program.tiles, *program.outputs)]
    contiguous = is_contiguous(program)
    rows = math.prod(n if isinstance(n, int) else ASSUMED_SYMBOLIC_EXTENT for n in program.rows)
    return configs(rows, program.columns, contiguous, min(sizes), hw)


def _ranked(program: Program, hw: HardwareProfile, policy: Policy) -> Ranked:
    return [(None, config) for config in scan_configs(program, hw)]


def emit_scan(program: Program, hw: HardwareProfile, config: ScanConfig) -> tirx.PrimFunc:
    """The TIRx kernel of a program with scans.

    Raises
    ------
    Unsupported
        The configuration does not suit the device.
    """
    threads = config.threads * config.rows
    if threads > hw.max_threads_per_block:
        raise Unsupported(f"blocks of {threads} threads")
    program = closed_forms(narrow_indices(program))
    grid = _grid(program.row_count, config)
    with (
        kernel_frame(program, grid, threads) as frame,
        _if_rows_exist(program, config, frame),
    ):
        _Scans(program, config, frame).emit()
    return frame.func


def _grid(rows: Extent, config: ScanConfig) -> Extent:
    """Blocks; one where a symbolic number of rows is 0."""
    if isinstance(rows, int):
        return -(-rows // config.rows)
    one, count = (constant(size, dtype_of(rows)) for size in (1, config.rows))
    return tirx.Max(tirx.FloorDiv(rows + (count - one), count), one)


def _if_rows_exist(
    program: Program, config: ScanConfig, frame: Frame
) -> AbstractContextManager[None]:
    if isinstance(program.row_count, int):
        return nullcontext()
    return then(convert(frame.block, program.index_dtype) * config.rows < program.row_count)


class _Scans:
    """Emits the body of a kernel."""

    def __init__(self, program: Program, config: ScanConfig, frame: Frame) -> None:
        self.program, self.config = program, config
        self.scope = RowScope(program, frame)
        self.analyzer = program.analyzer()
        width = config.width
        self.by_vectors = config.along and program.columns % width == 0
        self.elements = vector_elements(program, width) if self.by_vectors else {}
        self.turns = -(-program.columns // config.chunk)
        self.whole = self.turns * config.chunk == program.columns
        inner = config.threads if config.along else config.rows
        near, far = (T.Bind(f(frame.thread, inner)) for f in (T.truncmod, T.truncdiv))
        self.place, self.side = (near, far) if config.along else (far, near)
        block, side = (convert(x, program.index_dtype) for x in (frame.block, self.side))
        row = T.Bind(block * config.rows + side)
        self.exists: Expr | None = None
        count = program.row_count
        if config.rows > 1 and not (isinstance(count, int) and count % config.rows == 0):
            size = constant(count, program.index_dtype) if isinstance(count, int) else count
            self.exists = T.Bind(row < size)
            row = T.Bind(tirx.Min(row, size - 1))
        self.scope.set_row(row)
        self.scope.load_scalars()

    def emit(self) -> None:
        """All turns."""
        scope, program = self.scope, self.program
        bodies = [scan.body for scan in program.scans]
        values = [output.value for output in program.outputs]
        scope.prepare_values([*bodies, *values])
        bodies, values = ([scope.prepare(expr) for expr in part] for part in (bodies, values))
        exchanges = [_Exchange(scan, self) for scan in program.scans]
        with T.serial(self.turns) as turn:
            turns, place = (convert(x, program.index_dtype) for x in (turn, self.place))
            first = (turns * self.config.threads + place) * self.config.width
            columns = self._columns(T.Bind(first))
            points = self._points(columns)
            for exchange, body in zip(exchanges, bodies, strict=True):
                found = exchange.run(turn, self._elements(exchange, columns, points, body))
                for point, value in zip(points, found, strict=True):
                    point.known[exchange.scan.var] = value
            for output, value in zip(program.outputs, values, strict=True):
                self._store(output, columns, [T.Bind(point.evaluate(value)) for point in points])

    # ---- columns

    def _columns(self, first: Expr) -> list[tuple[Expr, Expr | None]]:
        """The columns of a thread, each within the row, and whether it is one; None: it is."""
        last, lanes = self.program.columns - 1, range(self.config.width)
        if self.whole:
            return [(first + lane, None) for lane in lanes]
        if self.by_vectors:
            valid = T.Bind(first <= last)
            start = constant(last + 1 - self.config.width, self.program.index_dtype)
            start = T.Bind(tirx.Min(first, start))
            return [(start + lane, valid) for lane in lanes]
        end = constant(last, self.program.index_dtype)
        return [
            (T.Bind(tirx.Min(first + lane, end)), T.Bind(first + lane <= end)) for lane in lanes
        ]

    def _points(self, columns: list[tuple[Expr, Expr | None]]) -> list[Point]:
        loaded: dict[Var, Var] = {}
        start, width = columns[0][0], self.config.width
        for tile in self.program.tiles if self.by_vectors else ():
            buffer = loaded[tile.var] = T.alloc_local((width,), tile.dtype)
            piece = piece_bytes(tile.offset, tile.dtype, width, self.analyzer)
            load_tile(self.scope, tile, start, (buffer, 0), width, piece)
        for var, vector in self.elements.items():
            buffer = loaded[var] = T.alloc_local((width,), vector.element.dtype)
            load_element(self.scope, vector, start, (buffer, 0), width)

        def local(lane: int):
            return lambda var: loaded[var][lane] if var in loaded else None

        return [Point(self.scope, column, local(n)) for n, (column, _) in enumerate(columns)]

    @staticmethod
    def _elements(exchange: _Exchange, columns, points: list[Point], body: Expr) -> list[Expr]:
        """What is scanned; neutral beyond the end."""
        found = []
        for point, (_, valid) in zip(points, columns, strict=True):
            value = point.evaluate(body)
            found.append(value if valid is None else tirx.Select(valid, value, exchange.neutral))
        return found

    # ---- outputs

    def _store(
        self, output: Output, columns: list[tuple[Expr, Expr | None]], values: list[Expr]
    ) -> None:
        start, valid = columns[0]
        if self.by_vectors and output.place is None:
            piece = piece_bytes(output.offset, output.dtype, len(values), self.analyzer)
            with self._where(valid):
                store_vector(self.scope, output, start, values, piece)
            return
        place = output.offset if output.place is None else output.place
        target = self.scope.frame.buffers[output.param]
        for (column, valid), value in zip(columns, values, strict=True):
            at = substitute(self.scope.row(place), {self.program.column_var: column})
            at = at + column if output.place is None else at
            with self._where(valid):
                store_values(target, at, [value], output.dtype, bytes_of(output.dtype))

    @contextmanager
    def _where(self, valid: Expr | None) -> Iterator[None]:
        """Where the row and the column are some."""
        conditions = [c for c in (self.exists, valid) if c is not None]
        both = tirx.And(*conditions) if len(conditions) == 2 else next(iter(conditions), None)
        with nullcontext() if both is None else then(both):
            yield


class _Exchange:
    """One scan across the threads of a row, turn by turn."""

    def __init__(self, scan: Scan, rows: _Scans) -> None:
        self.scan, self.config = scan, rows.config
        self.place, self.side = rows.place, rows.side
        self.combine = COMBINE[scan.kind]
        self.neutral = _neutral(scan)
        self.carry = T.alloc_local((1,), scan.dtype)
        T.buffer_store(self.carry, self.neutral, [0])
        self.several = rows.turns > 1
        sets = 2 if self.several else 1
        if self.config.partials:
            self.memory = T.alloc_shared((sets * self.config.partials,), scan.dtype)

    def run(self, turn: Expr, elements: list[Expr]) -> list[Expr]:
        """The scan at each of a thread's columns."""
        combine, width = self.combine, len(elements)
        values = T.alloc_local((width,), self.scan.dtype)
        for lane, element in enumerate(elements):
            value = combine(values[lane - 1], element) if lane else element
            T.buffer_store(values, value, [lane])
        before = self._before(turn, values[width - 1])
        if not self.scan.exclusive:
            return [T.Bind(combine(before, values[lane])) for lane in range(width)]
        rest = [T.Bind(combine(before, values[lane])) for lane in range(width - 1)]
        return [before, *rest]

    def _before(self, turn: Expr, total: Expr) -> Expr:
        """What stands before a thread's columns; what all come to is carried on."""
        left, whole = self._by_shuffles(total) if self.config.along else (self.neutral, total)
        if self.config.partials:
            left, whole = self._by_memory(turn, left, whole)
        before = T.Bind(self.combine(self.carry[0], left))
        if self.several:
            T.buffer_store(self.carry, self.combine(self.carry[0], whole), [0])
        return before

    def _by_shuffles(self, total: Expr) -> tuple[Expr, Expr]:
        """What the lanes to the left come to, and all lanes of the row in the warp."""
        lanes, mask = min(WARP, self.config.threads), T.uint32(0xFFFFFFFF)
        if lanes == 1:
            return self.neutral, total
        lane = T.Bind(T.truncmod(self.place, lanes))
        found = T.alloc_local((1,), self.scan.dtype)
        T.buffer_store(found, total, [0])
        step = 1
        while step < lanes:
            other = T.Bind(T.tvm_warp_shuffle_up(mask, found[0], step, lanes, WARP))
            with then(lane >= step):
                T.buffer_store(found, self.combine(other, found[0]), [0])
            step *= 2
        other = T.Bind(T.tvm_warp_shuffle_up(mask, found[0], 1, lanes, WARP))
        left = T.Bind(tirx.Select(tirx.EQ(lane, 0), self.neutral, other))
        return left, T.Bind(T.tvm_warp_shuffle(mask, found[0], lanes - 1, lanes, WARP))

    def _by_memory(self, turn: Expr, left: Expr, whole: Expr) -> tuple[Expr, Expr]:
        """The same over all warps of the row, or all threads where rows are neighbours."""
        config, each = self.config, WARP if self.config.along else 1
        parts = config.threads // each
        part = T.Bind(T.truncdiv(self.place, each)) if each > 1 else self.place
        step, first = (1, self.side * parts) if config.along else (config.rows, self.side)
        if self.several:
            first = first + convert(T.truncmod(turn, 2), "int32") * config.partials
        first = T.Bind(first)
        publishes = tirx.EQ(T.truncmod(self.place, each), each - 1) if each > 1 else None
        with nullcontext() if publishes is None else then(publishes):
            T.buffer_store(self.memory, whole, [first + part * step])
        T.evaluate(T.cuda.cta_sync())
        both = T.alloc_local((2,), self.scan.dtype)  # to the left, and all
        for slot in range(2):
            T.buffer_store(both, self.neutral, [slot])
        for other in range(parts):
            term = T.Bind(self.memory[first + other * step])
            with then(part > other):
                T.buffer_store(both, self.combine(both[0], term), [0])
            T.buffer_store(both, self.combine(both[1], term), [1])
        return T.Bind(self.combine(both[0], left)), T.Bind(both[1])


def _neutral(scan: Scan) -> Expr:
    if scan.kind is ReduceKind.SUM:
        return constant(0, scan.dtype)
    if scan.kind is ReduceKind.PROD:
        return constant(1, scan.dtype)
    largest = scan.kind is ReduceKind.MAX
    if scan.dtype.startswith("float"):
        return constant(-math.inf if largest else math.inf, scan.dtype)
    return (tirx.min_value if largest else tirx.max_value)(scan.dtype)


WRITER = Writer("scans", read_scans, (Form("scan", ScanConfig, _ranked, emit_scan),))
