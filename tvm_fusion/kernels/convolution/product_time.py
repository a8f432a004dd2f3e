"""Predicted time of a convolution's sums as those of a matrix product, from plain sizes.

As `gemm.mma.rank` and `gemm.simt.config` predict kernels, of which these are the fastest tiles:
positions are rows and filters columns, or the other way round where positions lie side by side.
"""

from __future__ import annotations

import itertools
import math

from ...config import HardwareProfile, Policy
from ...plan.group_view import dtype_bytes
from ..gemm.mma import rank
from ..gemm.mma.problem import COPY_BYTES, INT8_DTYPES, Way
from ..gemm.simt.config import START_SECONDS, simt_seconds
from ..gemm.simt.kernel import CONFIGS
from ..gemm.time import MMA_STEPS, MMA_TILES, MOST_SPLIT, WARP
from ..program.expr import FLOAT8_DTYPES, HALF_DTYPES
from .sizes import Sizes


def mma_seconds(sizes: Sizes, hw: HardwareProfile, policy: Policy) -> float | None:
    """Seconds of the sums and their epilogue by mma.sync, without the start of a launch; None where
    tensor cores do not take the dtype.
    """
    rate = _rate(sizes.dtype, hw)
    split = sizes.dtype == "float32" and not policy.allow_tf32
    if rate is None or (split and policy.rounding == "exact"):
        return None
    share = rank.SM90_SHARE if hw.architecture.is_rated_by_wgmma else rank.PEAK_SHARE
    flops, clock = rate * share / hw.num_sms, hw.clock_ghz * 1e9
    size = dtype_bytes(sizes.dtype)
    depths = [channels * sizes.taps * size for channels in sizes.sources]
    m, n = _rows_and_columns(sizes)
    ways = [_data_way(sizes, size), _weights_way(math.gcd(*depths))]
    waiting = max(rank.STEP_SECONDS[way] for way, _ in ways)
    if not sizes.channels_last:
        ways.reverse()
    stored, best = rank.EPILOGUE_SECONDS / 128**2, math.inf
    for (block_m, block_n, reads), step in itertools.product(MMA_TILES, MMA_STEPS):
        if split and block_m * block_n > MOST_SPLIT:
            continue
        tiles = sizes.groups * -(-m // block_m) * -(-n // block_n)
        turns = -(-tiles // hw.num_sms)
        chunks = [block * step / 16 / WARP for block in (block_m, block_n)]
        units = sum(
            count * rank.chunk_cycles(way, piece)
            for count, (way, piece) in zip(chunks, ways, strict=True)
        )
        tile = block_m, block_n, reads
        each = rank.tile_step_seconds(tile, step, size, units, flops, clock, split)
        body = sum(-(-depth // step) for depth in depths) * (each + waiting / min(turns, 2))
        body += stored * block_m * block_n / min(turns, 2)
        best = min(best, turns * body)
    return best


def cuda_core_seconds(sizes: Sizes, hw: HardwareProfile) -> float:
    """The same on CUDA cores, of any dtype."""
    rows, columns = _rows_and_columns(sizes)
    terms = tuple(channels * sizes.taps for channels in sizes.sources)
    segment = sizes.groups, rows, columns, terms
    return min(simt_seconds([segment], c, hw, 0.0) for c in CONFIGS) - START_SECONDS


def _rate(dtype: str, hw: HardwareProfile) -> float | None:
    if not hw.architecture.has_mma:
        return None
    if dtype == "float32":
        return hw.tensor_flop_per_s.get("tfloat32")
    if dtype in FLOAT8_DTYPES and not hw.architecture.has_float8_mma:
        return None
    if dtype in (*HALF_DTYPES, *FLOAT8_DTYPES, *INT8_DTYPES):
        return hw.tensor_flop_per_s.get(dtype.replace("uint8", "int8"))
    return None


def _rows_and_columns(sizes: Sizes) -> tuple[int, int]:
    filters = sizes.filters // sizes.groups
    return (sizes.positions, filters) if sizes.channels_last else (filters, sizes.positions)


def _data_way(sizes: Sizes, size: int) -> tuple[Way, int]:
    """How the data comes into shared memory, and by how many bytes."""
    piece = math.gcd(16, *(channels * size for channels in sizes.sources))
    if not sizes.channels_last or piece < COPY_BYTES[-1]:
        return Way.GATHER, size
    return (Way.COPY if sizes.taps == 1 else Way.WINDOW), piece


def _weights_way(depth: int) -> tuple[Way, int]:
    piece = math.gcd(16, depth)
    return (Way.COPY, piece) if piece >= COPY_BYTES[-1] else (Way.SHIFT, 16)
