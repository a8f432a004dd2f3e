"""Special functions of CUDA kernels: errors over all half-precision numbers, instruction counts."""

import math

import ml_dtypes
import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_profile
from tvm_fusion.kernels.gpu.closed_forms import closed_forms
from tvm_fusion.kernels.pointwise.kernel import emit_pointwise
from tvm_fusion.kernels.program.analysis import analyze

from ..support.cuda_on_cpu import compile_cubins, cuda_source, run_cuda_on_cpu
from ..support.kernel_cases import fuse, numpy_dtype
from ..support.ptx import instructions

H200 = load_profile("nvidia_h200")
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133}


def const(value, x):
    return relax.const(value, str(x.ty.dtype))


def gelu_written_out(bb, x):
    """x / sqrt(2), and the half in front."""
    e = bb.emit(op.erf(bb.emit(op.divide(x, const(math.sqrt(2.0), x)))))
    return op.multiply(bb.emit(op.multiply(const(0.5, x), x)), bb.emit(op.add(e, const(1.0, x))))


def silu_as_quotient(bb, x):
    e = bb.emit(op.exp(bb.emit(op.negative(x))))
    return op.divide(x, bb.emit(op.add(const(1.0, x), e)))


def gate_times_tanh(bb, x):
    return op.multiply(bb.emit(op.sigmoid(x)), bb.emit(op.tanh(x)))


FUNCTIONS = {
    "gelu": lambda bb, x: op.nn.gelu(x),
    "gelu written out": gelu_written_out,
    "gelu by tanh": lambda bb, x: op.nn.gelu_tanh(x),
    "tanh": lambda bb, x: op.tanh(x),
    "erf": lambda bb, x: op.erf(x),
    "sigmoid": lambda bb, x: op.sigmoid(x),
    "silu": lambda bb, x: op.nn.silu(x),
    "silu as quotient": silu_as_quotient,
    "sigmoid * tanh": gate_times_tanh,
    "exp": lambda bb, x: op.exp(x),
}


def each(function):
    return np.vectorize(function, otypes=[np.float64])


def sigmoid(x):
    with np.errstate(over="ignore"):
        return np.where(x > 0, 1 / (1 + np.exp(-x)), np.exp(x) / (1 + np.exp(x)))


def sigmoid_everywhere(x):
    return np.where(x > 700, 1.0, np.where(x < -700, 0.0, sigmoid(np.clip(x, -700, 700))))


def gelu(x):
    return 0.5 * x * each(math.erfc)(-x * math.sqrt(0.5))


