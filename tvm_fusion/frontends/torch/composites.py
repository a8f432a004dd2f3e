"""Operators that PyTorch has kernels for and no decomposition, written with those that are
converted.

    fmax(a, b)    ->  where((a >= b) | isnan(b), a, b)
    addbmm(x, a, b)  ->  x + bmm(a, b).sum(0)

Floats narrower than float32 are computed in float32 where PyTorch's kernels do, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

_aten, _torch_nn = torch.ops.aten, torch.ops.torch_nn
Tensor = torch.Tensor


def wide(x: Tensor) -> Tensor:
    """x in the type that PyTorch's kernels compute it in: float32 for halves and integers."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def float_type(x: Tensor) -> torch.dtype:
    """The type of what a function of floats makes of x."""
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()


# ---- Elements.


def _fmax(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((a >= b) | _is_nan(b), a, b)


def _fmin(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((a <= b) | _is_nan(b), a, b)


def _is_nan(x: Tensor) -> Tensor:
    return torch.isnan(x) if x.is_floating_point() else torch.zeros_like(x, dtype=torch.bool)


def _angle(x: Tensor) -> Tensor:
    dtype = float_type(x)
    turned = torch.where(x < 0, math.pi, 0.0).to(dtype)
    return torch.where(torch.isnan(x), x, turned) if x.is_floating_point() else turned


def _signbit(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x < 0
    return torch.copysign(torch.ones((), dtype=x.dtype, device=x.device), x) < 0


def _lcm(a: Tensor, b: Tensor) -> Tensor:
    divisor = torch.gcd(a, b)
    parts = torch.div(a, torch.where(divisor == 0, 1, divisor), rounding_mode="trunc")
    return (parts * b).abs()


_BITS = {torch.float64: torch.int64, torch.float32: torch.int32}
_BITS |= {torch.float16: torch.int16, torch.bfloat16: torch.int16}


def _nextafter(x: Tensor, to: Tensor) -> Tensor:
    """The bits of floats of one sign are ordered as they are."""
    x, to = torch.broadcast_tensors(x, to)
    integer = _BITS[x.dtype]
    bits = x.view(integer)
    away = (to > x) == (x > 0)
    near = torch.where(away, bits + 1, bits - 1).to(integer).view(x.dtype)
    least = torch.ones((), dtype=integer, device=x.device).view(x.dtype)
    near = torch.where(x == 0, torch.copysign(least, to), near)
    near = torch.where(x == to, to, near)
    return torch.where(torch.isnan(x) | torch.isnan(to), math.nan, near)


_FRACTION, _EXPONENT, _HALF = (1 << 52) - 1, 0x7FF, 1022  # of float64


def _frexp(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mantissas of at least 1/2 and exponents, by the bits of float64."""
    scaled = x.double() * 2.0**64 if x.dtype == torch.float64 else x.double()
    bits = scaled.view(torch.int64)
    exponent = ((bits >> 52) & _EXPONENT) - _HALF - (64 if x.dtype == torch.float64 else 0)
    mantissa = (bits & (~(_EXPONENT << 52)) | (_HALF << 52)).view(torch.float64)
    same = (x == 0) | ~torch.isfinite(x)
    mantissa = torch.where(same, x, mantissa.to(x.dtype))
    return mantissa, torch.where(same, 0, exponent).to(torch.int32)


def _rrelu(
    x: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    """Slopes below 0 that are random in training, and the middle of their range otherwise."""
    if training:
        return NotImplemented
    return torch.nn.functional.leaky_relu(x, (lower + upper) / 2), noise


def _hash_tensor(
    x: Tensor, dim: Sequence[int] = (), *, keepdim: bool = False, mode: int = 0
) -> Tensor:
    """The bits of all elements in 64, as of integers or of float64, by exclusive or."""
    bits = x.double().view(torch.int64) if x.is_floating_point() else x.to(torch.int64)
    axes = sorted(axis % max(1, x.ndim) for axis in dim) or list(range(x.ndim))
    if x.ndim == 0:
        return bits.to(torch.uint64)
    last = [axis - len(axes) for axis in range(len(axes))]
    rows = bits.movedim(axes, last).flatten(-len(axes))
    length = 1 << (rows.shape[-1] - 1).bit_length()
    rows = torch.nn.functional.pad(rows, (0, length - rows.shape[-1]))
    while length > 1:
        length //= 2
        rows = rows[..., :length] ^ rows[..., length:]
    result = rows.squeeze(-1)
    for axis in axes if keepdim else ():
        result = result.unsqueeze(axis)
    return result.to(torch.uint64)


# ---- Products, distances and norms.


def _addbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.bmm(wide(a), wide(b)) if a.is_floating_point() else torch.bmm(a, b)
    product = alpha * product.sum(0)
    return (product if beta == 0 else beta * x + product).to(x.dtype)


def _trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    factors = []
    for x, axes in ((a, expand1), (b, expand2), (c, expand3)):
        for axis in axes:
            x = x.unsqueeze(axis)
        factors.append(wide(x))
    product = factors[0] * factors[1] * factors[2]
    return (product.sum(list(sumdim)) if sumdim else product).to(a.dtype)


def _cdist(a: Tensor, b: Tensor, p: float, compute_mode: int | None) -> Tensor:
    return _distance(a.unsqueeze(-2) - b.unsqueeze(-3), p)


def _pdist(x: Tensor, p: float = 2.0) -> Tensor:
    first, second = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device)
    return _distance(x[first] - x[second], p)


def _distance(difference: Tensor, p: float) -> Tensor:
    if 0 in difference.shape:
        return difference.new_zeros(difference.shape[:-1])
    return torch.linalg.vector_norm(difference, p, -1)


def _var_mean(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    variance = torch.var(x, dim, correction=correction, keepdim=keepdim)
    axes = list(range(x.ndim)) if dim is None or not len(dim) else list(dim)
    return variance, torch.mean(x, axes, keepdim=keepdim)


def _rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """On a GPU, `rms_norm` is this operator; PyTorch 2.11 has no decomposition of it that exported
    programs are given.
    """
    given = wide(x)
    axes = list(range(-len(normalized_shape), 0))
    least = torch.finfo(given.dtype).eps if eps is None else eps
    scale = torch.rsqrt(given.square().mean(axes, keepdim=True) + least)
    normed = given * scale
    return (normed if weight is None else normed * weight).to(x.dtype), scale


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention whole, and the logarithms of the sums of the exponentials of its scores."""
    whole = _aten.scaled_dot_product_attention.default
    result = whole(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = wide(query) @ wide(key).transpose(-1, -2) * factor
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = torch.where(seen, scores, -math.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    return result, torch.logsumexp(scores, -1)


def _own_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor]:
    """What `nn.MultiheadAttention` calls in evaluation mode: attention of a sequence to itself with
    its projections. Where weights are not asked for, a query that may see no key gets 0, as it does
    from `scaled_dot_product_attention`; eager execution has NaN.
    """
    linear = torch.nn.functional.linear
    packed = linear(query, qkv_weight, qkv_bias)
    q, k, v = packed.unflatten(-1, (3, num_head, -1)).permute(2, 0, 3, 1, 4)
    hidden = None if mask is None else _hidden_keys(mask, mask_type)
    if not need_weights:
        shown = None if hidden is None else ~hidden
        mixed = _aten.scaled_dot_product_attention.default(q, k, v, shown)
        weights = query.new_empty(0)
    else:
        scores = wide(q * q.shape[-1] ** -0.5) @ wide(k).transpose(-1, -2)
        if hidden is not None:
            scores = torch.where(hidden, -math.inf, scores)
        weights = torch.softmax(scores, -1).to(q.dtype)
        mixed = weights @ v
        if average_attn_weights:
            weights = weights.mean(1)
    return linear(mixed.transpose(1, 2).flatten(2), proj_weight, proj_bias), weights


def _hidden_keys(mask: Tensor, mask_type: int | None) -> Tensor:
    """The keys that a query may not see: what is not 0 hides, also in masks of numbers."""
    hidden = mask.to(torch.bool)
    if mask_type == 1:  # [batch, keys]
        return hidden[:, None, None]
    return hidden  # [queries, keys], or of each head


def _encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """What `nn.TransformerEncoderLayer` calls in evaluation mode."""
    functions = torch.nn.functional
    attention = (embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias)

    def attended(x: Tensor) -> Tensor:
        return _own_attention(x, x, x, *attention, mask, False, True, mask_type)[0]

    def fed(x: Tensor) -> Tensor:
        inner = functions.linear(x, ffn_weight_1, ffn_bias_1)
        if use_gelu:  # on GPUs in the epilogue of cuBLAS, which has no other
            inner = functions.gelu(inner, approximate="tanh" if x.is_cuda else "none")
        else:
            inner = torch.relu(inner)
        return functions.linear(inner, ffn_weight_2, ffn_bias_2)

    def first_norm(x: Tensor) -> Tensor:
        return functions.layer_norm(x, [embed_dim], norm_weight_1, norm_bias_1, eps)

    def second_norm(x: Tensor) -> Tensor:
        return functions.layer_norm(x, [embed_dim], norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = attended(first_norm(src)) + src
        return fed(second_norm(x)) + x
    x = first_norm(attended(src) + src)
    return second_norm(fed(x) + x)


def _linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    *how: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss of logits that are made chunk by chunk; of gradients there are none here."""
    logits = torch.nn.functional.linear(x, weight, bias)
    loss = torch.nn.functional.cross_entropy(
        wide(logits),
        target if not target.is_floating_point() else wide(target),
        None if class_weight is None else wide(class_weight),
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    return loss.to(x.dtype), x.new_empty(0, 0), x.new_empty(0, 0), x.new_empty(0)


def _linear_cross_entropies(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    *how: Any,
) -> Tensor:
    given = (x, weight, target, bias, class_weight)
    return _linear_cross_entropy(*given, "none", ignore_index, 0.0)[0]


# ---- Places.


def _new_empty_strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], **options: Any
) -> Tensor:
    """Contiguous: nothing is said of its elements."""
    return x.new_empty(size, dtype=options.get("dtype"))


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **options: Any,
) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _resize(x: Tensor, size: Sequence[int], *, memory_format: Any = None) -> Any:
    """The first elements in another shape; more than there are have no values."""
    known = all(isinstance(n, int) for n in (*x.shape, *size))
    if not known or math.prod(size) > x.numel() or not x.is_contiguous():
        return NotImplemented
    return x.reshape(-1)[: math.prod(size)].reshape(tuple(size))


def _resize_as(x: Tensor, like: Tensor, *, memory_format: Any = None) -> Any:
    return _resize(x, like.shape)


def _as_strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    places = _places(x, size, stride, storage_offset)
    if places is None:
        return NotImplemented
    return x.reshape(-1)[places.reshape(-1)].reshape(tuple(size))


def _as_strided_scatter(
    x: Tensor,
    values: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Any:
    places = _places(x, size, stride, storage_offset)
    if places is None:
        return NotImplemented
    return x.reshape(-1).index_put([places], values).reshape(x.shape)


def _places(
    x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None
) -> Tensor | None:
    """Which elements of a tensor's memory a view reads; None where that is not its row of elements,
    or symbolic.
    """
    given = [*x.shape, *size, *stride, offset or 0, x.storage_offset()]
    if not all(isinstance(n, int) for n in given) or not x.is_contiguous() or x.storage_offset():
        return None
    places = torch.full([1] * len(size), offset or 0, device=x.device)
    for axis, (extent, step) in enumerate(zip(size, stride, strict=True)):
        shape = [1] * len(size)
        shape[axis] = extent
        places = places + (torch.arange(extent, device=x.device) * step).reshape(shape)
    return places.reshape(tuple(size))


def _combinations(x: Tensor, r: int = 2, with_replacement: bool = False) -> Any:
    """Of one and of two, by places and not by what a mask selects; others need constants, which
    `value_checks` has.
    """
    if x.ndim != 1 or r not in (1, 2):
        return NotImplemented
    if r == 1:
        return x.unsqueeze(-1)
    size = x.shape[0]
    return x[torch.triu_indices(size, size, int(not with_replacement), device=x.device).mT]


# ---- Orders.


def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    if x.ndim == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    values, places = torch.sort(x, stable=True, dim=dim)
    found = (values.narrow(dim, k - 1, 1), places.narrow(dim, k - 1, 1))
    return found if keepdim else (found[0].squeeze(dim), found[1].squeeze(dim))


def _nanmedian_along(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower one of the two in the middle of what is a number."""
    if x.ndim == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    values, places = torch.sort(x, stable=True, dim=dim)  # NaN last
    count = (~_is_nan(x)).sum(dim, keepdim=True)
    middle = torch.div(count - 1, 2, rounding_mode="floor").clamp(min=0)
    found = values.gather(dim, middle), places.gather(dim, middle)
    return found if keepdim else (found[0].squeeze(dim), found[1].squeeze(dim))


def _nanmedian(x: Tensor) -> Tensor:
    return _nanmedian_along(x.reshape(-1), 0)[0]


def _mode(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The least of the values that are there most often, and its last place."""
    if x.ndim == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    rows = x.transpose(dim, -1)
    counts = (rows.unsqueeze(-1) == rows.unsqueeze(-2)).sum(-1)
    frequent = counts == counts.amax(-1, keepdim=True)
    size = rows.shape[-1]
    order = torch.argsort(rows, stable=True, dim=-1)
    place = torch.arange(size, device=x.device)
    rank = torch.zeros_like(order).scatter(-1, order, place.expand(order.shape))
    first = torch.where(frequent, rank, size).argmin(-1, keepdim=True)
    value = rows.gather(-1, first)
    last = torch.where(rows == value, place, 0).amax(-1, keepdim=True)
    value, last = value.transpose(dim, -1), last.transpose(dim, -1)
    return (value, last) if keepdim else (value.squeeze(dim), last.squeeze(dim))


def known(library: Any, name: str, composite: Callable[..., Any]) -> dict[Any, Callable[..., Any]]:
    """An operator that not every version of PyTorch has."""
    return {getattr(library, name).default: composite} if hasattr(library, name) else {}


def chunked_losses() -> dict[Any, Callable[..., Any]]:
    """Those of operators that PyTorch defines when they are first used, which is while a graph is
    traced: too late for the table that the graph is traced with.
    """
    with suppress(ImportError):  # older than 2.14
        import_module("torch.nn.modules.linear_cross_entropy")
    name = "_linear_cross_entropy_batch_chunked"
    return {
        **known(_torch_nn, name, _linear_cross_entropy),
        **known(_torch_nn, f"{name}_no_reduction", _linear_cross_entropies),
    }


COMPOSITES: dict[Any, Callable[..., Any]] = {
    **known(_aten, "_fused_rms_norm", _rms_norm),
    **known(_aten, "rrelu_with_noise_functional", _rrelu),
    _aten._cdist_forward.default: _cdist,
    _aten._native_multi_head_attention.default: _own_attention,
    _aten._neg_view.default: torch.neg,
    _aten._pdist_forward.default: _pdist,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._transformer_encoder_layer_fwd.default: _encoder_layer,
    _aten._trilinear.default: _trilinear,
    _aten.addbmm.default: _addbmm,
    _aten.angle.default: _angle,
    _aten.as_strided.default: _as_strided,
    _aten.as_strided_scatter.default: _as_strided_scatter,
    _aten.combinations.default: _combinations,
    _aten.empty_strided.default: _empty_strided,
    _aten.fmax.default: _fmax,
    _aten.fmin.default: _fmin,
    _aten.frexp.Tensor: _frexp,
    **known(_aten, "hash_tensor", _hash_tensor),
    _aten.kthvalue.default: _kthvalue,
    _aten.lcm.default: _lcm,
    _aten.mode.default: _mode,
    _aten.nanmedian.default: _nanmedian,
    _aten.nanmedian.dim: _nanmedian_along,
    _aten.new_empty_strided.default: _new_empty_strided,
    _aten.nextafter.default: _nextafter,
    _aten.resize.default: _resize,
    _aten.resize_as.default: _resize_as,
    _aten.signbit.default: _signbit,
    _aten.var_mean.correction: _var_mean,
}
