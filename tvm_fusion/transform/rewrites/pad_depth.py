"""PadDepth: products over a number of terms that vector loads do not divide, filled up with zeros.

    y = matmul(x, w)                 x: float16 [M, 999]    w: const [999, N]
->  x_filled = nn.pad(x, 25 zeros behind each row)          # part of what computes x, or a copy
    y = matmul(x_filled, v)          v: const [1024, N], 25 rows of zeros

Rows of x are then a multiple of 16 bytes (of 128 where that costs little), which the tensor memory
accelerator needs; nothing is added to the sums. Constants are filled at compile time.

Does not handle (left alone): few rows, a symbolic number of terms, left operands that are
transpositions, types that tensor cores do not multiply.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import tvm
from tvm import relax
from tvm.relax import Expr, op
from tvm.relax.expr_functor import mutator

from ...config import HardwareProfile
from ...ir.weights import made
from ..decompose.opening import HALF_DTYPES, dtype_of, shape_of, static_size
from ..functions.functions import rewrite_functions
from .constant_weights import identity
from .factors import FLOAT8_DTYPES, Level, is_call, is_constant, swaps_last_axes
from .lean_weights import VECTOR_BYTES, padded
from .readers import BlockwiseMutator, Parts, Readers

LEAST_ROWS = 64  # fewer wait for the weights, and a copy is a second launch


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.PadDepth")
class PadDepth:
    """See the module docstring. Runs before LegalizeOps; a module without such products, or for a
    CPU, is returned as it is.
    """

    def __init__(self, hw: HardwareProfile | None) -> None:
        self.hw = hw

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        if self.hw is None or self.hw.kind == "llvm":
            return mod
        filler = _Filler(mod)
        return rewrite_functions(mod, filler.builder_, filler.fill_function)


def missing_terms(value: Expr | None) -> int:
    """The zeros to add to each row of a product's left operand; 0 for all other values."""
    if not is_call(value, "matmul") or any(len(shape_of(a) or ()) < 2 for a in value.args):
        return 0
    left, right = value.args
    dtype, terms = dtype_of(left), shape_of(left)[-1]
    if dtype not in (*HALF_DTYPES, *FLOAT8_DTYPES) or dtype_of(right) != dtype:
        return 0
    bytes_each = tvm.DataType(dtype).itemsize
    rows = static_size(shape_of(left)[:-1])
    if rows is not None and rows < LEAST_ROWS:
        return 0
    if not isinstance(terms, tvm.tirx.IntImm) or int(terms) * bytes_each % VECTOR_BYTES == 0:
        return 0
    return padded(int(terms), bytes_each) - int(terms)


@mutator
class _Filler(BlockwiseMutator):
    """Replaces the bindings of products."""

    def fill_function(self, func: relax.Function) -> relax.Function | None:
        """The function with its products filled up, or None where there was nothing to fill."""
        if not isinstance(func.body, relax.SeqExpr):
            return None
        self.readers, self.parts = Readers(func), Parts(self.builder_, func)
        self.known = {}
        self.changed = False
        filled = self.visit_expr(func)
        if not self.changed:
            return None
        return self.parts.tagged(relax.analysis.remove_all_unused(filled))

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        missing = missing_terms(binding.value)
        if not missing or self._below(binding.value.args[0]).flipped:
            super().visit_var_binding_(binding)
            return
        self.changed = True
        call, name = binding.value, binding.var.name
        left, right = (
            self._filled(name, arg, axis, missing)
            for arg, axis in zip(call.args, (-1, -2), strict=True)
        )
        product = op.matmul(left, right, out_dtype=dtype_of(call))
        self.parts.finish(self.visit_var_def(binding.var), product)

    def _below(self, operand: Expr) -> Level:
        """An operand, or what it is the transposition of."""
        value = self.readers.within(operand)
        if is_call(value, "permute_dims") and swaps_last_axes(value):
            return Level(value.args[0], flipped=True)
        return Level(operand)

    def _filled(self, name: str, operand: Expr, axis: int, missing: int) -> Expr:
        """An operand with zeros behind its last element along `axis` (-1 or -2)."""
        level = self._below(operand)
        ndim = len(shape_of(operand))
        axis = -3 - axis if level.flipped else axis
        widths = [0] * (2 * ndim)
        widths[2 * (ndim + axis) + 1] = missing
        if is_constant(level.source):
            pairs = np.reshape(widths, (ndim, 2)).tolist()
            shape = [n + sum(pair) for n, pair in zip(shape_of(level.source), pairs, strict=True)]
            how = (f"padded by {pairs}", partial(np.pad, pad_width=pairs))
            key = ("constant", identity(level.source), *widths)
            dtype = dtype_of(level.source)
            tensor = self._once(key, lambda: made(*how, level.source, shape, dtype))
        else:
            source = self.visit_expr(level.source)
            pad = op.nn.pad(source, widths, pad_value=0)
            key = ("tensor", hash(source), *widths)
            tensor = self._once(key, lambda: self.parts.bind(name, "filled", pad))
        if not level.flipped:
            return tensor
        axes = [*range(ndim - 2), ndim - 1, ndim - 2]
        return self.parts.bind(name, "flip", op.permute_dims(tensor, axes))

    def _once(self, key: tuple, make: Callable[[], Expr]) -> Expr:
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]
