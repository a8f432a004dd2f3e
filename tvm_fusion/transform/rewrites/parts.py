"""Bindings for the parts that an operator is taken into: named after it, of the same composite; and
what was made of them, block by block.
"""

from __future__ import annotations

from tvm import relax
from tvm.relax import Expr, Var
from tvm.relax.expr_functor import PyExprMutator

from ...ir.graph import COMPOSITES_ATTR
from ..functions.unique_names import FreshNames


class Parts:
    """The parts made within one function."""

    def __init__(self, builder: relax.BlockBuilder, func: relax.Function) -> None:
        self._builder = builder
        self._fresh = FreshNames.beside(func)
        attrs = func.attrs
        self.tags = dict(attrs[COMPOSITES_ATTR]) if attrs and COMPOSITES_ATTR in attrs else {}

    def bind(self, name: str, part: str, value: Expr) -> Var:
        """Binds `value` to a new variable called after the operator `name` it is part of."""
        value = self._builder.normalize(value)
        kind = relax.DataflowVar if self._builder.current_block_is_dataflow() else Var
        var = kind(self._fresh(f"{name}_{part}"), value.ty)
        if name in self.tags:
            self.tags[var.name] = self.tags[name]
        self.finish(var, value)
        return var

    def finish(self, var: Var, value: Expr) -> None:
        """Binds the whole, in terms of its parts, to its own variable."""
        value = self._builder.normalize(value)
        self._builder.emit_normalized(relax.VarBinding(var, value))

    def tagged(self, func: relax.Function) -> relax.Function:
        """The function with the tags of all parts."""
        return func.with_attr(COMPOSITES_ATTR, self.tags) if self.tags else func


class BlockwiseMutator(PyExprMutator):
    """Keeps in `known` what it made in the present block: a block within a branch cannot be read
    outside. Subclasses are decorated with `mutator`.
    """

    known: dict[tuple, Expr]

    def visit_binding_block_(self, block: relax.BindingBlock) -> relax.BindingBlock:
        """Visit a block with a memory of its own."""
        around, self.known = self.known, {}
        visited = super().visit_binding_block_(block)
        self.known = around
        return visited

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        """Visit a block with a memory of its own."""
        around, self.known = self.known, {}
        visited = super().visit_dataflow_block_(block)
        self.known = around
        return visited
