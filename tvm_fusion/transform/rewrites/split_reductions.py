"""SplitReductions: reductions that one kernel cannot spread over the device become two.

    s = R.sum(x, axis=[0])        # x: [16384, 1024], 132 multiprocessors
->  s_view = R.reshape(x, (16, 1024, 1024))
    s_part = R.sum(s_view, axis=[1])
    s      = R.sum(s_part, axis=[0])

These are plain operators: what computes x can still be fused into the first of them. Reductions
over the contiguous axis together with outer ones are taken apart in the same way, since no kernel
walks over both. How many pieces is decided in `reduction_stages`, for all reductions of equal shape
over the same data alike, so that they can share a launch. Where the extent has no divisor near the
wanted number of pieces, it is padded with the neutral element.

With symbolic extents a full reduction goes over one run of axes first, in whose rows the device
shares (`first_axes`): with 20,001 for n

    s = R.mean(x)                 # x: [n, 1024]
->  s_part = R.mean(x, axis=[1], keepdims=True)
    s      = R.mean(s_part)

Does not handle: other reductions of symbolic shapes, bool (left alone).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

import tvm
from tvm import relax, tirx
from tvm.ir import Call
from tvm.relax import Expr, Var, op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ...config import HardwareProfile
from ..functions.functions import rewrite_functions, static_shape
from .readers import Parts
from .reduction_stages import Setting, Stage, first_axes, stages

_PLAIN = (Call, Var, relax.Tuple, relax.TupleGetItem, relax.ShapeExpr, tvm.ir.GenericConst)
_REDUCE = {
    "relax.sum": op.sum,
    "relax.prod": op.prod,
    "relax.max": op.max,
    "relax.min": op.min,
}


_WHOLE = {**_REDUCE, "relax.mean": op.mean}  # of symbolic extents: `mean` is opened of others


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.SplitReductions")
class SplitReductions:
    """See the module docstring. `hw` is the device that is to be filled."""

    def __init__(self, hw: HardwareProfile) -> None:
        self.hw = hw

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        splitter = _Splitter(mod)

        def split(func: relax.Function) -> relax.Function | None:
            return splitter.split_function(func, self.hw)

        return rewrite_functions(mod, splitter.builder_, split)


def reduction_of(value: Expr) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shape and axes of a reduction that can be split; None for everything else."""
    if not isinstance(value, Call) or getattr(value.op, "name", None) not in _REDUCE:
        return None
    (x,) = value.args
    shape = static_shape(x)
    if not shape or 0 in shape or str(x.ty.dtype) == "bool":
        return None
    axes = range(len(shape)) if value.attrs.axis is None else value.attrs.axis
    return shape, tuple(sorted({int(axis) % len(shape) for axis in axes}))


def _first_axes(value: Expr) -> tuple[int, ...] | None:
    """The axes that a reduction with symbolic extents goes over first; None for another one."""
    if not isinstance(value, Call) or getattr(value.op, "name", None) not in _WHOLE:
        return None
    (x,) = value.args
    shape = getattr(x.ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr) or str(x.ty.dtype) == "bool":
        return None
    extents = [int(e) if isinstance(e, tirx.IntImm) else None for e in shape.values]
    axes = range(len(extents)) if value.attrs.axis is None else value.attrs.axis
    return first_axes(extents, [int(axis) % len(extents) for axis in axes])


