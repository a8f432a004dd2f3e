"""Fused PrimFuncs around matrix products, with float64 references."""

import numpy as np
from tvm import relax
from tvm.relax import op

from .kernel_cases import Case, gelu_of

HALF, FLOAT, BRAIN = "float16", "float32", "bfloat16"


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def heads_of(x, heads):
    """[b, s, h * d] -> [b, h, s, d]."""
    b, s, w = x.shape
    return x.reshape(b, s, heads, w // heads).transpose(0, 2, 1, 3)


# ---- graphs


def matmul(bb, x, w):
    return op.matmul(x, w)


def linear(bb, x, w):
    return op.matmul(x, bb.emit(op.permute_dims(w, (1, 0))))


def left_transposed(bb, x, w):
    return op.matmul(bb.emit(op.permute_dims(x, (1, 0))), w)


def bias_gelu(bb, x, w, b):
    return op.nn.gelu(bb.emit(op.add(bb.emit(op.matmul(x, w)), b)))


def bias_gelu_tanh(bb, x, w, b):
    return op.nn.gelu_tanh(bb.emit(op.add(bb.emit(op.matmul(x, w)), b)))


def residual(bb, x, w, r):
    return op.add(bb.emit(op.matmul(x, w)), r)


def bias_gelu_residual(bb, x, w, b, r):
    return op.add(bb.emit(bias_gelu(bb, x, w, b)), r)


def linear_bias_residual(bb, x, w, b, r):
    return op.add(bb.emit(op.add(bb.emit(linear(bb, x, w)), b)), r)


def gate_up(bb, x, g, u):
    gate = bb.emit(op.nn.silu(bb.emit(op.matmul(x, g))))
    return op.multiply(gate, bb.emit(op.matmul(x, u)))


def qkv(bb, x, q, k, v):
    return relax.Tuple([bb.emit(op.matmul(x, w)) for w in (q, k, v)])


def qkv_bias(bb, x, q, k, v, a, b, c):
    pairs = ((q, a), (k, b), (v, c))
    return relax.Tuple([bb.emit(op.add(bb.emit(op.matmul(x, w)), y)) for w, y in pairs])


def split_heads(bb, x, heads, axes):
    b, s, w = x.ty.shape
    x = bb.emit(op.reshape(x, (b, s, heads, int(w) // heads)))
    return bb.emit(op.permute_dims(x, axes))


def scores(heads):
    """Scaled q k^T of [b, s, h * d] tensors."""

    def emit(bb, q, k):
        q = split_heads(bb, q, heads, (0, 2, 1, 3))
        k = split_heads(bb, k, heads, (0, 2, 3, 1))
        return op.multiply(bb.emit(op.matmul(q, k)), relax.const(0.125, str(q.ty.dtype)))

    return emit


def values(heads):
    """p v merged back to [b, s, h * d]."""

    def emit(bb, p, v):
        b, s, w = v.ty.shape
        out = bb.emit(op.matmul(p, split_heads(bb, v, heads, (0, 2, 1, 3))))
        return op.reshape(bb.emit(op.permute_dims(out, (0, 2, 1, 3))), (b, s, w))

    return emit


def project_heads(heads):
    """x w split into heads, [b, h, s, d]."""

    def emit(bb, x, w):
        return split_heads(bb, bb.emit(op.matmul(x, w)), heads, (0, 2, 1, 3))

    return emit


def two_outputs(bb, x, w):
    y = bb.emit(op.matmul(x, w))
    return relax.Tuple([y, bb.emit(op.nn.relu(y))])


def output_transposed(bb, x, w):
    return op.permute_dims(bb.emit(op.matmul(x, w)), (1, 0))


def wide_bias(bb, x, w, b):
    return op.add(bb.emit(op.matmul(x, w, out_dtype=FLOAT)), b)


def row_scale(bb, x, w, s):
    return op.multiply(bb.emit(op.matmul(x, w)), s)


def wide_sum_cast(bb, x, w, r):
    product = bb.emit(op.astype(bb.emit(op.matmul(x, w, out_dtype=FLOAT)), HALF))
    return op.add(product, r)


def two_products(bb, x, w, y, u):
    return op.add(bb.emit(op.matmul(x, w)), bb.emit(op.matmul(y, u)))


def silu_in_front(bb, x, w):
    return op.matmul(bb.emit(op.nn.silu(x)), w)


def silu_of_weights(bb, x, w):
    return op.matmul(x, bb.emit(op.nn.silu(w)))


def embedding(bb, ids, table, w):
    return op.matmul(bb.emit(op.take(table, ids, axis=0)), w)


def integers(bb, x, w):
    return op.matmul(x, w, out_dtype="int32")


def convolution(bb, x, w):
    return op.nn.relu(bb.emit(op.nn.conv2d(x, w, padding=1)))


def conv_of(x, w):
    """3 x 3 convolution with padding 1 and relu, NCHW."""
    n, _, height, width = x.shape
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    out = np.zeros((n, w.shape[0], height, width))
    for r in range(3):
        for s in range(3):
            window = padded[:, :, r : r + height, s : s + width]
            out += np.einsum("nchw,fc->nfhw", window, w[:, :, r, s])
    return np.maximum(out, 0)


def gelu_tanh_of(x):
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


# ---- cases

M, N, K = 136, 192, 256


def case(name, emit, shapes, reference, dtype=HALF, make=()):
    """A case whose inputs are of one dtype, unless an entry of `shapes` names its own."""
    inputs = tuple(s if isinstance(s[-1], str) else (s, dtype) for s in shapes)
    return Case(name, emit, inputs, reference, dict(make))


TENSOR_CORE_CASES = [
    case("plain", matmul, [(M, K), (K, N)], lambda x, w: [x @ w]),
    case("linear weight", linear, [(M, K), (N, K)], lambda x, w: [x @ w.T]),
    case("left operand transposed", left_transposed, [(K, M), (K, N)], lambda x, w: [x.T @ w]),
    case("bias, gelu", bias_gelu, [(M, K), (K, N), (N,)], lambda x, w, b: [gelu_of(x @ w + b)]),
    case(
        "bias, gelu by tanh",
        bias_gelu_tanh,
        [(M, K), (K, N), (N,)],
        lambda x, w, b: [gelu_tanh_of(x @ w + b)],
    ),
    case("residual", residual, [(M, K), (K, N), (M, N)], lambda x, w, r: [x @ w + r]),
    case(
        "bias, gelu, residual",
        bias_gelu_residual,
        [(M, K), (K, N), (N,), (M, N)],
        lambda x, w, b, r: [gelu_of(x @ w + b) + r],
    ),
    case(
        "gate and up",
        gate_up,
        [(M, K), (K, N), (K, N)],
        lambda x, g, u: [(x @ g) * sigmoid(x @ g) * (x @ u)],
    ),
    case(
        "q, k, v",
        qkv,
        [(M, K), (K, N), (K, 64), (K, 128)],
        lambda x, *ws: [x @ w for w in ws],
    ),
    case(
        "q, k, v with biases",
        qkv_bias,
        [(M, K), (K, N), (K, 64), (K, 64), (N,), (64,), (64,)],
        lambda x, q, k, v, a, b, c: [x @ q + a, x @ k + b, x @ v + c],
    ),
    case(
        "scores of permuted heads",
        scores(2),
        [(2, 72, 128), (2, 72, 128)],
        lambda q, k: [heads_of(q, 2) @ heads_of(k, 2).transpose(0, 1, 3, 2) * 0.125],
    ),
    case(
        "values of permuted heads",
        values(2),
        [(2, 2, 72, 72), (2, 72, 128)],
        lambda p, v: [(p @ heads_of(v, 2)).transpose(0, 2, 1, 3).reshape(v.shape)],
    ),
    case(
        "projection split into heads",
        project_heads(2),
        [(2, 64, K), (K, 128)],
        lambda x, w: [heads_of(x @ w, 2)],
    ),
    case(
        "projection split into heads, ragged",
        project_heads(2),
        [(2, 70, K), (K, 128)],
        lambda x, w: [heads_of(x @ w, 2)],
    ),
    case(
        "two outputs",
        two_outputs,
        [(M, K), (K, N)],
        lambda x, w: [x @ w, np.maximum(x @ w, 0)],
    ),
    case("output transposed", output_transposed, [(M, K), (K, N)], lambda x, w: [(x @ w).T]),
    case(
        "float32 output",
        wide_bias,
        [(M, K), (K, N), ((N,), FLOAT)],
        lambda x, w, b: [x @ w + b],
    ),
    case("row factor", row_scale, [(M, K), (K, N), (M, 1)], lambda x, w, s: [x @ w * s]),
    case(
        "sum in float32, rounded, residual",
        wide_sum_cast,
        [(M, K), (K, N), (M, N)],
        lambda x, w, r: [x @ w + r],
    ),
    case("ragged everywhere", matmul, [(100, 200), (200, 104)], lambda x, w: [x @ w]),
    case(
        "odd columns, bias, residual",
        linear_bias_residual,
        [(100, K), (101, K), (101,), (100, 101)],
        lambda x, w, b, r: [x @ w.T + b + r],
    ),
    case("16 rows", linear, [(16, K), (264, K)], lambda x, w: [x @ w.T]),
    case("one row", linear, [(1, K), (264, K)], lambda x, w: [x @ w.T]),
    case("one step", matmul, [(M, 64), (64, N)], lambda x, w: [x @ w]),
    case(
        "bfloat16",
        bias_gelu,
        [(M, K), (K, N), (N,)],
        lambda x, w, b: [gelu_of(x @ w + b)],
        dtype=BRAIN,
    ),
]

CUDA_CORE_CASES = [
    case(
        "float32",
        bias_gelu,
        [(70, 33), (33, 65), (65,)],
        lambda x, w, b: [gelu_of(x @ w + b)],
        FLOAT,
    ),
    case("float64", matmul, [(20, 33), (33, 17)], lambda x, w: [x @ w], "float64"),
    case("odd pitch", linear, [(37, 51), (43, 51)], lambda x, w: [x @ w.T]),
    case("matrix times vector", matmul, [(70, 33), (33,)], lambda w, x: [w @ x], FLOAT),
    case("vector times matrix", matmul, [(33,), (33, 70)], lambda x, w: [x @ w], FLOAT),
    case("dot product", matmul, [(65,), (65,)], lambda x, y: [x @ y], FLOAT),
    case("batch of weights", matmul, [(20, 33), (3, 33, 24)], lambda x, w: [x @ w], FLOAT),
    case("broadcast batch", matmul, [(2, 1, 20, 33), (3, 33, 24)], lambda x, w: [x @ w], FLOAT),
    case(
        "computed operand", silu_in_front, [(20, 33), (33, 24)], lambda x, w: [(x * sigmoid(x)) @ w]
    ),
    case(
        "products of different operands",
        two_products,
        [(20, 33), (33, 24), (20, 17), (17, 24)],
        lambda x, w, y, u: [x @ w + y @ u],
    ),
    Case(
        "gathered operand",
        embedding,
        (((7,), "int64"), ((100, 33), FLOAT), ((33, 24), FLOAT)),
        lambda ids, table, w: [table[ids] @ w],
        {0: lambda rng: rng.integers(0, 100, 7)},
    ),
    case(
        "int8", integers, [(20, 33), (33, 24)], lambda x, w: [x.astype(int) @ w.astype(int)], "int8"
    ),
    case(
        "convolution",
        convolution,
        [(2, 3, 6, 7), (5, 3, 3, 3)],
        lambda x, w: [conv_of(x, w)],
        FLOAT,
    ),
]
