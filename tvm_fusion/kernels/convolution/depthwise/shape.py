"""A configuration for a convolution: what a thread, a block and a launch have of everything."""

from __future__ import annotations

import math
from functools import cache

from ....config import HardwareProfile
from ....errors import Unsupported
from .config import DepthwiseConfig
from .problem import Numbers
from .reads import reach_of

MOST_UNROLLED = 1600
"""Multiplications of a row's code; with more of them outer taps and channels are a loop."""

MOST_RAMPED = 7
"""Rows of results in whose ramps sums stay in registers: with 11, nvcc spills 3 KB of them."""


class Roles:
    """Which window of a convolution is which, where rows roll or not."""

    def __init__(self, numbers: Numbers, rolls: bool) -> None:
        self.numbers, self.rolls = numbers, rolls
        self.columns = numbers.window(numbers.columns)
        self.row_window = numbers.rows(rolls)
        self.rows = numbers.window(self.row_window)
        all_windows = range(len(numbers.windows))
        self.outer = [i for i in all_windows if i not in (numbers.columns, self.row_window)]
        self.places = [numbers.windows[i].size for i in self.outer]
        self.outer_taps = math.prod(numbers.windows[i].taps for i in self.outer)
        self.reach = cache(lambda columns: reach_of(numbers, columns))


class Shape:
    """A configuration for a convolution: what there is of everything."""

    def __init__(self, roles: Roles, config: DepthwiseConfig) -> None:
        numbers = roles.numbers
        self.numbers, self.config = numbers, config
        self.columns, self.rows, self.row_window = roles.columns, roles.rows, roles.row_window
        self.outer, self.places, self.outer_taps = roles.outer, roles.places, roles.outer_taps
        self.reach = roles.reach(config.columns)
        # Filters of each of a thread's channels.
        self.each = config.filters // config.channels if numbers.is_depthwise else config.filters
        self.alive = self.rows.alive
        self.units = min(self.rows.stride, self.rows.taps)
        self.chunks = 1 if numbers.is_depthwise else numbers.channels // config.channels
        terms = config.filters * (1 if numbers.is_depthwise else config.channels)
        self.fmas = self.rows.taps * self.columns.taps * config.columns * terms
        parts = self.chunks * self.outer_taps
        self.unrolled = parts * self.fmas <= MOST_UNROLLED and not (
            parts > 1 and parts * self.units * config.columns > 40
        )
        self.turns = 1 if self.unrolled else parts
        self.strips = -(-self.columns.positions // config.columns)
        self.bands = -(-self.rows.positions // config.rows)
        self.tasks_of_place = self.strips * self.columns.phases * self.bands * self.rows.phases
        self.tasks = self.tasks_of_place * math.prod(self.places)
        self.filters = numbers.groups * numbers.filters
        self.lanes = self.filters // config.filters
        self.taps = numbers.channels * self.outer_taps * self.rows.taps * self.columns.taps

    @property
    def ramps(self) -> bool:
        """Whether the first and the last rows of the data have code of their own."""
        return self.numbers.is_depthwise and 1 < self.alive <= MOST_RAMPED and self.turns == 1

    @property
    def pitch(self) -> int:
        """Numbers between the taps of a block's weights in shared memory."""
        return self.config.lanes * self.config.filters + 4

    @property
    def is_staged(self) -> bool:
        """Whether weights go through shared memory: those of neighbouring filters, whose taps may
        lie side by side, are read in the order in which they lie.
        """
        return self.config.shared or (self.numbers.along_channels and self.config.lanes > 1)

    @property
    def shared_bytes(self) -> int:
        """Of a block's weights."""
        return 4 * self.taps * self.pitch if self.is_staged else 0

    def check(self, hw: HardwareProfile) -> None:
        """Raises `Unsupported` where the configuration does not suit the convolution."""
        c, n = self.config, self.numbers
        if n.is_depthwise:
            fits = n.groups % c.channels == 0 and c.filters % c.channels == 0
            fits = fits and (
                self.each == n.filters or (c.channels == 1 and n.filters % self.each == 0)
            )
        else:
            fits = n.channels % c.channels == 0 and n.filters % c.filters == 0
        if not fits or (n.along_channels and n.width % c.channels):
            raise Unsupported(f"{c.channels} channels and {c.filters} filters a thread")
        if self.turns > 1 and not c.shared:
            raise Unsupported("taps of a loop in registers")
        if self.shared_bytes > hw.smem_per_block_bytes:
            raise Unsupported(f"{self.taps} taps of {c.lanes} threads in shared memory")
        if c.threads > hw.max_threads_per_block:
            raise Unsupported(f"blocks of {c.threads} threads")
