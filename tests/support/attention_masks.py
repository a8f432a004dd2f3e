"""Attention with masks and other functions of the scores."""

import math
from dataclasses import replace

import numpy as np
from tvm import te, tirx

from tests.support.attention_graphs import (
    FLOAT,
    AttentionCase,
    Graph,
    Sizes,
    attend,
    bhsd,
    causal,
    constant,
    masked,
    scale_of,
    scores_of,
    softmaxed,
)

CAP, WINDOW = 4.0, 3


def case(name, emit, reference, extra=lambda s: [], make=None, sizes=None):
    """`emit(g, s, scores, *extra)` makes logits of scaled scores, and `reference(s, scores, ...)`;
    inputs of `make` count from the first extra one.
    """

    def graph(s):
        def build(bb, q, k, v, *more):
            g = Graph(bb)
            scores = g.scaled(g.scores(q, k), scale_of(s))
            return softmaxed(g, emit(g, s, scores, *more), v)

        return build

    def expected(s):
        return lambda q, k, v, *more: [attend(reference(s, scores_of(q, k, scale_of(s)), *more), v)]

    made = {i + 3: f for i, f in (make or {}).items()}
    return AttentionCase(
        name, graph, lambda s: [*bhsd(s), *extra(s)], expected, made, sizes or Sizes()
    )


def hidden(value=None):
    """Scores with `value` (the least number of their dtype) where `visible(i, j)` does not hold."""

    def make(visible):
        def emit(g, s, x):
            def hide(x: te.Tensor) -> te.Tensor:
                low = tirx.min_value(x.dtype) if value is None else tirx.const(value, x.dtype)
                at = replace(s, M=x.shape[2], N=x.shape[3])  # symbols of this PrimFunc
                return te.compute(
                    x.shape,
                    lambda b, h, i, j: tirx.if_then_else(visible(at, i, j), x(b, h, i, j), low),
                    name="hide",
                )

            return g.te(hide, x)

        return emit

    return make


def ones(g, s):
    return g.compute((s.M, s.N), lambda i, j: tirx.const(1, s.dtype))


def where(g, condition, x, value):
    """`op.where` with the constant in the PrimFunc."""

    def select(condition: te.Tensor, x: te.Tensor) -> te.Tensor:
        def at(*index):
            lead = len(x.shape) - len(condition.shape)
            place = [
                0 if int_of(n) == 1 else i
                for i, n in zip(index[lead:], condition.shape, strict=True)
            ]
            return tirx.Select(condition(*place), x(*index), tirx.const(value, x.dtype))

        return te.compute(x.shape, at, name="where")

    return g.te(select, condition, x)


def int_of(n):
    return int(n) if isinstance(n, tirx.IntImm) else None


def by_tril(g, s, x):
    return where(g, g.astype(g.tril(ones(g, s)), "bool"), x, -math.inf)


def by_tril_added(g, s, x):
    """(1 - tril(1)) * -30000: the largest that a float16 mask can hold, nearly."""
    hide = g.subtract(ones(g, s), g.tril(ones(g, s)))
    return g.add(x, g.scaled(hide, -65504.0))


def by_arange(g, s, x):
    """Positions as tensors, compared as models do: ``arange(n)[None] > arange(m)[:, None]``."""
    keys = g.compute((1, s.N), lambda _, j: j)
    queries = g.compute((s.M, 1), lambda i, _: i)
    return where(g, g.logical_not(g.greater(keys, queries)), x, -math.inf)


def by_documents(g, s, x, rows, columns):
    same = g.equal(g.expand_dims(rows, 2), g.expand_dims(columns, 1))
    return where(g, g.expand_dims(same, 1), x, -math.inf)


def documents(rng, s, n):
    ids = np.sort(rng.integers(0, 2, (s.B, n)), axis=1)
    ids[:, 0] = 0
    return ids


def by_keep(g, s, x, keep):
    """(1 - keep) * -10000, keep 0 or 1 for each key of a batch."""
    hide = g.subtract(constant(1, s.dtype), keep)
    return g.add(x, g.scaled(g.expand_dims(hide, [1, 2]), -10000.0))


