"""Fragments of A in the registers of a consumer warpgroup, computed of what the TMA brought in.

step i    wait for its stage; ldmatrix; the function, in the registers that wgmma reads
          vectors of the terms of step i + 1 <- global memory
          wgmma; wait for it

A warpgroup computes while another one multiplies.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ....errors import Unsupported
from ...gpu.access import half_of, load_word
from ...gpu.intrinsics import pack_halves
from ...gpu.memory import copy_in
from ...gpu.product_frame import Tile, coordinates, evaluate
from ...program.expr import HALF_DTYPES, bytes_of, conjunction, convert, dtype_of
from ...program.extents import is_below, sized
from ..epilogue import EpilogueLoad
from .layout import Layout
from .producer import TapCounter
from .prologue import FRAGMENT_WORDS, TERMS_OF_THREAD, is_by_row
from .state import Hopper

LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"

WORDS_OF_WGMMA = 4
"""Of a thread, of 16 terms: two groups of 8 terms, of each two rows."""
PARTS = FRAGMENT_WORDS // WORDS_OF_WGMMA


class Fragments:
    """Emits the fragments of a step."""

    def __init__(self, kernel: Hopper, layout: Layout) -> None:
        self.kernel, self.layout, self.frame = kernel, layout, kernel.frame
        self.problem = kernel.problem
        self.segment = self.problem.segments[0]
        self.prologue = self.problem.prologue
        self.dtype = self.problem.dtype
        self.words = T.alloc_local((FRAGMENT_WORDS,), "uint32")
        self.kept = [(load, self._registers(load)) for load in self.prologue.loads]
        self.reads_axes = self.prologue.reads_axes

    def _registers(self, load: EpilogueLoad) -> Expr:
        rows = 2 if is_by_row(load) else 1
        if self.prologue.same_for_terms(load):
            return T.alloc_local((rows,), load.dtype)
        if self._in_words(load):
            return T.alloc_local((rows * TERMS_OF_THREAD // 2,), "uint32")
        return T.alloc_local((rows * TERMS_OF_THREAD,), load.dtype)

    def _in_words(self, load: EpilogueLoad) -> bool:
        return load.dtype in HALF_DTYPES and self.prologue.width(load) == 2

    # ---- called by the consumer

    def begin(self, tile: Tile) -> None:
        """Emits what is the same for all terms of a tile."""
        for load, registers in self.kept:
            if self.prologue.same_for_terms(load):
                for half in range(2 if is_by_row(load) else 1):
                    value = self._element(load, self._point(tile, half, T.int32(0)))
                    T.buffer_store(registers, value, [half])

    def ahead(self, tile: Tile, step: Expr | int) -> None:
        """Emits the loads that a step's function needs."""
        for load, registers in self.kept:
            if self.prologue.same_for_terms(load):
                continue
            for half in range(2 if is_by_row(load) else 1):
                for pair in range(TERMS_OF_THREAD // 2):
                    self._read_pair(load, registers, tile, half, pair, self._term(step, pair))

    def compute(self, tile: Tile, step: Expr | int, stage: Expr) -> None:
        """Emits the function of what a stage holds."""
        box = self.layout.number * (self.problem.box_bytes // 2)
        for part in range(PARTS):
            place = self.kernel.shared.a.ptr_to(
                [stage, (box + self.layout.matrix_offset(part)) * 2]
            )
            first = part * WORDS_OF_WGMMA
            words = [self.words[first + i] for i in range(WORDS_OF_WGMMA)]
            T.evaluate(T.ptx[LDMATRIX](*words, place))
        for pair in range(TERMS_OF_THREAD // 2):
            term = self._term(step, pair)
            for half in range(2):
                at = pair * 2 + half
                values = [self._value(tile, half, pair, v, term, at) for v in range(2)]
                word = pack_halves(self.dtype, *values)
                inside = self._inside(half, term)
                if inside is not None:
                    word = T.Select(inside, word, T.uint32(0))
                T.buffer_store(self.words, word, [at])

    def advance(self, step: Expr, steps: Expr | int) -> Expr:
        """Emits the way to the next step, behind the last one to the first: its terms exist."""
        return T.Bind(T.Select(step + 1 < steps, step + 1, T.int32(0)))

    def of_wgmma(self, part: int) -> list[Expr]:
        """The fragments of 16 terms."""
        first = part * WORDS_OF_WGMMA
        return [self.words[first + i] for i in range(WORDS_OF_WGMMA)]

    # ---- where an element is

    def _term(self, step: Expr | int, pair: int) -> Expr:
        """The first of two neighbouring terms of a thread."""
        part, group = divmod(pair, 2)
        first = (self.kernel.first_step + step) * self.problem.block_k
        return first + (part * 16 + group * 8) + self.layout.lane % 4 * 2

    def _point(self, tile: Tile, half: int, term: Expr) -> dict[Var, Expr]:
        """The axes of the function's groups."""
        groups = self.prologue.groups
        row = self.layout.existing_row(self.segment, self.layout.row(tile, half))
        env = coordinates(groups["batch"], tile.batch, self.frame)
        env |= coordinates(groups["m"], row, self.frame)
        return env | coordinates(groups["k"], term, self.frame)

    def _inside(self, half: int, term: Expr) -> Expr | None:
        """Whether there is an element: what the function makes of zeros counts for nothing."""
        terms = self.prologue.terms
        return term < terms if terms % self.problem.block_k else None

    def _existing_term(self, term: Expr) -> Expr:
        """A term to read two elements from."""
        terms = self.prologue.terms
        if terms % self.problem.block_k == 0:
            return term
        return tirx.Min(term, tirx.IntImm("int32", terms - 2))

    # ---- loads and values

    def _read_pair(
        self, load: EpilogueLoad, registers: Expr, tile: Tile, half: int, pair: int, term: Expr
    ) -> None:
        term = self._existing_term(term)
        at = half * (TERMS_OF_THREAD // 2) + pair
        if self.prologue.width(load) == 1:
            for v in range(2):
                value = self._element(load, self._point(tile, half, term + v))
                T.buffer_store(registers, value, [2 * at + v])
            return
        indices = self.frame.place(load.indices, self._point(tile, half, term))
        place = self.frame.buffers[load.param].ptr_to(indices)
        if self._in_words(load):
            T.buffer_store(registers, load_word(place), [at])
        else:
            target = registers.ptr_to([2 * at])
            size = 2 * bytes_of(load.dtype)
            copy_in(lambda _: target, lambda _: place, size, size, "again")

    def _element(self, load: EpilogueLoad, point: dict[Var, Expr]) -> Expr:
        indices = self.frame.place(load.indices, point)
        return self.frame.buffers[load.param][tuple(indices)]

    def _value(self, tile: Tile, half: int, pair: int, v: int, term: Expr, at: int) -> Expr:
        """One element of A, as float32."""
        prologue = self.prologue
        env = self._point(tile, half, term + v) if self.reads_axes else {}
        env[prologue.stored.var] = T.Bind(half_of(self.dtype, self.words[at], v))
        for load, registers in self.kept:
            env[load.var] = T.Bind(self._loaded(load, registers, half, pair, v))
        (value,) = evaluate(self.frame, prologue.bindings, [prologue.value], env, half=True)
        return convert(value, "float32")

    def _loaded(self, load: EpilogueLoad, registers: Expr, half: int, pair: int, v: int) -> Expr:
        row = half if is_by_row(load) else 0
        if self.prologue.same_for_terms(load):
            return convert(registers[row], dtype_of(load.var))
        at = row * (TERMS_OF_THREAD // 2) + pair
        if self._in_words(load):
            return half_of(load.dtype, registers[at], v)
        return convert(registers[2 * at + v], dtype_of(load.var))


class WindowFragments(Fragments):
    """The same of rows that are positions of windows, with zeros where a tap meets padding."""

    def __init__(self, kernel: Hopper, layout: Layout) -> None:
        super().__init__(kernel, layout)
        if self.reads_axes:
            raise Unsupported("data computed of where it lies")
        self.windows = self.segment.windows
        self.counter = TapCounter(kernel)
        self.starts = T.alloc_local((2 * len(self.windows.names),), "int32")

    def begin(self, tile: Tile) -> None:
        """Emits where the two rows of a thread start to read, and what all terms share."""
        windows = self.windows
        for half in range(2):
            places = windows.positions(self.layout.row(tile, half))
            for i, place in enumerate(places):
                start = place * windows.strides[i] - windows.before[i]
                T.buffer_store(self.starts, start, [half * len(places) + i])
        self.counter.restart()
        super().begin(tile)

    def compute(self, tile: Tile, step: Expr | int, stage: Expr) -> None:
        """Emits the function of what a stage holds."""
        self.met = [self._meets_data(half) for half in range(2)]
        super().compute(tile, step, stage)

    def advance(self, step: Expr, steps: Expr | int) -> Expr:
        """Emits the way to the next step; the counter starts again behind the last one."""
        self.counter.advance(0)
        return step

    def _meets_data(self, half: int) -> Expr | None:
        """Whether the tap of a step meets an element of the data, from one of a thread's rows."""
        windows, inside = self.windows, []
        for i, extent in enumerate(self.prologue.extents):
            place = self.starts[half * len(windows.names) + i]
            if i in windows.sliding:
                tap = self.counter.state[1 + windows.sliding.index(i)]
                place = place + tap * windows.dilations[i]
            last = (windows.sizes[i] - 1) * windows.strides[i] - windows.before[i]
            reach = windows.dilations[i] * (windows.taps[i] - 1)
            if min(0, reach) < windows.before[i]:
                inside.append(place >= 0)
            if not is_below(last + max(0, reach), extent):
                inside.append(place < sized(extent, "int32"))
        found = conjunction(*inside)
        return None if found is None else T.Bind(found)

    def _term(self, step: Expr | int, pair: int) -> Expr:
        part, group = divmod(pair, 2)
        return self.counter.state[0] + (part * 16 + group * 8) + self.layout.lane % 4 * 2

    def _point(self, tile: Tile, half: int, term: Expr) -> dict[Var, Expr]:
        groups = self.prologue.groups
        env = coordinates(groups["batch"], tile.batch, self.frame)
        return env | coordinates(groups["k"], term, self.frame)

    def _inside(self, half: int, term: Expr) -> Expr | None:
        return conjunction(self.met[half], super()._inside(half, term))


def fragments_of(kernel: Hopper, layout: Layout) -> Fragments | None:
    """Those of a kernel whose A is computed; else None."""
    if kernel.problem.prologue is None:
        return None
    return (WindowFragments if kernel.problem.has_windows else Fragments)(kernel, layout)
