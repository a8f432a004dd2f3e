"""How the threads of a scan are laid out: along the columns of a row, and side by side over rows.

Where columns are neighbours in memory, the threads of a row are neighbours in a warp and take a
vector each. Where rows are, the lanes of a warp take 32 rows, and each thread a run of columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...config import HardwareProfile

WARP = 32
WIDEST_ACCESS = 16
BLOCK_THREADS = 256
"""Threads that share a row of which there are enough to fill the device."""
FEWEST_THREADS = 128
"""Threads of a block, where short rows are gathered in one."""
BY_ELEMENTS = 4
"""Columns of a thread where rows have no vectors."""
RUN = 8
"""Columns of a thread where rows are neighbours."""
WALKERS = 16


@dataclass(frozen=True, slots=True)
class ScanConfig:
    """How a scan is split over threads.

    Attributes
    ----------
    threads : that share a row; a power of two.
    rows : side by side in a block; a power of two.
    width : consecutive columns of a thread in each turn.
    along : the threads of a row are neighbours; else the rows are.
    """

    threads: int
    rows: int
    width: int
    along: bool

    @property
    def chunk(self) -> int:
        """Columns of a turn."""
        return self.threads * self.width

    @property
    def partials(self) -> int:
        """Partial results that meet in shared memory."""
        if not self.along:
            return self.threads * self.rows if self.threads > 1 else 0
        return self.rows * self.threads // WARP if self.threads > WARP else 0


def best_config(
    rows: int, columns: int, contiguous: bool, narrow: int, hw: HardwareProfile
) -> ScanConfig:
    """The best guess; `narrow` are the bytes of an element."""
    return configs(rows, columns, contiguous, narrow, hw)[0]


def configs(
    rows: int, columns: int, contiguous: bool, narrow: int, hw: HardwareProfile
) -> list[ScanConfig]:
    """Configurations, the best guess first."""
    make = _along if contiguous else _across
    return list(dict.fromkeys(make(rows, columns, narrow, hw)))


def _along(rows: int, columns: int, narrow: int, hw: HardwareProfile) -> list[ScanConfig]:
    width = max(1, WIDEST_ACCESS // narrow)
    while width > BY_ELEMENTS and columns % width:
        width //= 2
    most = _power(-(-columns // width))
    usual = hw.max_threads_per_block if rows < hw.num_sms else BLOCK_THREADS
    found = []
    for limit in (usual, BLOCK_THREADS, 2 * BLOCK_THREADS, BLOCK_THREADS // 2):
        threads = min(most, limit, hw.max_threads_per_block)
        side = max(1, FEWEST_THREADS // threads)
        found.append(ScanConfig(threads, side, width, along=True))
    return found


def _across(rows: int, columns: int, narrow: int, hw: HardwareProfile) -> list[ScanConfig]:
    most = _power(-(-columns // RUN))
    side = min(WARP, _power(rows))
    few = rows < 2 * WARP * hw.num_sms
    found = []
    for limit in (2 * WALKERS if few else WALKERS, WALKERS, 2 * WALKERS, WALKERS // 2):
        threads = min(most, limit, hw.max_threads_per_block // side)
        found.append(ScanConfig(threads, side, RUN, along=False))
    return found


def _power(number: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << max(0, number - 1).bit_length()
