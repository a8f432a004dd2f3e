"""Fused PrimFuncs with float64 references, for the tests of analysis and kernel writers.

A case is a Relax graph that becomes one PrimFunc, its inputs, and NumPy code for what it must
compute.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax import op

Emit = Callable[..., Any]


def fuse(emit: Emit, *inputs: tuple[Sequence[Any], str]) -> tirx.PrimFunc:
    """Builds a Relax graph with `emit(block_builder, *vars)` and fuses all of it into one PrimFunc.

    `inputs` holds shape and dtype of each parameter.
    """
    bb = relax.BlockBuilder()
    params = [relax.Var(f"p{i}", relax.TensorType(s, d)) for i, (s, d) in enumerate(inputs)]
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(emit(bb, *params))
        bb.emit_func_output(out)
    mod = relax.transform.LegalizeOps()(bb.get())
    main = mod["main"]
    group = relax.Function(main.params, main.body, main.ret_ty, is_pure=True)
    group = relax.utils.copy_with_new_vars(group.with_attr("Primitive", True))
    others = {g: f for g, f in mod.functions.items() if g.name_hint != "main"}
    bb = relax.BlockBuilder(tvm.IRModule(others))
    fused = bb.add_func(group, "fused")
    args = [relax.Var(f"q{i}", relax.TensorType(s, d)) for i, (s, d) in enumerate(inputs)]
    with bb.function("main", args):
        with bb.dataflow():
            out = bb.emit_output(relax.Call(fused, args))
        bb.emit_func_output(out)
    mod = relax.transform.FuseTIR()(bb.get())
    (func,) = (f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc))
    return func


@dataclass(frozen=True)
class Case:
    """One fused PrimFunc.

    `reference` maps float64 (or integer, or bool) inputs to the list of outputs. `make` overrides
    the random input of a parameter by number.
    """

    name: str
    emit: Emit
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    reference: Callable[..., list[np.ndarray]]
    make: dict[int, Callable[[np.random.Generator], np.ndarray]] = field(default_factory=dict)

    def func(self) -> tirx.PrimFunc:
        """The fused PrimFunc."""
        return fuse(self.emit, *self.inputs)

    def arrays(self) -> list[np.ndarray]:
        """Inputs, equal in every run."""
        rng = np.random.default_rng(0)
        return [
            self.make[i](rng) if i in self.make else _random(rng, shape, dtype)
            for i, (shape, dtype) in enumerate(self.inputs)
        ]

    def expected(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Outputs in float64."""
        return self.reference(*(_exact(a) for a in arrays))


def numpy_dtype(dtype: str) -> np.dtype:
    """The NumPy dtype of a TVM dtype."""
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.startswith(("int", "uint")):
        return rng.integers(0, 4, shape).astype(dtype)
    return rng.standard_normal(shape).astype(numpy_dtype(dtype))


def _exact(array: np.ndarray) -> np.ndarray:
    floating = array.dtype == ml_dtypes.bfloat16 or array.dtype.kind == "f"
    return array.astype(np.float64) if floating else array


def outputs_of(func: tirx.PrimFunc, inputs: int) -> list[np.ndarray]:
    """Output arrays of a static PrimFunc, poisoned: NaN, or the largest integer."""
    arrays = []
    for param in func.params[inputs:]:
        dtype = numpy_dtype(str(param.ty.dtype))
        shape = [int(extent) for extent in param.ty.shape]
        if dtype.kind in "iu":
            arrays.append(np.full(shape, np.iinfo(dtype).max, dtype))
        else:
            arrays.append(np.full(shape, 1 if dtype.kind == "b" else np.nan, dtype))
    return arrays


TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}
"""Allowed error relative to the largest reference value: about two roundings of the output."""


def assert_close(got: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    """Integers and bools equal, floats close, infinities and NaNs where the reference has them."""
    expected = np.asarray(expected).reshape(got.shape)
    if dtype not in TOLERANCE:
        np.testing.assert_array_equal(got, expected)
        return
    got = got.astype(np.float64)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(got[~finite], expected[~finite])
    assert np.isfinite(got[finite]).all()
    if finite.any():
        scale = max(1e-30, float(np.abs(expected[finite]).max()))
        error = float(np.abs(got[finite] - expected[finite]).max()) / scale
        assert error <= TOLERANCE[dtype], f"error {error:.1e} of the largest value"


# ---- float64 references


def softmax_of(x: np.ndarray) -> np.ndarray:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def erf(x: np.ndarray) -> np.ndarray:
    """Error function."""
    return np.vectorize(math.erf)(x)


def gelu_of(x: np.ndarray) -> np.ndarray:
    """Exact gelu."""
    return 0.5 * x * (1 + erf(x / 2**0.5))


def rms_of(x: np.ndarray, gamma: np.ndarray) -> np.ndarray:
    """RMSNorm over the last axis."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gamma


# ---- graphs


def chain(bb, x):
    """Four elementwise operators."""
    a = bb.emit(op.multiply(x, relax.const(0.5, str(x.ty.dtype))))
    return op.nn.relu(bb.emit(op.add(bb.emit(op.exp(a)), x)))


def half_softmax(bb, x):
    """Softmax written out, one operator a line, as a decomposition leaves it."""
    top = bb.emit(op.max(x, axis=-1, keepdims=True))
    e = bb.emit(op.exp(bb.emit(op.subtract(x, top))))
    return op.divide(e, bb.emit(op.sum(e, axis=-1, keepdims=True)))


def rotate_half(bb, x):
    """RoPE's ``concat(-x[..., D/2:], x[..., :D/2])``."""
    axis = len(x.ty.shape) - 1
    size = int(x.ty.shape[axis])
    high = bb.emit(op.strided_slice(x, [axis], [size // 2], [size]))
    low = bb.emit(op.strided_slice(x, [axis], [0], [size // 2]))
    return op.concat([bb.emit(op.negative(high)), low], axis=-1)


def rope(bb, x, cos, sin):
    """x * cos + rotate_half(x) * sin."""
    turned = bb.emit(op.multiply(bb.emit(rotate_half(bb, x)), sin))
    return op.add(bb.emit(op.multiply(x, cos)), turned)
