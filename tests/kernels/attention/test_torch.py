"""Attention as PyTorch models write it, imported, lowered and read."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tvm import relax

from tests.support.attention_graphs import one_group
from tests.support.attention_interpreter import evaluate
from tests.support.frontend_tools import Function, array_of
from tvm_fusion.frontends import load
from tvm_fusion.kernels.attention.read.bounds import key_range, split_match
from tvm_fusion.kernels.attention.read.program import analyze_attention

HIDDEN_ROW = torch.ones(5, 5, dtype=torch.bool)
HIDDEN_ROW[2] = False
HIDDEN_ROW[0, 3] = False
ADDITIVE = torch.zeros(5, 5).masked_fill(~HIDDEN_ROW, -torch.inf)
SEEN = torch.ones(5, 5).tril() > 0
SEEN[4, 1:3] = False


def heads(*leading, length=5):
    return torch.randn(*leading, length, 16)


def attend(function, *inputs):
    """The attention of a function, checked against PyTorch."""
    model = Function(function).eval()
    mod = load(model, inputs)
    group = one_group(mod)
    attention = analyze_attention(group.func)
    named = dict(zip((p.name for p in mod["main"].params), map(array_of, inputs), strict=True))
    arrays = [named[i.name] if isinstance(i, relax.Var) else i.value.numpy() for i in group.inputs]
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(model(*inputs))
    for got, place in zip(evaluate(attention, arrays), group.outputs, strict=True):
        wanted = expected[place].numpy().astype(np.float64)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())
    return attention


def scores(q, k):
    return torch.matmul(q, k.transpose(-1, -2)) / 4


def eager(q, k, v, mask=None):
    s = scores(q, k) if mask is None else scores(q, k) + mask
    weights = F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def filled(q, k, v, mask):
    return torch.matmul(torch.softmax(scores(q, k).masked_fill(~mask, -torch.inf), -1), v)


def causal_filled(q, k, v):
    mask = torch.tril(torch.ones(5, 5, dtype=torch.bool))
    return filled(q, k, v, mask)


def causal_added(q, k, v):
    s = scores(q, k)
    return torch.matmul(
        torch.softmax(s + torch.full((5, 5), torch.finfo(s.dtype).min).triu(1), -1), v
    )


def documents(q, k, v, ids):
    same = ids[:, None, :, None] == ids[:, None, None, :]
    i = torch.arange(5)
    seen = same & (i <= i[:, None])
    return torch.matmul(torch.softmax(torch.where(seen, scores(q, k), -torch.inf), -1), v)


def einsum(q, k, v):
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.25
    return torch.einsum("bhqk,bkhd->bqhd", torch.softmax(s, -1), v)


def grouped_einsum(q, k, v):
    q = q.reshape(2, 5, 2, 2, 16)
    s = torch.einsum("bqgrd,bkgd->bgrqk", q, k) * 0.25
    return torch.einsum("bgrqk,bkgd->bqgrd", torch.softmax(s, -1), v).reshape(2, 5, 64)


def of_flat_heads(q, k, v):
    q, k, v = (x.reshape(6, 5, 16) for x in (q, k, v))
    s = torch.baddbmm(torch.zeros(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=0.25)
    return torch.bmm(s.softmax(-1), v).view(2, 3, 5, 16)


def with_logsumexp(q, k, v):
    s = scores(q, k)
    return torch.matmul(torch.softmax(s, -1), v), torch.logsumexp(s, -1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 2, 3)])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=["plain", "causal", "scaled"]
)
def test_scaled_dot_product_attention(leading, options):
    attention = attend(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options),
        *(heads(*leading) for _ in range(3)),
    )
    assert (attention.visible is not None) == ("is_causal" in options)
    assert attention.q.load is not None


@pytest.mark.parametrize("mask", [HIDDEN_ROW, ADDITIVE], ids=["boolean", "additive"])
def test_a_row_that_sees_no_key_is_0(mask):
    attention = attend(F.scaled_dot_product_attention, *(heads(2, 3) for _ in range(3)), mask)
    assert attention.visible is not None
    assert attention.outputs[0].value.same_as(attention.result)


@pytest.mark.parametrize("mask", [HIDDEN_ROW, SEEN], ids=["a hidden row", "all rows see keys"])
def test_a_mask_that_is_known(mask):
    attend(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        *(heads(2, 3) for _ in range(3)),
    )


def test_grouped_queries():
    attention = attend(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        heads(2, 4),
        heads(2, 2, length=7),
        heads(2, 2, length=7),
    )
    assert (attention.B, attention.M, attention.N) == (8, 5, 7)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("function", "shapes", "mask"),
    [
        (eager, [(2, 3)] * 3, None),
        (eager, [(2, 3)] * 3, torch.randn(5, 5)),
        (filled, [(2, 3)] * 3, SEEN),
        (einsum, [(2, 5)] * 3, None),
        (of_flat_heads, [(2, 3)] * 3, None),
        (with_logsumexp, [(2, 3)] * 3, None),
    ],
    ids=["eager", "eager, mask", "filled", "einsum", "flat heads", "logsumexp"],
)
def test_attention_written_out(function, shapes, mask):
    attend(function, *(heads(*s) for s in shapes), *([] if mask is None else [mask]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("function", [causal_filled, causal_added], ids=["filled", "added"])
def test_a_causal_mask_that_the_model_makes(function):
    attention = attend(function, *(heads(2, 3) for _ in range(3)))
    found = key_range(attention)
    assert any(bound.upper for bound in found.bounds)
    assert not found.rest


def test_causal_documents_have_a_range_and_an_equality():
    ids = torch.tensor([[1, 1, 2, 2, 2], [3, 4, 4, 4, 3]])
    attention = attend(documents, *(heads(2, 3) for _ in range(3)), ids)
    found = key_range(attention)
    assert any(bound.upper for bound in found.bounds)
    assert found.rest
    assert split_match(attention, key_range(attention))[0] is not None


def test_a_grouped_einsum_has_the_heads_of_a_key_head_among_its_queries():
    attention = attend(grouped_einsum, heads(2, 5, length=4), *[heads(2, 5, length=2)] * 2)
    assert (attention.B, attention.M, attention.N) == (4, 10, 5)
