"""How the epilogue of a GEMM is computed on the device: exact formulas -> fast forms.

    x * (0.5 + 0.5 * erf(x / sqrt 2))   ->  gelu(x) = x / (1 + 2^(-x R(x^2))), R of degree 6
    0.5 + 0.5 * tanh(u)                 ->  sigmoid(2 u)
    sigmoid(x)                          ->  1 / (1 + 2^(-x log2 e))
    exp(x)                              ->  2^(x log2 e)

gelu has no branch and a relative error of 6e-5 (see `functions.gelu`; below -5.8 it goes to zero
too fast for bfloat16, by 1e-8 at most), so it serves outputs in half precision only. So do sigmoid
and exp in one step of the exponent; for others they are off by a few units in the last place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import tirx
from tvm.ir import Call, Expr, StringImm, TensorLoad, Var
from tvm.script import tirx as T

from ..contraction.model import Binding
from ..program.expr import constant, dtype_of, is_if_then_else, number, rebuild
from . import math_functions as functions
from .arithmetic import lower_call
from .patterns import factors_of, match_affine, product_of, split_constant, take_gelu
from .product_frame import Frame


def f32(value: float) -> Expr:
    """A float32 immediate."""
    return constant(value, "float32")


def evaluate(
    frame: Frame,
    bindings: Sequence[Binding],
    values: Sequence[Expr],
    env: Mapping[Var, Expr],
    half: bool,
) -> list[Expr]:
    """Emits the temporaries of some expressions; their values, in the frame's terms.

    With exact rounding the formulas stay as they are.
    """
    env = dict(env)

    def value(expr: Expr) -> Expr:
        found = frame.rewrite(expr, env)
        return found if frame.contraction.exact else lower(found, half)

    for binding in bindings:
        env[binding.var] = T.Bind(value(binding.value))
    return [value(v) for v in values]


def lower(expr: Expr, half: bool) -> Expr:
    """`expr` with its functions in the fast forms; `half`: the result is rounded to half precision.

    Emits the temporaries of the fast forms; none in front of what is evaluated under a condition.
    """
    if isinstance(expr, Var | TensorLoad | StringImm) or number(expr) is not None:
        return expr
    if is_if_then_else(expr):
        branches = [lower(branch, False) for branch in expr.args[1:]]
        return tirx.if_then_else(lower(expr.args[0], half), *branches)
    if dtype_of(expr) != "float32":
        return rebuild(expr, lambda e: lower(e, half))
    if half and isinstance(expr, tirx.Mul):
        found = take_gelu(factors_of(expr))
        if found is not None:
            x, scale, rest = found
            value = functions.gelu(lower(x, half), "float16")
            constants, rest = split_constant(rest)
            if abs(scale * constants - 1) > 1e-6:
                rest.append(f32(scale * constants))
            return value * lower(product_of(rest), half) if rest else value
    if isinstance(expr, tirx.Add):
        found = match_affine(expr, "tirx.tanh")
        if found is not None:
            scale, u = found
            gate = tirx.call_intrin("float32", "tirx.sigmoid", u * f32(2.0))
            return lower(gate, half) * f32(2.0 * scale)
    if isinstance(expr, Call):
        return lower_call(expr, lambda e: lower(e, half), half)
    return rebuild(expr, lambda e: lower(e, half))
