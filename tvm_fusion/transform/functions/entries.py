"""The entry functions of a module, each in a module of its own; and joined again.

    functions decode, prefill (public), norm (private)
        -> decode: a module whose `main` is decode, with norm in its place
        -> prefill: the same of prefill                        each is planned and written alone
        -> one module of decode, prefill and the kernels of both, equal ones once

A function that another one calls, an entry or not, comes along with it as a private function, and
stands in the place of the call; only functions that call themselves are left as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GlobalVar
from tvm.relax.expr_functor import PyExprMutator, mutator

from ...ir.weights import numbers, weight_of
from ..rewrites.constant_weights import identity
from ..rewrites.factors import is_constant
from .function_apart import ENTRY, like, own_functions, reached, redirected
from .functions import is_opaque, with_functions
from .unique_names import FreshNames

Names = dict[str, str]


def entry_functions(mod: tvm.IRModule) -> list[str]:
    """The public Relax functions of a module that belong to nobody else, and `main`, by name."""
    return [gvar.name_hint for gvar in own_functions(mod) if is_entry(gvar, mod[gvar])]


def is_entry(gvar: GlobalVar, func: tvm.ir.BaseFunc) -> bool:
    """Whether a function is there to be called from outside, and belongs to nobody else."""
    if not isinstance(func, relax.Function) or is_opaque(func):
        return False
    return gvar.name_hint == ENTRY or "global_symbol" in (func.attrs or {})


def entry_alone(mod: tvm.IRModule, name: str) -> tvm.IRModule:
    """A module whose `main` is an entry function of a module, with what it reaches.

    Parameters
    ----------
    mod : IRModule
        Normalised and well-formed; it is left unchanged.
    name : str
        Of a Relax function.
    """
    gvar = mod.get_global_var(name)
    func, others = mod[gvar], reached(mod, mod[gvar])
    fresh = FreshNames(g.name_hint for g in mod.get_global_vars())
    moved = {g: like(g, fresh(f"{ENTRY}_called")) for g in others if g.name_hint == ENTRY}
    if gvar in others:  # it calls itself: once more, below its entry
        moved[gvar] = like(gvar, fresh(f"{name}_called"))
    functions = {}
    for other in others:
        found = mod[other]
        if isinstance(found, relax.Function):
            found = redirected(found.without_attr("global_symbol"), moved)
        functions[moved.get(other, other)] = found
    functions[like(gvar, ENTRY)] = redirected(func, moved).with_attr("global_symbol", ENTRY)
    return inlined(with_functions(mod, functions))


def inlined(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with private functions in the place of their calls, but for those of others and
    those that call themselves; the module itself where there are none.
    """
    own = own_functions(mod)
    if all(is_entry(gvar, mod[gvar]) for gvar in own):
        return mod
    opaque = [g for g, f in mod.functions_items() if isinstance(f, relax.Function) and is_opaque(f)]
    hidden = [g for g in opaque if "global_symbol" not in mod[g].attrs]
    functions = dict(mod.functions_items())
    functions |= {g: mod[g].with_attr("global_symbol", g.name_hint) for g in hidden}
    found = relax.transform.InlinePrivateFunctions()(with_functions(mod, functions))
    functions = dict(found.functions_items())
    functions |= {g: found[g].without_attr("global_symbol") for g in hidden}
    return with_functions(found, functions)


