"""What an exported program is decomposed to: core ATen operators, but for those kept whole, and for
decompositions of PyTorch's that are put right here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx
from torch._C import _functorch as functorch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._higher_order_ops.flex_attention import flex_attention
from torch._higher_order_ops.utils import reenter_make_fx
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from . import images
from .backward import BACKWARD
from .complex import complex_numbers, fourier
from .complex.complex_matrices import MATRICES
from .complex.complex_numbers import first_of, of_real
from .composites import COMPOSITES, chunked_losses, wide
from .solvers import SOLVERS
from .special.one_variable import SPECIAL
from .written.scatters import SCATTERS
from .written.segments import SEGMENTS

_aten = torch.ops.aten
_log = logging.getLogger(__name__)

# Their decompositions hide what they are: `linear` becomes view, permute, addmm, view; `matmul`
# becomes expand, view, bmm, view; attention scales twice and searches for rows without a key. That
# of `select_scatter` has another type than eager execution, that of `cosine_similarity` rounds
# norms to halves.
KEPT_WHOLE = (
    _aten.linear.default,
    _aten.matmul.default,
    _aten.scaled_dot_product_attention.default,
    _aten.silu.default,
    _aten.cross_entropy_loss.default,
    _aten.select_scatter.default,
    _aten.cosine_similarity.default,
    _aten.lstm.input,
    _aten.gru.input,
    _aten.rnn_tanh.input,
    _aten.rnn_relu.input,
    *images.KEPT_WHOLE,
)


def _index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
    """PyTorch's gives the result the strides of x by a copy in place, which stays in the program
    (2.11), or by `copy_strided` (2.14), where x is turned.
    """
    if not isinstance(value, torch.Tensor):
        value = torch.scalar_tensor(value, dtype=x.dtype, device=x.device)
    y = x.reshape(1) if x.ndim == 0 else x
    indices = [None] * (dim % y.ndim) + [index.reshape(-1)]
    return _aten.index_put(y, indices, value.to(x.dtype)).reshape(x.shape)


def _vector_norm(
    x: torch.Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """PyTorch's, which knows orders of 0 and infinity, of axes counted from the front: those that
    are counted from the end it leaves in the shape of the result where they have one element.
    """
    axes = None if dim is None else [axis % max(1, x.ndim) for axis in dim]
    table = torch._decomp.decomposition_table
    return table[_aten.linalg_vector_norm.default](x, ord, axes, keepdim, dtype=dtype)


def _cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Whole, but for smoothed labels and probabilities in their place."""
    if not label_smoothing and not target.is_floating_point():
        return NotImplemented
    axis = min(1, x.ndim - 1)
    classes = x.shape[axis]
    logarithms = torch.log_softmax(x, axis)
    if weight is not None:
        weight = weight.reshape([classes] + [1] * (x.ndim - axis - 1))
    if target.is_floating_point():
        target = target * (1 - label_smoothing) + label_smoothing / classes
        weighted = logarithms * target if weight is None else logarithms * target * weight
        losses = -weighted.sum(axis)
        return (losses, losses.sum() / losses.numel(), losses.sum())[reduction]
    counted = target != ignore_index
    weighted = logarithms if weight is None else logarithms * weight
    others = torch.where(counted, -weighted.sum(axis) / classes, 0)
    if reduction:
        others = others.sum()
    if reduction == 1 and weight is None:
        others = others / counted.sum()
    elif reduction == 1:
        own = weight.reshape(-1)[torch.where(counted, target, 0)]
        others = others / torch.where(counted, own, 0).sum()
    flat = None if weight is None else weight.reshape(-1)
    sure = _aten.cross_entropy_loss.default(x, target, flat, reduction, ignore_index, 0.0)
    return (1 - label_smoothing) * sure + label_smoothing * others


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    momentum: float,
    eps: float,
) -> Any:
    """Of halves with parameters in float32: in float32, rounded once."""
    parameters = (weight, bias, mean, variance)
    if all(p is None or p.dtype == x.dtype for p in parameters):
        return NotImplemented  # stays as it is
    wide = [None if p is None else p.float() for p in parameters]
    norm = _aten._native_batch_norm_legit_no_training.default
    result, *moments = norm(x.float(), *wide, momentum, eps)
    return result.to(x.dtype), *moments


def _of_scalars_too(original: Any) -> Any:
    """A function along an axis, of a scalar as of a row of one: TVM's takes none."""

    def decompose(x: torch.Tensor, dim: int, *options: Any) -> Any:
        return original(x.reshape(1), 0, *options).reshape(()) if x.ndim == 0 else NotImplemented

    return decompose


