"""Small Relax modules for tests, and the stages of the compiler up to the plan."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import tvm
from tvm import relax

from tvm_fusion.config import HardwareProfile, load_policy, load_profile
from tvm_fusion.ir.graph import FusionGraph, build_graph
from tvm_fusion.kernels.base import Family
from tvm_fusion.plan.plan import FusionPlan
from tvm_fusion.plan.refusal import RefusalCode
from tvm_fusion.plan.search.search import search
from tvm_fusion.transform.pipeline import lower


def module(emit: Callable, *inputs: tuple) -> tvm.IRModule:
    """`main` of the inputs ((shape, dtype) each) that computes `emit(block_builder, *vars)`, one
    Expr or a tuple of them.
    """
    bb = relax.BlockBuilder()
    params = [relax.Var(f"x{i}", relax.TensorType(s, d)) for i, (s, d) in enumerate(inputs)]
    with bb.function("main", params):
        with bb.dataflow():
            result = emit(bb, *params)
            if isinstance(result, tuple | list):
                result = relax.Tuple(
                    [bb.emit(r) if isinstance(r, relax.Call) else r for r in result]
                )
            out = bb.emit_output(result)
        bb.emit_func_output(out)
    return bb.get()


class Refuses(Family):
    """A kernel family of a user that takes nothing."""

    name = "refuses"

    def accepts(self, group, hw, policy):
        return group.refuse(RefusalCode.RECOMPUTE, "nothing is computed twice")

    def traffic(self, group, fit, hw):
        raise NotImplementedError

    resources = writer = traffic


@dataclass(frozen=True)
class Planned:
    low: tvm.IRModule
    graph: FusionGraph
    plan: FusionPlan
    hw: HardwareProfile

    @property
    def launches(self) -> int:
        return sum(g.kernel_class not in ("view", "opaque") for g in self.plan.groups)

    @property
    def codes(self) -> set[str]:
        return {r.code.value for r in self.plan.refusals}


def plan_of(mod: tvm.IRModule, device: str = "h200", policy=None, **hardware) -> Planned:
    """The plan of a module; `hardware` replaces numbers of the device's profile."""
    hw = dataclasses.replace(load_profile(device), **hardware)
    low = lower(mod, hw.to_target(), hw=hw)
    graph = build_graph(low)
    return Planned(low, graph, search(graph, hw, load_policy(policy)), hw)
