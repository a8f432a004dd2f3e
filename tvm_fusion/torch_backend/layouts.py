"""How traced tensors lie in memory: as permutations of contiguous ones, or with gaps."""

from typing import Any

import sympy
import torch


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The permutation after which a tensor is contiguous: the identity where it is so now; None
    where it has gaps, shares memory among its elements, or nobody can tell.
    """
    sizes, strides = (list(map(_hint, values)) for values in (tensor.shape, tensor.stride()))
    if None in sizes or None in strides:
        return None
    if tensor.layout is not torch.strided:
        return None
    axes = range(tensor.ndim)
    if 0 in sizes:
        return tuple(axes)
    # an axis of one element lies anywhere: beside the one that follows it in the model
    placed = list(strides)
    for axis in reversed(axes):
        if _expression(tensor.shape[axis]) == 1:
            behind = axis + 1 < tensor.ndim
            placed[axis] = placed[axis + 1] * sizes[axis + 1] if behind else 1
    order = tuple(sorted(axes, key=lambda axis: -placed[axis]))
    step = sympy.Integer(1)
    for axis in reversed(order):
        size, stride = _expression(tensor.shape[axis]), _expression(tensor.stride(axis))
        if size == 1:
            continue
        if sympy.expand(stride - step) != 0:
            return None
        step *= size
    return order


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """The permutation that undoes another."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _hint(value: Any) -> int | None:
    """A size in the example that was traced."""
    return value.node.hint if isinstance(value, torch.SymInt) else value


def _expression(value: Any) -> Any:
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)
