"""Statements: sequences, loops, and bindings placed in the outermost loop that they allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.ir import Expr, Var
from tvm.tirx import ForKind

from ..program.expr import constant, convert, dtype_of, number
from ..program.program import Extent
from .stages.rewrite import free_variables, loads

Body = Callable[[Expr], tirx.Stmt]


def seq(*stmts: tirx.Stmt | None) -> tirx.Stmt:
    """The statements one after the other; None and what does nothing are left out."""
    flat: list[tirx.Stmt] = []
    for s in stmts:
        if isinstance(s, tirx.SeqStmt):
            flat.extend(s.seq)
        elif s is not None and not _is_nothing(s):
            flat.append(s)
    if not flat:
        return tirx.Evaluate(constant(0, "int32"))
    return flat[0] if len(flat) == 1 else tirx.SeqStmt(flat)


def _is_nothing(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.Evaluate) and number(stmt.value) is not None


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """A loop still without a body; `value` is what the body sees."""

    var: Var
    extent: Expr
    kind: ForKind = ForKind.SERIAL

    @property
    def value(self) -> Expr:
        """The loop variable, or 0 where there is only one iteration."""
        return constant(0, dtype_of(self.var)) if number(self.extent) == 1 else self.var

    def around(self, body: tirx.Stmt) -> tirx.Stmt:
        """The loop with its body."""
        extent = number(self.extent)
        if extent == 0:
            return seq()
        if extent == 1:
            return body
        zero = constant(0, dtype_of(self.var))
        return tirx.For(self.var, zero, self.extent, self.kind, body)


class Loops:
    """Makes loops, and keeps the ranges of their variables."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.analyzer = tvm.sym.Analyzer()

    def imm(self, value: Extent) -> Expr:
        """A size as an index."""
        if isinstance(value, int):
            return constant(value, self.dtype)
        return convert(value, self.dtype)

    def new(self, name: str, extent: Expr | int, kind: ForKind = ForKind.SERIAL) -> Loop:
        """A loop from 0 to `extent`."""
        extent = self.imm(extent) if isinstance(extent, int) else self.simplify(extent)
        var = Var(name, tvm.ir.PrimType(self.dtype))
        self.analyzer.bind(var, tvm.ir.Range.from_min_extent(self.imm(0), extent))
        return Loop(var, extent, kind)

    def loop(
        self, name: str, extent: Expr | int, body: Body, kind: ForKind = ForKind.SERIAL
    ) -> tirx.Stmt:
        """A whole loop; `body` is given the value of its variable."""
        made = self.new(name, extent, kind)
        return made.around(body(made.value))

    def simplify(self, expr: Expr) -> Expr:
        """`expr` simplified with the ranges of all loop variables."""
        return self.analyzer.simplify(expr)


def pieces(length: int, lanes: int) -> list[tuple[int, int]]:
    """Starts and widths of vectors, each a power of two, that cover `length` elements."""
    found, first, width = [], 0, lanes
    while first < length:
        while width > length - first:
            width //= 2
        found.append((first, width))
        first += width
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Keep:
    """``buffer[index] = value``: a value too large to bind to a variable (see `Resolve.bind`)."""

    buffer: Var
    allocation: tirx.Stmt
    value: Expr
    index: Expr


def nest(loops: Sequence[Loop], ops: Iterable[tirx.Stmt | Keep]) -> tirx.Stmt:
    """`ops` in `loops`, each binding in the outermost loop that its variables allow.

    Stores stay innermost, in order.
    """
    depth_of = {loop.var: i + 1 for i, loop in enumerate(loops)}
    levels: list[list[tirx.Stmt]] = [[] for _ in range(len(loops) + 1)]
    allocations: list[tirx.Stmt] = []
    for op in ops:
        if not isinstance(op, tirx.Bind | Keep):
            levels[-1].append(op)
            continue
        used = [*free_variables(op.value), *(load.source for load in loads(op.value))]
        depth = max((depth_of.get(v, 0) for v in used), default=0)
        if isinstance(op, tirx.Bind):
            depth_of[op.var] = depth
            levels[depth].append(op)
        else:
            depth_of[op.buffer] = depth
            allocations.append(op.allocation)
            levels[depth].append(tirx.BufferStore(op.buffer, op.value, [op.index]))
    body = seq(*levels[-1])
    for loop, outside in zip(reversed(loops), reversed(levels[:-1]), strict=True):
        body = seq(*outside, loop.around(body))
    return seq(*allocations, body)
