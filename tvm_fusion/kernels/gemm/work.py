"""What a Hopper GEMM computes and how, as plain numbers for its cost model."""

from __future__ import annotations

from dataclasses import dataclass

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

LARGE_ROWS = 2048


def stripe(rows: int, block_m: int, whole: bool) -> int:
    """Row tiles that share a column tile at one time.

    One stripe of 9 to 15 row tiles is better than one of 8 and a rest (777 x 1024 x 4096), where
    tiles are staged and `whole`, not shared by blocks.
    """
    return 16 if rows >= LARGE_ROWS or (whole and 8 < -(-rows // block_m) < 16) else 8


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
    """How it is computed; see `HopperConfig`. `ahead`: a residual travels while the tile before is
    computed.
    """

    block_m: int
    block_n: int
    stages: int = 4
    staged: bool = True
    deferred: bool = False
    group_m: int = 8
    split: int = 1
    multicast: int = 1
    ahead: bool = False
