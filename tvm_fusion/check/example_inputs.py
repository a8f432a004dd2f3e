"""The example inputs of a model as `main` takes them, for models that refuse random ones.

model(x, q), q between 0 and 1   ->  [x, q]; of N(0, 1) no q has places in sorted rows
model with a state that it keeps ->  its first values stand where `main` takes it
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
from tvm import relax

from ..flow.planned import Planned
from .source import Original


def example_inputs(planned: Planned, original: Original | None) -> list[Any] | None:
    """One array for each parameter of `main`; None where there are no example inputs, or none that
    fit: of models in channels_last, and of values that come later.
    """
    source = None if original is None else original.in_torch
    tensor = getattr(sys.modules.get("torch"), "Tensor", ())
    if source is None or not all(isinstance(x, tensor) for x in source.inputs):
        return None
    params, convention = planned.mod["main"].params, planned.source.convention
    state = () if convention is None else convention.parameters
    if planned.formats is not None or len(params) != len(source.inputs) + len(state):
        return None
    given, values = iter(source.inputs), []
    for number, param in enumerate(params):
        if number not in state:
            value = _array(next(given))
        elif number in convention.values:
            value = convention.values[number].numpy()
        else:
            return None
        if not _fits(value, param.ty):
            return None
        values.append(value)
    return values


def _array(x: Any) -> np.ndarray:
    """A tensor of PyTorch as an array of its own; a complex one as pairs of real numbers."""
    torch = sys.modules["torch"]
    x = x.detach().cpu().clone()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return np.ascontiguousarray(x.resolve_neg().numpy())


def _fits(value: np.ndarray, ty: Any) -> bool:
    """Whether a value is of a type, whose symbolic extents may be any."""
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return False
    extents = list(ty.shape.values)
    known = [getattr(extent, "value", None) for extent in extents]
    same = len(known) == value.ndim and str(value.dtype) == str(ty.dtype)
    return same and all(a in (None, b) for a, b in zip(known, value.shape, strict=True))
