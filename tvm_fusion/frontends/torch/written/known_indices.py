"""What is known of a tensor of indices from the graph that makes it: that it names a place once at
most, that it names none from the end.

position = arange(n) + start         n neighbours, whatever `start` is
cache[:, :, position] = new          no two values meet in an element: any order will do

experts = topk(scores, 2)[1]         none is below 0, and none has to be looked at for that
counts.scatter_add(0, experts, ones)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from ..importer import bound_arguments

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


# ---- Indices that are not negative.

_PLACES = (
    _aten.argmax.default,
    _aten.argmin.default,
    _aten.argsort.default,
    _aten.searchsorted.Tensor,
)
_WITH_PLACES = (
    _aten.kthvalue.default,
    _aten.max.dim,
    _aten.min.dim,
    _aten.sort.default,
    _aten.sort.stable,
    _aten.topk.default,
)
_OF_ITS_ELEMENTS = (
    *_KEPT,
    _aten.expand.default,
    _aten.gather.default,
    _aten.index.Tensor,
    _aten.index_select.default,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
)
"""Each element of their results is one of their first argument."""


def is_never_negative(node: fx.Node) -> bool:
    """Whether no element of an index is below 0, whatever the inputs are."""
    while node.target in _OF_ITS_ELEMENTS and _is_wide(node):
        node = node.args[0]
    if node.target is operator.getitem:
        return node.args[0].target in _WITH_PLACES and node.args[1] == 1
    if node.target is _aten.clamp.default:
        low = bound_arguments(node)["min"]
        return isinstance(low, int) and low >= 0 and _is_wide(node)
    return node.target in _PLACES
