"""Integers that become places after some arithmetic (`table[ids.abs()]`, `table[ids + 1]`): what an
input may range over so that all places are rows of the table.

The arithmetic is carried out on every number that an input could be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import tvm
from tvm import relax

_MOST = 127  # the inputs that are tried are at most so large: all of them are int8

_UNARY = {
    "relax.abs": np.abs,
    "relax.negative": np.negative,
    **dict.fromkeys(
        (
            *("relax.astype", "relax.reshape", "relax.expand_dims", "relax.squeeze"),
            *("relax.flatten", "relax.permute_dims"),
        ),
        np.array,
    ),
}
_BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "relax.add": np.add,
    "relax.subtract": np.subtract,
    "relax.multiply": np.multiply,
    "relax.maximum": np.maximum,
    "relax.minimum": np.minimum,
}

Computed = tuple[str, np.ndarray]
"""The name of an input, and what is made of each number that it could be."""


def any_number(name: str, dtype: str) -> Computed:
    """An input of an integer dtype, as it is."""
    return name, np.arange(-_MOST, _MOST + 1).astype(dtype)


def computed(value: object, known: Mapping[relax.Var, Computed]) -> Computed | None:
    """What a call of an operator makes of one input and of constants, in its own dtype; None where
    that is not known.
    """
    if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.Op):
        return None
    if "int" not in str(getattr(value.ty, "dtype", "")):
        return None
    if value.op.name in _UNARY and value.args[0] in known:
        name, numbers = known[value.args[0]]
        return name, _UNARY[value.op.name](numbers).astype(str(value.ty.dtype))
    if value.op.name not in _BINARY:
        return None
    names = {known[a][0] for a in value.args if a in known}
    operands = [known[a][1] if a in known else _constant(a) for a in value.args]
    if len(names) != 1 or any(operand is None for operand in operands):
        return None
    return names.pop(), _BINARY[value.op.name](*operands)


def _constant(value: object) -> np.ndarray | None:
    """An integer that stands in the graph."""
    if not isinstance(value, tvm.ir.GenericConst) or not hasattr(value.value, "numpy"):
        return None
    array = value.value.numpy()
    return array.reshape(()) if array.size == 1 and array.dtype.kind in "iu" else None


def range_of_places(numbers: np.ndarray, rows: int) -> range | None:
    """The numbers around 0 that an input may be so that all that is made of them are rows; None
    where 0 may not.
    """
    numbers = numbers.astype("int64")
    wrong = np.flatnonzero((numbers < 0) | (numbers >= rows))
    below, above = wrong[wrong < _MOST], wrong[wrong > _MOST]
    if not 0 <= numbers[_MOST] < rows:
        return None
    first = int(below[-1]) + 1 if len(below) else 0
    last = int(above[0]) if len(above) else len(numbers)
    return range(first - _MOST, last - _MOST)
