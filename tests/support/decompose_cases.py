"""One small case a composite: the Relax expression and its meaning in NumPy float64.

A case names the shape of each input; "n" is an extent that the tests make static or symbolic.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm.relax import Expr, op

EPSILON = 1e-5
IGNORED = -100
_erf = np.vectorize(math.erf, otypes=[np.float64])


@dataclass(frozen=True, slots=True)
class Case:
    """`relax(*inputs)` and `numpy(*float64 inputs)` agree; one input may hold int64 labels."""

    composite: str
    shapes: tuple[tuple, ...]
    relax: Callable[..., Expr]
    numpy: Callable[..., np.ndarray]
    label_input: int | None = None


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def log_softmax(x, axis=-1):
    s = x - x.max(axis, keepdims=True)
    return s - np.log(np.exp(s).sum(axis, keepdims=True))


def normalize(x, axes, epsilon=EPSILON):
    centered = x - x.mean(axes, keepdims=True)
    return centered / np.sqrt(x.var(axes, keepdims=True) + epsilon)


def rms_normalize(x, axes):
    return x / np.sqrt((x * x).mean(axes, keepdims=True) + EPSILON)


def channels(parameter, ndim, axis):
    return parameter.reshape([-1 if i == axis else 1 for i in range(ndim)])


def group_normalize(x, gamma, beta, groups):
    n, c, *rest = x.shape
    grouped = x.reshape(n, groups, c // groups, *rest)
    normal = normalize(grouped, tuple(range(2, grouped.ndim))).reshape(x.shape)
    return normal * channels(gamma, x.ndim, 1) + channels(beta, x.ndim, 1)


def batch_norm_at(axis):
    def evaluate(x, gamma, beta, mean, spread):
        wide = [channels(p, x.ndim, axis) for p in (gamma, beta, mean, np.square(spread))]
        return (x - wide[2]) / np.sqrt(wide[3] + EPSILON) * wide[0] + wide[1]

    return evaluate


def relax_batch_norm(axis, **options):
    def build(x, gamma, beta, mean, spread):
        variance = op.multiply(spread, spread)
        call = op.nn.batch_norm(x, gamma, beta, mean, variance, axis, training=False, **options)
        return call[0]

    return build


def nll(reduction):
    def evaluate(predictions, labels, weights=None):
        moved = predictions if predictions.ndim == 1 else np.moveaxis(predictions, 1, -1)
        valid = labels != IGNORED
        safe = np.where(valid, labels, 0)
        picked = np.take_along_axis(moved, safe[..., None], -1)[..., 0]
        w = np.ones(moved.shape[-1]) if weights is None else weights
        w = np.where(valid, w[safe], 0.0)
        loss = -picked * w
        if reduction == "none":
            return loss
        return loss.sum() / (w.sum() if reduction == "mean" else 1.0)

    return evaluate


def relax_nll(reduction):
    def build(predictions, labels, weights=None):
        return op.nn.nll_loss(predictions, labels, weights, reduction, IGNORED)

    return build


def attention(causal=None, scale=None):
    def evaluate(q, k, v, bias=None):
        q, k, v = (np.swapaxes(t, 1, 2) for t in (q, k, v))
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        scores = q @ np.swapaxes(k, 2, 3) * factor
        scores = scores if bias is None else scores + bias
        if causal is not None:
            queries, keys = scores.shape[-2:]
            offset = abs(queries - keys) if causal == "BottomRight" else 0
            scores = np.where(np.tri(queries, keys, offset, dtype=bool), scores, -np.inf)
        return np.swapaxes(softmax(scores) @ v, 1, 2)

    return evaluate


def relax_attention(causal=None, scale=None):
    def build(*tensors):
        return op.nn.attention(*tensors, causal_mask=causal, scale=scale)

    return build


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


_IMAGE = ("n", 6, 3, 5)
_VECTOR = (6,)
_Q, _KV = (2, "n", 3, 8), (2, 7, 3, 8)

CASES: dict[str, Case] = {
    "softmax": Case("softmax", (("n", 37),), op.nn.softmax, softmax),
    "softmax over axis 1 of 3": Case(
        "softmax", (("n", 5, 3),), lambda x: op.nn.softmax(x, 1), lambda x: softmax(x, 1)
    ),
    "softmax of one column": Case("softmax", (("n", 1),), op.nn.softmax, softmax),
    "log_softmax": Case("log_softmax", (("n", 37),), op.nn.log_softmax, log_softmax),
    "log_softmax over axis 0": Case(
        "log_softmax",
        ((11, "n"),),
        lambda x: op.nn.log_softmax(x, 0),
        lambda x: log_softmax(x, 0),
    ),
    "layer_norm": Case(
        "layer_norm",
        (("n", 37), (37,), (37,)),
        lambda x, g, b: op.nn.layer_norm(x, g, b, [-1]),
        lambda x, g, b: normalize(x, -1) * g + b,
    ),
    "layer_norm over two axes": Case(
        "layer_norm",
        (("n", 5, 7), (5, 7), (5, 7)),
        lambda x, g, b: op.nn.layer_norm(x, g, b, [1, 2]),
        lambda x, g, b: normalize(x, (1, 2)) * g + b,
    ),
    "layer_norm over axis 1 of 3": Case(
        "layer_norm",
        (("n", 5, 7), (5,), (5,)),
        lambda x, g, b: op.nn.layer_norm(x, g, b, [1]),
        lambda x, g, b: normalize(x, 1) * g[:, None] + b[:, None],
    ),
    "layer_norm without parameters": Case(
        "layer_norm",
        (("n", 37), (37,), (37,)),
        lambda x, g, b: op.nn.layer_norm(x, g, b, [-1], center=False, scale=False),
        lambda x, g, b: normalize(x, -1),
    ),
    "layer_norm over a symbolic axis": Case(
        "layer_norm",
        ((5, "n"), ("n",), ("n",)),
        lambda x, g, b: op.nn.layer_norm(x, g, b, [-1]),
        lambda x, g, b: normalize(x, -1) * g + b,
    ),
    "rms_norm": Case(
        "rms_norm",
        (("n", 3, 37), (37,)),
        lambda x, w: op.nn.rms_norm(x, w, [-1]),
        lambda x, w: rms_normalize(x, -1) * w,
    ),
    "rms_norm over two axes": Case(
        "rms_norm",
        (("n", 3, 7), (3, 7)),
        lambda x, w: op.nn.rms_norm(x, w, [-2, -1]),
        lambda x, w: rms_normalize(x, (-2, -1)) * w,
    ),
    "group_norm": Case(
        "group_norm",
        (_IMAGE, _VECTOR, _VECTOR),
        lambda x, g, b: op.nn.group_norm(x, g, b, 2, 1, [2, 3]),
        lambda x, g, b: group_normalize(x, g, b, 2),
    ),
    "group_norm of single channels": Case(
        "group_norm",
        (_IMAGE, _VECTOR, _VECTOR),
        lambda x, g, b: op.nn.group_norm(x, g, b, 6, 1, [2, 3]),
        lambda x, g, b: group_normalize(x, g, b, 6),
    ),
    "instance_norm": Case(
        "instance_norm",
        (_IMAGE, _VECTOR, _VECTOR),
        lambda x, g, b: op.nn.instance_norm(x, g, b, 1, [2, 3]),
        lambda x, g, b: group_normalize(x, g, b, 6),
    ),
    "batch_norm of axis 1": Case(
        "batch_norm",
        (_IMAGE, *[_VECTOR] * 4),
        relax_batch_norm(1),
        batch_norm_at(1),
    ),
    "batch_norm of the last axis": Case(
        "batch_norm",
        (("n", 6), *[_VECTOR] * 4),
        relax_batch_norm(-1),
        batch_norm_at(1),
    ),
    "batch_norm without scale": Case(
        "batch_norm",
        (_IMAGE, *[_VECTOR] * 4),
        relax_batch_norm(1, scale=False),
        lambda x, g, *rest: batch_norm_at(1)(x, np.ones_like(g), *rest),
    ),
    "batch_norm without center": Case(
        "batch_norm",
        (_IMAGE, *[_VECTOR] * 4),
        relax_batch_norm(1, center=False),
        lambda x, g, b, *rest: batch_norm_at(1)(x, g, np.zeros_like(b), *rest),
    ),
    "gelu": Case("gelu", (("n", 37),), op.nn.gelu, lambda x: x * 0.5 * (1 + _erf(x * 0.5**0.5))),
    "gelu_tanh": Case("gelu_tanh", (("n", 37),), op.nn.gelu_tanh, gelu_tanh),
    "silu": Case("silu", (("n", 37),), op.nn.silu, lambda x: x / (1 + np.exp(-x))),
    "mean": Case("mean", (("n", 37),), lambda x: op.mean(x, -1), lambda x: x.mean(-1)),
    "mean over two axes": Case(
        "mean",
        ((3, "n", 5),),
        lambda x: op.mean(x, [0, 2], keepdims=True),
        lambda x: x.mean((0, 2), keepdims=True),
    ),
    "variance": Case("variance", (("n", 37),), lambda x: op.variance(x, -1), lambda x: x.var(-1)),
    "variance over a symbolic axis": Case(
        "variance",
        ((3, "n"),),
        lambda x: op.variance(x, 1, keepdims=True),
        lambda x: x.var(1, keepdims=True),
    ),
    "variance of everything": Case("variance", (("n", 7),), op.variance, np.var),
    "std": Case("std", (("n", 37),), lambda x: op.std(x, 1), lambda x: x.std(1)),
    "cross_entropy_with_logits": Case(
        "cross_entropy_with_logits",
        (("n", 37), ("n", 37)),
        op.nn.cross_entropy_with_logits,
        lambda x, y: -(x * y).sum(1).mean(),
    ),
    "cross_entropy_with_logits of a vector": Case(
        "cross_entropy_with_logits",
        ((37,), (37,)),
        op.nn.cross_entropy_with_logits,
        lambda x, y: -(x * y).sum(),
    ),
    "attention": Case("attention", (_Q, _KV, _KV), relax_attention(), attention()),
    "attention with a scale": Case(
        "attention", (_Q, _KV, _KV), relax_attention(scale=0.5), attention(scale=0.5)
    ),
    "attention with a bias": Case(
        "attention",
        (_Q, _KV, _KV, (2, 1, "n", 7)),
        relax_attention(),
        attention(),
    ),
    "attention, causal from the top left": Case(
        "attention", (_Q, _KV, _KV), relax_attention("TopLeft"), attention("TopLeft")
    ),
    "attention, causal from the bottom right": Case(
        "attention", (_Q, _KV, _KV), relax_attention("BottomRight"), attention("BottomRight")
    ),
    "attention of wider values": Case(
        "attention", (_Q, _KV, (2, 7, 3, 5)), relax_attention(), attention()
    ),
}

for _reduction in ("none", "sum", "mean"):
    for _name, _shapes in {
        "": (("n", 7), ("n",)),
        " with weights": (("n", 7), ("n",), (7,)),
        " of images": (("n", 7, 3, 2), ("n", 3, 2), (7,)),
        " of a vector": ((7,), ()),
    }.items():
        CASES[f"nll_loss {_reduction}{_name}"] = Case(
            "nll_loss", _shapes, relax_nll(_reduction), nll(_reduction), label_input=1
        )
