"""Elements in registers that are read and written several at a time."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.ir import Expr
from tvm.script import tirx as T

from ...gpu.access import half_of
from ...gpu.intrinsics import pack_halves
from ...gpu.memory import WIDEST, copy_behind, copy_out
from ...program.expr import HALF_DTYPES, bytes_of, constant, convert


class Elements:
    """`count` elements of a dtype, read `width` at a time; pairs of halves are one register."""

    def __init__(self, dtype: str, count: int, width: int) -> None:
        self.dtype, self.width = dtype, width
        self.paired = dtype in HALF_DTYPES and width % 2 == 0
        self.held = "uint32" if self.paired else dtype
        self.size = count // 2 if self.paired else count
        self.array = T.alloc_local((self.size,), self.held)

    def clear(self) -> None:
        """Sets all of them to zero."""
        with T.serial(self.size, unroll=True) as i:
            T.buffer_store(self.array, constant(0, self.held), [i])

    def read(self, at: Expr | int, buffer: Expr, indices: Sequence[Expr], offset: int = 0) -> None:
        """`width` elements of a parameter, from `offset` behind `indices` on, to number `at` on."""
        size = bytes_of(self.dtype)
        target = self.array.ptr_to([at // 2 if self.paired else at])
        source = buffer.ptr_to(list(indices))
        copy_behind(target, source, offset * size, self.width * size)

    def value(self, start: Expr | int, number: int) -> Expr:
        """Element ``start + number`` as a float32; `start` is a multiple of the width."""
        if self.paired:
            return half_of(self.dtype, self.array[start // 2 + number // 2], number % 2)
        return convert(self.array[start + number], "float32")


def write(buffer: Expr, indices: Sequence[Expr], values: Sequence[Expr], dtype: str) -> None:
    """Neighbours in a parameter, from `indices` on, which is a multiple of their number."""
    if len(values) == 1:
        T.buffer_store(buffer, convert(values[0], dtype), list(indices))
        return
    size = len(values) * bytes_of(dtype)
    paired = dtype in HALF_DTYPES
    packed = T.alloc_local((len(values) // 2 if paired else len(values),), _held(dtype))
    if paired:
        for pair in range(len(values) // 2):
            low, high = (convert(v, "float32") for v in values[2 * pair : 2 * pair + 2])
            T.buffer_store(packed, pack_halves(dtype, low, high), [pair])
    else:
        for i, value in enumerate(values):
            T.buffer_store(packed, convert(value, dtype), [i])
    *lead, last = indices
    copy_out(
        lambda b: buffer.ptr_to([*lead, last + b // bytes_of(dtype)]),
        lambda b: packed.ptr_to([b // (4 if paired else bytes_of(dtype))]),
        size,
        min(size, WIDEST),
    )


def _held(dtype: str) -> str:
    return "uint32" if dtype in HALF_DTYPES else dtype
