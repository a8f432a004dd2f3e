"""Micro-benchmarks on the CPU: modules that our writer makes, and loops of our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ...config import HardwareProfile, load_policy
from ...flow.planned import Planned
from ...host.threads import kernel_threads
from ...runtime.calls.compiled_module import CompiledModule
from ...runtime.timing.timing import wall_times

Emit = Callable[[relax.BlockBuilder, Sequence[relax.Var]], Any]


class CpuBench:
    """Times on this machine's cores.

    Parameters
    ----------
    hw : HardwareProfile
    budget_s : float
        For the samples of one set of calls.
    """

    def __init__(self, hw: HardwareProfile, budget_s: float) -> None:
        self.hw = hw
        self.budget_s = budget_s
        self.target = hw.to_target()
        self.cores = kernel_threads()

    def times(self, calls: Mapping[Any, Callable[[], Any]], repeats: int = 9) -> dict[Any, float]:
        """Seconds of each call, interleaved, by the clock: the lower quartile, since what else runs
        on the machine only adds.
        """
        found = wall_times(calls, repeats, self.budget_s)
        return {key: timing.low_us * 1e-6 for key, timing in found.items()}

    def written(self, emit: Emit, *inputs: np.ndarray) -> Callable[[], Any]:
        """A Relax graph as one kernel of our CPU writer, with its inputs."""
        policy = load_policy({"min_gain": 0.0, "max_group_ops": 1000})
        planned = Planned.of(graph_of(emit, inputs), self.target, self.hw, policy)
        return CompiledModule.of(planned.build().built).bind(*inputs)

    def loop(self, func: Any) -> Any:
        """A scheduled PrimFunc as a function."""
        return tvm.compile(tvm.IRModule({"main": func}), target=self.target)["main"]


def graph_of(emit: Emit, inputs: Sequence[np.ndarray]) -> tvm.IRModule:
    """A module whose `main` is what `emit` builds from variables like `inputs`."""
    bb = relax.BlockBuilder()
    params = [
        relax.Var(f"p{i}", relax.TensorType(x.shape, str(x.dtype))) for i, x in enumerate(inputs)
    ]
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(emit(bb, params))
        bb.emit_func_output(out)
    return bb.get()
