"""PackedWeights: constants that are stored in fewer bytes than they are computed with stay so.

    w = astype(const int8 [K, N], "float16")      a float16 constant, if it were folded
    y = matmul(x, w)

What stands between them and a product is computed on the device, in each call: less is read, and
more is computed. Those are int8, uint8 and float8 constants that are widened, and 32-bit integers
that are taken apart by shifts and masks.

Does not handle: constants with one long axis, functions other than `main`.
"""

from __future__ import annotations

import math

import tvm
from tvm.ir import Call
from tvm.relax import Expr
from tvm.relax.expr_functor import mutator

from ...config import HardwareProfile
from ..decompose.opening import dtype_of, shape_of
from .factors import PACKED_DTYPES, is_call, is_constant
from .hidden_weights import Hider, on_gpu
from .readers import Reader

LEAST_ELEMENTS = 1 << 12  # smaller constants stay in the caches, whatever their type

_UNPACKING = ("right_shift", "left_shift", "bitwise_and")
_MOVES = ("reshape", "permute_dims", "expand_dims", "squeeze")


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.PackedWeights")
class PackedWeights:
    """See the module docstring. Runs before LegalizeOps, `BindWeights` after FoldConstant. A module
    without such weights, or for a CPU, is returned as it is.
    """

    def __init__(self, hw: HardwareProfile | None) -> None:
        self.hw = hw

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Keeper(mod).hide(mod) if on_gpu(self.hw, mod) else mod


def is_matrix(constant: Expr) -> bool:
    """Whether a constant has two long axes, and elements worth a thought."""
    extents = [int(extent) for extent in shape_of(constant)]
    size = math.prod(extents)
    return len(extents) > 1 and size >= LEAST_ELEMENTS and size > max(extents)


@mutator
class _Keeper(Hider):
    def rewritten(self, call: Call) -> Expr | None:
        if not is_call(call, "astype", *_UNPACKING, *_MOVES):
            return None
        args = [self._kept(call, arg) for arg in call.args]
        if all(new.same_as(old) for new, old in zip(args, call.args, strict=True)):
            return None
        return type(call)(call.op, args, call.attrs, call.ty_args, call.span)

    def _kept(self, call: Call, arg: Expr) -> Expr:
        if not is_constant(arg) or not is_matrix(arg):
            return arg
        readers = self.readers.of_constant(arg)
        words = dtype_of(arg) in ("int32", "uint32")
        keeps = any(map(self._is_taken_apart, readers)) if words else dtype_of(arg) in PACKED_DTYPES
        if not keeps or not any(map(self._becomes_operand, readers)):
            return arg
        return self.hidden(arg, "packed", lambda: arg.value)

    def _is_taken_apart(self, reader: Reader) -> bool:
        """Whether shifts or masks follow, at once or after the words were moved."""
        value = self.readers.lookup(reader.var)
        if is_call(value, *_UNPACKING):
            return True
        return is_call(value, *_MOVES) and any(
            map(self._is_taken_apart, self.readers.of(reader.var))
        )

    def _becomes_operand(self, reader: Reader) -> bool:
        """Whether a product reads a constant, or what is made of constants alone."""
        value = self.readers.lookup(reader.var)
        if is_call(value, "matmul"):
            return True
        if reader.var is None or not all(map(self._is_known, getattr(value, "args", ()))):
            return False
        return any(map(self._becomes_operand, self.readers.of(reader.var)))

    def _is_known(self, expr: Expr) -> bool:
        if isinstance(expr, tvm.relax.Tuple):
            return all(map(self._is_known, expr.fields))
        if not isinstance(expr.ty, tvm.relax.TensorType) or is_constant(expr):
            return True
        value = self.readers.lookup(expr)
        return value is not None and all(map(self._is_known, getattr(value, "args", ())))
