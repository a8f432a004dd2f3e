"""Pairs of halves for the tensor cores, from words as they lie where that can be.

eight fields of 4 bits in a word:  (0, 4), (1, 5), (2, 6), (3, 7), each 16 bits apart
  one LOP3 and one HFMA2 a pair; the other operand takes its elements in the same order
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..expr import dtype_of, same
from .gemm_skinny_bits import linear_of
from .gemm_skinny_fetch import Env, Fetch
from .gemm_skinny_values import Loaded, Values
from .gemm_skinny_words import (
    byte_perm,
    field_pair,
    half_add,
    half_fma,
    half_multiply,
    is_half,
    word_of,
)
from .intrinsics import pack_halves

Pair = tuple[int, int]


@dataclass(slots=True, eq=False)
class Halves:
    """The values of a block in half precision `dtype`, two to a register."""

    values: Values
    dtype: str
    _fields: list | None = None

    def plain(self) -> Fetch | None:
        """The fetch of an operand that is nothing but halves, two to a word."""
        first = self._half(0)
        if first is None or first[0].piece % 4:
            return None
        found = [self._half(p) for p in range(len(self.values.inner))]
        inside = all(f is not None and f[0] is first[0] and f[1] == p for p, f in enumerate(found))
        return first[0] if inside else None

    def _half(self, p: int) -> tuple[Fetch, int] | None:
        expr = self.values.inner[p]
        if not (isinstance(expr, tirx.Cast) and isinstance(expr.value, Var)):
            return None
        return self.values.reader.holder(expr.value) if dtype_of(expr.value) == self.dtype else None

    def order(self) -> list[Pair]:
        """Which points come in one register: those whose fields lie 16 bits apart in a word."""
        plain = [(p, p + 1) for p in range(0, len(self.values.inner), 2)]
        if self.dtype != "float16" or self.plain() is not None:
            return plain
        fields = self.fields()
        if fields is None:
            return plain
        at = {(fetch, bit): p for p, (_, fetch, bit) in enumerate(fields)}
        pairs = []
        for p, (_, fetch, bit) in enumerate(fields):
            if bit % 32 < 16:
                if (fetch, bit + 16) not in at:
                    self._fields = []
                    return plain
                pairs.append((p, at[fetch, bit + 16]))
        return pairs

    def fields(self) -> list | None:
        """Linear function, fetch and bit of every point, all alike; None where it is not so."""
        if self._fields is None:
            self._fields = self._find_fields()
        return self._fields or None

    def _find_fields(self) -> list:
        def invariant(expr: Expr) -> bool:
            return dtype_of(expr) == "float32"

        found = []
        for template in self.values.inner:
            linear = linear_of(template, invariant)
            place = None if linear is None else self.values.bit(linear.field)
            if place is None or linear.field.bits > 8:
                return []
            found.append((linear, *place))
        first = found[0][0]
        for linear, _, _ in found:
            alike = (linear.scale, linear.shift) == (first.scale, first.shift)
            rest = linear.rest is first.rest or (
                None not in (linear.rest, first.rest) and same(linear.rest, first.rest)
            )
            if not alike or not rest or linear.field.bits != first.field.bits:
                return []
        return found if len({(f, b) for _, f, b in found}) == len(found) else []

    def registers(self, loaded: Loaded, env: Env, pairs: list[Pair]) -> list[Expr]:
        """Registers with the inner parts of pairs of points in half precision."""
        fetch = self.plain()
        if fetch is not None:
            return [self._picked(loaded[fetch], pair) for pair in pairs]
        if self.fields() is not None and self.dtype == "float16" and self.order() == pairs:
            made = self._from_fields(loaded, env, pairs)
            if made is not None:
                return made
        values = self.values.floats(loaded, env)
        return [T.Bind(pack_halves(self.dtype, values[a], values[b])) for a, b in pairs]

    def _picked(self, array: Expr, pair: Pair) -> Expr:
        a, b = pair
        if b == a + 1 and a % 2 == 0:
            return T.Bind(word_of(array, a))
        choose = (0x32 if a % 2 else 0x10) | (0x76 if b % 2 else 0x54) << 8
        words = word_of(array, a - a % 2), word_of(array, b - b % 2)
        return T.Bind(byte_perm(*words, choose))

    def _from_fields(self, loaded: Loaded, env: Env, pairs: list[Pair]) -> list[Expr] | None:
        fields = self.fields()
        words: dict[tuple[Fetch, int], Expr] = {}
        made, rest = [], fields[0][0].rest
        if rest is not None:
            value = self.values.frame.rewrite(rest, self.values.environment(loaded, env))
            rest = T.Bind(pack_halves("float16", value, value))
        for p, _ in pairs:
            linear, fetch, bit = fields[p]
            key = fetch, bit // 32
            if key not in words:
                words[key] = T.Bind(self.values.word(linear.field, loaded)[0])
            value, unit = field_pair(words[key], bit % 32, linear.field)
            scale = linear.scale / unit
            shift = linear.shift - 1024 * scale - linear.field.bias * linear.scale
            if not (is_half(scale) and is_half(shift)):
                return None
            value = half_fma(value, scale, shift)
            made.append(T.Bind(value if rest is None else half_add(value, rest)))
        return made

    def scaled(self, loaded: Loaded, env: Env, pairs: list[Pair]) -> list[Expr]:
        """The same, times the factors in which the threads of a sum differ."""
        made = self.registers(loaded, env, pairs)
        factor = self.values.factor(self.values.lane[0], loaded, env)
        if factor is None:
            return made
        twice = T.Bind(pack_halves("float16", factor, factor))
        return [T.Bind(half_multiply(pair, twice)) for pair in made]


def conversion(values: Values, tensor: str) -> float:
    """Instructions that an element takes from its word to a factor (estimate)."""
    halves, first = Halves(values, tensor), values.inner[0]
    if tensor and halves.plain() is not None:
        return 0.0
    if tensor == "float16" and halves.fields() is not None:
        extra = any(values.lane) + (halves.fields()[0][0].rest is not None)
        return 1.2 + 0.5 * extra
    if halves.fields() is not None:
        cost = 2.5
    elif isinstance(first, tirx.Cast) and isinstance(first.value, Var):
        cost = 1.0
    else:
        cost = 0.0 if isinstance(first, Var) else 5.0
    return cost + (0.5 if tensor else 0.0)
