"""Arithmetic on constants, evaluated while it is legalized.

    rsqrt(add(const, 1e-5))  ->  const        what a batch norm multiplies by

TVM's FoldConstant would compile a function for each operator, 30 ms of it: 84 s for the norms of a
ResNet-50 and its rewritten variants. What numpy rounds as a CPU does is evaluated here, of float32
and float64: sums, products, quotients, roots, conversions between floating-point types, and what
changes nothing but the shape. The rest stays FoldConstant's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, Expr

from ...ir.weights import tensor_of, weight_of

Legalize = Callable[[relax.BlockBuilder, Call], Expr]

MOST_ELEMENTS = 1 << 20
"""Larger tensors are weights: FoldConstant may use threads."""

EXACT = ("float32", "float64")


def _rsqrt(x: np.ndarray) -> np.ndarray:
    return x.dtype.type(1) / np.sqrt(x)


ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "relax.add": np.add,
    "relax.subtract": np.subtract,
    "relax.multiply": np.multiply,
    "relax.divide": np.divide,
    "relax.negative": np.negative,
    "relax.sqrt": np.sqrt,
    "relax.rsqrt": _rsqrt,
}
MOVES = ("relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.astype")
DTYPES = {"bfloat16": ml_dtypes.bfloat16}


def folding(table: Mapping[str, Legalize]) -> dict[str, Any]:
    """Legalizations that evaluate constants first; of others, those of `table` or TVM's own."""
    found = dict(table)
    for name in (*ARITHMETIC, *MOVES):
        usual = table.get(name) or tvm.ir.Op.get(name).get_attr("FLegalize")
        found[name] = partial(_legalize, name, usual)
    return found


def _legalize(name: str, usual: Legalize, builder: relax.BlockBuilder, call: Call) -> Expr:
    legal = usual(builder, call)  # its PrimFunc counts for the names of those after it
    shape = call.ty.shape
    if not isinstance(shape, relax.ShapeExpr) or call.ty.ndim == 0:
        return legal
    sizes = [n.value if hasattr(n, "value") else None for n in shape.values]
    if None in sizes or int(np.prod(sizes)) > MOST_ELEMENTS:
        return legal
    tensors = [_constant(builder, arg) for arg in call.args[: 1 if name in MOVES else None]]
    if any(tensor is None for tensor in tensors):
        return legal
    dtype, arrays = str(call.ty.dtype), [tensor.numpy() for tensor in tensors]
    kinds = {str(tensor.dtype) for tensor in tensors}
    if name in ARITHMETIC:
        if kinds != {dtype} or dtype not in EXACT:
            return legal
        with np.errstate(all="ignore"):
            value = ARITHMETIC[name](*arrays)
    elif "float" not in dtype or not all(kind in (*EXACT, "float16", "bfloat16") for kind in kinds):
        return legal
    else:
        kind = DTYPES.get(dtype) or (dtype if hasattr(np, dtype) else None)
        if kind is None:
            return legal
        with np.errstate(all="ignore"):
            value = arrays[0].astype(kind)
    return relax.const(np.ascontiguousarray(value.reshape(sizes)), dtype)


def _constant(builder: relax.BlockBuilder, expr: Expr) -> tvm.runtime.Tensor | None:
    """The tensor of a constant, or of a variable that is bound to one."""
    while isinstance(expr, relax.Var):
        expr = builder.lookup_binding(expr)
    return None if weight_of(expr) is not None else tensor_of(expr)
