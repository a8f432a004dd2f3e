"""Predicted time of the skinny products.

    seconds = start + (memory^p + l2^p + latency^p + arithmetic^p)^(1/p)

The constants are fitted to about 230 kernels measured on an H200 2026-11-20 (1, 4 and 16 rows,
weights of 16, 8 and 4 bits), where nothing else is said.
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad, Var

from ....config import HardwareProfile, Policy
from ....errors import Unsupported
from ...contraction.reader import Contraction, Product
from ...gpu.memory import WIDEST
from ...gpu.product_frame import Frame
from ...program.expr import bytes_of, dtype_of, is_integer, number, rebuild
from .config import MMA_LANES, STATIC_SMEM, WARP, SkinnyConfig, check_problem, paired, tensor_dtype
from .fetch import Fetch
from .halves import conversion
from .values import Values, inlined, values_of

# Which configurations of the skinny product are worth ranking: how its weights can be read.

WIDE_REGISTERS = 128  # for the weights and the sums of a block of several rows
SLOW_OPERATION = 14.0
"""Instructions of a division or a special function (estimate)."""


def whole_runs(extents: list[int], most: int, times: int = 1) -> int:
    """The largest power of two up to `most` that, times `times`, divides all extents."""
    run = most
    while run > 1 and any(extent % (run * times) for extent in extents):
        run //= 2
    return run if all(extent % (run * times) == 0 for extent in extents) else 0


def last_extents(contraction: Contraction) -> tuple[list[int], list[int]]:
    """Extents of the last axis of the sums, and of the columns."""
    k = [p.k[-1].extent if p.k else 1 for p in contraction.products]
    return k, [s.n[-1].extent if s.n else 1 for s in contraction.segments]


class Layouts:
    """How wide the weights can be read along the sum and along the columns."""

    def __init__(self, contraction: Contraction):
        self.contraction = contraction
        self.frame = Frame(contraction, {}, "int32")
        self.k, self.n = last_extents(contraction)
        self._values: dict[tuple[int, int, str], list[Values]] = {}
        self._costs: dict[tuple[int, int, str], list[float]] = {}
        self._accesses: dict[tuple[int, int], tuple[int, int]] = {}
        self._left: dict[int, float] = {}

    def values(self, steps: int, width: int, tensor: str = "") -> list[Values]:
        """The weights of all products at blocks of points."""
        key = steps, width, tensor
        if key not in self._values:
            extra = {"lanes": MMA_LANES, "half": tensor} if tensor else {}
            self._values[key] = [
                values_of(self.frame, s, p, p.b, s.n, steps, width, **extra)
                for s in self.contraction.segments
                for p in s.products
            ]
        return self._values[key]

    def conversions(self, steps: int, width: int, tensor: str = "") -> list[float]:
        """Instructions that each product's weights take to become factors."""
        key = steps, width, tensor
        if key not in self._costs:
            self._costs[key] = [conversion(v, tensor) for v in self.values(*key)]
        return self._costs[key]

    def left_operations(self, product: Product) -> float:
        """Instructions that an element of the rows takes where it is computed."""
        if id(product) not in self._left:
            computed = product.a.load is None
            self._left[id(product)] = _operations(inlined(product.a)) if computed else 0.0
        return self._left[id(product)]

    def accesses(self, steps: int, width: int) -> tuple[int, int]:
        """Bytes of an access to the weights, the largest parameter, and how many a block takes."""
        if (steps, width) not in self._accesses:
            found = [self._weights(values) for values in self.values(steps, width)]
            accesses = max(f.nbytes // f.piece for f in found)
            self._accesses[steps, width] = min(f.piece for f in found), accesses
        return self._accesses[steps, width]

    def _weights(self, values: Values) -> Fetch:
        def size(fetch: Fetch) -> int:
            found = (p for p in self.contraction.params if p.var.same_as(fetch.source))
            return next(found).elements * bytes_of(fetch.dtype)

        if not values.reader.fetches:
            raise Unsupported("weights that are read under conditions only")
        return max(values.reader.fetches, key=size)

    def vectors(self, steps: int, width: int, tensor: str) -> int:
        """16-byte accesses to the weights of a block, of the segment that has most."""
        values = iter(self.values(steps, width, tensor))
        return max(
            sum(f.nbytes // WIDEST for _ in s.products for f in next(values).fetches(True))
            for s in self.contraction.segments
        )

    def best_steps(self, times: int) -> int:
        """Terms whose weights are one 16-byte access, or as close to it as the sizes allow."""
        sizes = [s for s in (1, 2, 4, 8, 16, 32) if not any(k % (s * times) for k in self.k)]
        return self._widest_of([(steps, 1) for steps in sizes])[0] or whole_runs(self.k, 4, times)

    def best_width(self) -> int:
        """Columns whose weights are one 16-byte access."""
        sizes = [w for w in (1, 2, 4, 8, 16) if not any(n % w for n in self.n)]
        return self._widest_of([(1, width) for width in sizes])[1] or 1

    def _widest_of(self, blocks: list[tuple[int, int]]) -> tuple[int, int]:
        """The smallest block that is one access, as wide as any."""
        best, bytes_best = (0, 0), 0
        for block in blocks:
            piece, count = self.accesses(*block)
            if count == 1 and piece > bytes_best:
                best, bytes_best = block, piece
        return best


def _operations(expr: Expr) -> float:
    """Instructions of an expression on floats (estimate)."""
    found = []

    def visit(child: Expr) -> Expr:
        found.append(_operations(child))
        return child

    rebuild(expr, visit)
    free = isinstance(expr, TensorLoad | tirx.Cast | Var) or is_integer(dtype_of(expr))
    if free or number(expr) is not None:
        return sum(found)
    slow = isinstance(expr, tirx.Div | Call)
    return sum(found) + (SLOW_OPERATION if slow else 1.0)


def candidates(
    contraction: Contraction, hw: HardwareProfile, layouts: Layouts, tensor: str
) -> list[SkinnyConfig]:
    """All configurations worth ranking: what was the fastest of some shape on an H200, or near."""
    found = [*_along_k(contraction, layouts), *_along_n(layouts)]
    if tensor:
        found += _on_tensor_cores(contraction, layouts, tensor)
    return [c for c in dict.fromkeys(found) if _fits(contraction, hw, layouts, c, tensor)]


def _fits(
    contraction: Contraction,
    hw: HardwareProfile,
    layouts: Layouts,
    config: SkinnyConfig,
    tensor: str,
) -> bool:
    """Whether the sizes allow a configuration, and shared memory holds it."""
    try:
        config.check(contraction, hw, tensor)
    except Unsupported:
        return False
    if not config.stages:
        return True
    slots = layouts.vectors(config.steps, config.width, config.tensor) * config.runs
    size = config.ring_bytes(slots) + config.smem_bytes(contraction)
    return slots > 0 and size <= STATIC_SMEM


def _unrolls(contraction: Contraction, terms: int, most: int) -> list[int]:
    """Steps of a thread at a time; a share of the sum has steps of `terms` terms."""
    steps = max(1, max(p.K for p in contraction.products) // terms)
    # Two at a time first: the fastest where the predictions are the same.
    return [unroll for unroll in (2, 1, 4) if unroll <= max(1, min(steps, most))]


def _along_k(contraction: Contraction, layouts: Layouts) -> list[SkinnyConfig]:
    steps = layouts.best_steps(1)
    products = max(len(s.products) for s in contraction.segments)
    return [
        SkinnyConfig("", steps, 1, columns, 1, warps_k, warps_n, unroll)
        for columns in (1, 2, 4)
        for warps_k, warps_n in ((1, 4), (4, 1), (4, 2), (8, 1))
        for unroll in _unrolls(contraction, WARP * warps_k * steps, 4 // (columns * products))
        if columns * products <= max(4, products) and warps_k * columns * products > 1
    ]


def _along_n(layouts: Layouts) -> list[SkinnyConfig]:
    width = layouts.best_width()
    steps = whole_runs(layouts.k, 8)
    if width == 1:
        return []
    rows = layouts.contraction.M

    def fits(steps: int) -> bool:
        few = rows == 1 or (steps + rows) * width <= WIDE_REGISTERS
        return few and layouts.accesses(steps, width)[1] <= 8

    while steps > 1 and not fits(steps):
        steps //= 2
    return [
        SkinnyConfig("", steps, width, 1, lanes, warps_k, 1, unroll)
        for lanes in (4, 8, 16)
        for warps_k in (4, 8, 16)
        for unroll in _unrolls(layouts.contraction, WARP // lanes * warps_k * steps, 2)
    ]


def _on_tensor_cores(contraction: Contraction, layouts: Layouts, tensor: str) -> list[SkinnyConfig]:
    """Along the sum, or along the columns; at one row only for weights that are computed."""
    products = max(len(s.products) for s in contraction.segments)
    computed = any(p.b.load is None for p in contraction.products)
    if contraction.M == 1 and not computed:
        return []
    found = []
    for steps, width in _tensor_blocks(layouts):
        most_columns = 16 if width == 1 else 128 if contraction.M == 1 else 64
        for columns in (1, 2, 4, 8):
            if 2 * columns % width or columns * products > max(4, width // 2):
                continue
            whole = layouts.accesses(steps, width)[0] == WIDEST
            for warps in (4, 8, 16):
                if columns * warps > most_columns:
                    continue
                most = 4 // (columns * products) if width == 1 else 2
                terms = steps * MMA_LANES * warps
                ways = [(u, 0) for u in _unrolls(contraction, terms, most)] + [(1, 2)] * whole
                found += [
                    SkinnyConfig(tensor, steps, width, columns, 1, warps, 1, unroll, stages)
                    for unroll, stages in ways
                ]
    return found


def _tensor_blocks(layouts: Layouts) -> list[tuple[int, int]]:
    """Terms and columns that a thread reads at once."""
    found = []
    steps = layouts.best_steps(MMA_LANES)
    if steps >= 4 and layouts.accesses(steps, 1)[0] >= 8:
        found.append((steps, 1))
    best = layouts.best_width()
    for width in (w for w in (best, best // 2) if w > 1):
        for steps in (4, 8, 16):
            divides = not any(k % (steps * MMA_LANES) for k in layouts.k)
            piece, count = layouts.accesses(steps, width) if divides else (0, 0)
            if piece >= 4 and count <= 8:
                found.append((steps, width))
    return found


MMA_ROWS = 8  # threads of a warp side by side along the columns, on tensor cores
START = 1.89e-06
"""Seconds before the first weights arrive and after the last."""
TRIP = 5.66e-07
"""Seconds from a batch of loads to the next one of a thread, under traffic."""
TURN = 1e-07
"""Seconds that a block spends before and behind its loads: its start, the sums of its warps."""
LOADS = 3.6
"""Loads of a thread that ptxas keeps in flight, whatever the unrolling (from the SASS)."""
L2_SHARE = 1.5
"""Of the L2's rate, what weights and rows together reach."""
READS = 1.12
"""Rate of reads alone, of that of a copy."""
UNEVEN = 0.146
"""Of the bytes that the fullest multiprocessor has above the mean, the share that shows."""
ISSUE = 0.406
"""Share of the issue slots that unrolled arithmetic between loads fills."""
POWER = 4.81
"""p among the terms: between the slowest alone and all one after another."""
NARROW = {16: 1.0, 8: 1.1, 4: 1.35, 2: 2.0, 1: 3.0}
"""Loss by narrow accesses: more requests for the same bytes (estimate)."""
SHORT_SEGMENT = 1.14
"""Loss where neighbouring threads read 64 bytes of a row, half of a line."""
APART = 0.02
"""Loss for each doubling of the warps that read other rows at the same time: gate and up of one
row took 40.4 us with all warps of a block on the same two columns, 42.6 with pairs of warps and
46.8 with four warps on columns of their own (H200, 2026-11-20)."""
SHARED = 2.29e-07
"""Seconds that warps which share a sum wait for each other."""
ROWS = 0.407
"""Instructions for each element of a row that a thread reads on CUDA cores."""
OVERHEAD = 2
"""Instructions of a step beside those for each weight: addresses, loop."""
UNEVEN_WORK = 0.347
"""The same share of the arithmetic that the fullest multiprocessor has above the mean."""
RING = 1.15
"""Cost of a ring: two steps in flight hide less than registers do where these suffice."""


def skinny_ranked(
    contraction: Contraction, hw: HardwareProfile, policy: Policy | None = None
) -> list[tuple[float, SkinnyConfig]]:
    """Predicted seconds of a launch and configurations, the fastest first.

    Parameters
    ----------
    contraction : Contraction
        Static, at most 16 rows.
    hw : HardwareProfile
        A CUDA device of compute capability 8.0 or later.
    policy : Policy, optional
        Not needed: sums run in float32 always.

    Raises
    ------
    Unsupported
        For any other contraction.
    """
    check_problem(contraction, hw)
    contraction = paired(contraction)
    layouts = Layouts(contraction)
    tensor = tensor_dtype(contraction)
    found = [
        (_seconds(contraction, layouts, config, hw), config)
        for config in candidates(contraction, hw, layouts, tensor)
    ]
    if not found:
        raise Unsupported("no division of the columns and the sum fits the device")
    return sorted(found, key=lambda entry: entry[0])


def _seconds(
    contraction: Contraction, layouts: Layouts, config: SkinnyConfig, hw: HardwareProfile
) -> float:
    sms, size = hw.num_sms, bytes_of
    tiles = contraction.batch * sum(-(-s.N // config.block_n) for s in contraction.segments)
    per_sm = tiles / sms
    waves = math.ceil(per_sm / _resident_blocks(contraction, config, hw))
    piece, count = layouts.accesses(config.steps, config.width)

    k = max(p.K for p in contraction.products)

    # The memory: every parameter once, of one with symbolic extents the rows that are read; short
    # segments and uneven blocks lose some of the rate.
    side = MMA_ROWS if config.tensor else config.lanes
    lanes = side if config.width > 1 else MMA_LANES if config.tensor else WARP
    loss = NARROW[piece] * (SHORT_SEGMENT if piece * lanes < 128 else 1.0)
    if config.width == 1 and not config.tensor:
        loss *= 1 + APART * math.log2(config.warps_n)
    sizes = ((p.elements, size(p.dtype)) for p in contraction.params if p.shape)
    read = contraction.batch * contraction.M * k
    total = sum((n if isinstance(n, int) else read) * each for n, each in sizes)
    uneven = math.ceil(per_sm) / per_sm - 1
    memory = total / (hw.hbm_bytes_per_s * READS) * loss * (1 + UNEVEN * uneven)

    # The L2: each tile of columns reads all rows.
    rows = tiles * contraction.M * k * 2
    l2 = (total + rows) / (hw.l2_bytes_per_s * L2_SHARE)

    # A thread's batches of loads, one after the other.
    along = 1 if config.tensor else WARP // config.lanes
    steps = max(1.0, k / config.run / (config.warps_k * along))
    products = max(len(s.products) for s in contraction.segments)
    loads = config.runs * products * count
    if config.tensor:  # each thread reads its run of a row too, two bytes a term
        loads += -(-contraction.M // 8) * max(1.0, config.steps / 8)
    ahead = config.stages or min(config.unroll, LOADS / loads)
    latency = (max(1.0, steps / ahead) * TRIP + TURN) * waves

    issue = hw.fma_per_s_f32 / 2 * ISSUE * min(1.0, per_sm * config.threads / WARP / 4)
    work = _instructions(contraction, layouts, config) / issue * (1 + UNEVEN_WORK * uneven)
    busy = sum(t**POWER for t in (memory, l2, latency, work)) ** (1 / POWER)
    start = hw.kernel_gap_us * 1e-6 + START + (SHARED if config.warps_k > 1 else 0.0)
    # Sums meet in shared memory: a thread adds up one element of each share.
    each = -(-contraction.M * config.block_n // config.threads)
    start += hw.barrier_s + each * config.warps_k * 5e-9
    if not config.tensor:
        sums = config.columns * config.width * contraction.M * products
        start += math.log2(along) * sums * 2e-9
    return (start + busy) * (RING if config.stages else 1.0)


def _resident_blocks(contraction: Contraction, config: SkinnyConfig, hw: HardwareProfile) -> int:
    """Blocks that a multiprocessor holds at once, by threads, registers and shared memory."""
    by_registers = hw.registers_per_sm // (_registers(contraction, config) * config.threads)
    by_smem = hw.smem_per_sm_bytes // (config.smem_bytes(contraction) + 1024)
    by_threads = hw.max_threads_per_sm // config.threads
    return max(1, min(by_registers, by_smem, by_threads, hw.max_blocks_per_sm))


def _registers(contraction: Contraction, config: SkinnyConfig) -> int:
    """Registers of a thread, as ptxas gives them to most (16 kernels on tensor cores)."""
    if not config.tensor:
        return 40
    rows = -(-contraction.M // 8)
    return 14 + 16 * rows + (6 + 8 * rows) * config.columns


def _instructions(contraction: Contraction, layouts: Layouts, config: SkinnyConfig) -> float:
    """Instructions of all threads together."""
    total = 0.0
    points = config.steps * config.width
    tensor = config.tensor
    numbers = iter(layouts.values(config.steps, config.width, tensor))
    costs = iter(layouts.conversions(config.steps, config.width, tensor))
    for s in contraction.segments:
        for p in s.products:
            values, each = next(numbers), next(costs)
            weights = contraction.batch * s.N * p.K
            rows, left = contraction.M, layouts.left_operations(p)
            overhead = OVERHEAD / (config.runs * points)
            if tensor:
                tiles = -(-rows // 8)
                each += tiles * (0.25 + 0.5 * (1 + left) / config.columns)
            else:
                each += rows * (1 + (ROWS + left) / (config.columns * config.width))
            if any(values.step):
                each += rows / config.steps
            total += weights * (each + overhead)
    return total
