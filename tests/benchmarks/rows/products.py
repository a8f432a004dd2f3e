"""The matrix products of a workload alone: torch's library (cuBLAS) on the same operands."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tvm_fusion.errors import Unsupported

from ..workloads.instance import Instance

_ATEN = torch.ops.aten
_PRODUCTS = {
    _ATEN.mm.default: torch.mm,
    _ATEN.bmm.default: torch.bmm,
    _ATEN.mv.default: torch.mv,
    _ATEN._scaled_mm.default: torch._scaled_mm,
}
_WITH_ADDEND = {  # the first operand
    _ATEN.addmm.default: torch.mm,
    _ATEN.baddbmm.default: torch.bmm,
    _ATEN.addmv.default: torch.mv,
}

Step = tuple[Callable[..., torch.Tensor], tuple[Any, ...], dict[str, Any]]


class _Recorder(TorchDispatchMode):
    """Keeps the operands of the products that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in _PRODUCTS:
            self.steps.append((_PRODUCTS[function], args, kwargs or {}))
        elif function in _WITH_ADDEND:
            self.steps.append((_WITH_ADDEND[function], args[1:], {}))
        return function(*args, **(kwargs or {}))


def products(instance: Instance) -> list[Step]:
    """Return the matrix products that torch runs for a workload, with their operands."""
    with torch.no_grad(), _Recorder() as recorder:
        instance.for_torch(*instance.inputs)
    return recorder.steps


def products_alone(instance: Instance) -> Callable[[], Any]:
    """Return a call that runs the products of a workload one after the other, and nothing else.

    Raises
    ------
    Unsupported
        If there is none.
    """
    steps = products(instance)
    if not steps:
        raise Unsupported(f"{instance.name} has no matrix product")

    def call() -> list[torch.Tensor]:
        return [function(*args, **options) for function, args, options in steps]

    return call
