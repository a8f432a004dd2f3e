"""Graphs for the tests of CPU kernels, each with its float64 reference; shapes odd on purpose."""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op

from .kernel_cases import Case, gelu_of, rms_of, softmax_of


def conv_of(x, w, stride=1, padding=0, dilation=1, groups=1):
    """Two-dimensional convolution, NCHW and OIHW."""
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    n, _, height, width = x.shape
    o, i, kh, kw = w.shape
    rows = (height - dilation * (kh - 1) - 1) // stride + 1
    columns = (width - dilation * (kw - 1) - 1) // stride + 1
    out = np.zeros((n, o, rows, columns))
    for g in range(groups):
        part = slice(g * o // groups, (g + 1) * o // groups)
        for r in range(kh):
            for s in range(kw):
                window = x[
                    :,
                    g * i : (g + 1) * i,
                    r * dilation : r * dilation + stride * rows : stride,
                    s * dilation : s * dilation + stride * columns : stride,
                ]
                out[:, part] += np.einsum("nchw,oc->nohw", window, w[part, :, r, s])
    return out


def pool_of(x, reduce, start, size=3, stride=2, padding=1):
    """Two-dimensional pooling with `start` around the image."""
    edge = ((0, 0), (0, 0), (padding, padding), (padding, padding))
    x = np.pad(x, edge, constant_values=start)
    view = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(2, 3))
    return reduce(view[:, :, ::stride, ::stride], axis=(-2, -1))


# ---- graphs that need more than an expression


def add_rms_norm(bb, x, r, g):
    s = bb.emit(op.add(x, r))
    return relax.Tuple([s, bb.emit(op.nn.rms_norm(s, g, axes=[-1], epsilon=1e-5))])


def row_and_column_sums(bb, x):
    e = bb.emit(op.exp(x))
    sums = [bb.emit(op.mean(e, axis=a)) for a in (0, 1)]
    return relax.Tuple([*sums, bb.emit(op.multiply(e, x))])


def attention(bb, q, k, v, m):
    s = bb.emit(op.matmul(q, bb.emit(op.permute_dims(k, [0, 1, 3, 2]))))
    s = bb.emit(op.add(bb.emit(op.multiply(s, relax.const(0.25, q.ty.dtype))), m))
    return op.matmul(bb.emit(op.nn.softmax(s, axis=-1)), v)


def attention_of(q, k, v, m):
    return [softmax_of(q @ k.swapaxes(-1, -2) * 0.25 + m) @ v]


def gate_up(bb, x, g, u):
    gate = bb.emit(op.nn.silu(bb.emit(op.matmul(x, g))))
    return op.multiply(gate, bb.emit(op.matmul(x, u)))


def gate_up_of(x, g, u):
    a = x @ g
    return [a / (1 + np.exp(-a)) * (x @ u)]


def product_and_statistics(bb, x, w):
    y = bb.emit(op.matmul(x, w))
    return relax.Tuple([y, bb.emit(op.mean(y, axis=0)), bb.emit(op.max(y, axis=1))])


def residual_block(bb, x, w, s, r):
    y = bb.emit(op.nn.conv2d(x, w, padding=(1, 1)))
    return op.nn.relu(bb.emit(op.add(bb.emit(op.multiply(y, s)), r)))


def scalar_chain(bb, a, b):
    for _ in range(3):
        a = bb.emit(op.exp(bb.emit(op.multiply(a, relax.const(-0.5, a.ty.dtype)))))
    return op.add(a, b)


def scalar_chain_of(a, b):
    for _ in range(3):
        a = np.exp(a * -0.5)
    return [a + b]


def three_parts(bb, x):
    parts = bb.emit(op.split(x, 3, axis=-1))
    a, b, c = (bb.emit(relax.TupleGetItem(parts, i)) for i in range(3))
    return op.add(bb.emit(op.multiply(a, b)), c)


def cross_entropy(bb, x, t):
    return op.nn.nll_loss(bb.emit(op.nn.log_softmax(x, axis=-1)), t, reduction="mean")


