"""JoinPieces: many pieces of a tensor, each computed alike and concatenated, as one computation.

    Before                                          After
    concat((exp(x[0:2]) * 3, exp(x[2:4]) * 3, ...)) exp(x) * 3
    concat((x[6:8], x[0:2], ...))                   take(x, [6, 7, 0, 1, ...])
    stack((exp(x[0]) + b, exp(x[1]) + b, ...))      exp(x) + b

A model that works through a tensor piece by piece has an operator for each piece; what plans and
writes kernels takes time with their square, and conditions as many as there are pieces stand within
one another.

Does not handle (left alone): fewer than `MANY` pieces, which cost nothing to speak of, symbolic
sizes, slices of several axes, pieces that other operators than elementwise ones compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import Call
from tvm.relax import Expr, Var, op
from tvm.relax.expr_functor import PyExprMutator, mutator

from .decompose.opening import shape_of, static_size
from .factors import is_call, is_one
from .functions import rewrite_functions, where_changed
from .layout_turns import is_elementwise
from .long_concats import MANY


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.JoinPieces")
class JoinPieces:
    """See the module docstring. A module without such pieces is returned as it is."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        joiner = _Joiner(mod)
        joined = rewrite_functions(mod, joiner.builder_, where_changed(joiner))
        return mod if joined is mod else relax.transform.DeadCodeElimination()(joined)


@mutator
class _Joiner(PyExprMutator):
    changed = False

    def visit_call_(self, call: Call) -> Expr:
        call = super().visit_call_(call)
        if not is_call(call, "concat") or not isinstance(call.args[0], relax.Tuple):
            return call
        parts, axis = tuple(call.args[0].fields), call.attrs.axis
        if len(parts) < MANY or axis is None or not shape_of(call):
            return call
        self.known: dict[tuple, Expr | None] = {}
        axis = int(axis) % call.ty.ndim
        joined = self._joined(parts, axis)
        if joined is None:
            joined = self._stacked(parts, axis, call)
        self.changed = self.changed or joined is not None
        return call if joined is None else joined

    def _stacked(self, parts: tuple[Expr, ...], axis: int, call: Call) -> Expr | None:
        """The concatenation of parts that lack the axis they are pieces of, or have it again."""
        calls = [self._bound(part) for part in parts]
        if all(
            is_call(c, "expand_dims") and [int(a) for a in c.attrs.axis] == [axis] for c in calls
        ):
            parts = tuple(c.args[0] for c in calls)
        rows = self._joined(parts, None)
        if rows is None:
            return None
        return op.reshape(self._moved(rows, 0, axis), shape_of(call))

    def _joined(self, parts: tuple[Expr, ...], axis: int | None) -> Expr | None:
        """The concatenation of parts, or (None) their stack along a new first axis, in terms of
        what they are pieces of; None if of nothing.
        """
        if (parts, axis) not in self.known:
            self.known[parts, axis] = self._found(parts, axis)
        return self.known[parts, axis]

    def _found(self, parts: tuple[Expr, ...], axis: int | None) -> Expr | None:
        calls = [self._bound(part) for part in parts]
        whole = self._rows(calls) if axis is None else self._whole(calls, axis)
        if whole is not None:
            return whole
        first = calls[0]
        if not all(is_elementwise(c) and _alike(c, first) for c in calls):
            return None
        operands = []
        for n in range(len(first.args)):
            operand = self._operand([c.args[n] for c in calls], parts, axis)
            if operand is None:
                return None
            operands.append(operand)
        return self.builder_.emit(Call(first.op, operands, first.attrs, first.ty_args))

    def _operand(
        self, given: Sequence[Expr], parts: Sequence[Expr], axis: int | None
    ) -> Expr | None:
        """One operand of all parts: the same one, if it is the same along the axis, or joined."""
        if all(tvm_ffi.structural_equal(g, given[0]) for g in given):
            if axis is None or not isinstance(given[0].ty, relax.TensorType):
                return given[0]
            shape = shape_of(given[0])
            behind = parts[0].ty.ndim - axis  # axes from this one on
            if shape is not None and (len(shape) < behind or is_one(shape[-behind])):
                return given[0]
        if all(_same_shape(g, p) for g, p in zip(given, parts, strict=True)):
            return self._joined(tuple(given), axis)
        return None

    def _rows(self, calls: Sequence[Expr | None]) -> Expr | None:
        """The stack of what is left of slices of one element when their axis is gone."""
        if not all(is_call(c, "squeeze") and c.attrs.axis is not None for c in calls):
            return None
        axes = {tuple(int(a) % c.args[0].ty.ndim for a in c.attrs.axis) for c in calls}
        if len(axes) > 1 or len(axis := axes.pop()) > 1:
            return None
        whole = self._whole([self._bound(c.args[0]) for c in calls], axis[0])
        return None if whole is None else self._moved(whole, axis[0], 0)

    def _whole(self, calls: Sequence[Expr | None], axis: int) -> Expr | None:
        """The concatenation of slices: a slice, or the elements at places known here."""
        if not all(is_call(c, "strided_slice") for c in calls):
            return None
        source = calls[0].args[0]
        places = [_places(c, axis) for c in calls]
        if any(p is None for p in places) or not all(c.args[0].same_as(source) for c in calls):
            return None
        index = np.concatenate(places)
        steps = np.unique(np.diff(index))
        if len(steps) > 1 or steps[0] < 1:
            return self.builder_.emit(op.take(source, relax.const(index, "int64"), axis, "clip"))
        first, last, step = int(index[0]), int(index[-1]), int(steps[0])
        if (first, last, step) == (0, int(shape_of(source)[axis]) - 1, 1):
            return source
        return self.builder_.emit(
            op.strided_slice(source, [axis], [first], [last + 1], [step], assume_inbound=True)
        )

    def _moved(self, x: Expr, axis: int, to: int) -> Expr:
        """x with one axis at another place."""
        order = [a for a in range(x.ty.ndim) if a != axis]
        order.insert(to, axis)
        return x if axis == to else self.builder_.emit(op.permute_dims(x, order))

    def _bound(self, part: Expr) -> Expr | None:
        return self.lookup_binding(part) if isinstance(part, Var) else None


def _alike(call: Call, other: Call) -> bool:
    return call.op == other.op and tvm_ffi.structural_equal(call.attrs, other.attrs)


def _same_shape(x: Expr, y: Expr) -> bool:
    if not isinstance(x.ty, relax.TensorType):
        return False
    return tvm_ffi.structural_equal(x.ty.shape, y.ty.shape)


def _places(call: Call, axis: int) -> np.ndarray | None:
    """The places of a slice along its only axis; None where they are not known."""
    source, axes, *limits = call.args
    extent = static_size(shape_of(source)[axis : axis + 1]) if shape_of(source) else None
    numbers = [_numbers(tuple_) for tuple_ in (axes, *limits)]
    if extent is None or any(n is None or len(n) != 1 for n in numbers):
        return None
    (at,), (begin,), (end,), *step = numbers
    if at % len(shape_of(source)) != axis:
        return None
    return np.arange(extent)[begin : end : step[0][0] if step else 1]


def _numbers(tuple_: Expr) -> list[int] | None:
    """The numbers of a tuple that holds nothing else."""
    fields = tuple_.fields if isinstance(tuple_, relax.Tuple) else (None,)
    known = all(isinstance(field, tvm.tirx.IntImm) for field in fields)
    return [int(field) for field in fields] if known else None
