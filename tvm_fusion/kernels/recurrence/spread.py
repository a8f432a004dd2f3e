"""A recurrence on a GPU spread over its multiprocessors, on tensor cores.

    each block has some units and keeps the weights of their gates, in registers and shared memory
    for each 32 sequences of the batch:
        for each step:
            load what the gates of the own units get of the input
            wait for all blocks                                       a grid barrier
            products of the own gates: a warp takes a part of the hidden units
            sum over warps in shared memory; the cell; store the own hidden states

All blocks run at once, for the launch is cooperative: what the device cannot hold is an error of
the launch, and no block waits for one that does not run. The states of a unit stay in registers
of its thread. Gates are the rows of an mma.m16n8k16, sequences its columns. Any order of the
terms will do as long as both sides have the same: thread t of four has the terms 8 t ... 8 t + 7 of
32, 16 bytes in a row on either side. The persistent kernels of Diamos et al. (Persistent RNNs:
Stashing Recurrent Weights On-Chip, 2016) are such.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...config import HardwareProfile
from ...errors import Unsupported
from ...ir.graph import COOPERATIVE_ATTR
from ..gemm.skinny.mma import mma
from ..gpu.frame import then
from ..gpu.intrinsics import device_call
from ..gpu.memory import shared_pool
from ..program.expr import HALF_DTYPES, constant, convert
from .form import Recurrence, index
from .frame import Frame, cell_on_gpu, recurrence_kernel

WARP = 32
TERMS = 32  # of two mma, which take 16 bytes of each thread on either side
ROWS, COLUMNS = 16, 8  # of an mma: gates, sequences
MOST_WARPS = 8
MOST_SEQUENCES = 32  # whose sums are in registers at once
KEPT_WORDS = 72
"""Registers that hold weights; beside them are 64 sums, 16 words of hidden states and addresses."""
WORDS = 8  # of a thread's part of 16 gates and 32 terms
PAD = 4  # floats between rows of sums, so that they begin at different banks


@dataclass(frozen=True, slots=True)
class SpreadConfig:
    """How a recurrence is spread.

    Attributes
    ----------
    units : of a block.
    warps : of a block, each with a part of the terms.
    sequences : that are worked on at once; a multiple of 8.
    kept : of a warp's parts of the weights, how many are in registers.
    folds : half of the warps add their sums to those of the others before these are summed.
    """

    units: int
    warps: int
    sequences: int
    kept: int
    folds: bool

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def slots(self) -> int:
        """Sums of one gate and sequence in shared memory."""
        return self.warps // 2 if self.folds else self.warps


class Units(Protocol):
    """What configurations of spread kernels have in common."""

    @property
    def units(self) -> int:
        """Of a block."""


C = TypeVar("C", bound=Units)


@dataclass(frozen=True, slots=True)
class BlockSizes(Generic[C]):
    """What follows of a recurrence and how it is spread."""

    made: Recurrence
    config: C

    @property
    def blocks(self) -> int:
        return self.made.units // self.config.units

    @property
    def own(self) -> int:
        """Gates of a block."""
        return self.made.cell.gates * self.config.units


@dataclass(frozen=True, slots=True)
class Sizes(BlockSizes[SpreadConfig]):
    """Tiles of gates, chunks of terms of a warp, and bytes."""

    @property
    def tiles(self) -> int:
        return -(-self.own // ROWS)

    @property
    def chunks(self) -> int:
        return self.made.units // TERMS // self.config.warps

    @property
    def parts(self) -> int:
        """Of the weights, of a warp."""
        return self.tiles * self.chunks

    @property
    def pitch(self) -> int:
        return self.config.sequences + PAD

    @property
    def weight_words(self) -> int:
        """In shared memory."""
        return max(0, self.parts - self.config.kept) * WORDS * self.config.threads

    @property
    def lines(self) -> int:
        """Gates of a slot of sums."""
        return self.tiles * ROWS

    @property
    def sums(self) -> int:
        return self.config.slots * self.lines * self.pitch

    @property
    def smem_bytes(self) -> int:
        return 4 * (self.weight_words + self.sums)


def check_halves(made: Recurrence, hw: HardwareProfile) -> None:
    """Raise Unsupported where mma.m16n8k16 does not take the weights as they lie."""
    if made.dtype not in HALF_DTYPES:
        raise Unsupported(f"tensor cores for {made.dtype}")
    if not hw.architecture.has_mma:
        raise Unsupported(f"mma.m16n8k16 on {hw.arch}")
    if made.units % TERMS:
        raise Unsupported(f"{made.units} units, no multiple of {TERMS}")


def units_of_block(made: Recurrence, hw: HardwareProfile) -> int:
    """The fewest units, a multiple of 8, for which there are multiprocessors for all blocks."""
    eights, most = made.units // 8, hw.num_sms
    return 8 * next(n for n in range(1, eights + 1) if eights % n == 0 and eights // n <= most)


def spread_configs(made: Recurrence, hw: HardwareProfile) -> list[SpreadConfig]:
    """The configuration.

    Raises
    ------
    Unsupported
        For other types than halves, units that are no multiple of 32, or weights that the
        multiprocessors cannot keep.
    """
    check_halves(made, hw)
    chunks, units = made.units // TERMS, units_of_block(made, hw)
    warps = next(n for n in range(min(MOST_WARPS, chunks), 0, -1) if chunks % n == 0)
    batch = made.batch if isinstance(made.batch, int) else MOST_SEQUENCES
    sequences = min(MOST_SEQUENCES, -(-batch // COLUMNS) * COLUMNS)
    for folds in (False, True) if warps % 2 == 0 else (False,):
        config = SpreadConfig(units, warps, sequences, 0, folds)
        kept = min(Sizes(made, config).parts, KEPT_WORDS // WORDS)
        config = SpreadConfig(units, warps, sequences, kept, folds)
        if Sizes(made, config).smem_bytes <= hw.smem_per_block_bytes:
            return [config]
    raise Unsupported(f"weights of {made.units} units do not fit in {hw.num_sms} multiprocessors")


def emit_spread(made: Recurrence, hw: HardwareProfile, config: SpreadConfig) -> tirx.PrimFunc:
    """The kernel."""
    sizes = Sizes(made, config)
    with recurrence_kernel(made, sizes.blocks, config.threads) as frame:
        Spread(made, config, sizes, frame).emit()
    return frame.func.with_attr(COOPERATIVE_ATTR, True)


def copy_fresh(target: Expr, source: Expr) -> None:
    """16 bytes from global memory to registers, not by way of the first-level cache, which does not
    see what other blocks write.
    """
    body = "*(uint4*)d = __ldcg((const uint4*)s);"
    T.evaluate(device_call("void", "load16_fresh", "void* d, const void* s", body, target, source))


def move(target: Expr, source: Expr) -> None:
    """16 bytes between registers and shared memory."""
    body, arguments = "*(uint4*)d = *(const uint4*)s;", "void* d, const void* s"
    T.evaluate(device_call("void", "move16", arguments, body, target, source))


class Spread:
    """Emits the body of a kernel."""

    def __init__(self, made: Recurrence, config: SpreadConfig, sizes: Sizes, frame: Frame) -> None:
        self.made, self.config, self.sizes, self.frame = made, config, sizes, frame
        thread = frame.thread
        self.warp, lane = (T.Bind(f(thread, WARP)) for f in (T.truncdiv, T.truncmod))
        self.lane = lane
        self.group, self.quad = (T.Bind(f(lane, 4)) for f in (T.truncdiv, T.truncmod))
        self.first = T.Bind(convert(frame.block, "int64") * index(config.units))
        self._allocate()
        self.items = -(-config.units * config.sequences // config.threads)
        self.hidden = T.alloc_local((self.items,), "float32")
        self.memory = T.alloc_local((self.items,), "float32") if made.cell.has_memory else None
        self.given = T.alloc_local((self.items * made.cell.gates,), made.dtype)

    def _allocate(self) -> None:
        sizes, config = self.sizes, self.config
        self.tiles_n = config.sequences // COLUMNS
        self.kept = T.alloc_local((max(1, config.kept) * WORDS,), "uint32")
        self.sums = T.alloc_local((sizes.tiles * self.tiles_n * 4,), "float32")
        pool = shared_pool()
        self.weights = (
            pool.alloc((sizes.weight_words,), "uint32", align=16, layout=None)
            if sizes.weight_words
            else None
        )
        self.partial = pool.alloc((sizes.sums,), "float32", align=16, layout=None)
        pool.commit()

    def emit(self) -> None:
        """The whole kernel."""
        frame, sequences = self.frame, self.config.sequences
        self._load_weights()
        T.evaluate(T.cuda.cta_sync())
        passes = T.truncdiv(frame.batch + index(sequences - 1), index(sequences))
        with T.serial(passes) as turn:
            self.row = T.Bind(turn * index(sequences))
            self._start()
            with T.serial(frame.steps) as s:
                self._step(s)
            self._finish()

    # ---- weights

    def _term(self, chunk: int) -> Expr:
        """The first of the thread's terms in one of its warp's chunks."""
        return (self.warp * self.sizes.chunks + chunk) * TERMS + self.quad * 8

    def _load_weights(self) -> None:
        """Of each part, the thread's terms of two gates."""
        made, sizes, config = self.made, self.sizes, self.config
        for tile in range(sizes.tiles):
            for half in range(2):
                own = self.group + (tile * ROWS + half * 8)
                if sizes.own % ROWS:  # gates that are none are the last one
                    own = T.min(own, sizes.own - 1)
                own = T.Bind(own)
                gate, unit = T.truncdiv(own, config.units), T.truncmod(own, config.units)
                line = convert(gate * made.units + unit, "int64") + self.first
                line = T.Bind(line * index(made.units))
                for chunk in range(sizes.chunks):
                    source = line + convert(self._term(chunk), "int64")
                    array, slot = self._place(tile, chunk)
                    copy_fresh(
                        array.ptr_to([slot + half * 4 * (1 if array is self.kept else WARP)]),
                        self.frame.buffers["w"].ptr_to([source]),
                    )

    def _place(self, tile: int, chunk: int) -> tuple[Var, Expr | int]:
        """Where the thread's part of the weights is; halves of it, in shared memory, are a warp's
        16 bytes each apart.
        """
        part = chunk * self.sizes.tiles + tile
        if part < self.config.kept:
            return self.kept, part * WORDS
        each = (self.sizes.parts - self.config.kept) * WORDS * WARP
        start = (part - self.config.kept) * WORDS * WARP
        return self.weights, self.warp * each + start + self.lane * 4

    # ---- the states of the thread's own units

    def _each_item(self, number: int) -> tuple[Expr, Expr]:
        """The sequence, of those at work, and the unit, of the block's, of an item."""
        at = self.frame.thread + number * self.config.threads
        units = self.config.units
        return T.Bind(T.truncdiv(at, units)), T.Bind(T.truncmod(at, units))

    def _with_item(self, number: int) -> tuple[Expr, Expr, Expr, Expr, Expr]:
        """Both, which sequence and unit these are of all, and whether there is such an item."""
        sequence, unit = self._each_item(number)
        row = T.Bind(self.row + convert(sequence, "int64"))
        exists = row < self.frame.batch
        if self.config.units * self.config.sequences % self.config.threads:
            exists = tirx.And(exists, sequence < self.config.sequences)
        return sequence, unit, row, T.Bind(self.first + convert(unit, "int64")), exists

    def _states(self) -> dict[str, Var]:
        return {"h": self.hidden, **({"c": self.memory} if self.memory is not None else {})}

    def _start(self) -> None:
        for number in range(self.items):
            _, _, row, unit, exists = self._with_item(number)
            for name, registers in self._states().items():
                T.buffer_store(registers, constant(0, "float32"), [number])
                with then(exists):
                    given = self.frame.buffers[f"{name}0"][self.frame.state(row, unit)]
                    T.buffer_store(registers, convert(given, "float32"), [number])

    def _finish(self) -> None:
        for number in range(self.items):
            _, _, row, unit, exists = self._with_item(number)
            with then(exists):
                for name, registers in self._states().items():
                    value = convert(registers[number], self.made.dtype)
                    place = self.frame.state(row, unit)
                    T.buffer_store(self.frame.buffers[name], value, [place])

    # ---- a step

    def _step(self, s: Expr) -> None:
        frame = self.frame
        time = T.Bind(frame.time(s))
        gates = self.made.cell.gates
        for number in range(self.items):
            _, _, row, unit, exists = self._with_item(number)
            with then(exists):
                for gate, place in enumerate(frame.inputs(time, row, unit)):
                    at = number * gates + gate
                    T.buffer_store(self.given, frame.buffers["x"][place], [at])
        with then(s > index(0)):
            T.evaluate(T.cuda.grid_sync())
        before = T.Bind(frame.time(s - index(1)))
        self._multiply(s, before)
        self._exchange()
        for number in range(self.items):
            self._cell(number, time)
        T.evaluate(T.cuda.cta_sync())

    def _multiply(self, s: Expr, before: Expr) -> None:
        """The warp's sums of all gates and sequences."""
        with T.serial(self.sizes.tiles * self.tiles_n * 4, unroll=True) as i:
            T.buffer_store(self.sums, constant(0, "float32"), [i])
        for chunk in range(self.sizes.chunks):
            hidden = T.alloc_local((self.tiles_n * 4,), "uint32")
            term = T.Bind(convert(self._term(chunk), "int64"))
            for tile in range(self.tiles_n):
                row = T.Bind(self.row + convert(self.group + tile * COLUMNS, "int64"))
                for word in range(4):
                    T.buffer_store(hidden, constant(0, "uint32"), [tile * 4 + word])
                with then(row < self.frame.batch):
                    target = hidden.ptr_to([tile * 4])
                    with T.If(tirx.EQ(s, index(0))):
                        with T.Then():
                            place = self.frame.state(row, term)
                            copy_fresh(target, self.frame.buffers["h0"].ptr_to([place]))
                        with T.Else():
                            place = self.frame.hidden(before, row, term)
                            copy_fresh(target, self.frame.buffers["y"].ptr_to([place]))
            for tile in range(self.sizes.tiles):
                words = self._weights(tile, chunk)
                for n in range(self.tiles_n):
                    target = self.sums.ptr_to([(tile * self.tiles_n + n) * 4])
                    for pair in range(2):
                        a = [words[h * 4 + pair * 2 + w] for w in range(2) for h in range(2)]
                        b = [hidden[n * 4 + pair * 2 + w] for w in range(2)]
                        T.evaluate(mma(self.made.dtype, target, a, b))

    def _weights(self, tile: int, chunk: int) -> list[Expr]:
        array, slot = self._place(tile, chunk)
        if array is self.kept:
            return [array[slot + n] for n in range(WORDS)]
        loaded = T.alloc_local((WORDS,), "uint32")
        for half in range(2):
            move(loaded.ptr_to([half * 4]), array.ptr_to([slot + half * 4 * WARP]))
        return [loaded[n] for n in range(WORDS)]

    def _exchange(self) -> None:
        """The sums of all warps to shared memory."""
        if not self.config.folds:
            self._each_sum(self.warp, lambda place, value: value)
        else:
            half = self.config.warps // 2
            with then(self.warp >= half):
                self._each_sum(self.warp - half, lambda place, value: value)
            T.evaluate(T.cuda.cta_sync())
            with then(self.warp < half):
                self._each_sum(self.warp, lambda place, value: self.partial[place] + value)
        T.evaluate(T.cuda.cta_sync())

    def _each_sum(self, slot: Expr, value_of: Callable[[Expr, Expr], Expr]) -> None:
        """Stores each sum of the thread in a slot."""
        pitch, gates = self.sizes.pitch, self.sizes.lines
        start = T.Bind((slot * gates + self.group) * pitch + self.quad * 2)
        for tile in range(self.sizes.tiles):
            for n in range(self.tiles_n):
                for i in range(4):
                    line = tile * ROWS + i // 2 * 8
                    place = start + (line * pitch + n * COLUMNS + i % 2)
                    value = self.sums[(tile * self.tiles_n + n) * 4 + i]
                    T.buffer_store(self.partial, value_of(place, value), [place])

    def _cell(self, number: int, time: Expr) -> None:
        """The next states of one unit of one sequence."""
        made, sizes = self.made, self.sizes
        sequence, own, row, unit, exists = self._with_item(number)
        with then(exists):
            products = []
            for gate in range(made.cell.gates):
                line = own + gate * self.config.units
                places = [
                    (line + slot * sizes.lines) * sizes.pitch + sequence
                    for slot in range(self.config.slots)
                ]
                total = self.partial[places[0]]
                for place in places[1:]:
                    total = total + self.partial[place]
                products.append(T.Bind(total))
            first = number * made.cell.gates
            x = [convert(self.given[first + gate], "float32") for gate in range(made.cell.gates)]
            bias = None
            if made.cell.has_bias:
                bias = T.Bind(convert(self.frame.buffers["bias"][unit], "float32"))
            memory = None if self.memory is None else self.memory[number]
            hidden, memory = cell_on_gpu(
                made, [T.Bind(v) for v in x], products, bias, self.hidden[number], memory
            )
            rounded = T.Bind(convert(hidden, made.dtype))
            T.buffer_store(self.hidden, convert(rounded, "float32"), [number])
            if memory is not None:
                T.buffer_store(self.memory, memory, [number])
            place = self.frame.hidden(time, row, unit)
            T.buffer_store(self.frame.buffers["y"], rounded, [place])
