"""Tiles of keys that cannot match a tile of queries: conditions ``f(query) == g(key)``.

    documents[b, i] == documents[b, j], a tile of queries of documents 3 ... 5
      -> from the first to the last tile of keys with a document within 3 ... 5

The producer's warp looks for them while it brings the tiles of queries ahead, and passes the range
to the consumers in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..attention_model import Attention
from ..expr import dtype_of, is_integer, uses_any
from .gemm_frame import coordinates

if TYPE_CHECKING:
    from .attention_hopper_state import Kernel
    from .attention_tiles import Tile

WARP = 32
ALL_LANES = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """A key is visible only where both are equal; `query` is over batch and queries, `key` over
    batch and keys.
    """

    query: Expr
    key: Expr


def find_match(attention: Attention, conditions: Sequence[Expr]) -> Match | None:
    """The first condition that is such an equality of integers, if there is one."""
    queries = [axis.var for axis in attention.queries]
    keys = [axis.var for axis in attention.keys]
    names = [binding.var for binding in attention.bindings]
    for condition in conditions:
        if not isinstance(condition, tirx.EQ) or not is_integer(dtype_of(condition.a)):
            continue
        if dtype_of(condition.a) != dtype_of(condition.b) or uses_any(condition, names):
            continue
        for query, key in ((condition.a, condition.b), (condition.b, condition.a)):
            if uses_any(query, keys) or uses_any(key, queries) or not uses_any(key, keys):
                continue
            return Match(query, key)
    return None


class Narrowing:
    """Emits the search of one warp of the producer."""

    def __init__(self, kernel: Kernel, match: Match):
        self.kernel, self.match = kernel, match
        self.attention = kernel.problem.attention
        self.block_n = kernel.plan.config.block_n
        self.dtype = dtype_of(match.query)
        self.lane = T.Bind(kernel.thread % WARP)
        self.ends = T.alloc_local((2,), self.dtype)  # least and largest value of the queries
        self.range = T.alloc_local((2,), "int32")  # first tile of keys, and behind the last
        self.more = T.alloc_local((1,), "int32")

    def emit(self, tile: Tile) -> tuple[Expr, Expr]:
        """Emits the search; the first tile of keys, and the one behind the last."""
        self._values_of_queries(tile)
        for place, value in enumerate((tile.keys.first, tile.keys.end)):
            T.buffer_store(self.range, value, [place])
        self._search(tile, lambda: self.range[0], 0, 1)
        self._search(tile, lambda: self.range[1] - 1, 1, -1)
        return self.range[0], self.range[1]

    def _values_of_queries(self, tile: Tile) -> None:
        """The least and the largest value of the queries of a tile."""
        for i in range(self.kernel.plan.config.block_m // WARP):
            row = tirx.Min(tile.query + (self.lane + i * WARP), self.kernel.M - 1)
            value = T.Bind(self._value(self.match.query, tile, self.attention.queries, row))
            for place, combine in enumerate((tirx.Min, tirx.Max)):
                found = value if i == 0 else combine(self.ends[place], value)
                T.buffer_store(self.ends, found, [place])
        for lanes in (1, 2, 4, 8, 16):
            for place, combine in enumerate((tirx.Min, tirx.Max)):
                own = self.ends[place]
                other = T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), own, lanes, WARP, WARP)
                T.buffer_store(self.ends, combine(own, other), [place])

    def _search(self, tile: Tile, number: Callable[[], Expr], place: int, step: int) -> None:
        """Moves one end of the range to a tile that matches, or to the last one left."""
        T.buffer_store(self.more, T.int32(1), [0])
        with T.While(self.more[0] == 1):
            found = self._matches(tile, number())
            left = self.range[1] - self.range[0] > 1
            with T.If(tirx.And(found == 0, left)):
                with T.Then():
                    T.buffer_store(self.range, self.range[place] + step, [place])
                with T.Else():
                    T.buffer_store(self.more, T.int32(0), [0])

    def _matches(self, tile: Tile, number: Expr) -> Expr:
        """Whether a tile of keys has a value between those of the queries."""
        inside = T.int32(0)
        for i in range(-(-self.block_n // WARP)):
            column = number * self.block_n + (self.lane + i * WARP)
            column = tirx.Min(column, self.kernel.N - 1)
            value = T.Bind(self._value(self.match.key, tile, self.attention.keys, column))
            fits = tirx.And(value >= self.ends[0], value <= self.ends[1])
            inside = T.bitwise_or(inside, T.cast(fits, "int32"))
        found = T.alloc_local((1,), "int32")
        T.buffer_store(found, T.cuda.any_sync(T.uint32(ALL_LANES), inside), [0])
        return found[0]

    def _value(self, expr: Expr, tile: Tile, axes: Sequence, at: Expr) -> Expr:
        env: dict[Var, Expr] = dict(tile.axes)
        env |= coordinates(axes, at, self.kernel.frame)
        return self.kernel.frame.rewrite(expr, env)
