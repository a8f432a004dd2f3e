"""Keys of a query's value in the consumers of the Hopper attention, by what scouts found.

A query's keys lie between two ends, as by any bound, or their values are compared with its own.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ..tiled.points import HIDDEN, Points
from ..tiled.range import KeyTiles
from .match import slot_of, take_rows


class Same:
    """Emits what beside `points` hides keys of another value than the query's."""

    def __init__(self, points: Points):
        self.points, self.kernel, self.match = points, points.kernel, points.plan.match
        points.starts = True
        self.mixed = T.alloc_local((1,), "int32")

    def start(self) -> KeyTiles:
        """Emits the wait for what is found about a tile of queries; its tiles of keys."""
        keys, mixed = take_rows(self.kernel)
        T.buffer_store(self.mixed, mixed, [0])
        slot, _ = slot_of(self.kernel.turn)
        bounds, rows = self.points.bounds, self.kernel.shared.found.rows
        for half in range(2):
            row = self.points.first_row + half * 8
            ends = ((1, half, tirx.Min), (0, 2 + half, tirx.Max))
            for place, at, combine in ends:
                T.buffer_store(bounds, combine(bounds[at], rows[slot, row, place]), [at])
        return keys

    def apply(self, number: Expr) -> None:
        """Emits the comparison of values where keys of a value stand apart."""
        points, rewrite = self.points, self.kernel.frame.rewrite
        with T.If(self.mixed[0] != 0), T.Then():
            base = T.Bind(number * points.plan.config.block_n + points.column)
            zero = T.int32(0)
            own = [T.Bind(rewrite(self.match.query, points.point(h, zero))) for h in range(2)]
            for i in range(points.count):
                for v in range(2):
                    key = T.Bind(rewrite(self.match.key, points.point(0, base + (i * 8 + v))))
                    for half in range(2):
                        at = i * 4 + half * 2 + v
                        same = tirx.EQ(own[half], key)
                        value = tirx.Select(same, points.scores[at], T.float32(HIDDEN))
                        T.buffer_store(points.scores, value, [at])
