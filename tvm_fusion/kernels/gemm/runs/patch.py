"""The data of a tile on its way to shared memory: lines of a patch, in copies as wide as can be.

A patch is what all taps of all positions of a tile read. What lies outside of the data is 0 there.
Where lines do not start at multiples of 4 bytes, single elements pass registers.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...gpu.memory import copy_registers
from ...gpu.product_frame import Frame
from ...program.expr import conjunction, constant, convert
from ...program.extents import is_below, sized
from ...program.program import Extent
from ..mma.operand import always
from ..mma.units import commit_async, copy_async, load_if
from .problem import OCTET
from .shape import ELEMENT, Shape


class Patch:
    """A thread's share of the patches, of which `at` gives the address of a byte in a stage."""

    def __init__(self, frame: Frame, shape: Shape, stages: Expr, thread: Expr) -> None:
        self.frame, self.shape, self.stages = frame, shape, stages
        self.problem = p = shape.problem
        self.thread = thread
        self.is_async = p.piece > 1
        load = p.data.load
        buffer = frame.buffers[load.source]
        self.parameter = buffer.ptr_to([0] * len(load.source.ty.shape))
        if not self.is_async:
            self.held = T.alloc_local((shape.held,), p.dtype)

    def at(self, stage: Expr, offset: Expr | int) -> Expr:
        """Address of a byte of a stage."""
        return self.stages.ptr_to([stage * self.shape.stage_bytes + offset])

    def load(self, origin: Mapping[int, Expr], stage: Expr) -> None:
        """Emits the loads of a tile; `origin` is its first position along each window."""
        s, threads = self.shape, self.shape.config.threads
        total = s.patch_lines * s.pieces
        for i in range(s.held):
            number = self.thread + i * threads
            exists = number < total if (i + 1) * threads > total else None
            line, piece = T.Bind(number // s.pieces), T.Bind(number % s.pieces)
            place, inside = self._place(origin, line, piece)
            if self.is_async:
                target = self.at(stage, self._offset(line, piece))
                bytes_there = self._left(place) if self.problem.is_plain else None
                place = convert(place, "int64") * ELEMENT
                size = self.problem.piece * ELEMENT
                with T.If(always(exists)), T.Then():
                    call = copy_async(size, target, self.parameter, place, inside, bytes_there)
                    T.evaluate(call)
                continue
            inside = conjunction(inside, exists)
            mask = T.int32(1) if inside is None else T.Select(inside, T.int32(1), T.int32(0))
            target = self.held.ptr_to([i])
            T.evaluate(load_if(ELEMENT, target, self.parameter, place, mask, T.int32(1)))
        if self.is_async:
            T.evaluate(commit_async())

    def _left(self, place: Expr) -> Expr | None:
        """Bytes of a piece that are data, where the last one reaches beyond it; else None."""
        end = self.problem.ends[1] + self.problem.base
        return left_of(place, end, self.frame) if end % self.problem.piece else None

    def store(self, stage: Expr) -> None:
        """Emits the stores of what passed registers."""
        s, threads = self.shape, self.shape.config.threads
        total = s.patch_lines * s.pieces
        for i in range(s.held):
            number = self.thread + i * threads
            exists = number < total if (i + 1) * threads > total else None
            line, piece = T.Bind(number // s.pieces), T.Bind(number % s.pieces)
            with T.If(always(exists)), T.Then():
                move_half(self.at(stage, self._offset(line, piece)), self.held.ptr_to([i]))

    def _offset(self, line: Expr, piece: Expr) -> Expr:
        """Bytes between the start of a patch and a piece."""
        s, size = self.shape, self.problem.piece * ELEMENT
        start = line * (s.pitch * ELEMENT)
        if not self.problem.apart:
            return start + piece * size
        return start + piece // s.octets * (s.distance * ELEMENT) + piece % s.octets * size

    def _place(
        self, origin: Mapping[int, Expr], line: Expr, piece: Expr
    ) -> tuple[Expr, Expr | None]:
        """Offset of a piece in the parameter, in elements, and whether there is data."""
        s, p = self.shape, self.problem
        conditions, own = [], piece * p.piece
        most = s.pieces * p.piece
        if p.apart:
            own = piece // s.octets * p.step + piece % s.octets * p.piece
            most = (s.config.columns - 1) * p.step + p.run
        first = origin[p.inner] * self._number(p.step) + self._number(s.first)
        element = T.Bind(first + convert(own, self.frame.index))
        low, high = p.ends
        conditions.append(element >= self._number(low) if s.first < low else None)
        last = (s.tiles[p.inner] - 1) * s.config.columns * p.step + s.first + most
        behind = not is_below(last - 1, high)
        conditions.append(element < self._number(high) if behind else None)
        place = element + self._number(p.base)
        for i in reversed(p.others):
            window, span = p.windows[i], s.spans[i]
            digit = self._number(0)
            if span > 1:
                digit = convert(line % span, self.frame.index)
                line = line // span
            start = self._number(window.start)
            at = T.Bind(origin[i] * self._number(window.stride) + digit + start)
            place = place + at * self._number(window.pitch)
            last = (s.tiles[i] - 1) * s.extent(i) * window.stride + span - 1 + window.start
            conditions.append(at >= self._number(window.low) if window.start < window.low else None)
            behind = not is_below(last, window.high)
            conditions.append(at < self._number(window.high) if behind else None)
        if p.planes > 1:
            place = place + convert(line, self.frame.index) * self._number(p.plane)
        return place, conjunction(*conditions)

    def _number(self, value: Extent) -> Expr:
        return sized(value, self.frame.index)


def left_of(place: Expr, end: int, frame: Frame) -> Expr:
    """Bytes of a copy of 16 from element `place` that are in front of the end of the data."""
    left = tirx.Min(constant(end, frame.index) - place, constant(OCTET, frame.index))
    return convert(tirx.Max(left, constant(0, frame.index)) * ELEMENT, "int32")


def move_half(target: Expr, source: Expr) -> None:
    """Emits the move of two bytes between registers and shared memory."""
    copy_registers(lambda _: target, lambda _: source, ELEMENT)
