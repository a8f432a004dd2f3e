"""NestConcats: a concatenation of what is concatenated already takes the result of that.

    Before                      After
    c = concat((x, y))          c = concat((x, y))
    d = concat((x, y, z))       d = concat((c, z))

A dense block (DenseNet) concatenates all results so far, again for each of its layers. Nested, each
layer's result lies behind those before it, in one piece of memory (`lower.joins`).

Does not handle (left alone): parts that stand together in another order.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax import Expr, Var, op
from tvm.relax.expr_functor import mutator

from ..functions.functions import rewrite_functions, where_changed
from .factors import is_call
from .readers import BlockwiseMutator

MOST_PARTS = 512
"""Of a concatenation that is looked at: the sets of neighbours grow with the square."""


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.NestConcats")
class NestConcats:
    """See the module docstring. A module without such concatenations is returned as it is."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod` with nested concatenations."""
        nester = _Nester(mod)
        return rewrite_functions(mod, nester.builder_, where_changed(nester))


@mutator
class _Nester(BlockwiseMutator):
    """Knows the concatenations of a block by axis and parts."""

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self.known = {}
        self.changed = False

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Rewrite a concatenation, and remember what it is one of."""
        value = binding.value
        parts = _parts(value)
        if parts is not None:
            nested = self._nested(value, parts)
            if nested is not None:
                self.changed = True
                binding = relax.VarBinding(binding.var, nested)
            self.known[_axis(value), parts] = binding.var
        super().visit_var_binding_(binding)

    def _nested(self, call: Call, parts: tuple[Var, ...]) -> Expr | None:
        """The concatenation with its longest run of parts that is one already in one piece."""
        axis, count = _axis(call), len(parts)
        for length in range(count - 1, 1, -1):
            for first in range(count - length + 1):
                whole = self.known.get((axis, parts[first : first + length]))
                if whole is not None:
                    fields = [*parts[:first], whole, *parts[first + length :]]
                    return op.concat(fields, call.attrs.axis)
        return None


def _parts(value: Expr) -> tuple[Var, ...] | None:
    """The parts of a concatenation, if all are variables."""
    if not is_call(value, "concat") or value.attrs.axis is None:
        return None
    given = value.args[0]
    parts = tuple(given.fields) if isinstance(given, relax.Tuple) else ()
    fits = 1 < len(parts) <= MOST_PARTS and all(isinstance(part, Var) for part in parts)
    return parts if fits else None


def _axis(call: Call) -> int:
    return int(call.attrs.axis) % call.ty.ndim
