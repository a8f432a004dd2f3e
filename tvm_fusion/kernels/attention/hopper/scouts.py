"""Scouts of the Hopper attention: warps that look at the keys of coming tiles of queries.

    keys       1 1 1 4 4 4 4 | 4 4 9 9 9 9 9 | ...      queries of 4 and 9
    tiles      from the first to the last with a value within 4 ... 9 (`tiled.matches`)
    runs       4: keys 3 ... 8;  9: keys 9 ... 13;  of a query those of its value

Where each value of the queries has one run of keys, runs are bounds as those of a causal attention:
tiles within them need no look at single points. Where a value has several, or there are more runs
than lanes, values are compared point by point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...gemm.hopper.state import wait
from ...gpu.intrinsics import device_call
from ...program.expr import dtype_of
from ..read.bounds import Match
from ..tiled.matches import GROUP, Matches
from ..tiled.online_softmax import ALL_LANES, some_lane
from ..tiled.tiles import kept
from .state import END, FIRST, MIXED, WARP, WHOLE_END, WHOLE_FIRST, arrive, slot_of

if TYPE_CHECKING:
    from ..tiled.tiles import Tile
    from .state import Kernel


def emit_scouts(kernel: Kernel) -> None:
    """Emits the loop of the scouts over the tiles of queries."""
    found = kernel.shared.found
    search = Search(kernel, kernel.plan.match)
    own = T.Bind(kernel.thread // WARP - 1)
    with kernel.each_tile() as tile:
        slot, phase = slot_of(kernel.turn)
        with T.If(tirx.EQ(slot, own)), T.Then():
            search.find_tiles(tile)
            wait(found.empty.ptr_to([slot]), T.bitwise_xor(phase, T.int32(1)))
            with T.If(tirx.EQ(search.lane, 0)), T.Then():
                for place in (FIRST, END):
                    T.buffer_store(found.tiles, search.range[place], [slot, place])
                arrive(found.tiles_full.ptr_to([slot]))
            search.find_runs(tile)
            search.store_rows(tile, slot)
            arrive(found.rows_full.ptr_to([slot]))


def lanes_with(condition: Expr) -> Expr:
    """An int32 with a bit for each lane where a condition holds."""
    body = "return (int)__ballot_sync(0xffffffffu, x);"
    return device_call("int32", "lanes_with", "int x", body, T.cast(condition, "int32"))


def lowest_bit(bits: Expr) -> Expr:
    """The place of the lowest bit that is set."""
    return device_call("int32", "lowest_bit", "int x", "return __ffs(x) - 1;", bits)


def from_lane(value: Expr, lane: Expr | int) -> Expr:
    """The value of another lane."""
    return T.tvm_warp_shuffle(T.uint32(ALL_LANES), value, lane, WARP, WARP)


class Search(Matches):
    """Emits the search of one warp; `range` holds the first tile of keys, and the one behind the
    last. A lane less than `count` has a run of keys: `value`, `first`, `last`.
    """

    def __init__(self, kernel: Kernel, match: Match):
        super().__init__(kernel, match, T.Bind(kernel.thread % WARP))
        dtype = dtype_of(match.query)
        self.range = T.alloc_local((2,), "int32")
        self.inside = T.alloc_local((GROUP,), "int32")
        self.skipped = T.alloc_local((1,), "int32")
        self.more = T.alloc_local((1,), "int32")
        # Values of the keys that are looked at, of the last one before them, and of the one before
        # a lane's own.
        self.keys, self.before = T.alloc_local((GROUP,), dtype), T.alloc_local((1,), dtype)
        self.above = T.alloc_local((1,), dtype)
        self.place, self.changes = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
        self.value = T.alloc_local((1,), dtype)
        self.first, self.last = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
        # Runs so far, the lane of the one that goes on (or `WARP`), and whether a value has two.
        self.count, self.open = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
        self.mixed = T.alloc_local((1,), "int32")
        self.row = T.alloc_local((2,), "int32")
        self.whole = T.alloc_local((2,), "int32")

    # ---- tiles of keys

    def find_tiles(self, tile: Tile) -> None:
        """Emits the search for the tiles of keys of a tile of queries."""
        self.values_of_queries(tile)
        for place, value in ((FIRST, tile.keys.first), (END, tile.keys.end)):
            T.buffer_store(self.range, value, [place])
        self._search(tile, FIRST, lambda i: tirx.Min(self.range[0] + i, self.range[1] - 1))
        self._search(tile, END, lambda i: tirx.Max(self.range[1] - 1 - i, self.range[0]))

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
                with T.If(some_lane(self.inside[i] != 0) != 0), T.Then():
                    T.buffer_store(self.skipped, T.int32(i), [0])
            left = T.Bind(self.range[1] - self.range[0] - 1)
            goes_on = tirx.And(self.skipped[0] == GROUP, left > GROUP)
            T.buffer_store(self.more, T.cast(goes_on, "int32"), [0])
            skipped = tirx.Min(self.skipped[0], left)
            moved = self.range[0] + skipped if place == FIRST else self.range[1] - skipped
            T.buffer_store(self.range, moved, [place])

    def _look(self, tile: Tile, number: Expr, i: int) -> None:
        """Whether this lane finds a value between those of the queries in a tile of keys."""
        first = kept(number * self.block_n + self.lane)
        for part in range(-(-self.block_n // WARP)):
            fits = T.cast(self.fits(T.Bind(self.key(tile, first + part * WARP))), "int32")
            T.buffer_store(self.inside, T.bitwise_or(self.inside[i], fits) if part else fits, [i])

    # ---- runs of keys of one value

    def find_runs(self, tile: Tile) -> None:
        """Emits the search for runs within the range."""
        start = T.Bind(self.range[0] * self.block_n)
        stop = T.Bind(tirx.Min(self.range[1] * self.block_n, self.kernel.N))
        state = ((self.count, 0), (self.open, WARP), (self.mixed, 0), (self.place, start))
        for buffer, value in state:
            T.buffer_store(buffer, T.int32(value) if isinstance(value, int) else value, [0])
        with T.While(tirx.And(self.place[0] < stop, self.mixed[0] == 0)):
            for i in range(GROUP):
                value = self.key(tile, self.place[0] + (self.lane + i * WARP))
                T.buffer_store(self.keys, value, [i])
            for i in range(GROUP):
                self._runs_of_a_group(start, stop, i)
            T.buffer_store(self.place, self.place[0] + GROUP * WARP, [0])
        self._close(stop - 1)

    def _runs_of_a_group(self, start: Expr, stop: Expr, i: int) -> None:
        """The runs that begin at one of the keys that the lanes hold."""
        at = T.Bind(self.place[0] + (self.lane + i * WARP))
        # All lanes take part, also the one that does not use what it gets.
        T.buffer_store(self.above, from_lane(self.keys[i], tirx.Max(self.lane - 1, 0)), [0])
        with T.If(tirx.EQ(self.lane, 0)), T.Then():
            T.buffer_store(self.above, self.before[0], [0])
        changes = tirx.Or(self.keys[i] != self.above[0], tirx.EQ(at, start))
        bits = lanes_with(tirx.And(changes, at < stop))
        T.buffer_store(self.changes, bits, [0])
        T.buffer_store(self.before, from_lane(self.keys[i], WARP - 1), [0])
        with T.While(tirx.And(self.changes[0] != 0, self.mixed[0] == 0)):
            lane = T.Bind(lowest_bit(self.changes[0]))
            rest = T.bitwise_and(self.changes[0], self.changes[0] - 1)
            T.buffer_store(self.changes, rest, [0])
            self._begin(self.place[0] + (lane + i * WARP), T.Bind(from_lane(self.keys[i], lane)))

    def _begin(self, at: Expr, value: Expr) -> None:
        """A run of keys that begins at a key; only those that queries may have are kept."""
        self._close(at - 1)
        with T.If(self.fits(value)), T.Then():
            again = some_lane(tirx.And(self.lane < self.count[0], tirx.EQ(self.value[0], value)))
            mixed = tirx.Or(again != 0, tirx.EQ(self.count[0], WARP))
            T.buffer_store(self.mixed, T.cast(mixed, "int32"), [0])
            with T.If(tirx.EQ(self.lane, self.count[0])), T.Then():
                T.buffer_store(self.value, value, [0])
                T.buffer_store(self.first, at, [0])
            T.buffer_store(self.open, self.count[0], [0])
            T.buffer_store(self.count, self.count[0] + 1, [0])

    def _close(self, last: Expr) -> None:
        with T.If(tirx.EQ(self.lane, self.open[0])), T.Then():
            T.buffer_store(self.last, last, [0])
        T.buffer_store(self.open, T.int32(WARP), [0])

    # ---- rows

    def store_rows(self, tile: Tile, slot: Expr) -> None:
        """Emits the first and the last key of each query, and the tiles that all of them see."""
        found, block_n = self.kernel.shared.found, T.int32(self.block_n)
        T.buffer_store(self.whole, T.int32(0), [0])
        T.buffer_store(self.whole, self.kernel.N - 1, [1])
        for i in range(self.block_m // WARP):
            self._row(T.Bind(self.query(tile, i)))
            for place, combine in enumerate((tirx.Max, tirx.Min)):
                T.buffer_store(found.rows, self.row[place], [slot, self.lane + i * WARP, place])
                own = combine(self.whole[place], self.row[place])
                T.buffer_store(self.whole, own, [place])
        self.across_lanes(self.whole, (tirx.Max, tirx.Min))
        # All tiles at or above 0 are looked at by point.
        mixed = self.mixed[0] != 0
        whole_end = tirx.Min(T.truncdiv(self.whole[1] + 1, block_n), tile.keys.whole_end)
        whole_first = T.truncdiv(self.whole[0] + (self.block_n - 1), block_n)
        whole_first = tirx.Max(whole_first, tile.keys.whole_first)
        with T.If(tirx.EQ(self.lane, 0)), T.Then():
            whole_end = tirx.Select(mixed, T.int32(0), whole_end)
            T.buffer_store(found.tiles, whole_first, [slot, WHOLE_FIRST])
            T.buffer_store(found.tiles, whole_end, [slot, WHOLE_END])
            T.buffer_store(found.tiles, self.mixed[0], [slot, MIXED])

    def _row(self, value: Expr) -> None:
        """The run of a query's value in `row`; none, where no key has it."""
        mixed, none = self.mixed[0] != 0, self.kernel.N
        T.buffer_store(self.row, tirx.Select(mixed, T.int32(0), none), [0])
        T.buffer_store(self.row, tirx.Select(mixed, none, T.int32(0)) - 1, [1])
        with (
            T.If(tirx.Not(mixed)),
            T.Then(),
            T.serial(0, self.count[0], unroll=False) as run,
        ):
            run_value = T.Bind(from_lane(self.value[0], run))
            ends = [T.Bind(from_lane(buffer[0], run)) for buffer in (self.first, self.last)]
            with T.If(tirx.EQ(run_value, value)), T.Then():
                for place, end in enumerate(ends):
                    T.buffer_store(self.row, end, [place])
