"""Kernel class `gemm`: matrix products with everything pointwise behind them, index-only work
before them, and siblings.

One product, or several that share their left operand (QKV, gate and up), with any pointwise
epilogue on the products' own index space. A prologue may only move data (transposes, reshapes,
broadcasts): arithmetic on an operand would run once per tile of the other operand (0.80 to 0.92 of
the two-kernel time where it was measured on an H200).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx

from ..config import HardwareProfile, Policy
from ..errors import Unsupported
from ..ir.access import Access, Affine, Block
from ..ir.extents import assumed_product, product_key
from .base import (
    Fit,
    GroupView,
    Refusal,
    RefusalCode,
    Resources,
    Traffic,
    dtype_bytes,
    write_on_cpu,
)
from .footprint import evaluations
from .pointwise import refuse_recompute
from .traffic import memory_traffic

MAX_SIBLINGS = 3
TMA_PITCH_BYTES = 16  # row pitches the tensor memory accelerator can address are multiples of this
TILE = 128  # rows and columns of output a thread block needs to run tensor cores well


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product: extents of its batch, M, N and K axes and the reads of its operands."""

    block: Block
    batch: int
    m: int
    n: int
    k: int
    left: Access
    right: Access


class Gemm:
    """See the module docstring."""

    name = "gemm"

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        products, others = [], []
        for block in group.blocks:
            product = match_product(block)
            if product is not None:
                products.append(product)
            elif block.reduction is not None:
                others.append(block)
        if not products:
            return group.refuse(RefusalCode.REDUCTION, "the group holds no matrix product")
        if others:
            return group.refuse(
                RefusalCode.EPILOGUE,
                f"{others[0].name} reduces a row; a tile of a matrix product holds part of one",
            )
        if refusal := _check_siblings(group, products, hw) or _check_neighbours(group, products):
            return refusal
        once = frozenset(w.tensor for p in products for w in p.block.writes)
        runs = evaluations(group, once)
        if refusal := refuse_recompute(group, runs, policy):
            return refusal
        shapes = tuple((p.batch, p.m, p.n, p.k) for p in products)
        return Fit(self.name, products[0].m, sum(p.n for p in products), runs.counts, shapes)

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        flops = sum(2.0 * b * m * n * k for b, m, n, k in fit.contractions)
        dtype = self._operand_dtype(group)
        return memory_traffic(
            group,
            fit,
            hw,
            tensor_flops=flops,
            tensor_dtype=dtype if self._on_tensor_cores(group, fit, hw, dtype) else "float32",
            tensor_efficiency=_wave_efficiency(fit, hw),
        )

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        return Resources(168, min(hw.smem_per_block_bytes, 4 * (TILE + 256) * 64 * 2))

    def configs(self, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy) -> list[Any]:
        return [None]

    def write(
        self, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy, config: Any = None
    ) -> tirx.PrimFunc:
        if hw.kind == "llvm":
            return write_on_cpu(func, hw, policy)
        exact = policy.rounding == "exact"
        from .contraction import analyze_contraction
        from .cuda.gemm_hopper import emit_gemm_hopper
        from .cuda.gemm_simt import emit_gemm_simt

        contraction = analyze_contraction(func, exact=exact)
        if hw.arch.startswith("sm_90"):
            try:
                return emit_gemm_hopper(contraction, hw, config)
            except Unsupported:
                pass  # the generic form below takes every shape; what it costs is in `traffic`
        return emit_gemm_simt(contraction, hw, None)

    def _operand_dtype(self, group: GroupView) -> str:
        for block in group.blocks:
            if match_product(block) is not None:
                return group.graph.tensors[block.reads[0].tensor].dtype
        return "float32"

    def _on_tensor_cores(self, group: GroupView, fit: Fit, hw: HardwareProfile, dtype: str) -> bool:
        aligned = all(
            n * dtype_bytes(dtype) % TMA_PITCH_BYTES == 0
            and k * dtype_bytes(dtype) % TMA_PITCH_BYTES == 0
            for _, _, n, k in fit.contractions
        )
        return dtype in hw.tensor_flop_per_s and hw.arch.startswith("sm_90") and aligned


