"""Attention as the time model sees it: sizes, tiles, and a predicted time with its terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...cost.traffic import Resources


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the time depends on.

    Attributes
    ----------
    batch : independent attentions, batch times heads.
    group : heads that share keys and values.
    queries, keys, terms, features : of one attention.
    dtype : of the operands.
    visible : share of the scores that has to be computed, by tiles that can be left out.
    mask_bytes : what is read for logits and visibility.
    arithmetic, special : operations on each score beside scaling and softmax.
    by_point : whether visibility is looked at for each score, not only at the edge of a range.
    edges : ends of the range of visible keys that move with the query: 1 causal, 2 a window. Used
        where `visible` is less than 1.
    matching : share of those scores that remain where an equality of what is read for the query and
        for the key hides the others (documents). The Hopper form leaves these out by tile.
    turned : operands lie along queries or keys, which only the Hopper form reads.
    """

    batch: int
    group: int
    queries: int
    keys: int
    terms: int
    features: int
    dtype: str
    visible: float = 1.0
    mask_bytes: float = 0.0
    arithmetic: float = 0.0
    special: float = 0.0
    by_point: bool = False
    edges: int = 1
    matching: float = 1.0
    turned: bool = False

    @property
    def reads_masks(self) -> bool:
        """Whether something is read for each score, not only for each key."""
        return self.mask_bytes >= self.queries * self.keys


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Tile of queries and keys.

    `overlaps` says that several warpgroups take turns with products and weights, `in_place` that
    results take the shared memory of the queries.
    """

    block_m: int
    block_n: int
    overlaps: bool = True
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class MmaTile:
    """Tile of the mma.sync form: `warps` of a block, `warp_rows` queries of each, which share what
    it reads of keys and values, and `resident` blocks of a multiprocessor."""

    block_m: int
    block_n: int
    warp_rows: int
    warps: int
    resident: int


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """Predicted seconds without the launch's own cost, their terms, the form, and what a block of
    it takes.
    """

    form: str
    seconds: float
    terms: Mapping[str, float] = field(hash=False)
    resources: Resources | None = None
