"""PyTorch's scaled_dot_product_attention as `relax.op.nn.attention`.

Takes boolean and additive masks, a scale, grouped queries and any rank. As in PyTorch, a query that
may see no key gets 0 (softmax alone would give NaN). A mask that is known now and hides nothing, or
is the causal one, is recognised as that.
Does not handle: dropout.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import fx
from tvm import relax

from tvm_fusion.frontends.torch_operators import Converter, bound_arguments

if TYPE_CHECKING:
    from tvm_fusion.frontends.torch_importer import Importer

# (batch, head, sequence, width) <-> (batch, sequence, head, width), which relax wants
SWAP_HEADS = (0, 2, 1, 3)


def _attention(importer: Importer, node: fx.Node) -> relax.Expr:
    args = bound_arguments(node)
    if args["dropout_p"] != 0.0:
        raise NotImplementedError("attention with dropout")
    tensors = [importer.value_of(args[name]) for name in ("query", "key", "value")]
    query, key, value = (_as_rank_4(importer, x) for x in tensors)
    if args["enable_gqa"]:
        groups = int(query.ty.shape[1]) // int(key.ty.shape[1])
        key, value = (importer.emit(relax.op.repeat(x, groups, axis=1)) for x in (key, value))
    leading = list(tensors[0].ty.shape)[:-2]
    bias, visible, causal = None, None, args["is_causal"]
    if args["attn_mask"] is not None:
        bias, visible, causal = _mask(importer, args["attn_mask"], leading, str(query.ty.dtype))
    result = relax.op.nn.attention(
        *(importer.permute(x, SWAP_HEADS) for x in (query, key, value)),
        bias=bias,
        scale=_scale(args["scale"], int(query.ty.shape[-1])),
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


def _scale(scale: float | None, width: int) -> float | None:
    """The scale; None, which TVM lowers in the right type, if it is the default 1 / sqrt(width)."""
    return None if scale is None or math.isclose(scale, width**-0.5) else scale


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


CONVERTERS: dict[str, Converter] = {"scaled_dot_product_attention.default": _attention}
