"""CPU kernels with symbolic extents: compiled once, right for every size."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.relax import op

from tvm_fusion.kernels.cpu.write import write_cpu

from ...support.cpu_cases import (
    add_rms_norm,
    attention,
    attention_of,
    gate_up,
    gate_up_of,
    row_and_column_sums,
)
from ...support.helpers_tir import call, compile_cpu, poisoned
from ...support.kernel_cases import assert_close, fuse, gelu_of, rms_of, softmax_of

SIZES = [{"n": 1, "m": 3}, {"n": 37, "m": 41}, {"n": 130, "m": 64}]


def product(bb, x, w):
    return op.matmul(x, w)


def bias_gelu(bb, x, w, b):
    return op.nn.gelu(bb.emit(op.add(bb.emit(op.matmul(x, w)), b)))


def product_of(x, w):
    return [x @ w]


# name: graph, shapes of the inputs, shapes of the outputs, reference
CASES = {
    "softmax": (
        lambda bb, x: op.nn.softmax(x),
        [("n", "m")],
        [("n", "m")],
        lambda x: [softmax_of(x)],
    ),
    "gelu": (lambda bb, x: op.nn.gelu(x), [("n", "m")], [("n", "m")], lambda x: [gelu_of(x)]),
    "turned": (
        lambda bb, x, y: op.add(bb.emit(op.permute_dims(x)), y),
        [("n", "m"), ("m", "n")],
        [("m", "n")],
        lambda x, y: [x.T + y],
    ),
    "add_rms_norm": (
        add_rms_norm,
        [("n", 64), ("n", 64), (64,)],
        [("n", 64), ("n", 64)],
        lambda x, r, g: [x + r, rms_of(x + r, g)],
    ),
    "rows of a product": (
        bias_gelu,
        [("n", 33), (33, 48), (48,)],
        [("n", 48)],
        lambda x, w, b: [gelu_of(x @ w + b)],
    ),
    "columns of a product": (product, [("m", 37), (37, "n")], [("m", "n")], product_of),
    "terms of a product": (product, [(37, "n"), ("n", 48)], [(37, 48)], product_of),
    "gate_up": (gate_up, [("n", 20), (20, 45), (20, 45)], [("n", 45)], gate_up_of),
    "attention": (
        attention,
        [(2, 3, "n", 16), (2, 3, "m", 16), (2, 3, "m", 24), (2, 1, "n", "m")],
        [(2, 3, "n", 24)],
        attention_of,
    ),
    "sums": (
        row_and_column_sums,
        [("n", "m")],
        [("m",), ("n",), ("n", "m")],
        lambda x: [np.exp(x).mean(0), np.exp(x).mean(1), np.exp(x) * x],
    ),
    "concat": (
        lambda bb, x, y: op.nn.relu(bb.emit(op.concat([x, y], axis=1))),
        [(5, "n"), (5, "m")],
        [(5, "n+m")],
        lambda x, y: [np.maximum(np.concatenate([x, y], 1), 0)],
    ),
    "largest": (lambda bb, x: op.argmax(x), [("n", "m")], [()], lambda x: [x.argmax()]),
}


def extent(size, values):
    """An extent: a number, a name, or a sum of names."""
    return size if isinstance(size, int) else sum(values[name] for name in size.split("+"))


# Attention of symbolic sizes runs always in `test_attention`; LLVM compiles it for 15 s.
NAMES = [pytest.param(n, marks=pytest.mark.nightly) if n == "attention" else n for n in CASES]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_one_kernel_serves_every_size(name, dtype):
    emit, inputs, outputs, reference = CASES[name]
    symbols = {n: tirx.Var(n, "int64") for n in ("n", "m")}
    func = fuse(emit, *(([extent(s, symbols) for s in shape], dtype) for shape in inputs))
    kernel = compile_cpu(write_cpu(func))
    types = [str(p.ty.dtype) for p in func.params[len(inputs) :]]
    for values in SIZES:
        rng = np.random.default_rng(0)
        shapes = [[extent(s, values) for s in shape] for shape in inputs]
        arrays = [rng.standard_normal(s).astype(dtype) for s in shapes]
        results = [
            poisoned([extent(s, values) for s in shape], d)
            for shape, d in zip(outputs, types, strict=True)
        ]
        expected = reference(*(a.astype("float64") for a in arrays))
        for got, want in zip(call(kernel, arrays, results), expected, strict=True):
            assert_close(got, want, str(got.dtype))


def test_a_kernel_may_run_on_no_rows():
    n = tirx.Var("n", "int64")
    func = fuse(bias_gelu, ([n, 33], "float32"), ([33, 48], "float32"), ([48], "float32"))
    kernel = compile_cpu(write_cpu(func))
    arrays = [np.zeros(s, "float32") for s in ((0, 33), (33, 48), (48,))]
    (got,) = call(kernel, arrays, [np.zeros((0, 48), "float32")])
    assert got.shape == (0, 48)


def test_symbolic_variables_that_no_input_shows_are_parameters():
    n = tirx.Var("n", "int64")

    def emit(bb, x):
        return op.add(bb.emit(op.reshape(x, (n, 4))), relax.const(1.0, "float32"))

    func = fuse(emit, ([n * 4], "float32"))
    kernel = compile_cpu(write_cpu(func))
    scalars = [p for p in func.params if not isinstance(p.ty, tirx.BufferType)]
    for rows in (1, 37):
        x = np.arange(rows * 4, dtype="float32")
        (got,) = call(kernel, [x], [poisoned((rows, 4), "float32")], *[rows for _ in scalars])
        np.testing.assert_array_equal(got, x.reshape(rows, 4) + 1)
