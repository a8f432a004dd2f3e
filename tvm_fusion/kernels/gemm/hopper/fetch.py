"""What an epilogue of tensor cores' sums loads from global memory, one piece ahead, or one part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...gpu.access import half_of, load_word
from ...gpu.product_frame import Tile
from ...program.expr import convert, dtype_of
from ..epilogue import EpilogueLoad
from .layout import Layout


class Fetch:
    """Loads of all segments' epilogues; `loads` holds those of each segment.

    `in_place`: there are no registers to read ahead of use, by `now` alone. `by_parts`: what is
    read for each element, a residual, comes in for all columns of a warp's 16 rows at once, by
    `part_ahead`, so that memory is waited for once a tile and not at each 16 rows.
    """

    def __init__(
        self,
        layout: Layout,
        loads: list[tuple[EpilogueLoad, ...]],
        in_place: bool = False,
        by_parts: bool = False,
    ):
        self.layout, self.frame, self.in_place = layout, layout.kernel.frame, in_place
        self.by_parts = by_parts
        pool: dict[tuple[int, str], list[Expr]] = {}
        self.kept = [self._with_registers(found, pool) for found in loads]

    def once(self, tile: Tile) -> None:
        """Emits the loads of what is the same for all columns of a tile."""
        for number, own in self._segments(tile, per_column=False):
            for load, registers in self.kept[number]:
                if load.per_column:
                    continue
                for half in range(2):
                    row = self.layout.row(own, half)
                    self._read(number, load, registers, half, own, row, tirx.IntImm("int32", 0))

    def ahead(self, chunk: int, tile: Tile) -> None:
        """Emits the loads for a piece, unless they come in place."""
        if self.in_place or chunk >= self.layout.plan.chunks:
            return
        for number, own in self._segments(tile, per_column=True):
            for load, registers in self.kept[number]:
                if load.per_column and not self._of_part(load):
                    self._read_piece(number, load, registers, own, chunk)

    def part_ahead(self, part: int, tile: Tile) -> None:
        """Emits the loads of a part of 16 rows that come in at once; parts take turns."""
        layout, present = self.layout, self.layout.part
        layout.part = part
        for number, own in self._segments(tile, per_column=True):
            for load, registers in self.kept[number]:
                for chunk in range(layout.plan.chunks) if self._of_part(load) else ():
                    self._read_piece(number, load, registers, own, chunk)
        layout.part = present

    def _of_part(self, load: EpilogueLoad) -> bool:
        return self.by_parts and load.is_matrix

    def value(
        self, load: EpilogueLoad, registers: Expr, chunk: int, group: int, half: int, v: int
    ) -> Expr:
        """What was loaded for an element, widened."""
        if not load.per_column:
            return convert(registers[half], dtype_of(load.var))
        at = registers[self._slot(load, chunk, group, half, v)]
        return half_of(load.dtype, at, v) if load.paired else convert(at, dtype_of(load.var))

    def _segments(self, tile: Tile, per_column: bool) -> Iterator[tuple[int, Tile]]:
        """The segments, if one of them has such loads."""
        if any(x.per_column is per_column for kept in self.kept for x, _ in kept):
            yield from self.layout.kernel.grid.each_segment(tile)

    def _read_piece(
        self, number: int, load: EpilogueLoad, registers: Expr, tile: Tile, chunk: int
    ) -> None:
        for group in self.layout.groups(chunk):
            for half in range(2 if load.per_row else 1):
                for v in range(0, 2, 2 if load.paired else 1):
                    self._read_column(number, load, registers, tile, (chunk, group, half, v))

    def now(self, number: int, tile: Tile, place: tuple[int, int, int, int]) -> None:
        """Emits the loads in place for an element: its piece, group, half, and which of two
        neighbours, whose first brings in words of both.
        """
        _, _, half, v = place
        if not self.in_place:
            return
        for load, registers in self.kept[number]:
            known = (half and not load.per_row) or (v and load.paired)
            if load.per_column and not known:
                self._read_column(number, load, registers, tile, place)

    def _read_column(
        self,
        number: int,
        load: EpilogueLoad,
        registers: Expr,
        tile: Tile,
        place: tuple[int, int, int, int],
    ) -> None:
        layout = self.layout
        chunk, group, half, v = place
        segment = layout.problem.segments[number]
        column = layout.column(tile, chunk, group) + v
        column = layout.existing_column(segment, column, 2 if load.paired else 1)
        at = self._slot(load, *place)
        self._read(number, load, registers, at, tile, layout.row(tile, half), column)

    def _read(
        self,
        number: int,
        load: EpilogueLoad,
        registers: Expr,
        at: int,
        tile: Tile,
        row: Expr,
        column: Expr,
    ) -> None:
        segment = self.layout.problem.segments[number]
        row = self.layout.existing_row(segment, row)
        point = self.layout.point(segment, tile, row, column)
        indices = self.frame.place(load.indices, point)
        source = self.frame.buffers[load.param]
        if load.per_column and load.paired:
            T.buffer_store(registers, load_word(source.ptr_to(indices)), [at])
        else:
            T.buffer_store(registers, source[tuple(indices)], [at])

    def _with_registers(
        self, loads: Iterable[EpilogueLoad], pool: dict[tuple[int, str], list[Expr]]
    ) -> list[tuple[EpilogueLoad, Expr]]:
        """A segment's loads and their registers, those of `pool` first: a tile has one segment, so
        that segments share them.
        """
        found, taken = [], Counter()
        for load in loads:
            kind = self._registers(load)
            known = pool.setdefault(kind, [])
            if taken[kind] == len(known):
                known.append(T.alloc_local(kind[:1], kind[1]))
            found.append((load, known[taken[kind]]))
            taken[kind] += 1
        return found

    def _registers(self, load: EpilogueLoad) -> tuple[int, str]:
        """Number and dtype of a load's registers: one for each row, or two pieces or parts."""
        if not load.per_column:
            return 2, load.dtype
        pieces = 2 * self.layout.plan.chunks if self._of_part(load) else 2
        return pieces * load.words_of_piece, "uint32" if load.paired else load.dtype

    def _slot(self, load: EpilogueLoad, chunk: int, group: int, half: int, v: int) -> int:
        """Where in its registers an element of a piece lies; pieces take turns, or parts."""
        rows, piece = 2 if load.per_row else 1, chunk % 2
        if self._of_part(load):
            piece = self.layout.part % 2 * self.layout.plan.chunks + chunk
        at = (piece * 2 + group) * rows + (half if load.per_row else 0)
        return at if load.paired else at * 2 + v
