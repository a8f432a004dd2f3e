"""NeededRows: what is computed for all rows, of which a slice is read, is computed for the slice.

    h = matmul(x, W) + r                       # [8, 197, 768]
    y = strided_slice(rms_norm(h), 1, [0:1])   # the first token alone is read
->  x0 = strided_slice(x, 1, [0:1]), r0 = strided_slice(r, 1, [0:1])
    y = rms_norm(matmul(x0, W) + r0)           # [8, 1, 768]

The last layer of a language model that reads a text and gives the scores of the next word, or of
an encoder whose class is read off one token, is computed for that token: its products, the queries
of its attention, and its norms. Each operator is narrowed whose readers all read the same slice;
where one is computed in whole, its slice is taken.

Of an axis of symbolic extent, a known number of the first or of the last elements is such a slice:
the last token of a text of any length.

Does not handle (left alone): slices of more than one axis or of more than half of it, columns of
products, what is read outside of its dataflow block, and slices in front of which nothing stands
but pointwise operators: kernels compute of these what is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax import Expr, Var, op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ...ir.access import Extent
from ...ir.extents import assumed, product_key
from ...ir.reader import extent_of
from ..functions.functions import rewrite_functions, static_shape
from ..rewrites.factors import is_call
from ..rewrites.join_pieces import numbers_of
from ..rewrites.layout_turns import ELEMENTWISE
from ..rewrites.readers import Parts

MOST_OF_ALL = 0.5
"""Of the elements along an axis, those that a slice reads at most."""
_ELEMENTWISE = {name.removeprefix("relax.") for name in ELEMENTWISE}
_REDUCTIONS = ("sum", "max", "min", "mean")


@dataclass(frozen=True, slots=True)
class Rows:
    """Elements `first`, `first + step`, ... before `last` along an axis of a tensor; with
    `from_end` both are counted from its symbolic end, where they are 0 or less.
    """

    axis: int
    first: int
    last: int
    step: int
    from_end: bool = False

    @property
    def count(self) -> int:
        """How many there are."""
        return len(range(self.first, self.last, self.step))

    def along(self, axis: int) -> Rows:
        """The same elements along another axis."""
        return replace(self, axis=axis)

    def of(self, x: Expr) -> Call:
        """Their slice of a tensor."""
        first, last = self.first, self.last
        if self.from_end:
            end = x.ty.shape.values[self.axis]
            first, last = end + first, end + last if last else end
        return op.strided_slice(x, [self.axis], [first], [last], [self.step], assume_inbound=True)


_ALL = None
Needed = Rows | None


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.NeededRows")
class NeededRows:
    """See the module docstring. Runs before LegalizeOps; a module without such slices is returned
    as it is.
    """

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        narrower = _Narrower(mod)
        return rewrite_functions(mod, narrower.builder_, narrower.narrow_function)


def sliced_rows(call: Expr) -> Rows | None:
    """What a slice of few elements along one axis reads; None for everything else."""
    if not is_call(call, "strided_slice"):
        return None
    source, axes, *limits = call.args
    shape, numbers = _shape(source), [numbers_of(tuple_) for tuple_ in (axes, *limits)]
    if shape and numbers[0] is not None and len(numbers[0]) == 1:
        axis = numbers[0][0] % len(shape)
        if not isinstance(shape[axis], int):
            return _rows_of_symbolic(call, axis, numbers[1:])
    if not shape or any(found is None or len(found) != 1 for found in numbers):
        return None
    (axis,), *limits = numbers
    places = range(shape[axis])[slice(*(limit for (limit,) in limits))]
    if places.step < 1 or not 0 < len(places) <= MOST_OF_ALL * shape[axis]:
        return None
    return Rows(axis % len(shape), places[0], places[-1] + 1, places.step)


def _rows_of_symbolic(call: Call, axis: int, limits: list[list[int] | None]) -> Rows | None:
    """What a slice reads along an axis of symbolic extent: elements next to its start or its end,
    which are all there (`assume_inbound`).
    """
    if not call.attrs.assume_inbound or any(
        not isinstance(tuple_, relax.Tuple) or len(tuple_.fields) != 1 for tuple_ in call.args[2:]
    ):
        return None
    (step,) = (limits[2] if len(limits) > 2 else [1]) or (0,)
    extent, from_end = call.args[0].ty.shape.values[axis], limits[0] is None
    if from_end:
        simplify = tvm.sym.Analyzer().simplify
        apart = [simplify(tuple_.fields[0] - extent) for tuple_ in call.args[2:4]]
        if not all(isinstance(n, tvm.tirx.IntImm) for n in apart):
            return None
        first, last = map(int, apart)
    elif limits[1] is not None:
        first, last = limits[0][0], limits[1][0]
    else:
        return None
    inside = last <= 0 if from_end else first >= 0
    count = len(range(first, last, step)) if step > 0 else 0
    if not inside or not 0 < count <= MOST_OF_ALL * assumed(extent_of(extent)):
        return None
    return Rows(axis, first, last, step, from_end)


def narrowed_operands(call: Expr, rows: Rows) -> list[Needed] | None:
    """Of each operand what the rows of a result are computed of, `None` for all of it; None where
    they cannot be computed alone.
    """
    if not isinstance(call, Call) or not isinstance(call.op, tvm.ir.Op):
        return None
    shape = _shape(call)
    tensors = [_shape(arg) for arg in call.args]
    if shape is None:
        return None
    if is_call(call, *_ELEMENTWISE):
        known = zip(call.args, tensors, strict=True)
        if any(t is None and isinstance(arg.ty, relax.TensorType) for arg, t in known):
            return None
        return [_ALL if t is None else _broadcast(rows, len(shape), t) for t in tensors]
    if is_call(call, "matmul"):
        return _of_product(rows, len(shape), tensors)
    if is_call(call, *_REDUCTIONS):
        return _of_reduction(call, rows, tensors[0])
    if is_call(call, "permute_dims"):
        axes = call.attrs.axes
        return [rows.along(int(axes[rows.axis]) if axes else len(shape) - 1 - rows.axis)]
    if is_call(call, "reshape"):
        axis = _same_axis(shape, rows.axis, tensors[0])
        return None if axis is None else [rows.along(axis), _ALL]
    return None


def _shape(tensor: Expr) -> tuple[Extent, ...] | None:
    """The extents of a tensor expression, symbolic ones as text."""
    known = static_shape(tensor)
    shape = getattr(tensor.ty, "shape", None)
    if known is not None or not isinstance(shape, relax.ShapeExpr):
        return known
    is_tensor = isinstance(tensor.ty, relax.TensorType)
    return tuple(map(extent_of, shape.values)) if is_tensor else None


def _broadcast(rows: Rows, rank: int, shape: tuple[Extent, ...]) -> Needed:
    """The rows of an operand that is broadcast to a result of `rank` axes."""
    axis = rows.axis - (rank - len(shape))
    return _ALL if axis < 0 or shape[axis] == 1 else rows.along(axis)


def _of_product(
    rows: Rows, rank: int, tensors: list[tuple[Extent, ...] | None]
) -> list[Needed] | None:
    left, right = tensors
    if left is None or right is None or min(len(left), len(right)) < 2 or rows.axis == rank - 1:
        return None
    if rows.axis == rank - 2:
        return [rows.along(len(left) - 2), _ALL]
    return [_broadcast(rows, rank, shape) for shape in (left, right)]


def _of_reduction(call: Call, rows: Rows, shape: tuple[Extent, ...] | None) -> list[Needed] | None:
    if shape is None or call.attrs.axis is None:
        return None
    reduced = {int(axis) % len(shape) for axis in call.attrs.axis}
    kept = [a for a in range(len(shape)) if call.attrs.keepdims or a not in reduced]
    axis = kept[rows.axis]
    return None if axis in reduced else [rows.along(axis)]


def _same_axis(
    shape: tuple[Extent, ...], axis: int, source: tuple[Extent, ...] | None
) -> int | None:
    """The axis of a tensor that is `axis` of it reshaped to `shape`."""
    before = product_key(shape[:axis])
    for other, extent in enumerate(source or ()):
        if extent == shape[axis] and product_key(source[:other]) == before:
            return other
    return None


class _Demand:
    """What is read of each tensor of a function, from its results back to its inputs.

    Attributes
    ----------
    narrowed : dict of Var to (Rows, list of Needed)
        What is computed in part: the rows, and what is needed of each operand.
    slices : dict of Var to Rows
        Slices of what is computed in part, which it is now itself.
    """

    def __init__(self, func: relax.Function) -> None:
        self._needed: dict[Var, Needed] = {}
        self.narrowed: dict[Var, tuple[Rows, list[Needed]]] = {}
        self._seeds: dict[Var, tuple[Expr, Rows]] = {}
        self._pays = False
        self._ask_for_all(func.body.body)
        for block in reversed(func.body.blocks):
            for binding in reversed(block.bindings):
                self._read(binding, isinstance(block, relax.DataflowBlock))
        found = {v: (s, rows) for v, (s, rows) in self._seeds.items() if s in self.narrowed}
        self.slices = {v: rows for v, (s, rows) in found.items()}

    @property
    def pays(self) -> bool:
        """Whether a product or a reduction is of fewer rows."""
        return self._pays

    def _read(self, binding: relax.Binding, is_dataflow: bool) -> None:
        var, value = binding.var, binding.value
        is_inner = is_dataflow and isinstance(var, relax.DataflowVar)
        is_inner &= isinstance(binding, relax.VarBinding)
        rows = self._needed.get(var, _ALL) if is_inner else _ALL
        operands = None if rows is None else narrowed_operands(value, rows)
        if operands is not None:
            self.narrowed[var] = rows, operands
            self._pays |= is_call(value, "matmul", *_REDUCTIONS)
            for arg, needed in zip(value.args, operands, strict=True):
                self._ask(arg, needed)
            return
        seed = sliced_rows(value)
        if seed is not None:
            self._seeds[var] = value.args[0], seed
            self._ask(value.args[0], seed)
        else:
            self._ask_for_all(value)

    def _ask(self, expr: Expr, needed: Needed) -> None:
        if not isinstance(expr, Var):
            self._ask_for_all(expr)
        elif self._needed.setdefault(expr, needed) != needed:
            self._needed[expr] = _ALL

    def _ask_for_all(self, expr: Expr) -> None:
        for var in _variables(expr):
            self._needed[var] = _ALL


def _variables(expr: Expr) -> Iterator[Var]:
    found: list[Var] = []
    relax.analysis.post_order_visit(
        expr, lambda part: found.append(part) if isinstance(part, Var) else None
    )
    return iter(found)


@mutator
class _Narrower(PyExprMutator):
    """Computes what `_Demand` found of fewer rows."""

    def narrow_function(self, func: relax.Function) -> relax.Function | None:
        """The function with fewer rows, or None where all of them are read."""
        if not isinstance(func.body, relax.SeqExpr):
            return None
        self.demand = _Demand(func)
        if not self.demand.pays:
            return None
        self.parts = Parts(self.builder_, func)
        self.known: dict[tuple[Expr, Rows], Var] = {}
        return self.parts.tagged(self.visit_expr(func))

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        var, call = binding.var, binding.value
        if var in self.demand.narrowed:
            rows, operands = self.demand.narrowed[var]
            value = self.builder_.normalize(self._of_rows(call, rows, operands))
            narrow = relax.DataflowVar(var.name, value.ty)
            self.parts.finish(narrow, value)
            self.known[var, rows] = narrow
        elif var in self.demand.slices:
            self._alias(var, self.known[call.args[0], self.demand.slices[var]])
        else:
            super().visit_var_binding_(binding)

    def _of_rows(self, call: Call, rows: Rows, operands: list[Needed]) -> Expr:
        pairs = zip(call.args, operands, strict=True)
        args = [self.visit_expr(a) if r is None else self._rows(a, r) for a, r in pairs]
        if is_call(call, "reshape"):
            shape = list(call.ty.shape.values)
            shape[rows.axis] = rows.count
            return op.reshape(args[0], shape)
        return Call(call.op, args, call.attrs, call.ty_args, call.span)

    def _rows(self, tensor: Expr, rows: Rows) -> Expr:
        """Rows of a tensor: as it is computed, or its slice."""
        if (tensor, rows) not in self.known:
            whole = rows.of(self.visit_expr(tensor))
            name = tensor.name if isinstance(tensor, Var) else "constant"
            self.known[tensor, rows] = self.parts.bind(name, "rows", whole)
        return self.known[tensor, rows]

    def _alias(self, var: Var, value: Var) -> None:
        """Lets a variable stand for another."""
        if isinstance(var, relax.DataflowVar):
            self.set_var_remap(var, value)
        else:
            self.parts.finish(self.visit_var_def(var), value)