def joined(
    parts: Mapping[str, tvm.IRModule],
    given: Mapping[str, Names] = MappingProxyType({}),
    fresh: FreshNames | None = None,
) -> tuple[tvm.IRModule, dict[str, Names]]:
    """One module of modules of one `main` each.

    PrimFuncs that are equal become one, and so do constants.

    Parameters
    ----------
    parts : mapping of str to IRModule
        By the name that `main` gets.
    given : mapping of str to mapping of str to str
        By part, the new names of some PrimFuncs: those of one name are equal, or declarations.
    fresh : FreshNames, optional
        Gives the other names; it knows those of the parts, and those that are given.

    Returns
    -------
    tuple
        The module, and by part the new names of its other functions.
    """
    fresh, shared = fresh or FreshNames(parts), _Shared()
    kernels = _Kernels(fresh)
    functions: dict[GlobalVar, tvm.ir.BaseFunc] = {}
    names: dict[str, Names] = {}
    for entry, part in parts.items():
        moved: dict[GlobalVar, GlobalVar] = {}
        for gvar in sorted(part.get_global_vars(), key=lambda g: g.name_hint):
            name, func = gvar.name_hint, part[gvar]
            if name == ENTRY:
                moved[gvar] = like(gvar, entry)
            elif isinstance(func, tirx.PrimFunc):
                moved[gvar] = kernels.place(gvar, func, given.get(entry, {}).get(name))
            else:
                moved[gvar] = like(gvar, fresh(name))
        for gvar, here in moved.items():
            func = part[gvar]
            if isinstance(func, relax.Function):
                func = redirected(shared.visit_expr(func), moved)
                func = func.with_attr("global_symbol", entry) if gvar.name_hint == ENTRY else func
                functions[here] = func
        names[entry] = {g.name_hint: here.name_hint for g, here in moved.items()}
    first = next(iter(parts.values()))
    attrs = {key: value for part in parts.values() for key, value in dict(part.attrs or {}).items()}
    mod = tvm.IRModule(functions | kernels.functions, global_infos=first.global_infos)
    return (mod.with_attrs(attrs) if attrs else mod), names


class _Kernels:
    """The PrimFuncs of a joined module.

    Attributes
    ----------
    functions : dict of GlobalVar to PrimFunc
    """

    def __init__(self, fresh: FreshNames) -> None:
        self.functions: dict[GlobalVar, tirx.PrimFunc] = {}
        self._fresh = fresh
        self._named: dict[str, GlobalVar] = {}
        self._alike: dict[int, list[GlobalVar]] = {}

    def place(self, gvar: GlobalVar, func: tirx.PrimFunc, name: str | None) -> GlobalVar:
        """The variable of a function in the joined module: that of an equal one, or a new one."""
        if name is not None:
            if name not in self._named:
                self._named[name] = self._added(gvar, func, name)
            return self._named[name]
        alike = self._alike.setdefault(tvm_ffi.structural_hash(func), [])
        for other in alike:
            if tvm_ffi.structural_equal(self.functions[other], func):
                return other
        alike.append(self._added(gvar, func, self._fresh(gvar.name_hint)))
        return alike[-1]

    def _added(self, gvar: GlobalVar, func: tirx.PrimFunc, name: str) -> GlobalVar:
        new = like(gvar, name)
        if "global_symbol" in func.attrs:
            func = func.with_attr("global_symbol", name)
        self.functions[new] = func
        return new


@mutator
class _Shared(PyExprMutator):
    """Puts one constant in the place of all that are equal."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[tuple, tvm.ir.Expr] = {}
        self._alike: dict[tuple, list[tvm.ir.Expr]] = {}

    def visit_generic_const_(self, constant: tvm.ir.Expr) -> tvm.ir.Expr:
        if not is_constant(constant) or weight_of(constant) is not None:
            return constant
        key = (str(constant.ty), *identity(constant))
        if key not in self._known:
            self._known[key] = self._equal(constant, (key[0], *key[2:]))
        return self._known[key]

    def _equal(self, constant: tvm.ir.Expr, kind: tuple) -> tvm.ir.Expr:
        """The first constant of the same numbers, bit by bit."""
        alike = self._alike.setdefault(kind, [])
        own = _bytes(constant)
        found = next((other for other in alike if np.array_equal(_bytes(other), own)), None)
        if found is None:
            found = constant
            alike.append(constant)
        return found


def _bytes(constant: tvm.ir.Expr) -> np.ndarray:
    return np.ascontiguousarray(numbers(constant)).reshape(-1).view(np.uint8)
