"""What an exported program is decomposed to: core ATen operators, but for those kept whole, and for
decompositions of PyTorch's that are put right here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

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
    """Axes counted from the end are counted from the front: PyTorch 2.11 leaves them in the shape
    of the result where they have one element, and all that follows has a wrong shape, too.
    """
    if dim is None or all(axis >= 0 for axis in dim):
        return NotImplemented  # stays as it is
    axes = [axis % max(1, x.ndim) for axis in dim]
    return _aten.linalg_vector_norm(x, ord, axes, keepdim, dtype=dtype)


PUT_RIGHT = {
    _aten.index_fill.int_Scalar: _index_fill,
    _aten.index_fill.int_Tensor: _index_fill,
    _aten.linalg_vector_norm.default: _vector_norm,
}


def decompositions() -> Any:
    """The table that `ExportedProgram.run_decompositions` takes."""
    table = torch.export.default_decompositions()
    for operator in KEPT_WHOLE:
        table.pop(operator, None)
    table.update(PUT_RIGHT)
    return table
