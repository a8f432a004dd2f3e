"""Kernel class `gemm`: matrix products with everything pointwise behind them, what makes their
operands before them, and siblings.

One product, or several that share their left operand (QKV, gate and up), with any pointwise
epilogue on the products' own index space; on CUDA also independent products side by side, which
alone would leave the device idle (experts, low-rank updates). A prologue may always move data
(transposes, reshapes, broadcasts). Arithmetic on an operand runs once per tile of the other operand
(0.80 to 0.92 of the two-kernel time where it was measured on an H200): it is taken in where the
stored operand is smaller than what is computed from it (a dequantisation), on weights also where
there are few rows, on rows where there is one; the predicted time decides. On Hopper runs of a
product's columns may be reduced, too, for a kernel that finishes the rows (see `partials`).
On CUDA what is behind a product may be made of pairs of its columns (see `columns`).
"""

from __future__ import annotations

from dataclasses import replace

from ...config import HardwareProfile, Policy
from ...cost.traffic import Resources, Traffic
from ...plan.group_view import GroupView
from ...plan.refusal import Refusal, RefusalCode
from ..base import Family, Fit
from ..forms import Writer
from ..group.footprint import evaluations
from ..group.traffic import memory_traffic
from ..pointwise.kernel_class import refuse_recompute
from ..traits import MULTIPLIES, Needs
from .checks import check_neighbours, check_siblings, upstream_of
from .columns import State, columns_behind, paired_elements, pairs_of
from .launch import GemmGroup
from .partials import refuse_partials
from .product import match_product
from .side_by_side import are_siblings, components
from .time import predict

TILE = 128  # rows and columns of output a thread block needs to run tensor cores well


class Gemm(Family):
    """See the module docstring."""

    name = "gemm"
    needs = Needs(MULTIPLIES)
    joins_independent = True
    is_product = True
    slow_to_compile = True

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
            columns = {id(p.block): p.columns for p in products}
            if refusal := refuse_partials(group, columns, others, hw):
                return refusal
        if refusal := check_siblings(group, products, hw):
            return refusal
        behind: dict[int, State] = {}
        if hw.kind == "cuda" and not others:
            behind = columns_behind(group, {id(p.block): p.columns for p in products})
        if refusal := check_neighbours(group, products, hw, policy, behind):
            return refusal
        before = upstream_of(group, products)
        accumulated = frozenset(w.tensor for p in products for w in p.block.writes)
        operands = frozenset(a.tensor for p in products for a in (p.left, p.right))
        runs = evaluations(group, accumulated | operands if hw.kind == "cuda" else accumulated)
        if refusal := refuse_recompute(group, runs, policy):
            return refusal
        shapes = tuple((p.batch, p.m, p.n, p.k) for p in products)
        columns, parts = sum(p.n for p in products), components(group, products)
        fit = Fit(
            self.name,
            products[0].m,
            columns,
            runs.counts,
            shapes,
            side_by_side=len(parts) > 1,
        )
        if hw.kind != "cuda":
            return fit
        pairs = pairs_of(behind)
        launch = GemmGroup(
            group,
            parts,
            are_siblings(products),
            runs.counts,
            before,
            hw,
            pairs,
            paired_elements(group, behind),
        )
        time = predict(launch, hw, policy)
        if time is None and pairs:
            return group.refuse(
                RefusalCode.EPILOGUE, "no kernel of the products has both columns of all pairs"
            )
        if time is None:
            return group.refuse(
                RefusalCode.EPILOGUE, f"{others[0].name} reduces a row of no tensor-core product"
            )
        terms = tuple(sorted(time.terms.items()))
        return replace(fit, evaluations=time.counts, seconds=time.seconds, terms=terms)

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        flops = sum(2.0 * b * m * n * k for b, m, n, k in fit.contractions)
        return memory_traffic(
            group,
            fit,
            hw,
            tensor_flops=flops,
            tensor_dtype=self._operand_dtype(group),
            seconds=fit.seconds,
            terms=dict(fit.terms),
        )

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        return Resources(168, min(hw.smem_per_block_bytes, 4 * (TILE + 256) * 64 * 2))

    def writer(self, hw: HardwareProfile) -> Writer:
        if hw.kind == "llvm":
            return super().writer(hw)
        from .forms import WRITER

        return WRITER

    def _operand_dtype(self, group: GroupView) -> str:
        for block in group.blocks:
            if match_product(block) is not None:
                return group.graph.tensors[block.reads[0].tensor].dtype
        return "float32"
