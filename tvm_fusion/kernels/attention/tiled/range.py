"""Which tiles of keys a tile of queries meets, and which of these it sees as a whole.

    key <= query + 3 and key >= query - 100, queries 128 ... 255, tiles of 64 keys
      keys 28 ... 258 -> tiles 0 ... 4; those that all of its queries see: 155 ... 131, none

The conditions come from `attention.read.bounds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...gpu.product_frame import Frame
from ...program.expr import convert, number
from ..read.bounds import Range


@dataclass(frozen=True, slots=True)
class KeyTiles:
    """Tiles of keys of a tile of queries: ``first ... end - 1``, of which ``whole_first ...
    whole_end - 1`` need no look at single points. ``first <= whole_first <= whole_end < end``.
    """

    first: Expr | int
    whole_first: Expr | int
    whole_end: Expr | int
    end: Expr | int


def static_tiles(
    keys: Range, rows: tuple[int, int], size: int, block_n: int
) -> tuple[int, int, int, int] | None:
    """`KeyTiles` of rows ``rows[0] ... rows[1]`` where all is known, else None."""
    bounds = []
    for bound in keys.bounds:
        rest = number(bound.rest)
        if rest is None:
            return None
        ends = sorted(bound.slope * row + int(rest) for row in rows)
        bounds.append((bound.upper, *ends))
    tiles = -(-size // block_n)
    end = min([size, *(high + 1 for upper, _, high in bounds if upper)])
    first = max([0, *(low for upper, low, _ in bounds if not upper)])
    whole_end = min([size, *(low + 1 for upper, low, _ in bounds if upper)])
    whole_first = max([0, *(high for upper, _, high in bounds if not upper)])
    end = min(max(-(-end // block_n), 1), tiles)
    first = min(max(first // block_n, 0), end - 1)
    whole_end = min(max(whole_end // block_n, first), end - 1)
    if keys.rest:
        whole_end = first
    whole_first = min(max(-(-whole_first // block_n), first), whole_end)
    return first, whole_first, whole_end, end


def emit_tiles(
    frame: Frame, keys: Range, rows: Sequence[Expr], size: Expr, block_n: int, env: dict
) -> KeyTiles:
    """Emits the tiles of the rows from `rows[0]` to `rows[1]`; `env` has the axes of the batch."""
    width = T.int32(block_n)
    end, first = size, T.int32(0)
    whole_end, whole_first = size, T.int32(0)
    for bound in keys.bounds:
        rest = T.Bind(convert(frame.rewrite(bound.rest, env), "int32"))
        low, high = rest, rest
        if bound.slope:
            at = [row * T.int32(bound.slope) + rest for row in rows]
            low, high = at if bound.slope > 0 else reversed(at)
        if bound.upper:
            end, whole_end = T.min(end, high + 1), T.min(whole_end, low + 1)
        else:
            first, whole_first = T.max(first, low), T.max(whole_first, high)
    tiles = tirx.FloorDiv(size + (block_n - 1), width)
    # Truncated divisions: what is negative is brought to 0 before.
    zero, one = T.int32(0), T.int32(1)
    end = T.max(T.truncdiv(T.max(end, zero) + (block_n - 1), width), one)
    end = T.Bind(T.min(end, tiles))
    first = T.Bind(T.min(T.truncdiv(T.max(first, zero), width), end - 1))
    if keys.rest:
        return KeyTiles(first, first, first, end)
    whole_end = T.truncdiv(T.max(whole_end, zero), width)
    whole_end = T.Bind(T.min(T.max(whole_end, first), end - 1))
    whole_first = T.truncdiv(T.max(whole_first, zero) + (block_n - 1), width)
    whole_first = T.Bind(T.min(T.max(whole_first, first), whole_end))
    return KeyTiles(first, whole_first, whole_end, end)
