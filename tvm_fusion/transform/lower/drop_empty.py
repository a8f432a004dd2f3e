"""DropEmpty: nothing computes tensors without elements.

    lv: R.Tensor((0, 8)) = R.exp(x)      ->      lv = R.builtin.alloc_tensor((0, 8))

No kernel class and no schedule of TVM's has to know of loops of length 0. (A constant would not do:
TVM cannot load one whose first extent is not the one that is 0.) What reads an empty tensor and has
elements of its own stays: a sum of nothing is 0, a concatenation copies the others. (It reads a
tensor that is made here where the empty one is an input: kernels look at the strides of inputs, and
libraries have their own for extents of 0.) The largest of no elements, or their mean, is no number:
that is an error.

Does not handle: extents that are symbolic and turn out to be 0 when the module runs; what stands
in a branch.
"""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from ...errors import InputError

ALLOCATION = "relax.builtin.alloc_tensor"

# Operators that have no value where this operand has no elements, though the result has some.
UNDEFINED = {
    **{f"relax.{name}": 0 for name in ("max", "min", "mean", "variance", "std", "median")},
    **{f"relax.{name}": 0 for name in ("argmax", "argmin")},
    "relax.nn.attention": 1,
    "relax.nn.attention_bias": 1,
}


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.DropEmpty")
class DropEmpty:
    """A module pass; idempotent. A module without empty tensors is returned as it is."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        functions = [f for f in mod.functions.values() if isinstance(f, relax.Function)]
        found = [*(b.var for b in _bindings(mod)), *(p for f in functions for p in f.params)]
        if not any(_holds_empty(var.ty) for var in found):
            return mod
        rewriter = _Rewriter(mod, {param for func in functions for param in func.params})
        for gvar, func in mod.functions_items():
            if isinstance(func, relax.Function):
                rewriter.builder_.update_func(gvar, rewriter.visit_expr(func))
        return rewriter.builder_.finalize()


def check_defined(mod: tvm.IRModule) -> None:
    """Check that no operator asks for the largest element, the mean or the like of no elements.

    Raises
    ------
    InputError
        Names the operator, the tensor and the axis of length 0.
    """
    for binding in _bindings(mod):
        call = getattr(binding, "value", None)
        place = UNDEFINED.get(_name_of(call)) if isinstance(call, relax.Call) else None
        shape = None if place is None else _empty_shape(call.args[place].ty)
        if shape is None or _empty_shape(call.ty) is not None:
            continue
        tensor = getattr(call.args[place], "name", "a constant")
        raise InputError(
            f"{binding.var.name} = {_name_of(call)} of {tensor}, a tensor of shape {list(shape)}: "
            f"axis {shape.index(0)} has length 0, and no elements have no such value; give the "
            "axis a length, or take the operator out of the model"
        )


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, mod: tvm.IRModule, params: set[relax.Var]) -> None:
        super().__init__(mod)
        self.params = params

    def visit_var_(self, var: relax.Var) -> relax.Expr:
        empty = self._empty(var.ty) if var in self.params else None
        return super().visit_var_(var) if empty is None else empty

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        name = _name_of(call)
        if name and name != ALLOCATION and call.op.get_attr("FPurity"):
            if (empty := self._empty(call.ty)) is not None:
                return empty
            if name == "relax.split" and any(_empty_shape(f) is not None for f in call.ty.fields):
                return self._pieces(call)
        return super().visit_call_(call)

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> relax.Expr:
        empty = self._empty(item.ty)
        return super().visit_tuple_getitem_(item) if empty is None else empty

    def _empty(self, ty: object) -> relax.Expr | None:
        """A value of a type all of whose tensors are empty; None for other types."""
        if isinstance(ty, relax.TupleType):
            known = [_empty_shape(field) is not None for field in ty.fields]
            if not known or not all(known):
                return None
            return relax.Tuple([self._empty(field) for field in ty.fields])
        shape = _empty_shape(ty)
        if shape is None:
            return None
        made = relax.op.builtin.alloc_tensor(relax.ShapeExpr(shape), str(ty.dtype), 0)
        return self.builder_.emit(made)

    def _pieces(self, call: relax.Call) -> relax.Expr:
        """A split as slices: TVM's own takes no empty piece."""
        data, axis = self.visit_expr(call.args[0]), int(call.attrs.axis)
        first, pieces = 0, []
        for field in call.ty.fields:
            last = first + int(field.shape.values[axis])
            piece = self._empty(field)
            if piece is None:
                piece = self.builder_.emit(relax.op.strided_slice(data, [axis], [first], [last]))
            pieces.append(piece)
            first = last
        return relax.Tuple(pieces)


def _bindings(mod: tvm.IRModule) -> Iterator[relax.Binding]:
    for func in mod.functions.values():
        for block in getattr(getattr(func, "body", None), "blocks", ()):
            yield from block.bindings


def _holds_empty(ty: object) -> bool:
    if isinstance(ty, relax.TupleType):
        return any(_holds_empty(field) for field in ty.fields)
    return _empty_shape(ty) is not None


def _name_of(call: relax.Call) -> str:
    """The name of the operator that is called; "" for other calls."""
    return call.op.name if isinstance(call.op, tvm.ir.Op) else ""


def _empty_shape(ty: object) -> tuple[int, ...] | None:
    """The shape of an empty tensor; None for all others and where an extent is symbolic."""
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    extents = ty.shape.values
    if not all(isinstance(e, tirx.IntImm) for e in extents):
        return None
    shape = tuple(int(e) for e in extents)
    return shape if 0 in shape else None
