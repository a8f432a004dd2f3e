"""Where tensors of symbolic sizes lie: at offsets in one arena, both expressions in the sizes.

A size is a sum of products of symbols with coefficients, in bytes, rounded up to the alignment:

    (n, 4096) float16    8192 n
    (h, n, n) float32    4 h n n
    (n,) float32         256 ceil(4 n / 256)    `ceil(4 n / 256)` counts as a symbol of its own

One is no larger than another at whatever sizes if none of its coefficients is. A tensor lies at the
lowest offset where that shows it to meet none of those that are needed at the same time; where it
shows nothing, behind all of them: at the maximum of their ends. Or tensors take slots in turns that
lie beside each other, whatever takes less memory at some sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import tvm
import tvm_ffi
from tvm import sym, tirx

from .storage_plan import ALIGNMENT, ORDERS, Life, least_peak_bytes

_Sum = dict[tuple[int, ...], int]  # coefficients by the numbers of the symbols that are multiplied

# At these sizes orders of placing are compared, as far as bounds allow.
_LOOKED_AT = (33, 1024, 16384)

# Maxima within a sum; what has more is bounded by a sum.
_MOST_MAXIMA = 8


@dataclass(frozen=True, slots=True)
class SymbolicTensor:
    """A tensor that is to lie in an arena.

    Attributes
    ----------
    extents : sequence of int or PrimExpr
    item_bytes : int
    first, last : int
        The steps that write it first and read it last.
    """

    extents: Sequence[object]
    item_bytes: int
    first: int
    last: int

    def meets(self, other: SymbolicTensor) -> bool:
        """Whether both are needed in one step."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """Offsets of tensors.

    Attributes
    ----------
    offsets : tuple of PrimExpr
        In bytes, one for each tensor.
    size_bytes : PrimExpr
        Of the arena.
    """

    offsets: tuple[object, ...]
    size_bytes: object


def plan_arena(
    tensors: Sequence[SymbolicTensor], bounds: Mapping[str, int] | None = None
) -> ArenaPlan:
    """Give every tensor an offset.

    Parameters
    ----------
    tensors : sequence of SymbolicTensor
    bounds : mapping of str to int, optional
        The most that symbols may be, by name; only looked at to choose among plans.

    Examples
    --------
    >>> n = tirx.Var("n", "int64")
    >>> plan = plan_arena([SymbolicTensor((n, 64), 4, 0, 1), SymbolicTensor((n, 128), 4, 1, 2)])
    >>> plan.size_bytes
    n * T.int64(768)
    """
    terms = _Terms()
    sizes = [terms.bytes_of(t.extents, t.item_bytes) for t in tensors]
    points = [terms.at(size, bounds or {}) for size in _LOOKED_AT]
    plans = []
    for order in ORDERS:
        lives = [
            Life(_value(size, points[1]), t.first, t.last)
            for size, t in zip(sizes, tensors, strict=True)
        ]
        turn = sorted(range(len(tensors)), key=lambda i: (*order(lives[i]), i))
        for run in (_Placing.run, _Placing.run_in_slots):
            plans.append(run(_Placing(_copied(terms), tensors, sizes, points[1]), turn))

    def excess(placing: _Placing) -> float:
        total = 0.0
        for point in _points(placing.terms, bounds or {}):
            needed = [
                Life(_value(size, point), t.first, t.last)
                for size, t in zip(sizes, tensors, strict=True)
            ]
            total += _value(placing.total, point) / max(1, least_peak_bytes(needed))
        return total

    best = min(plans, key=excess)
    offsets = tuple(best.terms.expression(best.offsets[i]) for i in range(len(tensors)))
    return ArenaPlan(offsets, best.terms.expression(best.total))


def _points(terms: _Terms, bounds: Mapping[str, int]) -> list[list[int]]:
    return [terms.at(size, bounds) for size in _LOOKED_AT]


def _copied(terms: _Terms) -> _Terms:
    return _Terms(list(terms.symbols), list(terms.maxima))


@dataclass
class _Terms:
    """The symbols that sums are made of.

    Attributes
    ----------
    symbols : list of PrimExpr
        Variables, and expressions that are taken as they are.
    maxima : list of int
        How many maxima are within each.
    """

    symbols: list[tvm.ir.Expr] = field(default_factory=list)
    maxima: list[int] = field(default_factory=list)

    def bytes_of(self, extents: Iterable[object], item_bytes: int) -> _Sum:
        """The bytes of a tensor, a multiple of the alignment."""
        found: _Sum = {(): item_bytes}
        for extent in extents:
            found = _product(found, self._sum_of(extent))
        if all(coefficient % ALIGNMENT == 0 for coefficient in found.values()):
            return found
        if set(found) <= {()}:
            return {(): max(1, -(-found.get((), 0) // ALIGNMENT)) * ALIGNMENT}
        up = tirx.floordiv(self.expression(found) + (ALIGNMENT - 1), _int(ALIGNMENT))
        return {(self._number(up, 0),): ALIGNMENT}

    def largest(self, sums: Sequence[_Sum]) -> _Sum:
        """The largest of sums that nothing is known of."""
        maxima = 1 + sum(self.maxima[i] for found in sums for key in found for i in key)
        if maxima > _MOST_MAXIMA:
            keys = {key for found in sums for key in found}
            return {key: max(found.get(key, 0) for found in sums) for key in keys}
        first, *rest = map(self.expression, sums)
        for other in rest:
            first = tirx.max(first, other)
        return {(self._number(first, maxima),): 1}

    def expression(self, found: _Sum) -> tvm.ir.Expr:
        """A sum as TIR computes it, in int64."""
        parts = []
        for key, coefficient in sorted(found.items()):
            part = _int(coefficient)
            for number in key:
                part = self.symbols[number] * part
            parts.append(part)
        total = _int(0)
        for part in parts:
            total = total + part
        return sym.Analyzer().simplify(total)

    def at(self, size: int, bounds: Mapping[str, int]) -> list[int]:
        """The symbols as numbers where all variables have one size, or what they may have."""

        def number(var: tirx.Var) -> tvm.ir.Expr:
            return tirx.IntImm(str(var.ty.dtype), min(size, bounds.get(var.name, size)))

        analyzer = sym.Analyzer()
        found = []
        for symbol in self.symbols:
            value = analyzer.simplify(tvm_ffi.structural_map(symbol, (tvm.ir.Var, number)))
            found.append(int(value) if isinstance(value, tirx.IntImm) else size)
        return found

    def _sum_of(self, extent: object) -> _Sum:
        """An extent as a sum; what is no sum of products of symbols counts as one symbol."""
        if isinstance(extent, int | tirx.IntImm):
            return {(): int(extent)}
        if isinstance(extent, tirx.Add):
            found = dict(self._sum_of(extent.a))
            for key, coefficient in self._sum_of(extent.b).items():
                found[key] = found.get(key, 0) + coefficient
        elif isinstance(extent, tirx.Mul):
            found = _product(self._sum_of(extent.a), self._sum_of(extent.b))
        else:
            return {(self._number(tirx.Cast("int64", extent), 0),): 1}
        if min(found.values()) < 0:  # comparing coefficients asks for sums that only grow
            return {(self._number(tirx.Cast("int64", extent), 0),): 1}
        return found

    def _number(self, symbol: tvm.ir.Expr, maxima: int) -> int:
        symbol = sym.Analyzer().simplify(symbol)
        for number, other in enumerate(self.symbols):
            if tvm_ffi.structural_equal(symbol, other):
                return number
        self.symbols.append(symbol)
        self.maxima.append(maxima)
        return len(self.symbols) - 1


class _Placing:
    """Places tensors in a given order.

    Attributes
    ----------
    terms : _Terms
    offsets : dict of int to dict
        Offsets, sums, of tensors by number.
    total : dict
        The sum that no tensor ends behind.
    """

    def __init__(
        self,
        terms: _Terms,
        tensors: Sequence[SymbolicTensor],
        sizes: Sequence[_Sum],
        point: Sequence[int],
    ) -> None:
        self.terms = terms
        self.offsets: dict[int, _Sum] = {}
        self.total: _Sum = {}
        self._tensors, self._sizes, self._point = tensors, sizes, point

    def run(self, turn: Sequence[int]) -> _Placing:
        """Place them; returns itself."""
        for index in turn:
            self.offsets[index] = self._offset(index)
        self.total = self._highest([self._end(index) for index in turn])
        return self

    def run_in_slots(self, turn: Sequence[int]) -> _Placing:
        """Place them in slots beside each other, which tensors take in turns; returns itself."""
        slots: list[tuple[_Sum, list[int]]] = []
        for index in turn:
            for size, taken in slots:
                meets = any(self._tensors[i].meets(self._tensors[index]) for i in taken)
                if not meets and _no_larger(self._sizes[index], size):
                    taken.append(index)
                    break
            else:
                slots.append((self._sizes[index], [index]))
        for size, taken in slots:
            self.offsets |= dict.fromkeys(taken, self.total)
            self.total = _plus(self.total, size)
        return self

    def _offset(self, index: int) -> _Sum:
        """The lowest offset that is known to be free."""
        tensor, size = self._tensors[index], self._sizes[index]
        met = [i for i in self.offsets if self._tensors[i].meets(tensor)]
        ends = _undominated([self._end(i) for i in met])
        places = sorted([{}, *map(self._end, met)], key=self._now)
        for place in places:
            behind = _plus(place, size)
            if all(
                _no_larger(self._end(i), place) or _no_larger(behind, self.offsets[i]) for i in met
            ):
                return place
        return self._highest(ends)

    def _highest(self, ends: Sequence[_Sum]) -> _Sum:
        ends = _undominated(ends)
        if len(ends) < 2:
            return ends[0] if ends else {}
        return self.terms.largest(ends)

    def _end(self, index: int) -> _Sum:
        return _plus(self.offsets[index], self._sizes[index])

    def _now(self, found: _Sum) -> int:
        """A number to sort by; maxima that came since count as nothing."""
        known = {k: c for k, c in found.items() if all(i < len(self._point) for i in k)}
        return _value(known, self._point)


def _undominated(sums: Sequence[_Sum]) -> list[_Sum]:
    """Sums without those that are no larger than another one."""
    kept: list[_Sum] = []
    for found in sums:
        if any(_no_larger(found, other) for other in kept):
            continue
        kept = [other for other in kept if not _no_larger(other, found)]
        kept.append(found)
    return kept


def _no_larger(one: _Sum, other: _Sum) -> bool:
    return all(coefficient <= other.get(key, 0) for key, coefficient in one.items())


def _plus(one: _Sum, other: _Sum) -> _Sum:
    return {key: one.get(key, 0) + other.get(key, 0) for key in one.keys() | other.keys()}


def _product(one: _Sum, other: _Sum) -> _Sum:
    found: _Sum = {}
    for a, x in one.items():
        for b, y in other.items():
            key = tuple(sorted((*a, *b)))
            found[key] = found.get(key, 0) + x * y
    return found


def _value(found: _Sum, point: Sequence[int]) -> int:
    return sum(c * math.prod(point[i] for i in key) for key, c in found.items())


def _int(value: int) -> tirx.IntImm:
    return tirx.IntImm("int64", value)
