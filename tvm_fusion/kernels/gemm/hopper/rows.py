"""Outputs of the Hopper GEMM whose rows the TMA cannot address, stored row by row.

Where rows start off 4 bytes, what a thread holds of a row would leave in pieces of 2 bytes. So the
columns of a box go through shared memory, and a warp stores a row of it at a time, in aligned words
of neighbouring columns.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...contraction.reader import Output
from ...gpu.intrinsics import device_call
from ...gpu.product_frame import Frame
from ...gpu.product_grid import Tile
from .layout import Layout
from .model import BOX, HopperSegment
from .state import warpgroup_sync

ROWS_OF_WARP = 16

# Rows whose words are all read before the first is stored: behind a barrier of the warp, or the
# compiler would read each where it is stored, one after the other.
AT_ONCE = 8

# Columns c and c + 1 of a row; behind the last column comes the first, which an odd row has alone.
# Element c lies in the swizzled box at b[((c / 8) ^ (row % 8)) * 8 + c % 8].
_ROW_WORD = (
    "const unsigned short* b = (const unsigned short*)s + row * 64; int x = row & 7; "
    "int c = 2 * lane + ((int)((size_t)d >> 1) & 1), e = (c + 1) & 63; "
    "unsigned v = b[(((e >> 3) ^ x) << 3) + (e & 7)]; "
    "return v << 16 | b[(((c >> 3) ^ x) << 3) + (c & 7)];"
)
_STORE_WORD = (
    "unsigned short* p = (unsigned short*)d; int odd = (int)((size_t)d >> 1) & 1; "
    "int c = 2 * lane + odd; if (c + 1 < count) *(unsigned*)(p + c) = v; "
    "else if (c < count) p[c] = (unsigned short)v; "
    "if (odd && lane == 31) p[0] = (unsigned short)(v >> 16);"
)


def store_rows(
    frame: Frame, layout: Layout, segment: HopperSegment, output: Output, tile: Tile, box: int
) -> None:
    """Emits the stores of a box that all threads of the warpgroup have written."""
    plan, target = layout.plan, frame.output(output.param)
    column = T.Bind(layout.first_column(tile) + box * BOX)
    count = T.Bind(tirx.Min(T.int32(min(BOX, plan.share_n - box * BOX)), segment.N - column))
    source = layout.kernel.shared.boxes.ptr_to([layout.number, 0])
    top = tile.m * plan.config.block_m + layout.number * BOX
    warpgroup_sync(layout.number)
    inside = column < segment.N if layout.ragged_columns(segment) else tirx.IntImm("bool", 1)
    with T.If(inside), T.Then():
        for first in range(0, ROWS_OF_WARP, AT_ONCE):
            rows = [T.Bind(layout.warp_row + i) for i in range(first, first + AT_ONCE)]
            places = []
            for own in rows:
                row = layout.existing_row(segment, top + own)
                point = layout.point(segment, tile, row, column)
                places.append(target.ptr_to(frame.place(output.indices, point)))
            words = [
                T.Bind(_row_word(place, source, own, layout.lane))
                for place, own in zip(places, rows, strict=True)
            ]
            T.evaluate(device_call("void", "words_read", "", "__syncwarp();"))
            for place, own, word in zip(places, rows, words, strict=True):
                exists = tirx.IntImm("bool", 1)
                if layout.ragged_rows(segment):
                    exists = top + own < layout.rows(segment)
                with T.If(exists), T.Then():
                    T.evaluate(_store_word(place, word, layout.lane, count))
    warpgroup_sync(layout.number)


def _row_word(place: Expr, box: Expr, row: Expr, lane: Expr) -> Expr:
    """The columns of a row of a box that a lane stores at `place`, where the row starts."""
    arguments = "const void* d, const void* s, int row, int lane"
    return device_call("uint32", "row_word", arguments, _ROW_WORD, place, box, row, lane)


def _store_word(place: Expr, word: Expr, lane: Expr, count: Expr) -> Expr:
    """Stores them, those of the first `count` columns; there is at least one."""
    arguments = "void* d, unsigned v, int lane, int count"
    return device_call("void", "store_row_word", arguments, _STORE_WORD, place, word, lane, count)
