"""What an epilogue is made of: loads to be read ahead, pairs of columns, operations.

What it reads beside the accumulators is taken out of its expressions:

    out[m, n] = gelu(acc + f32(bias[n])) * f32(x[m, n])
      ->  out[m, n] = gelu(acc + l0) * l1      l0 = bias[n] (a row vector), l1 = x[m, n] (a matrix)

Loads under a condition, and loads whose index holds another load, stay where they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...config import HardwareProfile
from ...errors import Unsupported
from ...ir.access import Pipe
from ...ir.reader import children, pipe_of
from ..contraction.model import INDEX, Binding, Simplifier, fresh_var
from ..contraction.reader import Axis, Contraction, Operand, Output, Partners, Segment
from ..gpu.access import AffineAccess, Groups, affine_access
from ..gpu.product_frame import assumed
from ..program.expr import (
    HALF_DTYPES,
    constant,
    dtype_of,
    is_if_then_else,
    number,
    rebuild,
    same,
    substitute,
    variables,
    widened,
)
from ..program.program import Extent
from .launch import operation_seconds

# Pairs of columns in an epilogue: values in each part of a run, and orders of columns that bring
# the columns of a pair together (see `contraction.model.Partners`).
#
#     columns of a run of 128 whose halves are swapped:   0 1 2 ... 63 | 64 65 66 ... 127
#     in pairs of 2:                                      0 1 64 65 | 2 3 66 67 | 4 5 68 69 | ...

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


def starts_off_words(output: Output, shape: Sequence[Extent] | None, groups: Groups) -> bool:
    """Whether rows of an output of halves are contiguous as a whole, but start off 4 bytes: what a
    thread holds of one would leave in pieces of 2.
    """
    if output.partial is not None or output.dtype not in HALF_DTYPES:
        return False
    access = affine_access(output.indices, shape, groups)
    whole = access is not None and len(access.digits["n"]) == 1
    return whole and access.contiguous("n") and not access.aligned(2, "n")


# What the arithmetic behind matrix products costs.


class HasEpilogue(Protocol):
    """A segment, of a contraction or of a form's problem."""

    bindings: Sequence[Binding]
    outputs: Sequence[Output]
    N: Extent


def operation_s(segments: Sequence[HasEpilogue], hw: HardwareProfile) -> float:
    """Time that the whole device needs for the operations on one element of the products, mean over
    the columns.
    """
    counts: Counter[Pipe] = Counter()
    for segment in segments:
        columns = assumed(segment.N)
        for pipe, number_of in operations_of(segment).items():
            counts[pipe] += columns * number_of
    return operation_seconds(counts.items(), hw) / sum(assumed(s.N) for s in segments)


@lru_cache(maxsize=64)  # of each segment for all of its configurations
def operations_of(segment: Segment | HasEpilogue) -> Counter[Pipe]:
    """Operations on one element of the products, by what executes them."""
    return count_operations(item.value for item in (*segment.bindings, *segment.outputs))


def count_operations(exprs: Iterable[Expr]) -> Counter[Pipe]:
    """Operations of some expressions, by what executes them."""
    counts: Counter[Pipe] = Counter()
    values = list(exprs)
    while values:
        value = values.pop()
        if (pipe := pipe_of(value)) is not None:
            counts[pipe] += 1
        if not isinstance(value, TensorLoad):
            values.extend(children(value))
    return counts


@dataclass(frozen=True, slots=True, eq=False)
class EpilogueLoad:
    """``var = parameter[indices]``, widened; `groups` are those of batch, m, n it depends on."""

    var: Var
    param: Var
    indices: tuple[Expr, ...]
    dtype: str
    groups: frozenset[str]
    access: AffineAccess | None

    @property
    def per_column(self) -> bool:
        """Whether it differs between columns."""
        return "n" in self.groups

    @property
    def per_row(self) -> bool:
        """Whether it differs between rows."""
        return "m" in self.groups

    @property
    def is_matrix(self) -> bool:
        """Whether each element has its own."""
        return self.per_row and self.per_column

    @property
    def words_of_piece(self) -> int:
        """Registers that hold a thread's of 16 columns: two groups, of one or two rows."""
        return 2 * (2 if self.per_row else 1) * (1 if self.paired else 2)

    @property
    def paired(self) -> bool:
        """Whether columns 2 i and 2 i + 1 are the halves of one aligned 32-bit word."""
        aligned = self.access is not None and self.access.aligned(2, "n")
        return aligned and self.dtype in HALF_DTYPES


def take_loads(
    contraction: Contraction, segment: Segment, groups: Groups, symbolic_strides: bool = False
) -> tuple[tuple[Binding, ...], tuple[Output, ...], tuple[EpilogueLoad, ...]]:
    """Bindings and outputs of a segment with placeholders for the loads, and the loads."""
    taker = LoadTaker(contraction, groups, symbolic_strides)
    bindings = tuple(Binding(b.var, taker.visit(b.value)) for b in segment.bindings)
    outputs = tuple(replace(o, value=taker.visit(o.value)) for o in segment.outputs)
    return bindings, outputs, tuple(taker.found)


class LoadTaker:
    """Puts placeholders in place of loads, which it keeps as `found`."""

    def __init__(self, contraction: Contraction, groups: Groups, symbolic_strides: bool = False):
        self.contraction, self.groups = contraction, groups
        self.symbolic_strides = symbolic_strides
        self.found: list[EpilogueLoad] = []

    def visit(self, expr: Expr) -> Expr:
        """An expression with placeholders, but for loads under a condition or at loaded indices."""
        if is_if_then_else(expr):
            return tirx.if_then_else(self.visit(expr.args[0]), *expr.args[1:])
        load = expr.value if isinstance(expr, tirx.Cast) else expr
        if isinstance(load, TensorLoad):
            taken = self._take(load) if dtype_of(expr) == widened(dtype_of(load)) else None
            return expr if taken is None else taken
        return expr if isinstance(expr, Var) else rebuild(expr, self.visit)

    def _take(self, load: TensorLoad) -> Var | None:
        if any(holds_load(index) for index in load.indices):
            return None
        for known in self.found:
            if known.param.same_as(load.source) and _equal(known.indices, load.indices):
                return known.var
        owner = {axis.var: name for name, axes in self.groups.items() for axis in axes}
        used = frozenset(owner[v] for v in variables(*load.indices) if v in owner)
        shape = next(p.shape for p in self.contraction.params if p.var.same_as(load.source))
        access = affine_access(load.indices, shape, self.groups, self.symbolic_strides)
        dtype = dtype_of(load)
        var = fresh_var(f"l{len(self.found)}", widened(dtype))
        indices = tuple(load.indices)
        self.found.append(EpilogueLoad(var, load.source, indices, dtype, used, access))
        return var


def _equal(a: Sequence[Expr], b: Sequence[Expr]) -> bool:
    return all(same(x, y) for x, y in zip(a, b, strict=True))


def holds_load(expr: Expr) -> bool:
    """Whether an expression reads memory."""
    if isinstance(expr, TensorLoad):
        return True
    found: list[bool] = []

    def visit(child: Expr) -> Expr:
        found.append(holds_load(child))
        return child

    rebuild(expr, visit)
    return any(found)


def reads_in_place(bindings: Sequence[Binding], outputs: Sequence[Output]) -> bool:
    """Whether values hold loads that are not fetched ahead: at an index that is read too, a mask
    widened to an integer, or what stands under a condition. They are read at rows and columns that
    exist, also where the tile reaches beyond the matrix.
    """
    values = [*(b.value for b in bindings), *(o.value for o in outputs)]
    return any(map(holds_load, values))
