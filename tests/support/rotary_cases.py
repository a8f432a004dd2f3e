"""Matrix products with rotary embeddings behind them, in the ways that models spell them."""

import numpy as np
from tvm import relax
from tvm.relax import op

from .gemm_cases import HALF
from .kernel_cases import Case, rope

# ---- graphs: x [.., heads, D] -> rotated, with tables of D columns or of D / 2


def halves(bb, x):
    """The first and the last half of the columns."""
    return [bb.emit(part) for part in bb.emit(op.split(x, 2, axis=-1))]


def every_second(bb, x):
    """The even and the odd columns, by strides."""
    axis = len(x.ty.shape) - 1
    size = int(x.ty.shape[axis])
    return [bb.emit(op.strided_slice(x, [axis], [i], [size], [2])) for i in (0, 1)]


def by_reshape(bb, x):
    """The even and the odd columns, by a reshape to pairs."""
    *lead, size = x.ty.shape
    pairs = bb.emit(op.reshape(x, (*lead, int(size) // 2, 2)))
    return [bb.emit(op.squeeze(part, -1)) for part in halves(bb, pairs)]


def turn(bb, pair, cos, sin):
    """Both columns of all pairs, turned."""
    a, b = pair

    def times(x, y):
        return bb.emit(op.multiply(x, y))

    return [
        bb.emit(op.subtract(times(a, cos), times(b, sin))),
        bb.emit(op.add(times(b, cos), times(a, sin))),
    ]


def side_by_side(bb, x, pair):
    """The columns of pairs next to each other."""
    return bb.emit(op.reshape(bb.emit(op.stack(pair, axis=-1)), x.ty.shape))


def half_rotation(bb, x, cos, sin):
    return bb.emit(rope(bb, x, cos, sin))


def half_rotation_joined(bb, x, cos, sin):
    return bb.emit(op.concat(turn(bb, halves(bb, x), cos, sin), axis=-1))


def interleaved(bb, x, cos, sin):
    return side_by_side(bb, x, turn(bb, every_second(bb, x), cos, sin))


def interleaved_by_reshape(bb, x, cos, sin):
    return side_by_side(bb, x, turn(bb, by_reshape(bb, x), cos, sin))


def interleaved_whole(bb, x, cos, sin):
    a, b = every_second(bb, x)
    turned = side_by_side(bb, x, [bb.emit(op.negative(b)), a])
    products = [bb.emit(op.multiply(*pair)) for pair in ((x, cos), (turned, sin))]
    return bb.emit(op.add(*products))


def halves_to_neighbours(bb, x, cos, sin):
    return side_by_side(bb, x, turn(bb, halves(bb, x), cos, sin))


def first_columns(count):
    """Only the first `count` columns of a head turn."""

    def emit(bb, x, cos, sin):
        axis = len(x.ty.shape) - 1
        size = int(x.ty.shape[axis])
        first, rest = (
            bb.emit(op.strided_slice(x, [axis], [a], [b])) for a, b in ((0, count), (count, size))
        )
        return bb.emit(op.concat([half_rotation(bb, first, cos, sin), rest], axis=-1))

    return emit


# ---- references: columns of pairs (a, b) by their places


def rotated(x, cos, sin, first, second, targets=None):
    """x with columns `first` and `second` turned, put at `targets`; tables may be of D columns."""
    a, b, y = x[..., first], x[..., second], x.copy()
    wide = cos.shape[-1] == 2 * len(first)
    c, s = ([t[..., first], t[..., second]] if wide else [t, t] for t in (cos, sin))
    to = targets or (first, second)
    y[..., to[0]], y[..., to[1]] = a * c[0] - b * s[0], b * c[1] + a * s[1]
    return y


def of_halves(x, cos, sin):
    d = np.arange(x.shape[-1] // 2)
    return rotated(x, cos, sin, d, d + len(d))


def of_neighbours(x, cos, sin):
    d = np.arange(0, x.shape[-1], 2)
    return rotated(x, cos, sin, d, d + 1)


def of_halves_to_neighbours(x, cos, sin):
    d = np.arange(x.shape[-1] // 2)
    return rotated(x, cos, sin, d, d + len(d), (2 * d, 2 * d + 1))


def of_first(count):
    d = np.arange(count // 2)
    return lambda x, cos, sin: rotated(x, cos, sin, d, d + len(d))


WAYS = {  # graph, reference, columns of the tables for a head of D
    "halves": (half_rotation, of_halves, lambda d: d),
    "halves, joined": (half_rotation_joined, of_halves, lambda d: d // 2),
    "interleaved": (interleaved, of_neighbours, lambda d: d // 2),
    "interleaved, by reshape": (interleaved_by_reshape, of_neighbours, lambda d: d // 2),
    "interleaved, whole": (interleaved_whole, of_neighbours, lambda d: d),
    "halves to neighbours": (halves_to_neighbours, of_halves_to_neighbours, lambda d: d // 2),
    "first columns": (first_columns(32), of_first(32), lambda d: 32),
}


def rotary_case(
    way="halves",
    d=64,
    heads=(3,),
    plain=(),
    rows=(2, 40),
    k=128,
    dtype=HALF,
    tables=None,
    linear=False,
    early=False,
    axes=(0, 2, 1, 3),
    statistic=False,
):
    """Products of one x, of `heads` heads of `d` columns with an embedding, and of `plain` ones
    without.

    `tables` is the dtype of the tables, to which the product is widened; `linear` has weights
    [columns, terms]; `early` permutes to heads before the embedding; `statistic` multiplies with a
    factor of each row in front of it.
    """
    graph, reference, width = WAYS[way]
    b, s = rows
    counts = (*heads, *plain)
    table = (1, 1, s, width(d)) if early else (1, s, 1, width(d))

    def emit(bb, x, cos, sin, *others):
        weights, factors = others[: len(counts)], others[len(counts) :]
        found = []
        for i, (w, n) in enumerate(zip(weights, counts, strict=True)):
            w = bb.emit(op.permute_dims(w, (1, 0))) if linear else w
            t = bb.emit(op.matmul(x, w, out_dtype="float32" if statistic else None))
            if statistic:
                t = bb.emit(op.astype(bb.emit(op.multiply(t, factors[0])), dtype))
            t = bb.emit(op.reshape(t, (b, s, n, d)))
            if early:
                t = bb.emit(op.permute_dims(t, axes))
            if i < len(heads):
                t = bb.emit(op.astype(t, tables)) if tables else t
                t = graph(bb, t, cos, sin)
                t = bb.emit(op.astype(t, dtype)) if tables else t
            found.append(t if early else bb.emit(op.permute_dims(t, axes)))
        return relax.Tuple(found) if len(found) > 1 else found[0]

    def expected(x, cos, sin, *others):
        found = []
        for i, n in enumerate(counts):
            t = x @ (others[i].T if linear else others[i])
            t = t * others[-1] if statistic else t
            t = t.reshape(b, s, n, d)
            t = t.transpose(axes) if early else t
            t = reference(t, cos, sin) if i < len(heads) else t
            found.append(t if early else t.transpose(axes))
        return found

    shapes = [((b, s, k), dtype), *[(table, tables or dtype)] * 2]
    shapes += [((n * d, k) if linear else (k, n * d), dtype) for n in counts]
    shapes += [((b, s, 1), "float32")] if statistic else []
    name = f"{way}, {heads} and {plain} heads of {d}"
    return Case(name, emit, tuple(shapes), expected)
