"""ONNX operators that TVM's importer lacks or gets wrong, as others that it has: products of
quantised numbers are of int32 and scaled in the end; the others are compositions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import numpy_helper

from .nodes import FLOAT, INT32, Expansion, Nodes
from .recurrent import RECURRENT

# ---- Products of quantised numbers: of int32, and scaled in the end.


def _q_linear_matmul(n: Nodes) -> bool:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = map(n.input, range(8))
    product = n("MatMulInteger", a, b, a_zero, b_zero)
    real = n("Mul", n("Cast", product, to=FLOAT), _real(n, n("Mul", a_scale, b_scale)))
    n("QuantizeLinear", real, _real(n, y_scale), y_zero, result=n.output(0))
    return True


def _q_linear_conv(n: Nodes) -> bool:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = map(n.input, range(9))
    rank = len(n.shape(w)) or 2 + len(n.attributes.get("kernel_shape", (1, 1)))
    per_filter = [-1] + [1] * (rank - 2)
    given = [_centred(n, x, x_zero), _centred(n, w, w_zero, [-1] + [1] * (rank - 1))]
    given += [bias] if bias else []
    product = n("Conv", *given, **n.attributes)
    scale = _real(n, n("Mul", x_scale, _per_filter(n, w_scale, per_filter)))
    real = n("Mul", n("Cast", product, to=FLOAT), scale)
    n("QuantizeLinear", real, _real(n, y_scale), y_zero, result=n.output(0))
    return True


def _conv_integer(n: Nodes) -> bool:
    x, w, x_zero, w_zero = map(n.input, range(4))
    rank = len(n.shape(w)) or 2 + len(n.attributes.get("kernel_shape", (1, 1)))
    given = _centred(n, x, x_zero), _centred(n, w, w_zero, [-1] + [1] * (rank - 1))
    n("Conv", *given, result=n.output(0), **n.attributes)
    return True


def _centred(n: Nodes, x: str, zero: str, shape: Sequence[int] = ()) -> str:
    """x - zero, in int32."""
    whole = n("Cast", x, to=INT32)
    if not zero:
        return whole
    return n("Sub", whole, _per_filter(n, n("Cast", zero, to=INT32), shape, n.shape(zero)))


def _per_filter(
    n: Nodes, x: str, shape: Sequence[int], known: Sequence[int | None] | None = None
) -> str:
    """A number, or one a filter, beside what a convolution reads or gives."""
    known = n.shape(x) if known is None else known
    one = math.prod(size or 0 for size in known) == 1
    return x if one or not shape else n("Reshape", x, n.integers(*shape))


def _real(n: Nodes, x: str) -> str:
    return n("Cast", x, to=FLOAT)


# ---- Others.


def _constant(n: Nodes) -> bool:
    """A constant that is given as a number, or as several."""
    name, value = next(iter(n.attributes.items()), ("", None))
    if name not in ("value_float", "value_floats", "value_int", "value_ints"):
        return False
    array = np.array(value, "float32" if "float" in name else "int64")
    n("Constant", value=numpy_helper.from_array(array), result=n.output(0))
    return True


def _lp_normalization(n: Nodes) -> bool:
    x, axis = n.input(0), n.attributes.get("axis", -1)
    by = "ReduceL1" if n.attributes.get("p", 2) == 1 else "ReduceL2"
    norm = n(by, x, n.integers(axis), keepdims=1)
    none = n("Equal", norm, n("Sub", norm, norm))
    n("Div", x, n("Where", none, n("Exp", n("Sub", norm, norm)), norm), result=n.output(0))
    return True


def _is_infinite(n: Nodes) -> bool:
    """IsInf of one sign only."""
    signs = [n.attributes.get(f"detect_{sign}", 1) for sign in ("positive", "negative")]
    if all(signs) or not any(signs):
        return False
    x = n.input(0)
    zero = n("Cast", n.constant(np.float32(0)), to=n.values.types.get(x, FLOAT))
    of_sign = n("Greater" if signs[0] else "Less", x, zero)
    n("And", n("IsInf", x), of_sign, result=n.output(0))
    return True


def _power(n: Nodes) -> bool:
    """Powers of two types have that of the base; of integers they are computed in float64."""
    x, y = n.input(0), n.input(1)
    kinds = [n.values.types.get(name, FLOAT) for name in (x, y)]
    integers = kinds[0] in (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
    if kinds[0] == kinds[1] and not integers:
        return False
    wide = onnx.TensorProto.DOUBLE if integers else kinds[0]
    found = n("Pow", n("Cast", x, to=wide), n("Cast", y, to=wide))
    n("Cast", n("Round", found) if integers else found, to=kinds[0], result=n.output(0))
    return True


def _reverse_sequence(n: Nodes) -> bool:
    """Elements before the end of each sequence in reversed order; what lies behind it stays."""
    x, lengths = n.input(0), n.input(1)
    by, along = n.attributes.get("batch_axis", 1), n.attributes.get("time_axis", 0)
    shape = n.shape(x)
    if not shape or None in shape:
        n.refuse("a tensor of unknown shape; export it with numbers as sizes")
    row = [1] * len(shape)
    row[along] = shape[along]
    t = n.constant(np.arange(shape[along], dtype="int64").reshape(row))
    row = [1] * len(shape)
    row[by] = shape[by]
    end = n("Reshape", lengths, n.integers(*row))
    turned = n("Sub", n("Sub", end, n.constant(np.int64(1))), t)
    place = n("Where", n("Less", t, end), turned, t)
    n("GatherElements", x, n("Expand", place, n.integers(*shape)), axis=along, result=n.output(0))
    return True


EXPANSIONS: dict[str, Expansion] = {
    **RECURRENT,
    "Constant": _constant,
    "ConvInteger": _conv_integer,
    "IsInf": _is_infinite,
    "LpNormalization": _lp_normalization,
    "Pow": _power,
    "QLinearConv": _q_linear_conv,
    "QLinearMatMul": _q_linear_matmul,
    "ReverseSequence": _reverse_sequence,
}