def cross_entropy_of(x, t):
    return [-np.log(softmax_of(x))[np.arange(len(t)), t].mean()]


def layer_norm(bb, x, g, b):
    return op.nn.layer_norm(x, g, b, axes=[-1])


def layer_norm_of(x, g, b):
    centred = x - x.mean(-1, keepdims=True)
    return [centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * g + b]


# ---- cases


def cases(dtype: str) -> list[Case]:
    """All cases in one dtype."""
    made: list[Case] = []

    def add(name, emit, shapes, reference, make=None):
        inputs = tuple(s if s and isinstance(s[-1], str) else (s, dtype) for s in shapes)
        made.append(Case(name, emit, inputs, reference, make or {}))

    def labels(shape, high):
        return lambda rng: rng.integers(0, high, shape)

    _pointwise(add, labels)
    _rows(add, labels)
    _columns(add)
    if dtype == "float32":
        _long_reductions(add)
    _products(add)
    _convolutions(add)
    return made


def _pointwise(add, labels):
    add("one_element", lambda bb, x: op.exp(x), [(1,)], lambda x: [np.exp(x)])
    add("no_axes", lambda bb, x: op.exp(x), [()], lambda x: [np.exp(x)])
    add("prime_length", lambda bb, x: op.nn.gelu(x), [(1009,)], lambda x: [gelu_of(x)])
    add("short_rows", lambda bb, x: op.nn.relu(x), [(65, 7, 3)], lambda x: [np.maximum(x, 0)])
    add("broadcast_chain", scalar_chain, [(37, 1), (37, 129)], scalar_chain_of)
    add(
        "permuted",
        lambda bb, x: op.tanh(bb.emit(op.permute_dims(x))),
        [(67, 33)],
        lambda x: [np.tanh(x.T)],
    )
    add(
        "heads",
        lambda bb, x: op.permute_dims(
            bb.emit(op.reshape(bb.emit(op.exp(x)), (3, 5, 4, 9))), [0, 2, 1, 3]
        ),
        [(3, 5, 36)],
        lambda x: [np.exp(x).reshape(3, 5, 4, 9).swapaxes(1, 2)],
    )
    add(
        "concat",
        lambda bb, x, y: op.concat([bb.emit(op.exp(x)), y], axis=1),
        [(13, 33), (13, 20)],
        lambda x, y: [np.concatenate([np.exp(x), y], 1)],
    )
    add(
        "pad",
        lambda bb, x: op.nn.pad(x, (1, 0, 2, 3)),
        [(7, 20)],
        lambda x: [np.pad(x, ((1, 0), (2, 3)))],
    )
    add(
        "split",
        three_parts,
        [(7, 99)],
        lambda x: [x[:, :33] * x[:, 33:66] + x[:, 66:]],
    )
    add(
        "take",
        lambda bb, x, i: op.take(bb.emit(op.exp(x)), i, axis=0),
        [(37, 50), ((5,), "int64")],
        lambda x, i: [np.exp(x)[i]],
        {1: labels((5,), 37)},
    )
    add(
        "triangle",
        lambda bb, x: op.tril(bb.emit(op.exp(x))),
        [(33, 41)],
        lambda x: [np.tril(np.exp(x))],
    )


def _rows(add, labels):
    add("softmax", lambda bb, x: op.nn.softmax(x), [(37, 101)], lambda x: [softmax_of(x)])
    add(
        "softmax_of_one_row", lambda bb, x: op.nn.softmax(x), [(1, 1009)], lambda x: [softmax_of(x)]
    )
    add(
        "softmax_of_columns_of_one",
        lambda bb, x: op.nn.softmax(x),
        [(5, 1)],
        lambda x: [softmax_of(x)],
    )
    add("layer_norm", layer_norm, [(37, 101), (101,), (101,)], layer_norm_of)
    add(
        "add_rms_norm",
        add_rms_norm,
        [(3, 11, 65), (3, 11, 65), (65,)],
        lambda x, r, g: [x + r, rms_of(x + r, g)],
    )
    add(
        "cross_entropy",
        cross_entropy,
        [(37, 101), ((37,), "int64")],
        cross_entropy_of,
        {1: labels((37,), 101)},
    )
    add(
        "argmax",
        lambda bb, x: op.argmax(x, axis=-1),
        [(37, 101)],
        lambda x: [x.argmax(-1)],
    )


