"""Time one model fused, unfused, and by other compilers: what `tvm_fusion bench` does."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ..check.inputs import random_inputs
from ..errors import TargetError
from ..report.model import Comparison, Report
from ..runtime import cubin_cache
from ..runtime.entry import entry_of
from ..runtime.module import CompiledModule
from ..runtime.timing import time_calls
from .twin import jax_library, torch_library, twin

_log = logging.getLogger(__name__)


def bench(
    model: Any,
    *,
    target: Any = None,
    policy: Any = None,
    plan: Any = None,
    cuda_graph: bool | None = False,
) -> Report:
    """Compile a model, and time it beside the unfused module and other compilers, interleaved.

    Peers are TVM's default pipeline, and torch, torch.compile and JAX where they are installed and
    know the model's operators. A peer that fails has the time None.

    Parameters
    ----------
    model, target, policy, plan, cuda_graph
        See `tvm_fusion.compile`; peers and the unfused module have no graph.

    Raises
    ------
    TargetError
        If this machine lacks the device, or for `cuda_graph` on a CPU.
    """
    from ..compiler import Job, graph_policy

    if cuda_graph:
        policy = graph_policy(target, policy)
    job = Job.of(model, target, policy, plan, None, None)
    if not tvm.runtime.device_from_target(job.target).exist:
        raise TargetError(f"this machine has no {job.target.kind.name} device to measure on")
    fused = job.compile(job.policy.verify, False, False, cuda_graph=cuda_graph)
    unfused = CompiledModule.of(job.build_unfused())
    inputs = random_inputs(job.mod["main"])
    calls = {"fused": fused.bind(*inputs), "unfused": unfused.bind(*inputs)}
    failed = {}
    for name, make in PEERS.items():
        try:
            call = make(job.mod, job.target, inputs)
            call()
            calls[name] = call
        except Exception as error:  # a trial
            _log.warning("%s: %s", name, str(error).strip().partition("\n")[0])
            failed[name] = None
    times = {name: t.median_us for name, t in time_calls(calls, fused.device).items()}
    return dataclasses.replace(
        fused.report,
        time_us=Comparison(times.pop("fused"), times.pop("unfused")),
        peers_us=times | failed,
    )


def default_build(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.runtime.Executable:
    """Build a module as TVM does without us: its fusion, and DLight's schedules on a GPU."""
    cubin_cache.install()  # the same compiler and flags as ours
    with target:
        return tvm.compile(mod, target, relax_pipeline=relax.get_default_pipeline(target))


def _tvm(mod: tvm.IRModule, target: tvm.target.Target, inputs: list[Any]) -> Callable[[], Any]:
    executable = default_build(mod, target)
    device = tvm.runtime.device_from_target(target)
    main = entry_of(executable, device)
    arguments = [tvm.runtime.tensor(x, device) for x in inputs]
    return lambda: main(*arguments)


def _torch(mod: tvm.IRModule, target: tvm.target.Target, inputs: list[Any]) -> Callable[[], Any]:
    import torch

    device = "cuda" if target.kind.name == "cuda" else "cpu"
    function, constants = twin(mod, torch_library(device))
    tensors = [torch.from_numpy(np.asarray(x)).to(device) for x in inputs]

    def call() -> Any:
        with torch.no_grad():
            return function(constants, *tensors)

    return call


def _torch_compile(
    mod: tvm.IRModule, target: tvm.target.Target, inputs: list[Any]
) -> Callable[[], Any]:
    import torch

    return torch.compile(_torch(mod, target, inputs))


def _jax(mod: tvm.IRModule, _target: tvm.target.Target, inputs: list[Any]) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    function, constants = twin(mod, jax_library())
    compiled = jax.jit(function)
    arrays = [jnp.asarray(x) for x in inputs]
    return lambda: jax.block_until_ready(compiled(constants, *arrays))


PEERS = {"tvm": _tvm, "torch": _torch, "torch.compile": _torch_compile, "jax": _jax}
