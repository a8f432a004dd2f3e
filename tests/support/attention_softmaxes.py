"""Attention whose softmax and scale are spelled in various ways."""

import math

import numpy as np
from tvm import te, tirx

from tests.support.attention_graphs import (
    FLOAT,
    AttentionCase,
    Graph,
    Sizes,
    attend,
    bhsd,
    constant,
    lse_of,
    masked,
    scale_of,
    scores_of,
    softmaxed,
)
from tests.support.attention_masks import BOOLEAN, WHERE, where

LOG2E = 1.4426950408889634


def case(name, emit, reference=None, extra=lambda s: [], make=None, sizes=None):
    """`emit(g, s, q, k, v, *extra)`, `reference(s, logits, v, *extra)`: the plain one if None."""

    def expected(s):
        def run(q, k, v, *more):
            logits = scores_of(q, k, scale_of(s))
            return [attend(logits, v)] if reference is None else reference(s, logits, v, *more)

        return run

    return AttentionCase(
        name,
        lambda s: lambda bb, *xs: emit(Graph(bb), s, *xs),
        lambda s: [*bhsd(s), *extra(s)],
        expected,
        {i + 3: f for i, f in (make or {}).items()},
        sizes or Sizes(),
    )


def scaled_scores(g, s, q, k):
    return g.scaled(g.scores(q, k), scale_of(s))


def wide_scores(g, s, q, k):
    return g.scaled(g.matmul(q, g.permute_dims(k, (0, 1, 3, 2)), out_dtype=FLOAT), scale_of(s))


def parts(g, x):
    """Maximum, exponentials and their sum."""
    top = g.max(x, axis=-1, keepdims=True)
    e = g.exp(g.subtract(x, top))
    return top, e, g.sum(e, axis=-1, keepdims=True)


def scale_on_q(g, s, q, k, v):
    return softmaxed(g, g.scores(g.scaled(q, scale_of(s)), k), v)


def scale_on_k(g, s, q, k, v):
    return softmaxed(g, g.scores(q, g.scaled(k, scale_of(s))), v)


def root_on_both(g, s, q, k, v):
    root = scale_of(s) ** 0.5
    return softmaxed(g, g.scores(g.scaled(q, root), g.scaled(k, root)), v)


def divided(g, s, q, k, v):
    return softmaxed(g, g.divide(g.scores(q, k), constant(s.D**0.5, s.dtype)), v)


def wide_softmax(g, s, q, k, v):
    p = g.softmax(g.wide(scaled_scores(g, s, q, k)), axis=-1)
    return g.matmul(g.astype(p, s.dtype), v)


def half_softmax(g, s, q, k, v):
    _, e, total = parts(g, scaled_scores(g, s, q, k))
    return g.matmul(g.divide(e, total), v)


def all_wide(g, s, q, k, v):
    q, k, v = (g.wide(x) for x in (q, k, v))
    return g.astype(softmaxed(g, scaled_scores(g, s, q, k), v), s.dtype)


def behind(g, s, q, k, v):
    _, e, total = parts(g, wide_scores(g, s, q, k))
    o = g.matmul(g.astype(e, s.dtype), v, out_dtype=FLOAT)
    return g.astype(g.divide(o, total), s.dtype)


def reciprocal(g, s, q, k, v):
    _, e, total = parts(g, wide_scores(g, s, q, k))
    return g.matmul(g.astype(g.multiply(e, g.divide(constant(1, FLOAT), total)), s.dtype), v)


def no_maximum(g, s, q, k, v):
    e = g.exp(wide_scores(g, s, q, k))
    p = g.divide(e, g.sum(e, axis=-1, keepdims=True))
    return g.matmul(g.astype(p, s.dtype), v)


