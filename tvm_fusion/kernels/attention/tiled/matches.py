"""Tiles of keys that hold no value of a tile of queries (`read.bounds.Match`) are left out.

    keys       1 1 1 4 4 4 4 | 4 4 9 9 9 9 9 | ...      queries of 4 and 9
    tiles      from the first to the last with a value within 4 ... 9

On Hopper warps beside those that compute look for them (`hopper.scouts`); elsewhere all threads of
a block do before they begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...gemm.mma.units import shared_word, store_shared
from ...gpu.intrinsics import device_call
from ...gpu.product_frame import coordinates
from ...program.expr import dtype_of
from ..read.bounds import Match
from .online_softmax import ALL_LANES
from .tiles import KeyTiles, Tile, TiledKernel, kept

WARP = 32

# A warp's keys whose values are on their way at the same time.
GROUP = 4


# What is wanted of the keys that fit: the first and the last.
ENDS = ("min", "max")


def reduced(name: str, value: Expr) -> Expr:
    """The least or the largest int32 of a warp's lanes, of which ptxas knows that all have it."""
    body = f"return __reduce_{name}_sync(0xffffffffu, x);"
    return device_call("int32", f"warp_{name}", "int x", body, value)


class Matches:
    """Emits what is compared: the values of queries and keys, and `ends`, the least and the largest
    of a tile of queries, which each warp finds by itself.
    """

    def __init__(self, kernel: TiledKernel, match: Match, lane: Expr):
        self.kernel, self.match, self.lane = kernel, match, lane
        self.attention = kernel.problem.attention
        self.block_m, self.block_n = kernel.plan.config.block_m, kernel.plan.config.block_n
        self.ends = T.alloc_local((2,), dtype_of(match.query))

    def values_of_queries(self, tile: Tile) -> None:
        """Emits the search for the ends."""
        for i in range(-(-self.block_m // WARP)):
            value = T.Bind(self.query(tile, i))
            for place, combine in enumerate((tirx.Min, tirx.Max)):
                found = value if i == 0 else combine(self.ends[place], value)
                T.buffer_store(self.ends, found, [place])
        self.across_lanes(self.ends, (tirx.Min, tirx.Max))

    def across_lanes(self, buffer: Expr, combinations: Sequence[Callable]) -> None:
        """What all lanes hold in each place, combined."""
        for lanes in (1, 2, 4, 8, 16):
            for place, combine in enumerate(combinations):
                own = buffer[place]
                other = T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), own, lanes, WARP, WARP)
                T.buffer_store(buffer, combine(own, other), [place])

    def fits(self, value: Expr) -> Expr:
        """Whether some query may have the value of a key."""
        return tirx.And(value >= self.ends[0], value <= self.ends[1])

    def query(self, tile: Tile, i: int) -> Expr:
        """The value of the `i`-th query of this lane."""
        row = tirx.Min(tile.query + (self.lane + i * WARP), self.kernel.M - 1)
        return self._evaluate(self.match.query, tile, self.attention.queries, row)

    def key(self, tile: Tile, at: Expr) -> Expr:
        """The value of a key, or of the last one."""
        at = tirx.Min(at, self.kernel.N - 1)
        return self._evaluate(self.match.key, tile, self.attention.keys, at)

    def _evaluate(self, expr: Expr, tile: Tile, axes: Sequence, at: Expr) -> Expr:
        env: dict[Var, Expr] = dict(tile.axes)
        env |= coordinates(axes, at, self.kernel.frame)
        return self.kernel.frame.rewrite(expr, env)


def matching_tiles(
    kernel: TiledKernel, match: Match, tile: Tile, thread: Expr, warps: int, memory: Expr
) -> Tile:
    """Emits the search of a whole block, and returns the tile of queries with the keys that it
    leaves: at least one tile of them where there was one.

    `memory` is shared memory, of which the first 8 bytes a warp are written; it is free again when
    the search has ended.
    """
    lane, warp = T.Bind(thread % WARP), T.Bind(thread // WARP)

    def word(of: Expr, place: int) -> Expr:
        return memory.ptr_to([(of * 2 + place) * 4])

    matches = Matches(kernel, match, lane)
    matches.values_of_queries(tile)
    start = kept(tile.keys.first * matches.block_n)
    last = kept(tirx.Min(tile.keys.end * matches.block_n, kernel.N) - 1)
    # The first and the last key that fits.
    found = T.alloc_local((2,), "int32")
    none = (last + 1, start - 1)
    for place in range(2):
        T.buffer_store(found, none[place], [place])
    at_once = warps * WARP * GROUP
    values = T.alloc_local((GROUP,), dtype_of(match.key))
    steps = T.Bind(T.truncdiv(last - start + at_once, T.int32(at_once)))
    with T.serial(0, steps, unroll=False) as step:
        first = T.Bind(start + step * at_once + thread)
        # Beyond the last key it is looked at again.
        places = [tirx.Min(first + i * (warps * WARP), last) for i in range(GROUP)]
        for i, at in enumerate(places):
            T.buffer_store(values, matches.key(tile, at), [i])
        for i, at in enumerate(places):
            with T.If(matches.fits(values[i])), T.Then():
                T.buffer_store(found, tirx.Min(found[0], at), [0])
                T.buffer_store(found, tirx.Max(found[1], at), [1])
    for place, name in enumerate(ENDS):
        value = T.Bind(reduced(name, found[place]))
        with T.If(tirx.EQ(lane, 0)), T.Then():
            T.evaluate(store_shared(word(warp, place), T.reinterpret("uint32", value)))
    T.evaluate(T.cuda.cta_sync())
    for place, name in enumerate(ENDS):
        own = shared_word(word(tirx.Min(lane, warps - 1), place))
        T.buffer_store(found, reduced(name, T.reinterpret("int32", own)), [place])
    T.evaluate(T.cuda.cta_sync())
    return replace(tile, keys=_narrowed(tile, matches.block_n, found))


def _narrowed(tile: Tile, block_n: int, found: Expr) -> KeyTiles:
    """The tiles from the first to the last key that was found; the first one where none was."""
    width = T.int32(block_n)
    is_found = found[0] <= found[1]
    first = T.truncdiv(found[0], width)
    end = T.truncdiv(found[1], width) + 1
    first = kept(tirx.Select(is_found, first, tile.keys.first))
    end = kept(tirx.Select(is_found, end, tirx.Min(tile.keys.first + 1, tile.keys.end)))
    return replace(tile.keys, first=first, whole_first=first, whole_end=first, end=end)
