"""JoinPieces: many pieces of a tensor, each computed alike and concatenated, as one computation.

    Before                                          After
    concat((exp(x[0:2]) * 3, exp(x[2:4]) * 3, ...)) exp(x) * 3
    concat((x[6:8], x[0:2], ...))                   take(x, [6, 7, 0, 1, ...])
    stack((exp(x[0]) + b, exp(x[1]) + b, ...))      exp(x) + b

A model that works through a tensor piece by piece has an operator for each piece; what plans and
writes kernels takes time with their square, and conditions as many as there are pieces stand within
one another.

Does not handle (left alone): fewer than `MANY` pieces, which cost nothing to speak of, symbolic
sizes, slices of several axes, pieces that other operators than elementwise ones compute, pieces
that are read elsewhere too or stand in two places (they would be computed twice).
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

from ..decompose.opening import shape_of, static_size
from ..functions.functions import rewrite_functions
from ..lower.legalizers import MANY
from .factors import is_call, is_one
from .layout_turns import is_elementwise
from .readers import Readers

Parts = tuple[Expr, ...]
Levels = dict[Parts, "Expr | list[Expr | Parts]"]
"""Parts that are joined, and what they are pieces of, or the operands that compute each of them:
one for all parts, or parts in turn.
"""


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.JoinPieces")
class JoinPieces:
    """See the module docstring. A module without such pieces is returned as it is."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        joiner = _Joiner(mod)
        joined = rewrite_functions(mod, joiner.builder_, joiner.join_function)
        return mod if joined is mod else relax.transform.DeadCodeElimination()(joined)


@mutator
class _Joiner(PyExprMutator):
    def join_function(self, func: relax.Function) -> relax.Function | None:
        """The function with its pieces joined, or None where there were none."""
        if not isinstance(func.body, relax.SeqExpr):
            return None
        self.readers = Readers(func)
        self.places = {var: n for n, (var, _) in enumerate(self.readers.calls())}
        self.changed = False
        joined = self.visit_expr(func)
        return _without_unread(joined) if self.changed else None

    def visit_call_(self, call: Call) -> Expr:
        call = super().visit_call_(call)
        if not is_call(call, "concat") or not isinstance(call.args[0], relax.Tuple):
            return call
        parts, axis = tuple(call.args[0].fields), call.attrs.axis
        if len(parts) < MANY or axis is None or not shape_of(call):
            return call
        axis = int(axis) % call.ty.ndim
        joined = self._joined(parts, axis)
        if joined is None:
            joined = self._stacked(parts, axis, call)
        # What all parts are made of alike has the extent of one of them.
        if joined is None or not tvm_ffi.structural_equal(joined.ty, call.ty):
            return call
        self.changed = True
        return joined

    def _stacked(self, parts: Parts, axis: int, call: Call) -> Expr | None:
        """The concatenation of parts that lack the axis they are pieces of, or have it again."""
        calls = [self._bound(part) for part in parts]
        views: Parts = ()
        if all(
            is_call(c, "expand_dims") and [int(a) for a in c.attrs.axis] == [axis] for c in calls
        ):
            views, parts = parts, tuple(c.args[0] for c in calls)
        rows = self._joined(parts, None, views)
        if rows is None or rows.ty.ndim == parts[0].ty.ndim:  # all parts are the same one
            return None
        return self.builder_.emit(op.reshape(self._moved(rows, 0, axis), shape_of(call)))

    def _joined(self, parts: Parts, axis: int | None, views: Parts = ()) -> Expr | None:
        """The concatenation of parts, or (None) their stack along a new first axis, in terms of
        what they are pieces of; None if of nothing. `views` of the parts are what is read.

        The extent of the axis is that of one part where nothing that the parts are made of differs.
        """
        levels = self._levels(parts, axis)
        if levels is None or not self._are_alone(levels, views):
            return None
        joined: dict[Parts, Expr] = {}
        for level in sorted(levels, key=lambda level: self.places[level[0]]):
            below, call = levels[level], self._bound(level[0])
            if isinstance(below, list):
                operands = [joined[o] if isinstance(o, tuple) else o for o in below]
                below = self.builder_.emit(Call(call.op, operands, call.attrs, call.ty_args))
            joined[level] = below
        return joined[parts]

    def _levels(self, parts: Parts, axis: int | None) -> Levels | None:
        """All that is joined for the sake of parts, or None where something can't be."""
        levels: Levels = {}
        pending = [parts]
        while pending:
            level = pending.pop()
            if level in levels:
                continue
            below = self._below(level, axis)
            if below is None:
                return None
            levels[level] = below
            if isinstance(below, list):
                pending += [operand for operand in below if isinstance(operand, tuple)]
        return levels

    def _below(self, parts: Parts, axis: int | None) -> Expr | list[Expr | Parts] | None:
        """What parts are pieces of, or the operands that compute each of them."""
        calls = [self._bound(part) for part in parts]
        whole = self._rows(calls) if axis is None else self._whole(calls, axis)
        if whole is not None:
            return whole
        first = calls[0]
        if not all(is_elementwise(c) and _alike(c, first) for c in calls):
            return None
        operands = []
        for given in zip(*(c.args for c in calls), strict=True):
            operand = self._operand(given, parts, axis)
            if operand is None:
                return None
            operands.append(operand)
        return operands

    def _are_alone(self, levels: Levels, views: Parts) -> bool:
        """Whether nothing that is computed piece by piece stays, or is computed more than once."""
        operands = {level: below for level, below in levels.items() if isinstance(below, list)}
        if not operands:
            return True
        pieces = [*(part for level in operands for part in level), *views]
        distinct = set(pieces)
        readers = {reader.var for piece in pieces for reader in self.readers.of(piece)}
        kept = {o for below in operands.values() for o in below if isinstance(o, Var)}
        return (
            len(distinct) == len(pieces)
            and None not in readers
            and len(readers - distinct) == 1  # the concatenation
            and not kept & distinct
        )

    def _operand(self, given: Parts, parts: Parts, axis: int | None) -> Expr | Parts | None:
        """One operand of all parts: the same one, if it is the same along the axis, or parts."""
        if all(tvm_ffi.structural_equal(g, given[0]) for g in given):
            if axis is None or not isinstance(given[0].ty, relax.TensorType):
                return given[0]
            shape = shape_of(given[0])
            behind = parts[0].ty.ndim - axis  # axes from this one on
            if shape is not None and (len(shape) < behind or is_one(shape[-behind])):
                return given[0]
        if all(_same_shape(g, p) for g, p in zip(given, parts, strict=True)):
            return given
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
        if len(index) < 2:
            return None
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
        """The call that a part is bound to, unless what it is made of can't be read any more."""
        return self.lookup_binding(part) if self.readers.within(part) is not None else None


