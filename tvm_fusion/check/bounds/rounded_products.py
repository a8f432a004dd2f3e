"""Products whose operands tensor cores may round, because the policy says so.

A float32 product in tfloat32 multiplies numbers of 10 bits of mantissa; sums are float32. A
function of a reference that adds such products up says so by an attribute: what roundings do to it
(`noise`) and how exact its outputs can be at all (`allowance`) follow from that, as from any dtype.
The reference itself stays float64.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad, Var

from ...config import Policy
from ...kernels.program.expr import dtype_of, variables

OPERANDS = "tvm_fusion.operands_in"
TFLOAT32 = "tfloat32"


def with_rounded_products(mod: tvm.IRModule, policy: Policy) -> tvm.IRModule:
    """The module, with what operands of its products may be rounded to.

    Parameters
    ----------
    mod : IRModule
        A call_tir module (after LegalizeOps).
    policy : Policy
        `allow_tf32` says whether float32 may be rounded.
    """
    if not policy.allow_tf32:
        return mod
    out = mod.clone()
    for gvar, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            out.update_func(gvar, with_rounded_operands(func))
    return out


def with_rounded_operands(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function, with what operands of its float32 products may be rounded to."""
    return func.with_attr(OPERANDS, TFLOAT32) if adds_products(func.body) else func


def operands_in(func: tirx.PrimFunc) -> str | None:
    """What operands of a function's products may be rounded to; None where they may not."""
    return str(func.attrs[OPERANDS]) if func.attrs and OPERANDS in func.attrs else None


def adds_products(body: tirx.Stmt) -> bool:
    """Whether a statement adds float32 products up whose operands lie along different axes: matrix
    products and convolutions, no sum of squares.
    """
    blocks: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(body, [(s_tir.SBlock, blocks.append)])
    return any(map(_adds_products, blocks))


def _adds_products(block: s_tir.SBlock) -> bool:
    kept = {a.var for a in block.iter_vars if a.iter_type != tirx.IterVar.CommReduce}
    if len(kept) == len(block.iter_vars):
        return False
    products: list[tirx.Mul] = []
    tvm_ffi.structural_walk(block.body, [(tirx.Mul, products.append)])
    wide = [p for p in products if dtype_of(p) == "float32"]
    operands = [(_along(p.a, kept), _along(p.b, kept)) for p in wide]
    return any(a != b for a, b in operands if a is not None and b is not None)


def _along(value: tvm.ir.Expr, axes: set[Var]) -> set[Var] | None:
    """The axes along which the elements lie that a value reads; None of a value that reads none."""
    loads: list[TensorLoad] = []
    tvm_ffi.structural_walk(value, [(TensorLoad, loads.append)])
    return {v for load in loads for v in variables(*load.indices)} & axes if loads else None
