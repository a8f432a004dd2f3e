"""The order of the configurations of the mma.sync attention, by the model of `attention.time`."""

from __future__ import annotations

from ....config import HardwareProfile, Policy
from ....errors import Unsupported
from ..read.model import Attention
from ..tiled.shape import shape_of, sharing
from ..time import MmaTile, mma_time
from .config import AttentionMmaConfig, candidates, resident_blocks
from .problem import MmaAttention, read_mma_attention


def attention_mma_ranked(
    attention: Attention, hw: HardwareProfile, policy: Policy | None = None
) -> list[tuple[float, AttentionMmaConfig]]:
    """Predicted seconds and configurations that fit the attention and the device, best first.

    Raises
    ------
    Unsupported
        Where the kernel cannot compute the attention; see `emit_attention_mma`.
    """
    problem = read_mma_attention(attention, hw)
    shape = shape_of(problem, problem.formulas, _sharing(problem))
    found = []
    for layout in candidates(
        problem.layout,
        problem.dtype,
        attention.M if isinstance(attention.M, int) else None,
        attention.N if isinstance(attention.N, int) else None,
        hw.smem_per_block_bytes,
    ):
        c = layout.config
        tile = MmaTile(c.block_m, c.block_n, c.warp_rows, c.warps, resident_blocks(layout, hw))
        found.append((mma_time(shape, tile, hw).seconds, c))
    if not found:
        raise Unsupported("no tile of this attention fits")
    return sorted(found, key=lambda entry: entry[0])


def _sharing(problem: MmaAttention) -> int:
    """Heads that share keys and values, as far as addresses tell."""
    access = problem.k.access
    return 1 if access is None else sharing(access.digits)
