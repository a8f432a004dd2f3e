"""A contraction as the Hopper kernel sees it: which tensors the TMA reads and writes, what is left.

Axes that lie behind each other in every operand are one M, one N, one K; outer row axes that do not
fit (attention heads, images) become part of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ....errors import Unsupported
from ...contraction.model import Binding
from ...contraction.reader import Axis, Contraction, Product, Segment, equal_sizes
from ...contraction.row_runs import with_row_bits
from ...gpu.access import AffineAccess, affine_access
from ...gpu.tensor_map import TensorMap, tensor_map
from ...program.expr import (
    FLOAT8_DTYPES,
    HALF_DTYPES,
    dtype_of,
    rebuild,
    same,
    substitute,
    variables,
)
from ...program.program import Extent
from ..epilogue import EpilogueLoad, partner_vars, take_loads
from .model import BOX, OPERAND_KINDS, HopperProblem, HopperSegment, OperandView
from .prologue import Prologue, read_prologue

# Factors of rows that come first in an epilogue are put into the accumulators.
#
#     y = gelu(acc * r[m] + b[n])   ->   y = gelu(acc' + b[n])     acc' = acc * r[m]
#
# where the unfused graph rounds ``acc * r`` to half precision: the accumulators can then be kept in
# that precision, which a sum in float32 cannot, and the epilogue be put off to the next tile. (An
# RMSNorm whose statistic is applied behind the product has that form.)


def take_row_factors(segments: Sequence[HopperSegment]) -> list[HopperSegment]:
    """The segments with the factors of all products taken out; as they were where one has none."""
    products = [p for segment in segments for p in segment.products]
    if any(p.stored_dtype in HALF_DTYPES or p.scaled_dtype is None for p in products):
        return list(segments)
    found = [_Taker(segment).take() for segment in segments]
    return list(segments) if None in found else found


class _Taker:
    """Looks for the factor of each accumulator of a segment."""

    def __init__(self, segment: HopperSegment):
        self.segment = segment
        self.accumulators = {p.accumulator: None for p in segment.products}
        others = partner_vars(segment.partners, len(segment.products))
        self.alias = dict(zip(others, self.accumulators, strict=True))
        self.bound: dict[Var, Expr] = {}
        self.same_for_columns = {load.var for load in segment.loads if not load.per_column}
        self.failed = False

    def take(self) -> HopperSegment | None:
        """The segment with its factors; None where an accumulator occurs without the same one."""
        bindings = []
        for binding in self.segment.bindings:
            if self._is_row_level(binding.value):
                self.bound[binding.var] = substitute(binding.value, self.bound)
                self.same_for_columns.add(binding.var)
            bindings.append(Binding(binding.var, self._visit(binding.value)))
        outputs = [replace(o, value=self._visit(o.value)) for o in self.segment.outputs]
        factors = tuple(self.accumulators.values())
        if self.failed or None in factors:
            return None
        return replace(
            self.segment, bindings=tuple(bindings), outputs=tuple(outputs), factors=factors
        )

    def _visit(self, expr: Expr) -> Expr:
        if isinstance(expr, Var):
            self.failed |= self._own(expr) is not None
            return expr
        if isinstance(expr, tirx.Mul):
            for accumulator, factor in ((expr.a, expr.b), (expr.b, expr.a)):
                own = self._own(accumulator)
                if own is not None and self._is_row_level(factor):
                    self._note(own, substitute(factor, self.bound))
                    return accumulator
        return rebuild(expr, self._visit)

    def _own(self, expr: Expr) -> Var | None:
        """The accumulator that an expression is, in this column or in its partner."""
        if not isinstance(expr, Var):
            return None
        return self.alias.get(expr, expr if expr in self.accumulators else None)

    def _note(self, accumulator: Var, factor: Expr) -> None:
        known = self.accumulators[accumulator]
        self.failed |= known is not None and not same(known, factor)
        self.accumulators[accumulator] = factor

    def _is_row_level(self, expr: Expr) -> bool:
        """Whether a float32 expression is made of what all columns share."""
        loads: list[Expr] = []
        _collect_loads(expr, loads)
        inputs = set(variables(expr))
        return dtype_of(expr) == "float32" and not loads and inputs <= self.same_for_columns


def _collect_loads(expr: Expr, found: list[Expr]) -> Expr:
    if isinstance(expr, TensorLoad):
        found.append(expr)
        return expr
    return expr if isinstance(expr, Var) else rebuild(expr, lambda e: _collect_loads(e, found))


def read_problems(contraction: Contraction) -> dict[int, HopperProblem]:
    """The contraction as the TMA and wgmma can compute it, by the row axes put into the batch.

    Raises
    ------
    Unsupported
        Symbolic N or K; operands that are no plain tensors of floats, or that no tensor map
        expresses; products with different A operands; more than two products in a segment; runs of
        rows that do not start at multiples of 16 rows of a batch.
    """
    inner = [*(s.N for s in contraction.segments), *(p.K for p in contraction.products)]
    if not all(isinstance(size, int) for size in inner):
        raise Unsupported("symbolic N or K")
    found: dict[int, HopperProblem] = {}
    reasons: list[Unsupported] = []
    for moved in range(max(1, len(contraction.segments[0].m))):
        try:
            found[moved] = _read(contraction, moved)
        except Unsupported as reason:
            reasons.append(reason)
    if not found:
        raise reasons[0]
    return found


def _read(contraction: Contraction, moved: int) -> HopperProblem:
    """The problem with the first `moved` row axes of each segment taken into its batch."""
    segments = []
    alone = len(contraction.products) == 1
    for segment in contraction.segments:
        batch, m = (*segment.batch, *segment.m[:moved]), segment.m[moved:]
        prologue = None
        if alone and segment.products[0].a.load is None:
            prologue = _prologue(contraction, segment.products[0], batch, m)
            stored, others = prologue.stored, []
            a = _view_of(stored.param, stored.dtype, stored.access, "m")
        else:
            a, *others = (_operand(contraction, p, True, batch, m, "m") for p in segment.products)
        if any(not _same_view(a, view) for view in others):
            raise Unsupported("products of different A operands that meet")
        if any(p.K != segment.products[0].K for p in segment.products):
            raise Unsupported("products of different depth that meet")
        b = tuple(_operand(contraction, p, False, batch, segment.n, "n") for p in segment.products)
        found = _segment(contraction, segment, batch, m, a, b)
        segments.append(replace(found, prologue=prologue))
    first = segments[0]
    if any(s.a.k_major != first.a.k_major for s in segments):
        raise Unsupported("A operands of different layouts")
    if any(view.k_major != first.b[0].k_major for s in segments for view in s.b):
        raise Unsupported("B operands of different layouts")
    dtypes = {view.dtype for s in segments for view in (s.a, *s.b)}
    if len(dtypes) != 1 and not dtypes <= set(FLOAT8_DTYPES):
        raise Unsupported(f"operands of different dtypes: {', '.join(sorted(dtypes))}")
    counts = {len(s.products) for s in segments}
    if max(counts) > 2 or len(counts) > 1:
        raise Unsupported("more products than accumulators fit, or pairs beside single ones")
    shared = all(_same_sizes(s, first) and _same_view(s.a, first.a) for s in segments)
    if not all(s.residual for s in segments):
        segments = [without_residual(s) for s in segments]
    K = max(s.K for s in segments)
    batch, rows = (largest([f(s) for s in segments]) for f in (lambda s: s.B, lambda s: s.M))
    a = first.a
    if shared:
        segments = take_row_factors(segments)
    return HopperProblem(contraction, a.dtype, batch, rows, K, a, tuple(segments), shared)


def _same_sizes(a: HopperSegment, b: HopperSegment) -> bool:
    return equal_sizes(a.B, b.B) and equal_sizes(a.M, b.M) and a.K == b.K


def largest(sizes: Sequence[Extent]) -> Extent:
    """The largest of some sizes; a symbolic one, if there is any."""
    symbolic = [size for size in sizes if not isinstance(size, int)]
    return symbolic[0] if symbolic else max(sizes)


def _same_view(a: OperandView, b: OperandView) -> bool:
    return a.param.same_as(b.param) and a.access.same_as(b.access)


def _operand(
    contraction: Contraction,
    product: Product,
    is_a: bool,
    batch: Sequence[Axis],
    rows: Sequence[Axis],
    name: str,
) -> OperandView:
    operand = product.a if is_a else product.b
    load = operand.load
    if load is None:
        raise Unsupported("an operand that is computed, not loaded")
    dtype = dtype_of(load)
    if dtype not in OPERAND_KINDS or product.dtype != "float32":
        names = ", ".join(OPERAND_KINDS)
        raise Unsupported(f"tensor cores of this kernel take {names}, not {dtype}")
    groups = {"batch": batch, name: rows, "k": product.k}
    access = affine_access(load.indices, _shape(contraction, load), groups)
    if access is None:
        raise Unsupported("an operand whose index is not affine")
    return _view_of(load.source, dtype, access, name, bool(product.k))


def _prologue(
    contraction: Contraction, product: Product, batch: Sequence[Axis], rows: Sequence[Axis]
) -> Prologue:
    """What is computed of A's elements, which lie along its terms."""
    if product.dtype != "float32":
        raise Unsupported(f"sums in {product.dtype}")
    found = read_prologue(
        contraction, product, product.a, {"batch": batch, "m": rows, "k": product.k}
    )
    if not found.stored.access.contiguous("k"):
        raise Unsupported("an operand that is computed, and not contiguous along the terms")
    return found


