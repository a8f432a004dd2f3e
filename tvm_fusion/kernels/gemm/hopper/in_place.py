"""A's boxes with their rims, computed in shared memory before all taps of a convolution read them.

step    wgmma of each tap, from another row of its box on; beside those of the last taps
        wait for the next step's box; each element <- the function of it, zero where it is padding

An element is computed once for each box that it lies in and each tile of columns, not for each tap.
A consumer warpgroup computes its own box, that of a step while its wgmmas of the one before run:
two that computed at once before they multiplied at once took 37.0 us for 2 x 64 x 64 positions of
320 to 320 channels, where the sums alone take 25 (H200, 2026-11-27). What the function reads
beside an element are numbers of a channel, of an image, or of both: a box then lies in one image.
A thread has 8 channels of every 16th row, in which it finds them at the same place (the swizzle is
taken of a row's number modulo 8), and so reads those numbers once a step.
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ....errors import Unsupported
from ...gpu.access import half_of
from ...gpu.intrinsics import pack_halves
from ...gpu.memory import WIDEST, copy_in, copy_registers
from ...gpu.product_frame import Tile, coordinates, evaluate
from ...program.expr import bytes_of, conjunction, convert, dtype_of
from ...program.extents import is_below
from ...program.program import Extent
from ..epilogue import EpilogueLoad
from .layout import Layout
from .model import BOX, STEP_BYTES, Windows
from .prologue import CHANNELS_OF_THREAD
from .state import Hopper, Ring, fence_shared, wait, warpgroup_sync

LANES = STEP_BYTES // WIDEST
"""Threads side by side along a row."""
ROWS = 128 // LANES
"""Rows that a warpgroup computes at once."""
WORDS = WIDEST // 4


class InPlace:
    """Emits what a consumer warpgroup computes of its box."""

    def __init__(self, kernel: Hopper, layout: Layout) -> None:
        self.kernel, self.layout, self.frame = kernel, layout, kernel.frame
        self.prologue = kernel.problem.prologue
        self.windows = kernel.problem.segments[0].windows
        if self.prologue.reads_axes:
            raise Unsupported("data computed of where it lies")
        self.starts = T.alloc_local((len(self.windows.names),), "int32")
        self.words = T.alloc_local((WORDS,), "uint32")
        self.exists = T.alloc_local((1,), "int32")
        self.data = Ring(kernel.plan.data_stages, 0)
        self.kept = [
            (load, T.alloc_local((self._width(load),), load.dtype)) for load in self.prologue.loads
        ]
        lane = layout.thread % LANES
        self.row = T.Bind(layout.thread // LANES)
        self.column = T.Bind(lane * WIDEST)
        swizzled = T.bitwise_xor(lane, self.row % LANES)
        self.channel = T.Bind(swizzled * CHANNELS_OF_THREAD)

    def _width(self, load: EpilogueLoad) -> int:
        return 1 if self.prologue.same_for_terms(load) else CHANNELS_OF_THREAD

    # ---- called by the consumer

    def begin(self, tile: Tile) -> None:
        """Emits where the box of a tile starts to read, and what is the same for its channels."""
        windows, boxes = self.windows, self.kernel.plan.config.block_m // BOX
        for i, first in enumerate(windows.first(tile.m * boxes + self.layout.number)):
            start = first * windows.strides[i] + _first_element(windows, i)
            T.buffer_store(self.starts, start, [i])
        for load, registers in self.kept:
            if self.prologue.same_for_terms(load):
                value = self._element(load, self._point(T.int32(0)))
                T.buffer_store(registers, value, [0])

    def ahead(self, step: Expr) -> None:
        """Emits the loads of the numbers of a step's channels."""
        term = T.Bind(step * self.kernel.problem.block_k + self.channel)
        terms = self.prologue.terms
        if terms % self.kernel.problem.block_k:
            T.buffer_store(self.exists, T.cast(term < terms, "int32"), [0])
            term = T.Bind(tirx.Min(term, tirx.IntImm("int32", terms - CHANNELS_OF_THREAD)))
        for load, registers in self.kept:
            if not self.prologue.same_for_terms(load):
                self._read(load, registers, term)

    def compute(self, part: int, parts: int) -> None:
        """Emits the function of a part of the box's rows, the first one once they are there."""
        if part == 0:
            wait(self.kernel.shared.brought.ptr_to([self.data.stage]), self.data.phase)
        rows = math.prod(self.windows.held)
        turns = -(-rows // ROWS)
        for turn in range(turns * part // parts, turns * (part + 1) // parts):
            row = T.Bind(self.row + turn * ROWS)
            inside = row < rows if (turn + 1) * ROWS > rows else tirx.IntImm("bool", 1)
            with T.If(inside), T.Then():
                self._compute(row)

    def finish(self) -> None:
        """Emits what has wgmma see the whole box."""
        fence_shared()
        warpgroup_sync(self.layout.number)
        self.data.advance()

    # ---- elements

    def _compute(self, row: Expr) -> None:
        prologue, dtype = self.prologue, self.kernel.problem.dtype
        box = self.layout.number * self.kernel.problem.box_bytes
        offset = box + row * STEP_BYTES + self.column
        place = self.kernel.shared.a.ptr_to([self.data.stage, offset])
        words = self.words.ptr_to([0])
        copy_registers(lambda _: words, lambda _: place, WIDEST)
        inside = self._is_data(row)
        if prologue.terms % self.kernel.problem.block_k:
            inside = conjunction(inside, self.exists[0] > 0)
        inside = None if inside is None else T.Bind(inside)
        for word in range(WORDS):
            values = []
            for half in range(2):
                env = {prologue.stored.var: T.Bind(half_of(dtype, self.words[word], half))}
                for load, registers in self.kept:
                    at = 0 if prologue.same_for_terms(load) else 2 * word + half
                    env[load.var] = T.Bind(convert(registers[at], dtype_of(load.var)))
                (value,) = evaluate(self.frame, prologue.bindings, [prologue.value], env, half=True)
                values.append(convert(value, "float32"))
            found = pack_halves(dtype, *values)
            if inside is not None:
                found = T.Select(inside, found, T.uint32(0))
            T.buffer_store(self.words, found, [word])
        copy_registers(lambda _: place, lambda _: words, WIDEST)

    def _is_data(self, row: Expr) -> Expr | None:
        """Whether a row of the box is an element of the data, not padding; None where all are."""
        windows, found, rest = self.windows, [], row
        for i in reversed(range(len(windows.held))):
            held, extent = windows.held[i], self.prologue.extents[i]
            place, rest = self.starts[i] + rest % held, rest // held
            first = _first_element(windows, i)
            if first < 0:
                found.append(place >= 0)
            if not is_below(windows.sizes[i] - 1 + first + windows.reach[i], extent):
                found.append(place < self._size(extent))
        return conjunction(*found)

    # ---- what else the function reads

    def _point(self, term: Expr) -> dict[Var, Expr]:
        """The axes of what is read: channels, and where a box has one element along a window."""
        groups, windows = self.prologue.groups, self.windows
        env = coordinates(groups["k"], term, self.frame)
        for i, name in enumerate(windows.names):
            if groups[name] and windows.held[i] == 1:
                last = self._size(self.prologue.extents[i]) - 1
                place = tirx.Max(tirx.Min(self.starts[i], last), T.int32(0))
                env |= coordinates(groups[name], place, self.frame)
        return env

    def _size(self, extent: Extent) -> Expr:
        if isinstance(extent, int):
            return tirx.IntImm("int32", extent)
        return convert(extent, "int32")

    def _read(self, load: EpilogueLoad, registers: Expr, term: Expr) -> None:
        size = bytes_of(load.dtype)
        whole = load.access is not None and load.access.aligned(WIDEST // size, "k")
        if not whole:
            for v in range(CHANNELS_OF_THREAD):
                value = self._element(load, self._point(term + v))
                T.buffer_store(registers, value, [v])
            return
        indices = self.frame.place(load.indices, self._point(term))
        source = self.frame.buffers[load.param]
        for v in range(0, CHANNELS_OF_THREAD, WIDEST // size):
            place = source.ptr_to([*indices[:-1], indices[-1] + v])
            target = registers.ptr_to([v])
            copy_in(lambda _, t=target: t, lambda _, p=place: p, WIDEST, WIDEST, "again")

    def _element(self, load: EpilogueLoad, point: dict[Var, Expr]) -> Expr:
        indices = self.frame.place(load.indices, point)
        return self.frame.buffers[load.param][tuple(indices)]


def _first_element(windows: Windows, i: int) -> int:
    """Where the first tap of the first position reads along a window, or the last one of a filter
    that is turned around.
    """
    return -windows.before[i] - (windows.reach[i] if windows.dilations[i] < 0 else 0)
