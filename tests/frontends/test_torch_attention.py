"""PyTorch's attention: ranks, scales, masks, and masks that are recognised."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.frontend_tools import check, operators


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def heads(*leading: int, length: int = 5) -> torch.Tensor:
    return torch.randn(*leading, length, 8)


HIDDEN_ROW = torch.ones(5, 5, dtype=torch.bool)
HIDDEN_ROW[2] = False
HIDDEN_ROW[0, 3] = False
ADDITIVE = torch.zeros(5, 5).masked_fill(~HIDDEN_ROW, -torch.inf)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 2, 3)])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=["plain", "causal", "scaled"]
)
def test_attention_of_any_rank(leading, options):
    check(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options),
        heads(*leading),
        heads(*leading),
        heads(*leading),
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("query", "key", "value"),
    [((2, 3), (2, 1), (1, 3)), ((2, 3), (3,), (1,)), ((1,), (2, 3), (3,))],
)
def test_heads_and_batches_that_are_shared_are_broadcast(query, key, value):
    check(F.scaled_dot_product_attention, heads(*query), heads(*key), heads(*value))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("leading", [(3,), (2, 3), (2, 2, 3)])
@pytest.mark.parametrize("mask", [HIDDEN_ROW, ADDITIVE], ids=["boolean", "additive"])
def test_a_query_that_sees_no_key_gets_zero(mask, leading):
    q = heads(*leading)
    check(F.scaled_dot_product_attention, q, heads(*leading), heads(*leading), mask)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mask", [HIDDEN_ROW, ADDITIVE], ids=["boolean", "additive"])
def test_a_mask_that_is_known_gives_the_same(mask):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    check(attend, heads(2, 3), heads(2, 3), heads(2, 3))


@pytest.mark.parametrize(
    ("mask", "causal"),
    [(torch.ones(5, 5, dtype=torch.bool), "None"), (torch.ones(5, 5).tril() > 0, '"TopLeft"')],
    ids=["all", "causal"],
)
def test_a_known_mask_that_hides_nothing_or_is_causal_disappears(mask, causal):
    mod = check(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        *(heads(2, 3) for _ in range(3)),
    )
    assert f"causal_mask={causal}" in mod.script()
    assert set(operators(mod)) == {"relax.permute_dims", "relax.nn.attention"}


def test_layers_share_the_work_on_their_mask():
    def attend_twice(q, mask):
        x = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    mod = check(attend_twice, heads(2, 3), HIDDEN_ROW)
    assert operators(mod).count("relax.max") == 1


def test_grouped_queries_share_keys_and_values():
    check(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        heads(2, 4),
        heads(2, 2, length=7),
        heads(2, 2, length=7),
    )