def gelu_by_tanh(x):
    return x * sigmoid_everywhere(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def silu(x):
    return x * sigmoid_everywhere(x)


REFERENCES = {
    "gelu": gelu,
    "gelu written out": gelu,
    "gelu by tanh": gelu_by_tanh,
    "tanh": np.tanh,
    "erf": each(math.erf),
    "sigmoid": sigmoid_everywhere,
    "silu": silu,
    "silu as quotient": silu,
    "sigmoid * tanh": lambda x: sigmoid_everywhere(x) * np.tanh(x),
    "exp": np.exp,
}

# Largest error after rounding, in units in the last place; 0.5 is that of the rounding alone.
BOUNDS = {"gelu": 0.6, "gelu written out": 0.6, "tanh": 0.52, "sigmoid * tanh": 0.54}
OTHERS = 0.505


def all_numbers(dtype):
    """Every number of a half-precision dtype, NaNs and infinities too."""
    return np.arange(65536, dtype=np.uint16).view(numpy_dtype(dtype)).reshape(256, 256)


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def results(request):
    """All functions of all numbers, from one kernel: dtype, x in float64, name -> result."""
    dtype = request.param
    x = all_numbers(dtype)

    def emit(bb, p):
        return relax.Tuple([bb.emit(function(bb, p)) for function in FUNCTIONS.values()])

    kernel = emit_pointwise(analyze(fuse(emit, ((256, 256), dtype))), H200)
    outputs = [np.zeros_like(x) for _ in FUNCTIONS]
    run_cuda_on_cpu(kernel, [x, *outputs])
    with np.errstate(invalid="ignore"):
        wide = [a.astype(np.float64) for a in (x, *outputs)]
    return dtype, wide[0], dict(zip(FUNCTIONS, wide[1:], strict=True))


def ulps(got, expected, dtype):
    """Errors in units in the last place of `dtype` at the expected values."""
    bits = 10 if dtype == "float16" else 7
    _, exponent = np.frexp(expected)
    return np.abs(got - expected) / np.maximum(SMALLEST[dtype], 2.0 ** (exponent - 1.0 - bits))


def reference(name, x):
    with np.errstate(all="ignore"):
        return REFERENCES[name](x)


def flushed_below(x, dtype):
    """Results below are zero on the device: those below 2^-125, times x where x is a factor."""
    return 2.0**-125 * np.maximum(1, np.abs(x)) if dtype == "bfloat16" else np.zeros_like(x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_off_by_little_more_than_their_rounding(results, name):
    dtype, x, found = results
    expected = reference(name, x)
    largest = float(ml_dtypes.finfo(numpy_dtype(dtype)).max)
    usual = np.isfinite(x) & (np.abs(expected) <= largest)
    usual &= np.abs(expected) >= flushed_below(x, dtype)
    errors = ulps(found[name][usual], expected[usual], dtype)
    assert errors.size > 30000
    assert errors.max() <= BOUNDS.get(name, OTHERS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_too_small_for_float32_becomes_zero_or_stays_small(results, name):
    dtype, x, found = results
    limit, expected = flushed_below(x, dtype), reference(name, x)
    tiny = np.isfinite(x) & (np.abs(expected) < limit)
    assert (np.abs(found[name][tiny] - expected[tiny]) <= limit[tiny]).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_infinities_and_nans_come_out_as_the_formula_says(results, name):
    _, x, found = results
    special = ~np.isfinite(x)
    # 0.5 x erfc(-x / sqrt(2)) and the logistic forms are -inf * 0 at minus infinity
    np.testing.assert_array_equal(found[name][special], reference(name, x)[special])


@pytest.mark.parametrize("name", ["gelu by tanh", "tanh", "erf", "silu", "sigmoid * tanh"])
def test_the_sign_of_zero_is_kept(results, name):
    _, x, found = results
    assert np.signbit(found[name][(x == 0) & np.signbit(x)]).all()
    assert not np.signbit(found[name][(x == 0) & ~np.signbit(x)]).any()


# ---- float32

FLOAT32_ULPS = {"exp": 1.6, "sigmoid": 2.6, "tanh": 2.0, "silu": 3.0, "silu as quotient": 3.0}


@pytest.mark.parametrize("name", FLOAT32_ULPS)
def test_float32_results_are_off_by_a_few_units(name):
    magnitudes = np.geomspace(1e-20, 87.0, 8192).astype(np.float32)
    x = np.concatenate([magnitudes, -magnitudes, np.linspace(-2, 2, 16384, dtype=np.float32)])
    func = fuse(FUNCTIONS[name], ((x.size,), "float32"))
    y = np.zeros_like(x)
    run_cuda_on_cpu(emit_pointwise(analyze(func), H200), [x, y])
    expected = reference(name, x.astype(np.float64))
    spacing = np.spacing(np.abs(expected).astype(np.float32)).astype(np.float64)
    error = np.abs(y - expected) / np.maximum(spacing, 2.0**-149)
    assert error[np.abs(expected) > 2.0**-120].max() <= FLOAT32_ULPS[name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("exp", [np.inf, 0.0, np.nan, np.inf, 0.0]),
        ("sigmoid", [1.0, 0.0, np.nan, 1.0, 0.0]),
        ("tanh", [1.0, -1.0, np.nan, 1.0, -1.0]),
    ],
)
def test_float32_functions_saturate(name, expected):
    x = np.array([np.inf, -np.inf, np.nan, 1e30, -1e30], np.float32)
    y = np.zeros_like(x)
    func = fuse(FUNCTIONS[name], ((5,), "float32"))
    run_cuda_on_cpu(emit_pointwise(analyze(func), H200), [x, y])
    np.testing.assert_array_equal(y, np.array(expected, np.float32))


# ---- where the cheap forms are used


def called(emit, *inputs, exact=False):
    """The generated kernel's source."""
    source = cuda_source(emit_pointwise(analyze(fuse(emit, *inputs), exact=exact), H200))
    return source[source.rindex('extern "C"') :]


def to_float(bb, x):
    return op.astype(bb.emit(op.nn.gelu(x)), "float32")


def gated_float(bb, x):
    return op.astype(bb.emit(op.sigmoid(x)), "float32")


def compared(bb, x):
    return op.greater(bb.emit(op.tanh(x)), const(0.5, x))


def both(bb, x):
    y = bb.emit(op.erf(x))
    return relax.Tuple([y, bb.emit(op.astype(y, "float32"))])


HALF_INPUT = ((4, 64), "float16")


def test_a_value_for_half_precision_takes_the_cheap_form():
    assert "tvmf_gelu_f16(" in called(FUNCTIONS["gelu"], HALF_INPUT)
    assert "tvmf_gelu_bf16(" in called(FUNCTIONS["gelu"], ((4, 64), "bfloat16"))


@pytest.mark.parametrize("emit", [to_float, compared, both])
def test_a_value_that_also_goes_elsewhere_does_not(emit):
    source = called(emit, HALF_INPUT)
    assert "tvmf_gelu" not in source
    assert "tvmf_tanh_p" not in source
    assert "tvmf_erf_p" not in source


def test_a_float32_result_of_half_precision_data_is_accurate():
    assert "tvmf_sigmoid(" in called(gated_float, HALF_INPUT)
    assert "tvmf_sigmoid(" not in called(FUNCTIONS["sigmoid"], HALF_INPUT)


def test_what_stands_under_a_condition_stays_there():
    def padded_tanh(bb, x):
        return op.nn.pad(bb.emit(op.tanh(bb.emit(op.add(x, const(1.0, x))))), [0, 0, 3, 2])

    x = np.linspace(-3, 3, 44).astype(np.float16).reshape(4, 11)
    y = np.zeros((4, 16), np.float16)
    kernel = emit_pointwise(analyze(fuse(padded_tanh, ((4, 11), "float16"))), H200)
    run_cuda_on_cpu(kernel, [x, y])
    expected = np.pad(np.tanh(x.astype(np.float64) + 1), [(0, 0), (3, 2)])
    assert np.abs(y - expected).max() < 1e-3
    assert "tvmf_tanh_p(" in cuda_source(kernel)


def test_exact_rounding_keeps_the_formula():
    func = fuse(FUNCTIONS["gelu"], HALF_INPUT)
    program = analyze(func, exact=True)
    assert closed_forms(program) is program
    assert "erff(" in called(FUNCTIONS["gelu"], HALF_INPUT, exact=True)


def test_a_program_without_special_functions_stays_as_it_is():
    program = analyze(fuse(lambda bb, x: op.nn.relu(x), HALF_INPUT))
    assert closed_forms(program) is program


def test_one_reciprocal_serves_a_product():
    assert called(gate_times_tanh, HALF_INPUT).count("tvmf_rcp(") == 8


def test_rewriting_twice_is_rewriting_once():
    program = closed_forms(analyze(fuse(gelu_written_out, HALF_INPUT)))
    assert closed_forms(program) is program


# ---- instructions

WIDE = ((64, 512), "float16")


def bias_gelu(bb, x, b):
    return op.nn.gelu(bb.emit(op.add(x, b)))


def sigmoid_tanh(bb, x):
    return op.multiply(bb.emit(op.sigmoid(x)), bb.emit(op.tanh(bb.emit(op.add(x, const(1.0, x))))))


def swiglu(bb, x, y):
    return op.multiply(bb.emit(op.nn.silu(x)), y)


def fanout(bb, x):
    a = bb.emit(op.multiply(bb.emit(op.sigmoid(x)), const(1.5, x)))
    t = bb.emit(op.add(bb.emit(op.tanh(a)), x))
    return relax.Tuple([t, bb.emit(op.multiply(bb.emit(op.nn.relu(a)), x))])


# Instructions an element: all, and of the special-function unit. A multiprocessor of an H200 issues
# 128 and 16 a clock; at the memory's limit that leaves 27 and 3.4 for 4 bytes of traffic.
COUNTS = {
    "bias_gelu": (bias_gelu, (WIDE, ((512,), "float16")), 20, 2),
    "sigmoid_tanh": (sigmoid_tanh, (WIDE,), 21, 2),
    "swiglu": (swiglu, (WIDE, WIDE), 12, 2),
    "gelu_by_tanh": (FUNCTIONS["gelu by tanh"], (WIDE,), 14, 2),
    "fanout": (fanout, (WIDE,), 24, 3),
}


@pytest.fixture(scope="module")
def kernels():
    return {
        name: emit_pointwise(analyze(fuse(emit, *inputs)), H200)
        for name, (emit, inputs, _, _) in COUNTS.items()
    }


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", COUNTS)
def test_a_kernel_has_few_instructions_an_element(kernels, name):
    *_, most, special = COUNTS[name]
    found = instructions(kernels[name])
    assert found.special / 8 <= special
    assert found.total / 8 <= most


def test_no_kernel_spills(kernels):
    assert [r for r in compile_cubins(kernels) if r.spill_bytes] == []
