"""Images and volumes that are read at places between their elements (`grid_sample`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten

LINEAR, NEAREST = range(2)  # of grid_sample
ZEROS, BORDER, REFLECTION = range(3)


def _sampled_volume(
    x: torch.Tensor,
    grid: torch.Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> torch.Tensor:
    """grid_sample of volumes [N, C, D, H, W] at [N, ..., 3], which are from -1 to 1, W first."""
    batch, channels, *space = x.shape
    places = [
        _padded(_pixel(grid[..., 2 - axis], size, align_corners), size, padding_mode, align_corners)
        for axis, size in enumerate(space)
    ]
    flat = x.reshape(batch, channels, math.prod(space))

    def taps(at: torch.Tensor) -> list[tuple[torch.Tensor, Any]]:
        """Whole numbers beside a place and their shares."""
        if interpolation_mode == NEAREST:
            return [(torch.round(at), 1.0)]
        low = torch.floor(at)
        return [(low, low + 1 - at), (low + 1, at - low)]

    total: Any = None
    for corner in itertools.product(*map(taps, places)):
        index, share = 0, 1.0
        for (at, part), size in zip(corner, space, strict=True):
            inside = (at >= 0) & (at < size)
            index = index * size + torch.where(inside, at, 0).long()
            share = share * torch.where(inside, part, 0.0)
        values = flat.gather(2, index.reshape(batch, 1, -1).expand(-1, channels, -1))
        values = values.reshape(batch, channels, *index.shape[1:]) * share.unsqueeze(1)
        total = values if total is None else total + values
    return total.to(x.dtype)


def _pixel(place: torch.Tensor, size: int, align_corners: bool) -> torch.Tensor:
    """Where a place between -1 and 1 is among pixels."""
    half = (size - 1) / 2 if align_corners else size / 2
    return place * half + (size - 1) / 2


def _padded(at: torch.Tensor, size: int, mode: int, align_corners: bool) -> torch.Tensor:
    """Places outside of an image as those inside that stand for them."""
    if mode == REFLECTION:
        low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
        if span == 0:
            return torch.zeros_like(at)
        away = (at - low).abs()
        turns, rest = torch.floor(away / span), torch.fmod(away, span)
        at = torch.where(torch.fmod(turns, 2) == 0, rest + low, span + low - rest)
    return at if mode == ZEROS else at.clamp(0, size - 1)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _aten.grid_sampler_3d.default: _sampled_volume,
    _aten.grid_sampler_2d.default: torch._decomp.decomposition_table[_aten.grid_sampler_2d.default],
}
