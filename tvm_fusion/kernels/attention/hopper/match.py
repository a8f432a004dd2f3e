"""Keys that cannot match a query: conditions ``f(query) == g(key)``.

    documents[b, i] == documents[b, j], a tile of queries of documents 3 ... 5
      -> from the first to the last tile of keys with a document within 3 ... 5
      -> each query's first and last key, where the keys of each document stand together

The producer needs one thread of its warpgroup. The other warps are scouts: in turn they look at the
keys of a coming tile of queries and pass on in shared memory what they find, so that a search may
take as long as the consumers need for several tiles. Everything that is left out was read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...gemm.hopper.state import wait
from ...program.expr import dtype_of, is_integer, uses_any
from ..read.bounds import Range
from ..read.model import Attention
from ..tiled.range import KeyTiles
from ..tiled.tiles import kept

if TYPE_CHECKING:
    from .state import Kernel

WARP = 32

# Warps that search, behind that of the producer; each writes into a slot of its own.
SCOUTS = 3

# Places of a slot: tiles of keys as in `KeyTiles`, and whether keys of a value stand apart.
FIRST, END, WHOLE_FIRST, WHOLE_END, MIXED, PLACES = range(6)


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """A key is visible only where both are equal; `query` is over batch and queries, `key` over
    batch and keys.
    """

    query: Expr
    key: Expr


def split_match(attention: Attention, keys: Range) -> tuple[Match | None, Range]:
    """The first condition on single points that is such an equality of integers, if there is one,
    and what remains.
    """
    for condition in keys.rest:
        found = _match(attention, condition)
        if found is not None:
            rest = tuple(other for other in keys.rest if other is not condition)
            return found, Range(keys.bounds, rest)
    return None, keys


def _match(attention: Attention, condition: Expr) -> Match | None:
    queries = [axis.var for axis in attention.queries]
    keys = [axis.var for axis in attention.keys]
    names = [binding.var for binding in attention.bindings]
    if not isinstance(condition, tirx.EQ) or not is_integer(dtype_of(condition.a)):
        return None
    if dtype_of(condition.a) != dtype_of(condition.b) or uses_any(condition, names):
        return None
    for query, key in ((condition.a, condition.b), (condition.b, condition.a)):
        if not uses_any(query, keys) and not uses_any(key, queries) and uses_any(key, keys):
            return Match(query, key)
    return None


# ---- what scouts find


@dataclass(slots=True, eq=False)
class Found:
    """What scouts find out about coming tiles of queries, in shared memory.

    Attributes
    ----------
    tiles : for each slot the `PLACES`.
    rows : for each slot the first and the last key of each query.
    tiles_full : the first and the last tile are there, for the producer.
    rows_full : the rest is there as well, for the consumers; an arrival of each lane.
    empty : all have read it.
    """

    tiles: Expr
    rows: Expr
    tiles_full: Expr
    rows_full: Expr
    empty: Expr

    @property
    def barriers(self) -> list[tuple[Expr, int, int]]:
        """Barriers, how many, and how many arrivals each waits for."""
        return [
            (self.tiles_full, SCOUTS, 1),
            (self.rows_full, SCOUTS, WARP),
            (self.empty, SCOUTS, 1),
        ]


def found_bytes(block_m: int) -> int:
    """Shared memory of `Found.rows`; the rest lies where barriers do."""
    return SCOUTS * block_m * 2 * 4


def allocate_found(pool: T.SMEMPool, block_m: int) -> Found:
    """Emits the shared memory."""
    tiles = pool.alloc((SCOUTS, PLACES), "int32", align=8)
    rows = pool.alloc((SCOUTS, block_m, 2), "int32", align=8)
    return Found(tiles, rows, *(pool.alloc((SCOUTS,), "uint64", align=8) for _ in range(3)))


def slot_of(turn: Expr) -> tuple[Expr, Expr]:
    """The slot of a turn, and the parity of its use."""
    slots = T.int32(SCOUTS)
    return T.truncmod(turn, slots), T.bitwise_and(T.truncdiv(turn, slots), T.int32(1))


def take_range(kernel: Kernel) -> tuple[Expr, Expr]:
    """Emits the producer's wait for the range of its tile; the first tile of keys, and the one
    behind the last.
    """
    found = kernel.shared.found
    slot, phase = slot_of(kernel.turn)
    wait(found.tiles_full.ptr_to([slot]), phase)
    first, end = (kept(found.tiles[slot, place]) for place in (FIRST, END))
    return first, end


def take_rows(kernel: Kernel) -> tuple[KeyTiles, Expr]:
    """Emits the consumers' wait for what is found about the present tile: its tiles of keys, and
    whether keys of a value stand apart.
    """
    found = kernel.shared.found
    slot, phase = slot_of(kernel.turn)
    wait(found.rows_full.ptr_to([slot]), phase)
    places = [found.tiles[slot, i] for i in (FIRST, WHOLE_FIRST, WHOLE_END, END)]
    return KeyTiles(*map(kept, places)), kept(found.tiles[slot, MIXED])


def release_found(kernel: Kernel) -> None:
    """Emits the hand-back of what was found about the tile before, which all have read."""
    with T.If(kernel.turn > 0), T.Then():
        slot, _ = slot_of(kernel.turn - 1)
        empty = kernel.shared.found.empty.ptr_to([slot])
        T.evaluate(T.ptx.mbarrier.arrive.shared.b64(empty, T.uint32(1)))
