"""Indices and divisors that are data, checked on a CPU before they are used.

    for i, j in ...:                      for i in ...:
        y[i, j] = x[ids[i], j]                assert 0 <= ids[i] < n, "... out of range"
                                              for j in ...:
                                                  y[i, j] = x[ids[i], j]

    y[i] = a[i] // b[i]                   assert b[i] != 0, "... divided by zero"
                                          y[i] = a[i] // select(b[i] == 0 or b[i] == -1, 1, b[i])

A check stands before the outermost loop that it is the same for, so that a row is checked once, and
a loop of vectors stays one. It comes back as `errors.OutOfRange` or `errors.DividedByZero`. What an
analyzer proves is not checked: places that a program clips, or numbers of a type that cannot be
out of range. The least integer over -1, which ends a process, is what negation makes of it.
On a GPU nothing is raised: kernels that are written read clipped places (`transform.lower.places`),
and what others would write out of range is dropped.

Does not handle: a kernel that hands places to functions of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Expr, StringImm, TensorLoad, Var
from tvm.ir.prim.expr import Let

from ...errors import Unsupported
from ...kernels.cpu.loops import seq
from ...kernels.cpu.stages.rewrite import children
from ...kernels.program.expr import (
    DIVISIONS,
    bounds,
    conjunction,
    dtype_of,
    extent_of,
    is_if_then_else,
    is_integer,
    number,
    substitute,
    uses_any,
    variables,
)
from ...transform.apply.kernel_bodies import TIRX_ATTR
from ...transform.functions.functions import target_kind, with_functions

_QUOTIENTS = (tirx.Div, tirx.FloorDiv)


def with_guards(mod: tvm.IRModule, kind: str | None = None) -> tvm.IRModule:
    """A module with guards in the PrimFuncs that are bound to devices, before they are lowered;
    with a `kind` of device all count as bound to that. Those that need none stay as they are.
    """
    functions = {}
    for gvar, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            func = _guarded(gvar.name_hint, func, kind or target_kind(func))
        functions[gvar] = func
    return with_functions(mod, functions)


def may_refuse(mod: tvm.IRModule) -> bool:
    """Whether a module has indices or divisors that are data."""
    functions = (f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc))
    return any(_Data(func).may_fail for func in functions)


def index_guarded(name: str, func: tirx.PrimFunc) -> tirx.Stmt | None:
    """The body of a function with the checks of its indices, for a CPU; None where none is data."""
    data = _Data(func)
    return _OfIndices(name, data).guarded(func.body) if data.may_fail else None


def _guarded(name: str, func: tirx.PrimFunc, kind: str) -> tirx.PrimFunc:
    written = kind == "cuda" and func.attrs.get(TIRX_ATTR, False)  # reads clipped places only
    if kind not in ("llvm", "cuda") or written:
        return func
    data = _Data(func)
    if not data.may_fail:
        return func
    if kind == "cuda":
        return func.with_body(_Dropping(name, data).guarded(func.body))
    body = _Guards(name, data).guarded(func.body)
    return func.with_body(tvm_ffi.structural_map(body, safe_divisions(data)))


class _Data:
    """What a function loads, and what it makes of that.

    Attributes
    ----------
    names : set of Var
        Variables that are bound to something that is loaded.
    values : dict of Var to Expr
        What the variables stand for, where that is the same wherever it stands.
    may_fail : bool
        Whether an index, or a divisor of integers, is data.
    """

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.names: set[Var] = set()
        self.values: dict[Var, Expr] = {}
        self.may_fail = False
        self.written: set[Var] = set()
        stores = [(tirx.BufferStore, lambda node: self.written.add(node.buffer))]
        tvm_ffi.structural_walk(func.body, stores)
        kinds = [(tirx.Bind, self._bind), (Let, self._let), (s_tir.SBlockRealize, self._block)]
        kinds += [(kind, self._access) for kind in (TensorLoad, tirx.BufferStore)]
        kinds += [(kind, self._division) for kind in DIVISIONS]
        tvm_ffi.structural_walk(func.body, kinds, order="pre")

    def __contains__(self, expr: Expr) -> bool:
        if number(expr) is not None:
            return False
        return bool(_loads(expr)) or uses_any(expr, self.names)

    def written_out(self, expr: Expr) -> Expr:
        """An expression without the variables of `values`."""
        while any(var in self.values for var in variables(expr)):
            expr = substitute(expr, self.values)
        return expr

    def _bind(self, node: tirx.Bind) -> None:
        if node.value not in self:
            return
        self.names.add(node.var)
        if not any(load.source in self.written for load in _loads(self.written_out(node.value))):
            self.values[node.var] = node.value

    def _let(self, node: Let) -> None:
        if node.value in self:
            self.names.add(node.var)

    def _block(self, node: s_tir.SBlockRealize) -> None:
        pairs = zip(node.block.iter_vars, node.iter_values, strict=True)
        self.names.update(axis.var for axis, value in pairs if value in self)

    def _access(self, node: TensorLoad | tirx.BufferStore) -> None:
        self.may_fail = self.may_fail or any(index in self for index in node.indices)

    def _division(self, node: Expr) -> None:
        self.may_fail = self.may_fail or (is_integer(dtype_of(node)) and node.b in self)


def _loads(expr: Expr) -> list[TensorLoad]:
    found: list[TensorLoad] = []
    tvm_ffi.structural_walk(expr, [(TensorLoad, found.append)])
    return found


@dataclass(frozen=True, slots=True)
class _Check:
    """What has to hold before a statement."""

    condition: Expr
    kind: str
    message: str

    @property
    def stmt(self) -> tirx.Stmt:
        return tirx.AssertStmt(self.condition, StringImm(self.kind), [StringImm(self.message)])

    def reads(self) -> set[Var]:
        """The variables and buffers that the condition is made of."""
        return {*variables(self.condition), *(load.source for load in _loads(self.condition))}


class _Guards:
    """Puts checks into the statements of a function."""

    def __init__(self, name: str, data: _Data) -> None:
        self.name, self.data = name, data
        self.analyzer = tvm.sym.Analyzer()

    def guarded(self, stmt: tirx.Stmt) -> tirx.Stmt:
        """A statement behind the checks that it needs."""
        body, checks = self.stmt(stmt)
        return seq(*(check.stmt for check in checks), body)

    # Each gives the statement with its checks inside, and those that may stand before it.

    def stmt(self, stmt: tirx.Stmt) -> tuple[tirx.Stmt, list[_Check]]:
        if isinstance(stmt, tirx.SeqStmt):
            return self._sequence(stmt)
        if isinstance(stmt, tirx.For):
            return self._loop(stmt)
        if isinstance(stmt, tirx.IfThenElse):
            sides = [
                None if s is None else self.guarded(s) for s in (stmt.then_case, stmt.else_case)
            ]
            return tirx.IfThenElse(stmt.condition, *sides), list(self.checks(stmt.condition))
        if isinstance(stmt, s_tir.SBlockRealize):
            return self._block(stmt), []
        if isinstance(stmt, tirx.AttrStmt):
            return tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, self.guarded(stmt.body)), []
        if isinstance(stmt, tirx.While):
            return tirx.While(stmt.condition, self.guarded(stmt.body)), []
        if isinstance(stmt, tirx.BufferStore):
            found = [c for e in (*stmt.indices, stmt.value) for c in self.checks(e)]
            return stmt, found + list(self._access(stmt.buffer, stmt.indices))
        if isinstance(stmt, tirx.Bind):
            found = list(self.checks(stmt.value))
            if is_integer(dtype_of(stmt.value)):
                self.analyzer.bind(stmt.var, stmt.value, allow_override=True)
            return stmt, found
        if isinstance(stmt, tirx.Evaluate):
            return stmt, list(self.checks(stmt.value))
        return stmt, []

    def _sequence(self, stmt: tirx.SeqStmt) -> tuple[tirx.Stmt, list[_Check]]:
        above, made, changed = [], [], set()
        for part in stmt.seq:
            body, checks = self.stmt(part)
            for check in checks:
                if check.reads() & changed:
                    made.append(check.stmt)
                else:
                    above.append(check)
            made.append(body)
            changed |= _changed_by(part)
        return seq(*made), above

    def _loop(self, loop: tirx.For) -> tuple[tirx.Stmt, list[_Check]]:
        self.analyzer.bind(loop.loop_var, tvm.ir.Range.from_min_extent(loop.min, loop.extent))
        body, checks = self.stmt(loop.body)
        changed = {loop.loop_var} | _changed_by(loop.body)
        runs = number(loop.extent) is not None
        above = [check for check in checks if runs and not check.reads() & changed]
        rest = [check.stmt for check in checks if check not in above]
        if loop.kind == tirx.ForKind.VECTORIZED and rest:
            return seq(_checked_alone(loop, seq(*rest)), _with_body(loop, body)), above
        return _with_body(loop, seq(*rest, body)), above

    def _block(self, realize: s_tir.SBlockRealize) -> tirx.Stmt:
        block = realize.block
        for axis in block.iter_vars:
            self.analyzer.bind(axis.var, axis.dom)
        init = None if block.init is None else self.guarded(block.init)
        fields = (block.iter_vars, block.reads, block.writes, block.name_hint)
        rest = (init, block.alloc_buffers, block.match_buffers, block.annotations)
        made = s_tir.SBlock(*fields, self.guarded(block.body), *rest)
        return s_tir.SBlockRealize(realize.iter_values, realize.predicate, made)

    # ---- the checks that an expression needs, those of what is computed first in front

    def checks(self, expr: Expr) -> Iterator[_Check]:
        chosen = self._chosen(expr)
        if chosen is not None:
            condition, *sides = chosen
            yield from self.checks(condition)
            for side, holds in zip(sides, (condition, tirx.Not(condition)), strict=True):
                for check in self.checks(side):
                    unless = tirx.if_then_else(holds, check.condition, tirx.IntImm("bool", 1))
                    yield _Check(unless, check.kind, check.message)
            return
        if isinstance(expr, Let):
            yield from self.checks(expr.value)
            if is_integer(dtype_of(expr.value)):
                self.analyzer.bind(expr.var, expr.value, allow_override=True)
            value = _without_lets(expr.value)
            for check in self.checks(expr.body):  # stands outside of what the variable is known in
                known = self.data.written_out(substitute(check.condition, {expr.var: value}))
                yield _Check(known, check.kind, check.message)
            return
        try:
            inner = children(expr)
        except Unsupported:  # nothing that computes a place
            return
        for child in inner:
            yield from self.checks(child)
        if isinstance(expr, TensorLoad):
            yield from self._access(expr.source, expr.indices)
        if isinstance(expr, DIVISIONS) and is_integer(dtype_of(expr)):
            yield from self._divisor(expr.b)

    def _chosen(self, expr: Expr) -> Sequence[Expr] | None:
        """A condition, and what is computed where it holds and where it does not."""
        return expr.args if is_if_then_else(expr) else None

    def _access(self, buffer: Var, indices: Iterable[Expr]) -> Iterator[_Check]:
        for axis, (index, extent) in enumerate(zip(indices, buffer.ty.shape, strict=False)):
            count = extent_of(extent)
            for place in _ends(index) if index in self.data else ():
                if not self._within(place, extent):
                    what = f"an index along axis {axis}, which has {count} elements"
                    inside = tirx.And(tirx.IntImm(dtype_of(place), 0) <= place, place < extent)
                    yield self._check(inside, "OutOfRange", f"{what}, is out of range")

    def _within(self, index: Expr, extent: Expr) -> bool:
        least, most = bounds(index, self.analyzer)
        if least < 0:
            return False
        known = number(extent)
        return self.analyzer.can_prove(index < extent) if known is None else most < known

    def _divisor(self, divisor: Expr) -> Iterator[_Check]:
        least, most = bounds(divisor, self.analyzer)
        if divisor in self.data and least <= 0 <= most:
            other = divisor != tirx.IntImm(dtype_of(divisor), 0)
            yield self._check(other, "DividedByZero", "an integer is divided by zero")

    def _check(self, condition: Expr, kind: str, message: str) -> _Check:
        return _Check(self.data.written_out(condition), kind, f"{self.name}: {message}")


class _OfIndices(_Guards):
    """Divisors are not checked, and of two values of which one counts only that."""

    def _chosen(self, expr: Expr) -> Sequence[Expr] | None:
        if isinstance(expr, tirx.Select):
            return expr.condition, expr.true_value, expr.false_value
        return super()._chosen(expr)

    def _divisor(self, divisor: Expr) -> Iterator[_Check]:
        return iter(())


class _Dropping(_Guards):
    """Where a store, or what it stores, is out of range, it is left out."""

    def stmt(self, stmt: tirx.Stmt) -> tuple[tirx.Stmt, list[_Check]]:
        made, checks = super().stmt(stmt)
        if not isinstance(stmt, tirx.BufferStore):
            return made, []
        inside = conjunction(*(c.condition for c in checks if c.kind == "OutOfRange"))
        return made if inside is None else tirx.IfThenElse(inside, made, None), []


def _without_lets(expr: Expr) -> Expr:
    """An expression that may stand in several places: a variable is bound in one only."""
    opened = (Let, lambda let: substitute(let.body, {let.var: let.value}))
    return tvm_ffi.structural_map(expr, [opened])


def _ends(index: Expr) -> list[Expr]:
    """The first and the last place of a vector of places; one place as it is."""
    if isinstance(index, tirx.Broadcast):
        return [index.value]
    if isinstance(index, tirx.Ramp):
        return [index.base, index.base + index.stride * (index.lanes - 1)]
    return [index]


def _checked_alone(loop: tirx.For, checks: tirx.Stmt) -> tirx.For:
    """A loop of checks before one of vectors, which would be none with checks in it."""
    var = Var(loop.loop_var.name, loop.loop_var.ty)
    body = substitute(checks, {loop.loop_var: var})
    return tirx.For(var, loop.min, loop.extent, tirx.ForKind.SERIAL, body)


def _with_body(loop: tirx.For, body: tirx.Stmt) -> tirx.For:
    return tirx.For(
        loop.loop_var,
        loop.min,
        loop.extent,
        loop.kind,
        body,
        loop.thread_binding,
        loop.annotations,
        loop.step,
    )


def _changed_by(stmt: tirx.Stmt) -> set[Var]:
    """Variables that are bound in a statement, and buffers that are written or made there."""
    found: set[Var] = set()
    kinds = [
        (tirx.Bind, lambda node: found.add(node.var)),
        (tirx.For, lambda node: found.add(node.loop_var)),
        (tirx.BufferStore, lambda node: found.add(node.buffer)),
        (tirx.AllocBuffer, lambda node: found.add(node.buffer)),
        (tirx.DeclBuffer, lambda node: found.add(node.buffer)),
    ]
    tvm_ffi.structural_walk(stmt, kinds)
    return found


# ---- Divisions that do not end the process: what is divided by 0 has been told, or is thrown away.


def safe_divisions(data: _Data) -> list[tuple[type, Callable[[Expr], Expr]]]:
    """Rules for `structural_map`: divisors are neither 0 nor -1."""

    def safe(division: Expr) -> Expr:
        a, b = division.a, division.b
        dtype = dtype_of(division)
        if not is_integer(dtype) or b not in data:
            return division
        zero, one = tirx.IntImm(dtype, 0), tirx.IntImm(dtype, 1)
        if dtype.startswith("uint"):
            return type(division)(a, tirx.Select(b.equal(zero), one, b))
        minus = b.equal(tirx.IntImm(dtype, -1))
        found = type(division)(a, tirx.Select(tirx.Or(b.equal(zero), minus), one, b))
        return tirx.Select(minus, zero - a, found) if isinstance(division, _QUOTIENTS) else found

    return [(kind, safe) for kind in DIVISIONS]
