"""Rates of arithmetic on a CPU, in the loops that our CPU writer makes.

A function is applied once and several times in one kernel; the difference is the function alone,
without loads and stores. The tensors lie in the level-2 caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax import op

from ..findings import ARITHMETIC, Family, Finding, Measured
from .bench import CpuBench, Emit

ELEMENTS = 1 << 17
CHAIN = 2
"""Applications in the longer kernel; LLVM takes many seconds for a chain of five tanh."""

LONGER = {"divide": 9, "sqrt": 5, "int_multiply_add": 33, "int_divide": 3}
"""Those of cheap functions, which would not show beside loads and stores."""

PRODUCT = 768
"""Rows, columns and depth of the matrix product that gives the flop rate."""

Step = Callable[[Any, Any], Any]

SPECIAL: dict[str, Step] = {
    "exp": lambda v, b: op.exp(v),
    "log": lambda v, b: op.log(v),
    "rsqrt": lambda v, b: op.rsqrt(v),
    "sqrt": lambda v, b: op.sqrt(v),
    "sin": lambda v, b: op.sin(v),
    "cos": lambda v, b: op.cos(v),
    "divide": lambda v, b: op.add(op.divide(b, v), b),
    "sigmoid": lambda v, b: op.sigmoid(v),
    "tanh": lambda v, b: op.tanh(v),
    "erf": lambda v, b: op.erf(v),
}
INTEGERS: dict[str, Step] = {
    "int_multiply_add": lambda v, b: op.add(op.multiply(v, b), b),
    "int_divide": lambda v, b: op.floor_divide(v, b),
}
OPERATIONS = {"int_multiply_add": 2}


def chain(step: Step, length: int) -> Emit:
    """`length` applications of a function to the first input; the second is its operand."""

    def emit(bb: relax.BlockBuilder, params: Any) -> Any:
        value = params[0]
        for _ in range(length):
            value = bb.emit(step(value, params[1]))
        return value

    return emit


def rates(bench: CpuBench) -> tuple[dict[str, float], list[str]]:
    """Operations a second on all cores by function, and what could not be measured."""
    floats = tuple(np.linspace(0.5, 1.0, ELEMENTS, dtype="float32") for _ in range(2))
    ints = tuple(np.arange(3, ELEMENTS + 3, dtype="int32") for _ in range(2))
    calls = {}
    for inputs, steps in ((floats, SPECIAL), (ints, INTEGERS)):
        for name, step in steps.items():
            for length in (1, LONGER.get(name, CHAIN)):
                calls[name, length] = bench.written(chain(step, length), *inputs)
    seconds = bench.times(calls)
    found, missing = {}, []
    for name in (*SPECIAL, *INTEGERS):
        length = LONGER.get(name, CHAIN)
        taken = (seconds[name, length] - seconds[name, 1]) / (length - 1)
        if taken > 0:
            found[name] = ELEMENTS * OPERATIONS.get(name, 1) / taken
        else:
            missing.append(f"{name}: {length} of them took no longer than one")
    return found, missing


def flops(bench: CpuBench) -> float:
    """Flop a second of a float32 matrix product."""
    generator = np.random.default_rng(1)
    x, w = (generator.standard_normal((PRODUCT, PRODUCT), dtype="float32") for _ in range(2))
    call = bench.written(lambda bb, p: bb.emit(op.matmul(p[0], p[1])), x, w)
    return 2 * PRODUCT**3 / bench.times({0: call})[0]


def conversions(bench: CpuBench) -> float | None:
    """float32 to float16, over copies that store twice as much; None where that does not show."""
    x = np.linspace(0.5, 1.0, ELEMENTS, dtype="float32")

    def narrow(bb: relax.BlockBuilder, params: Any) -> Any:
        return bb.emit(op.astype(params[0], "float16"))

    def copy(bb: relax.BlockBuilder, params: Any) -> Any:
        return bb.emit(op.negative(params[0]))

    seconds = bench.times({emit: bench.written(emit, x) for emit in (narrow, copy)})
    more = seconds[narrow] - seconds[copy]
    return ELEMENTS / more if more > 0 else None


def measure(bench: CpuBench) -> Finding:
    """Rates of arithmetic."""
    found, missing = rates(bench)
    values = [Measured("fma_per_s_f32", flops(bench), f"our float32 product of {PRODUCT}^3")]
    if (rate := conversions(bench)) is not None:
        values.append(Measured("conversion_per_s", rate, "float32 to float16"))
    else:
        missing.append("conversion_per_s: conversions take no longer than copies")
    for field, name, how in (
        ("special_per_s", "exp", "exp of float32"),
        ("int_per_s", "int_multiply_add", "multiply and add of int32"),
        ("int_div_per_s", "int_divide", "division of int32 by a tensor"),
    ):
        if name in found:
            values.append(Measured(field, found[name], how))
    if "exp" in found:
        slots = {n: round(found["exp"] / found[n], 3) for n in SPECIAL if n in found}
        values.append(Measured("special_slots", slots, "time relative to exp"))
    note = f"operations a second on {bench.cores} cores: " + ", ".join(
        f"{name} {rate:.3g}" for name, rate in found.items()
    )
    return Finding(values, [note], missing)


FAMILY = Family(
    "arithmetic",
    "rates of arithmetic",
    ARITHMETIC,
    measure,
)
