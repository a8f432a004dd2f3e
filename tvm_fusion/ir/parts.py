"""Tensors that are parts of larger ones: what of the buffers of a PrimFunc it reads and writes.

A kernel that computes a part of a concatenation where it belongs has a parameter of the shape of
the whole (`transform.apply.place_parts`); what it leaves as it was there is nobody's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

PARTS_ATTR = "tvm_fusion.parts"
"""On such a PrimFunc: the shape of the part, for each of its buffers."""


def part_of(array: Any, shape: Sequence[int]) -> Any:
    """The part of an array that has a shape and begins where the array does."""
    return array[tuple(slice(int(extent)) for extent in shape)] if len(shape) else array


def written_parts(func: tirx.PrimFunc | None, arrays: Sequence[Any]) -> list[Any]:
    """Of the outputs of a function, its last parameters, what it has written."""
    attrs = {} if func is None else func.attrs or {}
    if PARTS_ATTR not in attrs:
        return list(arrays)
    shapes = list(attrs[PARTS_ATTR])[-len(arrays) :]
    return [part_of(array, shape) for array, shape in zip(arrays, shapes, strict=True)]
