"""A recurrence on a GPU whose weights one block keeps in registers, or a few blocks of a cluster.

    each block, or cluster, has 8 sequences of the batch
        each warp has 8 units, with all their gates
        for each step:
            products of the own gates with all hidden units, which are in shared memory
            the cell, of one unit and two sequences a thread; its hidden states to shared memory,
            of all blocks of the cluster
            wait for the block, or the cluster

Gates are the rows of an mma.m16n8k16, two gates of the 8 units, so that a thread has all gates of
its unit in its sums, and nothing is exchanged but hidden states. Terms are in the order of
`spread`. What gates get of the input is loaded two steps ahead: a step takes less than a load.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...config import HardwareProfile
from ...errors import Unsupported
from ..gemm.skinny.mma import mma
from ..gpu.frame import then
from ..gpu.intrinsics import cluster_store, cluster_sync, device_call
from ..program.expr import constant, convert
from .form import Recurrence, index
from .frame import Frame, cell_on_gpu, recurrence_kernel
from .spread import COLUMNS, TERMS, WARP, check_halves, copy_fresh

UNITS = 8  # of a warp
AHEAD = 2  # steps
MOST_WARPS = 16
MOST_WORDS = 64
"""Registers that hold weights, of the 128 that a thread of 16 warps has."""
WIDE_WARPS, WIDE_WORDS = 8, 128
"""Likewise of the 255 that a thread of 8 warps may have."""
MOST_BLOCKS = 8  # of a cluster on any device that has some


@dataclass(frozen=True, slots=True)
class KeptConfig:
    """Blocks of a cluster, each with as many of the units."""

    blocks: int


def _words(made: Recurrence) -> int:
    """Of weights in a thread."""
    return _tiles(made) * (made.units // TERMS) * 8


def _tiles(made: Recurrence) -> int:
    """Of 16 gates, two of each of 8 units."""
    return -(-made.cell.gates // 2)


def kept_configs(made: Recurrence, hw: HardwareProfile) -> list[KeptConfig]:
    """The configuration.

    Raises
    ------
    Unsupported
        As for `spread_configs`, or where the weights do not fit in the registers of a cluster.
    """
    check_halves(made, hw)
    warps, words = made.units // UNITS, _words(made)
    if warps <= MOST_WARPS and words <= MOST_WORDS:
        return [KeptConfig(1)]
    for blocks in (2, 4, MOST_BLOCKS) if hw.has_clusters else ():
        if warps % blocks == 0 and warps // blocks <= WIDE_WARPS and words <= WIDE_WORDS:
            return [KeptConfig(blocks)]
    raise Unsupported(f"{words} registers of weights in a thread, or {warps} warps")


def emit_kept(made: Recurrence, hw: HardwareProfile, config: KeptConfig) -> tirx.PrimFunc:
    """The kernel."""
    grid: Expr | int = -(-made.batch // COLUMNS) if isinstance(made.batch, int) else 0
    if not grid:
        grid = tirx.Max(T.truncdiv(made.batch + index(COLUMNS - 1), index(COLUMNS)), index(1))
    threads = made.units // config.blocks // UNITS * WARP
    with recurrence_kernel(made, grid, threads, config.blocks) as frame:
        _Kept(made, config, frame).emit()
    return frame.func


class _Kept:
    """Emits the body of a kernel; hidden states of a step and of the next one take turns."""

    def __init__(self, made: Recurrence, config: KeptConfig, frame: Frame) -> None:
        self.made, self.config, self.frame = made, config, frame
        self.chunks, self.tiles = made.units // TERMS, _tiles(made)
        self.dtype, self.gates = made.dtype, made.cell.gates
        warp, lane = (T.Bind(f(frame.thread, WARP)) for f in (T.truncdiv, T.truncmod))
        self.group, self.quad = (T.Bind(f(lane, 4)) for f in (T.truncdiv, T.truncmod))
        first = warp * UNITS
        if config.blocks > 1:
            first = first + frame.rank * (made.units // config.blocks)
        self.own = T.Bind(first + self.group)
        self.unit = T.Bind(convert(self.own, "int64"))
        row = convert(frame.block, "int64") * index(COLUMNS)
        row = row + convert(self.quad * 2, "int64")
        self.rows = [T.Bind(row + index(n)) for n in range(2)]
        self.exists = [T.Bind(row < frame.batch) for row in self.rows]
        # rows begin 16 banks apart, so that 8 threads load 16 bytes each of different ones
        self.pitch = made.units // 2 + (0 if made.units // 2 % 32 else 16)
        self.shared = T.alloc_shared((2 * COLUMNS * self.pitch,), "float32")
        self.weights = T.alloc_local((_words(made),), "uint32")
        self.given = T.alloc_local((AHEAD * 2 * self.gates,), made.dtype)
        self.hidden = T.alloc_local((2,), "float32")
        self.memory = T.alloc_local((2,), "float32") if made.cell.has_memory else None

    def emit(self) -> None:
        """The whole kernel."""
        frame = self.frame
        self._load_weights()
        self._start()
        for ahead in range(AHEAD):
            self._load_given(index(ahead), ahead)
        self._wait()
        with T.serial(T.truncdiv(frame.steps + index(AHEAD - 1), index(AHEAD))) as turn:
            for part in range(AHEAD):
                s = T.Bind(turn * index(AHEAD) + index(part))
                with then(s < frame.steps):
                    self._step(s, part)
        self._finish()

    def _wait(self) -> None:
        T.evaluate(cluster_sync() if self.config.blocks > 1 else T.cuda.cta_sync())

    def _load_weights(self) -> None:
        for tile in range(self.tiles):
            for half in range(2):
                gate = min(tile * 2 + half, self.gates - 1)  # one that is none is the last one
                line = T.Bind((self.unit + index(gate * self.made.units)) * index(self.made.units))
                for chunk in range(self.chunks):
                    term = convert(self.quad * 8 + chunk * TERMS, "int64")
                    at = (tile * self.chunks + chunk) * 8 + half * 4
                    source = self.frame.buffers["w"].ptr_to([line + term])
                    copy_fresh(self.weights.ptr_to([at]), source)

    # ---- states

    def _states(self) -> dict[str, object]:
        return {"h": self.hidden, **({"c": self.memory} if self.memory is not None else {})}

    def _start(self) -> None:
        for n, (row, exists) in enumerate(zip(self.rows, self.exists, strict=True)):
            for name, registers in self._states().items():
                T.buffer_store(registers, constant(0, "float32"), [n])
                with then(exists):
                    given = self.frame.buffers[f"{name}0"][self.frame.state(row, self.unit)]
                    T.buffer_store(registers, convert(given, "float32"), [n])
        if self.config.blocks > 1:  # no block stores to another before that runs
            self._wait()
        self._publish([T.Bind(convert(self.hidden[n], self.dtype)) for n in range(2)], 0)

    def _finish(self) -> None:
        for n, (row, exists) in enumerate(zip(self.rows, self.exists, strict=True)):
            with then(exists):
                for name, registers in self._states().items():
                    value = convert(registers[n], self.dtype)
                    place = self.frame.state(row, self.unit)
                    T.buffer_store(self.frame.buffers[name], value, [place])

    def _publish(self, rounded: list[Expr], turn: int) -> None:
        """The hidden states of the thread's unit and two sequences to shared memory. Words of two
        units: those of an even unit are stored for the first sequence, with what its neighbour has.
        """
        low, high = (
            T.Bind(convert(tirx.reinterpret("uint16", value), "uint32")) for value in rounded
        )
        both = T.Bind(low | (high << T.uint32(16)))
        other = T.Bind(T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), both, 4, WARP, WARP))
        is_odd = T.Bind(T.truncmod(self.own, 2))
        first = (both & T.uint32(0xFFFF)) | (other << T.uint32(16))
        second = (other >> T.uint32(16)) | (both & T.uint32(0xFFFF0000))
        word = T.Bind(tirx.Select(tirx.EQ(is_odd, 0), first, second))
        line = turn * COLUMNS + self.quad * 2 + is_odd
        place = T.Bind(line * self.pitch + T.truncdiv(self.own, 2))
        value = T.Bind(tirx.reinterpret("float32", word))
        if self.config.blocks == 1:
            T.buffer_store(self.shared, value, [place])
            return
        for rank in range(self.config.blocks):
            T.evaluate(cluster_store(self.shared.ptr_to([place]), value, T.int32(rank)))

    # ---- a step

    def _load_given(self, s: Expr, slot: int) -> None:
        """What the gates of the thread's unit and sequences get of the input of a step."""
        frame = self.frame
        time = frame.time(s)
        for n, (row, exists) in enumerate(zip(self.rows, self.exists, strict=True)):
            with then(tirx.And(exists, s < frame.steps)):
                for gate, place in enumerate(frame.inputs(time, row, self.unit)):
                    at = (slot * 2 + n) * self.gates + gate
                    T.buffer_store(self.given, frame.buffers["x"][place], [at])

    def _step(self, s: Expr, part: int) -> None:
        sums = self._products(part)
        time = T.Bind(self.frame.time(s))
        rounded = []
        for n in range(2):
            products = []
            for gate in range(self.gates):
                at = gate // 2 * 8 + gate % 2 * 2 + n
                products.append(T.Bind(sums[at] + sums[at + 4]))
            first = (part * 2 + n) * self.gates
            x = [T.Bind(convert(self.given[first + g], "float32")) for g in range(self.gates)]
            bias = None
            if self.made.cell.has_bias:
                bias = T.Bind(convert(self.frame.buffers["bias"][self.unit], "float32"))
            memory = None if self.memory is None else self.memory[n]
            hidden, memory = cell_on_gpu(self.made, x, products, bias, self.hidden[n], memory)
            rounded.append(T.Bind(convert(hidden, self.dtype)))
            T.buffer_store(self.hidden, convert(rounded[-1], "float32"), [n])
            if memory is not None:
                T.buffer_store(self.memory, memory, [n])
        self._publish(rounded, 1 - part)
        for value, row, exists in zip(rounded, self.rows, self.exists, strict=True):
            with then(exists):
                place = self.frame.hidden(time, row, self.unit)
                T.buffer_store(self.frame.buffers["y"], value, [place])
        self._load_given(s + index(AHEAD), part)
        self._wait()

    def _products(self, part: int) -> object:
        """Sums of each tile, in two parts: every other mma adds to the one that is not awaited."""
        sums = T.alloc_local((self.tiles * 8,), "float32")
        with T.serial(self.tiles * 8, unroll=True) as i:
            T.buffer_store(sums, constant(0, "float32"), [i])
        for chunk in range(self.chunks):
            hidden = T.alloc_local((4,), "uint32")
            line = (part * COLUMNS + self.group) * self.pitch
            source = self.shared.ptr_to([line + self.quad * 4 + chunk * TERMS // 2])
            body, arguments = "*(uint4*)d = *(const uint4*)s;", "void* d, const void* s"
            target = hidden.ptr_to([0])
            T.evaluate(device_call("void", "move16", arguments, body, target, source))
            for tile in range(self.tiles):
                start = (tile * self.chunks + chunk) * 8
                for pair in range(2):
                    words = [start + h * 4 + pair * 2 + w for w in range(2) for h in range(2)]
                    a = [self.weights[at] for at in words]
                    b = [hidden[pair * 2 + w] for w in range(2)]
                    T.evaluate(mma(self.dtype, sums.ptr_to([tile * 8 + pair * 4]), a, b))
        return sums
