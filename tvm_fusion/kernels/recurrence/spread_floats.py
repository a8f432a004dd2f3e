"""A recurrence in float32, spread over the multiprocessors of a GPU as in `spread`, without tensor
cores: a lane of a warp has a gate, and sums of several sequences.

    for each 4 of the warp's terms k:
        weights of the lane's gate                    16 bytes of shared memory
        for each sequence:
            sum += weights . hidden[k]                16 bytes that all lanes load together
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...config import HardwareProfile
from ...errors import Unsupported
from ...ir.graph import COOPERATIVE_ATTR
from ..gpu.frame import then
from ..gpu.memory import shared_pool
from ..program.expr import constant, convert
from .form import Recurrence, index
from .frame import recurrence_kernel
from .spread import (
    MOST_SEQUENCES,
    TERMS,
    WARP,
    BlockSizes,
    Spread,
    copy_fresh,
    move,
    units_of_block,
)

WARPS = 8
VECTOR = 4  # terms of 16 bytes
SYMBOLIC_SEQUENCES = 8


@dataclass(frozen=True, slots=True)
class FloatsConfig:
    """How a recurrence is spread: units of a block, and sequences that are worked on at once."""

    units: int
    sequences: int

    @property
    def threads(self) -> int:
        return WARPS * WARP

    @property
    def slots(self) -> int:
        """Sums of one gate and sequence in shared memory."""
        return WARPS


@dataclass(frozen=True, slots=True)
class _Sizes(BlockSizes[FloatsConfig]):
    @property
    def tiles(self) -> int:
        """Gates of a lane."""
        return -(-self.own // WARP)

    @property
    def lines(self) -> int:
        return self.tiles * WARP

    @property
    def pitch(self) -> int:
        """Odd, so that lanes store to different banks."""
        return self.config.sequences | 1

    @property
    def weights(self) -> int:
        return self.lines * self.made.units

    @property
    def sums(self) -> int:
        return self.config.slots * self.lines * self.pitch

    @property
    def smem_bytes(self) -> int:
        return 4 * (self.weights + self.sums)


def floats_configs(made: Recurrence, hw: HardwareProfile) -> list[FloatsConfig]:
    """The configuration.

    Raises
    ------
    Unsupported
        For other types than float32, units that are no multiple of 32, or weights that the
        multiprocessors cannot keep.
    """
    if made.dtype != "float32":
        raise Unsupported(f"sums of float32 for {made.dtype}")
    if made.units % TERMS:
        raise Unsupported(f"{made.units} units, no multiple of {TERMS}")
    units = units_of_block(made, hw)
    config = FloatsConfig(units, SYMBOLIC_SEQUENCES)
    if isinstance(made.batch, int):
        most = MOST_SEQUENCES // _Sizes(made, config).tiles
        passes = -(-made.batch // max(1, most))
        config = FloatsConfig(units, -(-made.batch // max(1, passes)))
    if _Sizes(made, config).smem_bytes > hw.smem_per_block_bytes:
        raise Unsupported(f"weights of {made.units} units do not fit in {hw.num_sms} processors")
    return [config]


def emit_floats(made: Recurrence, hw: HardwareProfile, config: FloatsConfig) -> tirx.PrimFunc:
    """The kernel."""
    sizes = _Sizes(made, config)
    with recurrence_kernel(made, sizes.blocks, config.threads) as frame:
        _Floats(made, config, sizes, frame).emit()
    return frame.func.with_attr(COOPERATIVE_ATTR, True)


class _Floats(Spread):
    """Emits the body of a kernel: weights, products and sums are others than those of `Spread`."""

    def _allocate(self) -> None:
        sizes = self.sizes
        self.sums = T.alloc_local((sizes.tiles * self.config.sequences,), "float32")
        pool = shared_pool()
        self.weights = pool.alloc((sizes.weights,), "float32", align=16, layout=None)
        self.partial = pool.alloc((sizes.sums,), "float32", align=16, layout=None)
        pool.commit()

    def _load_weights(self) -> None:
        """To [terms / 4, gates, 4]."""
        made, sizes, config = self.made, self.sizes, self.config
        vectors = made.units // VECTOR
        count = sizes.own * vectors
        with T.serial(-(-count // config.threads)) as turn:
            at = T.Bind(self.frame.thread + turn * config.threads)
            with then(at < count):
                own, vector = T.Bind(T.truncdiv(at, vectors)), T.Bind(T.truncmod(at, vectors))
                gate, unit = T.truncdiv(own, config.units), T.truncmod(own, config.units)
                line = convert(gate * made.units + unit, "int64") + self.first
                source = line * index(made.units) + convert(vector * VECTOR, "int64")
                loaded = T.alloc_local((VECTOR,), "float32")
                copy_fresh(loaded.ptr_to([0]), self.frame.buffers["w"].ptr_to([source]))
                place = (vector * sizes.lines + own) * VECTOR
                move(self.weights.ptr_to([place]), loaded.ptr_to([0]))

    def _multiply(self, s: Expr, before: Expr) -> None:
        frame = self.frame
        with T.serial(self.sizes.tiles * self.config.sequences, unroll=True) as i:
            T.buffer_store(self.sums, constant(0, "float32"), [i])
        last = frame.batch - index(1)  # which stands for sequences that are none
        rows = [T.Bind(tirx.Min(self.row + index(n), last)) for n in range(self.config.sequences)]
        with T.If(tirx.EQ(s, index(0))):
            with T.Then():
                self._products(rows, frame.buffers["h0"], frame.state)
            with T.Else():
                y = frame.buffers["y"]
                self._products(rows, y, lambda row, unit: frame.hidden(before, row, unit))

    def _products(
        self, rows: list[Expr], hidden: Var, place_of: Callable[[Expr, Expr], Expr]
    ) -> None:
        """The warp's sums, of hidden states in a buffer."""
        sizes, vectors = self.sizes, self.made.units // VECTOR
        each = -(-vectors // WARPS)
        with T.serial(each) as turn:
            vector = T.Bind(self.warp * each + turn)
            with then(vector < vectors):
                weights = T.alloc_local((sizes.tiles * VECTOR,), "float32")
                for tile in range(sizes.tiles):
                    source = (vector * sizes.lines + self.lane + tile * WARP) * VECTOR
                    move(weights.ptr_to([tile * VECTOR]), self.weights.ptr_to([source]))
                unit = T.Bind(convert(vector * VECTOR, "int64"))
                for n, row in enumerate(rows):
                    loaded = T.alloc_local((VECTOR,), "float32")
                    copy_fresh(loaded.ptr_to([0]), hidden.ptr_to([place_of(row, unit)]))
                    for tile in range(sizes.tiles):
                        at = tile * len(rows) + n
                        total = self.sums[at]
                        for k in range(VECTOR):
                            total = total + weights[tile * VECTOR + k] * loaded[k]
                        T.buffer_store(self.sums, total, [at])

    def _exchange(self) -> None:
        pitch, lines, sequences = self.sizes.pitch, self.sizes.lines, self.config.sequences
        for tile in range(self.sizes.tiles):
            start = (self.warp * lines + self.lane + tile * WARP) * pitch
            for n in range(sequences):
                T.buffer_store(self.partial, self.sums[tile * sequences + n], [start + n])
        T.evaluate(T.cuda.cta_sync())
