"""Other compilers on the same workload: each peer is a function from an instance to a call."""

import os
from collections.abc import Callable
from typing import Any

import torch
import tvm
from tvm import relax

from ..errors import InputError
from ..frontends import load
from ..runtime.tensors import to_tvm
from .compare import default_build
from .workloads import Instance

Call = Callable[[], Any]
Peer = Callable[[Instance, tvm.target.Target], Call]


def eager(instance: Instance, _target: tvm.target.Target) -> Call:
    """torch, one kernel at a time."""
    return lambda: instance.module(*instance.inputs)


def inductor(instance: Instance, _target: tvm.target.Target) -> Call:
    """torch.compile with its defaults."""
    return _compiled_by_torch(instance)


def inductor_tuned(instance: Instance, _target: tvm.target.Target) -> Call:
    """torch.compile with all its tuning, and without CUDA graphs, which no other peer has."""
    return _compiled_by_torch(instance, mode="max-autotune-no-cudagraphs")


def xla(instance: Instance, _target: tvm.target.Target) -> Call:
    """JAX, jitted; parameters are arguments."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory to the others
    import jax

    from .jax_functions import FUNCTIONS, arguments

    function, inputs = jax.jit(FUNCTIONS[instance.name]), arguments(instance)
    return lambda: jax.block_until_ready(function(*inputs))


def tvm_default(instance: Instance, target: tvm.target.Target) -> Call:
    """TVM's default pipeline for the target, on the module that our frontend makes."""
    executable = default_build(load((instance.module, instance.inputs)), target)
    device = tvm.runtime.device_from_target(target)
    main = relax.VirtualMachine(executable, device)["main"]
    inputs = [to_tvm(x, device, "input") for x in instance.inputs]
    return lambda: main(*inputs)


PEERS: dict[str, Peer] = {
    "torch": eager,
    "torch.compile": inductor,
    "torch.max-autotune": inductor_tuned,
    "jax": xla,
    "tvm": tvm_default,
}


def peer(name: str) -> Peer:
    """Return a peer by name; raises InputError for an unknown one."""
    if name not in PEERS:
        raise InputError(f"unknown peer {name!r}; there are {', '.join(PEERS)}")
    return PEERS[name]


def outputs_of(value: Any) -> list[torch.Tensor]:
    """Return what a call gave as torch tensors, tuples flattened."""
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    if hasattr(value, "__dlpack__"):
        return [torch.from_dlpack(value)]
    return [tensor for item in value for tensor in outputs_of(item)]


def _compiled_by_torch(instance: Instance, **options: Any) -> Call:
    compiled = torch.compile(instance.module, **options)
    return lambda: compiled(*instance.inputs)
