"""An attention as the mma.sync kernel sees it, and what follows from a configuration."""

from __future__ import annotations

from dataclasses import dataclass

from ....config import HardwareProfile
from ....errors import Unsupported
from ...gpu.product_frame import ceil_div
from ...program.expr import HALF_DTYPES, bytes_of
from ..read.bounds import Match, key_range, split_match
from ..read.model import Attention
from ..tiled.points import Formulas, read_formulas, registers_of_score
from ..tiled.source import Source, read_source
from ..tiled.tiles import TiledAttention, TiledPlan, logit_scale, loop_parts
from ..time import looks_for_matches
from .config import MAX_HEAD, OFFSET_REGISTERS, UNIT, AttentionMmaConfig, Layout, resident_blocks


@dataclass(frozen=True, slots=True, eq=False)
class MmaAttention(TiledAttention):
    """Made by `read_mma_attention`: the operands in memory, and what is computed at each score."""

    q: Source
    k: Source
    v: Source
    formulas: Formulas

    def layout(self, config: AttentionMmaConfig) -> Layout:
        """Shared memory and registers of a configuration."""
        score = registers_of_score(self.formulas.loads)
        tile = OFFSET_REGISTERS if self.formulas.offsets else 0
        return Layout(config, self.terms, self.features, score, tile, bytes_of(self.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class MmaPlan(TiledPlan):
    """What follows from a problem and a configuration.

    `layout` is that of shared memory, `resident` the number of blocks of a multiprocessor. With a
    `match`, a block leaves out tiles of keys by what they hold (`tiled.matches`).
    """

    layout: Layout
    resident: int
    match: Match | None


def read_mma_attention(attention: Attention, hw: HardwareProfile) -> MmaAttention:
    """The attention as cp.async and mma.sync can compute it.

    Raises
    ------
    Unsupported
        For a device before sm_80, other dtypes, operands that are computed or not contiguous along
        the head, symbolic or large heads.
    """
    if not hw.architecture.has_mma:
        raise Unsupported(f"mma.sync attention is for sm_80 and later, not {hw.arch or hw.name}")
    if attention.operand_dtype not in (*HALF_DTYPES, "float32"):
        raise Unsupported(f"operands of {attention.operand_dtype}, not of 16 or 32 bits")
    terms, features = attention.D, attention.E
    for size, name in ((terms, "terms"), (features, "features")):
        if not isinstance(size, int):
            raise Unsupported(f"a symbolic number of {name}")
        if size % UNIT or size > MAX_HEAD:
            raise Unsupported(f"{size} {name}: no multiple of {UNIT} up to {MAX_HEAD}")
    q = read_source(attention, attention.q, "m", attention.terms, "queries")
    k = read_source(attention, attention.k, "n", attention.terms, "keys")
    v = read_source(attention, attention.v, "n", attention.features, "values")
    what = (attention, attention.operand_dtype, terms, features, logit_scale(attention))
    formulas = read_formulas(TiledAttention(*what), key_range(attention).rest)
    return MmaAttention(*what, q, k, v, formulas)


def make_plan(problem: MmaAttention, config: AttentionMmaConfig, hw: HardwareProfile) -> MmaPlan:
    """Everything derived from a configuration.

    Raises
    ------
    Unsupported
        Where it is none, or shared memory does not suffice.
    """
    c, attention = config, problem.attention
    if c.block_n % 16 or not (1 <= c.warps <= 8 and 1 <= c.tiles <= 2 and 2 <= c.stages <= 4):
        raise Unsupported(f"{c}: up to 8 warps of 1 or 2 tiles, 16 i keys, 2 to 4 stages")
    if c.warps % c.shares or c.block_n % (16 * c.shares):
        raise Unsupported(f"{c}: warps and 16 i keys are divided evenly among shares")
    layout = problem.layout(c)
    if layout.smem_bytes > hw.smem_per_block_bytes:
        raise Unsupported(
            f"{c}: {layout.smem_bytes} bytes of shared memory, {hw.smem_per_block_bytes} at most"
        )
    keys = key_range(attention)
    count = attention.N if isinstance(attention.N, int) else None
    match = split_match(attention, keys)[0] if looks_for_matches(count, c.block_n) else None
    query_tiles = ceil_div(attention.M, c.block_m)
    parts, points_first = loop_parts(attention, keys, c.block_m, c.block_n)
    return MmaPlan(
        config=c,
        query_tiles=query_tiles,
        tiles=query_tiles * attention.B,
        keys=keys,
        uneven=any(bound.slope for bound in keys.bounds),
        parts=parts,
        points_first=points_first,
        layout=layout,
        resident=resident_blocks(layout, hw),
        match=match,
    )
