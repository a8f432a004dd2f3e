"""The range of keys that conditions on indices leave a query."""

import math

import pytest
import tvm
from tvm import te, tirx

from tests.support.attention_cases import CASES
from tests.support.attention_graphs import FLOAT, Graph, Sizes, bhsd, one_group, softmaxed
from tests.support.attention_masks import where
from tests.support.graphs import module
from tvm_fusion.kernels.attention.read.program import analyze_attention
from tvm_fusion.kernels.attention.read.visible import visible_range

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize(
    ("name", "low", "high", "whole"),
    [
        ("[B, H, S, D]", None, None, True),
        ("causal by index", None, lambda m: m + 1, True),
        ("causal by tril", None, lambda m: m + 1, True),
        ("causal by an added tril", None, lambda m: m + 1, True),
        ("causal by arange", None, lambda m: m + 1, True),
        ("causal, aligned at the end", None, lambda m: m + 4, True),
        ("sliding window", lambda m: m - 2, lambda m: m + 1, True),
        ("window on both sides", lambda m: m - 2, lambda m: m + 3, True),
        ("softcap and causal", None, lambda m: m + 1, True),
        ("document ids", None, None, False),
        ("prefix", None, None, False),
        ("boolean mask, -inf", None, None, False),
    ],
)
def test_the_range_of_visible_keys(name, low, high, whole):
    attention = analyze_attention(BY_NAME[name].func())
    found = visible_range(attention)
    assert found.whole == whole
    (query,) = attention.queries
    for ours, wanted in ((found.low, low), (found.high, high)):
        assert (ours is None) == (wanted is None)
        if wanted is not None:
            assert tvm.sym.Analyzer().can_prove_equal(ours, wanted(query.var))


@pytest.mark.parametrize("least", [-math.inf, -1e9], ids=str)
def test_other_conditions_beside_a_range_leave_it_in_part(least):
    """A number that is put in place of later keys hides none: a mask may hide all before."""

    def emit(g, q, k, v, mask):
        scores = where(g, mask, g.scores(q, k), -math.inf)

        def hide(x: te.Tensor) -> te.Tensor:
            return te.compute(
                x.shape,
                lambda b, h, i, j: tirx.if_then_else(
                    j <= i, x(b, h, i, j), tirx.const(least, x.dtype)
                ),
                name="hide",
            )

        return softmaxed(g, g.te(hide, scores), v)

    inputs = [*bhsd(Sizes(dtype=FLOAT)), ((5, 7), "bool")]
    func = one_group(module(lambda bb, *xs: emit(Graph(bb), *xs), *inputs)).func
    found = visible_range(analyze_attention(func))
    assert found.low is None
    assert (found.high is not None) == (not found.whole) == (least == -math.inf)
