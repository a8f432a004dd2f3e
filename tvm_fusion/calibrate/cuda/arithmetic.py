"""Rates of arithmetic: multiply-adds, special functions, conversions, integers.

Every thread of a full device computes on `CHAINS` independent values, each of which feeds itself:
`v = f(v)`, `INNER` times between two steps of the loop. Special functions are those that our writer
emits for half precision (`kernels/gpu/arithmetic.py`), in its own words.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...config import HardwareProfile
from ...kernels.gpu import intrinsics as device
from ...kernels.gpu.arithmetic import lower_call
from ...kernels.gpu.intrinsics import device_call
from ..findings import ARITHMETIC, Family, Finding, Measured
from .bench import Call, CudaBench, Shell, micro_kernel

THREADS, BLOCKS_PER_SM = 512, 4
CHAINS, INNER = 4, 8
TRIPS = (64, 320)

Step = Callable[[Expr, Expr], Expr]
"""Value and an operand that is unknown at compile time -> the next value."""


def f32(value: float) -> Expr:
    """A float32 immediate."""
    return tirx.FloatImm("float32", value)


def _written(function: Callable[[Expr], Expr]) -> Step:
    """A function as our writer emits it."""
    return lambda v, b: lower_call(function(v), lambda e: e, half=True)


def _divide(v: Expr, b: Expr) -> Expr:
    return tirx.Div(b, v)


def _power(v: Expr, b: Expr) -> Expr:
    return device.power(v, b)


def _convert(v: Expr, b: Expr) -> Expr:
    """To float16 and back: two conversions that the compiler cannot see through."""
    body = (
        "float r; unsigned short h; "
        'asm volatile("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x)); '
        'asm volatile("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(h)); return r;'
    )
    return device_call("float32", "mb_halve", "float x", body, v)


SPECIAL: dict[str, Step] = {
    "exp2": lambda v, b: device.ex2(v),
    "exp": _written(tirx.exp),
    "log": _written(tirx.log),
    "log2": _written(tirx.log2),
    "rsqrt": _written(tirx.rsqrt),
    "sqrt": _written(tirx.sqrt),
    "sin": _written(tirx.sin),
    "cos": _written(tirx.cos),
    "divide": _divide,
    "sigmoid": _written(tirx.sigmoid),
    "tanh": _written(tirx.tanh),
    "pow": _power,
    "erf": _written(tirx.erf),
}
"""What one slot counts for: `special_slots` of the profile by function."""

FLOATS: dict[str, Step] = {
    "fma": lambda v, b: device.fma(v, b, v),
    "convert": _convert,
    **SPECIAL,
}
INTEGERS: dict[str, Step] = {
    "int_multiply_add": lambda v, b: v * b + b,
    "int_add": lambda v, b: tirx.bitwise_xor(v, b) + b,
    "int_divide": lambda v, b: tirx.truncdiv(v, b) + v,
    "int_modulo": lambda v, b: tirx.truncmod(v, b) + b,
}
RESULTS = {"convert": 2, "int_add": 2}
"""Operations a step counts for, where that is not one."""


def kernels(hw: HardwareProfile) -> dict:
    """A kernel for each function."""
    return {
        f"mb_{name}": micro_kernel(f"mb_{name}", THREADS, _chains(step, dtype))
        for dtype, steps in (("float32", FLOATS), ("int32", INTEGERS))
        for name, step in steps.items()
    }


def _chains(step: Step, dtype: str) -> Callable[[Shell], None]:
    def body(s: Shell) -> None:
        values = T.alloc_local((CHAINS,), dtype)
        start = T.Bind(tirx.Cast(dtype, s.thread) + _one(dtype))
        operand = T.Bind(s.x[0] if dtype == "float32" else s.extra)
        for chain in range(CHAINS):
            T.buffer_store(values, start + tirx.Cast(dtype, tirx.IntImm("int32", chain)), [chain])
        with T.serial(s.trips, unroll=False):
            for _ in range(INNER):
                for chain in range(CHAINS):
                    T.buffer_store(values, step(values[chain], operand), [chain])
        total = values[0]
        for chain in range(1, CHAINS):
            total = total + values[chain]
        s.keep(total if dtype == "float32" else tirx.reinterpret("float32", total))

    return body


def _one(dtype: str) -> Expr:
    return f32(1.0) if dtype == "float32" else tirx.IntImm(dtype, 1)


def rates(bench: CudaBench) -> tuple[dict[str, float], list[str]]:
    """Operations a second by function, and what could not be measured."""
    blocks = BLOCKS_PER_SM * bench.hw.num_sms
    wanted = [*FLOATS, *INTEGERS]
    missing = [f"{n}: {bench.failures[f'mb_{n}']}" for n in wanted if f"mb_{n}" in bench.failures]
    calls = {
        name: tuple(Call(f"mb_{name}", blocks, trips, extra=7) for trips in TRIPS)
        for name in wanted
        if f"mb_{name}" not in bench.failures
    }
    steps = blocks * THREADS * CHAINS * INNER
    seconds = bench.slopes(calls)
    return {name: steps * RESULTS.get(name, 1) / t for name, t in seconds.items()}, missing


def measure(bench: CudaBench) -> Finding:
    """Rates of arithmetic."""
    found, missing = rates(bench)
    values = [
        Measured(field, factor * found[name], how)
        for field, name, factor, how in (
            ("fma_per_s_f32", "fma", 2.0, "multiply-adds of float32"),
            ("special_per_s", "exp2", 1.0, "ex2, one instruction of the special-function unit"),
            ("conversion_per_s", "convert", 1.0, "float32 to float16 and back"),
            ("int_per_s", "int_multiply_add", 1.0, "multiply-adds of int32"),
            ("int_div_per_s", "int_divide", 1.0, "division of int32 by a run-time value"),
        )
        if name in found
    ]
    if "exp2" in found:
        slots = {n: round(found["exp2"] / found[n], 2) for n in SPECIAL if n in found}
        how = "time of the forms that the writer emits for half precision, relative to ex2"
        values.append(Measured("special_slots", slots, how))
    clock = bench.hw.clock_ghz * 1e9 * bench.hw.num_sms
    note = "results a clock and multiprocessor: " + ", ".join(
        f"{name} {rate / clock:.3g}" for name, rate in found.items()
    )
    return Finding(values, [note], missing)


FAMILY = Family(
    "arithmetic",
    "rates of arithmetic",
    ARITHMETIC,
    measure,
    kernels,
)
