"""A contraction as the Hopper kernel sees it: which tensors the TMA reads and writes, what is left.

Axes that lie behind each other in every operand are one M, one N, one K; outer row axes that do not
fit (attention heads, images) become part of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm.ir import Call, TensorLoad, Var

from ...errors import Unsupported
from ..contraction import (
    Axis,
    Contraction,
    Extent,
    Output,
    Product,
    Segment,
    equal_sizes,
    size_of,
)
from ..contraction_inline import Binding
from ..expr import dtype_of
from .gemm_access import AffineAccess, affine_access
from .gemm_epilogue_loads import EpilogueLoad, take_loads
from .gemm_tensor_map import TensorMap, tensor_map

# Halves in one row of a box (128 bytes), and rows of a box that a warpgroup stores.
BOX = 64

DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True, eq=False)
class OperandView:
    """An operand as a tensor over (batch, `rows`, k), contiguous along the group `inner`."""

    param: Var
    dtype: str
    access: AffineAccess
    rows: str
    inner: str

    @property
    def k_major(self) -> bool:
        """Whether neighbouring terms are neighbours in memory."""
        return self.inner == "k"

    def boxes(self, rows: int) -> TensorMap:
        """Boxes of 64 terms by `rows` rows; of 64 rows by 64 terms where rows are contiguous."""
        box = {self.rows: rows if self.k_major else BOX, "k": BOX}
        return tensor_map(self.param, self.dtype, self.access, self.inner, box)


@dataclass(frozen=True, slots=True, eq=False)
class HopperSegment:
    """A segment over its batch, M and N axes; `loads` are what its epilogue reads ahead of use.

    `staged` is the position of the output that leaves through shared memory and the TMA, by the map
    `staged_map`; the others are stored from registers.
    """

    batch: tuple[Axis, ...]
    m: tuple[Axis, ...]
    n: tuple[Axis, ...]
    products: tuple[Product, ...]
    b: tuple[OperandView, ...]
    bindings: tuple[Binding, ...]
    outputs: tuple[Output, ...]
    loads: tuple[EpilogueLoad, ...]
    staged: int | None
    staged_map: TensorMap | None
    residual: EpilogueLoad | None
    residual_map: TensorMap | None

    @property
    def N(self) -> int:
        """Number of columns."""
        return size_of(self.n)

    @property
    def groups(self) -> dict[str, tuple[Axis, ...]]:
        """The axes of an access from the epilogue."""
        return {"batch": self.batch, "m": self.m, "n": self.n}


@dataclass(frozen=True, slots=True, eq=False)
class HopperProblem:
    """Made by `read_problems`."""

    contraction: Contraction
    dtype: str
    batch: Extent
    M: Extent
    K: int
    a: OperandView
    segments: tuple[HopperSegment, ...]

    @property
    def columns(self) -> list[int]:
        """N of each segment."""
        return [segment.N for segment in self.segments]

    @property
    def dual(self) -> bool:
        """Whether two products meet in each output."""
        return len(self.segments[0].products) == 2

    @property
    def staged(self) -> bool:
        """Whether every segment has an output that the TMA can store."""
        return all(segment.staged is not None for segment in self.segments)

    @property
    def unlowered_functions(self) -> bool:
        """Whether the epilogue calls functions that exact rounding keeps as they are."""
        calls: list[Call] = []
        for segment in self.segments:
            for item in (*segment.bindings, *segment.outputs):
                tvm_ffi.structural_walk(item.value, [(Call, calls.append)])
        return self.contraction.exact and bool(calls)

    @property
    def residual(self) -> EpilogueLoad | None:
        """The matrix of the output's shape that the TMA loads into the output's own box."""
        return self.segments[0].residual


def read_problems(contraction: Contraction) -> dict[int, HopperProblem]:
    """The contraction as the TMA and wgmma can compute it, by the row axes put into the batch.

    Raises
    ------
    Unsupported
        Symbolic N or K; operands that are no plain float16 or bfloat16 tensors, or that no tensor
        map expresses; products with different A operands; more than two products in a segment.
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
    products = contraction.products
    a_views = []
    segments = []
    for segment in contraction.segments:
        batch, m = (*segment.batch, *segment.m[:moved]), segment.m[moved:]
        for product in segment.products:
            a_views.append(_operand(contraction, product, True, batch, m, "m"))
        b = tuple(_operand(contraction, p, False, batch, segment.n, "n") for p in segment.products)
        segments.append(_segment(contraction, segment, batch, m, b))
    first = a_views[0]
    if any(not _same_view(first, view) for view in a_views[1:]):
        raise Unsupported("products with different A operands")
    if any(view.k_major != segments[0].b[0].k_major for s in segments for view in s.b):
        raise Unsupported("B operands of different layouts")
    dtypes = {view.dtype for view in (*a_views, *(v for s in segments for v in s.b))}
    if len(dtypes) != 1:
        raise Unsupported(f"operands of different dtypes: {', '.join(sorted(dtypes))}")
    if any(p.K != products[0].K for p in products):
        raise Unsupported("products of different depth")
    counts = {len(s.products) for s in segments}
    if max(counts) > 2 or (len(segments) > 1 and max(counts) > 1):
        raise Unsupported("more products than accumulators fit, or pairs side by side")
    batch, rows = size_of(segments[0].batch), size_of(segments[0].m)
    for segment in segments[1:]:
        if not equal_sizes(size_of(segment.batch), batch):
            raise Unsupported("segments of different batch")
    K = products[0].K
    return HopperProblem(contraction, first.dtype, batch, rows, K, first, tuple(segments))


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
    if dtype not in DTYPES or product.dtype != "float32":
        raise Unsupported(f"tensor cores of this kernel take {' or '.join(DTYPES)}, not {dtype}")
    groups = {"batch": batch, name: rows, "k": product.k}
    access = affine_access(load.indices, _shape(contraction, load), groups)
    if access is None:
        raise Unsupported("an operand whose index is not affine")
    inner = "k" if access.contiguous("k") or not product.k else name
    view = OperandView(load.source, dtype, access, name, inner)
    view.boxes(8 if name == "m" else BOX)  # raises where no tile of any size is a box
    return view


