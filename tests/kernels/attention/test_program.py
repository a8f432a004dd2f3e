"""Attention read from fused PrimFuncs: every spelling is the same few expressions."""

import math

import numpy as np
import pytest
from tvm import relax, te, tirx
from tvm.relax import op

from tests.support.attention_cases import CASES
from tests.support.attention_graphs import (
    FLOAT,
    HALF,
    Graph,
    Sizes,
    attend,
    bhsd,
    causal,
    masked,
    one_group,
    scores_of,
    softmaxed,
)
from tests.support.attention_interpreter import evaluate
from tests.support.graphs import module
from tvm_fusion.kernels.attention.read.program import analyze_attention
from tvm_fusion.kernels.gpu.access import Digit, affine_access

BY_NAME = {case.name: case for case in CASES}


def read(name, **sizes):
    return analyze_attention(BY_NAME[name].with_sizes(**sizes).func())


def read_graph(emit, *inputs, exact=False):
    func = one_group(module(lambda bb, *xs: emit(Graph(bb), *xs), *inputs)).func
    return analyze_attention(func, exact)


def assert_same(got, expected):
    for ours, wanted in zip(got, expected, strict=True):
        assert ours.shape == wanted.shape
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.one_in(24)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_computes_what_the_graph_does(case):
    func, arrays = case.built()
    assert_same(evaluate(analyze_attention(func), arrays), case.expected())


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    "name", [c.name for c in CASES if c.name not in ("rotated q and k", "float32")]
)
def test_the_operands_are_plain_elements_of_memory(name):
    attention = read(name)
    for operand in (attention.q, attention.k, attention.v):
        assert operand.load is not None
        assert attention.operand_dtype == str(operand.load.ty.dtype)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["[B, H, S, D]", "causal by index", "added mask [M, N]"])
@pytest.mark.parametrize("sizes", [{"M": 1}, {"B": 1}, {"H": 1, "B": 1}, {"M": 37, "N": 131}])
def test_odd_sizes(name, sizes):
    case = BY_NAME[name].with_sizes(**sizes)
    func, arrays = case.built()
    assert_same(evaluate(analyze_attention(func), arrays), case.expected())


# ---- axes


def sizes_of(attention):
    return tuple([axis.extent for axis in axes] for axes in (attention.batch, attention.queries))


def test_axes_by_role():
    attention = read("[B, H, S, D]", E=24)
    assert sizes_of(attention) == ([2, 4], [5])
    assert (attention.N, attention.D, attention.E) == (7, 16, 24)


@pytest.mark.parametrize("name", ["grouped heads by repeat", "grouped heads by expand"])
def test_grouped_heads_divide_the_index_of_the_head(name):
    attention = read(name)
    assert sizes_of(attention) == ([2, 4], [5])
    load = attention.k.load
    access = affine_access(load.indices, (2, 2, 7, 16), attention.groups)
    assert access.digits["batch"] == (Digit(4, 112), Digit(2, 0))


def test_an_axis_of_heads_that_share_their_keys_is_batch():
    attention = read("grouped heads as an axis")
    assert sizes_of(attention) == ([2, 2, 2], [5])
    access = affine_access(attention.k.load.indices, (2, 2, 7, 16), attention.groups)
    assert access.digits["batch"] == (Digit(4, 112), Digit(2, 0))


def test_heads_that_share_their_keys_are_the_queries_where_there_is_only_one():
    assert sizes_of(read("one query, grouped")) == ([2, 2], [2])
    assert sizes_of(read("one query")) == ([2, 4], [])


def test_the_query_is_the_axis_that_a_mask_compares_with_the_key():
    """Scores as [B, M, H, N] of one key head: both M and H are of the scores alone."""

    def emit(g, q, k, v):
        scores = g.reshape(g.scores(g.reshape(q, (2, 20, 16)), k), (2, 5, 4, 7))

        def hide(x: te.Tensor) -> te.Tensor:
            return te.compute(
                x.shape,
                lambda b, i, h, j: tirx.if_then_else(j <= i, x(b, i, h, j), -math.inf),
                name="hide",
            )

        p = g.reshape(g.softmax(g.te(hide, scores), axis=-1), (2, 20, 7))
        return g.reshape(g.matmul(p, v), (2, 5, 4, 16))

    attention = read_graph(emit, *(((2, *s, 16), FLOAT) for s in ((5, 4), (7,), (7,))))
    assert attention.M in (5, 20)
    assert attention.visible is not None


def test_head_permutes_become_strides():
    attention = read("[B, S, H * D] with head permutes")
    groups = {**attention.groups}
    access = affine_access(attention.q.load.indices, (2, 5, 64), groups)
    assert access.digits["batch"] == (Digit(2, 320), Digit(4, 16))
    assert access.digits["m"] == (Digit(5, 64),)
    assert access.digits["d"] == (Digit(16, 1),)
    access = affine_access(attention.outputs[0].indices, (2, 5, 64), groups)
    assert access.digits["e"] == (Digit(16, 1),)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("names", [("M", "N"), ("B",)], ids=["lengths", "batch"])
