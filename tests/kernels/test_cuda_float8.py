"""8-bit floats and integers on CUDA: rounding of every number, widths, row kernels."""

import ctypes
import subprocess

import ml_dtypes
import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_profile
from tvm_fusion.kernels.gpu.arithmetic import float8_code
from tvm_fusion.kernels.pointwise.kernel import emit_pointwise, pointwise_config
from tvm_fusion.kernels.program.analysis import analyze
from tvm_fusion.kernels.row.kernel import emit_row, row_configs

from ..support.cuda_on_cpu import compile_cubins, cuda_source, run_cuda_on_cpu
from ..support.kernel_cases import fuse, numpy_dtype

H200 = load_profile("nvidia_h200")
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]


def limit(dtype):
    return float(ml_dtypes.finfo(numpy_dtype(dtype)).max)


def rounded(x, dtype):
    """To nearest even, saturating; NaN stays."""
    with np.errstate(invalid="ignore"):
        return np.clip(x, -limit(dtype), limit(dtype)).astype(numpy_dtype(dtype))


def assert_same_bits(got, expected):
    both_nan = np.isnan(got.astype(np.float32)) & np.isnan(expected.astype(np.float32))
    same = got.view(np.uint8) == expected.view(np.uint8)
    assert (same | both_nan).all()


def kernel_of(emit, *inputs):
    return emit_pointwise(analyze(fuse(emit, *inputs)), H200)


def body_of(kernel):
    source = cuda_source(kernel)
    return source[source.rindex('extern "C"') :]


def cast_to(dtype):
    return lambda bb, x: op.astype(x, dtype)


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("columns", [64, 63], ids=["in words", "one by one"])
def test_numbers_are_rounded_to_nearest_even_and_saturate(dtype, columns):
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    rng = np.random.default_rng(0)
    spread = rng.standard_normal(columns * 64) * 2.0 ** rng.uniform(-25, 20, columns * 64)
    x = np.concatenate([halves, spread.astype(np.float32)])[: columns * 1088].reshape(-1, columns)
    y = np.zeros(x.shape, numpy_dtype(dtype))
    run_cuda_on_cpu(kernel_of(cast_to(dtype), (x.shape, "float32")), [x, y])
    assert_same_bits(y, rounded(x, dtype))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_number_is_read_back(dtype):
    x = np.arange(256, dtype=np.uint8).view(numpy_dtype(dtype)).reshape(4, 64)
    y = np.zeros(x.shape, np.float16)
    run_cuda_on_cpu(kernel_of(cast_to("float16"), (x.shape, dtype)), [x, y])
    np.testing.assert_array_equal(y, x.astype(np.float16))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_rounding_to_8_bits_in_between_is_kept(dtype):
    def there_and_back(bb, x):
        return op.multiply(bb.emit(op.astype(bb.emit(op.astype(x, dtype)), "float16")), x)

    x = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float16)
    y = np.zeros_like(x)
    run_cuda_on_cpu(kernel_of(there_and_back, (x.shape, "float16")), [x, y])
    expected = rounded(x, dtype).astype(np.float32) * x.astype(np.float32)
    np.testing.assert_array_equal(y, expected.astype(np.float16))


def test_an_output_is_rounded_once():
    body = body_of(kernel_of(cast_to("float8_e4m3fn"), ((4, 64), "float16")))
    assert body.count("tvmf_pack_e4m3x2(") == 4
    assert "__nv_fp8_e4m3)" not in body


def scaled(bb, x, s):
    return op.multiply(bb.emit(op.astype(x, str(s.ty.dtype))), s)


def to_int8(bb, x, s):
    y = bb.emit(op.round(bb.emit(op.multiply(bb.emit(op.astype(x, "float32")), s))))
    return op.astype(bb.emit(op.clip(y, -128, 127)), "int8")


@pytest.mark.parametrize(
    ("emit", "inputs", "accesses"),
    [
        (cast_to("float8_e4m3fn"), [((4, 64), "bfloat16")], {"load16": 2, "store16": 1}),
        (cast_to("float8_e5m2"), [((4, 64), "float32")], {"load16": 2, "store8": 1}),
        (scaled, [((4, 64), "float8_e4m3fn"), ((4, 1), "float16")], {"load16": 1, "store16": 2}),
        (scaled, [((4, 64), "int8"), ((64,), "float16")], {"load16": 3, "store16": 2}),
        (scaled, [((4, 64), "int8"), ((4, 1), "float32")], {"load8": 1, "store16": 2}),
        (to_int8, [((4, 64), "float16"), ((4, 1), "float32")], {"load16": 2, "store16": 1}),
        (to_int8, [((4, 63), "float16"), ((4, 1), "float32")], {"load16": 2, "store16": 1}),
        (scaled, [((4, 63), "int8"), ((4, 1), "float32")], {"load8": 1, "store16": 2}),
    ],
)
def test_mixed_dtypes_are_accessed_as_wide_as_the_widest_allows(emit, inputs, accesses):
    body = body_of(kernel_of(emit, *inputs))
    found = {k: body.count(f"tvmf_{k}_{'nc' if 'load' in k else 'wb'}(") for k in accesses}
    assert found == accesses
    assert "tvmf_load2" not in body


