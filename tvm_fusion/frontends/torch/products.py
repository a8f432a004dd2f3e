"""Converters for products, convolutions, embeddings and losses; for attention; for norms.

What differs from TVM 0.27:
- Products accumulate in float32 at least and give the type of their inputs (TVM leaves float32 for
  half inputs, fails at the sum with a half bias, and computes float64 in float32).
- Embeddings and selections clip their indices (TVM reads out of bounds).
- Norms without a scale or a shift say so (TVM multiplies by ones and adds zeros as large as a row).
- Cross-entropy reads its reduction where PyTorch passes it, and classes from the second axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import fx
from tvm import relax, te, tirx

from ...errors import FrontendError
from .importer import Importer, bound_arguments, size_of
from .indexing import taken
from .operators import HALVES, Converter, scaled

REDUCTIONS = ("none", "mean", "sum")  # as PyTorch numbers them

# By the rank of the input.
CONVOLUTIONS = {3: relax.op.nn.conv1d, 4: relax.op.nn.conv2d, 5: relax.op.nn.conv3d}
TRANSPOSED_CONVOLUTIONS = {
    3: relax.op.nn.conv1d_transpose,
    4: relax.op.nn.conv2d_transpose,
    5: relax.op.nn.conv3d_transpose,
}


def _accumulator(dtype: str) -> str:
    return "float32" if dtype in HALVES else dtype


def _product(importer: Importer, a: relax.Expr, b: relax.Expr) -> relax.Expr:
    dtype = str(a.ty.dtype)
    wide = importer.emit(relax.op.matmul(a, b, out_dtype=_accumulator(dtype)))
    return importer.cast(wide, dtype)


def _matmul(importer: Importer, node: fx.Node) -> relax.Expr:
    return _product(importer, *importer.value_of(node.args)[:2])


def _grouped_product(importer: Importer, node: fx.Node) -> relax.Expr:
    """Rows of x in groups, each by a matrix of its own: a group ends where `offs` says.

    A row's group is the number of groups that end before it; rows beyond the last one are 0.
    """
    args = {name: importer.value_of(arg) for name, arg in bound_arguments(node).items()}
    x, weight = list(args.values())[:2]  # named differently
    if x.ty.ndim == 3 and weight.ty.ndim == 3:
        return _product(importer, x, weight)
    if (x.ty.ndim, weight.ty.ndim) != (2, 3) or args.get("bias") is not None:
        raise FrontendError("products in groups of columns, or with a bias; write each by itself")
    rows, groups = x.ty.shape[0], weight.ty.shape[0]
    place = importer.emit(relax.op.arange(0, rows, 1, "int64"))
    place = importer.emit(relax.op.reshape(place, [rows, 1]))
    ends = importer.cast(args["offs"], "int64")
    passed = importer.emit(relax.op.greater_equal(place, ends))
    group = importer.emit(relax.op.sum(importer.cast(passed, "int64"), axis=[1]))
    last = relax.const(int(groups) - 1, "int64")
    chosen = importer.emit(relax.op.minimum(group, last))
    result = importer.block_builder.emit_te(
        _rows_by_matrices, x, weight, chosen, primfunc_name_hint="grouped_product"
    )
    is_in_group = importer.emit(relax.op.less_equal(group, last))
    is_in_group = importer.emit(relax.op.reshape(is_in_group, [rows, 1]))
    return importer.emit(relax.op.where(is_in_group, result, relax.const(0, result.ty.dtype)))


def _rows_by_matrices(x: te.Tensor, weight: te.Tensor, group: te.Tensor) -> te.Tensor:
    """Row i of x by the matrix `weight[group[i]]`."""
    k = te.reduce_axis((0, x.shape[1]), name="k")
    wide = _accumulator(str(x.dtype))

    def term(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        a, b = (value.astype(wide) for value in (x[i, k], weight[group[i], k, j]))
        return te.sum(a * b, axis=k)

    found = te.compute((x.shape[0], weight.shape[2]), term, name="product")
    if wide == str(x.dtype):
        return found
    return te.compute(found.shape, lambda i, j: found[i, j].astype(x.dtype), name="rounded")


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
    return taken(importer, weight, indices, 0)


def _index_select(importer: Importer, node: fx.Node) -> relax.Expr:
    x, axis, indices = importer.value_of(node.args)
    if x.ty.ndim == 0:
        x = importer.emit(relax.op.reshape(x, [1]))
        return importer.emit(relax.op.reshape(taken(importer, x, indices, 0), []))
    if indices.ty.ndim == 0:
        indices = importer.emit(relax.op.reshape(indices, [1]))
    return taken(importer, x, indices, axis % x.ty.ndim)


def _cross_entropy(importer: Importer, node: fx.Node) -> relax.Expr:
    args = {name: importer.value_of(arg) for name, arg in bound_arguments(node).items()}
    scores, target, weight = args["self"], args["target"], args["weight"]
    class_axis = min(1, scores.ty.ndim - 1)
    logarithms = importer.emit(relax.op.nn.log_softmax(scores, class_axis))
    reduction = REDUCTIONS[args["reduction"]]
    return importer.emit(
        relax.op.nn.nll_loss(logarithms, target, weight, reduction, args["ignore_index"])
    )


_PRODUCTS: dict[str, Converter] = {
    "matmul.default": _matmul,
    "mm.default": _matmul,
    "bmm.default": _matmul,
    "_grouped_mm.default": _grouped_product,
    "grouped_mm_fallback.default": _grouped_product,  # of transformers, where torch's cannot be had
    "linear.default": _linear,
    "addmm.default": _addmm,
    "baddbmm.default": _addmm,
    "convolution.default": _convolution,
    "embedding.default": _embedding,
    "index_select.default": _index_select,
    "cross_entropy_loss.default": _cross_entropy,
}


# ---- PyTorch's scaled_dot_product_attention as `relax.op.nn.attention`.
#
# Takes boolean and additive masks, a scale, grouped queries and any rank. As in PyTorch, a query
# that may see no key gets 0 (softmax alone would give NaN). A mask that is known now and hides
# nothing, or is the causal one, is recognised as that. Does not handle: dropout.

# (batch, head, sequence, width) <-> (batch, sequence, head, width), which relax wants
SWAP_HEADS = (0, 2, 1, 3)


def _attention(importer: Importer, node: fx.Node) -> relax.Expr:
    args = bound_arguments(node)
    if args["dropout_p"] != 0.0:
        raise NotImplementedError("attention with dropout")
    query, key, value = (importer.value_of(args[name]) for name in ("query", "key", "value"))
    if args["enable_gqa"]:
        groups = _queries_of_a_key(args["query"], args["key"])
        key, value = (importer.emit(relax.op.repeat(x, groups, axis=-3)) for x in (key, value))
    common = node.meta["val"].shape[:-2]
    tensors = [_broadcast(importer, x, common) for x in (query, key, value)]
    leading = list(tensors[0].ty.shape)[:-2]
    query, key, value = (_as_rank_4(importer, x) for x in tensors)
    bias, visible, causal = None, None, args["is_causal"]
    if args["attn_mask"] is not None:
        bias, visible, causal = _mask(importer, args["attn_mask"], leading, str(query.ty.dtype))
    result = relax.op.nn.attention(
        *(importer.permute(x, SWAP_HEADS) for x in (query, key, value)),
        bias=bias,
        scale=_scale(args["scale"], args["query"].meta["val"].shape[-1]),
        causal_mask="TopLeft" if causal else None,
    )
    result = importer.emit(result)
    if visible is not None:
        zero = relax.const(0, result.ty.dtype)
        visible = importer.permute(visible, SWAP_HEADS)
        result = importer.emit(relax.op.where(visible, result, zero))
    result = importer.permute(result, SWAP_HEADS)
    if len(leading) == 2:
        return result
    return importer.emit(relax.op.reshape(result, [*leading, *list(result.ty.shape)[-2:]]))


def _queries_of_a_key(query: fx.Node, key: fx.Node) -> int:
    """How many heads of queries share a head of keys."""
    heads, of_keys = (node.meta["val"].shape[-3] for node in (query, key))
    if not (isinstance(heads, int) and isinstance(of_keys, int)):
        raise FrontendError("grouped queries in a symbolic number of heads; give it as a number")
    return heads // of_keys


def _scale(scale: float | None, width: int | torch.SymInt) -> float | None:
    """The scale; None, which is lowered in the right type, if it is the default 1 / sqrt(width)."""
    if scale is None or (isinstance(width, int) and math.isclose(scale, width**-0.5)):
        return None
    return scale


def _broadcast(importer: Importer, x: relax.Expr, leading: Sequence) -> relax.Expr:
    """x with the given leading axes, where it has axes of 1 that others share, or none."""
    own = [int(n) if isinstance(n, tirx.IntImm) else None for n in list(x.ty.shape)[:-2]]
    wide = [n == 1 and m != 1 for n, m in zip(own, leading, strict=False)]
    if len(own) == len(leading) and not any(wide):
        return x
    sizes = [size_of(n, importer.symbols) for n in leading]
    return importer.emit(relax.op.broadcast_to(x, [*sizes, *list(x.ty.shape)[-2:]]))


def _as_rank_4(importer: Importer, x: relax.Expr) -> relax.Expr:
    """(..., sequence, width) as (batch, head, sequence, width)."""
    if x.ty.ndim == 4:
        return x
    return importer.emit(relax.op.reshape(x, [1, -1, *list(x.ty.shape)[-2:]]))


def _mask(
    importer: Importer, mask: fx.Node, leading: list, dtype: str
) -> tuple[relax.Expr | None, relax.Expr | None, bool]:
    """What to add to the scores, the queries that see a key (None: all), if the mask is causal."""
    known = importer.known_values.get(mask)
    shown = None if known is None else _shown(known)
    if known is not None and known.dtype == torch.bool:
        if bool(shown.all()):
            return None, None, False
        if torch.equal(shown, torch.ones_like(shown).tril()):
            return None, None, True
    if (mask, dtype) not in importer.masks:
        importer.masks[mask, dtype] = _emit_mask(importer, mask, leading, dtype)
    bias, visible = importer.masks[mask, dtype]
    all_visible = shown is not None and bool(shown.any(dim=-1).all())
    return bias, None if all_visible else visible, False


def _shown(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask != -math.inf


def _emit_mask(
    importer: Importer, node: fx.Node, leading: list, dtype: str
) -> tuple[relax.Expr, relax.Expr]:
    emit = importer.emit
    mask = importer.value_of(node)
    if len(leading) > 2:  # batch and head are one axis then
        mask = emit(relax.op.broadcast_to(mask, [*leading, *list(mask.ty.shape)[-2:]]))
        mask = _as_rank_4(importer, mask)
    elif mask.ty.ndim < 4:
        mask = emit(relax.op.reshape(mask, [*[1] * (4 - mask.ty.ndim), *mask.ty.shape]))
    hidden = relax.const(-math.inf, dtype)
    if mask.ty.dtype == "bool":
        bias = emit(relax.op.where(mask, relax.const(0, dtype), hidden))
    else:
        bias = importer.cast(mask, dtype)
        mask = emit(relax.op.not_equal(bias, hidden))
    # Of integers, max is ambiguous in CUDA: the lowest one is written as a long
    seen = emit(relax.op.max(emit(relax.op.astype(mask, "float32")), axis=-1, keepdims=True))
    return bias, emit(relax.op.astype(seen, "bool"))


_ATTENTION: dict[str, Converter] = {"scaled_dot_product_attention.default": _attention}


# ---- Converters for normalizations over groups of channels, and for angles between vectors.
#
# What differs from TVM 0.27:
# - There may be no weight and no bias (TVM stops at a null pointer).
# - bfloat16 is computed in float32, as PyTorch does (TVM's operator refuses it).
# - Cosines of halves are computed in float32: their norms are no halves, as in PyTorch's
#   decompositions, which divide by 0 where the least norm of 1e-8 is none in half precision.

CHANNELS = 1  # their axis


def _group_norm(importer: Importer, node: fx.Node) -> relax.Expr:
    """group_norm(input, num_groups, weight, bias, eps)."""
    given = bound_arguments(node)
    return _normalized(importer, given, given["num_groups"])


def _native_group_norm(importer: Importer, node: fx.Node) -> relax.Expr:
    """native_group_norm(input, weight, bias, N, C, HxW, group, eps): (result, mean, rstd)."""
    given = bound_arguments(node)
    result = _normalized(importer, given, given["group"])
    if not _moments_are_read(node):
        return relax.Tuple([result])
    groups = [given["N"], given["group"], -1]
    x = importer.emit(relax.op.reshape(importer.value_of(given["input"]), groups))
    return relax.Tuple([result, *_moments(importer, x, [2], given["eps"], node)])


def _layer_norm(importer: Importer, node: fx.Node) -> relax.Expr:
    """layer_norm(input, normalized_shape, weight, bias, eps)."""
    given = bound_arguments(node)
    x = importer.value_of(given["input"])
    shape = list(x.ty.shape.values)[-len(given["normalized_shape"]) :]

    def parameter(name: str, missing: float) -> relax.Expr:
        if given[name] is None:
            return _filled(importer, shape, missing, wide)
        return importer.operand(given[name], wide)

    # halves may have parameters in float32
    dtype = importer.dtype_of(given["input"])
    parameters = [given[name] for name in ("weight", "bias") if given[name] is not None]
    is_mixed = any(importer.dtype_of(p) != dtype for p in parameters)
    wide = _accumulator(dtype) if is_mixed else dtype
    result = relax.op.nn.layer_norm(
        importer.cast(x, wide),
        parameter("weight", 1.0),
        parameter("bias", 0.0),
        axes=list(range(-len(shape), 0)),
        epsilon=given["eps"],
        **_parts(given),
    )
    return importer.cast(importer.emit(result), dtype)


def _filled(importer: Importer, shape: list, value: float, dtype: str) -> relax.Expr:
    """What an operator asks for and does not read (`_parts`)."""
    if all(isinstance(extent, tirx.IntImm) for extent in shape):
        return relax.const(np.full([int(extent) for extent in shape], value), dtype)
    return importer.emit(relax.op.full(shape, relax.const(value, dtype), dtype))


def _parts(given: dict) -> dict[str, bool]:
    """Whether a norm scales and shifts: ones and zeros in place of what is missing are read."""
    return {"scale": given["weight"] is not None, "center": given["bias"] is not None}


def _native_layer_norm(importer: Importer, node: fx.Node) -> relax.Expr:
    """native_layer_norm(input, normalized_shape, weight, bias, eps): (result, mean, rstd)."""
    result = _layer_norm(importer, node)
    if not _moments_are_read(node):
        return relax.Tuple([result])
    given = bound_arguments(node)
    x = importer.value_of(given["input"])
    axes = list(range(x.ty.ndim - len(given["normalized_shape"]), x.ty.ndim))
    return relax.Tuple([result, *_moments(importer, x, axes, given["eps"], node)])


def _moments_are_read(node: fx.Node) -> bool:
    return any(user.args[1] != 0 for user in node.users)


def _moments(
    importer: Importer, x: relax.Expr, axes: list[int], eps: float, node: fx.Node
) -> list[relax.Expr]:
    """Means and inverse deviations along axes, in the shapes and types of a norm's last results.

    Of infinite numbers neither is a number: PyTorch computes both by Welford's method.
    """
    x = importer.cast(x, _accumulator(str(x.ty.dtype)))
    variance = importer.emit(relax.op.variance(x, axes))
    lost = importer.emit(relax.op.isnan(variance))
    mean = importer.emit(relax.op.mean(x, axes))
    mean = importer.emit(relax.op.where(lost, variance, mean))
    variance = importer.emit(relax.op.add(variance, relax.const(eps, x.ty.dtype)))
    moments = mean, importer.emit(relax.op.rsqrt(variance))
    likes = node.meta["val"][1:]
    return [
        importer.emit(
            relax.op.reshape(
                importer.cast(moment, importer._convert_data_type(like.dtype)),
                [size_of(size, importer.symbols) for size in like.shape],
            )
        )
        for moment, like in zip(moments, likes, strict=True)
    ]


def _normalized(importer: Importer, given: dict, groups: int) -> relax.Expr:
    like = given["input"].meta["val"]
    dtype = importer.dtype_of(given["input"])
    wide = "float32" if dtype == "bfloat16" else dtype
    channels = like.shape[CHANNELS]

    def parameter(name: str, missing: float) -> relax.Expr:
        if given[name] is None:
            return relax.const(np.full(channels, missing), wide)
        return importer.operand(given[name], wide)

    result = relax.op.nn.group_norm(
        importer.operand(given["input"], wide),
        parameter("weight", 1.0),
        parameter("bias", 0.0),
        num_groups=groups,
        channel_axis=CHANNELS,
        axes=list(range(CHANNELS + 1, like.dim())),
        epsilon=given["eps"],
        **_parts(given),
    )
    return importer.cast(importer.emit(result), dtype)


def _cosine_similarity(importer: Importer, node: fx.Node) -> relax.Expr:
    """cosine_similarity(x1, x2, dim, eps): x1 and x2 are broadcast, each norm is at least eps."""
    given = bound_arguments(node)
    dtype, axis = importer.dtype_of(node), given["dim"]
    wide = "float64" if dtype == "float64" else "float32"
    shapes = [given[name].meta["val"].shape for name in ("x1", "x2")]
    whole = [size_of(n, importer.symbols) for n in torch.broadcast_shapes(*shapes)]

    def unit(name: str) -> relax.Expr:
        x = importer.operand(given[name], wide)
        if shapes[0] != shapes[1]:
            x = importer.emit(relax.op.broadcast_to(x, whole))
        squares = importer.emit(relax.op.multiply(x, x))
        length = importer.emit(relax.op.sqrt(importer.emit(relax.op.sum(squares, axis, True))))
        length = importer.emit(relax.op.maximum(length, relax.const(given["eps"], wide)))
        return importer.emit(relax.op.divide(x, length))

    products = importer.emit(relax.op.multiply(unit("x1"), unit("x2")))
    return importer.cast(importer.emit(relax.op.sum(products, axis)), dtype)


_NORMS: dict[str, Converter] = {
    "group_norm.default": _group_norm,
    "native_group_norm.default": _native_group_norm,
    "layer_norm.default": _layer_norm,
    "native_layer_norm.default": _native_layer_norm,
    "cosine_similarity.default": _cosine_similarity,
}


CONVERTERS = _PRODUCTS | _NORMS | _ATTENTION
