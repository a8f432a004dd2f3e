"""Vectors of a row program between global memory and register arrays."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..expr import HALF_DTYPES, bytes_of, convert, dtype_of, substitute
from ..program import Output, Tile
from .frame import then
from .intrinsics import pack_halves
from .memory import Place, copy_in, copy_out
from .scope import RowScope
from .vectors import VectorElement


def places(buffer: Var, start: Expr | int, size: int) -> Place:
    """Addresses behind element `start` of a buffer whose elements take `size` bytes."""
    return lambda nbytes: buffer.ptr_to([start + nbytes // size])


def load_tile(
    scope: RowScope,
    tile: Tile,
    column: Expr,
    target: tuple[Var, Expr | int],
    width: int,
    piece: int,
    hint: str = "nc",
) -> None:
    """`width` columns of a tile, from `column` on, into a register array at a slot."""
    start = _add(scope.row(tile.offset), column)
    _load(scope, tile.param, start, tile.dtype, target, width, piece, hint)


def load_element(
    scope: RowScope, vector: VectorElement, column: Expr, target: tuple[Var, Expr | int], width: int
) -> None:
    """`width` columns of a vector element, where its guard holds."""
    element, here = vector.element, {scope.program.column_var: column}
    start = substitute(scope.row(element.offset), here)

    def load() -> None:
        _load(scope, element.param, start, element.dtype, target, width, vector.piece, "nc")

    if element.guard is None:
        load()
        return
    with then(substitute(scope.row(element.guard), here)):
        load()


def store_vector(
    scope: RowScope,
    output: Output,
    column: Expr,
    values: Sequence[Expr],
    piece: int,
    hint: str = "wb",
) -> None:
    """Consecutive columns of an output, rounded and packed."""
    width, size = len(values), bytes_of(output.dtype)
    start = _add(scope.row(output.offset), column)
    target = scope.frame.buffers[output.param]
    if width == 1:
        T.buffer_store(target, convert(values[0], output.dtype), [start])
        return
    if output.dtype in HALF_DTYPES and piece >= 4:
        words = T.alloc_local((width // 2,), "uint32")
        for pair in range(width // 2):
            low, high = (convert(v, "float32") for v in values[2 * pair : 2 * pair + 2])
            T.buffer_store(words, pack_halves(output.dtype, low, high), [pair])
        source = places(words, 0, 4)
    else:
        packed = T.alloc_local((width,), output.dtype)
        for lane, value in enumerate(values):
            T.buffer_store(packed, convert(value, output.dtype), [lane])
        source = places(packed, 0, size)
    copy_out(places(target, start, size), source, width * size, piece, hint)


def _load(
    scope: RowScope,
    param: int,
    start: Expr,
    dtype: str,
    target: tuple[Var, Expr | int],
    width: int,
    piece: int,
    hint: str,
) -> None:
    size, (buffer, slot) = bytes_of(dtype), target
    source = places(scope.frame.buffers[param], start, size)
    copy_in(places(buffer, slot, size), source, width * size, piece, hint)


def _add(offset: Expr, column: Expr) -> Expr:
    """``offset + column``, in the wider dtype of the two."""
    if dtype_of(offset) == dtype_of(column):
        return offset + column
    return convert(offset, "int64") + convert(column, "int64")
