"""Constants of float64 in CUDA kernels, by their bits where TVM would round them.

    y[i] = x[i] * 0.006451612903225806      y[i] = x[i] * __longlong_as_double(4574...)

TVM prints a constant of float64 with fifteen decimals (1 / 155 as 0.006451612903226, 1e-20 as 0),
those of float32 exactly.
"""

import math
import struct

import tvm
from tvm import tirx

from ...kernels.program.expr import dtype_of
from ...transform.functions.functions import rewritten, target_kind

_PRINTED = ".15f"


def with_exact_doubles(mod: tvm.IRModule) -> tvm.IRModule:
    """Return lowered functions in which no kernel of a CUDA device has a rounded constant."""
    return rewritten(mod, [(tirx.FloatImm, _by_bits)], lambda func: target_kind(func) == "cuda")


def _by_bits(constant: tirx.FloatImm) -> tirx.FloatImm | tvm.ir.Call:
    value = float(constant.value)
    if dtype_of(constant) != "float64" or not math.isfinite(value):  # infinities and NaN have names
        return constant
    if float(format(value, _PRINTED)) == value:
        return constant
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return tirx.call_pure_extern("float64", "__longlong_as_double", tirx.IntImm("int64", bits))
