"""The pass and the mutator behind it; see the package for Before and After."""

import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax import Expr, Var
from tvm.relax.expr_functor import PyExprMutator, mutator

from ...config import HardwareProfile
from ...ir.graph import COMPOSITES_ATTR
from ..functions.functions import DECOMPOSE, ModulePass, rewrite_functions
from ..functions.unique_names import FreshNames
from . import activations, norms, softmax, statistics
from .opening import Opening, Rule
from .statistics import written_out

RULES: dict[str, Rule] = {
    **activations.RULES,
    **norms.RULES,
    **softmax.RULES,
    **statistics.RULES,
}


@tvm.transform.module_pass(opt_level=0, name=DECOMPOSE)
class Decompose(ModulePass):
    """Opens composite Relax operators into primitives and remembers which came from which.

    The function attribute `tvm_fusion.composites` maps the name of every variable bound to a part
    of a composite to the composite's tag, "softmax#3" for the third softmax of the function. The
    last part keeps the name of the composite's own variable, the others are called after the tag
    (`softmax3_exp`). So that the map is well defined, variables of a function with composites get
    unique names. The names survive LegalizeOps, FoldConstant, DeadCodeElimination and a round trip
    through JSON or TVMScript; a variable that a later pass folds away or renames is in the map but
    no longer in the function, and readers have to expect that.

    Float16 and bfloat16 values are widened to float32 where a composite begins and rounded where
    it ends; products of half tensors accumulate in float32.

    Operators without a rule, operators whose rule declines (see the rule's file), and functions
    marked Primitive, Composite or Codegen pass through. A module with nothing to open is returned
    as it is, hence running the pass twice equals running it once.

    Parameters
    ----------
    hw : HardwareProfile or None
        The GPU whose limits decide between forms: statistics over what it cannot hold on the chip
        are taken in one pass, and batch norms in training form are opened. None: neither.
    keep_all : bool
        Open only what TVM cannot legalize.

    Examples
    --------
    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(x: R.Tensor((4, 8), "float32")) -> R.Tensor((4, 8), "float32"):
                y = R.nn.softmax(x, axis=-1)
                return y

    After ``Decompose()``::

        @I.ir_module
        class After:
            @R.function
            def main(x: R.Tensor((4, 8), "float32")) -> R.Tensor((4, 8), "float32"):
                R.func_attr({"tvm_fusion.composites": {
                    "softmax1_max": "softmax#1", "softmax1_shifted": "softmax#1",
                    "softmax1_exp": "softmax#1", "softmax1_sum": "softmax#1", "y": "softmax#1",
                }})
                softmax1_max = R.max(x, axis=[-1], keepdims=True)
                softmax1_shifted = R.subtract(x, softmax1_max)
                softmax1_exp = R.exp(softmax1_shifted)
                softmax1_sum = R.sum(softmax1_exp, axis=[-1], keepdims=True)
                y = R.divide(softmax1_exp, softmax1_sum)
                return y
    """

    def __init__(self, hw: HardwareProfile | None = None, keep_all: bool = False) -> None:
        self.hw, self.keep_all = hw, keep_all

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        decomposer = _Decomposer(mod)
        decomposer.hw, decomposer.keep_all = self.hw, self.keep_all
        return rewrite_functions(mod, decomposer.builder_, decomposer.open_function)


def _rule_of(value: Expr) -> tuple[str, Rule] | None:
    """("softmax", its rule) for a call of an operator that has one."""
    if not isinstance(value, Call) or not isinstance(value.op, tvm.ir.Op):
        return None
    rule = RULES.get(value.op.name)
    if rule is None:
        return None
    return value.op.name.rsplit(".", 1)[-1].removesuffix("_bias"), rule


def _fails_whole(call: Call) -> bool:
    """Whether TVM cannot legalize a composite itself."""
    return norms.fails_whole(call) or softmax.fails_whole(call)


