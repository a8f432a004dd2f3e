"""16-bit floats: what is computed in float32, and where it is rounded.

After lowering, an expression of type float16 or bfloat16 occurs only directly under a cast to
float32: a load, or (exact mode) a value that is rounded and widened again.
"""

from __future__ import annotations

import numpy as np
from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ....errors import Unsupported
from ...program.expr import HALF_DTYPES, constant, convert, dtype_of, widened
from ..math import round_to_bfloat16
from .rewrite import LEAVES, Rewriter, call_name, children, is_conditional, rebuild, with_children


def round_constant(value: float, dtype: str) -> float:
    """`value` as the nearest number that `dtype` can hold."""
    if dtype == "float16":
        return float(np.float32(value).astype(np.float16))
    bits = int(np.float32(value).view(np.uint32))
    if not np.isfinite(value):
        return value
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16 & 0xFFFFFFFF
    return float(np.uint32(rounded).view(np.float32))


def rounded(value: Expr, dtype: str) -> Expr:
    """`value` rounded to `dtype`, as float32 again if `dtype` is a 16-bit float."""
    return convert(convert(value, dtype), widened(dtype))


def rounded_by_bits(value: Expr, dtype: str | None) -> Expr:
    """`rounded` for an expression that is final: a variable or a load. None rounds nothing."""
    if dtype is None:
        return value
    return round_to_bfloat16(value) if dtype == "bfloat16" else rounded(value, dtype)


class Widen(Rewriter):
    """Moves arithmetic on 16-bit floats to float32.

    Parameters
    ----------
    exact : bool
        Round after every operation, as the operations on 16-bit floats do.
    stored : dict
        Buffers that are kept in another type here: the new buffer.
    """

    def __init__(self, exact: bool, stored: dict[Var, Var]) -> None:
        super().__init__()
        self.exact = exact
        self.stored = stored

    def visit(self, expr: Expr) -> Expr:
        dtype = dtype_of(expr)
        if isinstance(expr, TensorLoad):
            source = self.stored.get(expr.source, expr.source)
            load = tirx.BufferLoad(source, [self(i) for i in expr.indices])
            return convert(load, widened(dtype_of(load)))
        if isinstance(expr, tirx.Cast):
            value = self(expr.value)
            if dtype not in HALF_DTYPES:
                return convert(value, dtype)
            return rounded(value, dtype) if self.exact else convert(value, "float32")
        if dtype not in HALF_DTYPES:
            return rebuild(expr, self)
        if isinstance(expr, tirx.FloatImm):
            return constant(round_constant(float(expr.value), dtype), "float32")
        if isinstance(expr, LEAVES) or call_name(expr) == "reinterpret":
            raise Unsupported(f"{expr} of type {dtype}")
        return self._operation(expr, dtype)

    def _operation(self, expr: Expr, dtype: str) -> Expr:
        """An operation with a 16-bit result, in float32."""
        operands = [self(x) for x in children(expr)]
        if call_name(expr):
            result = tirx.call_intrin("float32", expr.op, *operands)
        else:
            result = with_children(expr, operands)
        picks = is_conditional(expr) or isinstance(expr, tirx.Max | tirx.Min)
        return result if picks or not self.exact else rounded(result, dtype)
