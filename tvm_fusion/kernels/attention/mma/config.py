"""Configurations of the mma.sync attention, and what they take of shared memory and registers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from tvm.ir import Expr

from ....config import HardwareProfile
from ...gemm.mma.units import CHUNK

WARP = 32
TILE_ROWS = 16
"""Rows of an mma.m16n8k16."""
BANK_CHUNKS = 8
"""Chunks of 16 bytes that the banks of shared memory deliver at once."""
PADDED_BYTES = 32
"""Rows of the operands are padded to a multiple: what one mma takes of a row."""
UNIT, MAX_HEAD = 8, 256
"""Terms and features are multiples of the first, up to the second."""

OTHER_REGISTERS, SCORE_REGISTERS, QUERY_REGISTERS = 50, 1.1, 1.25
"""Registers of a thread beside results, scores and queries (addresses, fragments, running sums),
for each score, and for each register of queries."""
MOST_REGISTERS, MOST_SCORES = 259, 64
"""Up to this count, and so many scores of a thread, ptxas spills nothing into its 255 registers
(sm_80, sm_89, sm_90a; heads of 64 to 256); it needs fewer than counted, if it has to. With 96
scores it spills some bytes (80 terms, 64 features)."""

OFFSET_REGISTERS = 10
"""Registers of a tile of 16 queries where distances along the keys are added: with fewer, ptxas
spills 12 bytes (causal ALiBi, 128 terms, 32 queries by 48 keys of a warp)."""

SPLIT_REGISTERS = 16
"""Of the parts of the operands that float32 is split into, for each tile of queries."""

LAZY = 8.0
"""As in the Hopper form: how far, as a power of two, weights of float16 may pass 1."""

# Warps of a block, tiles of 16 queries that each has, keys of a tile, stages of the ring.
WARPS, TILES = (4, 8), (1, 2)
KEYS, STAGES = (128, 96, 64, 48, 32, 16), (2, 3)
# Warps with the same queries: of float32, of which no other form has few queries.
SHARES, WIDE_SHARES = (1,), (1, 2, 4)


@dataclass(frozen=True, slots=True)
class AttentionMmaConfig:
    """Choices for one kernel.

    Attributes
    ----------
    warps : warps of a block.
    tiles : tiles of 16 queries that each warp has; what it reads of keys and values serves all.
    block_n : keys of a tile, a multiple of 16.
    stages : tiles of keys and values in shared memory: one at work, the others on their way.
    shares : warps with the same queries, each of which has its part of a tile's keys; what they
        found is put together in the end. For few queries of many keys.
    lazy : as in `AttentionConfig` of the Hopper form.
    """

    warps: int
    tiles: int
    block_n: int
    stages: int = 2
    lazy: float = 0.0
    shares: int = 1

    @property
    def block_m(self) -> int:
        """Queries of a block."""
        return self.warps // self.shares * self.warp_rows

    @property
    def own_keys(self) -> int:
        """Keys of a tile that a warp has."""
        return self.block_n // self.shares

    @property
    def warp_rows(self) -> int:
        """Queries of a warp."""
        return self.tiles * TILE_ROWS

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * WARP


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows of so many 16-byte chunks in shared memory, in swizzled order.

    Chunks change places within groups of `swap`, by the number of their row, so that the chunks of
    one number of 8 rows lie in different banks:

        8 chunks: row r has chunk c in place c ^ (r % 8)        10 chunks: c ^ (r // 4 % 2)
    """

    chunks: int

    @property
    def swap(self) -> int:
        """Chunks of a group, a power of two."""
        return math.gcd(self.chunks, BANK_CHUNKS)

    @property
    def pitch(self) -> int:
        """Bytes of a row."""
        return self.chunks * CHUNK

    def place(self, row: Expr | int, chunk: Expr | int) -> Expr | int:
        """Byte offset of a chunk."""
        turn = row // (BANK_CHUNKS // self.swap) % self.swap
        return row * self.pitch + (chunk ^ turn) * CHUNK


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things lie in the shared memory of a block, in bytes.

    Each stage holds a tile of keys, then their values. Queries that are kept in registers take the
    place of the last stage, which is filled only when they have been read.

    `score_registers` are those for what is read ahead of each score, `tile_registers` what logits
    take beside for each tile of 16 queries; `size` the bytes of an element.
    """

    config: AttentionMmaConfig
    terms: int
    features: int
    score_registers: float = 0.0
    tile_registers: int = 0
    size: int = 2

    @property
    def k(self) -> SharedRows:
        """A row of keys, or of queries."""
        return SharedRows(_padded(self.terms * self.size) // CHUNK)

    @property
    def v(self) -> SharedRows:
        """A row of values."""
        return SharedRows(_padded(self.features * self.size) // CHUNK)

    @property
    def v_start(self) -> int:
        """The values within a stage."""
        return self.config.block_n * self.k.pitch

    @property
    def stage_bytes(self) -> int:
        """Keys and values of one tile."""
        return self.config.block_n * (self.k.pitch + self.v.pitch)

    @property
    def query_start(self) -> int:
        """The queries."""
        return (self.config.stages - self.holds_queries) * self.stage_bytes

    @property
    def smem_bytes(self) -> int:
        """All of it."""
        queries = self.config.block_m * self.k.pitch
        stages = self.config.stages * self.stage_bytes
        return max(stages, self.query_start + queries, self.exchange_bytes)

    @property
    def exchange_words(self) -> int:
        """Words of a thread for what its warp found: results, largest scores and sums of rows."""
        return self.config.tiles * (self.features // 2 + 4)

    @property
    def exchange_bytes(self) -> int:
        """What warps with the same queries put together, in the place of the stages."""
        c = self.config
        return (c.warps - c.warps // c.shares) * WARP * self.exchange_words * 4

    @property
    def holds_queries(self) -> bool:
        """Whether a thread keeps its fragments of queries in registers, else it reads them again
        for each tile of keys."""
        return self._registers(self._query_registers) <= MOST_REGISTERS

    @property
    def registers(self) -> float:
        """Registers of a thread, by estimate."""
        return self._registers(self._query_registers if self.holds_queries else 4)

    @property
    def _query_registers(self) -> int:
        return _padded(self.terms * self.size) // 8

    def _registers(self, queries: int) -> float:
        scores = self.config.own_keys / 2 * (SCORE_REGISTERS + self.score_registers)
        split = SPLIT_REGISTERS if self.size > 2 else 0
        tile = self.features / 2 + split + scores + queries * QUERY_REGISTERS + self.tile_registers
        return self.config.tiles * tile + OTHER_REGISTERS


def resident_blocks(layout: Layout, hw: HardwareProfile) -> int:
    """Blocks that a multiprocessor holds at once, by shared memory, registers and threads."""
    threads = layout.config.threads
    block_bytes = layout.smem_bytes + hw.smem_reserved_per_block_bytes
    by_smem = hw.smem_per_sm_bytes // block_bytes
    registers = min(math.ceil(layout.registers / 8) * 8, hw.max_registers_per_thread + 1)
    by_registers = hw.registers_per_sm // (registers * threads)
    by_threads = hw.max_threads_per_sm // threads
    return max(1, min(by_smem, by_registers, by_threads, hw.max_blocks_per_sm))


def _padded(size: int) -> int:
    return -(-size // PADDED_BYTES) * PADDED_BYTES


def candidates(
    layout_of: Callable[[AttentionMmaConfig], Layout],
    dtype: str,
    queries: int | None,
    keys: int | None,
    smem_limit: int,
) -> Iterator[Layout]:
    """Configurations that fit in registers and shared memory, as layouts.

    Parameters
    ----------
    layout_of : the layout of a configuration.
    dtype : of the operands.
    queries, keys : of one head; None where symbolic.
    smem_limit : bytes that a block may have.
    """
    lazy = LAZY if dtype == "float16" else 0.0
    least = WARPS[0] * TILES[0] * TILE_ROWS
    choices = WIDE_SHARES if dtype == "float32" else SHARES
    for warps, tiles, block_n, stages, shares in product(WARPS, TILES, KEYS, STAGES, choices):
        if block_n % (shares * TILE_ROWS):
            continue
        layout = layout_of(AttentionMmaConfig(warps, tiles, block_n, stages, lazy, shares))
        rows = layout.config.block_m
        if (
            (queries is None or rows == least or rows // 2 < queries)  # not half of it idle
            and (keys is None or block_n - KEYS[-1] < keys)
            and layout.smem_bytes <= smem_limit
            and layout.registers <= MOST_REGISTERS
            and tiles * layout.config.own_keys // 2 <= MOST_SCORES
        ):
            yield layout
