"""UniqueNames: within a function no two Vars share a name, and each name is an identifier.

    lv = exp(in/x); lv = tanh(lv)   ->   lv = exp(in_x); lv_1 = tanh(lv)

Plans and reports speak of bindings by name, and kernels call their parameters after them (ONNX
allows any character in a name, C does not).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import tvm
from tvm import relax


class FreshNames:
    """Hands out names that are not among the `taken` ones, each once: name, name_1, name_2 ..."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.taken = set(taken)

    @classmethod
    def beside(cls, func: relax.Function) -> FreshNames:
        """Names that no variable of a function has."""
        return cls(var.name for var in relax.analysis.all_vars(func))

    def __call__(self, name: str) -> str:
        candidate, number = name, 0
        while candidate in self.taken:
            number += 1
            candidate = f"{name}_{number}"
        self.taken.add(candidate)
        return candidate


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.UniqueNames")
class UniqueNames:
    """See the module docstring; a function whose names are fine already stays the same object."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        out = mod.clone()
        for gvar, func in mod.functions_items():
            if isinstance(func, relax.Function) and not _is_fine(func):
                out.update_func(gvar, _Renamer(mod).visit_expr(func))
        return out


def _is_fine(func: relax.Function) -> bool:
    names = [p.name for p in func.params]
    names += [b.var.name for block in getattr(func.body, "blocks", ()) for b in block.bindings]
    return len(names) == len(set(names)) and all(n == _identifier(n) for n in names)


def _identifier(name: str) -> str:
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    return plain if plain[:1].isalpha() or plain[:1] == "_" else f"_{plain}"


@relax.expr_functor.mutator
class _Renamer(relax.PyExprMutator):
    def __init__(self, mod: tvm.IRModule):
        super().__init__(mod)
        self.fresh = FreshNames()

    def visit_var_def_(self, var):
        return self._renamed(var)

    def visit_dataflow_var_def_(self, var):
        return self._renamed(var)

    def _renamed(self, var):
        name = self.fresh(_identifier(var.name))
        if name == var.name:
            return var
        new = type(var)(name, var.ty)
        self.set_var_remap(var, new)
        return new
