"""Pairs of halves for the tensor cores, from words as they lie where that can be.

eight fields of 4 bits in a word:  (0, 4), (1, 5), (2, 6), (3, 7), each 16 bits apart
  one LOP3 and one HFMA2 a pair; the other operand takes its elements in the same order
the same field in two words (weights packed along the columns):  one PRMT for four pairs before
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...gpu.intrinsics import pack_halves
from ...program.expr import dtype_of, same
from .bits import (
    byte_perm,
    field_pair,
    half_add,
    half_fma,
    half_multiply,
    is_half,
    linear_of,
    word_of,
)
from .fetch import Env, Fetch
from .values import Loaded, Values

Pair = tuple[int, int]


@dataclass(slots=True, eq=False)
class Halves:
    """The values of a block's column in half precision `dtype`, two to a register."""

    values: Values
    dtype: str
    column: int = 0
    _fields: list | None = None

    @property
    def points(self) -> list[Expr]:
        """The inner parts of the column's terms."""
        return self.values.inner[self.column :: self.values.width]

    def plain(self) -> Fetch | None:
        """The fetch of an operand that is nothing but halves, two to a word."""
        first = self._half(self.points[0])
        if first is None or first[0].piece % 4:
            return None
        found = map(self._half, self.points)
        return first[0] if all(f is not None and f[0] is first[0] for f in found) else None

    def _half(self, expr: Expr) -> tuple[Fetch, int] | None:
        if not (isinstance(expr, tirx.Cast) and isinstance(expr.value, Var)):
            return None
        return self.values.reader.holder(expr.value) if dtype_of(expr.value) == self.dtype else None

    def order(self) -> list[Pair]:
        """Which points come in one register: those whose fields lie 16 bits apart in a word."""
        plain = [(p, p + 1) for p in range(0, len(self.points), 2)]
        if self.dtype != "float16" or self.plain() is not None:
            return plain
        fields = self.fields()
        if fields is None:
            return plain
        at = {(fetch, bit): p for p, (_, fetch, bit) in enumerate(fields)}
        halves = [
            (p, at.get((f, bit + 16))) for p, (_, f, bit) in enumerate(fields) if bit % 32 < 16
        ]
        if len(halves) == len(plain) and all(q is not None for _, q in halves):
            return halves
        if any(fields[p][2] % 16 != fields[q][2] % 16 for p, q in plain):
            self._fields = []
        return plain

    def fields(self) -> list | None:
        """Linear function, fetch and bit of every point, all alike; None where it is not so."""
        if self._fields is None:
            self._fields = self._find_fields()
        return self._fields or None

    def _find_fields(self) -> list:
        def invariant(expr: Expr) -> bool:
            return dtype_of(expr) == "float32"

        found = []
        for template in self.points:
            linear = linear_of(template, invariant)
            place = None if linear is None else self.values.bit(linear.field)
            if place is None or linear.field.bits > 8:
                return []
            found.append((linear, *place))
        first = found[0][0]
        for linear, _, _ in found:
            alike = (linear.scale, linear.shift) == (first.scale, first.shift)
            alike = alike and linear.field.bits == first.field.bits
            others = (linear.rest, first.rest), (linear.field.by, first.field.by)
            if not alike or not all(_equal(a, b) for a, b in others):
                return []
        return found if len({(f, b) for _, f, b in found}) == len(found) else []

    def registers(self, loaded: Loaded, env: Env, pairs: list[Pair]) -> list[Expr]:
        """Registers with the inner parts of pairs of points in half precision."""
        fetch = self.plain()
        if fetch is not None:
            slots = [self._half(point)[1] for point in self.points]
            return [self._picked(loaded[fetch], (slots[a], slots[b])) for a, b in pairs]
        if self.fields() is not None and self.dtype == "float16" and self.order() == pairs:
            made = self._from_fields(loaded, env, pairs)
            if made is not None:
                return made
        values = self.values.floats(loaded, env, self.points)
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
        words: dict[tuple, Expr] = {}
        made, rest = [], fields[0][0].rest
        if rest is not None:
            value = self.values.frame.rewrite(rest, self.values.environment(loaded, env))
            rest = T.Bind(pack_halves("float16", value, value))

        def word(p: int) -> Expr:
            linear, fetch, bit = fields[p]
            key = fetch, bit // 32
            if key not in words:
                words[key] = T.Bind(self.values.word(linear.field, loaded, env)[0])
            return words[key]

        for p, q in pairs:
            linear, fetch, bit = fields[p]
            found, at = word(p), bit % 32
            if fields[q][2] != bit + 16:
                key = fetch, bit // 16, fields[q][2] // 16
                if key not in words:
                    other = 0x54 if fields[q][2] % 32 < 16 else 0x76
                    choose = (0x32 if bit % 32 >= 16 else 0x10) | other << 8
                    words[key] = T.Bind(byte_perm(found, word(q), choose))
                found, at = words[key], bit % 16
            value, unit = field_pair(found, at, linear.field)
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
        factor = self.values.factor(self.values.lane[self.column], loaded, env)
        if factor is None:
            return made
        twice = T.Bind(pack_halves("float16", factor, factor))
        return [T.Bind(half_multiply(pair, twice)) for pair in made]


def _equal(a: Expr | None, b: Expr | None) -> bool:
    return a is b or (a is not None and b is not None and same(a, b))


FIELD = 1.61
"""Instructions from a field of a word to a float32 (fitted with `rank`'s constants)."""
WIDENED = 0.97
"""Instructions from half precision to float32 (likewise)."""


def conversion(values: Values, tensor: str) -> float:
    """Instructions that an element takes from its word to a factor (estimate)."""
    halves, first = Halves(values, tensor), values.inner[0]
    if tensor and halves.plain() is not None:
        return 0.0
    if tensor == "float16" and halves.fields() is not None:
        fields = halves.fields()
        extra = any(values.lane) + (fields[0][0].rest is not None)
        apart = any(fields[q][2] != fields[p][2] + 16 for p, q in halves.order())
        return 1.2 + 0.5 * extra + 0.8 * apart
    if halves.fields() is not None:
        linear = halves.fields()[0][0]
        extra = (linear.rest is not None) + (linear.field.by is not None)
        cost = FIELD + 1.5 * extra
    elif isinstance(first, tirx.Cast) and isinstance(first.value, Var):
        cost = WIDENED
    else:
        cost = 0.0 if isinstance(first, Var) else 5.0
    return cost + (0.5 if tensor else 0.0)
