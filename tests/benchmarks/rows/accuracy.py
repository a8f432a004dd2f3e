"""Errors of outputs against float64, the reference that torch computes from the same inputs."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..peers.registry import outputs_of
from ..workloads.instance import Instance

CEILINGS = {
    "float64": 1e-4,
    "float32": 1e-4,
    "float16": 1e-2,
    "bfloat16": 2e-2,
    "float8_e4m3fn": 1e-2,  # of the inputs, whose products are exact and end in float16
}


def reference(instance: Instance) -> tuple[list[torch.Tensor], int]:
    """Return the float64 outputs, and the floating-point operations of all matrix products.

    Outputs that are whole numbers or 8-bit floats in the workload keep their type.
    """
    from torch.utils.flop_counter import FlopCounterMode

    module = copy.deepcopy(instance.module).double()
    inputs = [x.double() if x.is_floating_point() else x for x in instance.inputs]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        outputs = outputs_of(module(*inputs))
    return outputs, counter.get_total_flops()


def output_shapes(instance: Instance) -> list[torch.Tensor]:
    """Return the outputs in shape and type, without values."""
    module = copy.deepcopy(instance.module).to("meta")
    with torch.no_grad():
        return outputs_of(module(*(x.to("meta") for x in instance.inputs)))


def relative_error(given: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return the worst error over all outputs.

    That of a float is max |given - wanted| / max |wanted|, and NaN counts as inf. That of int8 and
    8-bit floats is the fraction of elements that differ, and 1 if any differs by more than one
    step. Other whole numbers have to be equal; the error is 1 if they are not.
    """
    if [tuple(g.shape) for g in given] != [tuple(w.shape) for w in wanted]:
        return math.inf
    return max((_error(g.to(w.device), w) for g, w in zip(given, wanted, strict=True)), default=0.0)


def checked_error(
    call: Callable[[], Any], inputs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
) -> float:
    """Return the error of a call that finds NaN where its outputs will be.

    The outputs of a first call are filled with NaN (whole numbers with -1) and freed; allocators
    hand the same memory to the second, so that what a kernel forgets to write shows.
    """
    _poison(outputs_of(call()), {x.data_ptr() for x in inputs})
    return relative_error(outputs_of(call()), wanted)


def _error(given: torch.Tensor, wanted: torch.Tensor) -> float:
    if wanted.numel() == 0:
        return 0.0
    if wanted.itemsize == 1 and wanted.dtype != torch.bool:
        return _error_of_steps(given, wanted)
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(given.to(wanted.dtype), wanted) else 1.0
    wanted = wanted.double()
    difference = (given.double() - wanted).abs().max()
    error = float(difference / wanted.abs().max().clamp_min(torch.finfo(torch.float64).tiny))
    return error if math.isfinite(error) else math.inf


def _error_of_steps(given: torch.Tensor, wanted: torch.Tensor) -> float:
    if given.dtype != wanted.dtype or not torch.equal(_is_nan(given), _is_nan(wanted)):
        return math.inf
    steps = (_step(given) - _step(wanted)).abs()
    return 1.0 if int(steps.max()) > 1 else float((steps > 0).double().mean())


def _is_nan(x: torch.Tensor) -> torch.Tensor:
    return x.float().isnan()  # 8-bit floats are not compared on every device


def _step(x: torch.Tensor) -> torch.Tensor:
    """Numbers such that neighbouring values differ by one."""
    if not x.is_floating_point():
        return x.to(torch.int16)
    bits = x.contiguous().view(torch.uint8).to(torch.int16)  # a sign, and a magnitude that ascends
    return torch.where(bits >= 0x80, 0x80 - bits, bits)


def _poison(outputs: Sequence[torch.Tensor], lent: set[int]) -> None:
    for tensor in outputs:
        if tensor.data_ptr() in lent or tensor.dtype == torch.bool:
            continue
        if not tensor.is_floating_point():
            tensor.fill_(-1)
        elif tensor.itemsize == 1:
            tensor.view(torch.uint8).fill_(0xFF)
        else:
            tensor.fill_(math.nan)
