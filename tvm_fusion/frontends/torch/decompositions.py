"""What an exported program is decomposed to: core ATen operators, but for those kept whole, and for
decompositions of PyTorch's that are put right here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import images
from .backward import BACKWARD
from .complex import complex_numbers, fourier
from .complex.complex_matrices import MATRICES
from .complex.complex_numbers import first_of, of_real
from .composites import COMPOSITES, chunked_losses
from .solvers import SOLVERS
from .special.one_variable import SPECIAL
from .written.scatters import SCATTERS
from .written.segments import SEGMENTS

_aten = torch.ops.aten

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
