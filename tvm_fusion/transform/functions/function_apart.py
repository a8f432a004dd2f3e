"""One Relax function of a module as a module of its own, and the way back.

Before, in a module of many functions::

    def decode(x):
        a = cls.embed(x)
        return R.call_tir(cls.exp, a)

Apart::

    embed = ExternFunc("embed")        # a declaration: calls of it are opaque
    def main(x):
        a = cls.embed(x)
        return R.call_tir(cls.exp, a)

The other stages know one function, which they call `main`. What it calls comes with it: PrimFuncs
as they are, Relax functions and those of other code generators as declarations, so that nothing
changes or opens them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GlobalVar
from tvm.relax.expr_functor import PyExprMutator, mutator

from .functions import expressions_of, is_opaque, with_functions
from .unique_names import FreshNames

ENTRY = "main"


def own_functions(mod: tvm.IRModule) -> list[GlobalVar]:
    """The Relax functions of a module that are nobody else's, by name."""
    found = [
        gvar
        for gvar, func in mod.functions_items()
        if isinstance(func, relax.Function)
        and isinstance(func.body, relax.SeqExpr)
        and not is_opaque(func)
    ]
    return sorted(found, key=lambda gvar: gvar.name_hint)


@dataclass(frozen=True, slots=True)
class FunctionApart:
    """A function of a module, alone.

    Attributes
    ----------
    gvar : GlobalVar
        The function, in its module.
    mod : IRModule
        Its `main` is the function.
    callees : mapping of str to GlobalVar
        The functions of the module that it refers to, by their names in `mod`.
    """

    gvar: GlobalVar
    mod: tvm.IRModule
    callees: Mapping[str, GlobalVar]

    @classmethod
    def of(cls, mod: tvm.IRModule, gvar: GlobalVar) -> FunctionApart:
        """Take a function out of a module, which is left unchanged."""
        func, functions, callees, renamed = mod[gvar], {}, {}, {}
        fresh = FreshNames(g.name_hint for g in mod.get_global_vars())
        for callee in called(func):
            here = callee
            if callee.name_hint == ENTRY:
                here = renamed[callee] = like(callee, fresh(f"{ENTRY}_called"))
            found = mod[callee]
            functions[here] = found if isinstance(found, tirx.PrimFunc) else _declared(callee)
            callees[here.name_hint] = callee
        entry = like(gvar, ENTRY)
        functions[entry] = redirected(func, renamed).with_attr("global_symbol", ENTRY)
        apart = tvm.IRModule(functions, global_infos=mod.global_infos)
        return cls(gvar, apart, callees)


def put_back(
    mod: tvm.IRModule,
    apart: FunctionApart,
    changed: tvm.IRModule,
    target: tvm.target.Target | None = None,
) -> tvm.IRModule:
    """The module with a function as it is in `changed`, which was made of `apart.mod`.

    PrimFuncs that are new come with it, under names of their own; those that are equal to one of
    the module are that one. With a `target`, they are marked to be built for it, as LegalizeOps
    marks those of virtual devices.
    """
    builder = relax.BlockBuilder(mod)
    moved: dict[GlobalVar, GlobalVar] = {}
    for gvar in called(changed[ENTRY]):
        func, known = changed[gvar], apart.callees.get(gvar.name_hint)
        if known is not None and (isinstance(func, relax.ExternFunc) or func.same_as(mod[known])):
            moved[gvar] = known
        else:
            func = func.without_attr("global_symbol")
            if target is not None and "target" not in func.attrs:
                func = func.with_attr("target", target)
            moved[gvar] = builder.add_func(func, gvar.name_hint)
    func, before = redirected(changed[ENTRY], moved), dict(mod[apart.gvar].attrs or {})
    for name in set(dict(func.attrs or {})) - set(before):
        func = func.without_attr(name)
    if "global_symbol" in before:
        func = func.with_attr("global_symbol", before["global_symbol"])
    builder.update_func(apart.gvar, func)
    return builder.get()


def renamed(mod: tvm.IRModule, gvar: GlobalVar, name: str) -> tvm.IRModule:
    """The module with another name, and global symbol, for one of its Relax functions."""
    new = like(gvar, name)
    functions = {}
    for old, func in mod.functions_items():
        if isinstance(func, relax.Function):
            func = redirected(func, {gvar: new})
        functions[new if old.same_as(gvar) else old] = func
    functions[new] = functions[new].with_attr("global_symbol", name)
    return with_functions(mod, functions)


def without_unused(mod: tvm.IRModule, before: tvm.IRModule) -> tvm.IRModule:
    """The module without the private PrimFuncs that functions of `before` called and nothing calls
    any more.
    """
    was, now = _referred(before), _referred(mod)
    functions = {
        gvar: func
        for gvar, func in mod.functions_items()
        if not isinstance(func, tirx.PrimFunc)
        or gvar.name_hint in now
        or gvar.name_hint not in was
        or "global_symbol" in func.attrs
    }
    if len(functions) == len(mod.functions_items()):
        return mod
    return with_functions(mod, functions)


def _referred(mod: tvm.IRModule) -> set[str]:
    """The functions that others of a module refer to; PrimFuncs may call each other, too."""
    found: set[str] = set()
    for _, func in mod.functions_items():
        if isinstance(func, relax.Function):
            found.update(gvar.name_hint for gvar in called(func))
        elif isinstance(func, tirx.PrimFunc) and "tirx.is_scheduled" not in func.attrs:
            visits = [(GlobalVar, lambda gvar: found.add(gvar.name_hint))]
            tvm_ffi.structural_walk(func.body, visits)
    return found


def has_dataflow(func: relax.Function) -> bool:
    """Whether a function has dataflow blocks, or nothing that could stand in one."""
    blocks = [block for seq in expressions_of(func, relax.SeqExpr) for block in seq.blocks]
    return not blocks or any(isinstance(block, relax.DataflowBlock) for block in blocks)


def called(func: relax.Function) -> list[GlobalVar]:
    """The functions of its module that a Relax function refers to, each once, in order."""
    return list(dict.fromkeys(expressions_of(func, GlobalVar)))


def reached(mod: tvm.IRModule, func: relax.Function) -> list[GlobalVar]:
    """The functions of a module that a Relax function refers to, and those that these refer to;
    each once, and the function itself only where one of them calls it.
    """
    found: dict[GlobalVar, None] = {}
    pending = called(func)
    while pending:
        gvar = pending.pop(0)
        if gvar in found:
            continue
        found[gvar] = None
        if isinstance(mod[gvar], relax.Function):
            pending += called(mod[gvar])
    return list(found)


def redirected(func: relax.Function, names: Mapping[GlobalVar, GlobalVar]) -> relax.Function:
    """The function with references to other functions of its module."""
    if not names:
        return func
    redirecting = _Redirecting()
    redirecting.names = names
    return redirecting.visit_expr(func)


@mutator
class _Redirecting(PyExprMutator):
    names: Mapping[GlobalVar, GlobalVar]

    def visit_global_var_(self, gvar: GlobalVar) -> GlobalVar:
        return self.names.get(gvar, gvar)


def _declared(gvar: GlobalVar) -> relax.ExternFunc:
    """A function without a body. Its type stands in the GlobalVar alone: TVM cannot print a
    declaration whose type has symbols.
    """
    return relax.ExternFunc(gvar.name_hint)


def like(gvar: GlobalVar, name: str) -> GlobalVar:
    """A variable of another name for the same function."""
    new = GlobalVar(name)
    relax.expr._update_type(new, gvar.ty)
    return new
