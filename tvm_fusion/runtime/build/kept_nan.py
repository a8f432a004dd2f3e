"""Maxima and minima that keep NaN, as those of PyTorch, NumPy and ONNX do; and `!=` that knows it.

    y[i] = T.max(x[i], 0)      y[i] = llvm.maximum(x[i], 0)      on a CPU
                               y[i] = tvmf_max_nan(x[i], 0)      on a GPU: max.NaN.f32

What TVM 0.27 makes of `T.max` gives the second operand on a CPU, the other operand on a GPU, where
one is NaN: ReLU of NaN is 0, and of a row with a NaN the maximum is some number.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, TensorLoad

from ...kernels.gpu.intrinsics import device_call
from ...kernels.program.expr import HALF_DTYPES, dtype_of
from ...transform.functions.functions import rewritten, target_kind

# ---- NaN as bfloat16: TVM rounds its bits as those of a number, which may carry into the sign.
#
#     y[i] = T.bfloat16(x[i])      t = x[i]
#                                  is_nan = bits(t) & 0x7fffffff > 0x7f800000
#                                  y[i] = select(is_nan, nan, T.bfloat16(t))
#
# By its bits: TVM takes a vector with `isnan` apart into scalars, and leaves `t` behind.

_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000


def _stored(store: tirx.BufferStore) -> tirx.Stmt:
    cast = store.value
    if not isinstance(cast, tirx.Cast) or dtype_of(cast) != "bfloat16":
        return store
    if dtype_of(cast.value) != "float32":
        return store
    value = tirx.Var("value", cast.value.ty)
    nan = tirx.FloatImm("bfloat16", math.nan)
    magnitude = tirx.reinterpret("uint32", value) & tirx.const(_MAGNITUDE, "uint32")
    is_nan = magnitude > tirx.const(_INFINITY, "uint32")
    kept = tirx.Select(is_nan, nan, tirx.Cast("bfloat16", value))
    return tirx.SeqStmt(
        [tirx.Bind(value, cast.value), tirx.BufferStore(store.buffer, kept, store.indices)]
    )


STORED = [(tirx.BufferStore, _stored)]
"""For `rewritten`, of functions for a CPU before they are lowered."""

Rule = Callable[[Expr], Expr]
_FLOATS = ("float", "bfloat")


def with_kept_nan(mod: tvm.IRModule) -> tvm.IRModule:
    """Lowered functions that are bound to a device, with maxima and minima that keep NaN."""
    mod = rewritten(mod, _REDUCTIONS, lambda func: target_kind(func) == "llvm")
    mod = rewritten(mod, [*RULES, *_UNEQUAL], lambda func: target_kind(func) == "llvm")
    return rewritten(mod, _ON_GPU, lambda func: target_kind(func) == "cuda")


def _by_llvm(name: str) -> Rule:
    """The intrinsic of LLVM, which is one instruction beside a constant."""

    def keep(node: Expr) -> Expr:
        dtype = dtype_of(node)
        if not dtype.startswith(_FLOATS):
            return node
        return tirx.call_llvm_pure_intrin(dtype, f"llvm.{name}imum", node.a, node.b)

    return keep


def _of_reduction(store: tirx.BufferStore) -> tirx.BufferStore:
    """A step of a reduction, most[i] = max(most[i], x), in half the instructions of LLVM's: a
    comparison gives `x` where that is NaN, and what is kept is asked by itself.
    """
    node = store.value
    if not isinstance(node, tirx.Max | tirx.Min) or not dtype_of(node).startswith(_FLOATS):
        return store
    pairs = ((node.a, node.b), (node.b, node.a))
    found = next((pair for pair in pairs if _is_read_again(store, pair[0])), None)
    if found is None:
        return store
    kept, x = found
    chosen = tirx.Select(kept > x if isinstance(node, tirx.Max) else kept < x, kept, x)
    value = tirx.Select(tirx.isnan(kept), kept, chosen)
    return tirx.BufferStore(store.buffer, value, store.indices)


def _is_read_again(store: tirx.BufferStore, value: Expr) -> bool:
    """Whether a value is what stands where something is stored."""
    return (
        isinstance(value, TensorLoad)
        and value.source.same_as(store.buffer)
        and tvm_ffi.structural_equal(value.indices, store.indices)
    )


def _by_device(name: str) -> Rule:
    """The instructions of GPUs since sm_80; of float64 they have none."""

    def keep(node: Expr) -> Expr:
        dtype = dtype_of(node)
        if dtype in HALF_DTYPES:
            return tirx.call_pure_extern(dtype, f"__h{name}_nan", node.a, node.b)
        if dtype == "float32":
            body = f'asm("{name}.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r;'
            body = f"float r; {body}"
            return device_call(dtype, f"{name}_nan", "float a, float b", body, node.a, node.b)
        if dtype == "float64":
            body = f"return a != a ? a : b != b ? b : f{name}(a, b);"
            arguments = "double a, double b"
            return device_call(dtype, f"{name}_nan_f64", arguments, body, node.a, node.b)
        return node

    return keep


RULES = [(tirx.Max, _by_llvm("max")), (tirx.Min, _by_llvm("min"))]
"""For `rewritten`: of functions before they are lowered, too."""

# ---- What is no number is unequal to all, where TVM's code for a CPU has `fcmp one`.
#
#     y[i] = x[i] != 1      y[i] = not (x[i] == 1)      once nothing simplifies it to the former


def _unequal(node: tirx.NE) -> Expr:
    return tirx.Not(tirx.EQ(node.a, node.b)) if dtype_of(node.a).startswith(_FLOATS) else node


_UNEQUAL = [(tirx.NE, _unequal)]
_REDUCTIONS = [(tirx.BufferStore, _of_reduction)]
_ON_GPU = [(tirx.Max, _by_device("max")), (tirx.Min, _by_device("min"))]
