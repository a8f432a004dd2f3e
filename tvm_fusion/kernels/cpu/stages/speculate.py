"""Turns conditions into selections where both sides may be evaluated.

    y[i, j] = if_then_else(i <= j, x[i, j], 0)  ->  v = x[i, j]; y[i, j] = Select(i <= j, v, 0)

A branch stops vectorisation; a selection does not. Loads that could leave their buffer stay under
their condition.
"""

from __future__ import annotations

from dataclasses import replace

import tvm
from tvm import tirx
from tvm.ir import Expr, PrimType, TensorLoad, Var
from tvm.ir.prim.expr import Let, LogicalExpr

from ...program.expr import HALF_DTYPES, constant, dtype_of
from .rewrite import Bindings, Rewriter, branches, can_speculate, is_conditional, loads, rebuild
from .stages import Graph, Stage, analyzer_of


def speculate(graph: Graph) -> Graph:
    """The graph with safe loads taken out of conditions."""
    return Graph(graph.params, tuple(_stage(s) for s in graph.stages))


def _stage(stage: Stage) -> Stage:
    analyzer = analyzer_of(stage.domain)
    binds: Bindings = []
    speculated = _Speculate(analyzer, binds)
    for var, value in stage.binds:
        value = speculated(value)
        binds.append((var, value))
    values = tuple(speculated(v) for v in stage.values)
    return replace(stage, binds=tuple(binds), values=values)


class _Speculate(Rewriter):
    def __init__(self, analyzer: tvm.sym.Analyzer, binds: Bindings) -> None:
        super().__init__()
        self.analyzer = analyzer
        self.binds = binds

    def visit(self, expr: Expr) -> Expr:
        if isinstance(expr, Let | LogicalExpr):
            return expr
        if not is_conditional(expr):
            return rebuild(expr, self)
        condition, yes, no = branches(expr)
        condition = self(condition)
        if not all(self._is_inside(load) for load in loads(yes, no)):
            return tirx.if_then_else(condition, yes, no)
        hoisted = _Hoist(self.binds)
        yes, no = hoisted(yes), hoisted(no)
        if can_speculate(yes) and can_speculate(no):
            return tirx.Select(condition, yes, no)
        return tirx.if_then_else(condition, yes, no)

    def _is_inside(self, load: TensorLoad) -> bool:
        """Whether the load stays in its buffer wherever it is evaluated."""
        for index, extent in zip(load.indices, load.source.ty.shape, strict=True):
            if loads(index):
                return False
            low = tirx.GE(index, constant(0, dtype_of(index)))
            high = tirx.LT(index, extent)
            if not (self.analyzer.can_prove(low) and self.analyzer.can_prove(high)):
                return False
        return True


class _Hoist(Rewriter):
    """Binds loads before the expression, together with the cast that widens a 16-bit one.

    A cast to 16 bits (a rounding) stays in the expression: no variable may be of such a type.
    """

    def __init__(self, binds: Bindings) -> None:
        super().__init__()
        self.binds = binds

    def visit(self, expr: Expr) -> Expr:
        widens = isinstance(expr, tirx.Cast) and dtype_of(expr) not in HALF_DTYPES
        load = expr.value if widens else expr
        if isinstance(load, TensorLoad):
            var = Var(load.source.name, PrimType(dtype_of(expr)))
            self.binds.append((var, expr))
            return var
        return rebuild(expr, self)
