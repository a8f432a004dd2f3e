"""How the threads of a scan are laid out: along the columns of a row, and side by side over rows.

Where columns are neighbours in memory, the threads of a row are neighbours in a warp and take a
vector each. Where rows are, a thread takes a vector of rows at a run of columns, and its neighbours
further rows; the fewer rows there are, the more walkers share them. Where there are no vectors
along a row, or a few rows lie between each other, elements are computed as they lie in memory and
change hands in shared memory, where each thread scans consecutive columns. Long rows of which
there are too few to keep each multiprocessor busy are shared by several blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...config import HardwareProfile

WARP = 32
WIDEST_ACCESS = 16
BLOCK_THREADS = 256
"""Threads that share a row of which there are enough to fill the device."""
MANY_ROWS = 16
"""For each multiprocessor: so many have smaller blocks."""
FEWEST_THREADS = 128
"""Threads of a block, where short rows are gathered in one."""
BY_ELEMENTS = 4
"""Columns of a thread where rows have no vectors."""
RUN = 8
"""Columns of a thread where rows are neighbours."""
FEW_PARTS = 8
"""Partial results of its rows up to which each thread of a block looks at all of them."""
LINE = 128
"""Bytes that memory is best read in."""
_LINES = ((4, 4), (2, 4), (1, 0.7), (0.5, 0.7), (0.25, 0.6), (0.125, 0))
"""Lines of a block side by side, and for how many blocks a multiprocessor at least. These and the
threads of blocks are the fastest, or nearly, of 12 configurations each of 10 drawn programs (H200,
2026-11-27)."""
BLOCK_OF_WALKERS = 512
LONG = 1 << 14
"""Columns from which on blocks that are few share rows that are neighbours. An estimate."""
SHARED_TURNS = 4
"""Turns of one block from which on several share a row: a barrier of all blocks takes as long as
one or two (2 us a step of a recurrence on an H200)."""
SHARED_THREADS = 512
"""Of a block that shares a row in several turns: with 128 registers a thread."""
SHARED_BYTES = 128
"""Of a thread and turn then, so that there are few turns. An estimate."""
SHARED_ELEMENTS = 32
"""Of a thread and turn, where they are loaded one by one; half as many where each has a row of its
own (of 32, 512 threads spill 144 bytes each)."""
STAGED_BYTES = 64
"""Rows that are neighbours are scanned through shared memory if they have no more bytes."""


@dataclass(frozen=True, slots=True)
class ScanConfig:
    """How a scan is split over threads.

    Attributes
    ----------
    threads : that share a row; a power of two.
    rows : side by side in a block, `vector` each.
    width : consecutive columns of a thread in each turn.
    along : the threads of a row are neighbours; else the rows are.
    vector : neighbouring rows of a thread, loaded and stored together.
    staged : 0, or how many rows are neighbours in memory whose elements change hands in shared
        memory; 1 where columns are.
    runs : of `width` columns of a thread in each turn, each as far from the next as the threads of
        the row reach; more than 1 only in vectors along a row.
    blocks : that share a row, side by side in each turn.
    most : columns of the longest row where their number is symbolic; 0: any.
    """

    threads: int
    rows: int
    width: int
    along: bool
    vector: int = 1
    staged: int = 0
    runs: int = 1
    blocks: int = 1
    most: int = 0

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.threads * self.rows

    @property
    def chunk(self) -> int:
        """Columns of a run of a block."""
        return self.threads * self.width

    @property
    def turn(self) -> int:
        """Columns of a turn, of all blocks that share a row."""
        return self.chunk * self.runs * self.blocks

    @property
    def lines(self) -> int:
        """Runs of columns that a thread scans at once, each by itself."""
        return self.vector * self.runs

    @property
    def in_warp(self) -> int:
        """Threads of a row in a warp."""
        return min(self.threads, WARP if self.along else max(1, WARP // self.rows))

    @property
    def parts(self) -> int:
        """Partial results of a row that meet in shared memory."""
        return self.threads // self.in_warp

    @property
    def pitch(self) -> int:
        """Slots from the partial results of a row to those of the next: no multiple of 2."""
        return self.parts | 1

    @property
    def partials(self) -> int:
        """Slots of partial results in shared memory."""
        return self.rows * self.lines * self.pitch if self.parts > 1 else 0

    @property
    def staging(self) -> int:
        """Slots of elements in shared memory."""
        run = self.width * self.staged
        return self.block * (run | 1) // self.staged if self.staged else 0


@dataclass(frozen=True, slots=True)
class Shape:
    """What is scanned.

    Attributes
    ----------
    rows, columns : of the space.
    inner : elements from a column to the next; 1 where columns are neighbours, and more where
        rows are.
    beside : what the number of rows that are neighbours is known to be a multiple of.
    narrow : bytes of the smallest element.
    point : bytes that are read of a point.
    known : whether the number of rows is.
    """

    rows: int
    columns: int
    inner: int
    beside: int
    narrow: int
    point: int
    known: bool = True


def best_config(shape: Shape, hw: HardwareProfile) -> ScanConfig:
    """The best guess."""
    return configs(shape, hw)[0]


def configs(shape: Shape, hw: HardwareProfile) -> list[ScanConfig]:
    """Configurations, the best guess first."""
    found = []
    if is_staged(shape):
        found += _staged(shape, hw)
    found += _along(shape, hw) if shape.inner == 1 else _across(shape, hw)
    return list(dict.fromkeys(c for base in found for c in (*_shared(base, shape, hw), base)))


def _shared(config: ScanConfig, shape: Shape, hw: HardwareProfile) -> list[ScanConfig]:
    """What a configuration is with several blocks a row, all of which run at once."""
    groups = -(-shape.rows // (config.rows * config.vector))
    turns, most = -(-shape.columns // config.turn), hw.num_sms // groups
    if not shape.known or turns < SHARED_TURNS or most < 2:
        return []
    if turns <= most:
        return [replace(config, blocks=turns)]
    threads = config.threads
    while threads * config.rows > SHARED_THREADS:
        threads //= 2
    config = replace(config, threads=threads, blocks=most)
    needed = _power(-(-shape.columns // config.turn))
    if config.along and not config.staged:
        return [replace(config, runs=min(needed, SHARED_BYTES // (config.width * shape.narrow)))]
    most = SHARED_ELEMENTS // (2 if config.staged > 1 else 1)
    wider = min(needed, most // (config.width * config.vector))
    return [replace(config, width=config.width * wider)]


def is_staged(shape: Shape) -> bool:
    """Whether elements are to change hands in shared memory."""
    if shape.inner == 1:
        return shape.columns % BY_ELEMENTS != 0
    return shape.rows % shape.inner == 0 and shape.inner * shape.narrow <= STAGED_BYTES


def _along_width(shape: Shape) -> int:
    """Columns of a vector."""
    width = max(1, WIDEST_ACCESS // shape.narrow)
    while width > 1 and shape.columns % width:
        width //= 2
    return width


def _along(shape: Shape, hw: HardwareProfile) -> list[ScanConfig]:
    width = max(_along_width(shape), BY_ELEMENTS)
    most = _power(-(-shape.columns // width))
    usual = BLOCK_THREADS
    if shape.rows < hw.num_sms:
        usual = hw.max_threads_per_block
    elif width > BY_ELEMENTS and shape.rows >= MANY_ROWS * hw.num_sms:
        usual = BLOCK_THREADS // 2
    found = []
    for limit in (usual, BLOCK_THREADS, 2 * BLOCK_THREADS, BLOCK_THREADS // 2):
        threads = min(most, limit, hw.max_threads_per_block)
        side = max(1, FEWEST_THREADS // threads)
        found.append(ScanConfig(threads, side, width, along=True))
    return found


def _staged(shape: Shape, hw: HardwareProfile) -> list[ScanConfig]:
    inner = shape.inner
    width = RUN if inner == 1 and shape.narrow <= 4 else BY_ELEMENTS
    most = _power(-(-shape.columns // width))
    usual = BLOCK_THREADS if inner == 1 else 2 * BLOCK_THREADS
    if shape.rows < hw.num_sms * inner:
        usual = hw.max_threads_per_block
    found = []
    for limit in (usual, BLOCK_THREADS, 2 * BLOCK_THREADS):
        threads = min(most, max(1, _power(limit // inner + 1) // 2))
        groups = max(1, FEWEST_THREADS // (threads * inner))
        while groups * threads * inner % WARP:
            groups *= 2
        if groups * inner * threads <= hw.max_threads_per_block:
            found.append(ScanConfig(threads, groups * inner, width, along=True, staged=inner))
    return found


def _across(shape: Shape, hw: HardwareProfile) -> list[ScanConfig]:
    """Side by side as many threads as fill a line or several, fewer where that leaves
    multiprocessors idle; over each other as many as make a block that keeps one busy.
    """
    vector = next(v for v in (8 // shape.narrow, 2, 1) if v and shape.beside % v == 0)
    found = []
    for lines, fewest in _LINES:
        side = max(1, int(lines * LINE) // (vector * shape.narrow))
        side = min(side, _power(-(-shape.rows // vector)), 4 * WARP)
        blocks = -(-shape.rows // (side * vector))
        if shape.known and shape.columns >= LONG:
            blocks *= max(1, hw.num_sms // blocks)  # which share rows
        if blocks >= fewest * hw.num_sms and (lines <= 2 or vector == 1):
            found.append(_walkers(shape, hw, side, vector))
    return found


def _walkers(shape: Shape, hw: HardwareProfile, side: int, vector: int) -> ScanConfig:
    """A block of which a multiprocessor has several, or all of one."""
    several = -(-shape.rows // (side * vector)) > hw.num_sms
    wide = not several and shape.point > shape.narrow  # several tensors: fewer threads, longer runs
    block = BLOCK_OF_WALKERS if several or wide else hw.max_threads_per_block
    apart = several and vector == 1
    width = (WIDEST_ACCESS if apart else 2 * WIDEST_ACCESS) // (vector * shape.narrow)
    width = max(1, min(2 * width if wide else width, 2 * RUN))
    fewest = -(-WARP // side)
    threads = min(block // side, _power(-(-shape.columns // width)))
    return ScanConfig(max(fewest, threads), side, width, along=False, vector=vector)


def _power(number: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << max(0, number - 1).bit_length()