def _nothing(*given: Any, **options: Any) -> None:
    """A check of values, which raises in eager execution."""


# Those that PyTorch decomposes for compilers that ask for it, and that have no converter.
BY_TORCH = (
    _aten._batch_norm_with_update_functional.default,
    _aten._native_batch_norm_legit.default,
    _aten._native_batch_norm_legit.no_stats,
    _aten._native_batch_norm_legit_functional.default,
    _aten.native_batch_norm.default,
    _aten.addmv.default,
    _aten.as_strided_copy.default,
    _aten.bitwise_and.Scalar_Tensor,
    _aten.bitwise_or.Scalar_Tensor,
    _aten.bitwise_xor.Scalar_Tensor,
    _aten.dist.default,
    _aten.div.Scalar_mode,
    _aten.ldexp.Tensor,
    _aten.narrow_copy.default,
    _aten.permute_copy.default,
    _aten.remainder.Scalar_Tensor,
    _aten.unbind_copy.int,
    _aten.upsample_bicubic2d.default,
    _aten.upsample_bilinear2d.default,
    _aten.upsample_trilinear3d.default,
    _aten.view_copy.default,
    _aten.view_copy.dtype,
)

PUT_RIGHT = {
    **images.DECOMPOSITIONS,
    **BACKWARD,
    **COMPOSITES,
    **SCATTERS,
    **SEGMENTS,
    **SOLVERS,
    **SPECIAL,
    _aten._native_batch_norm_legit_no_training.default: _batch_norm,
    **{op: _of_scalars_too(op) for op in (_aten._softmax.default, _aten._log_softmax.default)},
    _aten.cross_entropy_loss.default: _cross_entropy,
    _aten._linalg_check_errors.default: _nothing,
    _aten.index_fill.int_Scalar: _index_fill,
    _aten.index_fill.int_Tensor: _index_fill,
    _aten.linalg_vector_norm.default: _vector_norm,
}

# Those that compute nothing but copies, or compute in a type that they make of that of x.
OF_COMPLEX_TOO = (
    _aten._linalg_check_errors.default,
    _aten.as_strided_scatter.default,
    _aten.index_add.default,
    _aten.index_copy.default,
    _aten.index_fill.int_Scalar,
    _aten.index_fill.int_Tensor,
    _aten.linalg_matrix_exp.default,
    _aten.masked_scatter.default,
    _aten.put.default,
)


def decompositions(of_complex: bool = True) -> Any:
    """The table that `ExportedProgram.run_decompositions` takes, with what there is of complex
    operands alone or without.
    """
    table = torch.export.default_decompositions()
    for operator in KEPT_WHOLE:
        table.pop(operator, None)
    table.update(torch._decomp.get_decompositions(BY_TORCH))  # of those that this version has
    for operator, rule in {**PUT_RIGHT, **chunked_losses()}.items():
        if operator not in OF_COMPLEX_TOO:
            # what PyTorch makes of a solver has checks, whose order among others is kept by tokens
            others = None if operator in SOLVERS else table.pop(operator, None)
            rule = first_of(of_real(rule), others)
        table[operator] = rule
    rules = {**complex_numbers.OF_REAL, **fourier.DECOMPOSITIONS}
    if of_complex:
        matrices = {op: complex_numbers.of_complex(rule) for op, rule in MATRICES.items()}
        rules.update({**complex_numbers.OF_COMPLEX, **matrices})
    for operator, rule in rules.items():
        table[operator] = first_of(rule, table.pop(operator, None))
    return table


# ---- `torch.nn.attention.flex_attention`, which calls functions of a score and of its place.
#
#     flex_attention(q, k, v, f, mask)
#         s = f(q k^T * scale, b, h, i, j);  softmax(where(mask(b, h, i, j), s, -inf)) v
#
# The functions are applied to all scores at once. As in eager execution, what a mask shows is what
# its function says, not its blocks. Those that `vmap` cannot map stay whole, and run in torch.

_is_opened: ContextVar[bool] = ContextVar("is_opened", default=False)
_PLACES = (0, 1, 2, 3)  # batch, head, query, key


