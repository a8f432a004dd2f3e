"""Concatenations of many tensors: a search for the part of an element, in place of TVM's chain.

    Before    if i < n1: a[i] else if i < n1 + n2: b[i - n1] else if ... c[...]
    After     if i < n1 + n2: (if i < n1: a[i] else b[i - n1]) else (if ...)

Where each condition stands within the one before, hundreds of them are deeper than what reads,
simplifies and compiles kernels can recurse, and the last part costs hundreds of comparisons.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tvm import relax, te, tirx
from tvm.ir import Call, Expr, Op

from .half_operators import Legalizer

MANY = 32  # parts; below it TVM's own form, which other passes know


def concatenate_many(parts: Sequence[te.Tensor], axis: int) -> te.Tensor:
    """The concatenation of tensors that differ in one axis only."""
    begins = [0, *itertools.accumulate(part.shape[axis] for part in parts)]
    shape = [*parts[0].shape[:axis], begins[-1], *parts[0].shape[axis + 1 :]]

    def at(*index: Expr) -> Expr:
        def among(first: int, last: int) -> Expr:
            """The element, which lies in one of the parts from `first` to before `last`."""
            if last - first == 1:
                place = index[axis] - begins[first]
                return parts[first](*index[:axis], place, *index[axis + 1 :])
            middle = (first + last) // 2
            halves = among(first, middle), among(middle, last)
            return tirx.if_then_else(index[axis] < begins[middle], *halves)

        return among(0, len(parts))

    return te.compute(shape, at, name="concatenate")


def _legalize(builder: relax.BlockBuilder, call: Call) -> relax.Expr:
    parts, axis = call.args[0], call.attrs.axis
    if not isinstance(parts, relax.Tuple) or len(parts.fields) < MANY or axis is None:
        return Op.get("relax.concat").get_attr("FLegalize")(builder, call)
    axis = int(axis) % call.ty.ndim
    return builder.call_te(
        concatenate_many, list(parts.fields), axis, primfunc_name_hint="concatenate"
    )


LEGALIZERS: dict[str, Legalizer] = {"relax.concat": _legalize}
"""For `relax.transform.LegalizeOps`."""
