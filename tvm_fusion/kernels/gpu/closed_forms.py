"""Program -> program with special functions in closed forms that the device computes cheaply.

    v0 = erf(x * 0.7071)
    v1 = x * (0.5 + 0.5 * v0)                 ->  v1 = gelu(x)
    v1 = x * 0.5 * (1 + tanh(u))              ->  v1 = x * sigmoid(2 * u)
    v1 = x / (1 + exp(-x))                    ->  v1 = x * sigmoid(x)
    v1 = sigmoid(a) * tanh(b)                 ->  v1 = p(b) * rcp((1 + exp(-a)) * q(b))
    v1 = int8(clip(round(u), -128, 127))      ->  v1 = int8(round_to_int(clip(u, -128, 127)))

The second, third and last hold in any precision. The others (and tanh, erf and sigmoid alone) are
made where a value may be off by a little: everything computed from it is stored in half precision,
directly or through reductions. The unfused graph rounds such a value to half precision itself,
which is at least four times as much. See `functions` for the errors.

A product of two reciprocals underflows where both are below 2^-63.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import tvm
from tvm import tirx
from tvm.ir import Expr, StringImm, TensorLoad, Var

from ..program.collapse import drop_unused
from ..program.expr import (
    HALF_DTYPES,
    constant,
    convert,
    dtype_of,
    is_if_then_else,
    is_integer,
    number,
    occurrences,
    rebuild,
    variables,
)
from ..program.program import Element, Level, Program, Value
from . import intrinsics as device
from . import math_functions as functions
from .arithmetic import round_once
from .math_functions import (
    call_of,
    factors_of,
    match_affine,
    match_logistic,
    match_rounded,
    product_of,
    split_constant,
    take_gelu,
)

# How often the temporaries of a program are used, and for what.

OTHER = "other"
"""Stands for every dtype in which nothing is stored, such as that of an index."""


def _reads(item: Element | Value) -> list[Expr]:
    """The expressions that a placeholder is computed from."""
    if isinstance(item, Value):
        return [item.body]
    return [item.offset] if item.guard is None else [item.offset, item.guard]


def uses_of(program: Program) -> Counter[Var]:
    """In how many expressions each placeholder stands; twice in one counts as two."""
    exprs = [e for item in program.elements + program.values for e in _reads(item)]
    bodies = program.reductions + program.scans + program.accumulations
    exprs += [item.body for item in bodies]
    exprs += [item.value for item in program.outputs]
    found: Counter[Var] = Counter()
    for expr in exprs:
        found.update(occurrences(expr))
    return found


def stored_dtypes(program: Program) -> dict[Var, set[str]]:
    """The dtypes of all that is computed from each value and reduction and stored."""
    found: dict[Var, set[str]] = {}

    def mark(expr: Expr, dtypes: set[str]) -> bool:
        grown = False
        for var in variables(expr):
            known = found.setdefault(var, set())
            grown |= not dtypes <= known
            known |= dtypes
        return grown

    for output in program.outputs:
        mark(output.value, {output.dtype})
    for item in program.accumulations:
        mark(item.body, {item.dtype})
    for element in program.elements:
        for expr in _reads(element):
            mark(expr, {OTHER})
    growing = True
    while growing:
        growing = False
        for item in (*reversed(program.values), *reversed(program.scans), *program.reductions):
            growing |= mark(item.body, found.get(item.var, set()))
    return found


MOST_REPEATED = 16
"""References to variables in an argument that is not bound and that a closed form repeats: a chain
of them would grow with the power of its length. Beyond, the function is called as it is; what is
not bound changes once a row at most.
"""


def closed_forms(program: Program) -> Program:
    """`program` with its special functions in closed forms; itself where rounding is exact."""
    program = round_once(program)
    if program.exact:
        return program
    rewriter = _Rewriter(program)
    values = []
    for value in program.values:
        body = rewriter.rewrite(value.body, rewriter.dtype_for(value.var))
        values += [*rewriter.take(value.phase), dataclasses.replace(value, body=body)]
    reductions = []
    for item in program.reductions:
        body = rewriter.rewrite(item.body, rewriter.dtype_for(item.var))
        values += rewriter.take(item.phase)
        reductions.append(dataclasses.replace(item, body=body))
    scans = []
    for item in program.scans:
        body = rewriter.rewrite(item.body, rewriter.dtype_for(item.var))
        values += rewriter.take(0)
        scans.append(dataclasses.replace(item, body=body))
    sums = []
    for item in program.accumulations:
        body = rewriter.rewrite(item.body, half_dtype({item.dtype}))
        values += rewriter.take(item.phase)
        sums.append(dataclasses.replace(item, body=body))
    outputs = []
    for item in program.outputs:
        result = rewriter.rewrite(item.value, half_dtype({item.dtype}))
        values += rewriter.take(item.phase)
        outputs.append(dataclasses.replace(item, value=result))
    if not rewriter.changed:
        return program
    return drop_unused(
        dataclasses.replace(
            program,
            values=tuple(values),
            reductions=tuple(reductions),
            scans=tuple(scans),
            outputs=tuple(outputs),
            accumulations=tuple(sums),
        )
    )


def half_dtype(stored: set[str]) -> str | None:
    """The half-precision dtype whose forms serve results of all dtypes in `stored`, if there is."""
    if not stored or any(dtype not in HALF_DTYPES for dtype in stored):
        return None
    return "float16" if stored == {"float16"} else "bfloat16"


class _Rewriter:
    """Rewrites expressions of one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.bodies = {value.var: value.body for value in program.values}
        self.uses = uses_of(program)
        self.stored = stored_dtypes(program)
        self.changed = False
        self._new: list[tuple[Var, Expr]] = []
        self._bound: set[Var] = set()
        self._binds = True

    def dtype_for(self, var: Var) -> str | None:
        """The half-precision dtype of everything that is computed from `var`."""
        return half_dtype(self.stored.get(var, set()))

    def take(self, phase: int) -> list[Value]:
        """The new temporaries since the last call."""
        taken = [Value(var, body, phase) for var, body in self._new]
        self._new = []
        return taken

    def look(self, expr: Expr) -> Expr:
        """The body behind a temporary that is used once."""
        while isinstance(expr, Var) and expr in self.bodies and self.uses[expr] == 1:
            expr = self.bodies[expr]
        return expr

    def bind(self, expr: Expr) -> Expr:
        """`expr` as a variable, since it is used several times; not what is hoisted anyway."""
        if isinstance(expr, Var) or not self._binds or not self._changes(expr):
            return expr
        var = Var(f"f{len(self._bound)}", tvm.ir.PrimType(dtype_of(expr)))
        self._bound.add(var)
        self._new.append((var, expr))
        return var

    def _changes(self, expr: Expr) -> bool:
        bound = any(var in self._bound for var in variables(expr))
        return bound or self.program.level(expr) == Level.ELEMENT

    # ---- expressions

    def rewrite(self, expr: Expr, half: str | None) -> Expr:
        """`expr` with closed forms; temporaries are bound for the whole expression."""
        if isinstance(expr, Var | TensorLoad | StringImm) or number(expr) is not None:
            return expr
        if _is_f32(expr):
            found = self._closed(expr, half)
            if found is not None:
                self.changed = True
                return found
        if isinstance(expr, tirx.Cast) and is_integer(dtype_of(expr)):
            u = match_rounded(expr.value, self.look) if _is_f32(expr.value) else None
            if u is not None:
                self.changed = True
                return convert(device.round_to_int(self.rewrite(u, half)), dtype_of(expr))
        if is_if_then_else(expr):
            condition, *sides = expr.args
            with self._under_condition():
                sides = [self.rewrite(side, half) for side in sides]
            return tirx.if_then_else(self.rewrite(condition, half), *sides)
        if isinstance(expr, tirx.And | tirx.Or):
            left = self.rewrite(expr.a, half)
            with self._under_condition():
                return type(expr)(left, self.rewrite(expr.b, half))
        return rebuild(expr, lambda e: self.rewrite(e, half))

    @contextmanager
    def _under_condition(self) -> Iterator[None]:
        """What stands under a condition may be illegal to evaluate ahead: nothing is bound."""
        before, self._binds = self._binds, False
        yield
        self._binds = before

    def _closed(self, expr: Expr, half: str | None) -> Expr | None:
        if isinstance(expr, tirx.Mul | tirx.Div):
            return self._product(expr, half)
        parts = self._parts(expr, half)
        return None if parts is None else self._quotient(*parts)

    # ---- products

    def _product(self, expr: Expr, half: str | None) -> Expr | None:
        """The product by its special factors; None where it has none."""
        plain, special = self._factors(expr)
        above: list[Expr] = []
        below: list[Expr] = []
        gelu = None if half is None else take_gelu(plain, self.look)
        if gelu is not None:
            x, scale, plain = gelu
            above = [functions.gelu(self.rewrite(x, half), half), _f32(scale)]
        elif not special and not any(self._is_special(self.look(f), half) for f in plain):
            return None  # before any factor is rewritten: the caller does that
        for factor in plain:
            parts = self._parts(self.look(factor), half)
            if parts is None:
                above.append(self._plain(factor, half))
            else:
                above += parts[0]
                below += parts[1]
        scale, above = split_constant(above)
        if scale != 1:
            above.insert(1, _f32(scale))
        return self._quotient(above, below)

    def _plain(self, factor: Expr, half: str | None) -> Expr:
        if isinstance(factor, tirx.Div):
            return rebuild(factor, lambda e: self.rewrite(e, half))
        return self.rewrite(factor, half)

    def _factors(self, expr: Expr) -> tuple[list[Expr], bool]:
        """Factors, with ``x / (1 + exp(-u))`` as ``x * sigmoid(u)``; whether there is such one."""
        found: list[Expr] = []
        special = False
        for factor in factors_of(expr, self.look):
            opened = self.look(factor)
            u = match_logistic(opened.b, self.look) if isinstance(opened, tirx.Div) else None
            if u is None:
                found.append(factor)
            else:
                found += [*self._factors(opened.a)[0], self._sigmoid(u)]
                special = True
        return found, special

    def _is_special(self, expr: Expr, half: str | None) -> bool:
        """Whether `_parts` finds some."""
        if match_affine(expr, "tirx.tanh", self.look) is not None:
            return True
        names = ("tirx.tanh", "tirx.erf", "tirx.sigmoid")
        return half is not None and any(call_of(expr, name) is not None for name in names)

    def _parts(self, expr: Expr, half: str | None) -> tuple[list[Expr], list[Expr]] | None:
        """Factors above and below the line of a special function; None if `expr` is none."""
        affine = match_affine(expr, "tirx.tanh", self.look)
        if affine is not None:
            scale, u = affine
            gate = self._sigmoid(_double(self.rewrite(u, half)))
            factor = [] if scale == 0.5 else [_f32(2.0 * scale)]
            return ([*factor, gate], []) if half is None else (factor, [self._below(gate)])
        for function, make in (
            ("tirx.tanh", functions.tanh_parts),
            ("tirx.erf", functions.erf_parts),
        ):
            u = call_of(expr, function)
            if u is not None and half is not None:
                u = self.bind(self.rewrite(u, half))
                if _references(u) > MOST_REPEATED:
                    return [tirx.call_intrin("float32", function, u)], []
                above, below = make(u)
                return [above], [below]
        u = call_of(expr, "tirx.sigmoid")
        if u is None or half is None:
            return None
        return [], [self._below(self._sigmoid(self.rewrite(u, half)))]

    @staticmethod
    def _sigmoid(u: Expr) -> Expr:
        return tirx.call_intrin("float32", "tirx.sigmoid", u)

    @staticmethod
    def _below(gate: Expr) -> Expr:
        """The denominator of a sigmoid."""
        return _f32(1.0) + tirx.exp(gate.args[0] * _f32(-1.0))

    @staticmethod
    def _quotient(above: list[Expr], below: list[Expr]) -> Expr:
        """One reciprocal for all denominators."""
        factors = [*above, *([device.rcp(product_of(below))] if below else [])]
        return product_of(factors) if factors else _f32(1.0)


def _references(expr: Expr) -> int:
    return sum(occurrences(expr).values())


def _double(u: Expr) -> Expr:
    """``2 * u``, with the factor of a product doubled."""
    if isinstance(u, tirx.Mul):
        for kept, factor in ((u.a, u.b), (u.b, u.a)):
            if number(factor) is not None:
                return kept * _f32(2.0 * number(factor))
    return u * _f32(2.0)


def _is_f32(expr: Expr) -> bool:
    return dtype_of(expr) == "float32"


def _f32(value: float) -> Expr:
    return constant(value, "float32")
