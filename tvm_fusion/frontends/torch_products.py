"""Converters for products, convolutions, embeddings and losses.

What differs from TVM 0.27:
- Products accumulate in float32 at least and give the type of their inputs (TVM leaves float32 for
  half inputs, fails at the sum with a half bias, and computes float64 in float32).
- Embeddings and selections clip their indices (TVM reads out of bounds).
- Cross-entropy reads its reduction where PyTorch passes it, and classes from the second axis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx
from tvm import relax

from tvm_fusion.frontends.torch_operators import Converter, bound_arguments, scaled

if TYPE_CHECKING:
    from tvm_fusion.frontends.torch_importer import Importer

HALF = ("float16", "bfloat16")
REDUCTIONS = ("none", "mean", "sum")  # as PyTorch numbers them

# By the rank of the input.
CONVOLUTIONS = {3: relax.op.nn.conv1d, 4: relax.op.nn.conv2d, 5: relax.op.nn.conv3d}
TRANSPOSED_CONVOLUTIONS = {
    3: relax.op.nn.conv1d_transpose,
    4: relax.op.nn.conv2d_transpose,
    5: relax.op.nn.conv3d_transpose,
}


def _accumulator(dtype: str) -> str:
    return "float32" if dtype in HALF else dtype


def _product(importer: Importer, a: relax.Expr, b: relax.Expr) -> relax.Expr:
    dtype = str(a.ty.dtype)
    wide = importer.emit(relax.op.matmul(a, b, out_dtype=_accumulator(dtype)))
    return importer.cast(wide, dtype)


def _matmul(importer: Importer, node: fx.Node) -> relax.Expr:
    return _product(importer, *importer.value_of(node.args)[:2])


def _linear(importer: Importer, node: fx.Node) -> relax.Expr:
    x, weight, *bias = importer.value_of(node.args)
    if weight.ty.ndim == 2:
        weight = importer.permute(weight, (1, 0))
    result = _product(importer, x, weight)
    if not bias or bias[0] is None:
        return result
    return importer.emit(relax.op.add(result, bias[0]))


def _addmm(importer: Importer, node: fx.Node) -> relax.Expr:
    """beta * x + alpha * (a @ b)."""
    x, a, b = importer.value_of(node.args)
    result = scaled(importer, _product(importer, a, b), node.kwargs.get("alpha", 1))
    beta = node.kwargs.get("beta", 1)
    if beta == 0:  # x is not even read: it may be NaN
        return result
    return importer.emit(relax.op.add(result, scaled(importer, x, beta)))


def _convolution(importer: Importer, node: fx.Node) -> relax.Expr:
    args = {name: importer.value_of(arg) for name, arg in bound_arguments(node).items()}
    x, bias = args["input"], args["bias"]
    dtype, rank = str(x.ty.dtype), x.ty.ndim
    kinds = TRANSPOSED_CONVOLUTIONS if args["transposed"] else CONVOLUTIONS
    options = {"output_padding": args["output_padding"]} if args["transposed"] else {}
    wide = kinds[rank](
        x,
        args["weight"],
        strides=args["stride"],
        padding=args["padding"],
        dilation=args["dilation"],
        groups=args["groups"],
        out_dtype=_accumulator(dtype),
        **options,
    )
    result = importer.cast(importer.emit(wide), dtype)
    if bias is None:
        return result
    bias = importer.emit(relax.op.reshape(bias, [1, -1, *[1] * (rank - 2)]))
    return importer.emit(relax.op.add(result, bias))


def _embedding(importer: Importer, node: fx.Node) -> relax.Expr:
    weight, indices = importer.value_of(node.args)[:2]
    return importer.emit(relax.op.take(weight, indices, axis=0, mode="clip"))


def _index_select(importer: Importer, node: fx.Node) -> relax.Expr:
    x, axis, indices = importer.value_of(node.args)
    return importer.emit(relax.op.take(x, indices, axis=axis % max(x.ty.ndim, 1), mode="clip"))


def _cross_entropy(importer: Importer, node: fx.Node) -> relax.Expr:
    args = {name: importer.value_of(arg) for name, arg in bound_arguments(node).items()}
    if args["label_smoothing"] != 0.0:
        raise NotImplementedError("cross-entropy with label smoothing")
    scores, target, weight = args["self"], args["target"], args["weight"]
    class_axis = min(1, scores.ty.ndim - 1)
    logarithms = importer.emit(relax.op.nn.log_softmax(scores, class_axis))
    reduction = REDUCTIONS[args["reduction"]]
    return importer.emit(
        relax.op.nn.nll_loss(logarithms, target, weight, reduction, args["ignore_index"])
    )


CONVERTERS: dict[str, Converter] = {
    "matmul.default": _matmul,
    "mm.default": _matmul,
    "bmm.default": _matmul,
    "linear.default": _linear,
    "addmm.default": _addmm,
    "baddbmm.default": _addmm,
    "convolution.default": _convolution,
    "embedding.default": _embedding,
    "index_select.default": _index_select,
    "cross_entropy_loss.default": _cross_entropy,
}
