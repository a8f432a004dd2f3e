"""What logits and visibility read of memory, loaded ahead of the scores it meets.

    mask[b, 0, i, j] of two neighbouring columns: one word of two halves, two floats, two bytes,
    two integers; of a whole tile of halves eight columns at once, exchanged between four threads
    bias[h, j]: the same for both rows of a thread
    slope[h], length[b], ids[i]: once for each tile of queries

Loads under a condition, and loads whose index holds another load, stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...contraction.model import Binding, Output
from ...gemm.epilogue_loads import EpilogueLoad, take_loads
from ...gpu.intrinsics import device_call
from ...gpu.words import half_of, load_word
from ...program.expr import HALF_DTYPES, bytes_of, constant, convert, dtype_of
from ..read.model import Attention

if TYPE_CHECKING:
    from .points import Points
    from .tiles import TiledKernel

Load = EpilogueLoad

# Dtypes of which two neighbouring values take two registers, with their names in C++ and PTX.
WIDE = {
    "float32": ("float", "f32", "f"),
    "int32": ("int", "s32", "r"),
    "int64": ("int64_t", "s64", "l"),
}


def find_loads(
    attention: Attention, bindings: tuple[Binding, ...], values: Sequence[Expr | None]
) -> tuple[tuple[Binding, ...], list[Expr | None], tuple[Load, ...]]:
    """Bindings and values with placeholders for the loads, and the loads; None stays None."""
    known = [value for value in values if value is not None]
    outputs = tuple(Output(0, (), value, dtype_of(value)) for value in known)
    part = SimpleNamespace(bindings=bindings, outputs=outputs)
    groups = {name: attention.groups[name] for name in ("batch", "m", "n")}
    bindings, outputs, loads = take_loads(attention, part, groups)
    found = iter(outputs)
    return bindings, [None if v is None else next(found).value for v in values], loads


def pair_registers(load: Load) -> tuple[int, str]:
    """Number and dtype of the registers for two neighbouring columns."""
    if is_pair(load):
        return (2, load.dtype) if load.dtype in WIDE else (1, "uint32")
    return 2, load.dtype


def registers_of_score(loads: Sequence[Load]) -> float:
    """Registers for each score that a thread holds."""
    found = 0.0
    for load in loads:
        if load.per_column:
            number, dtype = pair_registers(load)
            size = number * max(1, bytes_of(dtype) // 4) / 2
            found += size if load.per_row else size / 2
    return found


def is_pair(load: Load) -> bool:
    """Whether columns 2 i and 2 i + 1 are one aligned access."""
    if load.access is None or not load.access.aligned(2, "n"):
        return False
    return load.dtype in (*HALF_DTYPES, *WIDE, "bool", "int8", "uint8")


def reads_eight(load: Load) -> bool:
    """Whether eight columns from 8 * i on are one aligned access."""
    return (
        load.per_row
        and load.per_column
        and load.dtype in HALF_DTYPES
        and load.access is not None
        and load.access.aligned(8, "n")
    )


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A row of a thread, and the first column it holds: of all keys, and of a tile."""

    points: Points
    half: int
    base: Expr
    column: Expr

    def axes(self, offset: int, width: int = 1) -> dict[Var, Expr]:
        """The axes `offset` columns on, from where `width` columns exist."""
        return self.points.point(self.half, self.base + offset, width)


