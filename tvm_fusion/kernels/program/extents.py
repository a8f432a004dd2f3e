"""Sizes that may be symbolic: what is known of them for all values of their variables, which are
positive.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.ir import Expr, Var

from .expr import constant, convert, dtype_of, number, substitute, variables
from .program import Extent

INDEX = "int64"

MAX_EXTENT = 1 << 40
"""Sizes are far below the range of an index."""


def sized(extent: Extent, dtype: str = INDEX) -> Expr:
    """A size as an expression of a dtype."""
    return constant(extent, dtype) if isinstance(extent, int) else convert(extent, dtype)


def simplified(extent: Extent) -> Extent:
    """A size in few words; a number where it is one."""
    if isinstance(extent, int):
        return extent
    found = _analyzer(extent).simplify(extent)
    known = number(found)
    return found if known is None else int(known)


def equal_sizes(a: Extent, b: Extent) -> bool:
    """Whether two sizes are equal for all values of the symbolic variables."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    a, b, analyzer = sized(a), sized(b), tvm.sym.Analyzer()
    if analyzer.can_prove_equal(a, b):
        return True
    # (n // 2 + 1) * 8 * (m // 2 + 1) is told from (n // 2 + 1) * (m // 2 + 1) * 8 otherwise.
    return analyzer.can_prove_equal(multiplied_out(a), multiplied_out(b))


def multiplied_out(expr: Expr) -> Expr:
    """A sum of products in the place of products of sums."""
    if isinstance(expr, tirx.Add | tirx.Sub):
        return type(expr)(multiplied_out(expr.a), multiplied_out(expr.b))
    if not isinstance(expr, tirx.Mul):
        return expr
    a, b = multiplied_out(expr.a), multiplied_out(expr.b)
    for part, other in ((a, b), (b, a)):
        if isinstance(part, tirx.Add | tirx.Sub):
            return type(part)(multiplied_out(part.a * other), multiplied_out(part.b * other))
    return a * b


def is_below(a: Extent, b: Extent) -> bool:
    """Whether one size is known to be smaller than another one."""
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    return bool(_analyzer(a, b).can_prove(sized(a) < sized(b)))


def is_multiple(size: Extent, of: int) -> bool:
    """Whether a size is a multiple of a number, for all values of the symbolic variables."""
    if isinstance(size, int):
        return size % of == 0
    return of == 1 or equal_sizes(tirx.FloorMod(size, constant(of, dtype_of(size))), 0)


def smaller(a: Extent, b: Extent) -> Extent:
    """The smaller one of two sizes."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    if equal_sizes(a, b) or is_below(a, b):
        return a
    return b if is_below(b, a) else simplified(tirx.Min(sized(a), sized(b)))


def larger(a: Extent, b: Extent) -> Extent:
    """The larger one of two sizes."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    if equal_sizes(a, b) or is_below(b, a):
        return a
    return b if is_below(a, b) else simplified(tirx.Max(sized(a), sized(b)))


def divided_up(size: Extent, by: int) -> Extent:
    """A size over a number, rounded up."""
    return simplified((size + (by - 1)) // by)


def with_values(extent: Extent, values: dict[Var, int]) -> int:
    """The number that a size is with numbers in the place of its variables, at least 1."""
    if isinstance(extent, int):
        return extent
    env = {v: constant(n, dtype_of(v)) for v, n in values.items()}
    found = number(tvm.sym.Analyzer().simplify(substitute(extent, env)))
    if found is None:
        raise ValueError(f"no number for all variables of {extent}")
    return max(1, int(found))


def _analyzer(*extents: Extent) -> tvm.sym.Analyzer:
    found = tvm.sym.Analyzer()
    for size in variables(*(e for e in extents if not isinstance(e, int))):
        dtype = dtype_of(size)
        most = MAX_EXTENT if dtype == INDEX else (1 << 31) - 1
        found.bind(size, tvm.ir.Range(constant(1, dtype), constant(most, dtype)))
    return found
