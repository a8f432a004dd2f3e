"""Other sizes of images by the nearest elements, which whole multiples of the old size repeat.

y = interpolate(x, scale_factor=2)        y[i, j] = x[i // 2, j // 2]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx
from tvm import relax

from ..importer import Importer, bound_arguments
from ..operators import Converter

_aten = torch.ops.aten

REPEATED = (
    _aten.upsample_nearest1d.vec,
    _aten.upsample_nearest3d.vec,
    _aten._upsample_nearest_exact1d.vec,
    _aten._upsample_nearest_exact2d.vec,
    _aten._upsample_nearest_exact3d.vec,
)
"""Of whole multiples they repeat elements, for which PyTorch's decompositions have tables."""


def _enlarged(importer: Importer, node: fx.Node) -> relax.Expr:
    """Whole times the size by the nearest element: `_repeated` lets no other sizes stay."""
    x = importer.value_of(bound_arguments(node)["input"])
    old, new = node.all_input_nodes[0].meta["val"].shape, node.meta["val"].shape
    for axis in range(2, len(new)):
        count = new[axis] // old[axis]
        if count > 1:
            x = importer.emit(relax.op.repeat(x, count, axis))
    return x


CONVERTERS: dict[str, Converter] = {operator.__name__: _enlarged for operator in REPEATED}


# ---- Decompositions of PyTorch's, where TVM's operators compute something else.


def _repeats(old: int, new: int, is_exact: bool = False, factor: float | None = None) -> bool:
    """Whether the nearest elements are repeated ones: PyTorch multiplies with the inverse of the
    factor in float32, which gives another element of 41 times the size, and of 3.1 times a size of
    4. Once and twice the size it knows without.
    """
    if old < 1 or new % old:
        return False
    if is_exact or new in (old, 2 * old):
        return True
    step = np.float32(1 / factor) if factor else np.float32(old) / np.float32(new)
    places = np.arange(new, dtype=np.float32) * step
    return bool((np.floor(places) == np.arange(new) // (new // old)).all())


def _nearest(original: Any) -> Callable[..., Any]:
    """Sizes that are no multiples of the old ones: TVM takes other pixels."""

    def decompose(x: torch.Tensor, output_size: Any, scale_factors: Any = None) -> Any:
        rank = x.ndim - 2
        old = x.shape[-rank:]
        new = output_size or [int(s * f) for s, f in zip(old, scale_factors, strict=True)]
        factors = [None] * rank if output_size else scale_factors
        sizes = zip(old, new, factors, strict=True)
        if all(_repeats(a, b, factor=factor) for a, b, factor in sizes):
            return NotImplemented
        return torch._decomp.decomposition_table[original](x, output_size, scale_factors)

    return decompose


def _repeated(original: Any) -> Callable[..., Any]:
    """Sizes that are no multiples, are not known, or are not what factors make of the old ones."""
    is_exact = "exact" in str(original)

    def decompose(x: torch.Tensor, output_size: Any, scale_factors: Any = None) -> Any:
        old = x.shape[2:]
        if output_size:
            pairs = list(zip(old, output_size, strict=True))
            whole = all(isinstance(n, int) for pair in pairs for n in pair)
        else:
            whole = all(isinstance(n, int) for n in old)
            whole = whole and all(f >= 1 and f == int(f) for f in scale_factors)
            pairs = [(n, n * int(f)) for n, f in zip(old, scale_factors, strict=True)]
        if whole and all(_repeats(a, b, is_exact) for a, b in pairs):
            return NotImplemented
        return torch._decomp.decomposition_table[original](x, output_size, scale_factors)

    return decompose


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _aten.upsample_nearest2d.vec: _nearest(_aten.upsample_nearest2d.vec),
    **{operator: _repeated(operator) for operator in REPEATED},
}