class Reader:
    """Registers of the loads of one consumer thread for `count` groups of 8 columns."""

    def __init__(self, kernel: TiledKernel, loads: Sequence[Load], count: int):
        self.frame, self.loads, self.count = kernel.frame, loads, count
        # Groups of 8 columns, up to the last four, whose words come by four.
        self.by_four = {load.var: count // 4 * 4 if reads_eight(load) else 0 for load in loads}
        self.kept: dict[Var, Expr] = {}
        for load in loads:
            rows = 2 if load.per_row else 1
            number, dtype = pair_registers(load) if load.per_column else (1, load.dtype)
            size = number * rows * (count if load.per_column else 1)
            self.kept[load.var] = T.alloc_local((size,), "uint8" if dtype == "bool" else dtype)

    @property
    def reads_columns(self) -> bool:
        """Whether there is something to load for each tile of keys."""
        return any(load.per_column for load in self.loads)

    def rows(self, axes: Sequence[dict[Var, Expr]]) -> None:
        """Emits the loads of what is the same for all keys; `axes` at both rows."""
        for load in self.loads:
            if not load.per_column:
                for half in range(2 if load.per_row else 1):
                    self._single(load, half, axes[half])

    def columns(self, points: Sequence[Point]) -> None:
        """Emits the loads for a tile of keys."""
        for load in self.loads:
            if not load.per_column:
                continue
            number, _ = pair_registers(load)
            by_four = self.by_four[load.var]
            for i in range(0, by_four, 4):
                for half in range(2):
                    # Of a thread's columns 2 c and 2 c + 1: eight from 8 c on.
                    axes = points[half].axes(i * 8 + points[half].column * 3, 8)
                    place = self._pointer(load, axes)
                    words = self._words(load, i, half)
                    T.evaluate(_load_four(place, *words))
            for i in range(by_four, self.count):
                for half in range(2 if load.per_row else 1):
                    at = self._place(load, i, half) * number
                    if not is_pair(load):
                        for v in range(2):
                            self._single(load, at + v, points[half].axes(i * 8 + v))
                        continue
                    place = self._pointer(load, points[half].axes(i * 8, 2))
                    self._pair(load, at, place)

    def settle(self, column: Expr) -> None:
        """Emits the exchange of what came by four words, which are there by now: thread c of four
        has got columns 8 c ... 8 c + 7 and holds pair c of each eight then. `column` is 2 c.
        """
        for load in self.loads:
            for i in range(0, self.by_four[load.var], 4):
                for half in range(2):
                    T.evaluate(_exchange(*self._words(load, i, half), column))

    def _words(self, load: Load, i: int, half: int) -> list[Expr]:
        """Registers of four pairs of columns, of eight each."""
        return [self.kept[load.var][self._place(load, i + k, half)] for k in range(4)]

    def _pointer(self, load: Load, axes: dict[Var, Expr]) -> Expr:
        return self.frame.buffers[load.param].ptr_to(self.frame.place(load.indices, axes))

    def _place(self, load: Load, i: int, half: int) -> int:
        return i * 2 + half if load.per_row else i

    def _single(self, load: Load, at: int, axes: dict[Var, Expr]) -> None:
        indices = self.frame.place(load.indices, axes)
        value, kept = self.frame.buffers[load.param][tuple(indices)], self.kept[load.var]
        T.buffer_store(kept, convert(value, dtype_of(kept[0])), [at])

    def _pair(self, load: Load, at: int, place: Expr) -> None:
        kept = self.kept[load.var]
        if load.dtype in HALF_DTYPES:
            T.buffer_store(kept, load_word(place), [at])
        elif load.dtype in WIDE:
            T.evaluate(_load_two(load.dtype, place, kept[at], kept[at + 1]))
        else:
            T.buffer_store(kept, _load_bytes(place), [at])

    def value(self, load: Load, i: int, half: int, v: int) -> Expr:
        """What was loaded for an element, widened."""
        kept = self.kept[load.var]
        half = half if load.per_row else 0
        target = dtype_of(load.var)
        if not load.per_column:
            return _from_register(kept[half], target)
        number, _ = pair_registers(load)
        at = self._place(load, i, half) * number
        if number == 2:
            return _from_register(kept[at + v], target)
        if load.dtype in HALF_DTYPES:
            return half_of(load.dtype, kept[at], v)
        byte = T.bitwise_and(kept[at] >> T.uint32(8 * v), T.uint32(255))
        return _from_register(T.cast(byte, "int8") if load.dtype == "int8" else byte, target)


def _from_register(value: Expr, target: str) -> Expr:
    """A register's value in the dtype of the placeholder."""
    if target == "bool":
        return tirx.NE(value, constant(0, dtype_of(value)))
    return convert(value, target)


def _load_two(dtype: str, place: Expr, low: Expr, high: Expr) -> Expr:
    """Two neighbouring values at an aligned place, read where it stands (see `load_word`)."""
    name, ptx, kind = WIDE[dtype]
    body = f'asm volatile("ld.global.v2.{ptx} {{%0, %1}}, [%2];" '
    body += f': "={kind}"(a), "={kind}"(b) : "l"(p));'
    arguments = f"const void* p, {name}& a, {name}& b"
    return device_call("void", f"load_two_{dtype}", arguments, body, place, low, high)


def _load_four(place: Expr, *words: Expr) -> Expr:
    """Four words at an aligned place, read where they stand."""
    body = 'asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];" '
    body += ': "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(p));'
    arguments = "const void* p, unsigned& a, unsigned& b, unsigned& c, unsigned& d"
    return device_call("void", "load_four", arguments, body, place, *words)


def _exchange(a: Expr, b: Expr, c: Expr, d: Expr, column: Expr) -> Expr:
    """Turns the 4 x 4 words of four neighbouring threads: word i of thread j for j of i."""
    swap = (
        "send = {bit} ? {low} : {high}; got = __shfl_xor_sync(0xffffffffu, send, {lanes}); "
        "if ({bit}) {low} = got; else {high} = got; "
    )
    body = "bool odd = column & 2, upper = column & 4; unsigned send, got; "
    for bit, lanes, pairs in (("odd", 1, ("ab", "cd")), ("upper", 2, ("ac", "bd"))):
        for low, high in pairs:
            body += swap.format(bit=bit, lanes=lanes, low=low, high=high)
    arguments = "unsigned& a, unsigned& b, unsigned& c, unsigned& d, int column"
    return device_call("void", "exchange_words", arguments, body, a, b, c, d, column)


def _load_bytes(place: Expr) -> Expr:
    """Two neighbouring bytes at an aligned place."""
    body = 'unsigned short u; asm volatile("ld.global.u16 %0, [%1];" : "=h"(u) : "l"(p)); return u;'
    return device_call("uint32", "load_bytes", "const void* p", body, place)
