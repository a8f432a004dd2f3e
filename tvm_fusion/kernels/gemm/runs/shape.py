"""Configurations of the kernel for runs, and what lies where in shared memory."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from tvm import tirx

from ....config import HardwareProfile
from ....errors import Unsupported
from ...gpu.product_frame import ceil_div
from ...program.expr import HALF_DTYPES, constant, convert
from ...program.program import Extent
from ..mma.plan import TERM_BYTES, WarpTiles
from ..mma.problem import PIECE
from ..mma.units import CHUNK
from .problem import OCTET, Runs

STAGES = 2
"""Patches of data in shared memory: one is multiplied while the next one comes in."""

ELEMENT = 2
"""Bytes of a half."""

OTHER_REGISTERS, MOST_REGISTERS = 36, 240
"""Of a thread, beside its sums and fragments, and in all (nvcc 13.0: those of 31 kernels are up to
60 less or 10 more than the estimate, and one of 244 spills).
"""


@dataclass(frozen=True, slots=True)
class RunsConfig(WarpTiles):
    """How a block works: its tile has `columns` neighbouring positions of each line of them.

    Attributes
    ----------
    columns : int
        A power of two, 8 or more, that divides `block_m`.
    """

    columns: int = 8


class Shape:
    """A configuration for a problem: what there is of everything.

    Runs that lie over each other are copied with their line, as they lie in memory. Others, if they
    are whole pieces of 16 bytes, are put at distances at which eight of them meet all banks.

    Attributes
    ----------
    first, front : int
        Elements of a line: where copies start, of a tile at position 0, and how far behind that
        its first run does.
    lead : int
        Terms in front of each run, with weights of zero, so that it starts at a whole word.
    shifted : bool
        Whether every other run starts within a word.
    distance : int
        Elements between the runs of neighbouring positions in shared memory.
    pieces : int
        Copies of a line.
    pitch : int
        Elements between lines in shared memory.
    linear : bool
        Whether weights are copied as they lie in memory, and read word by word.
    weights_shifted : bool
        Whether those of every other filter start within a word then.
    spans : dict of int to int
        Elements of a patch along each of the other windows, by its number.
    """

    def __init__(self, problem: Runs, config: RunsConfig) -> None:
        p, c = problem, config
        self.problem, self.config = p, c
        self.rows = max(1, c.block_m // c.columns)
        self.first = p.first // p.piece * p.piece
        self.front = p.first - self.first
        self.shifted = not p.apart and p.step % 2 == 1
        self.lead = 0 if self.shifted else self.front % 2
        self.octets = -(-(self.lead + p.run) // OCTET)
        self.distance = p.step
        if p.apart:
            self.distance = (self.octets | 1) * OCTET
            self.pieces, self.pitch = c.columns * self.octets, c.columns * self.distance
        else:
            reach = self.front + (c.columns - 1) * p.step
            self.pieces = -(-(reach + p.run) // p.piece)
            width = max(reach - self.lead + self.octets * OCTET + 2, self.pieces * p.piece)
            self.pitch = -(-width // OCTET) * OCTET
        self.spans = {
            i: (self.extent(i) - 1) * p.windows[i].stride + p.windows[i].reach + 1 for i in p.others
        }
        self.patch_lines = p.planes * math.prod(self.spans.values())
        self.steps = -(-p.lines * self.octets // 2)
        self.linear = p.weight_step > 0 and not p.weights_apart
        self.weights_shifted = self.linear and p.weight_step % 2 == 1
        self.weight_pitch = self.steps * TERM_BYTES + CHUNK  # an odd number of chunks
        self.tiles = {i: ceil_div(w.size, self.extent(i)) for i, w in enumerate(p.windows)}
        self.column_tiles = -(-int(p.segment.N) // c.block_n)

    def extent(self, window: int) -> int:
        """Positions of a tile along a window."""
        if window == self.problem.inner:
            return self.config.columns
        return self.rows if window == self.problem.below else 1

    @property
    def row_tiles(self) -> Extent:
        """Tiles of all positions."""
        return math.prod(self.tiles.values())

    def line_offsets(self) -> list[int]:
        """Where in a patch each line of a tile's first row is: its number."""
        p = self.problem
        digits = [range(p.planes)]
        for i in p.others:
            w = p.windows[i]
            at = [abs(w.dilation) * tap for tap in range(w.taps)]
            digits.append(at if w.dilation > 0 else at[::-1])
        found = []
        for at in itertools.product(*digits):
            line = 0
            for size, digit in zip((p.planes, *self.spans.values()), at, strict=True):
                line = line * size + digit
            found.append(line)
        return found

    @property
    def stage_bytes(self) -> int:
        """Of a patch."""
        return self.patch_lines * self.pitch * ELEMENT

    @property
    def weight_bytes(self) -> int:
        """Of the weights of a block's filters."""
        if self.linear:
            last = (self.config.block_n - 1) * self.problem.weight_step + self.octets * OCTET + 2
            return ELEMENT * max(last, self.weight_pieces * OCTET) // CHUNK * CHUNK + CHUNK
        return self.config.block_n * self.weight_pitch

    @property
    def weight_pieces(self) -> int:
        """Copies of the weights of a block's filters; 0 where they come in one by one."""
        p, filters = self.problem, self.config.block_n
        if self.linear:
            return -(-filters * p.weight_step // OCTET)
        return filters * 2 * self.steps if p.weight_step else 0

    @property
    def staging_bytes(self) -> int:
        """Of 16 rows of each warp, in which outputs of halves leave."""
        wide = sum(o.dtype in HALF_DTYPES for o in self.problem.segment.outputs)
        return wide * self.config.warps * 16 * self.config.warp_n * ELEMENT

    @property
    def shared_bytes(self) -> int:
        """Of a block."""
        return STAGES * self.stage_bytes + self.weight_bytes + self.staging_bytes

    @property
    def held(self) -> int:
        """Pieces of a patch that each thread brings in."""
        return -(-self.patch_lines * self.pieces // self.config.threads)

    @property
    def words_ahead(self) -> int:
        """Registers of a thread that hold what is read for each element: 16 rows, and the next."""
        words = sum(x.words_of_piece for x in self.problem.segment.loads if x.is_matrix)
        return words * (self.config.warp_n // PIECE) * min(2, self.config.tiles_m)

    @property
    def registers(self) -> int:
        """Estimate of a thread's: with few steps not all sums are there at once."""
        c = self.config
        sums = c.tiles_m * c.tiles_n * 4 * min(5, self.steps + 1) // 5 + self.words_ahead
        fragments = min(2, self.steps) * (c.tiles_m * 4 + c.tiles_n * 2)
        through = 2 * self.held if self.problem.piece == 1 else 0
        places = c.tiles_m
        if not self.problem.apart:
            places *= 8 if c.columns > 8 else 16  # two halves of a tile on one line, or on two
        return sums + fragments + through + places + OTHER_REGISTERS

    def resident(self, hw: HardwareProfile) -> int:
        """Blocks of a multiprocessor."""
        c, registers = self.config, -(-self.registers // 8) * 8
        # Each of four schedulers has registers of its own.
        warps = hw.registers_per_sm // 4 // (registers * hw.warp_size) * 4
        return min(
            hw.smem_per_sm_bytes // (self.shared_bytes + hw.smem_reserved_per_block_bytes),
            warps // c.warps,
            hw.max_threads_per_sm // c.threads,
        )

    def slots(self, hw: HardwareProfile) -> Extent:
        """Blocks that share the tiles of positions, the same filters for each."""
        most = max(1, hw.num_sms * max(1, self.resident(hw)) // self.column_tiles)
        if not isinstance(self.row_tiles, int):
            return tirx.Min(convert(self.row_tiles, "int32"), constant(most, "int32"))
        turns = -(-self.row_tiles // most)
        return -(-self.row_tiles // turns)

    def check(self, hw: HardwareProfile) -> None:
        """Raises `Unsupported` where the configuration does not suit the convolution."""
        c = self.config
        sizes = (c.block_m, c.block_n, c.warp_m, c.warp_n, c.columns)
        if any(n & (n - 1) for n in sizes) or min(c.warp_m, c.warp_n) < 16 or c.columns < 8:
            raise Unsupported("tiles are powers of two")
        if c.block_m % c.warp_m or c.block_n % c.warp_n or c.block_m % c.columns:
            raise Unsupported("a tile that is not divided evenly")
        if self.rows > 1 and self.problem.below is None:
            raise Unsupported("rows of positions where there is one")
        if c.threads > hw.max_threads_per_block:
            raise Unsupported("more threads than a block has")
        if self.shared_bytes > hw.smem_per_block_bytes:
            raise Unsupported("more shared memory than a block has")
        if self.registers > min(MOST_REGISTERS, hw.registers_per_sm // c.threads):
            raise Unsupported("more registers than a thread has")
