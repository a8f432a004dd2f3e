"""Rewriting of TIR expressions that keeps shared parts shared.

TVM's structural maps visit every occurrence of a node; these visit every node object once, so a
graph of expressions never grows into its tree.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache

import tvm
from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad, Var
from tvm.ir.prim.expr import BinaryOpExpr, BitwiseNot, CmpExpr, Let, LogicalExpr

from ....errors import Unsupported
from ...program.expr import DIVISIONS, convert, dtype_of, number

LEAVES = (Var, tirx.IntImm, tirx.FloatImm, tvm.ir.StringImm)
BINARY = (BinaryOpExpr, CmpExpr, tirx.And, tirx.Or)
UNARY = (tirx.Not, BitwiseNot)
Bindings = list[tuple[Var, Expr]]


def call_name(expr: Expr) -> str:
    """Name of the intrinsic that `expr` calls, as "exp"; empty if it calls none."""
    if not isinstance(expr, Call):
        return ""
    if not isinstance(expr.op, tvm.ir.Op):
        raise Unsupported(f"a call of {type(expr.op).__name__} cannot be moved")
    return str(expr.op.name).rpartition(".")[2]


def is_conditional(expr: Expr) -> bool:
    """Whether `expr` needs only one of two operands: if_then_else and Select."""
    return isinstance(expr, tirx.Select) or call_name(expr) == "if_then_else"


def branches(expr: Expr) -> tuple[Expr, Expr, Expr]:
    """Condition, value where it holds, and value where it does not."""
    if isinstance(expr, tirx.Select):
        return expr.condition, expr.true_value, expr.false_value
    return expr.args[0], expr.args[1], expr.args[2]


def children(expr: Expr) -> list[Expr]:
    """Operands of `expr`; for a load its indices."""
    return _operands_of(type(expr))(expr)


@cache
def _operands_of(kind: type) -> Callable[[Expr], list[Expr]]:
    """What gives the operands of an expression of a class; `isinstance` of the classes of TVM, one
    after the other for each expression, took a fifth of the time of writing a kernel.
    """
    if issubclass(kind, BINARY):
        return lambda expr: [expr.a, expr.b]
    if issubclass(kind, TensorLoad):
        return lambda expr: list(expr.indices)
    if issubclass(kind, tirx.Select):
        return lambda expr: list(branches(expr))
    if issubclass(kind, UNARY):
        return lambda expr: [expr.a]
    if issubclass(kind, tirx.Cast):
        return lambda expr: [expr.value]
    if issubclass(kind, Call):
        return lambda expr: list(expr.args)
    if issubclass(kind, Let):
        return lambda expr: [expr.value, expr.body]
    if issubclass(kind, LEAVES):
        return lambda expr: []
    raise Unsupported(f"an expression of type {kind.__name__} is not known")


def with_children(expr: Expr, new: Sequence[Expr]) -> Expr:
    """`expr` over other operands of the same types."""
    if isinstance(expr, (*BINARY, *UNARY, tirx.Select)):
        return type(expr)(*new)
    if isinstance(expr, TensorLoad):
        return tirx.BufferLoad(expr.source, list(new))
    if isinstance(expr, tirx.Cast):
        return convert(new[0], dtype_of(expr))
    if isinstance(expr, Let):
        return Let(expr.var, *new)
    return tirx.call_intrin(dtype_of(expr), expr.op, *new)


def rebuild(expr: Expr, visit: Callable[[Expr], Expr]) -> Expr:
    """`expr` with `visit` applied to its operands; the same object where nothing changed."""
    old = children(expr)
    new = [visit(x) for x in old]
    if all(a.same_as(b) for a, b in zip(old, new, strict=True)):
        return expr
    return with_children(expr, new)


def key_of(expr: Expr) -> Hashable:
    """What an expression is known by in a dict or a set: TVM's integers are equal there by their
    value, whatever their types.
    """
    return (dtype_of(expr), expr) if type(expr) is tirx.IntImm else expr


class Rewriter:
    """Rewrites expressions; a subclass overrides `visit`."""

    def __init__(self) -> None:
        self._done: dict[Hashable, Expr] = {}

    def __call__(self, expr: Expr) -> Expr:
        key = key_of(expr)
        if key not in self._done:
            self._done[key] = self.visit(expr)
        return self._done[key]

    def visit(self, expr: Expr) -> Expr:
        """The new form of one node."""
        return rebuild(expr, self)


class Substitute(Rewriter):
    """Replaces variables: `env` maps a variable to an expression."""

    def __init__(self, env: Mapping[Var, Expr]) -> None:
        super().__init__()
        self.env = env

    def visit(self, expr: Expr) -> Expr:
        if isinstance(expr, Var):
            return self.env.get(expr, expr)
        return rebuild(expr, self)


def nodes(*roots: Expr) -> Iterator[Expr]:
    """Every node below `roots`, each object once, users before their operands."""
    seen: set[Hashable] = set()
    stack = list(reversed(roots))
    while stack:
        expr = stack.pop()
        key = key_of(expr)
        if key not in seen:
            seen.add(key)
            yield expr
            stack.extend(reversed(children(expr)))


def free_variables(*roots: Expr) -> dict[Var, None]:
    """The scalar variables that `roots` read, in the order met."""
    found = list(nodes(*roots))
    inner = {e.var for e in found if isinstance(e, Let)}
    return {e: None for e in found if isinstance(e, Var) and e not in inner}


def loads(*roots: Expr) -> list[TensorLoad]:
    """The loads below `roots`, each object once."""
    return [e for e in nodes(*roots) if isinstance(e, TensorLoad)]


def loads_with_guard(root: Expr) -> Iterator[tuple[TensorLoad, bool]]:
    """The loads below `root`, and whether a condition decides if they are evaluated."""
    seen: set[tuple[Hashable, bool]] = set()
    stack = [(root, False)]
    while stack:
        expr, guarded = stack.pop()
        key = (key_of(expr), guarded)
        if key in seen:
            continue
        seen.add(key)
        if isinstance(expr, TensorLoad):
            yield expr, guarded
        operands = children(expr)
        lazy = is_conditional(expr) or isinstance(expr, (LogicalExpr, Let))
        free = 1 if lazy else len(operands)
        stack.extend((x, guarded or i >= free) for i, x in enumerate(operands))


def can_speculate(expr: Expr) -> bool:
    """Whether `expr` can be evaluated in vain: it loads nothing and cannot trap."""
    for e in nodes(expr):
        if isinstance(e, TensorLoad):
            return False
        if isinstance(e, DIVISIONS) and not dtype_of(e).startswith(("float", "bfloat")):
            divisor = number(e.b)
            if divisor is None or divisor == 0:
                return False
    return True


def let_chain(binds: Bindings, body: Expr) -> Expr:
    """`body` after the bindings, as one expression."""
    for var, value in reversed(binds):
        body = Let(var, value, body)
    return body


def is_index(expr: Expr) -> bool:
    """Whether `expr` is integer arithmetic that reads no memory."""
    allowed = (*BINARY, *UNARY, Var, tirx.IntImm)
    return all(
        isinstance(e, allowed) and dtype_of(e).startswith(("int", "bool")) for e in nodes(expr)
    )


class SimplifyIndices(Rewriter):
    """Simplifies indices and conditions; leaves float arithmetic as it is."""

    def __init__(self, analyzer: tvm.sym.Analyzer) -> None:
        super().__init__()
        self.analyzer = analyzer

    def visit(self, expr: Expr) -> Expr:
        if isinstance(expr, (*BINARY, *UNARY)) and is_index(expr):
            return self.analyzer.simplify(expr)
        if is_conditional(expr):
            condition, yes, no = branches(expr)
            known = number(self(condition))
            if known is not None:
                return self(yes if known else no)
        return rebuild(expr, self)
