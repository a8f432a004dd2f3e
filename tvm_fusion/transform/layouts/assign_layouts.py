"""AssignLayouts: convolutions with channels last, and what stands around them in the orders of axes
that move least; pools without convolutions, too, where the model turns what they read or give.

Which, is decided for all tensors of a function at once (`assignment`). `CancelLayouts`, which runs
behind it, joins what is left of chains of permutations and reshapes.

Does not handle: tensors of unknown rank, convolutions of blocked layouts; branches and functions
within a function, whose tensors stay as they are.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax import Expr, Var
from tvm.relax.expr_functor import mutator

from ..decompose.opening import shape_of
from ..functions.functions import ASSIGN_LAYOUTS, ModulePass, is_opaque, operator_name
from ..rewrites.factors import is_constant
from ..rewrites.readers import BlockwiseMutator, Parts
from .assignment import Assignment, Operator, Tensor
from .orders import Order, change, channels_last, plain
from .ways import is_known, is_to_change, is_window, operands, results, ways_of


@tvm.transform.module_pass(opt_level=0, name=ASSIGN_LAYOUTS)
class AssignLayouts(ModulePass):
    """Computes convolutions with channels last, on data that lies so for as long as it pays.

    Each operator is given the orders of axes of its tensors, so that in all the fewest bytes are
    moved by permutations: pools, changes of size, norms, reductions, concatenations and the rest
    follow the convolutions around them, and permutations in the model vanish where tensors lie as
    they would put them. Weights that are constants are permuted at once, those that are parameters
    by operators which read nothing else, so that `LiftTransformParams` takes them out of a function
    with `num_input`. A convolution of one tap, with a stride of 1, no padding and no groups,
    becomes a matrix product.

    Kernels for GPUs take such data; on a CPU the pipelines leave the pass out. A function whose
    convolutions are so already, or one without any whose pools and changes of size are best as they
    are, stays as it is: running the pass twice equals running it once.

    Examples
    --------
    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(
                x: R.Tensor((1, 8, 6, 6), "float32"), w: R.Tensor((4, 8, 3, 3), "float32")
            ) -> R.Tensor((1, 4, 2, 2), "float32"):
                with R.dataflow():
                    y = R.nn.conv2d(x, w)
                    z = R.nn.max_pool2d(y, pool_size=[2, 2], strides=[2, 2])
                    R.output(z)
                return z

    After ``AssignLayouts()``::

        @I.ir_module
        class After:
            @R.function
            def main(
                x: R.Tensor((1, 8, 6, 6), "float32"), w: R.Tensor((4, 8, 3, 3), "float32")
            ) -> R.Tensor((1, 4, 2, 2), "float32"):
                with R.dataflow():
                    x_layout = R.permute_dims(x, axes=[0, 2, 3, 1])
                    w_layout = R.permute_dims(w, axes=[0, 2, 3, 1])
                    y = R.nn.conv2d(
                        x_layout, w_layout, data_layout="NHWC", kernel_layout="OHWI"
                    )
                    z_turned = R.nn.max_pool2d(
                        y, pool_size=[2, 2], strides=[2, 2], layout="NHWC"
                    )
                    z = R.permute_dims(z_turned, axes=[0, 3, 1, 2])
                    R.output(z)
                return z
    """

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """The module with its functions rewritten; itself where there is nothing to change."""
        changed = {}
        for gvar, func in mod.functions_items():
            if not isinstance(func, relax.Function) or not _may_change(func):
                continue
            if is_opaque(func) or _has_empty(func):
                continue
            survey = Survey(func)
            survey.assignment.solve()
            if survey.is_changed:
                changed[gvar] = _Rewriter(mod).rewritten(func, survey)
        if not changed:
            return mod
        mod = mod.clone()
        for gvar, func in changed.items():
            mod.update_func(gvar, func)
        return relax.transform.CanonicalizeBindings()(mod)


def _may_change(func: relax.Function) -> bool:
    """Whether there is work for a `Survey`, which looks at all operators: convolutions, or windows
    among channels that are turned.
    """
    if not isinstance(func.body, relax.SeqExpr):
        return False
    values = [binding.value for block in func.body.blocks for binding in block.bindings]
    calls = [value for value in values if isinstance(value, Call)]
    if any(map(is_to_change, calls)):
        return True
    return any(map(is_window, calls)) and any(map(_turns_channels, calls))


def _turns_channels(call: Call) -> bool:
    """Whether an operator moves the channels of images behind all other axes, or back."""
    if operator_name(call) != "relax.permute_dims" or call.ty.ndim < 3 or not call.attrs.axes:
        return False
    last = channels_last(call.ty.ndim)
    back = tuple(last.index(axis) for axis in range(len(last)))
    return tuple(int(axis) for axis in call.attrs.axes) in (last, back)


def _has_empty(func: relax.Function) -> bool:
    """Whether a tensor has no elements, and so no order."""
    shapes = (getattr(var.ty, "shape", None) for var in relax.analysis.all_vars(func))
    sizes = (n for shape in shapes if isinstance(shape, relax.ShapeExpr) for n in shape.values)
    return any(isinstance(n, tvm.tirx.IntImm) and int(n) == 0 for n in sizes)


class Survey:
    """The operators of a function, and the tensors between them.

    Attributes
    ----------
    assignment : Assignment
    operators : dict of Var to Operator
        By the variable that an operator is bound to.
    convolutions : int
        How many there are that are to change.
    windows : list of Operator
        Pools, and changes of size.
    """

    def __init__(self, func: relax.Function) -> None:
        self.assignment = Assignment()
        self.operators: dict[Var, Operator] = {}
        self.convolutions = 0
        self.windows: list[Operator] = []
        self._names: dict[Var, Tensor] = {}
        self._whole = _tuples_read_whole(func)
        self._offered: dict[Tensor, dict[Order, None]] = {}
        self._weights = set(func.params[_inputs_of(func) :])
        for block in func.body.blocks:
            for binding in block.bindings:
                self._add(binding)
        self._want(func.body.body)

    @property
    def is_changed(self) -> bool:
        """Whether anything is to be computed in another way, when the assignment is solved."""
        return self.convolutions > 0 or any(not window.way.is_plain for window in self.windows)

    def tensor(self, expr: Expr) -> Tensor | None:
        """The tensor that a variable stands for, or that is field of a tuple."""
        return self._names.get(expr) if isinstance(expr, Var) else None

    def _add(self, binding: relax.Binding) -> None:
        var, value = binding.var, binding.value
        field = self._field(value)
        if field is not None:
            self._names[var] = field
        elif isinstance(binding, relax.VarBinding) and self._is_operator(var, value):
            self._operator(var, value)
        else:
            self._want(value)

    def _field(self, value: Expr) -> Tensor | None:
        """The tensor that a field of a tuple is, if an operator here computes it."""
        if not isinstance(value, relax.TupleGetItem) or value.tuple_value not in self.operators:
            return None
        return value.tuple_value, value.index

    def _is_operator(self, var: Var, value: Expr) -> bool:
        if var in self._whole or not isinstance(value, Call) or not is_known(value):
            return False
        return all(isinstance(t, Var) or is_constant(t) for t in operands(value))

    def _operator(self, var: Var, call: Call) -> None:
        reads = [self._read(tensor) for tensor in operands(call)]
        offered = [order for t in reads if t is not None for order in self._offered.get(t, ())]
        ways = ways_of(call, list(dict.fromkeys(offered)))
        types = results(call)
        writes: list[Tensor] = [(var, i) for i in range(len(types))]
        for place, (tensor, type_) in enumerate(zip(writes, types, strict=True)):
            self.assignment.types[tensor] = type_
            self._offered[tensor] = dict.fromkeys(way.outputs[place] for way in ways)
        if isinstance(call.ty, relax.TensorType):
            self._names[var] = writes[0]
        self.operators[var] = Operator(reads, writes, ways)
        self.assignment.operators.append(self.operators[var])
        self.convolutions += is_to_change(call)
        if is_window(call):
            self.windows.append(self.operators[var])

    def _read(self, expr: Expr) -> Tensor | None:
        """The tensor that an operator reads; None for one that changes its order for nothing."""
        if is_constant(expr) or expr in self._weights:
            return None
        return self._names.get(expr) or self._other(expr)

    def _other(self, var: Var) -> Tensor:
        """A tensor that something else computes, or a parameter."""
        self._names[var] = (var, 0)
        self.assignment.types[var, 0] = var.ty
        return self._names[var]

    def _want(self, expr: Expr) -> None:
        """Something that reads its tensors as the model has them."""
        for var in relax.analysis.free_vars(expr):
            if var in self._names:
                self.assignment.wanted.add(self._names[var])


def _inputs_of(func: relax.Function) -> int:
    """How many parameters a function has that are no weights."""
    has = func.attrs is not None and "num_input" in func.attrs
    return int(func.attrs["num_input"]) if has else len(func.params)


def _tuples_read_whole(func: relax.Function) -> set[Var]:
    """Variables of tuples that something else reads than their fields."""
    found: set[Var] = set()

    def note(expr: Expr) -> None:
        found.update(v for v in relax.analysis.free_vars(expr) if isinstance(v.ty, relax.TupleType))

    for block in func.body.blocks:
        for binding in block.bindings:
            if not isinstance(binding.value, relax.TupleGetItem):
                note(binding.value)
    note(func.body.body)
    return found


@mutator
class _Rewriter(BlockwiseMutator):
    """Puts operators into the orders that were chosen, and changes of order where they differ.

    Attributes
    ----------
    lies : dict of Var to tuple of Expr and Order
        What stands for variables whose tensors lie in another order than the model's.
    known : dict of tuple to Expr
        Tensors in other orders, made in this block: by variable and order.
    around : dict of tuple to Expr
        The same, made outside of it.
    """

    def rewritten(self, func: relax.Function, survey: Survey) -> relax.Function:
        """The function with the orders of a survey whose assignment is solved."""
        self.survey, self.known, self.around = survey, {}, {}
        self.parts = Parts(self.builder_, func)
        self.lies: dict[Var, tuple[Expr, Order]] = {}
        self.results = set(relax.analysis.free_vars(func.body.body))
        found = self.parts.tagged(self.visit_expr(func))
        return relax.analysis.remove_all_unused(found)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """An operator in its way; anything else on tensors in the order of the model."""
        var, value = binding.var, binding.value
        operator = self.survey.operators.get(var)
        if operator is not None:
            way = operator.way
            pairs = zip(operands(value), way.inputs, strict=True)
            tensors = [self._in_order(tensor, order, var.name) for tensor, order in pairs]
            built = way.build(self.parts, var.name, tensors)
            if isinstance(value.ty, relax.TupleType):
                self._bind_tuple(var, built)
            else:
                self._bind(var, built, way.outputs[0])
        elif isinstance(value, relax.TupleGetItem) and value.tuple_value in self.survey.operators:
            order = self.survey.operators[value.tuple_value].way.outputs[value.index]
            source = self.get_var_remap(value.tuple_value)
            self._bind(var, relax.TupleGetItem(source, value.index), order)
        else:
            around, self.around = self.around, self._with_plain(value)
            super().visit_var_binding_(binding)
            self.around = around

    def visit_match_cast_(self, binding: relax.MatchCast) -> None:
        """On a tensor in the order of the model."""
        self._with_plain(binding.value)
        super().visit_match_cast_(binding)

    def visit_var_(self, var: Var) -> Expr:
        """What something else than an operator reads."""
        return self._plain(var) if var in self.lies else super().visit_var_(var)

    def visit_dataflow_var_(self, var: Var) -> Expr:
        """What something else than an operator reads."""
        return self._plain(var) if var in self.lies else super().visit_dataflow_var_(var)

    def _with_plain(self, value: Expr) -> dict[tuple, Expr]:
        """`around`, and all that a value reads in the order of the model, made before its
        binding.
        """
        read = [var for var in relax.analysis.free_vars(value) if var in self.lies]
        return {**self.around, **{(v, plain(v.ty.ndim)): self._plain(v) for v in read}}

    def _plain(self, var: Var) -> Expr:
        return self._in_order(var, plain(var.ty.ndim), var.name)

    def _in_order(self, expr: Expr, order: Order, name: str) -> Expr:
        """A tensor in an order, made by an operator where it lies in another."""
        if is_constant(expr):
            source, own = expr, plain(len(order))
        elif (found := self.known.get((expr, order), self.around.get((expr, order)))) is not None:
            return found
        elif expr in self.lies:
            source, own = self.lies[expr]
        else:
            source, own = self.visit_expr(expr), plain(len(order))
        if own == order:
            return source
        made = self.parts.relabeled(source, change(shape_of(expr), own, order), name)
        if is_constant(made):
            return made
        if not isinstance(made, Var):
            made = self.parts.bind(expr.name, "layout", made)
        self.known[expr, order] = made
        return made

    def _bind(self, var: Var, value: Expr, order: Order) -> None:
        """Binds what stands for a variable and lies in an order."""
        is_plain = order == plain(len(order))
        if isinstance(var, relax.DataflowVar) and (isinstance(value, Var) or is_constant(value)):
            self.lies[var] = value, order
        elif is_plain:
            self.parts.finish(self.visit_var_def(var), value)
        elif var in self.results:
            turned = self.parts.bind(var.name, "turned", value)
            within = isinstance(turned, relax.DataflowVar)
            (self.known if within else self.around)[var, order] = turned
            back = change(shape_of(var), order, plain(len(order)))
            self.parts.finish(self.visit_var_def(var), self.parts.relabeled(turned, back, var.name))
        else:
            self.lies[var] = self._renewed(var, value), order

    def _bind_tuple(self, var: Var, value: Expr) -> None:
        self.set_var_remap(var, self._renewed(var, value))

    def _renewed(self, var: Var, value: Expr) -> Var:
        """A variable of the same name and kind, bound to a value of another type."""
        value = self.builder_.normalize(value)
        new = type(var)(var.name, value.ty)
        self.parts.finish(new, value)
        return new
