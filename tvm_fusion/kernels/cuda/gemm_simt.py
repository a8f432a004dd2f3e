"""GEMM on the CUDA cores: correct for every contraction, whatever its dtypes, sizes, strides and expressions.

A block of threads computes a tile of one segment. Every step of `block_k` terms it holds the tile's
slices of A and B in shared memory (already widened), in two buffers: the next slice travels from
global memory through registers while the present one is multiplied. A thread owns `thread_m` rows and
`thread_n` columns of the tile, in groups of four so that shared memory is read in 16-byte vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...config import HardwareProfile
from ...errors import Unsupported
from ..contraction import Contraction, Extent, Product, Segment
from ..expr import bytes_of, constant, convert, dtype_of
from .gemm_access import affine_access
from .gemm_frame import Frame, ceil_div, coordinates, open_kernel
from .gemm_grid import Grid, Tile
from .gemm_simt_operand import Slice

# Columns (or rows) a thread owns side by side: four float32 are one 16-byte access.
GROUP = 4


@dataclass(frozen=True, slots=True)
class SimtConfig:
    """Tile of a block (rows, columns, terms a step) and of a thread (rows, columns)."""

    block_m: int
    block_n: int
    block_k: int
    thread_m: int
    thread_n: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.block_m // self.thread_m * (self.block_n // self.thread_n)


# Largest first. 8 x 8 a thread reads one word of shared memory for every four multiplications, 4 x 4
# one for every two; the small ones fill the device where a matrix has few rows or columns.
CONFIGS = (
    SimtConfig(128, 128, 8, 8, 8),
    SimtConfig(64, 128, 8, 8, 4),
    SimtConfig(64, 64, 16, 4, 4),
    SimtConfig(32, 64, 16, 4, 4),
    SimtConfig(16, 64, 32, 2, 4),
    SimtConfig(64, 16, 32, 4, 1),
    SimtConfig(4, 64, 32, 1, 2),
)


def simt_configs(contraction: Contraction, hw: HardwareProfile) -> list[SimtConfig]:
    """The configurations that fit the device, best guess first (sizes that are not known count as 1024)."""
    fitting = [c for c in CONFIGS if _smem_bytes(contraction, c) <= hw.smem_per_block_bytes]
    fitting = [c for c in fitting if c.threads <= hw.max_threads_per_block]
    return sorted(fitting, key=lambda c: _steps(contraction, c, hw))


def _smem_bytes(contraction: Contraction, config: SimtConfig) -> int:
    size = max(bytes_of(dtype_of(x.value)) for p in contraction.products for x in (p.a, p.b))
    return 2 * config.block_k * (config.block_m + config.block_n + 2 * GROUP) * size


def _steps(contraction: Contraction, config: SimtConfig, hw: HardwareProfile) -> float:
    """Relative time: waves of tiles times the work of a tile, at the rate its register tile allows."""

    def known(extent: Extent) -> int:
        return extent if isinstance(extent, int) else 1024

    rows = ceil_div(known(contraction.M), config.block_m) * known(contraction.batch)
    tiles = sum(rows * ceil_div(known(s.N), config.block_n) for s in contraction.segments)
    resident = max(1, hw.max_threads_per_sm // (3 * config.threads))
    waves = math.ceil(tiles / (hw.num_sms * resident))
    reads = 1 / config.thread_m + 1 / config.thread_n
    return waves * resident * config.block_m * config.block_n * (1 + reads)


def emit_gemm_simt(
    contraction: Contraction, hw: HardwareProfile, config: SimtConfig | None = None
) -> tirx.PrimFunc:
    """Write a contraction as one TIRx kernel that multiplies on the CUDA cores.

    Parameters
    ----------
    contraction : Contraction
        Any dtypes, sizes (symbolic ones too), access maps, prologues and epilogues.
    hw : HardwareProfile
        The CUDA device.
    config : SimtConfig, optional
        One of `simt_configs`; the first where None.

    Returns
    -------
    func : tirx.PrimFunc
        With the parameters of the PrimFunc that the contraction was read from.

    Raises
    ------
    Unsupported
        If no configuration fits into shared memory.
    """
    configs = [config] if config is not None else simt_configs(contraction, hw)
    if not configs:
        raise Unsupported("no tile of this contraction fits into shared memory")
    with open_kernel(contraction) as frame:
        _Kernel(frame, configs[0]).emit()
    return frame.func


class _Kernel:
    """One kernel: the grid, and a tile of each segment."""

    def __init__(self, frame: Frame, config: SimtConfig):
        self.frame = frame
        self.config = config
        self.contraction = frame.contraction
        c = self.contraction
        columns = [segment.N for segment in c.segments]
        self.grid = Grid(frame, c.batch, c.M, columns, config.block_m, config.block_n)

    def emit(self) -> None:
        c = self.config
        T.device_entry()
        tiles = self.grid.tiles
        block = T.cta_id([tiles if isinstance(tiles, int) else convert(tiles, "int32")])
        thread = T.thread_id([c.threads])
        self.thread = thread
        self.thread_row = T.Bind(thread // (c.block_n // c.thread_n))
        self.thread_column = T.Bind(thread % (c.block_n // c.thread_n))
        self.pool = T.SMEMPool()
        self.slices = self._allocate()
        self.pool.commit()
        tile = self.grid.tile(block)
        for number, own in self.grid.each_segment(tile):
            self._segment(own, self.contraction.segments[number])

    def _allocate(self) -> dict[str, Expr]:
        """Two buffers for slices of A and of B, shared by all products of one dtype."""
        slices: dict[str, Expr] = {}
        for product in self.contraction.products:
            for side, operand, width in self._sides(product):
                dtype = dtype_of(operand.value)
                if (side, dtype) not in slices:
                    shape = (2, self.config.block_k, width + GROUP)
                    slices[side, dtype] = self.pool.alloc(shape, dtype, align=16)
        return slices

    def _sides(self, product: Product) -> list[tuple[str, object, int]]:
        return [("m", product.a, self.config.block_m), ("n", product.b, self.config.block_n)]

    def _segment(self, tile: Tile, segment: Segment) -> None:
        accumulators = {}
        for product in segment.products:
            buffer = T.alloc_local((self.config.thread_m * self.config.thread_n,), product.dtype)
            with T.serial(self.config.thread_m * self.config.thread_n, unroll=True) as i:
                T.buffer_store(buffer, constant(0, product.dtype), [i])
            accumulators[product.accumulator] = buffer
            self._product(tile, segment, product, buffer)
        self._epilogue(tile, segment, accumulators)

    # ---- main loop
    def _product(self, tile: Tile, segment: Segment, product: Product, sums: Expr) -> None:
        """All steps of one product, the loads of the next step under way during each."""
        c = self.config
        parts = []
        for side, operand, width in self._sides(product):
            shared = self.slices[side, dtype_of(operand.value)]
            parts.append(
                Slice(
                    self.frame, segment, product, side, operand, width, c.block_k, c.threads, shared
                )
            )
        for part in parts:
            part.prepare(tile, self.thread)
        steps = self.frame.size(ceil_div(product.K, c.block_k))
        zero = constant(0, self.frame.index)
        for part in parts:
            part.load(zero)
        for part in parts:
            part.store(zero)
        T.evaluate(T.cuda.cta_sync())
        with T.serial(0, steps, unroll=False) as step:
            ahead = T.Bind(step + 1)
            with T.If(ahead < steps), T.Then():
                for part in parts:
                    part.load(ahead)
            self._multiply(parts[0].shared, parts[1].shared, step % 2, product, sums)
            with T.If(ahead < steps), T.Then():
                for part in parts:
                    part.store(ahead % 2)
            T.evaluate(T.cuda.cta_sync())

    def _multiply(self, a: Expr, b: Expr, turn: Expr, product: Product, sums: Expr) -> None:
        c = self.config
        left = T.alloc_local((c.thread_m,), dtype_of(product.a.value))
        right = T.alloc_local((c.thread_n,), dtype_of(product.b.value))
        with T.serial(c.block_k, unroll=True) as k:
            for target, source, place in ((left, a, self._rows()), (right, b, self._columns())):
                for group, (start, width) in enumerate(place):
                    with T.vectorized(width) as v:
                        value = source[turn, k, start + v]
                        T.buffer_store(target, value, [group * width + v])
            with T.serial(c.thread_m, unroll=True) as i, T.serial(c.thread_n, unroll=True) as j:
                at = i * c.thread_n + j
                term = convert(left[i], product.dtype) * convert(right[j], product.dtype)
                T.buffer_store(sums, sums[at] + term, [at])

    def _rows(self) -> list[tuple[Expr, int]]:
        """First row in the tile and number of rows of each group that the thread owns."""
        c = self.config
        return _groups(self.thread_row, c.block_m, c.thread_m)

    def _columns(self) -> list[tuple[Expr, int]]:
        c = self.config
        return _groups(self.thread_column, c.block_n, c.thread_n)

    # ---- epilogue
    def _epilogue(self, tile: Tile, segment: Segment, sums: dict[Var, Expr]) -> None:
        c, frame = self.config, self.frame
        writers = [_Writer(frame, segment, output) for output in segment.outputs]
        whole = all(w.vector for w in writers)
        ragged_n = not (isinstance(segment.N, int) and segment.N % c.block_n == 0)
        M = frame.contraction.M
        ragged_m = not (isinstance(M, int) and M % c.block_m == 0)
        batch = coordinates(segment.batch, tile.batch, frame)
        for group_m, (first, rows) in enumerate(self._rows()):
            with T.serial(rows, unroll=True) as i:
                row = T.Bind(tile.m * c.block_m + first + i)
                with _guard(row < frame.size(M) if ragged_m else None):
                    env = batch | coordinates(segment.m, row, frame)
                    for group_n, (start, width) in enumerate(self._columns()):
                        column = T.Bind(tile.n * c.block_n + start)
                        at = (group_m * rows + i) * c.thread_n + group_n * width
                        guard = column < frame.size(segment.N) if ragged_n else None
                        vector = whole and width == GROUP
                        with _guard(guard if vector else None):
                            for v in range(width):
                                inside = column + v < frame.size(segment.N) if ragged_n else None
                                with _guard(None if vector else inside):
                                    point = env | coordinates(segment.n, column + v, frame)
                                    point |= {acc: s[at + v] for acc, s in sums.items()}
                                    point = frame.bind(segment.bindings, point)
                                    for writer in writers:
                                        writer.put(point, v, vector)
                            if vector:
                                for writer in writers:
                                    writer.flush(env | coordinates(segment.n, column, frame))


def _groups(position: Expr, block: int, thread: int) -> list[tuple[Expr, int]]:
    """A thread's share of `block` rows: groups of up to four neighbours, spread over the block."""
    width = min(GROUP, thread)
    count = thread // width
    return [(g * (block // count) + position * width, width) for g in range(count)]


@contextmanager
def _guard(condition: Expr | None) -> Iterator[None]:
    if condition is None:
        yield
        return
    with T.If(condition), T.Then():
        yield


class _Writer:
    """Stores one output, four neighbouring columns at a time where they lie side by side."""

    def __init__(self, frame: Frame, segment: Segment, output):
        self.frame = frame
        self.output = output
        shape = frame.contraction.params[output.param].shape
        groups = {"batch": segment.batch, "m": segment.m, "n": segment.n}
        access = affine_access(output.indices, shape, groups)
        self.vector = access is not None and access.aligned(GROUP, "n")
        self.stage = T.alloc_local((GROUP,), output.dtype)

    def put(self, point: dict[Var, Expr], v: int, vector: bool) -> None:
        value = convert(self.frame.rewrite(self.output.value, point), self.output.dtype)
        if vector:
            T.buffer_store(self.stage, value, [v])
        else:
            target = self.frame.output(self.output.param)
            T.buffer_store(target, value, self.frame.place(self.output.indices, point))

    def flush(self, point: dict[Var, Expr]) -> None:
        target = self.frame.output(self.output.param)
        *lead, last = self.frame.place(self.output.indices, point)
        with T.vectorized(GROUP) as v:
            T.buffer_store(target, self.stage[v], [*lead, last + v])
