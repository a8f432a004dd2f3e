"""Pairs of columns in an epilogue: values in each part of a run, and orders of columns that bring
the columns of a pair together (see `contraction.model.Partners`).

    columns of a run of 128 whose halves are swapped:   0 1 2 ... 63 | 64 65 66 ... 127
    in pairs of 2:                                      0 1 64 65 | 2 3 66 67 | 4 5 68 69 | ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...errors import Unsupported
from ..contraction.model import INDEX, Binding, Simplifier, fresh_var
from ..contraction.reader import Axis, Contraction, Operand, Output, Partners, Segment
from ..program.expr import constant, number, rebuild, substitute

Values = tuple[tuple[Binding, ...], tuple[Expr, ...]]
"""Temporaries, and the values of all outputs."""


def values_by_part(
    partners: Partners | None, bindings: Sequence[Binding], outputs: Sequence[Output]
) -> list[Values]:
    """What the outputs are in each part of a run, without conditions on it; without pairs, once."""
    plain = tuple(bindings), tuple(output.value for output in outputs)
    if partners is None:
        return [plain]
    found = []
    for part in range(2 if partners.width == 2 * partners.distance else 3):
        env = {partners.part: constant(part, "int32")}
        own = tuple(Binding(b.var, _fold(substitute(b.value, env))) for b in plain[0])
        found.append((own, tuple(_fold(substitute(value, env)) for value in plain[1])))
    return found


def _fold(expr: Expr) -> Expr:
    """`expr` without choices that are known."""
    if isinstance(expr, Var | TensorLoad):
        return expr
    if isinstance(expr, tirx.Select):
        known = _truth(expr.condition)
        if known is not None:
            return _fold(expr.true_value if known else expr.false_value)
    return rebuild(expr, _fold)


def _truth(condition: Expr) -> bool | None:
    """Whether a condition on a known part holds."""
    if isinstance(condition, tirx.Or):
        sides = _truth(condition.a), _truth(condition.b)
        return None if None in sides else any(sides)
    if isinstance(condition, tirx.EQ):
        sides = number(condition.a), number(condition.b)
        return None if None in sides else sides[0] == sides[1]
    known = number(condition)
    return None if known is None else bool(known)


def partner_vars(partners: Partners | None, products: int) -> tuple[Var | None, ...]:
    """The accumulator of the partner of each product; None where none is read."""
    return (None,) * products if partners is None else partners.vars


def in_pairs(contraction: Contraction, size: Callable[[Segment], int]) -> Contraction:
    """The same contraction with the columns of each pair `size` apart, in runs of twice that.

    Raises
    ------
    Unsupported
        Where the size does not divide the distance of a pair, or columns have no partner.
    """
    segments = tuple(
        s if s.partners is None else _in_pairs(s, size(s)) for s in contraction.segments
    )
    return replace(contraction, segments=segments)


def _in_pairs(segment: Segment, size: int) -> Segment:
    partners, last = segment.partners, segment.n[-1]
    width, distance = partners.width, partners.distance
    if (width, distance) == (2 * size, size):
        return segment
    if width != 2 * distance or not size or distance % size:
        raise Unsupported(f"columns {distance} apart in runs of {width}, in pairs of {size}")
    extents = last.extent // width, distance // size, 2, size
    strides = width, size, distance, 1
    axes, place = [], constant(0, INDEX)
    for name, extent, stride in zip(
        ("run", "place", "half", "near"), extents, strides, strict=True
    ):
        if extent > 1:
            axes.append(Axis(fresh_var(name, INDEX), extent))
            place = place + axes[-1].var * constant(stride, INDEX)
    n = (*segment.n[:-1], *axes)
    terms = [axis for product in segment.products for axis in product.k]
    move = _Mover(last.var, place, Simplifier([*segment.batch, *segment.m, *n, *terms]))
    return replace(
        segment,
        n=n,
        products=tuple(
            replace(p, a=move.operand(p.a), b=move.operand(p.b)) for p in segment.products
        ),
        bindings=move.bindings(segment.bindings),
        outputs=tuple(
            replace(o, indices=tuple(map(move.index, o.indices)), value=move(o.value))
            for o in segment.outputs
        ),
        partners=replace(partners, width=2 * size, distance=size),
    )


class _Mover:
    """Puts a function of other axes in place of an axis, and simplifies indices."""

    def __init__(self, axis: Var, place: Expr, simplify: Simplifier):
        self.env, self.simplify = {axis: place}, simplify

    def __call__(self, expr: Expr) -> Expr:
        if isinstance(expr, TensorLoad):
            return tirx.BufferLoad(expr.source, [self.index(i) for i in expr.indices])
        return substitute(expr, self.env) if isinstance(expr, Var) else rebuild(expr, self)

    def index(self, expr: Expr) -> Expr:
        """An index of the new axes; one that is loaded is not taken apart."""
        return self.simplify(self(expr))

    def bindings(self, found: Sequence[Binding]) -> tuple[Binding, ...]:
        """Temporaries of the new axes."""
        return tuple(Binding(b.var, self(b.value)) for b in found)

    def operand(self, operand: Operand) -> Operand:
        """An operand of the new axes."""
        return Operand(self(operand.value), self.bindings(operand.bindings))
