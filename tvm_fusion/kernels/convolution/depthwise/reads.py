"""A row of the data as a thread reads it: which elements, in which accesses, and as numbers.

channels side by side    one access for each element along the columns, of several channels
columns side by side     aligned accesses that cover the elements; those that no tap meets go
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

from tvm.ir import Expr
from tvm.script import tirx as T

from ....errors import Unsupported
from ...gpu.memory import WIDEST
from ...gpu.product_frame import Frame, ceil_div, evaluate
from ...program.expr import conjunction, constant, convert, dtype_of
from ...program.extents import is_below, simplified
from .problem import Direct, Numbers, Slide
from .words import Elements


@dataclass(frozen=True, slots=True)
class Piece:
    """An access: `width` elements from `at` units behind a strip's first element on."""

    at: int
    width: int


@dataclass(frozen=True, slots=True)
class Reach:
    """The elements along the columns that a strip reads.

    Attributes
    ----------
    pieces : tuple of Piece
    pitch : int
        Numbers that the taps of a position are apart.
    offsets : tuple of int
        Units behind the first element, of each number.
    """

    pieces: tuple[Piece, ...]
    pitch: int
    offsets: tuple[int, ...]


@lru_cache(maxsize=256)
def reach_of(numbers: Numbers, columns: int) -> Reach:
    """What a strip of so many positions reads."""
    slide = numbers.window(numbers.columns)
    run = slide.stride * (columns - 1) + 1
    whole = run + slide.pitch * (slide.taps - 1)
    if slide.taps == 1 or slide.pitch * (slide.taps - 1) < run * slide.taps:
        runs, pitch = [(0, whole)], slide.pitch
    else:  # taps far apart: what lies between them stays
        runs, pitch = [(slide.pitch * t, run) for t in range(slide.taps)], run
    offsets = tuple(first + i for first, count in runs for i in range(count))
    if numbers.along_channels:
        needed = {
            o
            for o in offsets
            if any(
                (o - slide.pitch * t) % slide.stride == 0 and 0 <= o - slide.pitch * t < run
                for t in range(slide.taps)
            )
        }
        return Reach(tuple(Piece(o, 1) for o in offsets if o in needed), pitch, offsets)
    found = []
    width, most = 1, WIDEST // numbers.bytes if numbers.columns is not None else 1
    while width <= most:
        if numbers.width % width == 0 and slide.step * columns % width == 0:
            first = -slide.before % width
            starts = sorted({(o + first) // width * width - first for o in offsets})
            words = len(starts) * width * numbers.bytes / 4
            lines = slide.step * columns * numbers.bytes / 4  # that a warp's access touches
            found.append((len(starts) * (1.2 + 0.5 * lines) + 0.3 * words, width, starts))
        width *= 2
    _, width, starts = min(found)
    return Reach(tuple(Piece(s, width) for s in starts), pitch, offsets)


class Row:
    """The elements that a thread holds of one row of one channel, or of several side by side."""

    def __init__(self, frame: Frame, problem: Direct, channels: int, columns: int) -> None:
        self.frame, self.problem, self.channels = frame, problem, channels
        numbers = problem.numbers
        self.slide: Slide = numbers.window(numbers.columns)
        self.reach = reach_of(numbers, columns)
        self.columns = columns
        self.stride = 0  # elements of the tensor between those of a row
        if problem.load is not None and numbers.columns is not None:
            window = problem.convolution.windows[numbers.columns]
            shape = problem.load.source.ty.shape
            found = simplified(math.prod(simplified(n) for n in shape[window.dim + 1 :]))
            if not isinstance(found, int):
                raise Unsupported("columns that are a symbolic distance apart")
            self.stride = found
        dtype = "float32" if problem.load is None else dtype_of(problem.load)
        piece = self.reach.pieces[0].width
        self.per = channels * piece
        self.at_once = channels if numbers.along_channels else 1
        width = 1 if problem.load is None else self.at_once * piece
        self.held = Elements(dtype, self.per * len(self.reach.pieces), width)
        self.held.clear()

    def clear(self) -> None:
        """Sets all elements to zero."""
        self.held.clear()

    def read(self, first: Expr, place: Callable[[Expr, int], Sequence[Expr]]) -> None:
        """Reads the row; `first` is the strip's first element along the columns, and `place` are
        the coordinates of an element and a channel of the thread.
        """
        sure = next((p for p in self.reach.pieces if self._exists(first, p) is None), None)
        for number, piece in enumerate(self.reach.pieces):
            element = first + self.slide.unit * piece.at
            with guard(self._exists(element, piece)):
                start = number * self.per
                if self.problem.load is None:
                    self._compute(start, piece.width, element, place)
                    continue
                base = piece if sure is None else sure
                for v in range(0, self.channels, self.at_once):
                    indices = self._placed(place(first + self.slide.unit * base.at, v))
                    apart = (piece.at - base.at) * self.slide.unit * self.stride
                    buffer = self.frame.buffers[self.problem.load.source]
                    self.held.read(start + v * piece.width, buffer, indices, apart)

    def _compute(self, start: int, count: int, element: Expr, place) -> None:
        """Elements that are functions of the data, as numbers."""
        convolution = self.problem.convolution
        for v in range(self.channels):
            for i in range(count):
                env = dict(zip(convolution.coordinates, place(element + i, v), strict=True))
                (value,) = evaluate(self.frame, (), [convolution.data], env, False)
                value = convert(value, self.held.dtype)
                T.buffer_store(self.held.array, value, [start + v * count + i])

    def _placed(self, coordinates: Sequence[Expr]) -> list[Expr]:
        env = dict(zip(self.problem.convolution.coordinates, coordinates, strict=True))
        return self.frame.place(self.problem.load.indices, env)

    def _exists(self, element: Expr, piece: Piece) -> Expr | None:
        """Condition under which an access is no padding; None where it never is."""
        slide = self.slide
        window = self.problem.numbers.columns
        size, high = self.problem.size(window), self.problem.high(window)
        strips = ceil_div(ceil_div(size, slide.phases), self.columns)
        least = slide.unit * piece.at - slide.before
        most = least + slide.unit * slide.stride * self.columns * (strips - 1)
        most += slide.step * (slide.phases - 1) + piece.width - 1
        return conjunction(
            None if least >= slide.low else element >= slide.low,
            None if is_below(most, high) else element < self.frame.size(high),
        )

    def numbers(self) -> Expr:
        """All elements as float32, in registers of their own: number, then channel."""
        offsets = self.reach.offsets
        target = T.alloc_local((len(offsets) * self.channels,), "float32")
        for number, offset in enumerate(offsets):
            for v in range(self.channels):
                found = self._value(offset, v)
                value = constant(0, "float32") if found is None else found
                T.buffer_store(target, value, [number * self.channels + v])
        return target

    def _value(self, offset: int, channel: int) -> Expr | None:
        for number, piece in enumerate(self.reach.pieces):
            if piece.at <= offset < piece.at + piece.width:
                inner = offset - piece.at
                return self.held.value(0, number * self.per + channel * piece.width + inner)
        return None


@contextmanager
def guard(condition: Expr | None):
    """What is emitted inside runs where the condition holds."""
    if condition is None:
        yield
        return
    with T.If(condition), T.Then():
        yield
