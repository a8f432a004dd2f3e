"""Numbers of constants at compile time: vectors, and weights with a factor in them."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import tvm
from tvm.relax import Expr

from ...ir.weights import numbers
from .factors import Factor, Lookup, is_call, is_constant

CHUNK_ELEMENTS = 1 << 20  # of a weight, widened at a time

_ARITHMETIC = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
}


def identity(constant: Expr) -> tuple:
    """What the constants share that are the same memory in the same shape and type."""
    value = constant.value
    return (int(value.data_ptr()), str(value.dtype), *map(int, value.shape))


def vector_of(expr: Expr, lookup: Lookup) -> np.ndarray | None:
    """The numbers, in memory order, of a small tensor made of constants alone; in float32 if they
    are floats. None for every other tensor.
    """
    array = _evaluate(expr, lookup)
    return None if array is None else array.reshape(-1)


def _evaluate(expr: Expr, lookup: Lookup) -> np.ndarray | None:
    if is_constant(expr):
        shape = [int(extent) for extent in expr.value.shape]
        if math.prod(shape) > max(shape, default=1):
            return None
        array = numbers(expr)
        return array if array.dtype.kind in "iu" else array.astype(np.float32)
    value = lookup(expr)
    if is_call(value, "astype", "reshape"):
        array = _evaluate(value.args[0], lookup)
        if array is None or is_call(value, "astype"):
            floats = array is not None and str(value.ty.dtype).startswith(("float", "bfloat"))
            return array.astype(np.float32) if floats else None
        return array.reshape([int(extent) for extent in value.ty.shape])
    if not is_call(value, *_ARITHMETIC):
        return None
    pair = [_evaluate(arg, lookup) for arg in value.args]
    if any(a is None or a.dtype != np.float32 for a in pair):
        return None
    with np.errstate(all="ignore"):
        result = _ARITHMETIC[value.op.name.removeprefix("relax.")](*pair)
    return result if result.size == max(a.size for a in pair) else None


def product_of(factors: list[Factor], lookup: Lookup) -> np.ndarray | None:
    """The product of factors along one axis, if all are constants; [1.0] of none."""
    result = np.ones(1, np.float32)
    for factor in factors:
        vector = vector_of(factor.value, lookup)
        if vector is None or vector.dtype != np.float32:
            return None
        with np.errstate(all="ignore"):
            result = result / vector if factor.inverse else result * vector
    return result


def scaled_weight(weight: np.ndarray, scale: np.ndarray, axis: int) -> np.ndarray | None:
    """`weight` times `scale` along `axis` (-1 or -2), in float32 and rounded once.

    None where a product leaves the range of the type, or so many become subnormal that a row or
    column of the result (along `axis`) is further from the exact one, by its length, than one
    rounding is from a number.
    """
    dtype = weight.dtype
    columns = weight.shape[-1]
    flat = weight.reshape(-1, weight.shape[-2], columns)
    out = np.empty_like(flat)
    limit = float(ml_dtypes.finfo(dtype).eps)
    rows = max(1, CHUNK_ELEMENTS // columns)
    factor = scale.astype(np.float32)
    for matrix, result in zip(flat, out, strict=True):
        errors, lengths = [], []
        for start in range(0, matrix.shape[0], rows):
            part = slice(start, start + rows)
            along = factor[part, None] if axis == -2 and factor.size > 1 else factor
            with np.errstate(all="ignore"):
                exact = matrix[part].astype(np.float32) * along
                result[part] = exact.astype(dtype)
                lost = result[part].astype(np.float32) - exact
            if not np.isfinite(lost).all():
                return None
            errors.append(np.einsum("ij,ij->j" if axis == -2 else "ij,ij->i", lost, lost))
            lengths.append(np.einsum("ij,ij->j" if axis == -2 else "ij,ij->i", exact, exact))
        join = np.sum if axis == -2 else np.concatenate
        error, length = (join(x, axis=0) for x in (errors, lengths))
        if not np.isfinite(length).all() or (error > limit**2 * length).any():
            return None
    return out.reshape(weight.shape)


def constant(array: np.ndarray, dtype: str) -> Expr:
    """A Relax constant of an array."""
    return tvm.relax.const(array, dtype)