def base_two(g, s, q, k, v):
    """exp2((x - max x) * (scale * log2 e)), the maximum of bare scores; lse in base 2 as well."""
    x = g.matmul(q, g.permute_dims(k, (0, 1, 3, 2)), out_dtype=FLOAT)
    top = g.max(x, axis=-1, keepdims=True)
    factor = scale_of(s) * LOG2E

    def exp2(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *i: tirx.exp2(x(*i)), name="exp2")

    e = g.te(exp2, g.scaled(g.subtract(x, top), factor))
    total = g.sum(e, axis=-1, keepdims=True)
    o = g.divide(g.matmul(g.astype(e, s.dtype), v, out_dtype=FLOAT), total)

    def log2(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *i: tirx.log2(x(*i)), name="log2")

    return [o, g.add(g.scaled(top, factor), g.te(log2, total))]


def other_maximum(g, s, q, k, v):
    """The sum refers to a maximum spelled otherwise: scale * max(scores)."""
    x = g.matmul(q, g.permute_dims(k, (0, 1, 3, 2)), out_dtype=FLOAT)
    scaled = g.scaled(x, scale_of(s))
    bare = g.scaled(g.max(x, axis=-1, keepdims=True), scale_of(s))
    top = g.max(scaled, axis=-1, keepdims=True)
    total = g.sum(g.exp(g.subtract(scaled, bare)), axis=-1, keepdims=True)
    p = g.divide(g.exp(g.subtract(scaled, top)), total)
    return g.matmul(g.astype(p, s.dtype), v)


def through_lse(g, s, q, k, v):
    """exp(x - logsumexp(x)), the logsumexp an output."""
    x = wide_scores(g, s, q, k)
    top, _, total = parts(g, x)
    lse = g.add(top, g.log(total))
    p = g.exp(g.subtract(x, lse))
    return [g.matmul(g.astype(p, s.dtype), v), lse]


def log_softmax(g, s, q, k, v):
    p = g.exp(g.log_softmax(wide_scores(g, s, q, k), axis=-1))
    return g.matmul(g.astype(p, s.dtype), v)


def seen_guard(g, s, q, k, v, m):
    """As frontends write it: rows of which any key is seen, else 0."""
    out = softmaxed(g, where(g, m, scaled_scores(g, s, q, k), -math.inf), v)
    seen = g.astype(g.max(g.astype(m, "int8"), axis=-1, keepdims=True), "bool")
    return where(g, seen, out, 0.0)


def safe_softmax(g, s, q, k, v, m):
    """torch's _safe_softmax: 0 where all logits of a row are -inf."""
    x = where(g, m, wide_scores(g, s, q, k), -math.inf)
    finite = g.astype(g.logical_not(g.equal(x, constant(-math.inf, x))), "int8")
    hidden = g.logical_not(g.astype(g.max(finite, axis=-1, keepdims=True), "bool"))
    p = where(g, g.logical_not(hidden), g.softmax(x, axis=-1), 0.0)
    return g.matmul(g.astype(p, s.dtype), v)


def safe_additive(g, s, q, k, v, m):
    """The same of an additive mask that holds -inf."""
    x = g.add(scaled_scores(g, s, q, k), m)
    finite = g.astype(g.not_equal(m, constant(-math.inf, m)), "int8")
    seen = g.astype(g.max(finite, axis=-1, keepdims=True), "bool")
    return where(g, seen, softmaxed(g, x, v), 0.0)


def guarded_maximum(g, s, q, k, v, m):
    """Flash style: the maximum and the sum of an empty row are replaced."""
    x = where(g, m, wide_scores(g, s, q, k), -math.inf)
    top = g.max(x, axis=-1, keepdims=True)

    def at_least(bad, other):
        def guard(x: te.Tensor) -> te.Tensor:
            return te.compute(
                x.shape,
                lambda *i: tirx.Select(
                    x(*i) == tirx.const(bad, FLOAT), tirx.const(other, FLOAT), x(*i)
                ),
                name="guard",
            )

        return guard

    top = g.te(at_least(-math.inf, 0.0), top)
    e = g.exp(g.subtract(x, top))
    total = g.te(at_least(0.0, 1.0), g.sum(e, axis=-1, keepdims=True))
    return g.divide(g.matmul(g.astype(e, s.dtype), v, out_dtype=FLOAT), total)


