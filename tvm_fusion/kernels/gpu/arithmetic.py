"""How expressions of a row program are computed on the device.

    exp(x - m)      ->  ex2(fma(x, log2(e), -m * log2(e)))     the last term once a row
    x / s           ->  x * rcp(s)                             the reciprocal once a row
    x * s * g * t   ->  x * (s * t) * g                        s, t row-level

What does not change within a row is bound once, outside the loops over elements. With exact
rounding only the row-level parts are bound and the formulas stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Sequence

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Expr, StringImm, TensorLoad, Var
from tvm.script import tirx as T

from ..program.collapse import drop_unused
from ..program.expr import (
    FLOAT8_DTYPES,
    constant,
    dtype_of,
    is_if_then_else,
    number,
    occurrences,
    rebuild,
    same,
    variables,
)
from ..program.program import Program
from . import intrinsics as device
from . import math_functions as functions
from .frame import MOST_REFERENCES, held
from .intrinsics import device_call

# 8-bit floats: computed in float32, rounded to nearest even where stored, saturating.
#
# What is larger than the largest finite number becomes that number, infinities too (as in TVM's
# CUDA
# code; its code for CPUs overflows into other numbers). NaN stays NaN.


def pack_float8(dtype: str, values: Sequence[Expr]) -> Expr:
    """Four float32 rounded to `dtype`, in one 32-bit register; before sm_89, which has no
    instruction for it, by arithmetic.
    """
    kind = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}[dtype]
    convert = f"cvt.rn.satfinite.{kind}.f32"
    body = (
        "\n#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890\n"
        f"auto one = [](float x) -> unsigned {{ {float8_code(dtype)} }};\n"
        "return one(a) | one(b) << 8 | one(c) << 16 | one(d) << 24;\n#else\n"
        f'unsigned r; asm("{{ .reg .b16 l, h; {convert} l, %2, %1; {convert} h, %4, %3; '
        'mov.b32 %0, {l, h}; }" : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d)); return r;\n#endif\n'
    )
    arguments = "float a, float b, float c, float d"
    return device_call("uint32", f"pack_{kind}", arguments, body, *values)


def float8_code(dtype: str) -> str:
    """C++ that returns the bits of float32 `x` as an 8-bit float: to nearest even, saturating.

    Codes of growing magnitude are consecutive, so that a carry out of the fraction is right; below
    the least normal number they count steps of the least positive one.
    """
    fraction, bias, largest = {"float8_e4m3fn": (3, 7, 448.0), "float8_e5m2": (2, 15, 57344.0)}[
        dtype
    ]
    cut, normal = 23 - fraction, (128 - bias) << 23
    return (
        "unsigned u = __float_as_uint(x), a = u & 0x7fffffffu, s = u >> 24 & 0x80u; "
        "if (a > 0x7f800000u) return 0x7fu; "
        f"if (a > __float_as_uint({largest}f)) a = __float_as_uint({largest}f); "
        f"if (a < {normal}u) return s | "
        f"(unsigned)rintf(__uint_as_float(a) * {2.0 ** (bias - 1 + fraction)}f); "
        f"a += {(1 << (cut - 1)) - 1}u + (a >> {cut} & 1u); "
        f"return s | ((a >> {cut}) - {(127 - bias) << fraction}u);"
    )


def round_once(program: Program) -> Program:
    """Outputs of 8-bit floats without the rounding that storing them does anyway."""
    bodies = {value.var: value.body for value in program.values}
    outputs, changed = [], False
    for output in program.outputs:
        value = output.value
        if isinstance(value, Var) and value in bodies:
            value = bodies[value]
        if output.dtype in FLOAT8_DTYPES and isinstance(value, tirx.Cast):
            inner = value.value
            if isinstance(inner, tirx.Cast) and dtype_of(inner) == output.dtype:
                output, changed = dataclasses.replace(output, value=inner.value), True
        outputs.append(output)
    return drop_unused(dataclasses.replace(program, outputs=tuple(outputs))) if changed else program


LOG2E = 1.4426950408889634
LARGEST_POWER = 8
"""Whole exponents up to this become products."""


def f32(value: float) -> Expr:
    """A float32 immediate."""
    return constant(value, "float32")


class Hoister:
    """Binds row-level expressions, each once (compared by structure and by variable identity);
    floats that are too long to be spelled out in all that use them are held (`frame.held`).
    """

    def __init__(self) -> None:
        self._bound: list[tuple[Expr, Expr]] = []
        self._references: dict[Var, int] = {}

    def __call__(self, expr: Expr) -> Expr:
        if isinstance(expr, Var) or number(expr) is not None:
            return expr
        for known, var in self._bound:
            if same(known, expr):
                return var
        self._bound.append((expr, self._bind(expr)))
        return self._bound[-1][1]

    def _bind(self, expr: Expr) -> Expr:
        used = occurrences(expr)
        count = sum(n * self._references.get(var, 1) for var, n in used.items())
        if count > MOST_REFERENCES and dtype_of(expr).startswith("float"):
            return held(expr)
        bound = T.Bind(expr)
        self._references[bound] = count
        return bound


class Arithmetic:
    """Rewrites expressions for the device.

    Parameters
    ----------
    per_element : variables that change within a row.
    hoist : binds a row-level expression.
    exact : keep formulas.
    half : all data is half precision. A row-level subtrahend is then folded into the scale of an
        exponent (it rounds ``m * log2(e)``, an error of |m| * 1e-7 in the exponent), exp and
        sigmoid round their exponents likewise, and reciprocals are approximate (1 ulp).
    """

    def __init__(
        self,
        per_element: Container[Var],
        hoist: Callable[[Expr], Expr],
        exact: bool = False,
        half: bool = True,
    ) -> None:
        self.per_element, self.hoist = per_element, hoist
        self.exact, self.half = exact, half

    def row_level(self, expr: Expr) -> bool:
        """Whether `expr` is the same for all elements of a row."""
        return not any(var in self.per_element for var in variables(expr))

    def prepare(self, expr: Expr) -> Expr:
        """`expr` with its row-level parts bound and its functions lowered."""
        return self._visit(expr, guarded=False)

    def _visit(self, expr: Expr, guarded: bool) -> Expr:
        if isinstance(expr, Var | StringImm) or number(expr) is not None:
            return expr
        if self.row_level(expr):
            lowered = self._visit_row(expr)
            return lowered if guarded and _may_trap(expr) else self.hoist(lowered)
        if is_if_then_else(expr):
            condition, yes, no = expr.args
            sides = (self._visit(side, True) for side in (yes, no))
            return tirx.if_then_else(self._visit(condition, guarded), *sides)
        if _is_float_select(expr):
            return _as_if(expr, lambda part: self._visit(part, guarded))
        if isinstance(expr, tirx.And | tirx.Or):
            return type(expr)(self._visit(expr.a, guarded), self._visit(expr.b, True))
        if not self.exact and dtype_of(expr) == "float32":
            if self.half and isinstance(expr, Call) and expr.op.name == "tirx.exp":
                return device.ex2(self._scaled(expr.args[0], LOG2E, guarded))
            if isinstance(expr, tirx.Mul) or (isinstance(expr, tirx.Div) and self._by_row(expr)):
                return self._product(expr, guarded)
        return self._lower(expr, lambda e: self._visit(e, guarded))

    def _visit_row(self, expr: Expr) -> Expr:
        if _is_float_select(expr):
            return _as_if(expr, self._visit_row)
        return self._lower(expr, self._visit_row)

    # ---- products

    def _by_row(self, quotient: tirx.Div) -> bool:
        return number(quotient.b) not in (None, 0) or self.row_level(quotient.b)

    def _product(self, expr: Expr, guarded: bool) -> Expr:
        """Row-level factors and reciprocals become one, which the first factor takes."""
        row: list[Expr] = []
        element: list[Expr] = []

        def split(e: Expr) -> None:
            if isinstance(e, tirx.Mul):
                split(e.a)
                split(e.b)
            elif self.row_level(e):
                row.append(self._visit_row(e))
            elif isinstance(e, tirx.Div) and self._by_row(e):
                split(e.a)
                row.append(self._reciprocal(e.b))
            else:
                element.append(self._visit(e, guarded))

        split(expr)
        first, *rest = element
        if row:
            scale = row[0]
            for factor in row[1:]:
                scale = tirx.Mul(scale, factor)
            trap = guarded and _may_trap(scale)
            first = tirx.Mul(first, scale if trap else self.hoist(scale))
        for factor in rest:
            first = tirx.Mul(first, factor)
        return first

    def _reciprocal(self, expr: Expr) -> Expr:
        value = number(expr)
        if value:
            return f32(1.0 / value)
        lowered = self._visit_row(expr)
        return device.rcp(lowered) if self.half else tirx.Div(f32(1.0), lowered)

    # ---- exponents

    def _scaled(self, expr: Expr, scale: float, guarded: bool) -> Expr:
        """``expr * scale`` with the scale pushed inwards."""
        inner, factor = _constant_factor(expr)
        if factor is not None:
            return self._scaled(inner, scale * factor, guarded)
        if isinstance(expr, tirx.Sub) and self.half:
            for kept, moved, sign in ((expr.a, expr.b, 1.0), (expr.b, expr.a, -1.0)):
                if self.row_level(moved) and not (guarded and _may_trap(moved)):
                    inner, factor = _constant_factor(kept)
                    slope = f32(sign * scale * (1.0 if factor is None else factor))
                    shift = self.hoist(tirx.Mul(self._visit_row(moved), f32(-sign * scale)))
                    return device.fma(self._visit(inner, guarded), slope, shift)
        return tirx.Mul(self._visit(expr, guarded), f32(scale))

    # ---- functions

    def _lower(self, expr: Expr, visit: Callable[[Expr], Expr]) -> Expr:
        """`expr` with its children visited, and itself replaced where the device has better."""
        if self.exact or not isinstance(expr, Call) or dtype_of(expr) != "float32":
            return rebuild(expr, visit)
        return lower_call(expr, visit, self.half)


def _is_float_select(expr: Expr) -> bool:
    return isinstance(expr, tirx.Select) and dtype_of(expr).startswith("float")


def _as_if(expr: tirx.Select, visit: Callable[[Expr], Expr]) -> Expr:
    """A Select with its parts visited, as a call: TVM bounds the product of a Select by that of its
    sides, with integer zeros, and fails.
    """
    parts = (expr.condition, expr.true_value, expr.false_value)
    return tirx.if_then_else(*map(visit, parts))


def lower_call(expr: Call, visit: Callable[[Expr], Expr], half: bool) -> Expr:
    """A float32 call with its arguments visited, and itself replaced where the device has better.

    `half` allows sigmoid and exp to be off by 1e-7 of their value times their argument, and sine
    and cosine by 1e-6.
    """
    name = expr.op.name
    if name == "tirx.pow":
        return _power(visit(expr.args[0]), visit(expr.args[1]))
    if half and name in HALF_FUNCTIONS:
        return HALF_FUNCTIONS[name](visit(expr.args[0]))
    if name in FUNCTIONS:
        return FUNCTIONS[name](visit(expr.args[0]))
    return rebuild(expr, visit)


def _exp(x: Expr) -> Expr:
    return device.ex2(x * f32(LOG2E))


def _sigmoid(x: Expr) -> Expr:
    return device.rcp(f32(1.0) + device.ex2(x * f32(-LOG2E)))


def _power(x: Expr, y: Expr) -> Expr:
    exponent = number(y)
    if exponent == 0.5:
        return tirx.sqrt(x)
    if exponent == -0.5:
        return tirx.rsqrt(x)
    if exponent is None or exponent != int(exponent) or not 1 <= exponent <= LARGEST_POWER:
        return device.power(x, y)
    if not isinstance(x, Var):
        return device.whole_power(x, int(exponent))
    result = x
    for _ in range(int(exponent) - 1):
        result = tirx.Mul(result, x)
    return result


FUNCTIONS: dict[str, Callable[[Expr], Expr]] = {
    "tirx.exp": functions.exp,
    "tirx.sigmoid": functions.sigmoid,
    "tirx.tanh": functions.tanh,
    "tirx.sin": device.sin,
    "tirx.cos": device.cos,
}

HALF_FUNCTIONS: dict[str, Callable[[Expr], Expr]] = {
    "tirx.exp": _exp,
    "tirx.sigmoid": _sigmoid,
    "tirx.sin": device.sin_to_half,
    "tirx.cos": device.cos_to_half,
}


def _constant_factor(expr: Expr) -> tuple[Expr, float | None]:
    """``x * 2`` -> (x, 2)."""
    if isinstance(expr, tirx.Mul):
        for a, b in ((expr.a, expr.b), (expr.b, expr.a)):
            if number(b) is not None:
                return a, float(number(b))
    return expr, None


def _may_trap(expr: Expr) -> bool:
    """Whether evaluating `expr` where its condition does not hold may fault."""
    risky: list[Expr] = []
    division = (tirx.Div, tirx.FloorDiv, tirx.FloorMod, tirx.Mod)
    tvm_ffi.structural_walk(
        expr,
        [
            (TensorLoad, risky.append),
            *((kind, lambda e: risky.append(e) if _by_data(e) else None) for kind in division),
        ],
    )
    return bool(risky)


def _by_data(division: Expr) -> bool:
    return not dtype_of(division).startswith("float") and not number(division.b)