class _Survey:
    """Which tensors of a function lie on the same points, and the reductions over their rows."""

    def __init__(self, func: relax.Function) -> None:
        self._parent: dict[Var, Var] = {}
        calls = list(_calls(func))
        for var, call in calls:
            for arg in call.args:
                if isinstance(arg, Var) and _points(arg) == _points(var) != 1:
                    self._join(arg, var)
        self._depth = _depths(calls)
        self._rows: dict[tuple[Var, int], Counter[tuple[int, int]]] = {}
        self._levels = _Levels(calls, self._root).of
        for _, call in calls:
            found = reduction_of(call)
            if found is None or not isinstance(call.args[0], Var):
                continue
            space = _row_space(*found)
            if space is not None:
                self._rows.setdefault(self._place(call.args[0]), Counter())[space] += 1

    def _join(self, a: Var, b: Var) -> None:
        a, b = self._root(a), self._root(b)
        if not a.same_as(b):
            self._parent[a] = b

    def _root(self, var: Var) -> Var:
        passed = []
        while var in self._parent:
            passed.append(var)
            var = self._parent[var]
        for below in passed[:-1]:  # found at once the next time
            self._parent[below] = var
        return var

    def _place(self, var: Var) -> tuple[Var, int]:
        """What one reading can serve: the same points, with no contraction between."""
        return self._root(var), self._depth.get(var, 0)

    def setting(self, call: Call) -> Setting:
        """What stands around a reduction."""
        x = call.args[0]
        if not isinstance(x, Var):
            return Setting()
        shape, axes = reduction_of(call)
        rows = self._rows.get(self._place(x), Counter())
        levels = self._levels.get((self._root(x), shape, axes), 0)
        return Setting(frozenset(rows), max(1, rows[_row_space(shape, axes)]), levels)


def _depths(calls: list[tuple[Var, Call]]) -> dict[Var, int]:
    """How many contractions follow one another before each tensor: residuals join the points of all
    layers of a model, and nothing reads these at once.
    """
    depths: dict[Var, int] = {}
    for var, call in calls:
        before = max((depths.get(arg, 0) for arg in call.args if isinstance(arg, Var)), default=0)
        name = getattr(call.op, "name", "")
        contracts = name == "relax.matmul" or name.startswith(
            ("relax.nn.conv", "relax.nn.attention")
        )
        depths[var] = before + contracts
    return depths


_Key = tuple[Var, tuple[int, ...], tuple[int, ...]]
"""The points that reductions are over, as the root of their tensors, shape and axes."""


class _Levels:
    """How many reductions over the same axes of the same points wait for one another.

    `of` has those whose results come back to these points, through tensors as large as the result.
    """

    def __init__(self, calls: list[tuple[Var, Call]], root: Callable[[Var], Var]) -> None:
        self.of: dict[_Key, int] = {}
        self._pending: dict[Var, dict[_Key, int]] = {}  # not yet back
        self._below: dict[Var, dict[_Key, int]] = {}  # back: what a point has been computed from
        for var, call in calls:
            args = [arg for arg in call.args if isinstance(arg, Var)]
            found = reduction_of(call)
            if found is not None and args:
                key = (root(args[0]), *found)
                level = self._below.get(args[0], {}).get(key, 0) + 1
                self._pending[var] = {key: level}
            else:
                self._follow(var, args, root(var))

    def _follow(self, var: Var, args: list[Var], points: Var) -> None:
        pending, below, size = {}, {}, _points(var)
        for arg in args:
            for key, level in self._below.get(arg, {}).items():
                if points.same_as(key[0]):
                    below[key] = max(level, below.get(key, 0))
            for key, level in self._pending.get(arg, {}).items():
                if points.same_as(key[0]):
                    below[key] = max(level, below.get(key, 0))
                    self.of[key] = max(level, self.of.get(key, 0))
                elif size == _points(arg):
                    pending[key] = max(level, pending.get(key, 0))
        if pending:
            self._pending[var] = pending
        if below:
            self._below[var] = below


def _calls(func: relax.Function) -> Iterator[tuple[Var, Call]]:
    for block in func.body.blocks:
        for binding in block.bindings:
            if isinstance(binding, relax.VarBinding) and isinstance(binding.value, Call):
                yield binding.var, binding.value


def _points(var: Var) -> int:
    """Elements of a tensor; 1 where they are not known."""
    return math.prod(static_shape(var) or ())


def _row_space(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, int] | None:
    """(rows, columns) of a reduction over the trailing axes."""
    pattern = [axis in axes for axis, size in enumerate(shape) if size != 1]
    if pattern != sorted(pattern):
        return None
    columns = math.prod(shape[axis] for axis in axes)
    return math.prod(shape) // columns, columns