@pytest.mark.parametrize(
    "name",
    [
        "[B, S, H * D] with head permutes",
        "cross attention with logsumexp",
        "grouped heads by expand",
        "causal, aligned at the end",
        "added mask [B, 1, 1, N]",
        "document ids",
        "rows that see no key are 0",
    ],
)
def test_symbolic_sizes_stay_symbolic(name, names):
    sizes = {"M": 11, "N": 13} if "N" in names else {"B": 3}
    symbols = {size: tirx.Var(size.lower(), "int64") for size in sizes}
    case = BY_NAME[name].with_sizes(**sizes)
    mod = case.with_sizes(**symbols).module()
    group = one_group(mod)
    attention = analyze_attention(group.func)
    assert not attention.is_static
    named = dict(zip((p.name for p in mod["main"].params), case.arrays(), strict=True))
    inputs = [named[i.name] for i in group.inputs if not isinstance(i, relax.ShapeExpr)]
    assert_same(evaluate(attention, inputs), case.expected())


# ---- expressions


@pytest.mark.parametrize(
    "name",
    [
        "scale on q",
        "roots on q and k",
        "division by sqrt(D)",
        "half softmax",
        "division behind the product",
        "maxima spelled differently",
        "through the logsumexp",
        "base 2, with logsumexp",
    ],
)
def test_the_logit_is_the_scaled_score_whatever_the_spelling(name):
    attention = read(name)
    assert isinstance(attention.logit, tirx.Mul)
    assert attention.logit.a.same_as(attention.score)
    assert float(attention.logit.b.value) == pytest.approx(0.25, rel=1e-6)
    assert (attention.bindings, attention.visible) == ((), None)
    assert attention.outputs[0].value.same_as(attention.result)


def test_the_logsumexp_is_a_row_output():
    attention = read("cross attention with logsumexp")
    (row,) = attention.row_outputs
    assert row.value.same_as(attention.lse)
    assert len(row.indices) == 3
    assert row.dtype == FLOAT


@pytest.mark.parametrize(
    "name",
    ["rows that see no key are 0", "safe softmax", "guarded maximum and sum", "weights zeroed"],
)
def test_guards_of_rows_without_keys_disappear(name):
    attention = read(name)
    assert str(attention.visible).endswith("[i0, T.int64(0), i2, n]")
    assert attention.outputs[0].value.same_as(attention.result)


def test_a_mask_of_minus_infinity_becomes_a_condition_where_rows_are_guarded():
    assert "inf" in str(read("safe softmax, added mask").visible)
    assert read("added mask [M, N]").visible is None


def test_a_mask_of_numbers_is_not_taken_apart():
    """Distributed, -10000 + 10000 * keep would cost the score its last digits."""
    text = str(read("(1 - keep) * -10000").logit)
    assert "(T.float32(1.0) - T.Cast" in text


def test_the_weights_are_of_the_dtype_that_they_are_rounded_to():
    assert read("[B, H, S, D]").weight_dtype == HALF
    assert read("all in float32, cast at the end").weight_dtype == FLOAT
    assert read("all in float32, cast at the end").operand_dtype == HALF
    assert read("bfloat16").weight_dtype == "bfloat16"


def test_the_listing_names_axes_operands_and_outputs():
    text = str(read("causal by index"))
    assert text.startswith("batch (i0: 2, i1: 4) m (i2: 5) n (n: 7) d (d: 16) e (i3: 16)")
    assert "visible = n <= i2" in text


# ---- composites of Relax


@pytest.mark.parametrize("mask", [None, "TopLeft", "BottomRight"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_attention_operator_of_relax(mask, bias):
    shapes = [((2, n, 4, 16), HALF) for n in (5, 7, 7)]
    shapes += [((2, 1, 5, 7), HALF)] if bias else []

    def emit(g, q, k, v, *more):
        return g.bb.emit(op.nn.attention(q, k, v, *more, causal_mask=mask))

    group = one_group(module(lambda bb, *xs: emit(Graph(bb), *xs), *shapes))
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape).astype(HALF) for shape, _ in shapes]
    named = {f"x{i}": x for i, x in enumerate(inputs)}
    (got,) = evaluate(analyze_attention(group.func), [named[i.name] for i in group.inputs])
    q, k, v, *more = (x.astype(np.float64) for x in inputs)
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    logits = scores_of(q, k, 0.25) + (more[0] if bias else 0)
    if mask is not None:
        logits = masked(logits, causal(5, 7, 2 if mask == "BottomRight" else 0))
    assert_same([got], [attend(logits, v).transpose(0, 2, 1, 3)])


def test_the_constants_of_where_are_in_the_prim_func():
    def emit(g, q, k, v, mask):
        scores = g.where(mask, g.scores(q, k), relax.const(-math.inf, HALF))
        return softmaxed(g, scores, v)

    attention = read_graph(emit, *bhsd(Sizes()), ((2, 1, 5, 7), "bool"))
    assert str(attention.visible).endswith("[i0, T.int64(0), i2, n]")
