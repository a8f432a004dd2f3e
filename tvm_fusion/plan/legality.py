"""Legality and predicted cost of one group, over all kernel classes, remembered by content."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..config import HardwareProfile, Policy
from ..cost.roofline import Estimate, estimate
from ..ir.graph import FusionGraph, Op, OpKind
from ..kernels.base import Fit, GroupView, KernelClass, Refusal, RefusalCode
from ..kernels.registry import kernel_classes


@dataclass(frozen=True, slots=True)
class Costed:
    """A legal group with its kernel class and predicted time."""

    view: GroupView
    kernel: KernelClass
    fit: Fit
    estimate: Estimate
    bytes: float

    @property
    def time_us(self) -> float:
        return self.estimate.time_us


@dataclass
class Evaluator:
    """Legality and cost of groups, remembered by content."""

    graph: FusionGraph
    hw: HardwareProfile
    policy: Policy
    forbidden: frozenset[tuple[str, ...]] = frozenset()
    _seen: dict = field(default_factory=dict)

    def group(
        self, ops: tuple[int, ...], outputs: tuple[int, ...], duplicated: int = 0
    ) -> Costed | Refusal:
        key = (ops, outputs, duplicated)
        if key not in self._seen:
            self._seen[key] = self._evaluate(GroupView(self.graph, ops, outputs, duplicated))
        return self._seen[key]

    def alone(self, op: int) -> Costed | Refusal:
        """One operator as its own kernel."""
        return self.group((op,), self.graph.ops[op].outputs)

    def _evaluate(self, view: GroupView) -> Costed | Refusal:
        if refusal := self._refuse(view):
            return refusal
        refusals = []
        classes = kernel_classes(self.hw)
        for kernel in classes if view.blocks else classes[-1:]:  # what cannot be read falls back
            fit = kernel.accepts(view, self.hw, self.policy)
            if isinstance(fit, Fit):
                traffic = kernel.traffic(view, fit, self.hw)
                resources = kernel.resources(view, fit, self.hw)
                cost = estimate(traffic, resources, self.hw, self.policy.launch)
                return Costed(view, kernel, fit, cost, traffic.l2_bytes)
            refusals.append(fit)
        return most_telling(refusals)

    def _refuse(self, view: GroupView) -> Refusal | None:
        graph = self.graph
        if len(view.ops) > 1:
            for i in view.ops:
                op = graph.ops[i]
                if op.kind is OpKind.OPAQUE:
                    return view.refuse(
                        RefusalCode.OPAQUE, f"{op.name} cannot be read: {op.why_opaque}"
                    )
            if len({graph.ops[i].region for i in view.ops}) > 1:
                return view.refuse(
                    RefusalCode.REGION, "the operators stand in different dataflow blocks"
                )
            if view.names in self.forbidden:
                return view.refuse(RefusalCode.WRITER, "this group was tried and could not be used")
        working = sum(_works(graph.ops[i]) for i in view.ops)
        if working > self.policy.max_group_ops:
            return view.refuse(
                RefusalCode.GROUP_SIZE,
                "the group computes more operators than the policy allows",
                ops=working,
                allowed=self.policy.max_group_ops,
            )
        return self._refuse_parameters(view)

    def _refuse_parameters(self, view: GroupView) -> Refusal | None:
        parameters = 8 * (len(view.inputs) + len(view.outputs))
        if len(view.ops) > 1 and parameters > self.hw.kernel_param_bytes:
            return view.refuse(
                RefusalCode.PARAMETER_BYTES,
                "the kernel's parameters do not fit",
                bytes=parameters,
                allowed=self.hw.kernel_param_bytes,
            )
        return None


def _works(op: Op) -> bool:
    """Whether an operator computes: conversions, and what only moves data, do not."""
    return not op.blocks or any(b.counts or b.reduction is not None for b in op.blocks)


_TELLING = (
    RefusalCode.RECOMPUTE,
    RefusalCode.OFF_ROW,
    RefusalCode.NOT_TRAILING,
    RefusalCode.EPILOGUE,
    RefusalCode.PROLOGUE,
    RefusalCode.SEVERAL_CONTRACTIONS,
    RefusalCode.SPACE_MISMATCH,
)


def most_telling(refusals: list[Refusal]) -> Refusal:
    """Of the refusals of all kernel classes, the one that came closest to accepting."""
    order = {code: i for i, code in enumerate(_TELLING)}
    return min(refusals, key=lambda r: order.get(r.code, len(order)))
