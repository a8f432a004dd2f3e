"""Tiles of keys that cannot match a tile of queries: conditions ``f(query) == g(key)``.

    documents[b, i] == documents[b, j], a tile of queries of documents 3 ... 5
      -> from the first to the last tile of keys with a document within 3 ... 5

The producer needs one thread of its warpgroup. The other warps are scouts: in turn they look for
the range of a coming tile of queries and pass it on in shared memory, so that a search may take as
long as the consumers need for several tiles. Everything that is left out was read.
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
from .attention_tiles import kept
from .gemm_frame import coordinates
from .gemm_hopper_state import wait

if TYPE_CHECKING:
    from .attention_hopper_state import Kernel
    from .attention_tiles import Tile

WARP = 32
ALL_LANES = 0xFFFFFFFF

# Warps that search, behind that of the producer; each writes into a slot of its own.
SCOUTS = 3

# Tiles of keys whose values are on their way at the same time.
GROUP = 4


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


def emit_scouts(kernel: Kernel) -> None:
    """Emits the loop of the scouts over the tiles of queries."""
    s = kernel.shared
    search = Search(kernel, kernel.plan.match)
    own = T.Bind(kernel.thread // WARP - 1)
    with kernel.each_tile() as tile:
        slot, phase = slot_of(kernel.turn)
        with T.If(tirx.EQ(slot, own)), T.Then():
            search.emit(tile)
            wait(s.ranges_empty.ptr_to([slot]), T.bitwise_xor(phase, T.int32(1)))
            with T.If(tirx.EQ(search.lane, 0)), T.Then():
                for place in range(2):
                    T.buffer_store(s.ranges, search.range[place], [slot, place])
                T.evaluate(
                    T.ptx.mbarrier.arrive.shared.b64(s.ranges_full.ptr_to([slot]), T.uint32(1))
                )


def take_range(kernel: Kernel) -> tuple[Expr, Expr]:
    """Emits the producer's wait for the range of its tile; the first tile of keys, and the one
    behind the last.
    """
    s = kernel.shared
    slot, phase = slot_of(kernel.turn)
    wait(s.ranges_full.ptr_to([slot]), phase)
    return read_range(kernel)


def read_range(kernel: Kernel) -> tuple[Expr, Expr]:
    """Emits reads of the range of the present tile, which is there."""
    slot, _ = slot_of(kernel.turn)
    first, end = (kept(kernel.shared.ranges[slot, place]) for place in range(2))
    return first, end


def release_range(kernel: Kernel) -> None:
    """Emits the hand-back of the range of the tile before, which all have read."""
    with T.If(kernel.turn > 0), T.Then():
        slot, _ = slot_of(kernel.turn - 1)
        empty = kernel.shared.ranges_empty.ptr_to([slot])
        T.evaluate(T.ptx.mbarrier.arrive.shared.b64(empty, T.uint32(1)))


def slot_of(turn: Expr) -> tuple[Expr, Expr]:
    """The slot of a turn, and the parity of its use."""
    slots = T.int32(SCOUTS)
    return T.truncmod(turn, slots), T.bitwise_and(T.truncdiv(turn, slots), T.int32(1))


class Search:
    """Emits the search of one warp; `range` holds what it finds: the first tile of keys, and the
    one behind the last.
    """

    def __init__(self, kernel: Kernel, match: Match):
        self.kernel, self.match = kernel, match
        self.attention = kernel.problem.attention
        self.block_n = kernel.plan.config.block_n
        self.lane = T.Bind(kernel.thread % WARP)
        # Least and largest value of the queries.
        self.ends = T.alloc_local((2,), dtype_of(match.query))
        self.range = T.alloc_local((2,), "int32")
        self.inside = T.alloc_local((GROUP,), "int32")
        self.skipped = T.alloc_local((1,), "int32")
        self.more = T.alloc_local((1,), "int32")

    def emit(self, tile: Tile) -> None:
        """Emits the search for the keys of a tile of queries."""
        self._values_of_queries(tile)
        for place, value in enumerate((tile.keys.first, tile.keys.end)):
            T.buffer_store(self.range, value, [place])
        self._search(tile, 0, lambda i: tirx.Min(self.range[0] + i, self.range[1] - 1))
        self._search(tile, 1, lambda i: tirx.Max(self.range[1] - 1 - i, self.range[0]))

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

    def _search(self, tile: Tile, place: int, number: Callable[[int], Expr]) -> None:
        """Moves one end of the range to a tile that matches, or to the last one left; `number` is
        that of the i-th tile from there.
        """
        T.buffer_store(self.more, T.int32(1), [0])
        with T.While(self.more[0] == 1):
            for i in range(GROUP):
                self._look(tile, number(i), i)
            T.buffer_store(self.skipped, T.int32(GROUP), [0])
            for i in reversed(range(GROUP)):
                found = T.cuda.any_sync(T.uint32(ALL_LANES), self.inside[i])
                with T.If(found != 0), T.Then():
                    T.buffer_store(self.skipped, T.int32(i), [0])
            left = T.Bind(self.range[1] - self.range[0] - 1)
            goes_on = tirx.And(self.skipped[0] == GROUP, left > GROUP)
            T.buffer_store(self.more, T.cast(goes_on, "int32"), [0])
            skipped = tirx.Min(self.skipped[0], left)
            moved = self.range[0] + skipped if place == 0 else self.range[1] - skipped
            T.buffer_store(self.range, moved, [place])

    def _look(self, tile: Tile, number: Expr, i: int) -> None:
        """Whether this lane finds a value between those of the queries in a tile of keys."""
        first = kept(number * self.block_n + self.lane)
        for part in range(-(-self.block_n // WARP)):
            column = tirx.Min(first + part * WARP, self.kernel.N - 1)
            value = T.Bind(self._value(self.match.key, tile, self.attention.keys, column))
            fits = tirx.And(value >= self.ends[0], value <= self.ends[1])
            fits = T.cast(fits, "int32")
            T.buffer_store(self.inside, T.bitwise_or(self.inside[i], fits) if part else fits, [i])

    def _value(self, expr: Expr, tile: Tile, axes: Sequence, at: Expr) -> Expr:
        env: dict[Var, Expr] = dict(tile.axes)
        env |= coordinates(axes, at, self.kernel.frame)
        return self.kernel.frame.rewrite(expr, env)
