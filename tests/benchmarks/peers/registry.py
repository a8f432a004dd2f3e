"""Other compilers on the same workload: each peer is a function from an instance to a call."""

import difflib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import tvm

from tvm_fusion.bench.deployed import onnx_bytes, onnxruntime_call, openvino_call, require_cpu
from tvm_fusion.bench.peers import DEPLOYED, EAGER, default_build
from tvm_fusion.errors import InputError, Unsupported
from tvm_fusion.frontends import load
from tvm_fusion.runtime.calls.signature import entry_of
from tvm_fusion.runtime.calls.tensors import to_tvm

from ..workloads.instance import Instance, Product
from .attention import own_peer
from .names import ALL_OF_TORCH, MATMUL, OWN_PEERS

Call = Callable[[], Any]
Peer = Callable[[Instance, tvm.target.Target], Call]


def eager(instance: Instance, _target: tvm.target.Target) -> Call:
    """torch, one kernel at a time."""
    return lambda: instance.for_torch(*instance.inputs)


def inductor(instance: Instance, _target: tvm.target.Target) -> Call:
    """torch.compile with its defaults."""
    return _compiled_by_torch(instance)


def inductor_tuned(instance: Instance, _target: tvm.target.Target) -> Call:
    """torch.compile with all its tuning, and without CUDA graphs, which no other peer has."""
    return _compiled_by_torch(instance, mode="max-autotune-no-cudagraphs")


def matmul(instance: Instance, _target: tvm.target.Target) -> Call:
    """torch.matmul of a matrix product alone, its weights transposed in memory beforehand."""
    module, inputs = instance.module, instance.inputs
    if not isinstance(module, Product):
        raise Unsupported(f"{instance.name} is no matrix product alone")
    weight = module.weight.t().contiguous()
    return lambda: torch.matmul(*inputs, weight)


def xla(instance: Instance, _target: tvm.target.Target) -> Call:
    """JAX, jitted; parameters are arguments."""
    jax, function, inputs = _jitted(instance)
    return lambda: jax.block_until_ready(function(*inputs))


def xla_unawaited(instance: Instance, _target: tvm.target.Target) -> Call:
    """As `xla`; a call returns before its kernels end, as those of the other peers do."""
    _, function, inputs = _jitted(instance)
    return lambda: function(*inputs)


def tvm_default(instance: Instance, target: tvm.target.Target) -> Call:
    """TVM's default pipeline for the target, on the module that our frontend makes."""
    executable = default_build(load((instance.module, instance.inputs)), target)
    device = tvm.runtime.device_from_target(target)
    main = entry_of(executable, device)
    inputs = [to_tvm(x, device, "input") for x in instance.inputs]
    return lambda: main(*inputs)


def onnxruntime(instance: Instance, target: tvm.target.Target) -> Call:
    """ONNX Runtime with all of its rewrites, its results in memory of its own."""
    require_cpu(target)
    return onnxruntime_call(onnx_bytes(instance.for_torch, instance.inputs), instance.inputs)


def openvino(instance: Instance, target: tvm.target.Target) -> Call:
    """OpenVINO's CPU device."""
    require_cpu(target)
    return openvino_call(onnx_bytes(instance.for_torch, instance.inputs), instance.inputs)


PEERS: dict[str, Peer] = {
    EAGER: eager,
    ALL_OF_TORCH[1]: inductor,
    ALL_OF_TORCH[2]: inductor_tuned,
    MATMUL: matmul,
    "jax": xla,
    "tvm": tvm_default,
    **dict(zip(DEPLOYED, (onnxruntime, openvino), strict=True)),
}


def peer(name: str) -> Peer:
    """Return a peer by name; raises InputError for an unknown one."""
    if name in OWN_PEERS:
        return lambda instance, _target: own_peer(name, instance)
    if name not in PEERS:
        known = (*PEERS, *OWN_PEERS)
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
        raise InputError(f"unknown peer {name!r}; {hint}")
    return PEERS[name]


def outputs_of(value: Any) -> list[torch.Tensor]:
    """Return what a call gave as torch tensors, tuples flattened."""
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    if hasattr(value, "__dlpack__"):
        return [_from_dlpack(value)]
    return [tensor for item in value for tensor in outputs_of(item)]


def _from_dlpack(value: Any) -> torch.Tensor:
    """Return another library's tensor as torch's, in the same memory where torch can take it."""
    try:
        return torch.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError):
        dtype = str(value.dtype)
        if not dtype.startswith("float8"):
            raise
    if isinstance(value, tvm.runtime.Tensor):
        bits = value._create_view(value.shape, "uint8")
    else:
        import jax

        bits = jax.lax.bitcast_convert_type(value, "uint8")
    return torch.from_dlpack(bits).view(getattr(torch, dtype))


def _compiled_by_torch(instance: Instance, **options: Any) -> Call:
    compiled = torch.compile(instance.for_torch, **options)
    return lambda: compiled(*instance.inputs)


def _jitted(instance: Instance) -> tuple[Any, Callable[..., Any], Sequence[Any]]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory to the others
    import jax

    from .jax.exported import function_of
    from .jax.functions import FUNCTIONS
    from .jax.layers import arguments

    if instance.name in FUNCTIONS:
        return jax, jax.jit(FUNCTIONS[instance.name]), arguments(instance)
    function, inputs = function_of(instance)
    return jax, jax.jit(function), inputs
