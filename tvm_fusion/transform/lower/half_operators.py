"""Operators of 16-bit floats that TVM cannot legalize: one kernel that computes in float32.

    Before                              After
    y: bfloat16 = R.power(x, p)         def power(x: bfloat16, p: bfloat16, y: bfloat16):
                                            y = bfloat16(pow(float32(x), float32(p)))

TVM refuses some of them. Others get a float32 result from it, whatever the operator's type says,
and what reads that fails. It divides means of float16 by the number of their elements as float16,
which ends at 65,504. The median of bfloat16 it sorts as `widen_sorts` says.

Does not handle: group_norm and prelu of bfloat16, which no module can hold: TVM has no type for
their results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax, te, tirx, topi
from tvm.ir import Call

BOTH = ("float16", "bfloat16")
DTYPES = {
    "relax.image.grid_sample": BOTH,
    "relax.isfinite": ("bfloat16",),
    "relax.isinf": ("bfloat16",),
    "relax.isnan": ("bfloat16",),
    "relax.log_add_exp": ("bfloat16",),
    "relax.median": ("bfloat16",),
    "relax.nn.batch_norm": BOTH,
    "relax.power": ("bfloat16",),
    "relax.vision.roi_align": BOTH,
}
"""The dtypes of the first operand that TVM's own legalization does not take."""

MEANS = ("relax.mean", "relax.variance", "relax.std")
_LARGEST = 65504  # of float16: stands for infinity in a reference (`check.reference`)

# A builder and a relax.Call in, what stands for it out.
Legalizer = Callable[[relax.BlockBuilder, Call], relax.Expr]


def needs_float32(call: Call) -> bool:
    """Whether TVM's own legalization does not take a call of an operator, or its dtype."""
    dtype = str(call.args[0].ty.dtype)
    if call.op.name in MEANS:
        return dtype == "float16" and not _elements_of_mean(call) < _LARGEST
    return dtype in DTYPES.get(call.op.name, ())


def _elements_of_mean(call: Call) -> float:
    """How many elements become one; infinite where that is not known."""
    shape = getattr(call.args[0].ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr):
        return math.inf
    axes = range(len(shape.values)) if call.attrs.axis is None else call.attrs.axis
    extents = [shape.values[int(axis)] for axis in axes]
    return math.prod(int(e) if isinstance(e, tirx.IntImm) else math.inf for e in extents)


def _legalizer(name: str) -> Legalizer:
    """The legalization of an operator; of what does not need float32, TVM's own."""
    default = tvm.ir.Op.get(name).get_attr("FLegalize")

    def legalize(builder: relax.BlockBuilder, call: Call) -> relax.Expr:
        if not needs_float32(call):
            return default(builder, call)
        return default(_Float32Builder(builder, _dtypes_of(call.ty)), call)

    return legalize


class _Float32Builder:
    """Stands for the builder in a legalization of TVM's: what that computes, in float32."""

    def __init__(self, builder: relax.BlockBuilder, dtypes: list[str]) -> None:
        self.builder, self.dtypes = builder, dtypes

    def call_te(self, func: Callable, *args: Any, **kwargs: Any) -> relax.Expr:
        """The call of one kernel, with results of `dtypes`."""

        def in_float32(*args: Any, **kwargs: Any) -> te.Tensor | list[te.Tensor]:
            wide = {key: _widen(value) for key, value in kwargs.items()}
            found = func(*map(_widen, args), **wide)
            if isinstance(found, te.Tensor):
                return topi.cast(found, self.dtypes[0])
            return [topi.cast(r, dtype) for r, dtype in zip(found, self.dtypes, strict=True)]

        kwargs.setdefault("primfunc_name_hint", func.__name__)
        return self.builder.call_te(in_float32, *args, **kwargs)


def _widen(value: Any) -> Any:
    """A 16-bit tensor or number as float32; anything else as it is."""
    if isinstance(value, te.Tensor) and str(value.dtype) in BOTH:
        return topi.cast(value, "float32")
    if isinstance(value, tirx.FloatImm):
        return tirx.FloatImm("float32", value.value)
    return value


def _dtypes_of(ty: relax.Type) -> list[str]:
    fields = ty.fields if isinstance(ty, relax.TupleType) else [ty]
    return [str(field.dtype) for field in fields]


LEGALIZERS = {name: _legalizer(name) for name in (*DTYPES, *MEANS)}
"""For `relax.transform.LegalizeOps`."""
