"""`relax.where` with numbers: they stand in the PrimFunc, as for arithmetic.

    where(mask, x, const(-inf))  ->  call_tir(where, (mask, x))     -inf is in the PrimFunc

TVM's own legalization hands them over as tensors with one element, so that no kernel knows which
keys a mask hides.
"""

from __future__ import annotations

import tvm
from tvm import relax, te, tirx
from tvm.ir import Call, Expr

# A relax.Call in, what stands for it out.
_DEFAULT = tvm.ir.Op.get("relax.where").get_attr("FLegalize")


def legalize_where(builder: relax.BlockBuilder, call: Call) -> relax.Expr:
    """The legalization of one `relax.where`; without numbers, TVM's own."""
    condition, *sides = call.args
    numbers = [_number(side) for side in sides]
    if numbers == [None, None] or not isinstance(call.ty.shape, relax.ShapeExpr):
        return _DEFAULT(builder, call)
    shape, dtype = list(call.ty.shape), str(call.ty.dtype)
    tensors = [side for side, value in zip(sides, numbers, strict=True) if value is None]

    def where(condition: te.Tensor, *tensors: te.Tensor) -> te.Tensor:
        def at(*index: tirx.Var) -> Expr:
            rest = iter(tensors)
            values = [
                _element(next(rest), index) if value is None else tirx.const(value, dtype)
                for value in numbers
            ]
            return tirx.Select(_element(condition, index), *values)

        return te.compute(shape, at, name="where")

    return builder.call_te(where, condition, *tensors, primfunc_name_hint="where")


def _number(expr: relax.Expr) -> int | float | None:
    """The number that a constant tensor of one element holds."""
    value = expr.value if isinstance(expr, tvm.ir.Constant) else None
    if not isinstance(value, tvm.runtime.Tensor) or len(value.shape):
        return None
    return value.numpy().item() if "float" in value.dtype or "int" in value.dtype else None


def _element(tensor: te.Tensor, index: tuple[tirx.Var, ...]) -> Expr:
    """The element of a tensor that is broadcast to where `index` points."""
    own = index[len(index) - len(tensor.shape) :]
    return tensor(
        *(
            0 if isinstance(n, tirx.IntImm) and int(n) == 1 else i
            for i, n in zip(own, tensor.shape, strict=True)
        )
    )
