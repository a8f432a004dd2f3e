"""Other compilers on a Relax module: each peer is a function of module, target and inputs to a
call.

torch, and what it exports to, gets the module as a function on torch tensors (see `twin`).
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ..errors import InputError
from ..runtime.build import cubin_cache
from .twin import jax_library, torch_library, twin

Call = Callable[[], Any]
EAGER, COMPILED = "torch", "torch.compile"
DEPLOYED = ("onnxruntime", "openvino")
DEFAULT_PEERS = ("tvm", EAGER, COMPILED)


def default_build(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.runtime.Executable:
    """Build a module as TVM does without us: its fusion, and DLight's schedules on a GPU."""
    cubin_cache.install()  # the same compiler and flags as ours
    with target:
        return tvm.compile(mod, target, relax_pipeline=relax.get_default_pipeline(target))


def _tvm(mod: tvm.IRModule, target: tvm.target.Target, inputs: Sequence[Any]) -> Call:
    executable = default_build(mod, target)
    device = tvm.runtime.device_from_target(target)
    main = relax.VirtualMachine(executable, device)["main"]
    arguments = [tvm.runtime.tensor(x, device) for x in inputs]
    return lambda: main(*arguments)


def _torch(mod: tvm.IRModule, target: tvm.target.Target, inputs: Sequence[Any]) -> Call:
    import torch

    module, tensors = torch_module(mod, target, inputs)

    def call() -> Any:
        with torch.no_grad():
            return module(*tensors)

    return call


def _torch_compile(mod: tvm.IRModule, target: tvm.target.Target, inputs: Sequence[Any]) -> Call:
    import torch

    return torch.compile(_torch(mod, target, inputs))


def _jax(mod: tvm.IRModule, _target: tvm.target.Target, inputs: Sequence[Any]) -> Call:
    import jax
    import jax.numpy as jnp

    function, constants = twin(mod, jax_library())
    compiled = jax.jit(function)
    arrays = [jnp.asarray(x) for x in inputs]
    return lambda: jax.block_until_ready(compiled(constants, *arrays))


def _onnxruntime(mod: tvm.IRModule, target: tvm.target.Target, inputs: Sequence[Any]) -> Call:
    from .deployed import onnx_bytes, onnxruntime_call, require_cpu

    require_cpu(target)
    module, tensors = torch_module(mod, target, inputs)
    return onnxruntime_call(onnx_bytes(module, tensors), tensors)


def _openvino(mod: tvm.IRModule, target: tvm.target.Target, inputs: Sequence[Any]) -> Call:
    from .deployed import onnx_bytes, openvino_call, require_cpu

    require_cpu(target)
    module, tensors = torch_module(mod, target, inputs)
    return openvino_call(onnx_bytes(module, tensors), tensors)


PEERS: dict[str, Callable[[tvm.IRModule, tvm.target.Target, Sequence[Any]], Call]] = {
    "tvm": _tvm,
    EAGER: _torch,
    COMPILED: _torch_compile,
    "jax": _jax,
    **dict(zip(DEPLOYED, (_onnxruntime, _openvino), strict=True)),
}
WORDS = {name: (name,) for name in PEERS} | {EAGER: (EAGER, COMPILED), "torch.eager": (EAGER,)}


def peers_of(text: str | None) -> tuple[str, ...]:
    """Return the peers that a list of words names, `DEFAULT_PEERS` by default; "torch" is torch and
    its compiler.

    Raises
    ------
    InputError
        For an unknown one.
    """
    return DEFAULT_PEERS if text is None else named(text, WORDS)


def named(text: str, words: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return what words by commas stand for, each once; "none" stands for nothing.

    Raises
    ------
    InputError
        For a word that is not in `words`.
    """
    found: dict[str, None] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        if word == "none":
            continue
        if word not in words:
            close = difflib.get_close_matches(word, words, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(words)}, none"
            raise InputError(f"unknown peer {word!r}; {hint}")
        found |= dict.fromkeys(words[word])
    return tuple(found)


def torch_module(mod: tvm.IRModule, target: tvm.target.Target, inputs: Sequence[Any]) -> Any:
    """Return the model as a torch module with its constants as buffers, and its inputs."""
    import torch

    device = "cuda" if target.kind.name == "cuda" else "cpu"
    function, constants = twin(mod, torch_library(device))

    class Twin(torch.nn.Module):
        """The twin of a Relax function."""

        def __init__(self) -> None:
            super().__init__()
            for number, value in constants.items():
                self.register_buffer(f"constant{number}", value)

        def forward(self, *given: torch.Tensor) -> Any:
            """Compute it."""
            values = {number: getattr(self, f"constant{number}") for number in constants}
            return function(values, *given)

    tensors = [torch.from_numpy(np.asarray(x)).to(device) for x in inputs]
    return Twin().eval(), tensors
