"""Kernel class `gemm`: matrix products with everything pointwise behind them, what makes their
operands before them, and siblings.

One product, or several that share their left operand (QKV, gate and up), with any pointwise
epilogue on the products' own index space; on CUDA also independent products side by side, which
alone would leave the device idle (experts, low-rank updates). A prologue may always move data
(transposes, reshapes, broadcasts). Arithmetic on an operand runs once per tile of the other operand
(0.80 to 0.92 of the two-kernel time where it was measured on an H200): it is taken in where the
stored operand is smaller than what is computed from it (a dequantisation), on weights also where
there are few rows, on rows where there is one; the predicted time decides. On Hopper also what is
computed of one matrix of rows (batch norm and relu in front of a 1x1 convolution), see `computed`;
and runs of a product's columns or rows may be reduced, for a kernel that finishes them (see
`partials`). Windows of up to 16 neighbouring columns are reduced wholly, with what is pointwise in
them, where nothing else is an output.
On CUDA what is behind a product may be made of pairs of its columns (see `columns`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ...config import HardwareProfile, Policy
from ...cost.traffic import Resources, Traffic
from ...ir.extents import product_key
from ...plan.group_view import GroupView
from ...plan.refusal import Refusal, RefusalCode
from ..base import MULTIPLIES, Family, Fit, Needs
from ..contraction.model import RUN_ROWS
from ..forms import Writer
from ..group.footprint import evaluations, refuse_recompute
from ..group.gathers import refuse_gathers
from ..group.traffic import memory_traffic
from .columns import State, columns_behind, is_part, paired_elements, pairs_of
from .computed import computes_left
from .launch import GemmGroup, narrows
from .partials import RowRuns, column_windows, refuse_partials, row_runs
from .product import Product, match_product
from .side_by_side import are_siblings, components, depends_on_another, refuse_side_by_side
from .time import SKINNY_ROWS, predict

# What may stand in a launch of matrix products: siblings, epilogues, and what makes operands.

MAX_SIBLINGS = 8
COMPUTED_ROWS = 1
"""Rows up to which a left operand is computed for each column tile again: silu(g) * u in front of
11008 x 4096 takes 21.8 us on an H200 with one row, but 66.9 with 4, and the product alone 22.3."""


def check_siblings(
    group: GroupView, products: list[Product], hw: HardwareProfile
) -> Refusal | None:
    """Several products share their left operand, or are independent of each other."""
    if len(products) == 1:
        return None
    if hw.kind == "llvm" and len(group.outputs) > 1:
        return group.refuse(
            RefusalCode.SEVERAL_CONTRACTIONS,
            "on a CPU products with outputs of their own share nothing but the call",
            "model: multiply once by the weights side by side, and split the result",
            outputs=len(group.outputs),
        )
    if source := depends_on_another(products, _upstream(group, products)):
        return group.refuse(
            RefusalCode.SEVERAL_CONTRACTIONS,
            f"an operand is computed from {source.block.name}, a matrix product of the same launch",
        )
    parts = components(group, products)
    if hw.kind != "llvm" and len({len(part) for part in parts}) > 1:
        return group.refuse(
            RefusalCode.SEVERAL_CONTRACTIONS,
            "products that meet in an output stand beside others that do not",
        )
    if not are_siblings(products):
        return refuse_side_by_side(group, parts, hw)
    if len(products) > MAX_SIBLINGS:
        return group.refuse(
            RefusalCode.SEVERAL_CONTRACTIONS,
            "one launch computes no more matrix products that share their left operand",
            products=len(products),
            allowed=MAX_SIBLINGS,
        )
    return None


def check_neighbours(
    group: GroupView,
    products: list[Product],
    hw: HardwareProfile,
    policy: Policy,
    behind: Mapping[int, State],
    reduced: Collection[int] = (),
) -> Refusal | None:
    """Every other block is an epilogue on a product's index space, or makes an operand.

    `behind` are tensors that hold a product's elements or parts of them, where any holds parts;
    `reduced` are blocks, by `id`, that reduce runs of rows, of which the last reach beyond it, or
    windows of columns, and those behind the latter.
    """
    after: set[int] = set()
    before, computable = _upstream(group, products), _computable(group, products, hw, policy)
    sizes = {}
    for p in products:
        own = p.block.writes[0].tensor
        after.add(own)
        sizes[own] = product_key(p.block.extents(p.block.spatial))
    blocks = {id(p.block) for p in products}
    for block in group.blocks:
        if id(block) in blocks or id(block) in reduced:
            continue
        sources = [a.tensor for a in block.reads if a.tensor in after]
        written = block.writes[0].tensor
        space = product_key(a.extent for a in block.axes)
        if sources:
            apart = behind and not is_part(group, behind, written)
            if apart or (not behind and any(space != sizes[s] for s in sources)):
                return group.refuse(
                    RefusalCode.SPACE_MISMATCH,
                    f"{block.name} does not run over the product's elements",
                )
            after.add(written)
            sizes[written] = space
        elif written in before:
            moves = not any(a.guarded or a.data_dependent for a in block.reads)
            computes = block.operations() or narrows(group, block)
            if not moves or (computes and written not in computable):
                return group.refuse(
                    RefusalCode.PROLOGUE,
                    f"{block.name} computes on an operand, once per tile of the other operand",
                )
            if written in group.outputs:
                return group.refuse(
                    RefusalCode.PROLOGUE,
                    f"{block.name} is read by others as well",
                    f"model: drop what else reads {block.name}",
                )
        elif written in group.outputs or not group.readers_of.get(written):
            return group.refuse(
                RefusalCode.SPACE_MISMATCH, f"{block.name} neither feeds nor follows the product"
            )
    return None


def images_of(products: Sequence[Product], runs: Collection[RowRuns]) -> int | None:
    """Batches that the products' rows are to be taken as, so that tiles hold whole runs of rows;
    None where runs are not counted over rows of a batch, or over others for each.
    """
    rows = {run.rows for run in runs}
    if None in rows or any(p.m % n for p in products for n in rows):
        return None
    uneven = rows if any(n % RUN_ROWS for n in rows) else set()
    sizes = {p.m // n for p in products for n in uneven}
    return None if len(sizes) > 1 else max(sizes, default=1)


def _computable(
    group: GroupView, products: Sequence[Product], hw: HardwareProfile, policy: Policy
) -> frozenset[int]:
    """Tensors in front of a product that its kernel may compute: those of weights that are stored
    in fewer bytes; with few rows, all those of right operands, with one row also of left ones; and
    what the Hopper form computes of one matrix.
    """
    if hw.kind != "cuda":
        return frozenset()
    left, right = upstream_of(group, products)
    few = all(p.m <= SKINNY_ROWS for p in products)
    stored = sum(group.tensor_bytes(t) for t in group.inputs if t in right)
    widened = sum(group.tensor_bytes(t) for t in {p.right.tensor for p in products})
    found = right - left if few or stored < widened else frozenset()
    one = all(p.m <= COMPUTED_ROWS for p in products) and policy.max_recompute > 1
    return found | left if one or computes_left(group, products, hw) else found


def _upstream(group: GroupView, products: Sequence[Product]) -> set[int]:
    """The operands and what they are computed from."""
    left, right = upstream_of(group, products)
    return set(left | right)


def upstream_of(
    group: GroupView, products: Sequence[Product]
) -> tuple[frozenset[int], frozenset[int]]:
    """Left operands and what they are computed from, and the same of right ones."""
    operands = {p.left.tensor for p in products}, {p.right.tensor for p in products}
    return group.once(
        ("upstream", *map(frozenset, operands)), lambda: _upstream_of(group, operands)
    )


def _upstream_of(
    group: GroupView, operands: tuple[set[int], set[int]]
) -> tuple[frozenset[int], frozenset[int]]:
    sides = []
    for found in operands:
        for block in reversed(group.blocks):
            if found & {w.tensor for w in block.writes}:
                found |= {a.tensor for a in block.reads}
        sides.append(frozenset(found))
    return sides[0], sides[1]


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
        columns = {id(p.block): p.columns for p in products}
        runs_of_rows = row_runs(group, columns, others)
        window, windows = 0, frozenset()
        if hw.kind == "cuda" and hw.architecture.has_mma and len(products) == 1 and others:
            window, windows = column_windows(group, columns, others)
        apart = others and not windows
        if apart and (refusal := refuse_partials(group, columns, others, hw, runs_of_rows)):
            return refusal
        images = images_of(products, runs_of_rows.values())
        if images is None:
            return group.refuse(
                RefusalCode.EPILOGUE,
                f"{others[0].name} reduces blocks of a product's rows that no tile holds in order",
            )
        products = [replace(p, batch=p.batch * images, m=p.m // images) for p in products]
        if refusal := check_siblings(group, products, hw):
            return refusal
        behind: dict[int, State] = {}
        if hw.kind == "cuda" and not others:
            behind = columns_behind(group, columns)
        reduced = windows or runs_of_rows
        if refusal := check_neighbours(group, products, hw, policy, behind, reduced):
            return refusal
        before = upstream_of(group, products)
        accumulated = frozenset(w.tensor for p in products for w in p.block.writes)
        if hw.kind == "cuda" and (refusal := refuse_gathers(group, accumulated)):
            return refusal
        operands = frozenset(a.tensor for p in products for a in (p.left, p.right))
        runs = evaluations(group, accumulated | operands if hw.kind == "cuda" else accumulated)
        if refusal := refuse_recompute(group, runs, policy):
            return refusal
        shapes = tuple((p.batch, p.m, p.n, p.k) for p in products)
        parts = components(group, products)
        fit = Fit(
            self.name,
            products[0].m,
            sum(p.n for p in products),
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
            images,
            window=window,
        )
        time = predict(launch, hw, policy)
        if time is None and pairs:
            return group.refuse(
                RefusalCode.EPILOGUE, "no kernel of the products has both columns of all pairs"
            )
        if time is None:
            wide = self._operand_dtype(group) == "float32"
            return group.refuse(
                RefusalCode.EPILOGUE,
                f"{others[0].name} reduces a row of no tensor-core product",
                "dtype: store the product's operands as float16 or bfloat16" if wide else None,
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
