"""What is computed at each score beside a factor: logits and visibility.

Tiles of keys that a tile of queries sees as a whole need no look at visibility. What logits and
visibility read of memory is loaded ahead, while the products of the tile run, two columns at once
where they lie side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var
from tvm.script import tirx as T

from ...contraction.model import Axis, Binding, Output, fresh_var
from ...gemm.epilogue import EpilogueLoad, holds_load, take_loads
from ...gpu.access import half_of, load_word
from ...gpu.intrinsics import device_call
from ...gpu.product_frame import coordinates, lower
from ...program.expr import (
    HALF_DTYPES,
    bytes_of,
    conjunction,
    constant,
    convert,
    dtype_of,
    is_integer,
    linear_form,
    number,
    rebuild,
    uses_any,
)
from ..read.model import Attention
from .tiles import Tile, TiledAttention, TiledKernel

if TYPE_CHECKING:
    from .tiles import TiledKernel

# What logits and visibility read of memory, loaded ahead of the scores it meets.
#
#     mask[b, 0, i, j] of two neighbouring columns: one word of two halves, two floats, two bytes,
#     two integers; of a whole tile of halves eight columns at once, exchanged between four threads
#     bias[h, j]: the same for both rows of a thread
#     slope[h], length[b], ids[i]: once for each tile of queries
#
# Loads under a condition, and loads whose index holds another load, stay where they are.

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
    bindings, outputs, loads = take_loads(attention, part, groups, symbolic_strides=True)
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


# Conversions of integers that grow evenly along the keys, done once for each tile.
#
#     float32(j - i)  at column j = j0 + 8 * t + v   ->   float32(j0 - i) + (8 * t + v)
#
# A conversion takes as long as a special function; the sum is exact up to 2^24.


@dataclass(frozen=True, slots=True, eq=False)
class Offset:
    """``var = float32(value)``, which grows by `step` with each key."""

    var: Var
    value: Expr
    step: int

    def start(self, points: Points, half: int, column: Expr) -> Expr:
        """Its value at a row of a thread and a column."""
        value = points.frame.rewrite(self.value, points.unclamped(half, column))
        return convert(convert(value, "int32"), "float32")


def take_offsets(
    key: Axis, bindings: tuple[Binding, ...], value: Expr
) -> tuple[tuple[Binding, ...], Expr, tuple[Offset, ...]]:
    """Bindings and a value with placeholders for such conversions, and these."""
    found: list[Offset] = []
    names = [binding.var for binding in bindings]

    def visit(expr: Expr) -> Expr:
        if isinstance(expr, Var | TensorLoad):
            return expr
        if isinstance(expr, tirx.Cast) and dtype_of(expr) == "float32":
            taken = _offset(key, expr.value, names, len(found))
            if taken is not None:
                found.append(taken)
                return taken.var
        return rebuild(expr, visit)

    bindings = tuple(Binding(b.var, visit(b.value)) for b in bindings)
    return bindings, visit(value), tuple(found)


def _offset(key: Axis, expr: Expr, names: list[Var], count: int) -> Offset | None:
    if not is_integer(dtype_of(expr)) or holds_load(expr) or uses_any(expr, names):
        return None
    form = linear_form(expr, [key.var]) if uses_any(expr, [key.var]) else None
    step = None if form is None else number(form[0][0])
    return None if not step else Offset(fresh_var(f"o{count}", "float32"), expr, int(step))


HIDDEN = -math.inf


@dataclass(slots=True, eq=False)
class Formulas:
    """Logit, conditions and temporaries with placeholders for their loads and offsets.

    `conditions` are those beside the bounds of the keys.
    """

    bindings: tuple
    logit: Expr | None
    conditions: tuple[Expr, ...]
    loads: tuple[Load, ...]
    offsets: tuple[Offset, ...]


def read_formulas(problem: TiledAttention, conditions: tuple[Expr, ...]) -> Formulas:
    """What has to be computed at each score."""
    attention = problem.attention
    logit = None if problem.scale is not None else attention.logit
    bindings = attention.bindings if logit is not None or conditions else ()
    bindings, (logit, *conditions), loads = find_loads(attention, bindings, (logit, *conditions))
    offsets: tuple[Offset, ...] = ()
    if logit is not None and len(attention.keys) == 1:
        bindings, logit, offsets = take_offsets(attention.keys[0], bindings, logit)
    return Formulas(bindings, logit, tuple(conditions), loads, offsets)


class Points:
    """Emits the computation for the scores of 16 queries of each warp.

    `row` and `column` are the first row and the first column (of a tile) that the thread holds; of
    a tile's keys its warp may have `keys` from number `first` on, instead of all.
    """

    def __init__(
        self,
        kernel: TiledKernel,
        formulas: Formulas,
        scores: Expr,
        row: Expr,
        column: Expr,
        first: Expr | int = 0,
        keys: int | None = None,
    ):
        self.kernel, self.problem, self.formulas = kernel, kernel.problem, formulas
        self.plan, self.frame = kernel.plan, kernel.frame
        self.scores, self.first_row, self.column = scores, row, column
        self.first_key = first
        self.count = (self.plan.config.block_n if keys is None else keys) // 8
        self.reader = Reader(kernel, formulas.loads, self.count)
        self.bounds = T.alloc_local((4,), "int32") if self.plan.points_first else None
        # Whether rows have a first key.
        self.starts = any(not bound.upper for bound in self.plan.keys.bounds)
        self.rows: list[Expr] = []
        self.tile: Tile | None = None

    # ---- a tile of queries

    def start(self, tile: Tile) -> None:
        """Emits what all keys of a tile of queries share."""
        self.tile = tile
        if not self.plan.points_first and self.formulas.logit is None:
            return
        self.rows = []
        for half in range(2):
            row = T.Bind(tile.query + self.first_row + half * 8)
            self._limits(half, row)
            # What is read for a query beyond the last is never stored.
            self.rows.append(T.Bind(tirx.Min(row, self.kernel.M - 1)))
        self.reader.rows([self._axes(half, T.int32(0)) for half in range(2)])

    def _limits(self, half: int, row: Expr) -> None:
        """The last and the first key that a row sees by the bounds."""
        if self.bounds is None:
            return
        last, first = self.kernel.N - 1, T.int32(0)
        for bound in self.plan.keys.bounds:
            rest = convert(self.frame.rewrite(bound.rest, self.tile.axes), "int32")
            at = row * T.int32(bound.slope) + rest if bound.slope else rest
            if bound.upper:
                last = T.min(last, at)
            else:
                first = T.max(first, at)
        T.buffer_store(self.bounds, last, [half])
        T.buffer_store(self.bounds, first, [2 + half])

    # ---- a tile of keys

    def ahead(self, number: Expr) -> None:
        """Emits the loads for tile `number` of keys."""
        if self.reader.reads_columns:
            base = T.Bind(self._first_column(number))
            self.reader.columns([Point(self, half, base, self.column) for half in range(2)])

    def apply(self, number: Expr, by_point: bool) -> None:
        """Emits logits in place of scores; -inf where a key is hidden, if `by_point`."""
        formulas = self.formulas
        if formulas.logit is None and not by_point:
            return
        self.reader.settle(self.column)
        base = T.Bind(self._first_column(number))
        offsets = [[T.Bind(o.start(self, half, base)) for o in formulas.offsets] for half in (0, 1)]
        last = first = (None, None)
        if by_point:
            last = [T.Bind(self.bounds[half] - base) for half in range(2)]
            if self.starts:
                first = [T.Bind(self.bounds[2 + half] - base) for half in range(2)]
        for i in range(self.count):
            for half in range(2):
                for v in range(2):
                    place = i * 8 + v
                    at = i * 4 + half * 2 + v
                    value, seen = self._value(i, half, v, base, offsets[half], by_point)
                    if by_point:
                        seen = conjunction(
                            T.int32(place) <= last[half],
                            None if first[half] is None else T.int32(place) >= first[half],
                            seen,
                        )
                        value = tirx.Select(seen, value, T.float32(HIDDEN))
                    T.buffer_store(self.scores, value, [at])

    def _first_column(self, number: Expr) -> Expr:
        """The first key of the thread in tile `number`."""
        return number * self.plan.config.block_n + (self.first_key + self.column)

    def _value(
        self, i: int, half: int, v: int, base: Expr, offsets: list[Expr], by_point: bool
    ) -> tuple[Expr, Expr | None]:
        """The logit of an element, and its conditions beside the bounds."""
        formulas, score = self.formulas, self.scores[i * 4 + half * 2 + v]
        conditions = formulas.conditions if by_point else ()
        if formulas.logit is None and not conditions:
            return score, None
        env = self.point(half, base + (i * 8 + v))
        env[self.problem.attention.score] = T.Bind(score)
        for load in formulas.loads:
            env[load.var] = self.reader.value(load, i, half, v)
        for offset, start in zip(formulas.offsets, offsets, strict=True):
            env[offset.var] = start + T.float32(float(offset.step * (i * 8 + v)))
        for binding in formulas.bindings:
            env[binding.var] = T.Bind(self._evaluate(binding.value, env))
        value = score if formulas.logit is None else T.Bind(self._evaluate(formulas.logit, env))
        seen = conjunction(*(self._evaluate(c, env) for c in conditions))
        return value, seen

    def _evaluate(self, expr: Expr, env: dict[Var, Expr]) -> Expr:
        # Errors of a logit count as they are, not in relation to its size: the fast forms do.
        return lower(self.frame.rewrite(expr, env), True)

    def point(self, half: int, column: Expr, width: int = 1) -> dict[Var, Expr]:
        """The axes at a row of this thread and a column from where `width` exist."""
        if self.plan.ragged_keys:
            column = tirx.Min(column, self.kernel.N - width)
        return self._axes(half, column)

    def unclamped(self, half: int, column: Expr) -> dict[Var, Expr]:
        """The axes at a row of this thread and a column, which need not exist."""
        return self._axes(half, column)

    def _axes(self, half: int, column: Expr) -> dict[Var, Expr]:
        attention = self.problem.attention
        env = dict(self.tile.axes)
        env |= coordinates(attention.queries, self.rows[half], self.frame)
        return env | coordinates(attention.keys, column, self.frame)
