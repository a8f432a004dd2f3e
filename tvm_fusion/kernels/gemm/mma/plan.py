"""Configurations of the mma.sync GEMM, and the layout of a stage in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.ir import Expr
from tvm.script import tirx as T

from .units import CHUNK

# Bytes of the terms that one mma.sync takes of a row of A, whatever the dtype: 16 halves.
TERM_BYTES = 32

# Stages of the rings of most products.
MOST_STAGES = 5

# Chunks that lie in one pass over all banks of shared memory, and those of 8 rows of 4 bytes.
BANK_CHUNKS = 8
WORD_CHUNKS = 2
WORD_ROWS = 4


@dataclass(frozen=True, slots=True)
class WarpTiles:
    """A block's tile, and its warps' parts of it, which are tiles of mma.sync (16 x 8).

    Attributes
    ----------
    block_m, block_n : rows and columns of a block's tile.
    warp_m, warp_n : rows and columns of a warp's part of it.
    """

    block_m: int
    block_n: int
    warp_m: int
    warp_n: int

    @property
    def warps_m(self) -> int:
        """Warps below each other."""
        return self.block_m // self.warp_m

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.warps_m * (self.block_n // self.warp_n)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def window_line(self) -> int:
        """Floats from row to row of what passes through shared memory to be reduced: rows that
        are side by side start in different banks.
        """
        return self.block_n + 8

    @property
    def window_bytes(self) -> int:
        """Shared memory of 16 rows of each warp of such an output."""
        return self.warps_m * 16 * self.window_line * 4

    @property
    def tiles_m(self) -> int:
        """mma.sync tiles of a warp below each other."""
        return self.warp_m // 16

    @property
    def tiles_n(self) -> int:
        """mma.sync tiles of a warp beside each other."""
        return self.warp_n // 8


@dataclass(frozen=True, slots=True)
class MmaConfig(WarpTiles):
    """How a block of the mma.sync GEMM works.

    Attributes
    ----------
    step_bytes : bytes of each row that one step takes (64 or 128).
    stages : slices in shared memory, at least 3; above `MOST_STAGES` where memory is waited for.
    group_m : row tiles that neighbouring blocks share a column tile over.
    tf32 : float32 operands are rounded to tfloat32, because the policy allows it.
    split : float32 operands are taken in three parts each, of which six products are added up.
    wide : outputs leave through shared memory in stores of 16 bytes or aligned words, where they
        can.
    wgmma : float32 is split by the block and multiplied by warpgroups (`split.GroupProducts`).
    """

    step_bytes: int = 64
    stages: int = 4
    group_m: int = 8
    tf32: bool = False
    wide: bool = True
    split: bool = False
    wgmma: bool = False

    @property
    def rounds(self) -> int:
        """mma.sync steps within a step."""
        return self.step_bytes // TERM_BYTES

    @property
    def is_deep(self) -> bool:
        """Whether the ring holds all that memory has under way."""
        return self.stages > MOST_STAGES

    @property
    def takes_float32(self) -> bool:
        """Whether operands may be float32."""
        return self.tf32 or self.split

    def stage_bytes(self, columns: int) -> int:
        """Shared memory of a stage whose loop has `columns` B operands."""
        return (self.block_m + columns * self.block_n) * self.step_bytes


@dataclass(frozen=True, slots=True)
class Panel:
    """An operand's slice in shared memory: lines of 16-byte chunks in swizzled order.

    `k_major`: a line is the terms of a row; otherwise the rows of a term. Chunks change places with
    the number of their line so that 8 lines' chunks of one number lie in different banks, and
    8 rows of 4 terms where elements of 4 bytes are read one by one (`Words`).
    """

    rows: int
    step_bytes: int
    k_major: bool
    element: int

    @property
    def line(self) -> int:
        """Bytes of a line."""
        return self.step_bytes if self.k_major else self.rows * self.element

    @property
    def lines(self) -> int:
        """Number of lines."""
        return self.rows if self.k_major else self.terms

    @property
    def by_words(self) -> bool:
        """Whether fragments are read element by element: ldmatrix transposes 16 bits only."""
        return not self.k_major and self.element == 4

    @property
    def terms(self) -> int:
        """Terms of a step."""
        return self.step_bytes // self.element

    @property
    def size(self) -> int:
        """Bytes."""
        return self.rows * self.step_bytes

    def place(self, line: Expr, chunk: Expr) -> Expr:
        """Byte offset of a chunk."""
        chunks = self.line // CHUNK
        turn = line * chunks // BANK_CHUNKS if chunks < BANK_CHUNKS else line
        if self.by_words:
            turn = turn * WORD_CHUNKS
        return line * self.line + T.bitwise_xor(chunk, turn % min(chunks, BANK_CHUNKS)) * CHUNK


class Fragments:
    """Where a thread finds the rows of matrices that it passes to ldmatrix, of A or B of its warp.

    A register of ldmatrix is what mma.sync wants: row lane // 4, 4 bytes number lane % 4. Four
    matrices are 16 rows by 32 bytes of terms; for A the first two lie below each other, for B the
    first two hold one row's terms.
    """

    def __init__(self, panel: Panel, side: str, lane: Expr, first: Expr):
        self.panel = panel
        low, second, last = lane % 8, lane // 8 % 2, lane // 16
        # Row of the 16 and half of the terms, by the number of the matrix (lane // 8).
        row, half = (second * 8 + low, last) if side == "m" else (last * 8 + low, second)
        if panel.k_major:
            self.start = T.Bind(panel.place(first + row, half))
        else:
            part = second if side == "m" else last
            term = (last if side == "m" else second) * 8 + low
            self.start = T.Bind(panel.place(term, first // 8 + part))

    def place(self, tile: int, turn: int) -> Expr:
        """Offset of 16 rows number `tile`, terms number `turn` of a step."""
        if self.panel.k_major:
            start, far = turn, tile * 16 * self.panel.line
        else:
            start, far = tile, turn * 16 * self.panel.line
        # Tiles within a swizzled line differ in bits of their own.
        return (
            T.bitwise_xor(self.start, T.int32(start * TERM_BYTES)) if start else self.start
        ) + far


class Words:
    """Where a thread finds the elements of fragments of 4 bytes, whose rows are neighbours in
    shared memory: a register is row lane // 4, term lane % 4 of 8 x 4.
    """

    def __init__(self, panel: Panel, side: str, lane: Expr, first: Expr):
        self.panel, self.side = panel, side
        row = first + lane // 4
        start = panel.place(lane % 4, row // WORD_ROWS) + row % WORD_ROWS * 4
        # Chunks of 8 rows change places among those of 32.
        self.starts = [
            T.Bind(T.bitwise_xor(start, T.int32(eight * WORD_CHUNKS * CHUNK)))
            for eight in range(min(4, panel.rows // 8))
        ]

    def place(self, tile: int, turn: int, number: int) -> Expr:
        """Offset of register `number` of 16 rows number `tile`, terms number `turn` of a step."""
        low, far = (number % 2, number // 2) if self.side == "m" else (number // 2, number % 2)
        eights, eight = divmod(tile * 2 + low, len(self.starts))
        line = turn * 8 + far * 4
        return self.starts[eight] + (eights * len(self.starts) * 32 + line * self.panel.line)
