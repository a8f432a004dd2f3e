"""GEMM on the CUDA cores: correct for every contraction, whatever its dtypes, sizes and strides.

A block of threads computes a tile of one segment. For every step of `block_k` terms it holds the
tile's slices of A and B in shared memory (already widened), in two buffers: the next slices travel
from global memory through registers while the present ones are multiplied. A thread owns `thread_m`
rows and `thread_n` columns, in groups of four so that shared memory is read in 16-byte vectors.
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ....config import HardwareProfile, Policy
from ....errors import Unsupported
from ...contraction.model import INDEX
from ...contraction.reader import Contraction, Operand, Product, Segment, size_of
from ...gpu.access import AffineAccess, WindowAccess, affine_access, window_access
from ...gpu.memory import shared_pool
from ...gpu.product_frame import (
    Frame,
    Tile,
    assumed,
    ceil_div,
    coordinates,
    divided,
    evaluate,
    open_kernel,
)
from ...program.expr import (
    HALF_DTYPES,
    bytes_of,
    conjunction,
    constant,
    convert,
    dtype_of,
    substitute,
)
from ..epilogue import in_pairs
from ..mma.units import warp_sync
from ..side_by_side import grid_of
from .config import SimtConfig, simt_seconds
from .epilogue import GROUP, Share, emit_epilogue, is_scattered, spread

# A slice of an operand on its way: global memory -> registers -> shared memory[k, row].

VECTOR_BYTES = 16
WARP = BANKS = 32


class Slice:
    """What the threads of a block load of A (`side` "m") or B ("n") for one step.

    Neighbouring threads read along the axis that is contiguous in memory, in vectors where every
    access is aligned; an operand that is no plain load is evaluated element by element.
    """

    def __init__(
        self,
        frame: Frame,
        segment: Segment,
        product: Product,
        side: str,
        operand: Operand,
        width: int,
        depth: int,
        threads: int,
        shared: Expr,
    ):
        self.frame, self.operand, self.shared = frame, operand, shared
        self.product, self.segment = product, segment
        self.axes = segment.m if side == "m" else segment.n
        self.side, self.width, self.depth, self.threads = side, width, depth, threads
        self.access, self.window = self._affine(), self._window()
        along_k = self.access is not None and self.access.contiguous("k")
        self.along_k = along_k or self.window is not None
        self.vector = self._vector()
        self.count = -(-width * depth // (threads * self.vector))

    def _affine(self) -> AffineAccess | None:
        load = self.operand.load
        if load is None:
            return None
        shape = [int(n) if isinstance(n, int) else n for n in self._shape(load.source)]
        groups = {"batch": self.segment.batch, self.side: self.axes, "k": self.product.k}
        return affine_access(load.indices, shape, groups)

    def _window(self) -> WindowAccess | None:
        """How what is read at windows lies in memory, if channels are neighbours there."""
        windows, k = self.operand.windows, self.product.k
        if windows is None or not k or k[-1] is not windows.channels:
            return None
        window = window_access(windows)
        return window if window is not None and window.aligned(2, windows) else None

    def _shape(self, source: Var):
        return next(p.shape for p in self.frame.contraction.params if p.var.same_as(source))

    def _vector(self) -> int:
        """Elements a thread loads at once."""
        if self.operand.stored is None:
            return 1
        vector = VECTOR_BYTES // bytes_of(dtype_of(self.operand.stored))
        run = self.depth if self.along_k else self.width
        while vector > 1 and (
            run % vector
            or self.width * self.depth % (self.threads * vector)
            or not self._aligned(vector)
        ):
            vector //= 2
        return max(vector, 1)

    def _aligned(self, elements: int) -> bool:
        """Whether so many elements are one access."""
        if self.window is not None:
            return self.window.aligned(elements, self.operand.windows)
        along = "k" if self.along_k else self.side
        return self.access is not None and self.access.aligned(elements, along)

    def prepare(self, tile, thread: Expr) -> None:
        """Where in the slice this thread's elements lie, and the row each belongs to."""
        value = self.operand.stored if self.vector > 1 else self.operand.value
        dtype = dtype_of(value)
        self.registers = T.alloc_local((self.count * self.vector,), dtype)
        self.batch = coordinates(self.segment.batch, tile.batch, self.frame)
        first = (tile.m if self.side == "m" else tile.n) * self.width
        fast = (self.depth if self.along_k else self.width) // self.vector
        self.places = []
        for i in range(self.count):
            element = thread + i * self.threads
            outer, inner = T.Bind(element // fast), T.Bind(element % fast * self.vector)
            row, k = (outer, inner) if self.along_k else (inner, outer)
            flat = T.Bind(convert(first + row, self.frame.index))
            self.places.append((row, k, flat))
        self.rows = [self._row(flat) for _, _, flat in self.places]

    def _row(self, flat: Expr) -> dict[Var, Expr]:
        """The axes of a row. What a division by a variable gives is kept in registers: no compiler
        takes it out of the loop over the terms.
        """
        found = coordinates(self.axes, flat, self.frame)
        if self.operand.windows is None or all(isinstance(a.extent, int) for a in self.axes):
            return found
        kept = T.alloc_local((len(self.axes),), self.frame.index)
        for i in reversed(range(len(self.axes))):
            digit = flat
            if i:
                flat, digit = map(T.Bind, divided(flat, self.frame.size(self.axes[i].extent)))
            T.buffer_store(kept, digit, [i])
        return {axis.var: kept[i] for i, axis in enumerate(self.axes)}

    def load(self, step: Expr) -> None:
        """Global memory -> registers; what lies outside the operand is 0."""
        for i, (row, k, flat) in enumerate(self.places):
            term = T.Bind(convert(step * self.depth + k, self.frame.index))
            inside = conjunction(self._inside(row, k, flat, term), self._is_element(i, term))
            if inside is None:
                self._read(i, term)
                continue
            with T.If(inside):
                with T.Then():
                    self._read(i, term)
                with T.Else():
                    zero = constant(0, dtype_of(self.registers[0]))
                    for v in range(self.vector):
                        T.buffer_store(self.registers, zero, [i * self.vector + v])

    def _inside(self, row: Expr, k: Expr, flat: Expr, term: Expr) -> Expr | None:
        """Condition under which an element exists; None where all do."""
        rows, terms = size_of(self.axes), self.product.K
        conditions = []
        if not (isinstance(rows, int) and rows % self.width == 0):
            conditions.append(flat < self.frame.size(rows))
        if not (isinstance(terms, int) and terms % self.depth == 0):
            conditions.append(term < self.frame.size(terms))
        if self.width * self.depth % (self.threads * self.vector):
            edge = row if self.along_k else k
            conditions.append(edge < (self.width if self.along_k else self.depth))
        return conjunction(*conditions)

    def _env(self, i: int, term: Expr) -> dict[Var, Expr]:
        return self.batch | self.rows[i] | coordinates(self.product.k, term, self.frame)

    def _is_element(self, i: int, term: Expr) -> Expr | None:
        """Whether a vector at a window is no padding."""
        if self.vector == 1 or self.operand.windows is None:
            return None
        _, condition = self.operand.windows.places()
        return None if condition is None else self.frame.rewrite(condition, self._env(i, term))

    def _read(self, i: int, term: Expr) -> None:
        env = self._env(i, term)
        if self.vector == 1:
            bindings, value = self.operand.bindings, _undivided(self.operand)
            (value,) = evaluate(self.frame, bindings, [value], env, False)
            T.buffer_store(self.registers, value, [i])
            return
        load, indices = self.operand.stored, self.operand.stored.indices
        if self.operand.windows is not None:
            places, _ = self.operand.windows.places()
            indices = [substitute(index, places) for index in indices]
        *lead, last = self.frame.place(indices, env)
        source = self.frame.buffers[load.source]
        with T.vectorized(self.vector) as v:
            T.buffer_store(self.registers, source[(*lead, last + v)], [i * self.vector + v])

    def store(self, turn: Expr) -> None:
        """Registers -> shared memory buffer number `turn`, widened."""
        dtype = dtype_of(self.operand.value)
        partial = self.width * self.depth % (self.threads * self.vector) != 0
        for i, (row, k, _) in enumerate(self.places):
            if not partial:
                self._put(i, turn, row, k, dtype)
                continue
            edge = row if self.along_k else k
            with T.If(edge < (self.width if self.along_k else self.depth)), T.Then():
                self._put(i, turn, row, k, dtype)

    def _put(self, i: int, turn: Expr, row: Expr, k: Expr, dtype: str) -> None:
        for v in range(self.vector):
            value = convert(self.registers[i * self.vector + v], dtype)
            at = [turn, k + v, row] if self.along_k else [turn, k, row + v]
            T.buffer_store(self.shared, value, at)


def _undivided(operand: Operand) -> Expr:
    """An operand's value; places that are divided to find an element are hidden by an or with 0.

    Of ``x // 12 * 4 + (x % 12 + y % 5) // 3`` TVM 0.27 makes ``(x - 11) // 3`` where it finds
    ``y % 5`` to be 1 and knows that ``12 <= x``: 4 less. `runtime.build.hidden_divisions` sees no
    constant there.
    """
    windows = operand.windows
    if windows is None or all(w.repeats == 1 for w in windows.dims):
        return operand.value
    places, condition = windows.places()
    for window in windows.dims:
        if window.repeats > 1:
            at = windows.coordinates[window.dim]
            places[at] = tirx.bitwise_or(places[at], constant(0, INDEX))
    value = substitute(windows.data, places)
    if condition is None:
        return value
    return tirx.if_then_else(condition, value, constant(0, dtype_of(value)))


# A thread's 8 x 16 reads one word of shared memory for every five multiplications, 4 x 4 one for
# every two; the small ones fill the device where a matrix has few rows or columns. Chosen from 15
# in float32 (H200, 2026-11-20; time of cuBLAS over theirs): 256 x 128 0.97 and 128 x 128 0.86 at
# 4096^3, 128 x 64 0.99 at 1000^3, 64 x 128 0.63 at 777 x 1024 x 4096.
CONFIGS = (
    SimtConfig(128, 256, 8, 8, 16),
    SimtConfig(256, 128, 8, 16, 8),
    SimtConfig(128, 128, 8, 8, 8),
    SimtConfig(128, 64, 16, 8, 4),
    SimtConfig(64, 128, 16, 8, 4),
    SimtConfig(64, 64, 16, 8, 4),
    SimtConfig(64, 64, 16, 4, 4),
    SimtConfig(32, 64, 16, 4, 4),
    SimtConfig(16, 64, 32, 2, 4),
    SimtConfig(64, 16, 32, 4, 1),
    SimtConfig(4, 64, 32, 1, 2),
)

# Each segment has code of its own, which grows with the sums a thread holds: with more segments
# than FEW_SEGMENTS a thread holds no more than MANY_SEGMENTS_SUMS.
FEW_SEGMENTS = 4
MANY_SEGMENTS_SUMS = 16


def simt_ranked(
    contraction: Contraction, hw: HardwareProfile, policy: Policy | None = None
) -> list[tuple[float, SimtConfig]]:
    """Predicted seconds and the configurations that fit the device, best first.

    Raises
    ------
    Unsupported
        If no configuration fits into shared memory.
    """
    _refuse_partials(contraction)
    in_pairs(contraction, lambda _: 1)  # raises where no configuration holds the pairs
    few = len(contraction.segments) <= FEW_SEGMENTS
    fitting = [
        c
        for c in CONFIGS
        if _smem_bytes(contraction, c) <= hw.smem_per_block_bytes
        and c.threads <= hw.max_threads_per_block
        and (few or c.thread_m * c.thread_n <= MANY_SEGMENTS_SUMS)
        and _holds_pairs(contraction, c)
    ]
    if not fitting:
        raise Unsupported("no tile of this contraction fits into shared memory")
    ranked = [(_seconds(contraction, c, hw), c) for c in fitting]
    return sorted(ranked, key=lambda entry: entry[0])


def _refuse_partials(contraction: Contraction) -> None:
    if contraction.has_partials:
        raise Unsupported("reductions of runs of columns or rows")


def _holds_pairs(contraction: Contraction, config: SimtConfig) -> bool:
    """Whether a thread can hold both columns of all pairs that values are made of."""
    try:
        in_pairs(contraction, lambda s: _pair_size(s, config))
    except Unsupported:
        return False
    return True


def _pair_size(segment: Segment, config: SimtConfig) -> int:
    """How far apart a thread's columns of a pair are to be: groups of its columns, else two of
    them.
    """
    distance = segment.partners.distance
    groups = config.thread_n // GROUP
    if groups > 1 and distance % (config.block_n // groups) == 0:
        return config.block_n // groups
    return math.gcd(distance, min(GROUP, config.thread_n) // 2)


def simt_configs(contraction: Contraction, hw: HardwareProfile) -> list[SimtConfig]:
    """The configurations of `simt_ranked`."""
    return [config for _, config in simt_ranked(contraction, hw)]


def _smem_bytes(contraction: Contraction, config: SimtConfig) -> int:
    rows = config.block_m + config.block_n + 2 * GROUP
    slices = sum(bytes_of(dtype) for dtype in _slice_dtypes(contraction))
    shape = _patch_shape(contraction, config)
    patch = math.prod(shape) * bytes_of(_accumulated(contraction)) if shape is not None else 0
    return 2 * config.block_k * rows * slices + patch


def _patch_shape(contraction: Contraction, config: SimtConfig) -> tuple[int, int] | None:
    """Of shared memory in which threads exchange sums: a row for all threads of it at a time, of
    all rows; None where a thread has one column, or sums are of several dtypes.

    Half as many columns are between rows as banks: threads of a warp of two rows read all banks.
    """
    single = len({p.dtype for p in contraction.products}) == 1
    if config.thread_n % GROUP or not single:
        return None
    return config.block_m // config.thread_m, config.block_n + BANKS // 2


def _accumulated(contraction: Contraction) -> str:
    """Dtype of the sums."""
    return contraction.products[0].dtype


def _slice_dtypes(contraction: Contraction) -> list[str]:
    """Dtypes in which operands lie in shared memory."""
    operands = [x for p in contraction.products for x in (p.a, p.b)]
    return list(dict.fromkeys(dtype_of(x.value) for x in operands))


def _seconds(contraction: Contraction, config: SimtConfig, hw: HardwareProfile) -> float:
    sizes = [
        (
            assumed(size_of(segment.batch)),
            assumed(size_of(segment.m)),
            assumed(segment.N),
            tuple(assumed(p.K) for p in segment.products),
        )
        for segment in contraction.segments
    ]
    shapes = [(p.shape, p.dtype) for p in contraction.params if p.shape is not None]
    moved = sum(bytes_of(dtype) * math.prod(map(assumed, shape)) for shape, dtype in shapes)
    loads = [x.stored for p in contraction.products for x in (p.a, p.b)]
    halves = all(load is not None and dtype_of(load) in HALF_DTYPES for load in loads)
    return simt_seconds(sizes, config, hw, moved, halves=halves)


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
    _refuse_partials(contraction)
    config = config or simt_configs(contraction, hw)[0]
    contraction = in_pairs(contraction, lambda s: _pair_size(s, config))
    with open_kernel(contraction) as frame:
        _Kernel(frame, config).emit()
    return frame.func


class _Kernel:
    """One kernel: the grid, and a tile of each segment."""

    def __init__(self, frame: Frame, config: SimtConfig):
        self.frame, self.config = frame, config
        self.contraction = c = frame.contraction
        self.grid = grid_of(frame.index, c, config.block_m, config.block_n)
        self.patch: Expr | None = None  # shared memory in which threads exchange sums

    def emit(self) -> None:
        c, tiles = self.config, self.grid.tiles
        T.device_entry()
        block = T.cta_id([tiles if isinstance(tiles, int) else convert(tiles, "int32")])
        self.thread = T.thread_id([c.threads])
        across = c.block_n // c.thread_n
        self.rows = Share(T.Bind(self.thread // across), c.block_m, c.thread_m)
        self.columns = Share(T.Bind(self.thread % across), c.block_n, c.thread_n)
        self.shared = self._allocate()
        for number, own in self.grid.each_segment(self.grid.tile(block)):
            self._segment(own, self.contraction.segments[number])

    def _allocate(self) -> dict[tuple[str, str], Expr]:
        """Two buffers for slices of A and of B, shared by all products of one dtype."""
        pool = shared_pool()
        shared = {
            (side, dtype): pool.alloc((2, self.config.block_k, width + GROUP), dtype, align=16)
            for dtype in _slice_dtypes(self.contraction)
            for side, width in (("m", self.config.block_m), ("n", self.config.block_n))
        }
        shape = _patch_shape(self.contraction, self.config)
        scattered = any(is_scattered(self.frame, s) for s in self.contraction.segments)
        if shape is not None and scattered:
            self.patch = pool.alloc(shape, _accumulated(self.contraction), align=16)
        pool.commit()
        return shared

    def _segment(self, tile: Tile, segment: Segment) -> None:
        c = self.config
        sums = {}
        for product in segment.products:
            if product.accumulator not in sums:
                buffer = T.alloc_local((c.thread_m * c.thread_n,), product.dtype)
                with T.serial(c.thread_m * c.thread_n, unroll=True) as i:
                    T.buffer_store(buffer, constant(0, product.dtype), [i])
                sums[product.accumulator] = buffer
            self._product(tile, segment, product, sums[product.accumulator])
        columns = self.columns
        if self.patch is not None and is_scattered(self.frame, segment):
            columns = self._spread(list(sums.values()))
        emit_epilogue(self.frame, segment, tile, self.rows, columns, sums)

    def _spread(self, sums: list[Expr]) -> Share:
        """See `epilogue.spread`."""
        in_warp = WARP % (self.config.block_n // self.config.thread_n) == 0
        wait = warp_sync if in_warp else T.cuda.cta_sync
        return spread(sums, self.rows, self.columns, self.patch, wait)

    def _product(self, tile: Tile, segment: Segment, product: Product, sums: Expr) -> None:
        """All steps of one product, the loads of the next step under way during each."""
        a = self._slice(tile, segment, product, product.a, "m")
        b = self._slice(tile, segment, product, product.b, "n")
        zero = constant(0, self.frame.index)
        for part in (a, b):
            part.load(zero)
        for part in (a, b):
            part.store(zero)
        T.evaluate(T.cuda.cta_sync())
        steps = self.frame.size(ceil_div(product.K, self.config.block_k))
        with T.serial(0, steps, unroll=False) as step:
            ahead = T.Bind(step + 1)
            with T.If(ahead < steps), T.Then():
                a.load(ahead)
                b.load(ahead)
            self._multiply(a.shared, b.shared, step % 2, product, sums)
            with T.If(ahead < steps), T.Then():
                a.store(ahead % 2)
                b.store(ahead % 2)
            T.evaluate(T.cuda.cta_sync())

    def _slice(
        self, tile: Tile, segment: Segment, product: Product, operand: Operand, side: str
    ) -> Slice:
        c = self.config
        shared = self.shared[side, dtype_of(operand.value)]
        width = c.block_m if side == "m" else c.block_n
        part = Slice(
            self.frame, segment, product, side, operand, width, c.block_k, c.threads, shared
        )
        part.prepare(tile, self.thread)
        return part

    def _multiply(self, a: Expr, b: Expr, turn: Expr, product: Product, sums: Expr) -> None:
        """One step: every term's row of A and of B into registers, and their outer product."""
        c = self.config
        left = T.alloc_local((c.thread_m,), dtype_of(product.a.value))
        right = T.alloc_local((c.thread_n,), dtype_of(product.b.value))
        with T.serial(c.block_k, unroll=True) as k:
            for target, source, share in ((left, a, self.rows), (right, b, self.columns)):
                for number, start in enumerate(share.starts):
                    with T.vectorized(share.width) as v:
                        value = source[turn, k, start + v]
                        T.buffer_store(target, value, [number * share.width + v])
            with T.serial(c.thread_m, unroll=True) as i, T.serial(c.thread_n, unroll=True) as j:
                at = i * c.thread_n + j
                term = convert(left[i], product.dtype) * convert(right[j], product.dtype)
                T.buffer_store(sums, sums[at] + term, [at])