def _alike(call: Call, other: Call) -> bool:
    same_arity = call.op == other.op and len(call.args) == len(other.args)
    return same_arity and tvm_ffi.structural_equal(call.attrs, other.attrs)


def _same_shape(x: Expr, y: Expr) -> bool:
    if not isinstance(x.ty, relax.TensorType):
        return False
    return tvm_ffi.structural_equal(x.ty.shape, y.ty.shape)


def _places(call: Call, axis: int) -> np.ndarray | None:
    """The places of a slice along its only axis; None where they are not known."""
    source, axes, *limits = call.args
    extent = static_size(shape_of(source)[axis : axis + 1]) if shape_of(source) else None
    numbers = [numbers_of(tuple_) for tuple_ in (axes, *limits)]
    if extent is None or any(n is None or len(n) != 1 for n in numbers):
        return None
    (at,), (begin,), (end,), *step = numbers
    if at % len(shape_of(source)) != axis:
        return None
    return np.arange(extent)[begin : end : step[0][0] if step else 1]


def numbers_of(tuple_: Expr) -> list[int] | None:
    """The numbers of a tuple that holds nothing else."""
    fields = tuple_.fields if isinstance(tuple_, relax.Tuple) else (None,)
    known = all(isinstance(field, tvm.tirx.IntImm) for field in fields)
    return [int(field) for field in fields] if known else None


def _without_unread(func: relax.Function) -> relax.Function:
    """The function without the dataflow variables that nothing reads.

    TVM's elimination looks at all bindings once for each operator of a chain that nothing reads: 18
    seconds for 33 chains of 400.
    """
    read, blocks = set(relax.analysis.free_vars(func.body.body)), []
    for block in reversed(func.body.blocks):
        kept = []
        for binding in reversed(block.bindings):
            is_plain = isinstance(binding, relax.VarBinding)
            if is_plain and isinstance(binding.var, relax.DataflowVar) and binding.var not in read:
                continue
            read.update(relax.analysis.free_vars(binding.value))
            kept.append(binding)
        blocks.append(type(block)(kept[::-1]))
    body = relax.SeqExpr(blocks[::-1], func.body.body)
    return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
