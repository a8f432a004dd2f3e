"""Values of an operand at a block of points: floats, or pairs of halves for the tensor cores.

    (f32(q) - 8) * f32(scale[n, k // 128]) * f32(s[n])
      outer  s[n]                  the same for all terms: multiplied after the sum
      step   scale[n, k // 128]    the same for a block of terms: once a block of a sum
      lane   scale[n, k // 32]     where the threads that share a sum differ: with each element
      inner  f32(q) - 8            for each term

With exact rounding the product is rounded as a whole, so that nothing is taken out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var
from tvm.ir.prim.expr import RShift
from tvm.script import tirx as T

from ...contraction.model import INDEX, Binding, Simplifier, fresh_var
from ...contraction.reader import Axis, Contraction, Operand, Product, Segment
from ...gpu.math_functions import factors_of, product_of
from ...gpu.memory import WIDEST
from ...gpu.product_frame import Frame, lower
from ...program.expr import (
    bits_of,
    bytes_of,
    constant,
    dtype_of,
    flatten,
    is_if_then_else,
    is_integer,
    known_factor,
    number,
    rebuild,
    same,
    substitute,
    variables,
)
from .bits import Field, field_float, linear_of, word_of
from .fetch import Blocks, Copy, Env, Fetch, emit_fetch, runs_of, widest_piece

# An operand at a block of points: which loads they share, in wide copies, and their expressions.
#
#     w[n, k // 8] >> (k % 8 * 4) & 15     at k = 32 c + (0 ... 31):
#       one fetch of w[n, 4 c ... 4 c + 3] (16 bytes), and 32 expressions with constant shifts
#
# A block is `steps` consecutive terms of `width` consecutive columns. Every load of the operand
# whose
# elements lie at constant distances becomes one `Fetch`; any other is read point by point.


@dataclass(slots=True, eq=False)
class Reader:
    """Reads an operand at blocks of points; point number ``s * width + v``.

    Attributes
    ----------
    hint : how wide loads are cached (see `memory.copy_in`).
    fetches : loads of all points of a block.
    points : the operand's value at each point, over the placeholders of the fetches.
    """

    contraction: Contraction
    k: Blocks
    side: Blocks
    batch: tuple[Axis, ...]
    hint: str = "na"
    fetches: list[Fetch] = field(default_factory=list)
    points: list[Expr] = field(default_factory=list)
    simplify: Simplifier | None = None
    _known: list[tuple[TensorLoad, Fetch]] = field(default_factory=list)

    def read(self, value: Expr, bindings: Sequence[Binding]) -> Reader:
        """Finds the loads of an operand; returns itself."""
        env: dict[Var, Expr] = {}
        for binding in bindings:
            env[binding.var] = substitute(binding.value, env)
        value = substitute(value, env)
        ranges = [*self.batch, *self.side.ranges(), *self.k.ranges()]
        self.simplify = Simplifier(ranges)
        at = [
            {**self.k.at(s), **self.side.at(v)}
            for s in range(self.k.size)
            for v in range(self.side.size)
        ]
        self.points = [self._visit(value, at, p) for p in range(len(at))]
        return self

    def varies_with(self, expr: Expr, wanted: Sequence[Var | None]) -> bool:
        """Whether an expression over placeholders depends on one of some variables."""
        found = list(variables(expr))
        for fetch in self.fetches:
            if any(var in fetch.holders.values() for var in found):
                found += variables(*(i for copy in fetch.copies for i in copy.indices))
        return any(var in found for var in wanted if var is not None)

    def holder(self, var: Expr) -> tuple[Fetch, int] | None:
        """The fetch and slot that a placeholder stands for."""
        for fetch in self.fetches:
            for slot, holder in fetch.holders.items():
                if holder.same_as(var):
                    return fetch, slot
        return None

    def needed(self, wanted: Sequence[Var]) -> list[Fetch]:
        """The fetches that hold `wanted` elements."""
        return [f for f in self.fetches if any(h in wanted for h in f.holders.values())]

    # ---- analysis

    def _visit(self, expr: Expr, at: Sequence[Env], p: int) -> Expr:
        """`expr` at point `p` over placeholders."""
        if isinstance(expr, TensorLoad):
            fetch = self._fetch(expr, at)
            slot = fetch.slots[p]
            return fetch.holders.setdefault(slot, fresh_var("h", fetch.dtype))
        if is_if_then_else(expr):
            return substitute(expr, at[p])
        if isinstance(expr, Var):
            return at[p].get(expr, expr)
        if is_integer(dtype_of(expr)) and not _has_load(expr):
            return self.simplify(substitute(expr, at[p]))
        if isinstance(expr, RShift) and not _has_load(expr.b):
            return self._visit(expr.a, at, p) >> self._amount(substitute(expr.b, at[p]))
        return rebuild(expr, lambda child: self._visit(child, at, p))

    def _amount(self, expr: Expr) -> Expr:
        """How far a number is shifted; with what is known to be the most, where that varies."""
        amount = self.simplify(expr)
        if number(amount) is not None:
            return amount
        most = self.simplify.most(amount)
        return amount if most is None else tirx.Min(amount, constant(most, dtype_of(amount)))

    def _fetch(self, load: TensorLoad, at: Sequence[Env]) -> Fetch:
        for known, fetch in self._known:
            if known.same_as(load) or (known.source.same_as(load.source) and same(known, load)):
                return fetch
        fetch = self._plan(load, at)
        self._known.append((load, fetch))
        self.fetches.append(fetch)
        return fetch

    def _plan(self, load: TensorLoad, at: Sequence[Env]) -> Fetch:
        simplify, dtype = self.simplify, dtype_of(load)
        shape = next(p.shape for p in self.contraction.params if p.var.same_as(load.source))
        places = [tuple(simplify(substitute(i, env)) for i in load.indices) for env in at]
        offsets = [flatten(indices, shape, INDEX) for indices in places]
        deltas = [number(simplify(offset - offsets[0])) for offset in offsets]
        if any(delta is None for delta in deltas) or any(_has_load(i) for i in load.indices):
            copies = [Copy(indices, p, 1, bytes_of(dtype)) for p, indices in enumerate(places)]
            slots = tuple(range(len(at)))
            return Fetch(load.source, dtype, tuple(copies), slots, {}, len(at))
        copies, slot_of, total = [], {}, 0
        for start, length in runs_of(sorted(set(deltas))):
            first = deltas.index(start)
            factor = known_factor(simplify(offsets[first]), simplify._analyzer)
            piece = widest_piece(factor, length, dtype)
            copies.append(Copy(places[first], total, length, piece))
            slot_of |= {start + i: total + i for i in range(length)}
            total += -(-length * bytes_of(dtype) // WIDEST) * WIDEST // bytes_of(dtype)
        slots = tuple(slot_of[delta] for delta in deltas)
        return Fetch(load.source, dtype, tuple(copies), slots, {}, total)


def _has_load(expr: Expr) -> bool:
    if isinstance(expr, TensorLoad):
        return True
    found: list[bool] = []

    def visit(child: Expr) -> Expr:
        found.append(_has_load(child))
        return child

    rebuild(expr, visit)
    return any(found)


Loaded = dict[Fetch, Expr]


@dataclass(slots=True, eq=False)
class Values:
    """An operand's values at blocks of `steps` terms by `width` rows (or columns).

    Attributes
    ----------
    reader : its loads.
    inner : the part that differs within a block, by point.
    step, lane : factors that do not, by column of the block; those of `step` are the same for all
        threads of a sum.
    outer : factors that do not depend on the terms at all, over the segment's own axes.
    """

    reader: Reader
    frame: Frame
    inner: list[Expr] = field(default_factory=list)
    step: list[list[Expr]] = field(default_factory=list)
    lane: list[list[Expr]] = field(default_factory=list)
    outer: list[Expr] = field(default_factory=list)
    _needed: list[Fetch] | None = None

    @property
    def steps(self) -> int:
        """Terms of a block."""
        return self.reader.k.size

    @property
    def width(self) -> int:
        """Columns of a block."""
        return self.reader.side.size

    def fetches(self, streamed: bool | None = None) -> list[Fetch]:
        """The fetches of a block; those that are whole 16-byte vectors, or the others."""
        if self._needed is None:
            wanted = [*self.inner, *(f for parts in (*self.step, *self.lane) for f in parts)]
            self._needed = self.reader.needed(variables(*wanted))
        return [f for f in self._needed if streamed is None or (f.piece == WIDEST) == streamed]

    def load(self, env: Env, streamed: bool | None = None, hint: str | None = None) -> Loaded:
        """Emits loads of a block into registers, with the operand's own `hint` if None."""
        hint = hint or self.reader.hint
        return {f: emit_fetch(f, self.frame, env, hint) for f in self.fetches(streamed)}

    def element_dtypes(self) -> set[str]:
        """Dtypes of the loads that differ between the elements of a block, or its threads."""
        wanted = variables(*self.inner, *(f for parts in self.lane for f in parts))
        return {fetch.dtype for fetch in self.reader.needed(wanted)}

    # ---- floats

    def floats(self, loaded: Loaded, env: Env, points: Sequence[Expr] | None = None) -> list[Expr]:
        """The inner parts of all points (or some) in float32 (or the operand's dtype), bound."""

        def word(found: Field) -> tuple[Expr, int] | None:
            return self.word(found, loaded, env)

        env = self.environment(loaded, env)
        exact = self.frame.contraction.exact
        values = []
        for template in self.inner if points is None else points:
            value = self.frame.rewrite(cheap_floats(template, word), env)
            value = value if exact else lower(value, False)
            values.append(value if number(value) is not None else T.Bind(value))
        return values

    def factor(self, parts: list[Expr], loaded: Loaded, env: Env) -> Expr | None:
        """The product of some factors, or None for none."""
        if not parts:
            return None
        value = self.frame.rewrite(product_of(parts), self.environment(loaded, env))
        return T.Bind(value if self.frame.contraction.exact else lower(value, False))

    def environment(self, loaded: Loaded, env: Env) -> dict[Var, Expr]:
        """`env` and what the placeholders of the loads are."""
        placed = {
            holder: array[slot]
            for fetch, array in loaded.items()
            for slot, holder in fetch.holders.items()
        }
        return {**env, **placed}

    def word(self, found: Field, loaded: Loaded, env: Env) -> tuple[Expr, int] | None:
        """The word that holds a field, and the field's first bit."""
        place = self.bit(found)
        if place is None:
            return None
        fetch, bit = place
        size = bits_of(fetch.dtype)
        word = word_of(loaded[fetch], bit // 32 * (32 // size))
        if found.by is not None:
            word = T.Bind(word >> self.frame.rewrite(found.by, env).astype("uint32"))
        return word, bit % 32

    def bit(self, found: Field) -> tuple[Fetch, int] | None:
        """The first bit of a field in its register array, which is read by whole words."""
        held = self.reader.holder(found.holder)
        if held is None:
            return None
        fetch, slot = held
        bit = slot * bits_of(fetch.dtype) + found.shift
        whole = fetch.piece % 4 == 0 and bits_of(fetch.dtype) <= 32
        return (fetch, bit) if whole and bit % 32 + found.bits <= 32 else None


def cheap_floats(expr: Expr, word: Callable[[Field], tuple[Expr, int] | None]) -> Expr:
    """`expr` with linear functions of fields computed from words, and bound.

    `word` says where a field is.
    """
    found = linear_of(expr, lambda _: False) if dtype_of(expr) == "float32" else None
    place = word(found.field) if found is not None else None
    if place is not None:
        magic = field_float(place[0], place[1], found.field)
        if found.scale == 1.0 and abs(found.shift) < 1 << 14 and found.shift == int(found.shift):
            return T.Bind(magic + constant(found.shift - (1 << 23) - found.field.bias, "float32"))
        value = magic - constant((1 << 23) + found.field.bias, "float32")
        scale, shift = constant(found.scale, "float32"), constant(found.shift, "float32")
        return T.Bind(value * scale + shift)
    return rebuild(expr, lambda child: cheap_floats(child, word))


def values_of(
    frame: Frame,
    segment: Segment,
    product: Product,
    operand: Operand,
    side: tuple[Axis, ...],
    steps: int,
    width: int = 1,
    lanes: int = 1,
    half: str | None = None,
    summed: bool = True,
) -> Values:
    """Plans an operand of a product at blocks of `steps` terms and `width` rows or columns.

    `lanes` threads hold neighbouring blocks of one sum. `half`: the dtype of its factors. Where
    not `summed`, a factor of a block stays with its elements.
    """
    contraction = frame.contraction
    blocks = Blocks.of(product.k, steps, lanes), Blocks.of(side, width)
    # Rows are read again by the next block of the multiprocessor, weights by nobody.
    hint = "nc" if operand is product.a else "na"
    reader = Reader(contraction, *blocks, segment.batch, hint)
    reader.read(operand.value, operand.bindings)
    values = Values(reader, frame)
    if contraction.exact or dtype_of(operand.value) != "float32":
        values.inner = list(reader.points)
        values.step = values.lane = [[] for _ in range(width)]
        return values
    original = factors_of(inlined(operand))
    factors = [factors_of(point) for point in reader.points]
    units = [axis.var for axis in reader.k.axes]
    one = [constant(1.0, "float32")]
    sorts = [_sort(i, factors, reader, units, width) for i in range(len(original))]
    if any(len(f) != len(original) for f in factors):
        sorts, original = ["inner"], [inlined(operand)]
        factors = [[point] for point in reader.points]
    if half != "float16":
        sorts = ["inner" if sort == "lane" else sort for sort in sorts]
    if not summed:
        sorts = ["inner" if sort == "step" else sort for sort in sorts]

    def taken(f: list[Expr], sort: str) -> list[Expr]:
        return [factor for factor, own in zip(f, sorts, strict=True) if own == sort]

    values.outer = taken(original, "outer")
    values.step = [taken(factors[v], "step") for v in range(width)]
    values.lane = [taken(factors[v], "lane") for v in range(width)]
    values.inner = [product_of(taken(f, "inner") or one) for f in factors]
    return values


def inlined(operand: Operand) -> Expr:
    """The value of an operand without bindings."""
    env: dict[Var, Expr] = {}
    for binding in operand.bindings:
        env[binding.var] = substitute(binding.value, env)
    return substitute(operand.value, env)


def _sort(i: int, factors: list[list[Expr]], reader: Reader, units: list[Var], width: int) -> str:
    """Where factor number `i` is the same: everywhere along the sum, in a block, a thread's."""
    for v in range(width):
        column = factors[v::width]
        if any(len(f) <= i or not same(f[i], column[0][i]) for f in column):
            return "inner"
    first = [f[i] for f in factors[:width]]
    if not any(reader.varies_with(f, [*units, reader.k.lane]) for f in first):
        return "outer"
    if reader.k.size == 1:
        return "inner"
    return "lane" if any(reader.varies_with(f, [reader.k.lane]) for f in first) else "step"
