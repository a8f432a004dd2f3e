"""Time of the Hopper GEMM, from plain numbers.

    T = start + (body^q + hbm^q + power^q)^(1/q) + exchange

    body   waves of tiles: steps x step + what shows of the epilogues
    step   the longest of what one step (128 bytes of K) costs a multiprocessor: its tensor cores,
           its port to the L2, its share of the L2, and the hand-over between warps
    hbm    operands, what the epilogue reads, and the outputs, once
    power  all operations at the rate that the whole card sustains, the same for large and small
           launches: work must not look cheaper for being divided among launches

The constants of `Coefficients` are fitted to times on an H200 (tests/data/gemm_sweep_h200.json) by
tests/fit_gemm_cost.py; rates of the device come from its profile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ....config import HardwareProfile
from ...group.traffic import clusters_on_device

# What a Hopper GEMM computes and how, as plain numbers for its cost model.

STEP_BYTES = 128
"""Bytes of a row of A or B in one step: a row of the 128-byte swizzle."""
LINE_BYTES = 128

# (rows, columns) of a tile in the order of their speed on large matrices (H200, 2026-11-20: two
# consumers on 128 x 256 with 4 stages are best; ping-pong 128 x 128 and clusters of 2 slower).
STAGED_TILES = (
    *((128, 256), (128, 192), (128, 128), (128, 64)),
    *((64, 256), (64, 192), (64, 128), (64, 64)),
)

# Waves of the largest tiles up to which others, stored from registers, may fill a wave better.
FEW_WAVES = 3

# Share of the places in all waves below which a grid counts as badly filled.
WELL_FILLED = 0.8

STRIPES = (1, 2, 4, 8, 16)
LARGE_ROWS = 2048
FEW_COLUMNS = 8
NEIGHBOURS = 32
ABOUT_EQUAL = 1.02


def stripe(tile: GemmTile, rows: int, columns: int, windows: bool) -> int:
    """Row tiles that share a column tile at one time, of `rows` x `columns` tiles; `windows` of a
    convolution are read.

    Of few columns the order in which blocks that start beside each other, `NEIGHBOURS` of them,
    read fewest different lines; of orders that read about as many the one of the lowest stripes
    (25088 x 256 x 512, 128 x 128: 13.3 us, and 15.1 in stripes of 16; 1568 x 512 x 2048, 128 x 64:
    9.3 and 11.6; H200, 2026-11-27). Of others 8, or 16 where rows are many; and one stripe of 9 to
    15 row tiles is better than one of 8 and a rest (777 x 1024 x 4096), where tiles are staged and
    not shared by blocks.
    """
    if not _has_few_columns(tile, columns, windows):
        whole = tile.staged and tile.split == tile.multicast == 1
        many = rows * tile.block_m >= LARGE_ROWS
        return 16 if many or (whole and 8 < rows < 16) else 8

    def lines(height: int) -> float:
        high = min(height, rows)
        if high * columns <= NEIGHBOURS:
            return min(rows, NEIGHBOURS / columns) * tile.block_m + columns * tile.block_n
        return high * tile.block_m + max(1.0, NEIGHBOURS / high) * tile.block_n

    read = [lines(height) for height in STRIPES]
    least = min(read)
    return next(h for h, n in zip(STRIPES, read, strict=True) if n <= ABOUT_EQUAL * least)


def _has_few_columns(tile: GemmTile, columns: int, windows: bool) -> bool:
    """Whether `stripe` gives the order in which neighbours read fewest lines; others were not
    measured in it, or are chosen worse.
    """
    return not windows and tile.split == 1 and columns <= FEW_COLUMNS


@dataclass(frozen=True, slots=True)
class GemmWork:
    """What a launch computes.

    Attributes
    ----------
    batch, m, k : sizes; all products share them.
    columns : N of each segment.
    dtype : of the operands, a key of the profile's `tensor_flop_per_s`.
    element_bytes : of an operand's element.
    products : that meet in each output (2: gate and up).
    a_whole_lines, b_whole_lines : rows of boxes start at multiples of 128 bytes.
    extra_bytes : read by the epilogue, beside the operands.
    written_bytes : of all outputs.
    operation_s : time that the whole device needs for the epilogue's operations on one element.
    resident_bytes : of all these, in the L2 already.
    single_stores : rows of outputs have an odd number of elements.
    residual : the epilogue reads a matrix of the output's shape.
    wide_stores : outputs have elements of 4 bytes.
    more_b_bytes : of B, where row tiles do not share one B.
    a_bytes : of A, where its rows lie over each other (a convolution's); None: they do not.
    computed_s : time that the whole device needs to compute one element of A, where it is computed
        on its way.
    """

    batch: int
    m: int
    columns: tuple[int, ...]
    k: int
    dtype: str = "float16"
    element_bytes: int = 2
    products: int = 1
    a_whole_lines: bool = True
    b_whole_lines: bool = True
    extra_bytes: float = 0.0
    written_bytes: float = 0.0
    operation_s: float = 0.0
    resident_bytes: float = 0.0
    more_b_bytes: float = 0.0
    single_stores: bool = False
    residual: bool = False
    wide_stores: bool = False
    a_bytes: float | None = None
    computed_s: float = 0.0

    @property
    def cells(self) -> int:
        """Elements of the outputs' index space."""
        return self.batch * self.m * sum(self.columns)

    @property
    def flops(self) -> float:
        """Operations of the products."""
        return 2.0 * self.batch * self.m * sum(self.columns) * self.products * self.k


@dataclass(frozen=True, slots=True)
class GemmTile:
    """How it is computed; see `HopperConfig`. `group_m`: 0 stands for that of `stripe`. `ahead`: a
    residual travels while the tile before is computed. `taps`: tiles of B in a step, `rim`: rows of
    A that come for each row of a tile. `streams`: each tile of B has a stage of its own.
    """

    block_m: int
    block_n: int
    stages: int = 4
    staged: bool = True
    deferred: bool = False
    group_m: int = 0
    split: int = 1
    multicast: int = 1
    ahead: bool = False
    taps: int = 1
    rim: float = 1.0
    streams: bool = False


TENSOR_CELLS = 32
"""Cells of a tile (rows x columns) whose step the tensor cores of a multiprocessor do in a cycle:
4,096 operations of float16, 2 x 64 for each cell; other dtypes have as many bytes a cycle."""
SUM_BYTES = 4
SHORT_GROUPS = 2
"""Groups of multiprocessors that hold one cluster of 4 or 8 blocks less than others: 16 clusters
of 8 and 32 of 4 take two rounds on an H200 (2026-11-20), 12 and 30 one."""
DIRECT_ROWS = 64
"""Rows up to which stores from registers take no longer: other blocks do not wait for them."""
BOX_COLUMNS = 64
CONSUMER_ROWS, THREADS = 64, 128
"""Rows and threads of a consumer warpgroup; a multiprocessor has as many lanes."""
ELEMENT_INSTRUCTIONS = 3
"""Of each element of an A that is computed, beside its function: fragments from shared memory,
widening, rounding to halves, vectors of the terms."""
CYCLES_OF_INSTRUCTION = 2
"""Of one warp on each scheduler, whose 16 words of a step do not wait for each other."""


def element_seconds(hw: HardwareProfile) -> float:
    """Time that the whole device needs for an element of a computed A, beside its function."""
    return ELEMENT_INSTRUCTIONS * 2 / hw.fma_per_s_f32


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Constants of the model: fitted, but that of residuals and those of multicast are what pairs
    of kernels differ by, and the last is not measured.
    """

    start_s: float = 2.04e-6  # launch, tensor maps, the first loads, the last stores
    step_s: float = 1.06e-7  # a step between producer and consumer, whatever it holds
    single_step_s: float = 1.39e-7  # the same with one consumer of 64 x 64 that defers nothing
    tensor_clock: float = 0.918  # clock while tensor cores work, of the highest
    port_bytes_per_s: float = 1.55e11  # from the L2 into one multiprocessor
    split_port_bytes_per_s: float = 8.12e10  # where rows of boxes straddle lines
    same_rows: float = 0.385  # of A's bytes that the L2 serves: see `_shared`
    other_rows: float = 0.714
    near_columns: float = 0.336  # of B's bytes that the L2 serves, neighbours reading the same
    split_lines: float = 0.967  # of both, where rows of boxes straddle lines
    split_terms: float = 0.767  # of both, where neighbours read other terms of the same tile
    epilogue_bytes_per_s: float = 8.87e10  # of outputs and what they read, by a multiprocessor
    direct_store: float = 6.83  # how much longer stores from registers take
    wide_direct_store: float = 2.9  # the same of float32 (8192 x 8192 x 1024, 16384 x 768 x 1024)
    single_store: float = 8.95  # the same of odd row pitches, in whole boxes
    element_s: float = 5.41e-9  # of a thread's epilogue for each of its elements
    operation_latency: float = 4.36  # of its operations, beside a thread that never waits
    residual_s: float = 2e-7  # until a residual is there
    deferred_epilogue: float = 1.24  # how much longer all that takes between steps
    hidden: float = 0.148  # of a tile's steps, behind which the epilogue of the one before hides
    hbm_share: float = 1.19  # of the copy rate: reading alone is faster
    lasting_flops: float = 1.31  # of the measured rate of tensor cores
    multicast_flops: float = 0.995  # its share where blocks wait for one another
    narrow_multicast_flops: float = 0.838  # the same with 64 rows a block
    exponent: float = 3
    pair_bytes_per_s: float = 2.08e10  # of sums from each block to the other of a cluster of two
    exchange_bytes_per_s: float = 1.55e10  # from each block of a larger cluster
    network_bytes_per_s: float = math.inf  # from all blocks of larger clusters at once
    exchange_s: float = 5.33e-9  # for each block of the cluster, beside that
    multicast_s: float = 3.5e-7  # start and end of blocks that wait for one another
    smem_bytes_per_cycle: float = math.inf  # of a multiprocessor; the sweep of GEMMs shows no limit
    cached_columns: float = 0.75  # of the L2 that keeps B while stripes of row tiles pass


FITTED = Coefficients()

WINDOWS = Coefficients(
    start_s=3.06e-6,
    step_s=1.29e-7,
    single_step_s=1.39e-7,
    port_bytes_per_s=1.62e11,
    same_rows=1.125,
    near_columns=0.363,
    tensor_clock=1.024,
    epilogue_bytes_per_s=3.7e10,
    element_s=1.38e-9,
    operation_latency=1.09,
    deferred_epilogue=2.256,
    hidden=0.037,
    lasting_flops=1.092,
    direct_store=3.87,
    exchange_s=3.93e-10,
    pair_bytes_per_s=3.45e10,
    exchange_bytes_per_s=1.71e11,
    network_bytes_per_s=2.41e12,
    residual_s=1.12e-7,
    split_terms=0.35,
    hbm_share=0.957,
    smem_bytes_per_cycle=128,
)
"""Of convolutions, whose A comes in boxes of windows: fitted to tests/data/conv_sweep_h100.json,
and what clusters share and exchange to conv_sweep_h200.json. Tall tiles of few columns wait for
shared memory, large tiles of large clusters for the way between multiprocessors."""

ROWS_IN_STEP = (1, 2, 4, 8)


def _in_step(rows: int) -> bool:
    """Whether blocks of equal rows sit where the L2 serves them at once, with so many row tiles in
    a stripe. With 3, 5, 7 or 16 the same tile takes 1.5 times as long where the L2 is the limit
    (128 x 64 and smaller; the order in which the device places blocks repeats every 8), but one
    stripe of 9 to 15 is better than one of 8 and the rest (777 x 1024 x 4096: 13.6 us for 15.1).
    """
    return rows in ROWS_IN_STEP or 8 < rows < 16


@dataclass(frozen=True, slots=True)
class GemmTime:
    """Predicted seconds of a launch and its terms, each alone."""

    seconds: float
    terms: Mapping[str, float] = field(hash=False)


def gemm_time(
    work: GemmWork, tile: GemmTile, hw: HardwareProfile, fitted: Coefficients | None = None
) -> GemmTime:
    """Predicted time of one launch.

    Parameters
    ----------
    work : GemmWork
    tile : GemmTile
    hw : HardwareProfile
        A Hopper device.
    fitted : Coefficients, optional
        By default those of the kind of A.
    """
    return _Model(work, tile, hw, fitted or _fitted(work)).time()


def gemm_seconds(
    work: GemmWork, tile: GemmTile, hw: HardwareProfile, known_s: float = math.inf
) -> float:
    """The seconds of `gemm_time` alone, where many tiles are compared; infinity where the steps by
    themselves take what another one is known to.
    """
    model = _Model(work, tile, hw, _fitted(work))
    return math.inf if model.least_s >= known_s else model.found().seconds


def _fitted(work: GemmWork) -> Coefficients:
    return FITTED if work.a_bytes is None else WINDOWS


class _Found(NamedTuple):
    """Seconds of a launch; its waves, a step of a whole one and of the last, and what else takes
    time, by name.
    """

    seconds: float
    waves: int
    whole: dict[str, float]
    last: dict[str, float]
    others: dict[str, float]


class _Model:
    def __init__(
        self, work: GemmWork, tile: GemmTile, hw: HardwareProfile, fitted: Coefficients
    ) -> None:
        self.work, self.tile, self.hw, self.fitted = work, tile, hw, fitted
        self.out_n = tile.block_n // work.products
        self.rows = -(-work.m // tile.block_m)
        self.columns = sum(-(-n // self.out_n) for n in work.columns)
        self.tiles = self.rows * self.columns * work.batch
        windows = work.a_bytes is not None
        best = stripe(tile, self.rows, self.columns, windows)
        self.group_m = tile.group_m or best
        few = _has_few_columns(tile, self.columns, windows)
        self.shares_most = few and self.group_m == best
        cluster = tile.split * tile.multicast
        clusters = clusters_on_device(cluster, 1, hw)
        if cluster > 2:
            clusters -= SHORT_GROUPS
        self.places = tile.multicast * max(1, clusters)
        self.blocks = min(self.tiles, self.places)
        steps = -(-work.k * work.element_bytes // STEP_BYTES)
        self.steps = -(-steps // tile.split)

    def time(self) -> GemmTime:
        """The predicted time, with its terms."""
        seconds, waves, whole, last, others = self.found()
        terms = {n: self.steps * ((waves - 1) * whole[n] + last[n]) for n in whole}
        shown = {name: seconds for name, seconds in (terms | others).items() if seconds > 0}
        return GemmTime(seconds, shown)

    @cached_property
    def _body(self) -> tuple[int, dict[str, float], dict[str, float], float, float]:
        """Waves, a step of a whole one and of the last, the longest of the former, and seconds of
        all steps.
        """
        waves = -(-self.tiles // self.blocks)
        last = self.tiles - (waves - 1) * self.blocks
        whole = rest = self._step()
        step = last_step = _longest(whole)
        if last != self.blocks:
            rest = {**whole, "l2": self._l2(last)}
            last_step = _longest(rest)
        return waves, whole, rest, step, self.steps * ((waves - 1) * step + last_step)

    @property
    def least_s(self) -> float:
        """No more than the predicted time: without epilogues and exchanges."""
        return self.fitted.start_s + self._body[-1]

    def found(self) -> _Found:
        """The predicted time, and what it is made of."""
        f, work = self.fitted, self.work
        waves, whole, rest, step, body = self._body
        epilogue = self._epilogue()
        shown = epilogue
        if self.tile.deferred:
            shown = max(0.0, epilogue - f.hidden * self.steps * step)
        epilogue += (waves - 1) * shown
        hbm = self._bytes() / (self.hw.hbm_bytes_per_s * f.hbm_share)
        operations, power = work.operation_s * work.cells, self._power()
        exchange = self._exchange() + (f.multicast_s if self.tile.multicast > 1 else 0.0)
        longest = [body + epilogue, hbm, power, operations]
        seconds = f.start_s + _norm(longest, f.exponent) + exchange
        others = {"epilogue": epilogue, "hbm": hbm, "power": power, "exchange": exchange}
        others |= {"operations": operations, "start": f.start_s}
        return _Found(seconds, waves, whole, rest, others)

    def _step(self) -> dict[str, float]:
        """Seconds of one step while all places have a tile, by what limits it."""
        f, t, work = self.fitted, self.tile, self.work
        a, b = self._boxes()
        port = 0.0
        for size, whole, shared in (
            (a, work.a_whole_lines, 1),
            (b, work.b_whole_lines, t.multicast),
        ):
            # the rows that straddle lines cost whoever asks for them, not whoever receives them
            own = size / shared / f.split_port_bytes_per_s
            port += size / f.port_bytes_per_s if whole else max(own, size / f.port_bytes_per_s)
        single = t.block_m == 64 and t.block_n == 64 and not t.deferred and t.split == 1
        clock = self.hw.clock_ghz * 1e9 * f.tensor_clock
        stages, latency = t.taps if t.streams else 1, self.hw.l2_latency_s / t.stages
        return {
            "step": stages * max(f.single_step_s if single else f.step_s, latency),
            "tensor": t.block_m * t.block_n * t.taps / TENSOR_CELLS / clock,
            "port": port,
            "smem": self._shared_memory() / (clock * f.smem_bytes_per_cycle),
            "computed": self._computed(),
            "l2": self._l2(self.blocks),
        }

    def _l2(self, tiles: int) -> float:
        """Seconds of the L2 in a step while so many tiles are under way."""
        return tiles * self.tile.split * self._served / self.hw.l2_bytes_per_s

    @cached_property
    def _served(self) -> float:
        """Bytes of a tile's step that the L2 itself has to serve."""
        (a, b), (from_a, from_b) = self._boxes(), self._shared()
        return a * from_a + b * from_b

    def _boxes(self) -> tuple[float, int]:
        """Bytes of A and of B that a tile takes in a step."""
        t = self.tile
        return self._rows_of_box() * STEP_BYTES * t.rim, t.block_n * STEP_BYTES * t.taps

    def _computed(self) -> float:
        """Seconds in which consumers compute A, each its rows: for each tap or, where all read the
        same box, with its rim.
        """
        rows = CONSUMER_ROWS * (self.tile.rim if self.tile.streams else self.tile.taps)
        elements = rows * STEP_BYTES / self.work.element_bytes
        turns = max(CYCLES_OF_INSTRUCTION, self.tile.block_m / CONSUMER_ROWS)
        return self.work.computed_s * elements * self.hw.num_sms * turns

    def _shared_memory(self) -> float:
        """Bytes that pass shared memory in a step: each consumer reads its rows and all columns."""
        t = self.tile
        read = t.block_m // CONSUMER_ROWS * (CONSUMER_ROWS + t.block_n) * t.taps
        return float((read + t.block_m * t.rim + t.block_n * t.taps) * STEP_BYTES)

    def _rows_of_box(self) -> int:
        return min(self.tile.block_m, -(-self.work.m // 8) * 8)

    def _shared(self) -> tuple[float, float]:
        """Shares of A's and B's bytes that the L2 itself has to serve: blocks that read the same
        line at the same time get it together. Neighbours share columns.
        """
        f, t = self.fitted, self.tile
        if self.shares_most:
            from_a = f.same_rows if self.columns > 1 else 1.0
            from_b = f.near_columns if self.rows > 1 else 1.0
        else:
            from_a, from_b = self._shared_otherwise()
        if t.split > 1:
            from_a, from_b = max(from_a, f.split_terms), max(from_b, f.split_terms)
        from_a = from_a if self.work.a_whole_lines else f.split_lines
        from_b = from_b if self.work.b_whole_lines else f.split_lines
        return from_a, from_b / t.multicast

    def _shared_otherwise(self) -> tuple[float, float]:
        """The same in other orders than that of few columns."""
        f = self.fitted
        whole, rest = divmod(self.rows, self.group_m)
        from_a = from_b = 0.0
        for rows, share in ((self.group_m, whole * self.group_m), (rest, rest)):
            if share:
                same = f.same_rows if _in_step(rows) else f.other_rows
                from_a += share / self.rows * (same if self.columns > 1 else 1.0)
                from_b += share / self.rows * (f.near_columns if rows > 1 else 1.0)
        return from_a, from_b

    def _epilogue(self) -> float:
        """Seconds of a tile's epilogue: what it moves, and what each thread does to its elements,
        one after the other.
        """
        f, t, work = self.fitted, self.tile, self.work
        share = t.block_m * self.out_n / t.split / work.cells
        moved = share * (work.extra_bytes + work.written_bytes) / f.epilogue_bytes_per_s
        if not t.staged and work.m > DIRECT_ROWS:
            direct = f.wide_direct_store if work.wide_stores else f.direct_store
            moved *= self._by_rows() if work.single_stores else direct
        lanes = THREADS * self.hw.num_sms  # one thread of each multiprocessor's lanes
        operations = work.operation_s * lanes * f.operation_latency
        elements = CONSUMER_ROWS * self.out_n / t.split / THREADS
        waiting = f.residual_s if work.residual and not t.ahead else 0.0
        computed = elements * (f.element_s + operations) + waiting
        return moved + computed * (f.deferred_epilogue if t.deferred else 1.0)

    def _by_rows(self) -> float:
        """How much longer a tile's rows of odd length take. Those of halves leave through boxes, of
        which a part takes as long as a whole one (1500 x 4099 x 256 in tiles of 128 x 96: 25 us on
        an H200, of 128 x 128: 16; 1024 x 50257 x 768: 188 and 152).
        """
        if self.work.wide_stores:
            return self.fitted.single_store
        columns = self.out_n // self.tile.split
        return self.fitted.single_store * -(-columns // BOX_COLUMNS) * BOX_COLUMNS / columns

    def _bytes(self) -> float:
        """Bytes between memory and the L2: B again for each stripe of row tiles if it is large."""
        work = self.work
        b = work.batch * sum(work.columns) * work.products * work.k * work.element_bytes
        if b / work.batch > self.fitted.cached_columns * self.hw.l2_bytes:
            b *= -(-self.rows // self.group_m)
        a = work.a_bytes
        if a is None:
            a = work.batch * work.m * work.k * work.element_bytes
        b += work.more_b_bytes
        read = max(0.0, a + b + work.extra_bytes - work.resident_bytes)
        return read + work.written_bytes

    def _power(self) -> float:
        f, t = self.fitted, self.tile
        terms = self.steps * t.split * t.taps * STEP_BYTES / self.work.element_bytes
        flops = 2.0 * self.tiles * t.block_m * t.block_n * terms
        rate = self.hw.tensor_flop_per_s[self.work.dtype]
        if t.multicast > 1:
            rate *= f.multicast_flops if t.block_m > 64 else f.narrow_multicast_flops
        return flops / (rate * f.lasting_flops)

    def _exchange(self) -> float:
        """Seconds in which the blocks of a cluster add up their sums."""
        f, t = self.fitted, self.tile
        if t.split == 1:
            return 0.0
        # each block keeps its share of the columns
        sent = t.block_m * t.block_n * SUM_BYTES * (t.split - 1) / t.split
        waves = -(-self.tiles // self.blocks)
        if t.split == 2:
            return f.exchange_s * t.split + waves * sent / f.pair_bytes_per_s
        together = self.tiles * t.split * sent / f.network_bytes_per_s
        return f.exchange_s * t.split + max(waves * sent / f.exchange_bytes_per_s, together)


def _longest(step: Mapping[str, float]) -> float:
    """Seconds of a step: of what takes longest, and of computing A.

    Consumers compute while others' wgmmas run, but all of it shows: 81 kernels on an H200
    (2026-11-27, `tests/data/prologue_sweep_h200.json`) are predicted with a median error of 8 % so.
    """
    others = max(step["step"], step["tensor"], step["port"], step["smem"], step["l2"])
    return step["computed"] + others


def _norm(values: list[float], exponent: float) -> float:
    largest = max(values)
    return largest * sum([(v / largest) ** exponent for v in values]) ** (1 / exponent)
