"""torch's own attention as a peer: the library's kernels, and flex_attention.

Each peer is made by the workload, from its inputs: masks are made beforehand and not timed.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tvm_fusion.errors import Unsupported
from tvm_fusion.runtime.timing.timing import time_calls

TRIALS = 5

Function = Callable[..., Any]
Maker = Callable[..., Function]  # from the inputs of a workload

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True, slots=True)
class Flex:
    """Arguments of flex_attention.

    Attributes
    ----------
    score : Callable or None
        `score_mod(score, batch, head, query, key)`.
    mask : Callable or None
        `mask_mod(batch, head, query, key)`: whether the key is visible.
    """

    score: Function | None = None
    mask: Function | None = None


def sdpa(make: Maker) -> Maker:
    """The fastest of the library's kernels that take the work; `note` of the call names it."""

    def made(*inputs: torch.Tensor) -> Function:
        function = make(*inputs)
        takers, refusals = {}, []
        for name, backend in _BACKENDS.items():
            if name == "math" and takers:
                continue  # several kernels, for what no other takes
            call = _under(backend, function)
            try:
                call(*inputs)
            except RuntimeError as error:  # it does not take this
                refusals.append(f"{name}: {str(error).splitlines()[0]}")
                continue
            takers[name] = functools.partial(call, *inputs)
        if not takers:
            raise Unsupported(f"no kernel of torch takes it: {'; '.join(refusals)}")
        times = time_calls(takers, inputs[0].device, TRIALS)
        best = min(times, key=lambda name: times[name].median_us)
        return _under(_BACKENDS[best], function, best)

    return made


def flex(make: Callable[..., Flex]) -> Maker:
    """flex_attention, compiled and tuned, with the block mask made beforehand."""

    def made(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> Function:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        found = make(q, k, v, *rest)
        mask = found.mask and create_block_mask(
            found.mask, q.shape[0], None, q.shape[2], k.shape[2], device=str(q.device)
        )
        function = flex_attention
        if q.is_cuda:
            function = torch.compile(flex_attention, mode="max-autotune-no-cudagraphs")
        grouped = q.shape[1] != k.shape[1]
        return lambda q, k, v, *_: function(
            q, k, v, score_mod=found.score, block_mask=mask, enable_gqa=grouped
        )

    return made


def own_peer(label: str, instance: Any) -> Function:
    """The peer that a workload brings, as a call; raises Unsupported where it brings none."""
    if label not in instance.peers:
        raise Unsupported(f"{instance.name} brings no peer {label!r}")
    function = instance.peers[label](*instance.inputs)

    def call() -> Any:
        return function(*instance.inputs)

    call.note = getattr(function, "note", None)
    return call


def _under(backend: SDPBackend, function: Function, note: str | None = None) -> Function:
    """A function with this kernel and no other."""

    def call(*inputs: torch.Tensor) -> Any:
        with sdpa_kernel(backend):
            return function(*inputs)

    call.note = note
    return call
