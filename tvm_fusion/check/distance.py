"""How far an output is from what a framework gives, and how far roundings make it."""

from __future__ import annotations

import math
import sys
from typing import Any

from .rules import name_of, namespace, pieces, wide

# Of what rounds differently in another order of operations; another function is further off.
ROUNDINGS = {"float64": 1e-7, "float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}
ROUNDINGS |= {"complex128": 1e-7, "complex64": 1e-3, "complex32": 5e-2}


def rounding(dtype: object) -> float:
    """The `distance` that roundings make at most, by dtype."""
    return ROUNDINGS.get(str(dtype).removeprefix("torch."), 0.0)


def distance(given: Any, expected: Any) -> float:
    """The largest difference relative to the largest number; infinite where one alone is no number,
    or where shapes differ. Of numbers without fractions the share that differs.

    Parameters
    ----------
    given, expected : numpy.ndarray or torch.Tensor
        Both of one kind; floats are compared in float64.
    """
    if given.shape != expected.shape:
        return math.inf
    if not len(expected.reshape(-1)):
        return 0.0
    if "float" not in name_of(expected.dtype):
        return int((given != expected).sum()) / len(expected.reshape(-1))
    given, expected = given.reshape(-1), expected.reshape(-1)
    found = [_distance(given[own], expected[own]) for own in pieces(len(expected))]
    off, scale = (max(each) for each in zip(*found, strict=True))
    return off / (scale or 1.0)


def _distance(given: Any, expected: Any) -> tuple[float, float]:
    """The largest difference, infinite where one alone is no number, and the largest number."""
    given, expected = wide(given), wide(expected)
    xp = namespace(expected)
    finite = xp.isfinite(expected)
    same = (given == expected) | finite | (xp.isnan(given) & xp.isnan(expected))
    if not bool(same.all()):
        return math.inf, 0.0
    zero = xp.zeros_like(expected)
    given, expected = xp.where(finite, given, zero), xp.where(finite, expected, zero)
    off = float(xp.abs(given - expected).max())
    return (math.inf if math.isnan(off) else off), float(xp.abs(expected).max())


def error_of(given: Any, expected: Any) -> float:
    """The `distance` of two tensors of PyTorch, where the second one lies; infinite where their
    dtypes differ.
    """
    if given.dtype != expected.dtype:
        return math.inf
    given, expected = real_numbers(given.detach()), real_numbers(expected.detach())
    return distance(given.to(expected.device), expected)


def real_numbers(x: Any) -> Any:
    """A complex tensor of PyTorch as pairs of real numbers; others as they are."""
    if not x.is_complex():
        return x
    return sys.modules["torch"].view_as_real(x.resolve_conj())
