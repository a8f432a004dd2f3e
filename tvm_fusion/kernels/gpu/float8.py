"""8-bit floats: computed in float32, rounded to nearest even where stored, saturating.

What is larger than the largest finite number becomes that number, infinities too (as in TVM's CUDA
code; its code for CPUs overflows into other numbers). NaN stays NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tvm import tirx
from tvm.ir import Expr, Var

from ..program.collapse import drop_unused
from ..program.expr import FLOAT8_DTYPES, dtype_of
from ..program.program import Program
from .intrinsics import device_call


def pack_float8(dtype: str, values: Sequence[Expr]) -> Expr:
    """Four float32 rounded to `dtype`, in one 32-bit register."""
    kind = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}[dtype]
    convert = f"cvt.rn.satfinite.{kind}.f32"
    body = (
        f'unsigned r; asm("{{ .reg .b16 l, h; {convert} l, %2, %1; {convert} h, %4, %3; '
        'mov.b32 %0, {l, h}; }" : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d)); return r;'
    )
    arguments = "float a, float b, float c, float d"
    return device_call("uint32", f"pack_{kind}", arguments, body, *values)


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
