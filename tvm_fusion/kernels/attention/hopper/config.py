"""Configurations of the Hopper attention: tiles, what fits in registers and in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

# Columns of a box of the 128-byte swizzle, rows of one consumer warpgroup, bytes of a half.
BOX = 64
WARPGROUP_ROWS = 64
HALF_BYTES = 2

# Terms of one wgmma of halves; keys of a tile are a multiple of them.
WGMMA_TERMS = 16
MAX_KEYS, MAX_FEATURES = 256, 256

# Shared memory for barriers and for aligning the buffers in front of them.
BARRIER_BYTES = 1024

# Of a thread of the producer's warpgroup: alone, and beside warps that search for tiles of keys.
PRODUCER_REGISTERS, SCOUT_REGISTERS = 24, 56
MAX_REGISTERS = 240

# Registers of a consumer thread beside scores, weights and results: addresses, counters, sums, and
# what is in flight. ptxas spills at 28 (D = 128, 176 keys), not at 32.
OTHER_REGISTERS = 32

# What comes with scouts: the ends of rows, and values compared where those of keys stand apart.
SAME_REGISTERS = 24

LAZY = 8.0
"""How far, as a power of two, weights may pass 1 before the sums are scaled down: float16 holds
them all the same. bfloat16 keeps 1 for the largest weight, which is then exact."""

# Tiles of fewer keys pay only where no larger one fits.
FEW_KEYS = 64

# Warpgroups of consumers, stages of K and V, and keys of a tile, in the order in which they are
# listed. Scouts leave three consumers too few registers.
CONSUMERS, CONSUMERS_WITH_SCOUTS = (2, 3, 1), (2, 1)
STAGES = (2,)
KEYS = (208, 192, 176, 160, 144, 128, 112, 96, 80, 64, 48, 32, 16)


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Choices for one kernel.

    Attributes
    ----------
    block_m : queries of a tile, 64 for each consumer warpgroup.
    block_n : keys of a tile, a multiple of 16.
    stages : tiles of K and of V in flight in shared memory.
    lazy : how far (as a power of two) the largest score of a row may pass the one that its weights
        refer to before they are scaled anew; 0 scales them at every tile.
    staged : the result leaves through shared memory and the TMA, else from registers.
    """

    block_m: int
    block_n: int
    stages: int = 2
    lazy: float = 0.0
    staged: bool = True

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return self.block_m // WARPGROUP_ROWS

    @property
    def threads(self) -> int:
        """Threads of a block: one producer warpgroup and the consumers."""
        return 128 * (self.consumers + 1)

    def consumer_registers(self, scouts: bool = False) -> int:
        """Registers a consumer thread may take once the producers gave theirs back."""
        if self.consumers == 1:
            return MAX_REGISTERS
        groups = self.consumers + 1
        pool = groups * (65536 // (128 * groups) // 8 * 8)
        given = SCOUT_REGISTERS if scouts else PRODUCER_REGISTERS
        return min(MAX_REGISTERS, (pool - given) // self.consumers // 8 * 8)


def boxes_of(size: int) -> int:
    """Boxes of 64 columns that hold so many."""
    return -(-size // BOX)


def smem_bytes(config: AttentionConfig, terms: int, features: int, own_output: bool) -> int:
    """Shared memory of a block; results may take the place of the queries (not `own_output`)."""
    row = BOX * HALF_BYTES
    q = config.block_m * boxes_of(terms) * row
    o = config.block_m * boxes_of(features) * row if config.staged else 0
    stage = config.block_n * (boxes_of(terms) + boxes_of(features)) * row
    return (q + o if own_output else max(q, o)) + config.stages * stage + BARRIER_BYTES


def registers(config: AttentionConfig, features: int, mask_registers: float) -> float:
    """Registers of a consumer thread: scores, weights in half precision, results, and what is read
    ahead of the scores; `mask_registers` are those for each of a thread's scores.
    """
    scores = config.block_n / 2
    return scores * (1.5 + mask_registers) + features / 2 + OTHER_REGISTERS


def candidates(
    dtype: str,
    terms: int,
    features: int,
    queries: int | None,
    keys: int | None,
    staged: bool,
    mask_registers: float,
    smem_limit: int,
    scouts: bool = False,
) -> list[AttentionConfig]:
    """Configurations that fit in registers and shared memory.

    Parameters
    ----------
    dtype : of the operands.
    terms, features : columns of Q and K, and of V.
    queries, keys : of one head; None where symbolic.
    staged : whether the TMA can store the result.
    mask_registers : registers for what is read ahead for each score.
    smem_limit : bytes that a block may have.
    scouts : whether warps search for tiles of keys.
    """
    lazy = LAZY if dtype == "float16" else 0.0
    most_keys = MAX_KEYS if keys is None else -(-keys // WGMMA_TERMS) * WGMMA_TERMS
    found = []
    groups, same = (CONSUMERS_WITH_SCOUTS, SAME_REGISTERS) if scouts else (CONSUMERS, 0)
    for consumers, block_n, stages in product(groups, KEYS, STAGES):
        block_m = consumers * WARPGROUP_ROWS
        config = AttentionConfig(block_m, block_n, stages, lazy, staged)
        idle = queries is not None and consumers > 1 and block_m - WARPGROUP_ROWS >= queries
        if (
            not idle
            and block_n <= max(most_keys, KEYS[-1])
            and registers(config, features, mask_registers) + same
            <= config.consumer_registers(scouts)
            and smem_bytes(config, terms, features, False) <= smem_limit
        ):
            found.append(config)
    large = [config for config in found if config.block_n >= min(FEW_KEYS, most_keys)]
    return large or found
