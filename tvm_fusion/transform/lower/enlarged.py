"""Images that are enlarged whole times by their nearest elements: which, by a division of integers.

    resize2d(x, twice, "nearest_neighbor")        y[n, c, i, j] = x[n, c, i // 2, j // 2]

TVM computes places in float32 and rounds them, so that no reader of access maps knows what is read.
"""

from __future__ import annotations

from functools import partial

import tvm
from tvm import relax, te, tirx
from tvm.ir import Call, Expr, Op

from .legalizers import Legalizer

CENTRES = ("half_pixel", "pytorch_half_pixel")
ROUNDED = ("round", "round_prefer_floor", "round_prefer_ceil")
"""Of ``(i + 1/2) / n - 1/2``, which is never between two whole numbers: ``i // n``."""


def _legalize(name: str, builder: relax.BlockBuilder, call: Call) -> relax.Expr:
    repeats = _repeats(call)
    if repeats is None:
        return Op.get(name).get_attr("FLegalize")(builder, call)

    def enlarged(x: te.Tensor) -> te.Tensor:
        def at(*index: tirx.Var) -> te.Tensor:
            pairs = zip(index, repeats, strict=True)
            return x(*(i if n == 1 else tirx.floordiv(i, n) for i, n in pairs))

        return te.compute(list(call.ty.shape), at, name="resize")

    return builder.call_te(enlarged, call.args[0], primfunc_name_hint=name.rpartition(".")[2])


def _repeats(call: Call) -> list[int] | None:
    """How often the elements of an image are repeated along each dimension; None where it is no
    such change of its size.
    """
    attrs, x = call.attrs, call.args[0]
    mode, rounding = str(attrs.coordinate_transformation_mode), str(attrs.rounding_method)
    floors = mode in CENTRES and rounding in ROUNDED
    floors |= (mode, rounding) == ("asymmetric", "floor")
    if str(attrs.method) != "nearest_neighbor" or not floors or x.ty.dtype != call.ty.dtype:
        return None
    if not all(isinstance(ty.shape, relax.ShapeExpr) for ty in (x.ty, call.ty)):
        return None
    sizes = list(zip(x.ty.shape, call.ty.shape, strict=True))
    if len(str(attrs.layout)) != len(sizes):
        return None
    found = []
    for dim, (old, new) in zip(str(attrs.layout), sizes, strict=True):
        if dim in "NC":
            found.append(1)
        elif all(isinstance(n, tirx.IntImm) for n in (old, new)) and (
            int(old) > 0 and int(new) % int(old) == 0
        ):
            found.append(int(new) // int(old))
        elif (mode, rounding) == ("asymmetric", "floor") and _is_half(old, new):
            found.append(2)
        else:
            return None
    return found


def _is_half(old: Expr, new: Expr) -> bool:
    """Whether a size is half of a symbolic one, rounded up: ``i * old // new`` is ``i // 2`` then,
    also where the larger one is odd.
    """
    return tvm.sym.Analyzer().can_prove_equal(old, tirx.floordiv(new + 1, 2))


ENLARGED: dict[str, Legalizer] = {
    name: partial(_legalize, name) for name in ("relax.image.resize2d", "relax.image.resize3d")
}
"""For `relax.transform.LegalizeOps`."""
