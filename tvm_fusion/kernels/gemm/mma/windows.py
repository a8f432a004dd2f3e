"""Operands of the mma.sync GEMM that are read at windows, as the data of a convolution is.

    place of x[n, 2 p + r - 1, 2 q + s - 1, c]  =  that of row (n, p, q)  +  that of term (r, s, c)

The part of the row, and where its windows start, are computed once a tile; the part of the term
once a step where the step lies within a tap, else for each unit. Of windows that repeat elements,
the place is known with both only: ``(2 p + r - 1) // 2``. What lies beyond the bounds of a window
is 0 in shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...contraction.model import fresh_var
from ...contraction.windows import Window
from ...gpu.access import is_multiple
from ...gpu.memory import copy_words
from ...gpu.product_frame import Tile, coordinates, evaluate, in_register
from ...program.expr import HALF_DTYPES, conjunction, constant, convert, dtype_of
from ...program.extents import sized
from ...program.program import Extent
from .operand import Loader, Unit, always, store_chunk
from .problem import ENTRY_BYTES, EXISTS, rows_of
from .units import CHUNK, copy_async, load_if


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """What a unit's row gives: its offset in elements, and by window where that starts."""

    offset: Expr
    starts: Sequence[Expr]


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """What a term gives: its offset in elements, how far each window is from its start, and the
    channel within the group.
    """

    offset: Expr
    distances: Sequence[Expr | None]
    channel: Expr


class AtWindows(Loader):
    """What copies and single elements have in common."""

    def prepare(self, tile: Tile, thread: Expr) -> None:
        """Emits the places of this thread's units, and what their rows give."""
        super().prepare(tile, thread)
        self.windows = self.source.operand.windows
        self.rows = [self._row(unit) for unit in self.units]

    def _row(self, unit: Unit) -> Row:
        windows, access = self.windows, self.source.window
        symbolic = any(not isinstance(axis.extent, int) for axis in self.source.rows)
        if symbolic:
            env, keep = self.batch | self._digits(unit.row, self.source.rows), in_register
        else:
            env, keep = self.batch | coordinates(self.source.rows, unit.row, self.frame), T.Bind
        offset, starts = self._number(0 if access is None else access.base), []
        for window in windows.dims:
            starts.append(keep(self.frame.place([window.start], env)[0]))
            if access is not None and window.repeats == 1:
                offset = offset + starts[-1] * self._number(access.strides[window.dim])
        if access is not None and windows.group is not None and windows.channel_dim is not None:
            offset = offset + self._first_channel() * self._number(access.channel)
        return Row(keep(offset), starts)

    def _first_channel(self) -> Expr:
        """Of the group that the tile belongs to."""
        windows = self.windows
        if windows.group is None:
            return self._number(0)
        size = 1 if windows.channels is None else windows.channels.extent
        return self.batch[windows.group.var] * self._number(size)

    def _digits(self, flat: Expr, axes: Sequence) -> dict[Var, Expr]:
        """What axes are at a flat coordinate, which is not negative."""
        env: dict[Var, Expr] = {}
        for position in range(len(axes) - 1, -1, -1):
            size = self._number(axes[position].extent)
            if position == 0:
                env[axes[position].var] = flat
                break
            env[axes[position].var] = T.Bind(T.truncmod(flat, size))
            flat = T.Bind(T.truncdiv(flat, size))
        return env

    def _term(self, env: Mapping[Var, Expr]) -> Term:
        """What the term at some axes gives."""
        windows, access = self.windows, self.source.window
        offset, distances = self._number(0), []
        for window in windows.dims:
            if window.tap is None:
                distances.append(None)
                continue
            distance = env[window.tap.var] * self._number(window.dilation)
            distances.append(T.Bind(distance))
            if access is not None and window.repeats == 1:
                offset = offset + distances[-1] * self._number(access.strides[window.dim])
        channel = self._number(0)
        if windows.channels is not None:
            channel = env[windows.channels.var]
            if access is not None:
                offset = offset + channel * self._number(access.channel)
        return Term(T.Bind(offset), distances, channel)

    def _place(self, row: Row, term: Term, position: int) -> Expr:
        """The element of a window that is read, times its expansion."""
        start, distance = row.starts[position], term.distances[position]
        return start if distance is None else start + distance

    def _repeated(self, row: Row, term: Term) -> Expr:
        """The offset that windows which repeat elements give, where there is one."""
        found = self._number(0)
        for position, window in enumerate(self.windows.dims):
            if window.repeats > 1:
                stride = self._number(self.source.window.strides[window.dim])
                place = self._place(row, term, position)
                found = found + T.truncdiv(place, self._number(window.repeats)) * stride
        return found

    def _within(self, row: Row, term: Term) -> Expr | None:
        """Whether there is an element; None where there is one for all rows and terms."""
        found = []
        for position, window in enumerate(self.windows.dims):
            if window.has_zeros:
                found.append(self._is_read(window, self._place(row, term, position)))
        return conjunction(*found)

    def _is_read(self, window: Window, place: Expr) -> Expr:
        """Whether a window has an element at a place."""
        step = window.expansion
        last = (window.high - 1) * step
        inside = tirx.And(place >= self._number(window.low * step), place <= self._number(last))
        if step == 1:
            return inside
        return tirx.And(inside, T.truncmod(place, self._number(step)).equal(0))

    def _number(self, value: Extent) -> Expr:
        return sized(value, self.frame.index)


