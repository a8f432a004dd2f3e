"""Attention whose inputs and outputs lie in memory in various ways."""

import numpy as np

from tests.support.attention_graphs import (
    FLOAT,
    AttentionCase,
    Graph,
    Sizes,
    attend,
    bhsd,
    joined,
    lse_of,
    packed,
    scale_of,
    scores_of,
    softmaxed,
    split,
)


def case(name, emit, shapes, reference, make=None, sizes=None):
    """`emit(g, s, *vars)` and `reference(s, *arrays)`."""
    return AttentionCase(
        name,
        lambda s: lambda bb, *xs: emit(Graph(bb), s, *xs),
        shapes,
        lambda s: lambda *xs: reference(s, *xs),
        make or {},
        sizes or Sizes(),
    )


def plain(g, s, q, k, v):
    return softmaxed(g, g.scaled(g.scores(q, k), scale_of(s)), v)


def plain_of(s, q, k, v):
    return [attend(scores_of(q, k, scale_of(s)), v)]


def of_packed(s, q, k, v):
    return plain_of(s, *(split(x, s.H) for x in (q, k, v)))[0]


def permuted(g, s, q, k, v):
    return g.merged(plain(g, s, *(g.heads(x, s.H) for x in (q, k, v))))


def heads_inside(g, s, q, k, v):
    q, k, v = (g.permute_dims(x, (0, 2, 1, 3)) for x in (q, k, v))
    return g.permute_dims(plain(g, s, q, k, v), (0, 2, 1, 3))


def swapped(x):
    return x.transpose(0, 2, 1, 3)


def packed_qkv(g, s, qkv):
    q, k, v = (
        g.heads(g.strided_slice(qkv, [2], [i * s.H * s.D], [(i + 1) * s.H * s.D]), s.H)
        for i in range(3)
    )
    return g.merged(plain(g, s, q, k, v))


def stacked_qkv(g, s, qkv):
    whole = g.reshape(qkv, (s.B, s.M, 3, s.H, s.D))
    parts = (g.strided_slice(whole, [2], [i], [i + 1]) for i in range(3))
    q, k, v = (g.permute_dims(g.squeeze(x, [2]), (0, 2, 1, 3)) for x in parts)
    return g.merged(plain(g, s, q, k, v))


def packed_reference(s, qkv):
    return [joined(plain_of(s, *(split(x, s.H) for x in np.split(qkv, 3, axis=2)))[0])]