def _may_split(func: relax.Function, hw: HardwareProfile) -> bool:
    """Whether a reduction of a function may become several. Over rows that stay one alone stay one
    in any setting; whatever else there is, and what stands in a branch, is looked at closely.
    """
    for block in func.body.blocks:
        for binding in block.bindings:
            found = reduction_of(binding.value)
            if found is None:
                if not isinstance(binding.value, _PLAIN) or _first_axes(binding.value) is not None:
                    return True
            elif _row_space(*found) is None or len(stages(*found, hw)) > 1:
                return True
    return False


@mutator
class _Splitter(PyExprMutator):
    """Replaces the binding of a reduction by those of its stages."""

    def split_function(self, func: relax.Function, hw: HardwareProfile) -> relax.Function | None:
        """The function with its reductions split, or None where there was nothing to split."""
        if not isinstance(func.body, relax.SeqExpr) or not _may_split(func, hw):
            return None
        self.hw, self.survey, self.changed = hw, _Survey(func), False
        self.parts = Parts(self.builder_, func)
        split = self.visit_expr(func)
        return self.parts.tagged(split) if self.changed else None

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        first = _first_axes(binding.value)
        if first is not None:
            self._split_whole(binding, first)
            return
        found = reduction_of(binding.value)
        steps = stages(*found, self.hw, self.survey.setting(binding.value)) if found else []
        if len(steps) < 2:
            super().visit_var_binding_(binding)
            return
        self.changed = True
        call, name = binding.value, binding.var.name
        tensor = self.visit_expr(call.args[0])
        for stage in steps[:-1]:
            tensor = self.parts.bind(name, "part", self._reduce(call, name, tensor, stage))
        last = self._finish(call, name, tensor, steps[-1], *found)
        self.parts.finish(self.visit_var_def(binding.var), last)

    def _split_whole(self, binding: relax.VarBinding, first: tuple[int, ...]) -> None:
        """A full reduction with symbolic extents as two."""
        self.changed = True
        call, reduce = binding.value, _WHOLE[binding.value.op.name]
        part = reduce(self.visit_expr(call.args[0]), list(first), True)
        part = self.parts.bind(binding.var.name, "part", part)
        last = reduce(part, call.attrs.axis, bool(call.attrs.keepdims))
        self.parts.finish(self.visit_var_def(binding.var), last)

    def _finish(
        self,
        call: Call,
        name: str,
        tensor: Expr,
        stage: Stage,
        shape: tuple[int, ...],
        axes: tuple[int, ...],
    ) -> Expr:
        """The last stage, as a reduction over the original axes."""
        view = [1 if axis in axes else size for axis, size in enumerate(shape)]
        for axis, home in zip(stage.axes, stage.homes, strict=True):
            view[home] = stage.view[axis]
        tensor = self._view(name, tensor, tuple(view))
        return _REDUCE[call.op.name](tensor, list(axes), bool(call.attrs.keepdims))

    def _reduce(self, call: Call, name: str, tensor: Expr, stage: Stage) -> Expr:
        """One stage before the last, not yet bound."""
        if stage.padding:
            tensor = self._view(name, tensor, stage.view)
            (axis,) = stage.axes
            widths = [0] * (2 * len(stage.view))
            widths[2 * axis + 1] = stage.padding
            neutral = _neutral(call.op.name, str(tensor.ty.dtype))
            tensor = self.parts.bind(name, "padded", op.nn.pad(tensor, widths, pad_value=neutral))
        tensor = self._view(name, tensor, stage.split_view)
        return _REDUCE[call.op.name](tensor, list(stage.reduced))

    def _view(self, name: str, tensor: Expr, shape: tuple[int, ...]) -> Expr:
        if static_shape(tensor) == shape:
            return tensor
        return self.parts.bind(name, "view", op.reshape(tensor, shape))


def _neutral(reduction: str, dtype: str) -> float | int:
    """The element that changes no result."""
    if reduction in ("relax.sum", "relax.prod"):
        return 0 if reduction == "relax.sum" else 1
    if dtype.startswith(("float", "bfloat")):
        return -math.inf if reduction == "relax.max" else math.inf
    limit = tvm.tirx.min_value(dtype) if reduction == "relax.max" else tvm.tirx.max_value(dtype)
    return int(limit.value)