class WindowCopy(AtWindows):
    """Runs of channels by cp.async."""

    is_async = True

    def __init__(self, *args):
        super().__init__(*args)
        self.unit_bytes = self.source.piece
        self.channels = self.source.operand.windows.channels.extent
        # Whether all terms of a step are of one tap.
        self.by_step = self.channels % self.panel.terms == 0

    def copy(self, step: Expr, stage: Expr) -> None:
        """Emits the copies of a step's slice."""
        *taps, channels = self.source.k
        shared = None
        if self.by_step:
            each = self._number(self.channels // self.panel.terms)
            step = convert(step, self.frame.index)
            env = self._digits(T.Bind(T.truncdiv(step, each)), taps)
            env[channels.var] = T.Bind(T.truncmod(step, each) * self.panel.terms)
            shared = self._term(env)
        for unit, row in zip(self.units, self.rows, strict=True):
            flat = T.Bind(self.term(unit, step))
            term = shared or self._term(self._digits(flat, self.source.k))
            at = row.offset + term.offset + self._repeated(row, term)
            if shared is not None:
                at = at + convert(unit.term, self.frame.index)
            at = convert(at, "int64") * self.source.element
            inside = conjunction(self.inside(unit, flat), self._within(row, term))
            target = self.place.at(stage, unit.offset)
            call = copy_async(self.unit_bytes, target, self.parameter, at, inside)
            with T.If(always(unit.exists)), T.Then():
                T.evaluate(call)


class Elements(AtWindows):
    """Single elements, which pass registers; neighbouring threads have neighbouring rows."""

    is_async = False

    @property
    def length(self) -> int:
        """Elements of a chunk."""
        return CHUNK // self.source.element

    def _threads_along_lines(self) -> bool:
        return False

    def _allocate(self) -> None:
        """Emits the registers of this thread's chunks."""
        self.kept = T.alloc_local((len(self.units) * self.length,), self.source.dtype)

    def store(self, step: Expr, stage: Expr) -> None:
        """Emits the stores of the registers to shared memory."""
        for i, unit in enumerate(self.units):
            with T.If(always(unit.exists)), T.Then():
                registers = self.kept.ptr_to([i * self.length])
                store_chunk(self.place.at(stage, unit.offset), registers)


class Gather(Elements):
    """Single elements of any layout.

    What the terms of a step give stands in a table in shared memory: the offset of each, and a bit
    for each window, that of its tap. A row has the bits of all taps that meet an element.
    """

    def prepare(self, tile: Tile, thread: Expr) -> None:
        super().prepare(tile, thread)
        self.thread = thread
        self.masks = [
            T.Bind(self._mask(unit, row)) for unit, row in zip(self.units, self.rows, strict=True)
        ]
        self._allocate()
        self.entries = T.alloc_local((2 * self.length,), "int32")

    def _mask(self, unit: Unit, row: Row) -> Expr:
        found, first = T.int32(EXISTS), 0
        for window, start in zip(self.windows.dims, row.starts, strict=True):
            if not window.has_zeros:
                continue
            for tap in range(window.taps):
                place = start + self._number(window.dilation * tap)
                bit = T.int32(1 << (first + tap))
                met = T.Select(self._is_read(window, place), bit, T.int32(0))
                found = T.bitwise_or(found, met)
            first += window.taps
        if self.ragged_rows:
            exists = unit.row < self.frame.size(rows_of(self.source))
            found = T.Select(exists, found, T.int32(0))
        return found

    def tabulate(self, step: Expr) -> None:
        """Emits the table of a step, which is there for all threads behind their next barrier."""
        terms, threads = self.panel.terms, self.config.threads
        for start in range(0, terms, threads):
            number = T.Bind(self.thread + start)
            with T.If(always(number < terms if start + threads > terms else None)), T.Then():
                flat = T.Bind(convert(step * terms + number, self.frame.index))
                env = self._digits(flat, self.source.k)
                bits, first = T.int32(EXISTS), 0
                for window in self.windows.dims:
                    if window.has_zeros:
                        tap = 0 if window.tap is None else convert(env[window.tap.var], "int32")
                        bits = T.bitwise_or(bits, T.shift_left(T.int32(1), tap + first))
                        first += window.taps
                if self.ragged_terms:
                    # No row has all bits.
                    bits = T.Select(flat < self.frame.size(self.extent), bits, T.int32(-1))
                at = self._entry(step, number)
                T.buffer_store(self.table, convert(self._term(env).offset, "int32"), [at])
                T.buffer_store(self.table, bits, [at + 1])

    def _entry(self, step: Expr, number: Expr) -> Expr:
        """Where the table has a term of a step."""
        return T.Bind((step % self.config.stages * self.panel.terms + number) * 2)

    def load(self, step: Expr) -> None:
        """Emits the loads of a step's slice into registers."""
        for i, (unit, row) in enumerate(zip(self.units, self.rows, strict=True)):
            with T.If(always(unit.exists)), T.Then():
                self._take_entries(self._entry(step, unit.term))
                for v in range(self.length):
                    at = row.offset + convert(self.entries[2 * v], self.frame.index)
                    target = self.kept.ptr_to([i * self.length + v])
                    bits = self.masks[i], self.entries[2 * v + 1]
                    call = load_if(self.source.element, target, self.parameter, at, *bits)
                    T.evaluate(call)

    def _take_entries(self, first: Expr) -> None:
        """Emits the loads of the entries of a chunk."""
        own, table = self.entries.ptr_to([0]), self.table.ptr_to([first])
        copy_words(lambda _: own, lambda _: table, ENTRY_BYTES * self.length, CHUNK)


class Evaluate(Elements):
    """Single elements that are computed, or read at steps of less than an element."""

    def prepare(self, tile: Tile, thread: Expr) -> None:
        super().prepare(tile, thread)
        self._allocate()

    def load(self, step: Expr) -> None:
        """Emits the loads of a step's slice into registers."""
        for i, (unit, row) in enumerate(zip(self.units, self.rows, strict=True)):
            flat = T.Bind(self.term(unit, step))
            inside = conjunction(self.inside(unit, flat), unit.exists)
            inside = None if inside is None else T.Bind(inside)
            for v, (at, env) in enumerate(self._terms(flat)):
                term = self._term(env)
                last = None
                if v and not is_multiple(self.extent, self.length):
                    last = at < self.frame.size(self.extent)
                condition = conjunction(inside, last, self._within(row, term))
                value = self._element(row, term, condition)
                T.buffer_store(self.kept, convert(value, self.source.dtype), [i * self.length + v])

    def _terms(self, flat: Expr):
        """The flat coordinate and the axes of each term of a chunk; what lies within one run of
        the innermost axis is taken apart once.
        """
        k = self.source.k
        if k and k[-1].extent % self.length == 0:
            env = self._digits(flat, k)
            for v in range(self.length):
                yield flat + v, env | {k[-1].var: env[k[-1].var] + v}
            return
        for v in range(self.length):
            at = T.Bind(flat + v)
            yield at, self._digits(at, k)

    def _element(self, row: Row, term: Term, condition: Expr | None) -> Expr:
        """The value of an element, or 0."""
        windows, env = self.windows, {}
        for position, window in enumerate(windows.dims):
            at = self._place(row, term, position)
            if window.expansion > 1:
                at = T.truncdiv(at, self._number(window.expansion))
            env[windows.coordinates[window.dim]] = at
        if windows.channel_dim is not None:
            channel = self._first_channel() + term.channel
            env[windows.coordinates[windows.channel_dim]] = channel
        value = windows.data
        if condition is not None:
            inside = fresh_var("inside", "bool")
            env[inside] = T.Bind(condition)
            value = tirx.if_then_else(inside, value, constant(0, dtype_of(value)))
        (found,) = evaluate(self.frame, (), [value], env, self.source.dtype in HALF_DTYPES)
        return found