@contextmanager
def flex_attention_opened() -> Iterator[None]:
    """A context in which torch traces `flex_attention` as the operators that it is composed of."""
    if flex_attention.python_key_table[ProxyTorchDispatchMode] is not _traced_flex_attention:
        _whole.append(flex_attention.python_key_table[ProxyTorchDispatchMode])
        flex_attention.python_key_table[ProxyTorchDispatchMode] = _traced_flex_attention
    token = _is_opened.set(True)
    try:
        yield
    finally:
        _is_opened.reset(token)


_whole: list[Callable[..., Any]] = []  # what torch traces it with


def _traced_flex_attention(mode: ProxyTorchDispatchMode, *given: Any, **options: Any) -> Any:
    if _is_opened.get():
        maps_each = functorch._is_vmap_fallback_enabled()
        functorch._set_vmap_fallback_enabled(False)  # which calls an operator for each element
        try:
            return _opened_flex_attention(mode, *given, **options)
        except Exception as error:  # of a function that is called with all places
            _log.info("flex_attention stays whole: %s", error)
        finally:
            functorch._set_vmap_fallback_enabled(maps_each)
    return _whole[-1](mode, *given, **options)


def _opened_flex_attention(
    mode: ProxyTorchDispatchMode,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    block_mask: tuple,
    scale: float,
    kernel_options: Any,
    score_mod_other_buffers: tuple = (),
    mask_mod_other_buffers: tuple = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    place = [query.new_zeros((), dtype=torch.int) for _ in _PLACES]
    score = wide(query.new_zeros(()))
    with TransformGetItemToIndex():
        change = reenter_make_fx(score_mod)(score, *place, *score_mod_other_buffers)
        shows = reenter_make_fx(block_mask[-1])(*place, *mask_mod_other_buffers)
    with mode:
        key, value = (_as_queries(x, query) for x in (key, value))
        places = [torch.arange(n, device=query.device) for n in (*query.shape[:3], key.shape[2])]
        shown = None
        if not _is_true(shows):
            shown = _at_places(shows, [], places, mask_mod_other_buffers)
        scores = wide(query) @ wide(key).transpose(-2, -1) * scale
        is_changed = _result(change) is not change.graph.find_nodes(op="placeholder")[0]
        if is_changed:
            scores = _at_places(change, [scores], places, score_mod_other_buffers)
        if shown is not None:
            scores = torch.where(shown, scores, -math.inf)
        # where nothing hides a key, every query sees one
        softmax = _aten._safe_softmax if is_changed or shown is not None else torch.softmax
        result = softmax(scores, -1).to(query.dtype) @ value.to(query.dtype)
        two = math.log(2)
        statistics = torch.logsumexp(scores, -1) / two, scores.amax(-1) / two
        return _laid_as(result, query), *statistics


def _result(graph: fx.GraphModule) -> Any:
    """The node that a graph returns."""
    (result,) = graph.graph.output_node().args
    return result


def _is_true(graph: fx.GraphModule) -> bool:
    """Whether a graph returns True whatever it is given."""
    made = _result(graph)
    return made.target is _aten.full.default and bool(made.args[1])


def _at_places(
    graph: fx.GraphModule,
    scores: Sequence[torch.Tensor],
    places: Sequence[torch.Tensor],
    buffers: Sequence[Any],
) -> torch.Tensor:
    """What a graph makes of each score and its place, or of places alone; axes of places that it
    does not read have one element there.
    """
    taken = graph.graph.find_nodes(op="placeholder")[len(scores) :]
    mapped = [at for at in _PLACES if scores or taken[at].users]
    apply: Callable[..., torch.Tensor] = graph
    for at in reversed(mapped):
        axes = [0 if other == at else None for other in _PLACES]
        apply = torch.vmap(apply, (*[0] * len(scores), *axes, *[None] * len(buffers)))
    given = [x if at in mapped else x.new_zeros(()) for at, x in enumerate(places)]
    found = apply(*scores, *given, *buffers)
    for at in _PLACES:
        if at not in mapped:
            found = found.unsqueeze(at)
    return found


def _as_queries(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values, repeated for the queries that share them."""
    batch, heads = query.shape[:2]
    if x.shape[1] != heads:
        groups = heads // x.shape[1]
        x = x.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2)
    return x if x.shape[0] == batch else x.expand(batch, -1, -1, -1)


def _laid_as(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """x with its axes in memory in the order of those of the queries, the last one last."""
    order = [*sorted(range(3), key=lambda axis: -query.stride(axis)), 3]
    if order == [0, 1, 2, 3]:
        return x
    back = sorted(range(4), key=order.__getitem__)
    return x.permute(order).contiguous().permute(back)
