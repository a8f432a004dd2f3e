"""Constants that cost more to read than to widen or to compute.

Constant folding widens the gamma of a half-precision norm ahead, and evaluates an `arange` of class
numbers: every row would read them. Of the shifts that take packed words apart a kernel knows only
what it computes itself. A mask that hides later keys says so only where it is computed of indices.

    scale(x, const(float32 [4096], exact in float16))  ->  scale(x, astype(const(float16 [4096])))
    equal(label, const([0, 1, 2, ...]))                ->  equal(label, call_tir(arange, ()))
    add(scores, const(0 where j <= i, else -inf))      ->  add(scores, call_tir(band, ()))

What is added is fused where the constant is read. Looked at are constants with one axis longer than
1 (row and column vectors, not the operands of matrix products), and matrices that are a `Band`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.ir import Expr
from tvm.relax.expr_functor import PyExprMutator, mutator

from ...ir.weights import numbers, tensor_of, weight_of

LEAST_ELEMENTS = 64  # below, a cast costs more than it saves
HALVES = (np.float16, ml_dtypes.bfloat16)


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.LeanConstants")
class LeanConstants:
    """A module pass over legalized modules; the operators it adds are to be legalized."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        rewriter = _Rewriter(mod)
        for gvar, func in mod.functions_items():
            if isinstance(func, relax.Function):
                rewriter.builder_.update_func(gvar, rewriter.visit_expr(func))
        return rewriter.builder_.finalize()


@mutator
class _Rewriter(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if call.op != tvm.ir.Op.get("relax.call_tir"):
            return call
        function, tensors, *rest = call.args
        fields = [self._lean(field) for field in tensors.fields]
        if all(new.same_as(old) for new, old in zip(fields, tensors.fields, strict=True)):
            return call
        args = [function, relax.Tuple(fields), *rest]
        return relax.Call(call.op, args, call.attrs, call.ty_args, call.span)

    def _lean(self, tensor: relax.Expr) -> relax.Expr:
        if tensor_of(tensor) is None or weight_of(tensor) is not None:
            return tensor
        array = numbers(tensor)
        if array.size != max(array.shape, default=1):
            band = banded(array)
            return tensor if band is None else self._emitted(array, band.element, "band")
        if array.size < 2:
            return tensor
        steps = progression(array)
        if steps is not None:
            return self._computed(array, *steps)
        half = exact_half(array) if array.size >= LEAST_ELEMENTS else None
        if half is None:
            return tensor
        dtype = "float16" if half.dtype == np.float16 else "bfloat16"
        return self.builder_.emit(relax.op.astype(relax.const(half, dtype), "float32"))

    def _computed(self, array: np.ndarray, start: int, step: int) -> relax.Expr:
        """The numbers of `array`, by the place along its one long axis."""
        axis, dtype = int(np.argmax(array.shape)), str(array.dtype)

        def at(*index: tirx.Var) -> Expr:
            return tirx.const(start, dtype) + index[axis].astype(dtype) * tirx.const(step, dtype)

        return self._emitted(array, at, "arange")

    def _emitted(self, array: np.ndarray, at: Callable[..., Expr], name: str) -> relax.Expr:
        """A tensor of the array's shape with the element `at(*index)`."""

        def elements() -> te.Tensor:
            return te.compute(array.shape, at, name=name)

        return self.builder_.emit_te(elements, primfunc_name_hint=name)


def progression(array: np.ndarray) -> tuple[int, int] | None:
    """(first, step) of integers that are evenly spaced, in memory order; else None.

    Nothing that is computed from them leaves the dtype.
    """
    if array.dtype.kind not in "iu":
        return None
    numbers = array.reshape(-1).astype(np.int64)
    step = int(numbers[1] - numbers[0])
    limit = np.iinfo(array.dtype).max
    if array.dtype.kind == "u" and (step < 0 or numbers[0] < 0):
        return None
    even = step != 0 and bool(np.all(np.diff(numbers) == step))
    if not even or abs(step) * (numbers.size - 1) > limit:
        return None
    return int(numbers[0]), step


def exact_half(array: np.ndarray) -> np.ndarray | None:
    """float32 numbers in float16 or bfloat16, if that changes no value; else None."""
    if array.dtype != np.float32:
        return None
    for kind in HALVES:
        with np.errstate(over="ignore"):
            half = array.astype(kind)
        if np.array_equal(half.astype(np.float32), array):
            return half
    return None


# ---- Matrices with one value between two diagonals and another one outside: the masks of causal
# and of local attention.
#
#     element(..., i, j) = inside   where lowest <= j - i <= highest
#                          outside  elsewhere

DTYPES = frozenset(("bool", "float16", "bfloat16", "float32", "int8", "int32", "int64"))
LEAST_SIDE = 2
FIRST_LOOK = 64  # rows and columns that are looked at before all of a matrix is


@dataclass(frozen=True, slots=True)
class Band:
    """See the module docstring. A bound that no element of the matrix reaches is None."""

    inside: float
    outside: float
    lowest: int | None
    highest: int | None
    dtype: str

    def element(self, *index: tirx.Var) -> Expr:
        """The element at some indices, the last two of which are i and j."""
        i, j = index[-2:]
        bounds = []
        if self.lowest is not None:
            bounds.append(i + self.lowest <= j)
        if self.highest is not None:
            bounds.append(j <= i + self.highest)
        condition = bounds[0] if len(bounds) == 1 else tirx.And(*bounds)
        values = (tirx.const(value, self.dtype) for value in (self.inside, self.outside))
        return tirx.Select(condition, *values)


def banded(array: np.ndarray) -> Band | None:
    """The band that the last two axes of an array are, equal along all axes before; else None."""
    if array.ndim < 2 or min(array.shape[-2:]) < LEAST_SIDE or array.dtype.name not in DTYPES:
        return None
    planes = array.reshape(-1, *array.shape[-2:])
    corner = planes[0, :FIRST_LOOK, :FIRST_LOOK]
    if not _is_toeplitz(corner) or not all(np.array_equal(p, planes[0]) for p in planes[1:]):
        return None
    plane = planes[0]
    if not _is_toeplitz(plane):
        return None
    along = _diagonals(plane)
    changes = np.flatnonzero(along[1:] != along[:-1]) + 1
    first = 1 - len(plane)  # j - i of the first diagonal
    if not 1 <= len(changes) <= 2 or len(np.unique(along)) != 2:
        return None
    inside, outside = along[changes[0]], along[0]
    lowest = int(changes[0]) + first
    highest = int(changes[1]) + first - 1 if len(changes) == 2 else None
    return Band(inside.item(), outside.item(), lowest, highest, array.dtype.name)


def _diagonals(plane: np.ndarray) -> np.ndarray:
    """The elements of the first column from the last row up, then those of the first row."""
    return np.concatenate([plane[:0:-1, 0], plane[0]])


def _is_toeplitz(plane: np.ndarray) -> bool:
    """Whether each diagonal has one value; a NaN equals nothing."""
    return bool(np.array_equal(plane[1:, 1:], plane[:-1, :-1]))
