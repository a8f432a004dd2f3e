"""Integers that become floats, hidden from TVM's analysis of ranges.

    position = T.float32(i * 4 + j)             position = T.float32(i * 4 + j | 0)
    angle = position * rate                     angle = position * rate

Where `i` and `j` have bounds, so has `position`; and `IntervalSet` of TVM 0.27 compares the sign of
a product of an interval and a variable with an integer zero of their dtype, which for a float is an
error ("IntImm supports only int or uint or bool type, but float32 was supplied"). What it cannot
read has no bounds, and a compiler drops an or with 0.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr, TensorLoad

from ...kernels.program.expr import dtype_of

_FLOATS = ("float", "bfloat")
_INTEGERS = frozenset(["int32", "int64", "uint32", "uint64"])
"""Those that loops count in."""


def _hidden(cast: tirx.Cast) -> Expr:
    dtype = dtype_of(cast.value)
    whole = dtype in _INTEGERS and dtype_of(cast).startswith(_FLOATS)
    if not whole or isinstance(cast.value, tirx.IntImm | TensorLoad):
        return cast
    return tirx.Cast(cast.ty, tirx.bitwise_or(cast.value, tirx.IntImm(dtype, 0)))


RULES = [(tirx.Cast, _hidden)]
"""For `rewritten`, of functions before they are lowered."""
