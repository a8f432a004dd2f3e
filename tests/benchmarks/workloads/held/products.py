"""Programs of matrix products: sizes that no tile divides, and what may stand behind them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..instance import Apply, Made, wide
from .draw import Draw


def odd_product(draw: Draw) -> Made:
    """A product one of whose sizes at least is no multiple of 8, or a head tied to a table."""
    k, n = draw.size(64, 4096), draw.size(256, 1 << 15) | 1
    rows = draw.size(64, 8192)
    after = draw.one_of((lambda y: y, F.gelu, torch.relu))
    x, weight = draw.normal(rows, k), draw.normal(n, k, deviation=k**-0.5)
    if draw.chance(0.4):
        tokens = draw.labels(rows, n)
        return Apply(lambda t, w: F.linear(F.layer_norm(F.embedding(t, w), (k,)), w)), (
            tokens,
            weight,
        )
    if draw.chance(0.3):
        return Apply(lambda x, w: after(F.linear(x, w).t()) + 1), (x, weight)
    return Apply(lambda x, w, b: after(F.linear(x, w, b))), (x, weight, draw.normal(n))


def long_sum(draw: Draw) -> Made:
    """Few outputs of long sums, as gradients of weights are."""
    terms = draw.size(1 << 14, 1 << 19)
    m, n = draw.size(48, 512), draw.size(48, 512)
    x, y = draw.normal(terms, m, deviation=terms**-0.5), draw.normal(terms, n)
    return Apply(lambda x, y: x.t() @ y), (x, y)


def reduced_windows(draw: Draw) -> Made:
    """Windows along the row behind a product: their mean, largest, or the largest of parts."""
    k, window, parts = draw.size(64, 4096), draw.count(2, 8), draw.size(32, 1024)
    rows, n = draw.size(64, 8192), window * parts
    kind = draw.one_of(("mean", "largest", "parts"))
    x, weight, bias = draw.normal(rows, k), draw.normal(n, k, deviation=k**-0.5), draw.normal(n)

    def program(x, w, b):
        y = F.linear(x, w, b)
        if kind == "mean":
            return F.avg_pool1d(y[None], window)[0]
        split = y.view(rows, parts, window) if kind == "largest" else y.view(rows, window, parts)
        return split.amax(-1 if kind == "largest" else 1)

    return Apply(program), (x, weight, bias)


def product_group_norm(draw: Draw) -> Made:
    """A norm of groups of columns behind a product."""
    groups, each = draw.one_of((2, 4, 8, 16, 32)), draw.size(16, 256)
    rows, k, n = draw.size(64, 8192), draw.size(64, 4096), groups * each
    after = draw.smooth()

    def program(x, w, b, scale, shift):
        return after(F.group_norm(F.linear(x, w, b), groups, scale, shift))

    return Apply(program), (
        draw.normal(rows, k),
        draw.normal(n, k, deviation=k**-0.5),
        *(draw.normal(n) for _ in range(3)),
    )


def attention_float32(draw: Draw) -> Made:
    """Attention of float32, written out or called."""
    dim, heads, batch = draw.one_of((32, 40, 64, 96, 128)), draw.count(1, 16), draw.count(1, 8)
    queries, keys = draw.size(64, 2048), draw.size(64, 2048)
    called = draw.chance()

    def program(q, k, v):
        if called:
            return F.scaled_dot_product_attention(q, k, v)
        return torch.softmax(wide(q @ k.transpose(-1, -2) * dim**-0.5), -1) @ v

    shapes = [(batch, heads, length, dim) for length in (queries, keys, keys)]
    return Apply(program), tuple(draw.normal(*shape) for shape in shapes)
