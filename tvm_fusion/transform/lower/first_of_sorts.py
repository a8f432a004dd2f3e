"""The first of a sort on a GPU, without the sort: the place of the least key.

    order = R.argsort(keys, 1)                         at = R.argmin(order_bits(x), 1, keepdims)
    R.strided_slice(order, [1], [0], [1])        ->    at
    R.strided_slice(R.gather_elements(x, order, 1),    R.gather_elements(x, at, 1)
                    [1], [0], [1])

and so for `R.topk(keys, 1)`. Of equal ones it is the one that stands first, as in a stable sort.
Keys that a frontend makes of floats, so that NaN is above infinity, are of a wider type than these;
here they are the bits of the floats themselves, as integers of 32 bits that have the same order.
Does not handle: the last of a sort, of which a stable one has the last of equal ones there, and
floats of 64 bits.
"""

from __future__ import annotations

import tvm
from tvm import relax, te, tirx, topi
from tvm.ir import GlobalVar, IRModule, Op
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..functions.functions import rewrite_functions, where_changed

SORT_KEYS = "tvm_fusion.sort_keys"
"""Attribute of a function that makes keys of floats: their order, and NaN last."""
_FLOATS = ("float16", "bfloat16", "float32")
_INTEGERS = ("bool", "int8", "uint8", "int16", "int32")


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.FirstOfSorts")
class FirstOfSorts:
    """See the module docstring. Runs before DispatchSortScan; a module without such sorts is
    returned as it is.
    """

    def transform_module(self, mod: IRModule, _ctx: tvm.transform.PassContext) -> IRModule:
        """Rewrite the Relax functions that take the first of a sort."""
        rewriter = _Rewriter(mod)
        rewrite = where_changed(rewriter)
        return rewrite_functions(mod, rewriter.builder_, rewrite, opaque=True)


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self.changed, self.mod = False, mod

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        name = _name(call)
        if name == "relax.topk" and int(call.attrs.k) == 1 and call.attrs.ret_type == "indices":
            found = self._first(call)
        elif name == "relax.strided_slice":
            found = self._of_slice(call)
        else:
            return call
        self.changed = self.changed or found is not None
        return call if found is None else found

    def _of_slice(self, call: relax.Call) -> relax.Expr | None:
        """What a slice is, where that is the first of a sort, or what stands there."""
        source = self._bound(call.args[0])
        axis = _first_of_axis(call)
        if source is None or axis is None:
            return None
        if _name(source) == "relax.argsort":
            return self._first(source) if _axis(source) == axis else None
        if _name(source) != "relax.gather_elements" or _axis(source) != axis:
            return None
        order = self._bound(source.args[1])
        if order is None or _name(order) != "relax.argsort" or _axis(order) != axis:
            return None
        place = self._first(order)
        if place is None:
            return None
        return op.gather_elements(source.args[0], self.builder_.emit(place), axis)

    def _first(self, sort: relax.Call) -> relax.Expr | None:
        """The place of what comes first, with the axis kept."""
        keys = self._keys(sort.args[0])
        if keys is None or str(sort.ty.dtype) != "int64":
            return None
        largest = sort.attrs.largest if _name(sort) == "relax.topk" else sort.attrs.descending
        index = op.argmax if largest else op.argmin
        return index(keys, _axis(sort), keepdims=True)

    def _keys(self, keys: relax.Expr) -> relax.Expr | None:
        """Integers of at most 32 bits in the order of the keys; None where there are none."""
        dtype = str(keys.ty.dtype)
        if dtype in _INTEGERS:
            return self.builder_.emit(op.astype(keys, "int8")) if dtype == "bool" else keys
        made = self._bound(keys)
        called = made.args[0] if made is not None and _name(made) == "relax.call_tir" else None
        func = self.mod[called] if isinstance(called, GlobalVar) else None
        if func is None or SORT_KEYS not in (func.attrs or {}):
            return None
        (x,) = made.args[1].fields
        if str(x.ty.dtype) not in _FLOATS:
            return None
        return self.builder_.emit(
            self.builder_.call_te(_order_bits, x, primfunc_name_hint="order_bits")
        )

    def _bound(self, expr: relax.Expr) -> relax.Call | None:
        """The call that a variable holds."""
        value = self.lookup_binding(expr) if isinstance(expr, relax.Var) else None
        return value if isinstance(value, relax.Call) else None


def _order_bits(x: te.Tensor) -> te.Tensor:
    """The bits of floats as integers in the same order; both zeros are one, and NaN is last."""

    def element(*at: tirx.Var) -> tirx.PrimExpr:
        value = x(*at) if str(x.dtype) == "float32" else tirx.Cast("float32", x(*at))
        bits = tirx.reinterpret("int32", value)
        magnitude = tirx.bitwise_and(bits, tirx.const(0x7FFFFFFF, "int32"))
        ordered = tirx.Select(bits < 0, -magnitude, bits)
        return tirx.Select(tirx.isnan(value), tirx.max_value("int32"), ordered)

    return te.compute(x.shape, element, name="order_bits", tag=topi.tag.ELEMWISE)


def _name(call: relax.Call) -> str:
    return call.op.name if isinstance(call.op, Op) else ""


def _axis(call: relax.Call) -> int:
    return int(call.attrs.axis) % call.args[0].ty.ndim


def _first_of_axis(call: relax.Call) -> int | None:
    """The axis of which a slice takes the first place; None where it takes something else."""
    axes, begin, end, *strides = (_numbers(arg) for arg in call.args[1:])
    if len(axes) != 1 or (begin, end) != ([0], [1]) or any(s != [1] for s in strides):
        return None
    return axes[0] % call.args[0].ty.ndim


def _numbers(arg: relax.Expr) -> list[int | None]:
    """The numbers of a tuple; None for what is none."""
    found = []
    for field in arg.fields:
        value = getattr(field, "value", field)
        found.append(int(value) if isinstance(value, (int, tirx.IntImm)) else None)
    return found
