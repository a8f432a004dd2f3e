"""What is not attention, or not one that a kernel can compute: refused with the reason."""

import math

import pytest

from tests.support.attention_graphs import FLOAT, HALF, Graph, Sizes, bhsd, one_group, softmaxed
from tests.support.attention_masks import where
from tests.support.graphs import module
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.attention.read.program import analyze_attention


def read_graph(emit, *inputs, exact=False):
    func = one_group(module(lambda bb, *xs: emit(Graph(bb), *xs), *inputs)).func
    return analyze_attention(func, exact)


def qkv(s=None):
    return bhsd(s or Sizes())


def scaled(g, q, k):
    return g.scaled(g.scores(q, k), 0.25)


def plain(g, q, k, v):
    return softmaxed(g, scaled(g, q, k), v)


def over_queries(g, q, k, v):
    return g.matmul(g.softmax(scaled(g, q, k), axis=-2), v)


def weights_kept(g, q, k, v):
    p = g.softmax(scaled(g, q, k), axis=-1)
    return [g.matmul(p, v), p]


def scores_kept(g, q, k, v):
    s = scaled(g, q, k)
    return [softmaxed(g, s, v), s]


def dropped(g, q, k, v, keep):
    p = g.multiply(g.softmax(scaled(g, q, k), axis=-1), keep)
    return g.matmul(p, v)


def not_normalised(g, q, k, v):
    x = scaled(g, q, k)
    return g.matmul(g.exp(g.subtract(x, g.max(x, axis=-1, keepdims=True))), v)


def maximum_kept(g, q, k, v):
    x = scaled(g, q, k)
    return [softmaxed(g, x, v), g.max(x, axis=-1, keepdims=True)]


def sum_of_others(g, q, k, v, mask):
    x = scaled(g, q, k)
    total = g.sum(g.exp(g.add(x, mask)), axis=-1, keepdims=True)
    return g.matmul(g.divide(g.exp(x), total), v)


def sum_of_fewer(g, q, k, v, mask):
    e = g.exp(scaled(g, q, k))
    total = g.sum(where(g, mask, e, 0.0), axis=-1, keepdims=True)
    return g.matmul(g.divide(e, total), v)


def linear(g, q, k, v):
    return g.matmul(g.nn_relu(scaled(g, q, k)), v)


def squared(g, q, k, v):
    p = g.softmax(scaled(g, q, k), axis=-1)
    return g.matmul(g.multiply(p, p), v)


def projected(g, q, k, v, w):
    return g.matmul(softmaxed(g, scaled(g, q, k), v), w)


def two_scores(g, q, k, v):
    return softmaxed(g, g.add(scaled(g, q, k), g.scores(g.nn_relu(q), k)), v)


def normalised_queries(g, q, k, v):
    norm = g.sum(g.multiply(q, q), axis=-1, keepdims=True)
    return softmaxed(g, g.scores(g.divide(q, norm), k), v)


def another_guard(g, q, k, v, mask, other):
    out = softmaxed(g, where(g, mask, scaled(g, q, k), -math.inf), v)
    seen = g.astype(g.max(g.astype(other, "int8"), axis=-1, keepdims=True), "bool")
    return where(g, seen, out, 0.0)


def beside(g, q, k, v):
    return [softmaxed(g, scaled(g, q, k), v), g.nn_relu(q)]


def two_attentions(g, q, k, v):
    p = g.softmax(scaled(g, q, k), axis=-1)
    return g.add(g.matmul(p, v), g.matmul(g.softmax(g.negative(p), axis=-1), v))


def pooled(g, q, k, v):
    return g.sum(softmaxed(g, scaled(g, q, k), v), axis=-1)


MASK = ((2, 1, 5, 7), "bool")
WEIGHTS = ((2, 4, 5, 7), HALF)

REFUSED = {
    "a softmax over the queries": (over_queries, [], "another axis|several points|reduce the keys"),
    "weights that are an output": (weights_kept, [], "reads the weights or scores"),
    "scores that are an output": (scores_kept, [], "reads the weights or scores"),
    "dropout": (dropped, [WEIGHTS], "factor of each key"),
    "weights that are not normalised": (not_normalised, [], "keeps the maximum"),
    "a maximum as output": (maximum_kept, [], "maximum"),
    "a sum of other exponentials": (sum_of_others, [WEIGHTS], "other exponentials"),
    "a sum of fewer exponentials": (sum_of_fewer, [MASK], "hides other keys"),
    "no softmax": (linear, [], "factor of each key|no exponential"),
    "squared weights": (squared, [], "maximum|exponentials"),
    "another product behind": (projected, [((16, 16), HALF)], "several products"),
    "two products in the score": (two_scores, [], "two products"),
    "reductions in front": (normalised_queries, [], "product of what this kernel reduces"),
    "a guard by another mask": (another_guard, [MASK, MASK], "reduction over the keys"),
    "an output beside": (beside, [], "does not depend on the attention"),
    "two attentions": (two_attentions, [], "several products"),
    "a sum of the result": (pooled, [], "reduces the result|no rearrangement"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses(what):
    emit, extra, why = REFUSED[what]
    with pytest.raises(Unsupported, match=why):
        read_graph(emit, *qkv(), *extra)


def test_refuses_to_keep_roundings():
    with pytest.raises(Unsupported, match="roundings"):
        read_graph(plain, *qkv(), exact=True)


def test_refuses_one_key_float64_and_mixed_dtypes():
    with pytest.raises(Unsupported, match="one key"):
        read_graph(plain, *qkv(Sizes(N=1)))
    with pytest.raises(Unsupported, match="float64"):
        read_graph(plain, *qkv(Sizes(dtype="float64")))
    q, k, v = qkv()

    def mixed(g, q, k, v):
        p = g.softmax(scaled(g, q, k), axis=-1)
        return g.matmul(g.astype(p, FLOAT), v)

    with pytest.raises(Unsupported, match="different dtypes"):
        read_graph(mixed, q, k, (v[0], FLOAT))


def test_refuses_graphs_without_two_products():
    with pytest.raises(Unsupported, match="not attention"):
        read_graph(lambda g, q, k, v: g.scores(q, k), *qkv())
    with pytest.raises(Unsupported, match="not attention"):
        read_graph(lambda g, q: g.softmax(q, axis=-1), qkv()[0])