def match_product(block: Block) -> Product | None:
    """The block as a matrix product, or None: a sum over axes that both operands share, every index
    a single axis.
    """
    if not block.is_contraction or len(block.reads) != 2:
        return None
    left, right = block.reads
    for access in (left, right):
        if access.guarded or not all(_plain(i) for i in access.index):
            return None
    reduced, spatial = set(block.reduced), set(block.spatial)
    if not (reduced <= left.axes and reduced <= right.axes):
        return None
    shared = left.axes & right.axes & spatial
    rows, columns = (left.axes - right.axes) & spatial, (right.axes - left.axes) & spatial
    if (rows and columns and min(columns) < min(rows)) or not columns:
        return None

    def size(axes) -> int:
        return assumed_product(block.axes[i].extent for i in axes)

    return Product(block, size(shared), size(rows), size(columns), size(reduced), left, right)


def _plain(index) -> bool:
    return isinstance(index, Affine) and (index.single_axis is not None or not index.axes)


def _check_siblings(
    group: GroupView, products: list[Product], hw: HardwareProfile
) -> Refusal | None:
    if len(products) == 1:
        return None
    if hw.kind == "llvm" and len(group.outputs) > 1:
        return group.refuse(
            RefusalCode.SEVERAL_CONTRACTIONS,
            "on a CPU products with outputs of their own share nothing but the call",
            outputs=len(group.outputs),
        )
    first = products[0]
    same = all(
        p.left.tensor == first.left.tensor
        and (p.batch, p.m, p.k) == (first.batch, first.m, first.k)
        for p in products
    )
    if len(products) > MAX_SIBLINGS or not same:
        return group.refuse(
            RefusalCode.SEVERAL_CONTRACTIONS,
            "one launch computes several matrix products only if they share their left operand",
            products=len(products),
            allowed=MAX_SIBLINGS,
        )
    return None


def _check_neighbours(group: GroupView, products: list[Product]) -> Refusal | None:
    """Every other block is an epilogue on a product's index space, or moves an operand."""
    after: set[int] = set()
    before = _upstream(group, products)
    sizes = {}
    for p in products:
        own = p.block.writes[0].tensor
        after.add(own)
        sizes[own] = product_key(p.block.extents(p.block.spatial))
    blocks = {id(p.block) for p in products}
    for block in group.blocks:
        if id(block) in blocks:
            continue
        sources = [a.tensor for a in block.reads if a.tensor in after]
        written = block.writes[0].tensor
        space = product_key(a.extent for a in block.axes)
        if sources:
            if any(space != sizes[s] for s in sources):
                return group.refuse(
                    RefusalCode.SPACE_MISMATCH,
                    f"{block.name} does not run over the product's elements",
                )
            after.add(written)
            sizes[written] = space
        elif written in before:
            if block.operations() or any(a.guarded or a.data_dependent for a in block.reads):
                return group.refuse(
                    RefusalCode.PROLOGUE,
                    f"{block.name} computes on an operand, once per tile of the other operand",
                )
            if written in group.outputs:
                return group.refuse(RefusalCode.PROLOGUE, f"{block.name} is read by others as well")
        elif written in group.outputs or not group.readers_of.get(written):
            return group.refuse(
                RefusalCode.SPACE_MISMATCH, f"{block.name} neither feeds nor follows the product"
            )
    return None


def _upstream(group: GroupView, products: list[Product]) -> set[int]:
    found = {a.tensor for p in products for a in (p.left, p.right)}
    for block in reversed(group.blocks):
        if found & {w.tensor for w in block.writes}:
            found |= {a.tensor for a in block.reads}
    return found


def _wave_efficiency(fit: Fit, hw: HardwareProfile) -> float:
    """Share of the last wave of tiles that is filled, and of a tile that is inside the matrix."""
    if hw.kind == "llvm":
        return 1.0
    tiles, useful = 0, 0.0
    for batch, m, n, _ in fit.contractions:
        grid = batch * -(-m // TILE) * -(-n // TILE)
        tiles += grid
        useful += batch * m * n
    waves = -(-tiles // hw.num_sms)
    return max(0.01, useful / (waves * hw.num_sms * TILE * TILE))
