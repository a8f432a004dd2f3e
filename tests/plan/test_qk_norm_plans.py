"""Norms of queries and keys by head, between their projection and the attention."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tvm_fusion import compile
from tvm_fusion.frontends import load

from ..support.graphs import plan_of

HEADS, KEY_HEADS, WIDTH, HIDDEN = 16, 8, 128, 2048


def rms(x, weight):
    """As models write it: in float32, rounded, then scaled."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * y.to(x.dtype)


def layer(x, weight):
    return F.layer_norm(x, weight.shape, weight)


NORMS = {"rms": rms, "layer": layer}


def rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Block(nn.Module):
    """Projections, norms of each head of Q and K, rotary embeddings if asked, causal attention."""

    def __init__(self, norm, rotary, sizes=(HEADS, KEY_HEADS, WIDTH, HIDDEN)):
        super().__init__()
        self.heads, self.key_heads, self.width, hidden = sizes
        self.norm, self.rotary = NORMS[norm], rotary
        self.q = nn.Linear(hidden, self.heads * self.width, bias=False)
        self.k = nn.Linear(hidden, self.key_heads * self.width, bias=False)
        self.v = nn.Linear(hidden, self.key_heads * self.width, bias=False)
        self.o = nn.Linear(self.heads * self.width, hidden, bias=False)
        self.q_weight = nn.Parameter(1 + 0.1 * torch.randn(self.width))
        self.k_weight = nn.Parameter(1 + 0.1 * torch.randn(self.width))

    def forward(self, x, cos, sin):
        lead = x.shape[:2]
        q = self.norm(self.q(x).view(*lead, self.heads, self.width), self.q_weight).transpose(1, 2)
        k = self.norm(self.k(x).view(*lead, self.key_heads, self.width), self.k_weight)
        k = k.transpose(1, 2)
        v = self.v(x).view(*lead, self.key_heads, self.width).transpose(1, 2)
        if self.rotary:
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).reshape(*lead, -1))


def inputs(rows, width, hidden, dtype):
    positions = torch.arange(rows)[:, None] * 0.01 * torch.arange(width)
    tables = positions.cos().to(dtype), positions.sin().to(dtype)
    return (torch.randn(1, rows, hidden).to(dtype), *tables)


def launches(norm, rotary, rows=2048):
    """Classes of the launches, each with the names of its blocks."""
    torch.manual_seed(0)
    made = Block(norm, rotary).half().eval()
    planned = plan_of(load(made, inputs(rows, WIDTH, HIDDEN, torch.float16)), "nvidia_h200")
    blocks = {o.name: o.blocks for o in planned.graph.ops}
    return [
        (g.kernel_class, [b for o in g.ops for b in blocks[o]])
        for g in planned.plan.groups
        if g.kernel_class not in ("view", "opaque")
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("norm", NORMS)
def test_without_rotary_embeddings_each_norm_is_one_launch(norm):
    found = launches(norm, False)
    assert [name for name, _ in found] == ["gemm", "row", "row", "attention", "gemm"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("norm", NORMS)
def test_with_rotary_embeddings_both_norms_are_finished_in_the_launch_that_rotates(norm):
    """The statistics of Q and of K are a row launch each; a rotated element is of two columns of a
    normalised row, which the pointwise launch computes again.
    """
    found = launches(norm, True)
    assert [name for name, _ in found] == ["gemm", "row", "row", "pointwise", "attention", "gemm"]
    rotating = next(blocks for name, blocks in found if name == "pointwise")
    assert sum("concat" in b.name.lower() for b in rotating) == 2
    assert not any(b.reduction for b in rotating)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("norm", NORMS)
def test_results_are_those_of_torch(norm, rotary):
    torch.manual_seed(0)
    made = Block(norm, rotary, (4, 2, 16, 32)).eval()
    x = inputs(9, 16, 32, torch.float32)
    with torch.no_grad():
        wanted = made(*x).numpy()
    got = compile((made, x), "llvm")(*x)
    got = got[0] if isinstance(got, tuple | list) else got
    got = torch.from_dlpack(got).numpy() if hasattr(got, "__dlpack__") else np.asarray(got)
    assert np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max()
