"""Rewriting the Relax functions of a module."""

from __future__ import annotations

from typing import Protocol

import tvm
from tvm import relax
from tvm.ir import IRModule


class Rewriter(Protocol):
    """A `PyExprMutator` that sets `changed` where it changes something."""

    changed: bool
    builder_: relax.BlockBuilder

    def visit_expr(self, expr: tvm.ir.Expr) -> tvm.ir.Expr: ...


def rewrite_functions(mod: IRModule, rewriter: Rewriter) -> IRModule:
    """The module with the functions that a rewriter of it changes; the module itself where it
    changes none.
    """
    changed = False
    for var, function in mod.functions.items():
        if isinstance(function, relax.Function):
            rewriter.changed = False
            rewritten = rewriter.visit_expr(function)
            if rewriter.changed:
                rewriter.builder_.update_func(var, rewritten)
                changed = True
    return rewriter.builder_.get() if changed else mod
