"""Tensors of a model, and the views of them that a function with channels last takes and gives.

x: [N, C, H, W] in channels_last    ->  x.permute(0, 2, 3, 1), contiguous: the same memory
y: [N, H, W, C] of the function     ->  y.permute(0, 3, 1, 2), in channels_last
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from ...errors import InputError
from ...transform.layouts.memory_formats import MemoryFormats, channels_first
from ...transform.layouts.orders import channels_last
from .signature import InputSpec, Signature
from .tensors import is_torch_tensor


def taken(signature: Signature, inputs: Sequence[Any]) -> Sequence[Any]:
    """Views of a caller's inputs as the function takes them; what is not of the rank that it should
    be stays as it is.

    Raises
    ------
    InputError
        If one is a TVM tensor, where some tensor has channels last: TVM's have no strides.
    """
    formats = signature.formats
    if formats is None:
        return inputs
    signature.check_count(len(inputs))
    pairs = zip(inputs, signature.inputs, formats.inputs, strict=True)
    return [_taken(value, spec, last) for value, spec, last in pairs]


def returned(formats: MemoryFormats | None, result: Any) -> Any:
    """What a function gave, as the model returns it: torch and TVM tensors are views, NumPy arrays
    contiguous.
    """
    if formats is None or not any(formats.outputs):
        return result
    if isinstance(result, tvm_ffi.Array | list | tuple):
        return tuple(map(_returned, result, formats.outputs))
    return _returned(result, formats.outputs[0])


def _taken(value: Any, spec: InputSpec, last: bool) -> Any:
    if isinstance(value, tvm.runtime.Tensor):
        raise InputError(
            f"input {spec.name} is a TVM tensor, but the model was compiled for torch tensors in "
            "channels_last: pass torch tensors or NumPy arrays"
        )
    return _permuted(value, channels_last(value.ndim)) if last and _has_rank(value, spec) else value


def _has_rank(value: Any, spec: InputSpec) -> bool:
    is_tensor = isinstance(value, np.ndarray) or is_torch_tensor(value)
    return is_tensor and value.ndim == len(spec.shape)


def _returned(value: Any, last: bool) -> Any:
    if not last:
        return value
    axes = channels_first(len(value.shape))
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value.transpose(axes))
    if is_torch_tensor(value):
        return value.permute(axes)
    import torch  # TVM makes no views with strides

    return tvm_ffi.from_dlpack(torch.from_dlpack(value).permute(axes))


def _permuted(value: Any, axes: Sequence[int]) -> Any:
    return value.transpose(axes) if isinstance(value, np.ndarray) else value.permute(axes)