def _view_of(
    source: Var, dtype: str, access: AffineAccess, name: str, has_terms: bool = True
) -> OperandView:
    inner = "k" if access.contiguous("k") or not has_terms else name
    if inner != "k" and dtype not in HALF_DTYPES:
        raise Unsupported(f"an operand of {dtype} that is not contiguous along the terms")
    view = OperandView(source, dtype, access, name, inner)
    view.boxes(8 if name == "m" else BOX)  # raises where no tile of any size is a box
    return view


def _shape(contraction: Contraction, load: TensorLoad) -> tuple:
    return next(p.shape for p in contraction.params if p.var.same_as(load.source))


def _segment(
    contraction: Contraction,
    segment: Segment,
    batch: tuple[Axis, ...],
    m: tuple[Axis, ...],
    a: OperandView,
    b: tuple[OperandView, ...],
) -> HopperSegment:
    groups = {"batch": batch, "m": m, "n": segment.n}
    outputs = with_row_bits(segment.outputs, m, (*batch, *segment.n))
    segment = replace(segment, outputs=outputs)
    bindings, outputs, loads = take_loads(contraction, segment, groups)
    found = HopperSegment(
        batch,
        m,
        segment.n,
        segment.products,
        a,
        b,
        bindings,
        outputs,
        loads,
        partners=segment.partners,
    )

    def of_output(position: int) -> TensorMap | None:
        output = outputs[position]
        param = contraction.params[output.param]
        access = affine_access(output.indices, param.shape, groups)
        return _box_map(param.var, output.dtype, access)

    return in_boxes(found, of_output, lambda load: _box_map(load.param, load.dtype, load.access))


