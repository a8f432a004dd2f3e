"""Which places a tensor of indices names once at most, known from the graph that makes it.

position = arange(n) + start         n neighbours, whatever `start` is
cache[:, :, position] = new          no two values meet in an element: any order will do
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

_aten = torch.ops.aten

_COUNTED = (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)
_SHIFTED = (_aten.add.Tensor, _aten.add.Scalar, _aten.sub.Tensor, _aten.sub.Scalar)
_KEPT = (
    _aten._to_copy.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten.detach.default,
    _aten.lift_fresh_copy.default,
    _aten.reshape.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.unsqueeze.default,
    _aten.view.default,
)
"""They keep all elements, each once."""


def are_distinct(indices: Sequence[fx.Node], extents: Sequence[int]) -> bool:
    """Whether the places that indices name together, broadcast, are all different ones.

    Parameters
    ----------
    indices : sequence of fx.Node
    extents : sequence of int
        Of the axes that they stand for; an index below 0 counts from the end.
    """
    shapes = [_shape(index) for index in indices]
    if any(shape is None for shape in shapes):
        return False
    rank = max(map(len, shapes))
    varying = [{rank - len(s) + axis for axis, n in enumerate(s) if n != 1} for s in shapes]
    told = [
        axes
        for index, axes, extent in zip(indices, varying, extents, strict=True)
        if _is_distinct(index, extent)
    ]
    return set().union(*varying) == set().union(*told)


def _is_distinct(node: fx.Node, extent: int) -> bool:
    """Whether no two elements of an index name the same place of an axis."""
    count = _count(node)
    if count is None or count > extent:  # an element and the one `extent` behind it are one place
        return False
    if count == 1:
        return True
    while isinstance(node, fx.Node) and _is_wide(node):
        given = node.args[0] if node.args else None
        if node.target in _COUNTED:
            return all(step in (1, -1) for step in node.args[2:])
        if node.target in _SHIFTED:
            other, alpha = node.args[1], node.kwargs.get("alpha", 1)
            if _count(given) == 1 and _count(other) == count:
                given, other = other, given
                if alpha not in (1, -1):
                    return False
            if _count(other) != 1 or _count(given) != count:
                return False
        elif node.target not in _KEPT:
            return False
        node = given
    return False


def _is_wide(node: fx.Node) -> bool:
    """Whether neighbours stay apart: floats are cut off, narrow integers begin again."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    """Where all extents are known."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not all(type(n) is int for n in value.shape):
        return None
    return tuple(value.shape)


def _count(node: object) -> int | None:
    """The elements of a tensor, or of a number."""
    if isinstance(node, int | float):
        return 1
    shape = _shape(node)
    return None if shape is None else torch.Size(shape).numel()
