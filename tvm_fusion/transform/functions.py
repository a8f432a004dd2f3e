"""Rewriting the Relax functions of a module one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import tvm
from tvm import relax
from tvm.ir import IRModule

Rewrite = Callable[[relax.Function], relax.Function | None]
_OPAQUE_ATTRS = ("Primitive", "Composite", "Codegen")


class Marking(Protocol):
    """A `PyExprMutator` that sets `changed` where it changes something."""

    changed: bool

    def visit_expr(self, expr: tvm.ir.Expr) -> tvm.ir.Expr: ...


def rewrite_functions(
    mod: IRModule, builder: relax.BlockBuilder, rewrite: Rewrite, *, opaque: bool = False
) -> IRModule:
    """The module with its functions rewritten; the module itself where none is.

    Parameters
    ----------
    mod : IRModule
    builder : relax.BlockBuilder
        That of the mutator, made of `mod`.
    rewrite : callable
        A function's new form, or None where it stays.
    opaque : bool
        Opaque functions, too.
    """
    changed = False
    for gvar, func in mod.functions_items():
        if not isinstance(func, relax.Function) or (is_opaque(func) and not opaque):
            continue
        new = rewrite(func)
        if new is not None:
            builder.update_func(gvar, new)
            changed = True
    return builder.finalize() if changed else mod


def where_changed(mutator: Marking) -> Rewrite:
    """A mutator as a `rewrite` of `rewrite_functions`."""

    def rewrite(func: relax.Function) -> relax.Function | None:
        mutator.changed = False
        new = mutator.visit_expr(func)
        return new if mutator.changed else None

    return rewrite


def is_opaque(func: relax.Function) -> bool:
    """Whether a function belongs to somebody else: a fused group, or another code generator's."""
    return func.attrs is not None and any(key in func.attrs for key in _OPAQUE_ATTRS)