def keep_some(rng, s):
    keep = rng.random((s.B, s.N)) < 0.6
    keep[:, 0] = True
    return keep


def visible_some(shape):
    def make(rng, s):
        seen = rng.random(shape(s)) < 0.6
        seen[..., 0] = True
        return seen

    return make


def softcap(g, s, x):
    return g.scaled(g.tanh(g.scaled(x, 1 / CAP)), CAP)


def alibi(g, s, x, slopes):
    distance = g.compute((s.M, s.N), lambda i, j: tirx.Cast(s.dtype, j - i))
    return g.add(x, g.multiply(g.reshape(slopes, (s.H, 1, 1)), distance))


def alibi_of_head(g, s, x):
    """Slopes 2^(-8 (h + 1) / H), computed."""

    def bias(h, i, j):
        exponent = tirx.Cast(FLOAT, h + 1) * tirx.const(-8.0 / s.H, FLOAT)
        return tirx.Cast(s.dtype, tirx.exp2(exponent) * tirx.Cast(FLOAT, j - i))

    return g.add(x, g.compute((s.H, s.M, s.N), bias))


def distance_of(s):
    return np.arange(s.N)[None] - np.arange(s.M)[:, None]


def window_of(s, x):
    return masked(x, causal(s.M, s.N) & ~causal(s.M, s.N, -WINDOW))


def prefix(g, s, x, length):
    """Keys of a prefix, or not after the query."""
    keys = g.compute((1, 1, 1, s.N), lambda a, b, c, j: tirx.Cast("int32", j))
    queries = g.compute((1, 1, s.M, 1), lambda a, b, i, c: tirx.Cast("int32", i))
    inside = g.less(keys, g.reshape(length, (s.B, 1, 1, 1)))
    return where(g, g.logical_or(inside, g.less_equal(keys, queries)), x, -math.inf)


def prefix_of(s, x, length):
    inside = np.arange(s.N) < length[:, None, None, None]
    return masked(x, inside | causal(s.M, s.N))


def mask_shape(*names, dtype=None):
    """A shape of the sizes named, or 1; of the case's dtype, or another."""

    def shape(s):
        return [(tuple(n if n == 1 else getattr(s, n) for n in names), dtype or s.dtype)]

    return shape


SEEN = ("B", 1, "M", "N")
BOOLEAN = {0: visible_some(lambda s: (s.B, 1, s.M, s.N))}
WHERE = mask_shape(*SEEN, dtype="bool")
LONG = Sizes(M=6, N=9)