def _shape(contraction: Contraction, load: TensorLoad) -> tuple:
    return next(p.shape for p in contraction.params if p.var.same_as(load.source))


def _segment(
    contraction: Contraction,
    segment: Segment,
    batch: tuple[Axis, ...],
    m: tuple[Axis, ...],
    b: tuple[OperandView, ...],
) -> HopperSegment:
    groups = {"batch": batch, "m": m, "n": segment.n}
    bindings, outputs, loads = take_loads(contraction, segment, groups)
    dtype = b[0].dtype
    staged = staged_map = residual = residual_map = None
    for position, output in enumerate(outputs):
        param = contraction.params[output.param]
        access = affine_access(output.indices, param.shape, groups)
        staged_map = _box_map(param.var, output.dtype, access, dtype)
        if staged_map is not None:
            staged = position
            break
    if staged is not None and len(contraction.segments) == 1:
        for load in loads:
            residual_map = _box_map(load.param, load.dtype, load.access, dtype)
            if residual_map is not None:
                residual = load
                break
    return HopperSegment(
        batch,
        m,
        segment.n,
        segment.products,
        b,
        bindings,
        outputs,
        tuple(x for x in loads if x is not residual),
        staged,
        staged_map,
        residual,
        residual_map,
    )


def _box_map(param: Var, dtype: str, access: AffineAccess | None, wanted: str) -> TensorMap | None:
    """The map of a matrix of the output's shape in boxes of 64 x 64, if the TMA can address it."""
    if access is None or dtype != wanted or not access.contiguous("n"):
        return None
    try:
        return tensor_map(param, dtype, access, "n", {"n": BOX, "m": BOX})
    except Unsupported:
        return None
