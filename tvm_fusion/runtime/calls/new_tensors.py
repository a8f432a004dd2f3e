"""Memory of torch for the outputs of a call.

`torch.empty` reads its arguments in Python, which takes as long as a small kernel: 20 tensors take
12 us, and 5 through the functions that the code of torch's inductor calls.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import starmap
from typing import Any

import tvm

from .tensors import Kind, from_tvm

Described = tuple[Sequence[int], str]  # shape, and TVM's name of the dtype


def maker(outputs: Sequence[Described], device: tvm.runtime.Device) -> Callable[[], Iterable[Any]]:
    """Return a function that makes contiguous tensors of torch without values, on a device."""
    import torch

    dtypes = [getattr(torch, dtype, None) for _, dtype in outputs]
    if None in dtypes:  # torch has it by another name, or as bits
        return lambda: tuple(_through_tvm(output, device) for output in outputs)
    index = None if device.type == "cpu" else device.index
    device_of_torch = torch.device(device.type, index)
    pairs = zip(outputs, dtypes, strict=True)
    wanted = [(tuple(shape), _strides(shape), dtype) for (shape, _), dtype in pairs]
    quick = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)

    def by_name() -> tuple[Any, ...]:
        make = partial(torch.empty_strided, device=device_of_torch)
        return tuple(make(*place, dtype=dtype) for *place, dtype in wanted)

    def on_current() -> Iterable[Any]:
        return starmap(quick, wanted) if torch._C._cuda_getDevice() == index else by_name()

    if quick is None:
        return by_name
    return partial(starmap, quick, wanted) if index is None else on_current


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _through_tvm(output: Described, device: tvm.runtime.Device) -> Any:
    return from_tvm(tvm.runtime.empty(*output, device), Kind.TORCH, None)