def _columns(add):
    add(
        "softmax_of_middle_axis",
        lambda bb, x: op.nn.softmax(x, axis=1),
        [(3, 37, 19)],
        lambda x: [softmax_of(x.swapaxes(1, 2)).swapaxes(1, 2)],
    )
    add(
        "row_and_column_means",
        row_and_column_sums,
        [(37, 101)],
        lambda x: [np.exp(x).mean(0), np.exp(x).mean(1), np.exp(x) * x],
    )
    add(
        "centred_columns",
        lambda bb, x: op.subtract(x, bb.emit(op.mean(x, axis=0, keepdims=True))),
        [(37, 300)],
        lambda x: [x - x.mean(0)],
    )
    add(
        "argmax_of_columns", lambda bb, x: op.argmax(x, axis=0), [(37, 53)], lambda x: [x.argmax(0)]
    )
    add(
        "variance",
        lambda bb, x: op.variance(x, axis=[0, 2]),
        [(3, 7, 20)],
        lambda x: [x.var((0, 2))],
    )


def _long_reductions(add):
    add(
        "mean_of_all_squares",
        lambda bb, x: op.mean(bb.emit(op.multiply(x, x))),
        [(7, 64, 411)],
        lambda x: [(x * x).mean()],
    )
    add(
        "mean_of_a_prime_number_of_rows",
        lambda bb, x: op.mean(bb.emit(op.multiply(x, x))),
        [(211, 1009)],
        lambda x: [(x * x).mean()],
    )
    add(
        "few_means_of_the_last_axes",
        lambda bb, x: op.multiply(bb.emit(op.mean(x, [1, 2])), relax.const(2.0, x.ty.dtype)),
        [(3, 5, 40_009)],
        lambda x: [2 * x.mean((1, 2))],
    )
    add(
        "largest_of_a_prime_number",
        lambda bb, x: op.max(x),
        [(1_000_003,)],
        lambda x: [x.max()],
    )


