"""Errors of outputs against float64, the reference that torch computes from the same inputs."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .peers import outputs_of
from .workloads import Instance

CEILINGS = {"float64": 1e-4, "float32": 1e-4, "float16": 1e-2, "bfloat16": 2e-2}


def reference(instance: Instance) -> tuple[list[torch.Tensor], int]:
    """Return the float64 outputs, and the floating-point operations of all matrix products."""
    from torch.utils.flop_counter import FlopCounterMode

    module = copy.deepcopy(instance.module).double()
    inputs = [x.double() if x.is_floating_point() else x for x in instance.inputs]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        outputs = outputs_of(module(*inputs))
    return outputs, counter.get_total_flops()


def relative_error(given: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return max |given - wanted| / max |wanted|, the worst over all outputs; NaN counts as inf."""
    if [tuple(g.shape) for g in given] != [tuple(w.shape) for w in wanted]:
        return math.inf
    worst = 0.0
    for g, w in zip(given, wanted, strict=True):
        difference = (g.to(w.device, torch.float64) - w).abs().max()
        error = float(difference / w.abs().max().clamp_min(torch.finfo(torch.float64).tiny))
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def checked_error(
    call: Callable[[], Any], inputs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
) -> float:
    """Return the error of a call that finds NaN where its outputs will be.

    The outputs of a first call are filled with NaN and freed; allocators hand the same memory to
    the second, so that what a kernel forgets to write shows.
    """
    _poison(outputs_of(call()), {x.data_ptr() for x in inputs})
    return relative_error(outputs_of(call()), wanted)


def _poison(outputs: Sequence[torch.Tensor], lent: set[int]) -> None:
    for tensor in outputs:
        if tensor.is_floating_point() and tensor.data_ptr() not in lent:
            tensor.fill_(math.nan)
