"""UniqueNames: no two bindings of a function share a name, so that plans and reports can speak of
bindings by name.

lv = exp(x); lv = tanh(lv)   ->   lv = exp(x); lv_1 = tanh(lv)
"""

from __future__ import annotations

import tvm
from tvm import relax


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.UniqueNames")
class UniqueNames:
    """See the module docstring; a function whose names are unique already stays the same object."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        out = mod.clone()
        for gvar, func in mod.functions_items():
            if isinstance(func, relax.Function) and _has_twins(func):
                out.update_func(gvar, _Renamer(mod).visit_expr(func))
        return out


def _has_twins(func: relax.Function) -> bool:
    names = [p.name for p in func.params]
    names += [b.var.name for block in getattr(func.body, "blocks", ()) for b in block.bindings]
    return len(names) != len(set(names))


@relax.expr_functor.mutator
class _Renamer(relax.PyExprMutator):
    def __init__(self, mod: tvm.IRModule):
        super().__init__(mod)
        self.taken: set[str] = set()

    def visit_var_def_(self, var):
        return self._renamed(var)

    def visit_dataflow_var_def_(self, var):
        return self._renamed(var)

    def _renamed(self, var):
        name, number = var.name, 0
        while name in self.taken:
            number += 1
            name = f"{var.name}_{number}"
        self.taken.add(name)
        if name == var.name:
            return var
        new = type(var)(name, var.ty)
        self.set_var_remap(var, new)
        return new
