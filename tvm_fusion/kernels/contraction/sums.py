"""What a reduction block sums up: its two factors, and the dtypes of the sum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...errors import Unsupported
from ..program.definitions import Definition
from ..program.expr import HALF_DTYPES, dtype_of, is_integer, number, rebuild, variables, widened
from ..program.program import ReduceKind


def is_sum_of_products(definition: Definition) -> bool:
    """Whether a definition is one; any other reduction is refused."""
    if definition.kind is None:
        return False
    is_sum = definition.kind is ReduceKind.SUM and number(definition.initial) == 0
    if not is_sum or not isinstance(_without_casts(definition.value), tirx.Mul):
        raise Unsupported(f"{definition.buffer.name} is no sum of products")
    return True


def two_factors(definition: Definition) -> tuple[Expr, Expr]:
    """Both sides of a product; of three factors and more, each goes where its axes are."""
    factors = _all_factors(_without_casts(definition.value))
    axes = {axis for axis in definition.axes if axis is not None}
    used = [axes & set(variables(factor)) for factor in factors]
    start = next((i for i in range(1, len(used)) if not used[i] <= used[0]), 1)
    left, right = [0], [start]
    for i in range(1, len(factors)):
        if i != start:
            (left if used[i] <= used[0] else right).append(i)
    sides = []
    for side in (left, right):
        value = factors[side[0]]
        for i in side[1:]:
            value = tirx.Mul(value, factors[i])
        sides.append(value)
    return sides[0], sides[1]


def _all_factors(expr: Expr) -> list[Expr]:
    if isinstance(expr, tirx.Mul):
        return [*_all_factors(expr.a), *_all_factors(expr.b)]
    return [expr]


def _without_casts(expr: Expr) -> Expr:
    """A product before it is rounded; integers are left alone, since they would wrap."""
    while isinstance(expr, tirx.Cast) and not is_integer(dtype_of(expr.value)):
        expr = expr.value
    return expr


def sum_dtype(dtype: str) -> str:
    """The dtype a sum runs in: float32 for halves, 32 bits for small integers (cut when read)."""
    if is_integer(dtype) and dtype.lstrip("uint") in ("8", "16"):
        return "int32" if dtype.startswith("int") else "uint32"
    return widened(dtype)


def rounded_dtype(found: Definition, definitions: Iterable[Definition]) -> str:
    """The half precision that every reader rounds a float32 sum to, else the dtype it has."""
    readers = _Readers(found.buffer)
    for definition in definitions:
        readers.visit(definition.value)
    return readers.dtypes.pop() if len(readers.dtypes) == 1 else found.dtype


def scaled_dtype(
    found: Definition, definitions: Iterable[Definition], outputs: Sequence[Definition]
) -> str | None:
    """The half precision that a sum is rounded to behind one factor, its only reader; else None.

    `outputs` are definitions that are stored as they are.
    """
    definitions = list(definitions)
    readers = [d for d in definitions if _reads(d.value, found.buffer)]
    if len(readers) != 1:
        return None
    value, dtype = readers[0].value, dtype_of(readers[0].value)
    if isinstance(value, tirx.Cast) and dtype in HALF_DTYPES:
        value = value.value
    elif not any(readers[0] is output for output in outputs):
        dtype = rounded_dtype(readers[0], definitions)
    if dtype not in HALF_DTYPES or not isinstance(value, tirx.Mul):
        return None
    sides = (value.a, value.b), (value.b, value.a)
    scaled = any(_is_load(a, found.buffer) and not _reads(b, found.buffer) for a, b in sides)
    return dtype if scaled else None


def _is_load(expr: Expr, buffer: Var) -> bool:
    return isinstance(expr, TensorLoad) and expr.source.same_as(buffer)


def _reads(expr: Expr, buffer: Var) -> bool:
    readers = _Readers(buffer)
    readers.visit(expr)
    return bool(readers.dtypes)


class _Readers:
    """Dtypes in which a buffer is read: a half where it is rounded at once, else its own."""

    def __init__(self, buffer: Var):
        self.buffer = buffer
        self.dtypes: set[str] = set()

    def visit(self, expr: Expr) -> Expr:
        """Notes the reads within `expr`."""
        rounded = isinstance(expr, tirx.Cast) and dtype_of(expr) in HALF_DTYPES
        load = expr.value if rounded else expr
        if not isinstance(load, TensorLoad):
            return expr if isinstance(expr, Var) else rebuild(expr, self.visit)
        if load.source.same_as(self.buffer):
            self.dtypes.add(dtype_of(expr))
        for index in load.indices:
            self.visit(index)
        return expr
