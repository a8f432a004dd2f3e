"""A's boxes with their rims, computed in shared memory before all taps of a convolution read them.

step    wait for its box; each element <- the function of it, zero where it is padding
        wgmma of each tap, from another row of the box on

An element is computed once for each box that it lies in and each tile of columns, not for each tap.
A consumer warpgroup computes its own box, while another one multiplies. What the function reads
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
from ...program.program import Extent
from ..epilogue import EpilogueLoad
from .layout import Layout
from .model import BOX, STEP_BYTES, Windows
from .prologue import CHANNELS_OF_THREAD
from .state import Hopper, fence_shared, warpgroup_sync

LANES = STEP_BYTES // WIDEST
"""Threads side by side along a row."""
ROWS = 128 // LANES
"""Rows that a warpgroup computes at once."""
TOGETHER = 2
"""Rows of a thread whose instructions stand side by side, to wait for one another less."""
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
        self.words = T.alloc_local((TOGETHER * WORDS,), "uint32")
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
        """Emits where the box starts to read, and what is the same for all channels of a tile."""
        windows, boxes = self.windows, self.kernel.plan.config.block_m // BOX
        for i, first in enumerate(windows.first(tile.m * boxes + self.layout.number)):
            start = first * windows.strides[i] + _first_element(windows, i)
            T.buffer_store(self.starts, start, [i])
        for load, registers in self.kept:
            if self.prologue.same_for_terms(load):
                value = self._element(load, self._point(tile, T.int32(0)))
                T.buffer_store(registers, value, [0])

    def ahead(self, tile: Tile, step: Expr) -> None:
        """Emits the loads of the numbers of a step's channels."""
        term = self._term(step)
        if self.prologue.terms % self.kernel.problem.block_k:
            last = tirx.IntImm("int32", self.prologue.terms - CHANNELS_OF_THREAD)
            term = tirx.Min(term, last)
        term = T.Bind(term)
        for load, registers in self.kept:
            if not self.prologue.same_for_terms(load):
                self._read(load, registers, tile, term)

    def compute(self, step: Expr, stage: Expr) -> None:
        """Emits the function of all elements of the box in a stage."""
        box = self.layout.number * self.kernel.problem.box_bytes
        rows = math.prod(self.windows.held)
        known = self._channels_exist(step)
        turns = -(-rows // (ROWS * TOGETHER))
        with T.serial(0, turns, unroll=False) as turn:
            places = []
            for i in range(TOGETHER):
                row = T.Bind((turn * TOGETHER + i) * ROWS + self.row)
                place = self.kernel.shared.a.ptr_to([stage, box + row * STEP_BYTES + self.column])
                inside = row < rows if rows % (ROWS * TOGETHER) else None
                places.append((row, place, inside))
            for i, (_, place, inside) in enumerate(places):
                with T.If(_always(inside)), T.Then():
                    copy_registers(lambda _, i=i: self._registers(i), lambda _, p=place: p, WIDEST)
            for i, (row, _, _) in enumerate(places):
                self._compute(i, conjunction(self._is_data(row), known))
            for i, (_, place, inside) in enumerate(places):
                with T.If(_always(inside)), T.Then():
                    copy_registers(lambda _, p=place: p, lambda _, i=i: self._registers(i), WIDEST)
        fence_shared()
        warpgroup_sync(self.layout.number)

    # ---- elements

    def _registers(self, i: int) -> Expr:
        return self.words.ptr_to([i * WORDS])

    def _compute(self, i: int, inside: Expr | None) -> None:
        prologue, dtype = self.prologue, self.kernel.problem.dtype
        inside = None if inside is None else T.Bind(inside)
        for word in range(WORDS):
            at, values = i * WORDS + word, []
            for half in range(2):
                env = {prologue.stored.var: T.Bind(half_of(dtype, self.words[at], half))}
                for load, registers in self.kept:
                    place = 0 if self._width(load) == 1 else 2 * word + half
                    env[load.var] = T.Bind(convert(registers[place], dtype_of(load.var)))
                (value,) = evaluate(self.frame, prologue.bindings, [prologue.value], env, half=True)
                values.append(convert(value, "float32"))
            found = pack_halves(dtype, *values)
            if inside is not None:
                found = T.Select(inside, found, T.uint32(0))
            T.buffer_store(self.words, found, [at])

    def _is_data(self, row: Expr) -> Expr | None:
        """Whether a row of the box is an element of the data, not padding; None where all are."""
        windows, found, rest = self.windows, [], row
        for i in reversed(range(len(windows.held))):
            held, extent = windows.held[i], self.prologue.extents[i]
            place, rest = self.starts[i] + rest % held, rest // held
            if not isinstance(extent, int):
                continue  # each position has its element
            first = _first_element(windows, i)
            if first < 0:
                found.append(place >= 0)
            if windows.sizes[i] - 1 + first + windows.reach[i] >= extent:
                found.append(place < extent)
        return conjunction(*found)

    def _channels_exist(self, step: Expr) -> Expr | None:
        """Whether a thread's channels exist: what is made of others counts for nothing."""
        terms = self.prologue.terms
        if terms % self.kernel.problem.block_k == 0:
            return None
        return T.Bind(self._term(step) < terms)

    # ---- what else the function reads

    def _term(self, step: Expr) -> Expr:
        return step * self.kernel.problem.block_k + self.channel

    def _point(self, tile: Tile, term: Expr) -> dict[Var, Expr]:
        """The axes of what is read: channels, and where a box has one element along a window."""
        groups, windows = self.prologue.groups, self.windows
        env = coordinates(groups["batch"], tile.batch, self.frame)
        env |= coordinates(groups["k"], term, self.frame)
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

    def _read(self, load: EpilogueLoad, registers: Expr, tile: Tile, term: Expr) -> None:
        size = bytes_of(load.dtype)
        whole = load.access is not None and load.access.aligned(WIDEST // size, "k")
        if not whole:
            for v in range(CHANNELS_OF_THREAD):
                value = self._element(load, self._point(tile, term + v))
                T.buffer_store(registers, value, [v])
            return
        indices = self.frame.place(load.indices, self._point(tile, term))
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


def _always(condition: Expr | None) -> Expr:
    return tirx.IntImm("bool", 1) if condition is None else condition