MASKS = [
    case(
        "causal by index",
        hidden()(lambda s, i, j: j <= i),
        lambda s, x: masked(x, causal(s.M, s.N)),
    ),
    case(
        "causal, aligned at the end",
        hidden(-math.inf)(lambda s, i, j: j <= i + (s.N - s.M)),
        lambda s, x: masked(x, causal(s.M, s.N, s.N - s.M)),
        sizes=LONG,
    ),
    case(
        "sliding window",
        hidden(-math.inf)(lambda s, i, j: tirx.And(j <= i, i - j < WINDOW)),
        window_of,
        sizes=LONG,
    ),
    case(
        "window on both sides",
        hidden(-math.inf)(lambda s, i, j: tirx.abs(i - j) < WINDOW),
        lambda s, x: masked(x, np.abs(distance_of(s)) < WINDOW),
        sizes=LONG,
    ),
    case("causal by tril", by_tril, lambda s, x: masked(x, causal(s.M, s.N))),
    case("causal by an added tril", by_tril_added, lambda s, x: masked(x, causal(s.M, s.N))),
    case("causal by arange", by_arange, lambda s, x: masked(x, causal(s.M, s.N))),
    *(
        case(f"added mask {names}", lambda g, s, x, m: g.add(x, m), lambda s, x, m: x + m, shape)
        for names, shape in (
            ("[B, 1, M, N]", mask_shape("B", 1, "M", "N")),
            ("[B, 1, 1, N]", mask_shape("B", 1, 1, "N")),
            ("[H, M, N]", mask_shape("H", "M", "N")),
            ("[M, N]", mask_shape("M", "N")),
            ("[H, M, 1]", mask_shape("H", "M", 1)),
        )
    ),
    case(
        "boolean mask, -inf",
        lambda g, s, x, m: where(g, m, x, -math.inf),
        lambda s, x, m: masked(x, m),
        WHERE,
        BOOLEAN,
    ),
    case(
        "boolean mask, least float16",
        lambda g, s, x, m: where(g, m, x, -65504.0),
        lambda s, x, m: masked(x, m),
        WHERE,
        BOOLEAN,
    ),
    case(
        "mask of hidden keys",
        lambda g, s, x, m: where(g, g.logical_not(m), x, -math.inf),
        lambda s, x, m: masked(x, ~m),
        mask_shape("B", 1, 1, "N", dtype="bool"),
        {0: lambda rng, s: ~keep_some(rng, s)[:, None, None]},
    ),
    case(
        "boolean mask made additive",
        lambda g, s, x, m: g.add(
            x, where(g, m, g.compute((s.B, 1, s.M, s.N), lambda *_: tirx.const(0, s.dtype)), -1e30)
        ),
        lambda s, x, m: masked(x, m),
        WHERE,
        BOOLEAN,
        Sizes(dtype=FLOAT),
    ),
    case(
        "boolean mask times a large number",
        lambda g, s, x, m: g.add(
            x,
            g.scaled(g.subtract(constant(1, FLOAT), g.astype(m, FLOAT)), -1e9),
        ),
        lambda s, x, m: masked(x, m),
        WHERE,
        BOOLEAN,
        Sizes(dtype=FLOAT),
    ),
    case(
        "(1 - keep) * -10000",
        by_keep,
        lambda s, x, m: x + (1 - m[:, None, None]) * -10000.0,
        mask_shape("B", "N"),
        {0: keep_some},
    ),
    case(
        "causal and added mask",
        lambda g, s, x, m: g.add(hidden()(lambda s, i, j: j <= i)(g, s, x), m),
        lambda s, x, m: masked(x + m, causal(s.M, s.N)),
        mask_shape("B", 1, 1, "N"),
    ),
    case(
        "document ids",
        by_documents,
        lambda s, x, a, b: masked(x, (a[:, :, None] == b[:, None])[:, None]),
        lambda s: [((s.B, s.M), "int32"), ((s.B, s.N), "int32")],
        {
            0: lambda rng, s: documents(rng, s, s.M),
            1: lambda rng, s: documents(rng, s, s.N),
        },
    ),
    case(
        "prefix",
        prefix,
        prefix_of,
        mask_shape("B", dtype="int32"),
        {0: lambda rng, s: rng.integers(0, s.N, s.B)},
    ),
    case("softcap", softcap, lambda s, x: np.tanh(x / CAP) * CAP),
    case(
        "softcap and causal",
        lambda g, s, x: hidden()(lambda s, i, j: j <= i)(g, s, softcap(g, s, x)),
        lambda s, x: masked(np.tanh(x / CAP) * CAP, causal(s.M, s.N)),
    ),
    case(
        "ALiBi with slopes",
        alibi,
        lambda s, x, slopes: x + slopes[:, None, None] * distance_of(s),
        mask_shape("H"),
    ),
    case(
        "ALiBi of the head",
        alibi_of_head,
        lambda s, x: (
            x + 2.0 ** (-8.0 / s.H * np.arange(1, s.H + 1))[:, None, None] * distance_of(s)
        ),
    ),
    case(
        "temperature of each head",
        lambda g, s, x, t: g.multiply(x, t),
        lambda s, x, t: x * t,
        mask_shape("H", 1, 1),
    ),
    case(
        "clamped at the least number",
        lambda g, s, x, m: g.maximum(
            where(g, m, x, -math.inf),
            constant(-65504.0, s.dtype),
        ),
        lambda s, x, m: masked(x, m),
        WHERE,
        BOOLEAN,
    ),
]
