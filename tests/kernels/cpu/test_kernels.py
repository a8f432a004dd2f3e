"""CPU kernels compute what the graph says: against float64, in all dtypes, with odd shapes."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm.relax import op

import tvm_fusion
from tvm_fusion.config import load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.cpu.write import write_cpu

from ...benchmarks.plans.random_graphs import module_of
from ...support.cpu_cases import cases
from ...support.helpers_tir import call, compile_cpu, poisoned
from ...support.kernel_cases import Case, assert_close, fuse, outputs_of

CASES = {(c.name, d): c for d in ("float32", "float16", "bfloat16") for c in cases(d)}


def run(case: Case, exact: bool = False, arrays=None) -> list[np.ndarray]:
    """Outputs of a case as the CPU kernel computes them."""
    func = case.func()
    kernel = compile_cpu(write_cpu(func, exact, load_profile("llvm")))
    return call(kernel, arrays or case.arrays(), outputs_of(func, len(case.inputs)))


def check(case: Case, dtype: str, exact: bool = False) -> None:
    """Compare a case with float64."""
    for got, expected in zip(run(case, exact), case.expected(case.arrays()), strict=True):
        assert_close(got, expected, str(got.dtype) if got.dtype.kind in "iub" else dtype)


@pytest.mark.one_in(64)
@pytest.mark.parametrize("name", [n for n, d in CASES if d == "float32"])
def test_float32_results_are_close_to_float64(name):
    check(CASES[name, "float32"], "float32")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [n for n, d in CASES if d == "float16"])
def test_float16_results_are_rounded_once(name):
    check(CASES[name, "float16"], "float16")


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "float32"])
def test_a_number_is_not_taken_for_an_equal_one_of_another_type(dtype):
    """The largest index of a flipped axis is the number of the selection, in another type."""

    def choice(mask: te.Tensor, x: te.Tensor) -> te.Tensor:
        return te.compute(
            x.shape, lambda i, j: tirx.Select(mask[0, j], x[i, j], tirx.const(2, dtype))
        )

    def emit(bb, mask, x):
        turned = bb.emit(op.flip(bb.emit(op.flip(bb.emit_te(choice, mask, x), 0)), 1))
        return op.add(bb.emit(op.astype(turned, "float32")), relax.const(2, "float32"))

    def reference(mask, x):
        return [np.where(mask, x, 2)[::-1, ::-1] + 2]

    check(Case("flip", emit, (((1, 3), "bool"), ((33, 3), dtype)), reference), "float32")


SOME = ["broadcast_chain", "softmax", "layer_norm", "matmul_bias_gelu", "attention", "conv"]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "name", [n for n in SOME if n != "layer_norm"] + ["add_rms_norm", "concat"]
)
def test_bfloat16_results_are_rounded_once(name):
    check(CASES[name, "bfloat16"], "bfloat16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_exact_mode_rounds_after_every_operation(dtype):
    def emit(bb, x):
        large = bb.emit(op.add(x, relax.const(64.0, dtype)))
        return op.subtract(large, relax.const(64.0, dtype))

    case = Case("rounding", emit, (((64, 33), dtype),), lambda x: [x])
    (x,) = case.arrays()
    kind = x.dtype.type
    expected = ((x + kind(64)).astype(x.dtype) - kind(64)).astype(x.dtype)
    exact, fast = run(case, True)[0], run(case, False)[0]
    np.testing.assert_array_equal(exact.astype("float64"), expected.astype("float64"))
    assert np.abs(fast.astype("float64") - x.astype("float64")).max() < 1e-3
    assert np.abs(exact.astype("float64") - x.astype("float64")).max() > 1e-2


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", SOME)
def test_exact_mode_is_close_to_float64(name):
    case = CASES[name, "float16"]
    for got, expected in zip(run(case, True), case.expected(case.arrays()), strict=True):
        error = np.abs(got.astype("float64") - expected.reshape(got.shape)).max()
        assert error <= 1e-2 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_masked_rows_are_what_unfused_operators_give(dtype):
    case = CASES["softmax", dtype]
    (x,) = case.arrays()
    x[0, 3:] = -np.inf
    x[1] = -np.inf
    (got,) = run(case, arrays=[x])
    assert np.isnan(got[1]).all()
    np.testing.assert_array_equal(got[0, 3:], 0)
    np.testing.assert_allclose(got[0].astype("float64").sum(), 1, rtol=1e-3)


def test_infinities_and_nan_pass_through_a_product():
    case = CASES["matmul_bias_gelu", "float32"]
    x, w, b = case.arrays()
    x[2, 5], x[4, 1] = np.nan, np.inf
    (got,) = run(case, arrays=[x, w, b])
    assert np.isnan(got[2]).all()
    assert not np.isfinite(got[4]).all()
    assert np.isfinite(np.delete(got, [2, 4], 0)).all()


INTEGER_CASES = {
    "product of bytes": (
        lambda bb, x, y: op.matmul(x, y, out_dtype="int32"),
        (((33, 40), "int8"), ((40, 50), "int8")),
        lambda x, y: x.astype("int32") @ y.astype("int32"),
    ),
    "wrapping sum": (
        lambda bb, x, y: op.add(bb.emit(op.multiply(x, y)), x),
        (((33, 17), "int32"), ((33, 17), "int32")),
        lambda x, y: x * y + x,
    ),
    "sum of int64": (
        lambda bb, x: op.sum(x, axis=1),
        (((33, 17), "int64"),),
        lambda x: x.sum(1),
    ),
    "logic": (
        lambda bb, x, y: op.logical_and(
            bb.emit(op.greater(x, y)), bb.emit(op.logical_not(bb.emit(op.equal(x, y))))
        ),
        (((33, 17), "float32"), ((33, 17), "float32")),
        lambda x, y: (x > y) & (x != y),
    ),
}


@pytest.mark.parametrize("name", INTEGER_CASES)
def test_integers_and_bools_are_exact(name):
    emit, inputs, reference = INTEGER_CASES[name]
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(s).astype(d) if d == "float32" else rng.integers(-128, 128, s).astype(d)
        for s, d in inputs
    ]
    if name == "wrapping sum":
        arrays[0][0] = 2**30
    case = Case(name, emit, inputs, lambda *a: [])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(run(case, arrays=arrays)[0], reference(*arrays))


def test_float64_stays_float64():
    emit = lambda bb, x, w: op.nn.softmax(bb.emit(op.matmul(x, w)))  # noqa: E731
    case = Case("softmax", emit, (((9, 20), "float64"), ((20, 33), "float64")), lambda x, w: [])
    x, w = case.arrays()
    e = np.exp(x @ w)
    np.testing.assert_allclose(run(case)[0], e / e.sum(-1, keepdims=True), rtol=1e-12)


@pytest.mark.parametrize(
    "name", ["softmax", "matmul_bias_gelu", "mean_of_all_squares", "attention", "conv"]
)
def test_equal_input_gives_equal_output(name):
    case = CASES[name, "float32"]
    kernel = compile_cpu(write_cpu(case.func()))
    runs = [
        call(kernel, case.arrays(), outputs_of(case.func(), len(case.inputs))) for _ in range(3)
    ]
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["softmax", "matmul", "conv", "row_and_column_means"])
def test_writing_twice_gives_the_same_kernel(name):
    func = CASES[name, "float32"].func()
    assert tvm_ffi.structural_equal(write_cpu(func), write_cpu(func))


def test_parameters_attributes_and_input_stay_as_they_are():
    func = CASES["matmul_bias_gelu", "float32"].func().with_attr("global_symbol", "fused_kernel")
    before = func.script()
    kernel = write_cpu(func)
    assert all(a.same_as(b) for a, b in zip(func.params, kernel.params, strict=True))
    assert kernel.attrs["global_symbol"] == "fused_kernel"
    assert kernel.attrs["tirx.is_scheduled"]
    assert kernel.attrs["tirx.noalias"]
    assert int(kernel.attrs["op_pattern"]) == 8
    assert "tvm_fusion.tirx" not in kernel.attrs
    assert func.script() == before


def test_rematerialised_values_may_also_be_outputs():
    def emit(bb, x):
        e = bb.emit(op.exp(x))
        return relax.Tuple([bb.emit(op.tanh(e)), bb.emit(op.mean(e, axis=-1)), e])

    case = Case("remat", emit, (((37, 65), "float32"),), lambda x: [])
    (x,) = case.arrays()
    tanh, mean, e = run(case)
    e64 = np.exp(x.astype("float64"))
    np.testing.assert_allclose(e, e64, rtol=1e-6)
    np.testing.assert_allclose(tanh, np.tanh(e64), rtol=1e-6)
    np.testing.assert_allclose(mean, e64.mean(-1), rtol=1e-6)


def test_hand_written_blocks_with_int32_indices_work():
    x = te.placeholder((33, 20), "float32", name="x")
    k = te.reduce_axis((0, 20), name="k")
    total = te.compute((33,), lambda i: te.sum(x[i, k] * x[i, k], axis=k), name="total")
    y = te.compute((33, 20), lambda i, j: x[i, j] / total[i], name="y")
    kernel = compile_cpu(write_cpu(te.create_prim_func([x, y])))
    a = np.random.default_rng(0).standard_normal((33, 20)).astype("float32")
    (got,) = call(kernel, [a], [poisoned((33, 20), "float32")])
    np.testing.assert_allclose(got, a / (a * a).sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cpu", ["x86-64", "haswell"])
@pytest.mark.parametrize("name", ["softmax", "matmul_bias_gelu", "conv", "argmax"])
def test_kernels_for_older_processors_are_right(name, cpu):
    if tvm.target.codegen.llvm_get_system_triple().split("-")[0] != "x86_64":
        pytest.skip("runs x86-64 code")
    target = tvm.target.Target({"kind": "llvm", "mcpu": cpu, "num-cores": 2})
    case = CASES[name, "float16"]
    with target:
        func = write_cpu(case.func())
    got = call(compile_cpu(func, target), case.arrays(), outputs_of(func, len(case.inputs)))
    for a, b in zip(got, case.expected(case.arrays()), strict=True):
        assert_close(a, b, str(a.dtype))


REFUSED = {
    "scatter": (
        lambda bb, x, i, u: op.scatter_elements(x, i, u),
        (((4, 20), "float32"), ((4, 20), "int64"), ((4, 20), "float32")),
    ),
    "windows of different lengths": (
        lambda bb, x: op.nn.adaptive_avg_pool2d(x, (3, 3)),
        (((2, 5, 7, 7), "float32"),),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_tensor_expression_is_refused(name):
    emit, inputs = REFUSED[name]
    with pytest.raises(Unsupported):
        write_cpu(fuse(emit, *inputs))


def test_a_scheduled_function_is_refused():
    from tvm import s_tir

    x = te.placeholder((64,), "float32", name="x")
    func = te.create_prim_func([x, te.compute((64,), lambda i: x[i] + 1.0, name="y")])
    schedule = s_tir.Schedule(func)
    (loop,) = schedule.get_loops("y")
    schedule.split(loop, [None, 8])
    with pytest.raises(Unsupported, match="bound to"):
        write_cpu(schedule.mod["main"])


FUNCTIONS = {
    "exp": (op.exp, np.exp, 1.0),
    "log": (op.log, np.log, 1.0),
    "tanh": (op.tanh, np.tanh, 1.5),
    "erf": (op.erf, np.vectorize(math.erf), 1.75),
    "sigmoid": (op.sigmoid, lambda x: 1 / (1 + np.exp(-x)), 2.0),
    "rsqrt": (op.rsqrt, lambda x: 1 / np.sqrt(x), 2.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_accurate_to_units_in_the_last_place(name):
    emit, reference, most_ulps = FUNCTIONS[name]
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3e38, -3e38, 88.7, -104.5]
    x = np.concatenate([np.linspace(-87, 88, 20011), np.linspace(-2, 2, 20011), special])
    x = x.astype("float32")
    case = Case(name, lambda bb, v: emit(v), ((x.shape, "float32"),), lambda v: [])
    got = run(case, arrays=[x])[0].astype("float64")
    with np.errstate(all="ignore"):
        expected = reference(x.astype("float64"))
        nearest = expected.astype("float32")
    np.testing.assert_array_equal(np.isnan(got), np.isnan(nearest))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(nearest))
    finite = np.isfinite(nearest)
    unit = np.spacing(np.maximum(np.abs(nearest[finite]), np.finfo("float32").tiny))
    assert (np.abs(got[finite] - expected[finite]) / unit).max() <= most_ulps


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cpu", ["x86-64", "haswell", None])
@pytest.mark.parametrize("name", ["exp", "tanh", "erf", "sigmoid"])
def test_functions_are_accurate_with_any_instructions(name, cpu):
    if cpu and tvm.target.codegen.llvm_get_system_triple().split("-")[0] != "x86_64":
        pytest.skip("runs x86-64 code")
    emit, reference, most_ulps = FUNCTIONS[name]
    target = tvm.target.Target({"kind": "llvm", "mcpu": cpu}) if cpu else None
    x = np.concatenate([np.linspace(-12, 12, 200_003), np.geomspace(1e-42, 1, 50_000)])
    x = np.concatenate([x, -x]).astype("float32")
    with target or contextlib.nullcontext():
        func = write_cpu(fuse(lambda bb, v: emit(v), (x.shape, "float32")))
    (got,) = call(compile_cpu(func, target), [x], [poisoned(x.shape, "float32")])
    expected = reference(x.astype("float64"))
    unit = np.spacing(np.maximum(np.abs(expected.astype("float32")), np.finfo("float32").tiny))
    assert (np.abs(got - expected) / unit).max() <= most_ulps


@pytest.mark.parametrize("emit", [op.tanh, op.erf])
def test_odd_functions_keep_the_sign_of_zero(emit):
    x = np.array([0.0, -0.0] * 50, "float32")
    case = Case("zeros", lambda bb, v: emit(v), ((x.shape, "float32"),), lambda v: [])
    (got,) = run(case, arrays=[x])
    np.testing.assert_array_equal(np.signbit(got), np.signbit(x))


def test_scalar_parameters_may_be_used_in_blocks():
    n = tirx.Var("n", "int64")
    x = te.placeholder((n, 8), "float32", name="x")
    y = te.compute((n, 8), lambda i, j: x[i, j] * n.astype("float32"), name="y")
    func = te.create_prim_func([x, y])
    func = tirx.PrimFunc([*func.params, n], func.body, func.ret_type, func.attrs)
    kernel = compile_cpu(write_cpu(func))
    for rows in (1, 37):
        a = np.random.default_rng(0).standard_normal((rows, 8)).astype("float32")
        (got,) = call(kernel, [a], [poisoned(a.shape, "float32")], rows)
        np.testing.assert_array_equal(got, a * np.float32(rows))


def test_a_rounding_under_a_condition_is_computed_in_float32():
    """A variable of type bfloat16 in a kernel is what LLVM refuses."""
    mod = module_of("random-small:1030:24")
    compiled = tvm_fusion.compile(mod, "llvm", policy="conservative", verify=True)
    assert not [r for r in compiled.plan.refusals if r.code.value in ("writer", "build")]
    assert any({"sum5_out", "lv13"} <= set(g.ops) for g in compiled.plan.groups)
    assert compiled.report.verify.passed
