"""Configurations of the Hopper GEMM."""

from __future__ import annotations

from dataclasses import dataclass

# Columns of one piece of the epilogue: a warp's stmatrix writes 16 rows of 16 halves.
CHUNK = 16

# Blocks of a cluster that fit on every device with clusters.
SPLITS = (1, 2, 4, 8)
MULTICASTS = (1, 2)


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """Choices for one kernel.

    Attributes
    ----------
    block_m, block_n : rows (64 a consumer warpgroup) and columns of a tile; `block_n` counts both
        halves of a gate/up pair.
    stages : steps of A and B in flight in shared memory.
    staged : outputs leave through shared memory and the TMA, else from registers.
    deferred : accumulators are rounded and kept, and the epilogue runs between the first steps of
        the next tile.
    boxes : 64 x 64 boxes of shared memory for the output of each consumer warpgroup; twice those of
        a tile, and its residual comes in while the tile before is computed.
    group_m : row tiles that share a column tile at one time.
    batched : outer row axes that count as batch: tiles then end where an inner row axis ends.
    split : blocks of a cluster that share the terms of one tile; their sums meet in shared memory.
        Pays for few tiles of many terms (64 x 512 x 16384: 8.0 us split by 8, cuBLAS 10.0).
    multicast : blocks of a cluster with neighbouring row tiles that share each tile of B. Pays
        where rows of B start off 128 bytes (1500 x 3000 x 808 on an H200, 2026-11-20: 17.3 us
        instead of 20.7), costs nothing elsewhere.
    promote : steps after which wgmma's sums are added to sums of full precision; 0 is never.
    tf32 : float32 operands may be rounded to tfloat32.
    """

    block_m: int
    block_n: int
    stages: int
    staged: bool
    deferred: bool
    boxes: int
    group_m: int = 8
    batched: int = 0
    split: int = 1
    multicast: int = 1
    promote: int = 0
    tf32: bool = False