def in_boxes(
    segment: HopperSegment,
    of_output: Callable[[int], TensorMap | None],
    of_load: Callable[[EpilogueLoad], TensorMap | None],
) -> HopperSegment:
    """The segment with its first output that the TMA can store, whose map `of_output` gives, and
    the first load that it can bring in beside that, which is then its residual.
    """
    for position, output in enumerate(segment.outputs):
        if output.partial is None and (found := of_output(position)) is not None:
            segment = replace(segment, staged=position, staged_map=found)
            break
    else:
        return segment
    for load in segment.loads:
        if (found := of_load(load)) is not None:
            others = tuple(x for x in segment.loads if x is not load)
            return replace(segment, loads=others, residual=load, residual_map=found)
    return segment


def without_residual(segment: HopperSegment) -> HopperSegment:
    """The segment with its residual among its other loads."""
    if segment.residual is None:
        return segment
    loads = (*segment.loads, segment.residual)
    return replace(segment, loads=loads, residual=None, residual_map=None)


def _box_map(param: Var, dtype: str, access: AffineAccess | None) -> TensorMap | None:
    """The map of a matrix of the output's shape in boxes of 64 x 64, if the TMA can address it."""
    if access is None or dtype not in HALF_DTYPES or not access.contiguous("n"):
        return None
    try:
        return tensor_map(param, dtype, access, "n", {"n": BOX, "m": BOX})
    except Unsupported:
        return None
