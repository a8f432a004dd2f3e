"""The roundings of a loop nest, and how large a disturbance stands for them.

A float operation returns its exact result times 1 + d with |d| <= u, the unit roundoff. A sum of n
terms in any order is, with the same d, the exact sum of x_i (1 + e_i), |e_i| <= (n - 1) u to first
order [1, section 4.2]; d of no order among themselves make that a multiple of sqrt(n) u, with a
probability that is as near to 1 as the multiple is large [2, theorem 3.1]. So

    before a sum     each operand times  1 + (sqrt(n) u + w) r
    after a nest     each result times  1 + (v + m u + sqrt(n) u) r      (sqrt(n): of a sum only)

with r in (-1, 1), v the unit roundoff of the type that is stored, m the roundings of one point (a
function such as exp counts for `SPECIAL`), u that of float32 where halves are summed, as a kernel
does it, and w that of what operands of products are rounded to (`rounded_products`), else 0. Terms
of one sign err together, which is what comes after the sum; of both signs, each for itself, which
is what comes before it. Points of several operations have their operands disturbed, too, for what
cancels inside of them.

In float64 n stands for sqrt(n): there the reference is no more exact than what is held against it,
and sums of terms that are alike round in one direction (by 2.3e-14, those of torch and of plain
loops, in a variance of 2,835 numbers of which half are 0).

[1] N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, SIAM, 2002.
[2] N. J. Higham, T. Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM Journal on
    Scientific Computing 41 (5), 2019.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from itertools import product

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Call, Expr, TensorLoad, Var
from tvm.ir.prim.expr import Let

from ...kernels.program.expr import constant, dtype_of, number, substitute, variables, widened
from .rounded_products import adds_products

UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tfloat32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
SPECIAL = 4  # kernels compute exp, erf, ... to within two units in the last place, 4 u

PICKS = (tirx.Select, tirx.Max, tirx.Min, Let)


@dataclass(frozen=True, slots=True)
class Roundings:
    """What one loop nest rounds.

    Attributes
    ----------
    dtypes : tuple of str
        Of each rounding of one point, a function `SPECIAL` times.
    terms : Expr or int
        Of a sum; 1 where there is none.
    is_scan : bool
        Whether each term is added to a stored result.
    operands_in : str or None
        What operands of products are rounded to.
    """

    dtypes: tuple[str, ...]
    terms: Expr | int
    is_scan: bool = False
    operands_in: str | None = None

    def __bool__(self) -> bool:
        return bool(self.dtypes)

    @property
    def count(self) -> int:
        """The roundings of one point."""
        return len(self.dtypes)

    @property
    def is_sum(self) -> bool:
        """Whether several terms are added up."""
        return not isinstance(self.terms, int) or self.terms > 1

    @property
    def before(self) -> Expr | float:
        """How large the disturbance of an operand is, relative to it."""
        own = UNIT_ROUNDOFF[self.operands_in] if self.operands_in else 0.0
        return self._growth * self._unit + own

    def after(self, dtype: str) -> Expr | float:
        """How large the disturbance of a result is that is stored as `dtype`."""
        if not self.is_sum:
            return UNIT_ROUNDOFF[dtype] + sum(UNIT_ROUNDOFF[d] for d in self.dtypes)
        u = self._unit
        return self._growth * u + (UNIT_ROUNDOFF[dtype] + self.count * u)

    @property
    def _growth(self) -> Expr | float:
        """How many unit roundoffs a sum is off by."""
        if self._unit <= UNIT_ROUNDOFF["float64"]:
            return self.terms if isinstance(self.terms, int) else tirx.Cast("float64", self.terms)
        return _root(self.terms)

    @property
    def _unit(self) -> float:
        """The unit roundoff of a sum: kernels add halves up in float32."""
        added = self.dtypes if self.is_scan else map(widened, self.dtypes)
        return max(UNIT_ROUNDOFF[d] for d in added)


def _root(terms: Expr | int) -> Expr | float:
    if isinstance(terms, int):
        return math.sqrt(terms)
    return tirx.sqrt(tirx.Cast("float64", terms))


def roundings_of(nest: tirx.Stmt, operands_in: str | None = None) -> Roundings:
    """The roundings of a loop nest, of which operands of products may be rounded to a dtype."""
    blocks: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(nest, [(s_tir.SBlock, blocks.append)])
    bodies = [block.body for block in blocks if not _holds_block(block.body)] or [nest]
    dtypes = [dtype for body in bodies for dtype in rounded(body)]
    if not dtypes:
        return Roundings((), 1)
    if reduced := _reduced(blocks):
        rounds = operands_in if adds_products(nest) else None
        return Roundings(tuple(dtypes), _product(reduced), operands_in=rounds)
    scanned = _scanned(nest)  # along one of its axes; a sum may be over all of them
    return Roundings(tuple(dtypes), _product(scanned), is_scan=bool(scanned))


def _holds_block(body: tirx.Stmt) -> bool:
    inner: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(body, [(s_tir.SBlock, inner.append)])
    return bool(inner)


def rounded(body: tirx.Stmt) -> list[str]:
    """The dtypes of the floats that a statement computes, one for each rounding of a point.

    Results of arithmetic and of casts; a value that is only moved or picked loses nothing.
    """
    found: list[str] = []

    def visit(node: Expr) -> None:
        if isinstance(node, (Var, TensorLoad, *PICKS, tirx.FloatImm)) or not hasattr(
            node.ty, "dtype"
        ):
            return
        name = getattr(getattr(node, "op", None), "name", "")
        if dtype_of(node) in UNIT_ROUNDOFF and not name.endswith("if_then_else"):
            found.extend([dtype_of(node)] * (SPECIAL if isinstance(node, Call) else 1))

    tvm_ffi.structural_walk(body, [(Expr, visit)])
    return found


def equated(body: tirx.Stmt) -> bool:
    """Whether a statement compares floats for equality."""
    found: list[str] = []
    tvm_ffi.structural_walk(body, [((tirx.EQ, tirx.NE), lambda e: found.append(dtype_of(e.a)))])
    return not UNIT_ROUNDOFF.keys().isdisjoint(found)


def _reduced(blocks: list[s_tir.SBlock]) -> list[Expr]:
    """The extents that blocks reduce over; the largest of one that differs from point to point (of
    a pooling into windows of unlike sizes).
    """
    axes = [iv for block in blocks for iv in block.iter_vars]
    domains = {axis.var: axis.dom for axis in axes}
    return [
        _largest(axis.dom.extent, domains)
        for axis in axes
        if axis.iter_type == tirx.IterVar.CommReduce
    ]


def _largest(extent: Expr, domains: dict[Var, tvm.ir.Range]) -> Expr:
    points = [var for var in variables(extent) if var in domains]
    sizes = [number(domains[var].extent) for var in points]
    if not points or None in sizes:
        return extent
    values = []
    for point in product(*map(range, sizes)):
        env = {v: constant(at, dtype_of(v)) for v, at in zip(points, point, strict=True)}
        values.append(substitute(extent, env))
    return tvm.sym.Analyzer().simplify(reduce(tirx.max, values))


def _product(extents: list[Expr]) -> Expr | int:
    terms: Expr | int = 1
    for extent in extents:
        terms = terms * (int(extent) if isinstance(extent, tirx.IntImm) else extent)
    return terms


def _scanned(nest: tirx.Stmt) -> list[Expr]:
    """The shape of what a nest both writes and reads, such as a scan in plain loops."""
    written: list[Var] = []
    read: list[Var] = []
    tvm_ffi.structural_walk(nest, [(tirx.BufferStore, lambda s: written.append(s.buffer))])
    tvm_ffi.structural_walk(nest, [(TensorLoad, lambda e: read.append(e.source))])
    both = [w for w in written if any(w.same_as(r) for r in read)]
    return list(both[0].ty.shape) if both else []
