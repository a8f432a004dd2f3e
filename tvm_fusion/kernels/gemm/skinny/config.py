"""Configurations of the skinny product, and which of them a contraction allows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ....config import HardwareProfile
from ....errors import Unsupported
from ...contraction.reader import Axis, Contraction, Operand, Product, Segment
from ...gpu.access import affine_access
from ...gpu.product_frame import Frame
from ...program.expr import FLOAT8_DTYPES, HALF_DTYPES, bytes_of, dtype_of, is_integer
from ..epilogue import in_pairs
from .values import values_of

WARP = 32
MAX_ROWS = 16
STATIC_SMEM = 49_152
"""Bytes of shared memory that a kernel may have without asking for more."""
MMA_LANES, MMA_COLUMNS = 4, 16
PAIRED_COLUMNS = 8
"""Columns read at once, at most, where values are made of pairs of columns."""


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """How a block divides its columns and the sum.

    Attributes
    ----------
    tensor : dtype of the factors on tensor cores; empty for float32 on the CUDA cores.
    steps : consecutive terms that a thread reads of a column at once.
    width : consecutive columns that a thread reads of a term at once.
    columns : runs of `width` columns of a thread; tiles of 16 columns of a warp on tensor cores.
    lanes : threads of a warp side by side along the columns (CUDA cores).
    warps_k, warps_n : warps that share the sum, and that lie side by side.
    unroll : steps whose loads are in flight together.
    stages : steps on their way through shared memory; 0 for loads into registers.
    """

    tensor: str
    steps: int
    width: int
    columns: int
    lanes: int
    warps_k: int
    warps_n: int = 1
    unroll: int = 4
    stages: int = 0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARP * self.warps_k * self.warps_n

    @property
    def block_n(self) -> int:
        """Columns of a block."""
        if self.tensor:
            return self.warps_n * self.columns * MMA_COLUMNS
        return self.warps_n * self.columns * self.lanes * self.width

    @property
    def runs(self) -> int:
        """Runs of weights that a thread reads in a step."""
        return 2 * self.columns // self.width if self.tensor else self.columns

    @property
    def run(self) -> int:
        """Consecutive terms that have to lie in one axis."""
        return self.steps * (MMA_LANES if self.tensor else 1)

    def ring_bytes(self, slots: int) -> int:
        """Shared memory of the weights under way, `slots` 16-byte accesses of a thread a step."""
        return self.threads * 16 * slots * self.stages

    def smem_bytes(self, contraction: Contraction) -> int:
        """Shared memory of a block's sums: one partial sum for each share."""
        most = max(len(s.products) for s in contraction.segments)
        size = bytes_of(contraction.products[0].dtype)
        return most * self.warps_k * contraction.M * self.block_n * size

    def check(
        self, contraction: Contraction, hw: HardwareProfile, tensor: str | None = None
    ) -> None:
        """Raises Unsupported where the contraction's sizes or dtypes do not allow this.

        `tensor` is its `tensor_dtype`, if that is known.
        """
        for segment in contraction.segments:
            for product in segment.products:
                if product.k and product.k[-1].extent % self.run:
                    raise Unsupported(f"a sum of {product.K} terms in runs of {self.run}")
                if not product.k and self.run > 1:
                    raise Unsupported("a sum of one term")
            if self.width > 1 and (not segment.n or segment.n[-1].extent % self.width):
                raise Unsupported(f"{segment.N} columns in runs of {self.width}")
            if segment.partners is not None and self.block_n % segment.partners.width:
                raise Unsupported(f"{self.block_n} columns, part of a run of pairs")
        if self.tensor and 2 * self.columns % self.width:
            raise Unsupported(f"{2 * self.columns} columns of a thread in runs of {self.width}")
        if self.smem_bytes(contraction) > STATIC_SMEM:
            raise Unsupported("the partial sums do not fit into static shared memory")
        if self.threads > hw.max_threads_per_block:
            raise Unsupported(f"{self.threads} threads")
        found = tensor_dtype(contraction) if self.tensor and tensor is None else tensor
        if self.tensor and found != self.tensor:
            raise Unsupported(f"the factors are not {self.tensor}")


def check_problem(contraction: Contraction, hw: HardwareProfile) -> None:
    """Raises Unsupported for what no configuration computes."""
    if not hw.architecture.has_mma:
        raise Unsupported(f"the skinny form is for sm_80 and later, not {hw.arch}")
    if not contraction.is_static:
        raise Unsupported("the skinny form needs static sizes")
    if contraction.M > MAX_ROWS:
        raise Unsupported(f"{contraction.M} rows, more than {MAX_ROWS}")
    if not getattr(contraction, "uniform", True):
        raise Unsupported("segments of different sizes")
    for segment in contraction.segments:
        if any(getattr(o, "partial", None) is not None for o in segment.outputs):
            raise Unsupported("reductions of the outputs' rows")
    if len({product.dtype for product in contraction.products}) > 1:
        raise Unsupported("products of different dtypes")


def paired(contraction: Contraction) -> Contraction:
    """The contraction with the columns of each pair close together, but no closer than a read of
    the weights is wide.
    """
    return in_pairs(contraction, lambda s: _pair_size(contraction, s))


def _pair_size(contraction: Contraction, segment: Segment) -> int:
    shapes = {p.var: p.shape for p in contraction.params}
    for product in segment.products:
        load = product.b.load
        if load is not None:
            groups = {"batch": segment.batch, "n": segment.n, "k": product.k}
            access = affine_access(load.indices, shapes[load.source], groups)
            if access is not None and access.contiguous("k"):
                return 1
    return math.gcd(segment.partners.distance, PAIRED_COLUMNS)


def tensor_dtype(contraction: Contraction) -> str:
    """The half precision whose products tensor cores add up in float32, or an empty string.

    An operand may be computed: the unfused graph rounds it to half precision too, unless one of
    its elements is float32.
    """
    found: set[str] = set()
    for segment in contraction.segments:
        for product in segment.products:
            if product.dtype != "float32":
                return ""
            for operand, side in ((product.a, segment.m), (product.b, segment.n)):
                if operand.load is None and product.stored_dtype not in HALF_DTYPES:
                    return ""
                found |= _element_dtypes(contraction, segment, product, operand, side)
    halves = found & set(HALF_DTYPES)
    others = {d for d in found - halves if not is_integer(d) and d not in FLOAT8_DTYPES}
    return halves.pop() if len(halves) == 1 and not others else ""


def _element_dtypes(
    contraction: Contraction,
    segment: Segment,
    product: Product,
    operand: Operand,
    side: tuple[Axis, ...],
) -> set[str]:
    """Dtypes of what is read for each element; block factors are multiplied in float32."""
    if operand.load is not None:
        return {dtype_of(operand.load)}
    frame = Frame(contraction, {}, "int32")
    last = product.k[-1].extent if product.k else 1
    steps = 8 if last % 32 == 0 else 1
    values = values_of(frame, segment, product, operand, side, steps, half="float16")
    return values.element_dtypes()