def _products(add):
    def transposed(bb, x, w):
        return op.matmul(x, bb.emit(op.permute_dims(w)))

    def transposed_left(bb, x, w):
        return op.matmul(bb.emit(op.permute_dims(x)), w)

    def bias_gelu(bb, x, w, b):
        return op.nn.gelu(bb.emit(op.add(bb.emit(op.matmul(x, w)), b)))

    def after_gelu(bb, x, w):
        return op.matmul(bb.emit(op.nn.gelu(x)), w)

    def two_products(bb, x, a, b):
        return op.matmul(bb.emit(op.nn.relu(bb.emit(op.matmul(x, a)))), b)

    def product(bb, x, w):
        return op.matmul(x, w)

    def normed(bb, x, w):
        return op.nn.softmax(bb.emit(op.matmul(x, w)))

    def plain(x, w):
        return [x @ w]

    add("matmul", product, [(37, 41), (41, 53)], plain)
    add("matmul_of_whole_tiles", product, [(64, 32), (32, 64)], plain)
    add("matmul_one_off", product, [(65, 33), (33, 65)], plain)
    add("matmul_many_terms", product, [(9, 700), (700, 40)], plain)
    add("matmul_one_row", product, [(1, 41), (41, 53)], plain)
    add("matmul_one_column", product, [(37, 41), (41, 1)], plain)
    add("matmul_transposed", transposed, [(37, 41), (53, 41)], lambda x, w: [x @ w.T])
    add("matmul_transposed_left", transposed_left, [(41, 37), (41, 53)], lambda x, w: [x.T @ w])
    add("matmul_whole_columns", product, [(37, 41), (41, 64)], plain)
    add("matmul_in_tasks", product, [(203, 130), (130, 64)], plain)
    add("matmul_packed_ahead", product, [(301, 150), (150, 77)], plain)
    add("matmul_turned_ahead", transposed, [(301, 150), (77, 150)], lambda x, w: [x @ w.T])
    add("matmul_batched", product, [(3, 17, 9), (3, 9, 33)], plain)
    add("matmul_shared_right", product, [(3, 2, 17, 9), (2, 9, 33)], plain)
    add(
        "matmul_bias_gelu",
        bias_gelu,
        [(33, 20), (20, 45), (45,)],
        lambda x, w, b: [gelu_of(x @ w + b)],
    )
    add("matmul_after_gelu", after_gelu, [(130, 40), (40, 70)], lambda x, w: [gelu_of(x) @ w])
    add("matmul_softmax", normed, [(130, 40), (40, 70)], lambda x, w: [softmax_of(x @ w)])
    add("gate_up", gate_up, [(33, 20), (20, 45), (20, 45)], gate_up_of)
    add(
        "two_products",
        two_products,
        [(130, 20), (20, 45), (45, 37)],
        lambda x, a, b: [np.maximum(x @ a, 0) @ b],
    )
    add(
        "product_and_statistics",
        product_and_statistics,
        [(37, 41), (41, 53)],
        lambda x, w: [x @ w, (x @ w).mean(0), (x @ w).max(1)],
    )
    add(
        "attention",
        attention,
        [(2, 3, 37, 16), (2, 3, 41, 16), (2, 3, 41, 24), (2, 1, 37, 41)],
        attention_of,
    )


def _convolutions(add):
    def conv(stride=1, padding=0, dilation=1, groups=1):
        keys = {"strides": stride, "padding": padding, "dilation": dilation}
        emit = {k: (v, v) for k, v in keys.items()}
        return (
            lambda bb, x, w: op.nn.conv2d(x, w, groups=groups, **emit),
            lambda x, w: [conv_of(x, w, stride, padding, dilation, groups)],
        )

    def add_conv(name, x, w, **options):
        emit, reference = conv(**options)
        add(name, emit, [x, w], reference)

    add_conv("conv", (2, 5, 13, 13), (7, 5, 3, 3), padding=1)
    add_conv("conv_strided", (2, 5, 13, 13), (9, 5, 3, 3), padding=1, stride=2)
    add_conv("conv_dilated", (1, 5, 13, 13), (9, 5, 3, 3), padding=2, dilation=2)
    add_conv("conv_of_several_blocks", (1, 3, 40, 40), (5, 3, 7, 7), padding=3)
    add_conv("conv_1x1", (2, 5, 13, 13), (33, 5, 1, 1))
    add_conv("conv_by_channel", (2, 6, 13, 13), (6, 1, 3, 3), padding=1, groups=6)
    add_conv("conv_in_groups", (2, 6, 13, 13), (8, 3, 3, 3), padding=1, groups=2)
    add(
        "residual_block",
        residual_block,
        [(2, 5, 13, 13), (7, 5, 3, 3), (1, 7, 1, 1), (2, 7, 13, 13)],
        lambda x, w, s, r: [np.maximum(conv_of(x, w, padding=1) * s + r, 0)],
    )
    add(
        "max_pool",
        lambda bb, x: op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1)),
        [(2, 5, 13, 13)],
        lambda x: [pool_of(x, np.max, -np.inf)],
    )
    add(
        "average_pool",
        lambda bb, x: op.nn.avg_pool2d(x, (3, 3), (2, 2), (1, 1), count_include_pad=True),
        [(2, 5, 13, 13)],
        lambda x: [pool_of(x, np.mean, 0)],
    )
    add(
        "image_means",
        lambda bb, x: op.mean(x, axis=[2, 3]),
        [(5, 6, 7, 7)],
        lambda x: [x.mean((2, 3))],
    )
