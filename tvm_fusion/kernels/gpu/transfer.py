"""Vectors of a row program between global memory and register arrays."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..program.expr import FLOAT8_DTYPES, HALF_DTYPES, bytes_of, convert, dtype_of, substitute
from ..program.program import Output, Tile
from .arithmetic import pack_float8
from .frame import then
from .intrinsics import pack_halves
from .memory import Place, copy_in, copy_out
from .scope import RowScope
from .vectors import VectorElement


def places(buffer: Var, start: Expr | int, size: int) -> Place:
    """Addresses behind element `start` of a buffer whose elements take `size` bytes.

    Raises
    ------
    ValueError
        A number of bytes that ends within an element: no index says that.
    """

    def place(nbytes: int) -> Expr:
        if nbytes % size:
            raise ValueError(f"{nbytes} bytes behind an element of {size} lies within an element")
        return buffer.ptr_to([start + nbytes // size])

    return place


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
    load_values(scope, tile.param, start, tile.dtype, target, width, piece, hint)


def load_element(
    scope: RowScope, vector: VectorElement, column: Expr, target: tuple[Var, Expr | int], width: int
) -> None:
    """`width` columns of a vector element, where its guard holds."""
    element, here = vector.element, {scope.program.column_var: column}
    start = substitute(scope.row(element.offset), here)

    def load() -> None:
        load_values(scope, element.param, start, element.dtype, target, width, vector.piece, "nc")

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
    start = _add(scope.row(output.offset), column)
    store_values(scope.frame.buffers[output.param], start, values, output.dtype, piece, hint)


def store_values(
    target: Var, start: Expr, values: Sequence[Expr], dtype: str, piece: int, hint: str = "wb"
) -> None:
    """Consecutive elements of a parameter from `start` on, rounded and packed."""
    width, size = len(values), bytes_of(dtype)
    if width == 1:
        T.buffer_store(target, convert(values[0], dtype), [start])
        return
    if dtype in HALF_DTYPES and piece >= 4:
        words = T.alloc_local((width // 2,), "uint32")
        for pair in range(width // 2):
            low, high = (convert(v, "float32") for v in values[2 * pair : 2 * pair + 2])
            T.buffer_store(words, pack_halves(dtype, low, high), [pair])
        source = places(words, 0, 4)
    elif dtype in FLOAT8_DTYPES and piece >= 4:
        words = T.alloc_local((width // 4,), "uint32")
        for word in range(width // 4):
            four = [convert(v, "float32") for v in values[4 * word : 4 * word + 4]]
            T.buffer_store(words, pack_float8(dtype, four), [word])
        source = places(words, 0, 4)
    else:
        packed = T.alloc_local((width,), dtype)
        for lane, value in enumerate(values):
            T.buffer_store(packed, convert(value, dtype), [lane])
        source = places(packed, 0, size)
    copy_out(places(target, start, size), source, width * size, piece, hint)


def load_values(
    scope: RowScope,
    param: int,
    start: Expr,
    dtype: str,
    target: tuple[Var, Expr | int],
    width: int,
    piece: int,
    hint: str = "nc",
) -> None:
    """`width` elements of a parameter from `start` on into a register array at a slot."""
    size, (buffer, slot) = bytes_of(dtype), target
    source = places(scope.frame.buffers[param], start, size)
    copy_in(places(buffer, slot, size), source, width * size, piece, hint)


def _add(offset: Expr, column: Expr) -> Expr:
    """``offset + column``, in the wider dtype of the two."""
    if dtype_of(offset) == dtype_of(column):
        return offset + column
    return convert(offset, "int64") + convert(column, "int64")
