"""Kernel class `pointwise`: any DAG of elementwise, broadcast and injective operators over one
index space, several outputs.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from tvm import tirx

from ..config import HardwareProfile, Policy
from ..ir.access import Block
from ..ir.extents import assumed, assumed_product, product_key
from .base import Fit, GroupView, Refusal, RefusalCode, Resources, Traffic, write_on_cpu
from .footprint import VECTOR_ELEMENTS, Evaluations, costly, evaluations, points
from .pointwise_shape import pointwise_shape
from .traffic import cuda_resources, cuda_traffic, filled_by_threads, memory_traffic
from .window import is_window_block


class Pointwise:
    """See the module docstring.

    Reductions over a window (pooling) are unrolled. On CUDA, outputs of different sizes that share
    no work stand side by side: each gets its own range of blocks. Does not handle: other
    reductions; outputs of different sizes of which one is computed from another.
    """

    name = "pointwise"
    joins_independent = True

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        for block in group.blocks:
            unrolled = hw.kind != "llvm" and is_window_block(block)
            if block.reduction is not None and not unrolled:
                return group.refuse(RefusalCode.REDUCTION, f"{block.name} is a reduction")
        outputs = [group.writer_of[t] for t in group.outputs]
        if not outputs:
            return group.refuse(RefusalCode.SPACE_MISMATCH, "nothing of the group is read outside")
        sizes = sorted(_elements(b) for b in outputs)
        if not _one_size(outputs) and (hw.kind == "llvm" or not _independent(group)):
            return group.refuse(
                RefusalCode.SPACE_MISMATCH,
                "the outputs have different sizes, so they share no index space",
                smallest=sizes[0],
                largest=sizes[-1],
            )
        runs = evaluations(group)
        if refusal := refuse_recompute(group, runs, policy):
            return refusal
        extents = [assumed(extent) for extent in outputs[0].extents(outputs[0].spatial)]
        columns = extents[-1] if extents else 1
        if not _one_size(outputs):
            elements = sum(_sizes(outputs).values())
            return Fit(self.name, elements, 1, runs.counts, side_by_side=True)
        return Fit(self.name, assumed_product(extents[:-1]), columns, runs.counts)

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        if hw.kind != "llvm":
            return cuda_traffic(group, fit, hw, pointwise_shape(group, fit, hw))
        elements = fit.rows * fit.columns
        return memory_traffic(
            group, fit, hw, parallel=filled_by_threads(elements / VECTOR_ELEMENTS, hw)
        )

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        if hw.kind != "llvm":
            return cuda_resources(group, fit, pointwise_shape(group, fit, hw))
        values = len(group.inputs) + len(group.outputs) + 2
        return Resources(24 + values * VECTOR_ELEMENTS, 0)

    def configs(self, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy) -> list[Any]:
        if hw.kind == "llvm":
            return [None]
        from .cuda.pointwise import pointwise_configs
        from .program import analyze

        return pointwise_configs(analyze(func, exact=policy.rounding == "exact"), hw)

    def write(
        self, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy, config: Any = None
    ) -> tirx.PrimFunc:
        if hw.kind == "llvm":
            return write_on_cpu(func, hw, policy)
        exact = policy.rounding == "exact"
        from .cuda.pointwise import emit_pointwise
        from .program import analyze

        return emit_pointwise(analyze(func, exact=exact), hw, config)


def _elements(block: Block) -> int:
    return assumed_product(block.extents(block.spatial))


def _sizes(outputs: list[Block]) -> dict[Hashable, int]:
    """Elements of one output of each size."""
    return {product_key(b.extents(b.spatial)): _elements(b) for b in outputs}


def _one_size(outputs: list[Block]) -> bool:
    return len(_sizes(outputs)) == 1


def _independent(group: GroupView) -> bool:
    """Whether outputs of different sizes are computed from different blocks, but for numbers."""
    wanted: dict[int, set[Hashable]] = {}
    for t in group.outputs:
        block = group.writer_of[t]
        wanted.setdefault(t, set()).add(product_key(block.extents(block.spatial)))
    for block in reversed(group.blocks):
        sizes = set().union(*(wanted.get(w.tensor, set()) for w in block.writes))
        if len(sizes) > 1 and points(block) > 1:
            return False
        for access in block.reads:
            wanted.setdefault(access.tensor, set()).update(sizes)
    return True


def refuse_recompute(group: GroupView, runs: Evaluations, policy: Policy) -> Refusal | None:
    """The refusal for a costly block that would run more often than the policy allows."""
    if (
        runs.worst_block is None
        or runs.worst <= policy.max_recompute
        or not costly(runs.worst_block)
    ):
        return None
    return group.refuse(
        RefusalCode.RECOMPUTE,
        f"{runs.worst_block.name} would be computed {runs.worst:.0f} times an element",
        factor=runs.worst,
        allowed=policy.max_recompute,
    )
