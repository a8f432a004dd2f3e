"""Converters for normalizations over groups of channels, and for angles between vectors.

What differs from TVM 0.27:
- There may be no weight and no bias (TVM stops at a null pointer).
- bfloat16 is computed in float32, as PyTorch does (TVM's operator refuses it).
- Cosines of halves are computed in float32: their norms are no halves, as in PyTorch's
  decompositions, which divide by 0 where the least norm of 1e-8 is none in half precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import fx
from tvm import relax

from tvm_fusion.frontends.torch_operators import Converter, bound_arguments
from tvm_fusion.frontends.torch_symbols import size_of

if TYPE_CHECKING:
    from tvm_fusion.frontends.torch_importer import Importer

CHANNELS = 1  # their axis


def _group_norm(importer: Importer, node: fx.Node) -> relax.Expr:
    """group_norm(input, num_groups, weight, bias, eps)."""
    given = bound_arguments(node)
    return _normalized(importer, given, given["num_groups"])


def _native_group_norm(importer: Importer, node: fx.Node) -> relax.Expr:
    """native_group_norm(input, weight, bias, N, C, HxW, group, eps): (result, mean, rstd), of which
    only the result is ever used in a model that is not trained.
    """
    given = bound_arguments(node)
    return relax.Tuple([_normalized(importer, given, given["group"])])


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


CONVERTERS: dict[str, Converter] = {
    "group_norm.default": _group_norm,
    "native_group_norm.default": _native_group_norm,
    "cosine_similarity.default": _cosine_similarity,
}