def zeroed(g, s, q, k, v, m):
    """Weights of hidden keys are set to 0 before and after the sum, and after the division."""
    x = wide_scores(g, s, q, k)
    top = g.max(where(g, m, x, -math.inf), axis=-1, keepdims=True)
    e = where(g, m, g.exp(g.subtract(x, top)), 0.0)
    p = g.divide(e, g.sum(e, axis=-1, keepdims=True))
    return g.matmul(g.astype(where(g, m, p, 0.0), s.dtype), v)


def multiplied(g, s, q, k, v, m):
    """exp(x) * mask over its sum."""
    e = g.multiply(g.exp(wide_scores(g, s, q, k)), g.astype(m, FLOAT))
    p = g.divide(e, g.sum(e, axis=-1, keepdims=True))
    return g.matmul(g.astype(p, s.dtype), v)


def zero_after_mask(g, s, q, k, v, m):
    p = g.softmax(where(g, m, wide_scores(g, s, q, k), -math.inf), axis=-1)
    return g.matmul(g.astype(where(g, m, p, 0.0), s.dtype), v)


def row_gate(g, s, q, k, v, gate):
    """A factor of each row on the weights."""
    p = g.multiply(g.softmax(scaled_scores(g, s, q, k), axis=-1), gate)
    return g.matmul(p, v)


def masked_of(s, x, v, m):
    return [attend(masked(x, m), v)]


def some_rows(rng, s):
    """Rows 0 and 2 of the first batch see no key."""
    seen = rng.random((s.B, 1, s.M, s.N)) < 0.6
    seen[0, :, [0, 2]] = False
    return seen


def with_lse(s, x, v):
    return [attend(x, v), lse_of(x)[..., None]]


GUARDED = {"reference": masked_of, "extra": WHERE, "make": {0: some_rows}}
SEEN = {"reference": masked_of, "extra": WHERE, "make": BOOLEAN}

SOFTMAXES = [
    case("scale on q", scale_on_q),
    case("scale on k", scale_on_k),
    case("roots on q and k", root_on_both),
    case("division by sqrt(D)", divided),
    case("float32 softmax of half scores", wide_softmax),
    case("half softmax", half_softmax),
    case("all in float32, cast at the end", all_wide),
    case("division behind the product", behind),
    case("reciprocal of the sum", reciprocal),
    case("no maximum", no_maximum),
    case(
        "base 2, with logsumexp",
        base_two,
        lambda s, x, v: [attend(x, v), lse_of(x)[..., None] * LOG2E],
    ),
    case("maxima spelled differently", other_maximum),
    case("through the logsumexp", through_lse, with_lse),
    case("exp of log_softmax", log_softmax),
    case("rows that see no key are 0", seen_guard, **GUARDED),
    case("safe softmax", safe_softmax, **GUARDED),
    case(
        "safe softmax, added mask",
        safe_additive,
        lambda s, x, v, m: [attend(x + m, v)],
        lambda s: [((s.B, 1, s.M, s.N), s.dtype)],
        {0: lambda rng, s: np.where(some_rows(rng, s), 0.0, -np.inf)},
    ),
    case("guarded maximum and sum", guarded_maximum, **GUARDED),
    case("weights zeroed", zeroed, **SEEN),
    case("exponentials times a mask", multiplied, **SEEN),
    case("weights zeroed behind the softmax", zero_after_mask, **SEEN),
    case(
        "gate of each row",
        row_gate,
        lambda s, x, v, gate: [attend(x, v) * gate],
        lambda s: [((s.H, s.M, 1), s.dtype)],
    ),
]