def repeated(g, s, q, k, v):
    return plain(g, s, q, *(g.repeat(x, s.H // s.G, axis=1) for x in (k, v)))


def expanded(g, s, q, k, v):
    def widen(x):
        _, _, n, d = x.ty.shape
        x = g.broadcast_to(g.expand_dims(x, 2), (s.B, s.G, s.H // s.G, n, d))
        return g.reshape(x, (s.B, s.H, n, d))

    return plain(g, s, q, widen(k), widen(v))


def grouped(g, s, q, k, v):
    q = g.reshape(q, (s.B, s.G, s.H // s.G, s.M, s.D))
    out = plain(g, s, q, g.expand_dims(k, 2), g.expand_dims(v, 2))
    return g.reshape(out, (s.B, s.H, s.M, s.E))


def repeated_of(s, q, k, v):
    return plain_of(s, q, *(np.repeat(x, s.H // s.G, 1) for x in (k, v)))


def cross_with_lse(g, s, q, k, v):
    """Flash style: float32 scores, division behind the product, and the logsumexp."""
    q, k, v = (g.heads(x, s.H) for x in (q, k, v))
    kt = g.permute_dims(k, (0, 1, 3, 2))
    scores = g.scaled(g.matmul(q, kt, out_dtype=FLOAT), scale_of(s))
    top = g.max(scores, axis=-1, keepdims=True)
    e = g.exp(g.subtract(scores, top))
    total = g.sum(e, axis=-1, keepdims=True)
    o = g.divide(g.matmul(g.astype(e, s.dtype), v, out_dtype=FLOAT), total)
    lse = g.squeeze(g.add(top, g.log(total)), axis=[-1])
    return [g.merged(g.astype(o, s.dtype)), lse]


def cross_with_lse_of(s, q, k, v):
    q, k, v = (split(x, s.H) for x in (q, k, v))
    logits = scores_of(q, k, scale_of(s))
    return [joined(attend(logits, v)), lse_of(logits)]


def flat_batch(g, s, q, k, v):
    """torch.bmm over [B * H, S, D], as older models have it."""
    q, k, v = (
        g.reshape(g.heads(x, s.H), (s.B * s.H, n, w))
        for x, n, w in ((q, s.M, s.D), (k, s.N, s.D), (v, s.N, s.E))
    )
    out = g.reshape(plain(g, s, q, k, v), (s.B, s.H, s.M, s.E))
    return g.merged(out)


def with_epilogue(g, s, q, k, v, gate, residual):
    """(sigmoid(gate) * attention * 0.5 + residual) in float32, heads merged."""
    out = g.multiply(g.merged(plain(g, s, q, k, v)), g.sigmoid(gate))
    return g.astype(g.add(g.scaled(out, 0.5), residual), FLOAT)


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    turned = np.concatenate([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


def with_rotation(g, s, q, k, v, cos, sin):
    def rotate(x):
        low = g.strided_slice(x, [3], [0], [s.D // 2])
        high = g.strided_slice(x, [3], [s.D // 2], [s.D])
        turned = g.concat([g.negative(high), low], axis=-1)
        return g.add(g.multiply(x, cos), g.multiply(turned, sin))

    return plain(g, s, rotate(q), rotate(k), v)


def two_results(g, s, q, k, v):
    out = plain(g, s, q, k, v)
    return [out, g.merged(g.nn_relu(out))]


def value_scale(g, s, q, k, v, scale):
    return plain(g, s, q, k, g.multiply(g.scaled(v, 0.5), scale))


def matrices(s: Sizes):
    return [((s.M, s.D), s.dtype), ((s.N, s.D), s.dtype), ((s.N, s.E), s.dtype)]


def swapped_shapes(s: Sizes):
    return [((b, n, h, d), dtype) for (b, h, n, d), dtype in bhsd(s)]


def qkv_shape(s: Sizes):
    return [((s.B, s.M, 3 * s.H * s.D), s.dtype)]


def _epilogue_of(s, q, k, v, gate, residual):
    out = joined(plain_of(s, q, k, v)[0])
    return [out / (1 + np.exp(-gate)) * 0.5 + residual]


def _two_of(s, *qkv):
    out = plain_of(s, *qkv)[0]
    return [out, joined(np.maximum(out, 0))]


SELF = Sizes(M=6, N=6)

LAYOUTS = [
    case("[B, H, S, D]", plain, bhsd, plain_of),
    case(
        "[B, S, H * D] with head permutes",
        permuted,
        packed,
        lambda s, *qkv: [joined(of_packed(s, *qkv))],
    ),
    case(
        "cross attention with logsumexp",
        cross_with_lse,
        packed,
        cross_with_lse_of,
    ),
    case("grouped heads by repeat", repeated, lambda s: bhsd(s, s.G), repeated_of),
    case("grouped heads by expand", expanded, lambda s: bhsd(s, s.G), repeated_of),
    case("grouped heads as an axis", grouped, lambda s: bhsd(s, s.G), repeated_of),
    case("keys shared by all heads", plain, lambda s: bhsd(s, 1), plain_of),
    case(
        "[B, S, H, D]",
        heads_inside,
        swapped_shapes,
        lambda s, *qkv: [swapped(plain_of(s, *map(swapped, qkv))[0])],
    ),
    case("packed QKV", packed_qkv, qkv_shape, packed_reference, sizes=SELF),
    case("packed QKV by axis", stacked_qkv, qkv_shape, packed_reference, sizes=SELF),
    case("heads in the batch", flat_batch, packed, lambda s, *qkv: [joined(of_packed(s, *qkv))]),
    case("one query", plain, bhsd, plain_of, sizes=Sizes(M=1)),
    case("one query, grouped", grouped, lambda s: bhsd(s, s.G), repeated_of, sizes=Sizes(M=1)),
    case("batch 1, one head", plain, bhsd, plain_of, sizes=Sizes(B=1, H=1)),
    case("matrices", plain, matrices, plain_of),
    case("wide values", plain, bhsd, plain_of, sizes=Sizes(E=24)),
    case(
        "bfloat16",
        permuted,
        packed,
        lambda s, *qkv: [joined(of_packed(s, *qkv))],
        sizes=Sizes(dtype="bfloat16"),
    ),
    case("float32", plain, bhsd, plain_of, sizes=Sizes(dtype=FLOAT)),
    case(
        "gated, scaled, residual, float32",
        with_epilogue,
        lambda s: [*bhsd(s), *[((s.B, s.M, s.H * s.E), s.dtype)] * 2],
        _epilogue_of,
    ),
    case(
        "rotated q and k",
        with_rotation,
        lambda s: [*bhsd(s), *[((s.N, s.D), s.dtype)] * 2],
        lambda s, q, k, v, cos, sin: plain_of(s, rotated(q, cos, sin), rotated(k, cos, sin), v),
        sizes=SELF,
    ),
    case("two results", two_results, bhsd, _two_of),
    case(
        "scaled values",
        value_scale,
        lambda s: [*bhsd(s), ((s.E,), s.dtype)],
        lambda s, q, k, v, scale: plain_of(s, q, k, v * 0.5 * scale),
    ),
]
