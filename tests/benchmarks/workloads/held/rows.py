"""Programs of rows: what else than a norm of its own elements a row may ask for."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..instance import Apply, Made, rms, wide
from .draw import Draw

# ---- another element of the row


def off_row(draw: Draw) -> Made:
    """Elements of a row in another order, behind a norm or a softmax of it."""
    kind = draw.one_of((_rotary, _rolled, _flipped, _gated, _shuffled))
    return kind(draw)


def _rotary(draw: Draw) -> Made:
    half, heads = draw.one_of((16, 32, 48, 64)), draw.count(1, 32)
    rows = draw.beside(2 * half, heads)

    def program(x, weight, cos, sin):
        y = rms(x, weight)
        turned = torch.cat((-y[..., half:], y[..., :half]), -1)
        return y * cos + turned * sin

    table = (rows, 1, 2 * half)
    return Apply(program), (
        draw.normal(rows, heads, 2 * half),
        draw.ones(2 * half),
        draw.normal(*table),
        draw.normal(*table),
    )


def _rolled(draw: Draw) -> Made:
    rows, width = draw.rows()
    step = draw.count(1, width - 1)
    return Apply(lambda x: torch.softmax(wide(x), -1).to(x.dtype).roll(step, -1) + x), (
        draw.normal(rows, width),
    )


def _flipped(draw: Draw) -> Made:
    rows, width = draw.rows()
    return Apply(lambda x, w: rms(x, w).flip(-1) * x), (draw.normal(rows, width), draw.ones(width))


def _gated(draw: Draw) -> Made:
    rows, width = draw.rows(32, 1 << 14)
    gate = draw.smooth()

    def program(x, weight):
        values, by = rms(x, weight).chunk(2, -1)
        return values * gate(by)

    return Apply(program), (draw.normal(rows, 2 * width), draw.ones(2 * width))


def _shuffled(draw: Draw) -> Made:
    groups, each = draw.count(2, 8), draw.size(16, 1 << 12)
    rows = draw.beside(groups, each)

    def program(x, weight):
        y = rms(x, weight)
        return y.view(-1, groups, each).transpose(1, 2).reshape(-1, groups * each)

    return Apply(program), (draw.normal(rows, groups * each), draw.ones(groups * each))


# ---- summed behind work of rows


def row_work_summed(draw: Draw) -> Made:
    """A number for all rows: a loss, by its mean or sum."""
    rows, width = draw.rows()
    kind = draw.one_of(("divergence", "cross entropy", "cosine", "norms"))
    x, y = draw.normal(rows, width), draw.normal(rows, width)
    if kind == "divergence":
        return Apply(_divergence), (x, y)
    if kind == "cross entropy":
        return Apply(lambda x, t: F.cross_entropy(wide(x), t)), (x, draw.labels(rows, width))
    if kind == "cosine":
        return Apply(lambda x, y: (1 - F.cosine_similarity(wide(x), wide(y), -1)).mean()), (x, y)
    return Apply(lambda x: wide(x).square().sum(-1).sqrt().mean()), (x,)


def _divergence(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    log, share = torch.log_softmax(wide(x), -1), torch.softmax(wide(y), -1)
    return F.kl_div(log, share, reduction="batchmean")


# ---- vectors by sample


def by_sample(draw: Draw) -> Made:
    """A norm whose scale and shift are those of the sample."""
    width, tokens = draw.size(64, 1 << 13), draw.size(4, 1 << 12)
    batch = draw.beside(width, tokens)
    residual = draw.chance()

    def program(x, scale, shift, y):
        found = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        return y + found if residual else found

    vectors = (draw.normal(batch, 1, width), draw.normal(batch, 1, width))
    return Apply(program), (
        draw.normal(batch, tokens, width),
        *vectors,
        draw.normal(batch, tokens, width) if residual else draw.normal(1),
    )


# ---- few rows of many elements


def few_long_rows(draw: Draw) -> Made:
    """A norm of millions of elements, or sums of a middle axis."""
    if draw.chance():
        return _middle(draw)
    side, channels = draw.size(128, 1024), draw.size(1, 64)
    batch = max(1, draw.beside(side, side, channels))
    x, after = draw.normal(batch, channels, side, side), draw.smooth()
    if draw.chance():
        return Apply(lambda x: after(F.instance_norm(x))), (x,)
    return Apply(lambda x: after(F.layer_norm(x, x.shape[1:]))), (x,)


def _middle(draw: Draw) -> Made:
    length, inner = draw.size(64, 1 << 13), draw.size(16, 1 << 12)
    outer, before = draw.beside(length, inner), draw.smooth()
    mean = draw.chance()

    def program(x):
        return before(x).mean(1) if mean else before(x).sum(1)

    return Apply(program), (draw.normal(outer, length, inner),)


# ---- quantisation


def int8_rows(draw: Draw) -> Made:
    """Rows in 8 bits, with the scale of each."""
    rows, width = draw.rows()
    before = draw.one_of((wide, lambda x: wide(x) * 0.5, lambda x: torch.relu(wide(x))))

    def program(x):
        y = before(x)
        scale = y.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
        return torch.round(y / scale).clamp(-127, 127).to(torch.int8), scale

    return Apply(program), (draw.normal(rows, width),)
