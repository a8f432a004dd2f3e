"""Backward operators of core ATen, written with forward ones.

    max_pool2d_with_indices_backward  ->  scatter_add at the places of the maxima
    avg_pool2d_backward               ->  a product with a constant matrix an axis
    convolution_backward              ->  a transposed convolution (input), one of input and
                                          gradient, batch and channels exchanged (weight), a sum

A program has them where it was exported with its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .composites import wide

_aten = torch.ops.aten
Tensor = torch.Tensor


def _max_pool(
    gradient: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """PyTorch 2.11 has none."""
    lead, space = x.shape[:-2], x.shape[-2:]
    rows = [y.reshape(math.prod(lead), -1) for y in (gradient, indices)]
    zeros = gradient.new_zeros(math.prod(lead), math.prod(space))
    return zeros.scatter_add(1, rows[1], rows[0]).reshape(x.shape)


# ---- Means of windows: gradient[o] goes to all elements i of the window of o, by its size.


def _spread(gradient: Tensor, x: Tensor, shares: Sequence[Tensor], divisor: float = 1) -> Tensor:
    """The gradient of both axes, by matrices of (outputs, inputs)."""
    rows, columns = shares
    return (rows.mT @ (wide(gradient) / divisor) @ columns).to(x.dtype)


def _shares(first: Tensor, last: Tensor, size: int, counts: Tensor, like: Tensor) -> Tensor:
    """(outputs, inputs): 1 / count where first <= i < last, 0 elsewhere."""
    place = torch.arange(size, device=like.device)
    inside = (place >= first[:, None]) & (place < last[:, None])
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return inside.to(dtype) / counts[:, None].to(dtype)


def _average_pool(
    gradient: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    shares = []
    for axis in (0, 1):
        k, s, p = (pair[axis % len(pair)] for pair in (kernel, stride or kernel, padding))
        size, outputs = x.shape[axis - 2], gradient.shape[axis - 2]
        first = torch.arange(outputs, device=x.device) * s - p
        last = (first + k).clamp(max=size + p)
        counts = last - first if count_include_pad else last.clamp(max=size) - first.clamp(min=0)
        counts = counts if divisor_override is None else torch.ones_like(counts)
        shares.append(_shares(first, last, size, counts, x))
    return _spread(gradient, x, shares, divisor_override or 1)


def _adaptive_average_pool(gradient: Tensor, x: Tensor) -> Tensor:
    shares = []
    for axis in (-2, -1):
        size, outputs = x.shape[axis], gradient.shape[axis]
        place = torch.arange(outputs, device=x.device)
        first = torch.div(place * size, outputs, rounding_mode="floor")
        last = torch.div((place + 1) * size + outputs - 1, outputs, rounding_mode="floor")
        shares.append(_shares(first, last, size, last - first, x))
    return _spread(gradient, x, shares)


# ---- Convolutions.


def _convolution(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    rank = x.ndim - 2
    stride, padding, dilation = (
        [pair[axis % len(pair)] for axis in range(rank)] for pair in (stride, padding, dilation)
    )
    how = (stride, padding, dilation)
    of_input = of_weight = of_bias = None
    if output_mask[0]:
        rest = [0] * rank if transposed else _rest(gradient, x, weight, *how)
        of_input = _aten.convolution(gradient, weight, None, *how, not transposed, rest, groups)
    if output_mask[1]:
        image, over = (gradient, x) if transposed else (x, gradient)
        of_weight = _of_weight(image, over, weight.shape, *how, groups)
    if output_mask[2]:
        of_bias = wide(gradient).sum([0, *range(2, x.ndim)]).to(gradient.dtype)
    return of_input, of_weight, of_bias


def _rest(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Elements at the end of each axis that no window of the convolution reaches."""
    extents = zip(x.shape[2:], gradient.shape[2:], weight.shape[2:], strict=True)
    return [
        size - ((outputs - 1) * s - 2 * p + d * (k - 1) + 1)
        for (size, outputs, k), s, p, d in zip(extents, stride, padding, dilation, strict=True)
    ]


def _of_weight(
    image: Tensor,
    over: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """w[o, i, k] = sum over n, t of over[n, o, t] image[n, i, t stride + k dilation - padding]."""
    batch, space = image.shape[0], range(3, image.ndim + 1)
    image = image.reshape(batch, groups, -1, *image.shape[2:]).permute(2, 1, 0, *space)
    image = image.reshape(image.shape[0], groups * batch, *image.shape[3:])
    kernels = over.transpose(0, 1)  # (groups outputs, batch, *space)
    zeros = [0] * len(stride)
    found = _aten.convolution(
        image, kernels, None, dilation, padding, stride, False, zeros, groups
    ).transpose(0, 1)
    for axis, k in enumerate(shape[2:], 2):
        found = found.narrow(axis, 0, k)
    return found


BACKWARD: dict[Any, Callable[..., Any]] = {
    _aten._adaptive_avg_pool2d_backward.default: _adaptive_average_pool,
    _aten.avg_pool2d_backward.default: _average_pool,
    _aten.convolution_backward.default: _convolution,
    _aten.max_pool2d_with_indices_backward.default: _max_pool,
}
