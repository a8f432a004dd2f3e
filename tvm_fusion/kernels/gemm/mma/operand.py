"""Plain operands of the mma.sync GEMM on their way into shared memory.

A thread's share of a stage are units of 4, 8 or 16 bytes, side by side with its neighbours' along
what is contiguous in memory. What lies outside the operand is 0 in shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...gpu.access import Digit, is_multiple
from ...gpu.memory import copy_registers
from ...gpu.product_frame import INT32_ELEMENTS, Frame, Tile, coordinates
from ...program.expr import conjunction, constant, convert
from ...program.program import Extent, Param
from .plan import MmaConfig, Panel
from .problem import MmaSegment, Source, rows_of
from .units import CHUNK, copy_async, load_pair, shift_pair


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """The ring in shared memory, and where in each stage an operand's slice starts."""

    ring: Expr
    stage_bytes: int
    start: int

    def at(self, stage: Expr, offset: Expr | int) -> Expr:
        """Address of a byte of the slice in a stage."""
        return self.ring.ptr_to([stage * self.stage_bytes + (self.start + offset)])


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of a thread: line and byte within it, its place in the slice, and its row.

    `row` is the flat coordinate of the operand's row, `term` that of its term within a step.
    `exists` is None where all threads have this unit.
    """

    line: Expr
    byte: Expr
    offset: Expr
    row: Expr
    term: Expr
    exists: Expr | None


class Loader:
    """What all ways have in common; `extent` is the number of terms."""

    unit_bytes = CHUNK

    def __init__(
        self,
        frame: Frame,
        segment: MmaSegment,
        source: Source,
        config: MmaConfig,
        extent: Extent,
        place: Place,
    ):
        self.frame, self.source, self.config = frame, source, config
        self.segment, self.extent, self.place = segment.segment, extent, place
        self.block = config.block_m if source.side == "m" else config.block_n
        self.own = self.block if source.side == "m" else segment.own_columns(self.block)
        self.panel = Panel(self.block, config.step_bytes, source.k_major, source.element)

    @property
    def ragged_rows(self) -> bool:
        """Whether a tile reaches beyond the last row."""
        return self.own != self.block or not is_multiple(rows_of(self.source), self.block)

    @property
    def ragged_terms(self) -> bool:
        """Whether a step reaches beyond the last term."""
        return not is_multiple(self.extent, self.panel.terms)

    def prepare(self, tile: Tile, thread: Expr) -> None:
        """Emits the coordinates of this thread's units."""
        self.batch_number = convert(tile.batch, self.frame.index)
        self.batch = coordinates(self.segment.batch, self.batch_number, self.frame)
        first = (tile.m if self.source.side == "m" else tile.n) * self.own
        self.units = []
        across = self._threads_along_lines()
        total = self.panel.size // self.unit_bytes
        per_line = self.panel.line // self.unit_bytes
        for i in range(math.ceil(total / self.config.threads)):
            start = i * self.config.threads
            line, column = _split(thread, start, per_line if across else self.panel.lines)
            if not across:
                line, column = column, line
            byte = T.Bind(column * self.unit_bytes)
            line = T.Bind(line)
            at = self.panel.place(line, byte // CHUNK) + byte % CHUNK
            row, term = line, byte // self.panel.element
            if not self.panel.k_major:
                row, term = term, row
            row = T.Bind(convert(first, self.frame.index) + convert(row, self.frame.index))
            exists = thread + start < total if start + self.config.threads > total else None
            self.units.append(Unit(line, byte, T.Bind(at), row, T.Bind(term), exists))

    def _threads_along_lines(self) -> bool:
        """Whether neighbouring threads work on one line."""
        return self.source.along_k == self.source.k_major

    def term(self, unit: Unit, step: Expr) -> Expr:
        """The flat coordinate of a unit's (first) term in a step."""
        return convert(step * self.panel.terms + unit.term, self.frame.index)

    def inside(self, unit: Unit, term: Expr) -> Expr | None:
        """Whether a unit's first element exists; None where all do."""
        rows = unit.row < self.frame.size(rows_of(self.source)) if self.ragged_rows else None
        return conjunction(rows, term < self.frame.size(self.extent) if self.ragged_terms else None)

    def offset(self, unit: Unit, term: Expr) -> Expr:
        """Elements between the start of a plain operand's parameter and a unit."""
        access, index = self.source.access, self.frame.index
        parts = {"batch": self.batch_number, self.source.side: unit.row, "k": term}
        total = constant(access.base, index)
        for group, flat in parts.items():
            total = total + digit_sum(access.digits[group], flat, self.frame)
        return total

    @property
    def parameter(self) -> Expr:
        """Address of a plain operand's parameter."""
        buffer = self.frame.buffers[self.source.operand.stored.source]
        return buffer.ptr_to([0] * len(self._param.shape))

    @property
    def _param(self) -> Param:
        source = self.source.operand.stored.source
        return next(p for p in self.frame.contraction.params if p.var.same_as(source))


class Copy(Loader):
    """cp.async straight into shared memory."""

    is_async = True

    def __init__(self, *args):
        super().__init__(*args)
        self.unit_bytes = self.source.piece

    def copy(self, step: Expr, stage: Expr) -> None:
        """Emits the copies of a step's slice."""
        for unit in self.units:
            term = T.Bind(self.term(unit, step))
            target = self.place.at(stage, unit.offset)
            at = convert(self.offset(unit, term), "int64") * self.source.element
            call = copy_async(self.unit_bytes, target, self.parameter, at, self.inside(unit, term))
            with T.If(always(unit.exists)), T.Then():
                T.evaluate(call)


class Shift(Loader):
    """Runs that start anywhere: two aligned vectors are loaded, and shifted when stored."""

    is_async = False

    def prepare(self, tile: Tile, thread: Expr) -> None:
        super().prepare(tile, thread)
        self.loaded = T.alloc_local((8 * len(self.units),), "uint32")
        self.words = T.alloc_local((4,), "uint32")

    def load(self, step: Expr) -> None:
        """Emits the loads of a step's slice into registers."""
        for i, unit in enumerate(self.units):
            registers = self.loaded.ptr_to([8 * i])
            T.evaluate(load_pair(registers, self.parameter, *self._span(unit, step)))

    def store(self, step: Expr, stage: Expr) -> None:
        """Emits the stores of the registers to shared memory."""
        element = self.source.element
        for i, unit in enumerate(self.units):
            with T.If(always(unit.exists)), T.Then():
                registers, words = self.loaded.ptr_to([8 * i]), self.words.ptr_to([0])
                span = self._span(unit, step)
                T.evaluate(shift_pair(element, words, registers, self.parameter, *span))
                store_chunk(self.place.at(stage, unit.offset), words)

    def _span(self, unit: Unit, step: Expr) -> tuple[Expr, Expr, Expr]:
        """Start of a unit, end of the parameter, valid bytes of the unit; all in bytes."""
        element, index = self.source.element, self.frame.index
        term = T.Bind(self.term(unit, step))
        run = self.extent if self.panel.k_major else rows_of(self.source)
        left = self.frame.size(run) - (term if self.panel.k_major else unit.row)
        valid = convert(tirx.Min(left, constant(CHUNK // element, index)), "int32") * element
        inside = conjunction(self.inside(unit, term), unit.exists)
        if inside is not None:
            valid = T.Select(inside, valid, T.int32(0))
        size = self._param.elements
        small = isinstance(size, int) and size * element <= INT32_ELEMENTS
        dtype = index if small else "int64"
        end = constant(element, dtype)
        for n in self._param.shape:
            end = end * (n if isinstance(n, int) else convert(n, dtype))
        at = T.Bind(convert(self.offset(unit, term), dtype) * element)
        return at, end, T.Bind(valid)


def store_chunk(target: Expr, registers: Expr) -> None:
    """Emits the store of 16 bytes from registers to shared memory."""
    copy_registers(lambda _: target, lambda _: registers, CHUNK)


def always(condition: Expr | None) -> Expr:
    """A condition; None stands for true."""
    return tirx.IntImm("bool", 1) if condition is None else condition


def _split(thread: Expr, start: int, width: int) -> tuple[Expr, Expr]:
    """Quotient and remainder of ``thread + start`` by `width`; the shift taken out if possible."""
    if start % width == 0:
        return thread // width + start // width, thread % width
    return (thread + start) // width, (thread + start) % width


def digit_sum(digits: Sequence[Digit], flat: Expr, frame: Frame) -> Expr:
    """Distance from a group's first point to point number `flat`, in elements."""
    index = frame.index
    total = constant(0, index)
    for position in range(len(digits) - 1, -1, -1):
        digit = digits[position]
        extent = _sized(digit.extent, index)
        value = flat if position == 0 else tirx.FloorMod(flat, extent)
        flat = tirx.FloorDiv(flat, extent)
        if not (isinstance(digit.stride, int) and digit.stride == 0):
            total = total + value * _sized(digit.stride, index)
    return total


def _sized(extent: Extent, index: str) -> Expr:
    return constant(extent, index) if isinstance(extent, int) else convert(extent, index)
