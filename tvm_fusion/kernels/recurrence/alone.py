"""A recurrence on a GPU without exchange between blocks: a sequence of the batch is a block's own.

    for each sequence, a block:
        hidden, memory in shared memory
        for each step:
            for each unit, a warp:
                product[gate] = sum over lanes of w[gate, unit, k] * hidden[k]     shuffles
                the cell, in lane 0

Takes any sizes and types of floats that fit in shared memory. Weights come from the L2 cache in
each step, for each sequence again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...config import HardwareProfile
from ...errors import Unsupported
from ..gpu.frame import then
from ..program.expr import bytes_of, constant, convert
from .form import Recurrence, index
from .frame import Frame, cell_on_gpu, recurrence_kernel

WARP = 32
MOST_WARPS = 32
STATIC_BYTES = 48 << 10
"""Of shared memory that a kernel has without asking for more."""


@dataclass(frozen=True, slots=True)
class AloneConfig:
    """Warps of a block."""

    warps: int


def alone_configs(made: Recurrence, hw: HardwareProfile) -> list[AloneConfig]:
    """The one configuration.

    Raises
    ------
    Unsupported
        The states of a sequence do not fit in shared memory.
    """
    taken = made.units * bytes_of(made.wide) * (2 + made.cell.has_memory)
    if taken > STATIC_BYTES:
        raise Unsupported(f"states of {made.units} units take {taken} bytes of shared memory")
    return [AloneConfig(min(MOST_WARPS, hw.max_threads_per_block // WARP, made.units))]


def emit_alone(made: Recurrence, hw: HardwareProfile, config: AloneConfig) -> tirx.PrimFunc:
    """The kernel."""
    grid = made.batch if isinstance(made.batch, int) else tirx.Max(made.batch, index(1))
    with recurrence_kernel(made, grid, config.warps * WARP) as frame:
        exists = index(0) < frame.batch
        with then(exists):
            _Alone(made, config, frame).emit()
    return frame.func


class _Alone:
    """Emits the body of a kernel; the hidden states of a step and of the next one take turns."""

    def __init__(self, made: Recurrence, config: AloneConfig, frame: Frame) -> None:
        self.made, self.config, self.frame = made, config, frame
        self.row = T.Bind(convert(frame.block, "int64"))
        self.warp, self.lane = (T.Bind(f(frame.thread, WARP)) for f in (T.truncdiv, T.truncmod))
        self.hidden = T.alloc_shared((2 * made.units,), made.wide)
        self.memory = T.alloc_shared((made.units,), made.wide) if made.cell.has_memory else None

    def emit(self) -> None:
        """All steps."""
        made, frame = self.made, self.frame
        kept = {"h": self.hidden, **({"c": self.memory} if self.memory is not None else {})}
        for name, shared in kept.items():
            with _strided(frame.thread, self.config.warps * WARP, made.units) as unit:
                given = frame.buffers[f"{name}0"][frame.state(self.row, convert(unit, "int64"))]
                T.buffer_store(shared, convert(given, made.wide), [unit])
        T.evaluate(T.cuda.cta_sync())
        with T.serial(frame.steps) as s:
            self._step(s)
            T.evaluate(T.cuda.cta_sync())
        last = convert(T.truncmod(frame.steps, index(2)), "int32") * made.units
        for name, shared in kept.items():
            with _strided(frame.thread, self.config.warps * WARP, made.units) as unit:
                place = frame.state(self.row, convert(unit, "int64"))
                value = shared[last + unit if name == "h" else unit]
                T.buffer_store(frame.buffers[name], convert(value, made.dtype), [place])

    def _step(self, s: Expr) -> None:
        made, frame = self.made, self.frame
        own = T.Bind(convert(T.truncmod(s, index(2)), "int32") * made.units)
        following = T.Bind(made.units - own)
        time = T.Bind(frame.time(s))
        with _strided(self.warp, self.config.warps, made.units) as unit:
            products = self._products(own, unit)
            with then(tirx.EQ(self.lane, 0)):
                wide_unit = T.Bind(convert(unit, "int64"))
                x = [
                    T.Bind(convert(frame.buffers["x"][place], made.wide))
                    for place in frame.inputs(time, self.row, wide_unit)
                ]
                bias = None
                if made.cell.has_bias:
                    bias = T.Bind(convert(frame.buffers["bias"][wide_unit], made.wide))
                memory = None if self.memory is None else T.Bind(self.memory[unit])
                hidden, memory = cell_on_gpu(
                    made, x, products, bias, T.Bind(self.hidden[own + unit]), memory
                )
                rounded = T.Bind(convert(hidden, made.dtype))
                place = frame.hidden(time, self.row, wide_unit)
                T.buffer_store(frame.buffers["y"], rounded, [place])
                T.buffer_store(self.hidden, convert(rounded, made.wide), [following + unit])
                if memory is not None:
                    T.buffer_store(self.memory, memory, [unit])

    def _products(self, own: Expr, unit: Expr) -> list[Expr]:
        """What a unit's gates get of the hidden state; known to lane 0."""
        made = self.made
        sums: Var = T.alloc_local((made.cell.gates,), made.wide)
        for gate in range(made.cell.gates):
            T.buffer_store(sums, constant(0, made.wide), [gate])
        with _strided(self.lane, WARP, made.units) as k:
            hidden = T.Bind(self.hidden[own + k])
            for gate in range(made.cell.gates):
                line = convert(unit + gate * made.units, "int64") * index(made.units)
                weight = self.frame.buffers["w"][line + convert(k, "int64")]
                T.buffer_store(sums, sums[gate] + convert(weight, made.wide) * hidden, [gate])
        mask, step = T.uint32(0xFFFFFFFF), WARP // 2
        while step:
            for gate in range(made.cell.gates):
                other = T.tvm_warp_shuffle_down(mask, sums[gate], step, WARP, WARP)
                T.buffer_store(sums, sums[gate] + T.Bind(other), [gate])
            step //= 2
        return [T.Bind(sums[gate]) for gate in range(made.cell.gates)]


@contextmanager
def _strided(first: Expr, step: int, count: int) -> Iterator[Expr]:
    """A loop over numbers from `first` on in steps, below `count`."""
    with T.serial(-(-count // step)) as turn:
        at = T.Bind(first + turn * step)
        with then(at < count) if count % step else nullcontext():
            yield at
