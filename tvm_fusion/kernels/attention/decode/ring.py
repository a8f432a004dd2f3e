"""Keys and values on their way through shared memory, copied by cp.async.

Each warp has a ring of its own: it waits for its own copies, and no barrier of the block is needed.
A stage holds the keys of a step, then their values; `Tile` says how their rows lie.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...gemm.mma.units import CHUNK, copy_async
from ...gpu.product_frame import Frame
from ...program.expr import conjunction, constant
from ..tiled.source import BYTES, Lines, Source
from .config import WARP, Tile

Limits = tuple[Expr, Expr]
"""No key at or above the first is visible; none at or above the second exists."""


class Rows(Lines):
    """Copies of the rows of keys (or of values) of one unit into a warp's ring."""

    def __init__(
        self,
        frame: Frame,
        source: Source,
        axes: tuple,
        env: Mapping[Var, Expr],
        ring: Expr,
        tile: Tile,
    ):
        super().__init__(frame, source, axes, env)
        self.ring, self.tile = ring, tile
        self.per_row = tile.width // source.piece

    def prepare(self, lane: Expr) -> None:
        """Emits what does not change from step to step."""
        super().prepare()
        self.lane = lane

    def copy(self, stage: Expr, first: Expr, limits: Limits | None) -> None:
        """Starts the copies of the keys of a step from `first` on, to the address `stage`; zeros in
        place of keys that are not visible."""
        tile = self.tile
        count = None if limits is None else limits[1]
        start, last = self._split(0)
        line = None
        if self.evenly and WARP % self.per_row == 0:
            line = T.Bind(self.at(first + start, last))
        for i in range(tile.rows * self.per_row // WARP):
            row, column = self._split(i)
            if line is not None:
                at = line + self.further(i * (WARP // self.per_row))
            else:
                at = self.at(first + row, column, count)
            inside = None if limits is None else first + row < limits[0]
            if tile.width != self.source.extent * BYTES:
                end = self.source.extent * BYTES // self.source.piece
                inside = conjunction(inside, column < end)
            within = T.bitwise_xor(column * self.source.piece, tile.turn(row) * CHUNK)
            place = self.ring.ptr_to([stage + (row * tile.width + within + tile.start)])
            T.evaluate(copy_async(self.source.piece, place, self.pointer, at, inside))

    def _split(self, i: int) -> tuple[Expr, Expr]:
        """Row and piece within the row of a lane's copy number `i`."""
        if WARP % self.per_row == 0:
            return self.lane // self.per_row + i * (WARP // self.per_row), self.lane % self.per_row
        if self.per_row % WARP == 0:
            across = self.per_row // WARP
            return constant(i // across, "int32"), self.lane + i % across * WARP
        unit = self.lane + i * WARP
        return unit // self.per_row, unit % self.per_row
