"""Who reads each tensor of a Relax function."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax import Expr, Var, op
from tvm.relax.expr_functor import PyExprMutator

from ...ir.graph import COMPOSITES_ATTR
from ...ir.weights import made
from ..decompose.opening import dtype_of, shape_of
from ..functions.unique_names import FreshNames
from .constant_weights import identity
from .factors import is_constant
from .relabeling import Relabeling

# Bindings for the parts that an operator is taken into: named after it, of the same composite; and
# what was made of them, block by block.


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

    def relabeled(self, base: Expr, relabeling: Relabeling, name: str) -> Expr:
        """`base` relabeled: bindings for all but the last of the operators it takes; a constant at
        once.
        """
        steps = relabeling.steps()
        if is_constant(base):
            known = [(step, [int(number) for number in how]) for step, how in steps]
            make = partial(_relabeled, steps=known)
            like = np.broadcast_to(np.zeros((), "bool"), [int(n) for n in shape_of(base)])
            shape = make(like).shape
            return made(f"relabeled {known}", make, base, shape, dtype_of(base)) if steps else base
        value = base
        for number, (step, how) in enumerate(steps):
            value = getattr(op, step)(value, list(how))
            if number + 1 < len(steps):
                value = self.bind(name, "layout", value)
        return value

    def tagged(self, func: relax.Function) -> relax.Function:
        """The function with the tags of all parts."""
        return func.with_attr(COMPOSITES_ATTR, self.tags) if self.tags else func


def _relabeled(array: np.ndarray, steps: list[tuple[str, list[int]]]) -> np.ndarray:
    for step, how in steps:
        array = array.reshape(how) if step == "reshape" else array.transpose(how)
    return array


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


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """The binding of `var` reads a tensor as its argument number `argument`, or in a tuple there;
    `var` is None for what is no operator: a tuple, the result of the function, code of a branch.
    """

    var: Var | None
    argument: int = 0


ELSEWHERE = Reader(None)


class Readers:
    """The bindings of a function, and the readers of its tensors and constants."""

    def __init__(self, func: relax.Function) -> None:
        self._bound: dict[Var, Expr] = {}
        self._readers: dict[Var, list[Reader]] = {}
        self._of_constants: dict[tuple, list[Reader]] = {}
        self._results: set[Var] = set()
        for block in func.body.blocks:
            for binding in block.bindings:
                self._add(binding)
                if isinstance(block, relax.DataflowBlock) and not isinstance(
                    binding.var, relax.DataflowVar
                ):
                    self._results.add(binding.var)
        self._note(func.body.body, ELSEWHERE)

    def lookup(self, expr: Expr) -> Expr | None:
        """What a variable is bound to, or None."""
        return self._bound.get(expr) if isinstance(expr, Var) else None

    def within(self, expr: Expr) -> Expr | None:
        """What a variable is bound to; None too for results of dataflow blocks, since what they are
        made of may not be read outside.
        """
        return None if expr in self._results else self.lookup(expr)

    def calls(self) -> Iterator[tuple[Var, Call]]:
        """The variables that are bound to calls, in order."""
        return ((var, value) for var, value in self._bound.items() if isinstance(value, Call))

    def of(self, var: Var) -> list[Reader]:
        """The readers of a variable."""
        return self._readers.get(var, [])

    def of_constant(self, constant: Expr) -> list[Reader]:
        """The readers of all constants that are this one in memory."""
        return self._of_constants.get(identity(constant), [])

    def _add(self, binding: relax.Binding) -> None:
        value = binding.value
        if not isinstance(binding, relax.VarBinding):
            self._note(value, ELSEWHERE)
            return
        self._bound[binding.var] = value
        if not isinstance(value, Call) or not isinstance(value.op, tvm.ir.Op):
            self._note(value, ELSEWHERE)
            return
        for number, arg in enumerate(value.args):
            plain = isinstance(arg, Var | relax.Tuple) or is_constant(arg)
            self._note(arg, Reader(binding.var, number) if plain else ELSEWHERE)

    def _note(self, expr: Expr, reader: Reader) -> None:
        def visit(part: Expr) -> None:
            if isinstance(part, Var):
                self._readers.setdefault(part, []).append(reader)
            elif is_constant(part):
                self._of_constants.setdefault(identity(part), []).append(reader)

        relax.analysis.post_order_visit(expr, visit)