@pytest.mark.parametrize("columns", [64, 37])
def test_rounded_and_clipped_numbers_become_bytes(columns):
    rng = np.random.default_rng(2)
    x = (60 * rng.standard_normal((6, columns))).astype(np.float16)
    x[0, :6] = [0.5, 1.5, -2.5, np.inf, -np.inf, 127.5]
    s = rng.uniform(0.5, 2, (6, 1)).astype(np.float32)
    y = np.zeros(x.shape, np.int8)
    kernel = kernel_of(to_int8, (x.shape, "float16"), (s.shape, "float32"))
    run_cuda_on_cpu(kernel, [x, s, y])
    assert "tvmf_round_to_int(" in cuda_source(kernel)
    product = x.astype(np.float32) * s
    np.testing.assert_array_equal(y, np.clip(np.rint(product), -128, 127).astype(np.int8))


# ---- rows


def quantise_rows(bb, x):
    """8-bit floats and the scale of each row."""
    wide = bb.emit(op.astype(x, "float32"))
    top = bb.emit(op.max(bb.emit(op.abs(wide)), axis=-1, keepdims=True))
    scale = bb.emit(op.multiply(top, relax.const(1 / 448, "float32")))
    return relax.Tuple([bb.emit(op.astype(op.divide(wide, scale), "float8_e4m3fn")), scale])


@pytest.mark.parametrize("columns", [64, 1000])
def test_rows_are_quantised_by_their_largest_element(columns):
    program = analyze(fuse(quantise_rows, ((5, columns), "float16")))
    kernel = emit_row(program, row_configs(program, H200)[0], H200)
    x = np.random.default_rng(3).standard_normal((5, columns)).astype(np.float16)
    y, scale = np.zeros(x.shape, ml_dtypes.float8_e4m3fn), np.zeros((5, 1), np.float32)
    run_cuda_on_cpu(kernel, [x, y, scale])
    expected = np.abs(x.astype(np.float64)).max(-1, keepdims=True) / 448
    np.testing.assert_allclose(scale, expected, rtol=1e-6)
    step = np.maximum(np.abs(x / expected) / 16, 2.0**-10)  # half a unit in the last place
    assert (np.abs(y.astype(np.float64) - x / expected) <= 1.001 * step).all()
    assert "tvmf_pack_e4m3x2(" in body_of(kernel)


def test_kernels_with_8_bit_floats_become_cubins_without_spills():
    kernels = {
        f"{name}_{dtype}": kernel_of(emit, *inputs)
        for dtype in FLOAT8
        for name, emit, inputs in [
            ("store", cast_to(dtype), [((64, 4096), "bfloat16")]),
            ("load", scaled, [((64, 4096), dtype), ((64, 1), "float16")]),
            ("odd", scaled, [((64, 63), dtype), ((64, 1), "float16")]),
        ]
    }
    program = analyze(fuse(quantise_rows, ((64, 4096), "bfloat16")))
    kernels["rows"] = emit_row(program, row_configs(program, H200)[0], H200)
    resources = compile_cubins(kernels)
    assert {r.kernel for r in resources} == set(kernels)
    assert [r for r in resources if r.spill_bytes] == []


def test_an_odd_number_of_columns_keeps_whole_vectors():
    program = analyze(fuse(scaled, ((4, 63), "float8_e4m3fn"), ((4, 1), "float16")))
    assert pointwise_config(program, H200).width == 16


ROUND_ALL = """
#include <cmath>
#include <cstring>
static unsigned __float_as_uint(float x) { unsigned u; std::memcpy(&u, &x, 4); return u; }
static float __uint_as_float(unsigned u) { float x; std::memcpy(&x, &u, 4); return x; }
static unsigned one(float x) { BODY }
extern "C" void all(const float* x, unsigned char* y, long n) {
  for (long i = 0; i < n; i++) y[i] = (unsigned char)one(x[i]);
}
"""


@pytest.mark.parametrize("dtype", FLOAT8)
def test_what_is_before_sm_89_rounds_by_arithmetic(dtype, tmp_path):
    """All numbers of the type, what lies halfway between two, neighbours of both; and others."""
    code, library = tmp_path / "round.cpp", tmp_path / "round.so"
    code.write_text(ROUND_ALL.replace("BODY", float8_code(dtype)))
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", library, code], check=True)
    known = np.arange(256, dtype=np.uint8).view(numpy_dtype(dtype)).astype(np.float32)
    known = np.sort(known[np.isfinite(known)])
    places = np.concatenate([known, (known[1:] + known[:-1]) / 2])
    near = [np.nextafter(places, np.float32(s) * np.inf) for s in (1, -1)]
    special = np.array([np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38, -3e38, 0.0, -0.0])
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    special = special.astype(np.float32)
    x = np.concatenate([places, *near, special, drawn.view(np.float32)])
    y = np.empty(x.size, np.uint8)
    ctypes.CDLL(str(library)).all(
        x.ctypes.data_as(ctypes.c_void_p), y.ctypes.data_as(ctypes.c_void_p), ctypes.c_long(x.size)
    )
    assert_same_bits(y.view(numpy_dtype(dtype)), rounded(x, dtype))
