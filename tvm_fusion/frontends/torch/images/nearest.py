"""Other sizes of images by the nearest elements, which whole multiples of the old size repeat.

y = interpolate(x, scale_factor=2)        y[i, j] = x[i // 2, j // 2]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import sympy
import torch
import tvm
from torch import fx
from tvm import relax, te, tirx

from ..importer import Importer, are_equal, bound_arguments, shape_of
from ..operators import Converter

_aten = torch.ops.aten
Size = int | torch.SymInt

LONGEST = 1 << 14
"""Elements of a line for which a symbolic number of them stands: places are told in float32."""
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
    counts = [_times(*sizes) for sizes in zip(old, new, strict=True)]
    shape = shape_of(node.meta["val"], importer.symbols)
    enlarged = [size * count for size, count in zip(x.ty.shape, counts, strict=True)]
    if shape is not None and not are_equal(enlarged, shape):
        # PyTorch may know that twice (n - 1) // 2 + 1 is n, where n is even.
        if counts[2:] == [2, 2]:
            return importer.emit(_twice(x, shape[2:]))
        return importer.block_builder.emit_te(_repeated_by, x, counts, shape)
    for axis, count in enumerate(counts):
        if count > 1:
            x = importer.emit(relax.op.repeat(x, count, axis))
    return x


def _twice(image: relax.Expr, shape: Sequence[Size]) -> relax.Expr:
    """An operator that passes about layouts know; see `transform.lower.enlarged`."""
    return relax.op.image.resize2d(
        image,
        relax.ShapeExpr(shape),
        layout="NCHW",
        method="nearest_neighbor",
        coordinate_transformation_mode="asymmetric",
        rounding_method="floor",
    )


def _repeated_by(x: te.Tensor, counts: Sequence[int], shape: Sequence[tvm.ir.Expr]) -> te.Tensor:
    def at(*index: tirx.Var) -> te.Tensor:
        pairs = zip(index, counts, strict=True)
        return x(*(i if n == 1 else tirx.floordiv(i, n) for i, n in pairs))

    return te.compute(shape, at, name="resize")


def _enlarged_2d(importer: Importer, node: fx.Node) -> relax.Expr:
    """By TVM's converter, which takes known sizes; else whole times the size, as above."""
    old, new = node.all_input_nodes[0].meta["val"].shape, node.meta["val"].shape
    if all(isinstance(n, int) for n in (*old[2:], *new[2:])):
        return importer._upsample_nearest2d(node)
    return _enlarged(importer, node)


CONVERTERS: dict[str, Converter] = {
    **{found.__name__: _enlarged for found in REPEATED},
    _aten.upsample_nearest2d.vec.__name__: _enlarged_2d,
}


# ---- Decompositions of PyTorch's, where TVM's operators compute something else.


def _times(old: Size, new: Size) -> int | None:
    """How many times a size is another one for all values of symbols; None where it is not."""
    if isinstance(old, int) and isinstance(new, int):
        return new // old if old and new % old == 0 else None
    found = sympy.simplify(_expression(new) / _expression(old))
    return int(found) if isinstance(found, sympy.Integer) and found > 0 else None


def _expression(size: Size) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _repeats_symbols(
    old: Sequence[Size],
    new: Sequence[Size] | None,
    factors: Sequence[float] | None,
    is_exact: bool = False,
) -> bool:
    """Whether the nearest elements of images of symbolic size are repeated ones."""
    if new:
        counts = [_times(a, b) for a, b in zip(old, new, strict=True)]
    else:
        counts = [int(f) if f >= 1 and f == int(f) else None for f in factors]
    if None in counts:
        return False
    given = counts if not new else [None] * len(counts)
    pairs = zip(counts, given, strict=True)
    return all(_repeats(LONGEST, LONGEST * n, is_exact, f) for n, f in pairs)


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
        if not all(isinstance(n, int) for n in (*old, *(output_size or ()))):
            if _repeats_symbols(old, output_size, scale_factors):
                return NotImplemented
            return torch._decomp.decomposition_table[original](x, output_size, scale_factors)
        new = output_size or [int(s * f) for s, f in zip(old, scale_factors, strict=True)]
        factors = [None] * rank if output_size else scale_factors
        sizes = zip(old, new, factors, strict=True)
        if all(_repeats(a, b, factor=factor) for a, b, factor in sizes):
            return NotImplemented
        return torch._decomp.decomposition_table[original](x, output_size, scale_factors)

    return decompose


def _repeated(original: Any) -> Callable[..., Any]:
    """Sizes that are no multiples, or are not what factors make of the old ones."""
    is_exact = "exact" in str(original)

    def decompose(x: torch.Tensor, output_size: Any, scale_factors: Any = None) -> Any:
        old = x.shape[2:]
        if not all(isinstance(n, int) for n in (*old, *(output_size or ()))):
            if _repeats_symbols(old, output_size, scale_factors, is_exact):
                return NotImplemented
            return torch._decomp.decomposition_table[original](x, output_size, scale_factors)
        if output_size:
            pairs, whole = list(zip(old, output_size, strict=True)), True
        else:
            whole = all(f >= 1 and f == int(f) for f in scale_factors)
            pairs = [(n, n * int(f)) for n, f in zip(old, scale_factors, strict=True)]
        if whole and all(_repeats(a, b, is_exact) for a, b in pairs):
            return NotImplemented
        return torch._decomp.decomposition_table[original](x, output_size, scale_factors)

    return decompose


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _aten.upsample_nearest2d.vec: _nearest(_aten.upsample_nearest2d.vec),
    **{found: _repeated(found) for found in REPEATED},
}
