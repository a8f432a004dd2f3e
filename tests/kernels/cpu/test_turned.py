"""Light arithmetic on transposed operands: computed on squares that are turned in registers."""

import numpy as np
import pytest
import tvm
from tvm.relax import op

from tests.support.machine_programs import TARGETS
from tvm_fusion.kernels.cpu.write import write_cpu

from ...support.helpers_tir import call, compile_cpu
from ...support.kernel_cases import assert_close, fuse, numpy_dtype, outputs_of


def added(bb, x, y):
    return op.add(bb.emit(op.permute_dims(x)), y)


def twice_turned(bb, x, y):
    a, b = bb.emit(op.permute_dims(x)), bb.emit(op.permute_dims(y))
    return op.subtract(bb.emit(op.add(a, a)), b)


def row_and_scale(bb, x, y):
    turned = bb.emit(op.permute_dims(x))
    return op.multiply(bb.emit(op.add(turned, y)), bb.emit(op.subtract(y, turned)))


def selected(bb, x, y):
    turned = bb.emit(op.permute_dims(x))
    return op.where(bb.emit(op.greater(turned, y)), turned, y)


def normalised(bb, x, y):
    return op.nn.softmax(bb.emit(op.add(bb.emit(op.permute_dims(x)), y)))


def softmax_of(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


GRAPHS = {
    "added": (added, True, lambda x, y: x.T + y),
    "twice": (twice_turned, False, lambda x, y: 2 * x.T - y.T),
    "rows": (row_and_scale, True, lambda x, y: (x.T + y) * (y - x.T)),
    "selected": (selected, True, lambda x, y: np.maximum(x.T, y)),
    "normalised": (normalised, True, lambda x, y: softmax_of(x.T + y)),
}
SHAPES = [(16, 33), (15, 40), (1, 37), (131, 100)]


def check(name, shape, dtype, target=None):
    emit, turns, reference = GRAPHS[name]
    other = shape[::-1] if turns else shape
    func = fuse(emit, (shape, dtype), (other, dtype))
    rng = np.random.default_rng(0)
    drawn = [rng.standard_normal(s) * 3 for s in (shape, other)]
    arrays = [x.astype(numpy_dtype(dtype)) for x in drawn]
    if target is None:
        kernel = compile_cpu(write_cpu(func))
    else:
        with target:
            kernel = compile_cpu(write_cpu(func), target)
    (got,) = call(kernel, arrays, outputs_of(func, 2))
    exact = [x if x.dtype.kind in "iu" else x.astype("float64") for x in arrays]
    assert_close(got, reference(*exact), dtype)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", GRAPHS)
def test_arithmetic_on_a_transposed_operand_is_right(name, shape):
    check(name, shape, "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "int64"])
@pytest.mark.parametrize("name", ["twice"])
def test_arithmetic_on_a_transposed_operand_is_right_in_every_type(name, dtype):
    check(name, (39, 50), dtype)


@pytest.mark.parametrize("cpu", ["x86-64", "haswell"])
@pytest.mark.parametrize("name", ["added", "twice"])
def test_arithmetic_on_a_transposed_operand_is_right_with_narrow_vectors(name, cpu):
    if not tvm.target.codegen.llvm_get_system_triple().startswith("x86_64"):
        pytest.skip("runs x86-64 code")
    check(name, (39, 50), "float32", tvm.target.Target(TARGETS[cpu]))


@pytest.mark.parametrize("shape", [(64, 64), (131, 100)])
def test_light_arithmetic_needs_no_copy(shape):
    func = write_cpu(fuse(added, (shape, "float32"), (shape[::-1], "float32")))
    assert "_copy = T.alloc_buffer" not in func.script()


def test_heavy_arithmetic_reads_a_copy():
    def emit(bb, x, y):
        return op.add(bb.emit(op.tanh(bb.emit(op.permute_dims(x)))), y)

    func = write_cpu(fuse(emit, ((64, 65), "float32"), ((65, 64), "float32")))
    assert "_copy = T.alloc_buffer" in func.script()


def test_arithmetic_on_a_transposed_operand_of_unknown_length_is_right():
    n = tvm.tirx.Var("n", "int64")
    kernel = compile_cpu(write_cpu(fuse(added, ((n, 40), "float32"), ((40, n), "float32"))))
    rng = np.random.default_rng(0)
    for rows in (3, 16, 37):
        x, y = (rng.standard_normal(s).astype("float32") for s in ((rows, 40), (40, rows)))
        (got,) = call(kernel, [x, y], [np.full((40, rows), np.nan, "float32")])
        np.testing.assert_array_equal(got, x.T + y)
