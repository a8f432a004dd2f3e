"""The range of keys that conditions on indices leave a query."""

import math

import pytest
from tvm import te, tirx

from tests.support.attention_cases import CASES
from tests.support.attention_graphs import FLOAT, Graph, Sizes, bhsd, one_group, softmaxed
from tests.support.attention_masks import where
from tests.support.graphs import module
from tvm_fusion.kernels.attention.read.bounds import key_range
from tvm_fusion.kernels.attention.read.program import analyze_attention
from tvm_fusion.kernels.program.expr import number

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize(
    ("name", "low", "high", "whole"),
    [
        ("[B, H, S, D]", None, None, True),
        ("causal by index", None, 0, True),
        ("causal by tril", None, 0, True),
        ("causal by an added tril", None, 0, True),
        ("causal by arange", None, 0, True),
        ("causal, aligned at the end", None, 3, True),
        ("sliding window", -2, 0, True),
        ("window on both sides", -2, 2, True),
        ("softcap and causal", None, 0, True),
        ("document ids", None, None, False),
        ("prefix", None, None, False),
        ("boolean mask, -inf", None, None, False),
    ],
)
def test_the_range_of_visible_keys(name, low, high, whole):
    """`low` and `high`: the keys of query m are m + low ... m + high."""
    found = key_range(analyze_attention(BY_NAME[name].func()))
    assert (not found.rest) == whole
    for upper, wanted in ((False, low), (True, high)):
        bounds = [(b.slope, number(b.rest)) for b in found.bounds if b.upper is upper]
        assert bounds == ([] if wanted is None else [(1, wanted)])


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
    found = key_range(analyze_attention(func))
    assert [bound.upper for bound in found.bounds] == [True] * (least == -math.inf)
    assert bool(found.rest) == (least == -math.inf)