@mutator
class _Decomposer(PyExprMutator):
    """Replaces the binding of a composite by the bindings of its parts."""

    def open_function(self, func: relax.Function) -> relax.Function | None:
        """The function with its composites opened, or None where there was nothing to open."""
        old_tags = dict(func.attrs[COMPOSITES_ATTR]) if _has_tags(func) else {}
        self._tags: dict[str, str] = {}
        self._counts = _highest_numbers(old_tags)
        self._fresh = FreshNames.beside(func)
        self._defined: set[str] = set()
        self._tuples: dict[Var, relax.Tuple] = {}
        self._variances = written_out(func)
        self._centers = set(self._variances.values())
        self._spreads: dict[Var, Expr] = {}
        opened = self.visit_expr(func)
        if not self._tags:
            return None
        opened = relax.analysis.remove_all_unused(opened)
        names = {var.name for var in relax.analysis.all_vars(opened)}
        tags = {name: tag for name, tag in {**old_tags, **self._tags}.items() if name in names}
        return opened.with_attr(COMPOSITES_ATTR, tags)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        value = binding.value
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in self._tuples:
            self._alias(binding.var, self._tuples[value.tuple_value].fields[value.index])
            return
        found = _rule_of(value)
        kept = self.keep_all and found is not None and not _fails_whole(value)
        if found is None or kept or not self._open(binding, *found):
            super().visit_var_binding_(binding)

    def visit_var_def_(self, var: Var) -> Var:
        return self._define(var, relax.Var)

    def visit_dataflow_var_def_(self, var: Var) -> Var:
        return self._define(var, relax.DataflowVar)

    def _open(self, binding: relax.VarBinding, kind: str, rule: Rule) -> bool:
        """Emit the parts of a composite; False, and nothing emitted, where the rule declines."""
        number = self._counts.get(kind, 0) + 1
        opening = Opening(self.builder_, f"{kind}{number}", self._fresh, self.hw)
        opening.is_center = binding.var in self._centers
        if binding.var in self._variances:
            opening.spread = self._spreads.get(self._variances[binding.var])
        result = rule(opening, self.visit_expr(binding.value))
        if result is None:
            return False
        if opening.is_center and opening.spread is not None:
            self._spreads[binding.var] = opening.spread
        self._counts[kind] = number
        tag = f"{kind}#{number}"
        *parts, last = opening.bindings
        for part in parts:
            self._bind(part.var, part.value, tag)
        if result.same_as(last.var):
            self._bind(self.visit_var_def(binding.var), last.value, tag)
            return True
        self._bind(last.var, last.value, tag)
        self._tuples[binding.var] = result
        self._bind(self.visit_var_def(binding.var), self.builder_.normalize(result), tag)
        return True

    def _bind(self, var: Var, value: Expr, tag: str) -> None:
        self.builder_.emit_normalized(relax.VarBinding(var, value))
        self._tags[var.name] = tag

    def _alias(self, var: Var, value: Expr) -> None:
        """Let `var` stand for `value`: by renaming inside a dataflow block, else by a binding."""
        if isinstance(var, relax.DataflowVar) and isinstance(value, Var):
            self.set_var_remap(var, value)
        else:
            self.builder_.emit_normalized(relax.VarBinding(self.visit_var_def(var), value))

    def _define(self, var: Var, kind: type[Var]) -> Var:
        """The variable itself, or one with a unique name in its place."""
        if var.name not in self._defined:
            self._defined.add(var.name)
            return var
        renamed = kind(self._fresh(var.name), var.ty)
        self.set_var_remap(var, renamed)
        return renamed


def _has_tags(func: relax.Function) -> bool:
    return func.attrs is not None and COMPOSITES_ATTR in func.attrs


def _highest_numbers(tags: dict[str, str]) -> dict[str, int]:
    highest: dict[str, int] = {}
    for tag in tags.values():
        kind, number = str(tag).split("#")
        highest[kind] = max(highest.get(kind, 0), int(number))
    return highest
