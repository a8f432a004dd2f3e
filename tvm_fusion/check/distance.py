"""How far an output is from what a framework gives, and how far roundings make it."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

# Of what rounds differently in another order of operations; another function is further off.
ROUNDINGS = {"float64": 1e-7, "float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}
ROUNDINGS |= {"complex128": 1e-7, "complex64": 1e-3, "complex32": 5e-2}


def rounding(dtype: object) -> float:
    """The `distance` that roundings make at most, by dtype."""
    return ROUNDINGS.get(str(dtype).removeprefix("torch."), 0.0)


def distance(given: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference relative to the largest number; infinite where one alone is no number,
    or where shapes differ. Of numbers without fractions the share that differs.

    Parameters
    ----------
    given, expected : numpy.ndarray
        Floats of fewer than 64 bits as such of 64.
    """
    if given.shape != expected.shape:
        return math.inf
    if not expected.size:
        return 0.0
    if expected.dtype.kind != "f":
        return float(np.mean(given != expected))
    finite = np.isfinite(expected)
    same = (given == expected) | finite | (np.isnan(given) & np.isnan(expected))
    if not same.all():
        return math.inf
    scale = float(np.abs(expected[finite]).max(initial=0.0)) or 1.0
    off = np.abs(given[finite] - expected[finite])
    return float(np.nan_to_num(off, nan=math.inf).max(initial=0.0)) / scale


def error_of(given: Any, expected: Any) -> float:
    """The `distance` of two tensors of PyTorch; infinite where their dtypes differ."""
    if given.dtype != expected.dtype:
        return math.inf
    return distance(_array(given), _array(expected))


def real_numbers(x: Any) -> Any:
    """A complex tensor of PyTorch as pairs of real numbers; others as they are."""
    if not x.is_complex():
        return x
    return sys.modules["torch"].view_as_real(x.resolve_conj())


def _array(x: Any) -> np.ndarray:
    x = real_numbers(x.detach()).cpu()
    return (x.double() if x.is_floating_point() else x).numpy()
