"""WrapIntegers: small integers wrap around on a GPU, too.

    a - b       a, b: int8       ->  Cast(int8, Cast(int32, a) - Cast(int32, b))

TVM 0.27 writes ``a - b`` into CUDA code, where C computes it as an int: what the unfused graph
stores in 8 bits, a fused kernel would use with all of them.

Does not handle: vectors, and operators other than sums, differences, products, left shifts and
complements.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.ir import Expr
from tvm.ir.prim.expr import BitwiseNot, LShift

from ..functions.functions import rewritten

NARROW = ("int8", "uint8", "int16", "uint16")
WIDE = "int32"


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.WrapIntegers")
class WrapIntegers:
    """See the module docstring. Functions without such arithmetic stay as they are."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod` with the arithmetic of its PrimFuncs written out."""
        return rewritten(mod, RULES)


def _wrapped(expr: Expr) -> Expr:
    dtype = str(expr.ty.dtype)
    if dtype not in NARROW:
        return expr
    wide = type(expr)(tirx.Cast(WIDE, expr.a), tirx.Cast(WIDE, expr.b))
    return tirx.Cast(dtype, wide)


def _wrapped_not(expr: BitwiseNot) -> Expr:
    dtype = str(expr.ty.dtype)
    if dtype not in NARROW:
        return expr
    return tirx.Cast(dtype, BitwiseNot(tirx.Cast(WIDE, expr.a)))


RULES = [
    *((kind, _wrapped) for kind in (tirx.Add, tirx.Sub, tirx.Mul, LShift)),
    (BitwiseNot, _wrapped_not),
]
"""For `functions.rewritten`."""
