"""GEMM kernels for CUDA: numbers on the emulator against float64, resources, refusals."""

import dataclasses

import numpy as np
import pytest
import tvm_ffi
from tvm import tirx
from tvm.relax import op

from tvm_fusion.config import load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.hopper.kernel import emit_gemm_hopper, hopper_configs
from tvm_fusion.kernels.gemm.simt.kernel import CONFIGS, emit_gemm_simt, simt_configs

from ...support import gemm_cases as graphs
from ...support.cuda_on_cpu import compile_cubins, cuda_source, run_cuda_on_cpu
from ...support.gemm_cases import CUDA_CORE_CASES, FLOAT, HALF, TENSOR_CORE_CASES
from ...support.hopper_on_cpu import compile_hopper, run_hopper_on_cpu
from ...support.kernel_cases import TOLERANCE, Case, assert_close, fuse, outputs_of

H200, A100 = load_profile("nvidia_h200"), load_profile("nvidia_a100")

# So few multiprocessors that blocks of the small cases take several tiles each.
TINY_H200 = dataclasses.replace(H200, num_sms=2)


def ids(cases):
    return [case.name for case in cases]


def by_name(name: str) -> Case:
    return next(case for case in TENSOR_CORE_CASES + CUDA_CORE_CASES if case.name == name)


def check(case: Case, kernel: tirx.PrimFunc, run, slack: float = 1.0) -> None:
    """Runs a kernel on the emulator; every output is poisoned before and close to float64 after."""
    inputs = case.arrays()
    outputs = outputs_of(case.func(), len(inputs))
    assert run(kernel, [*inputs, *outputs]) == 1
    for got, expected in zip(outputs, case.expected(inputs), strict=True):
        dtype = str(got.dtype)
        if dtype in TOLERANCE:
            scale = np.abs(expected).max()
            error = np.abs(got.astype(np.float64) - expected.reshape(got.shape)).max() / scale
            assert error <= slack * TOLERANCE[dtype]
        else:
            assert_close(got, expected, dtype)


def same_parameters(kernel: tirx.PrimFunc, func: tirx.PrimFunc) -> bool:
    def signature(f):
        return [(p.name, str(p.ty.dtype), [str(n) for n in p.ty.shape]) for p in f.params]

    plain = [
        (n, d, [s.removeprefix("T.int64(").rstrip(")") for s in sh]) for n, d, sh in signature(func)
    ]
    return signature(kernel) == plain


# ---- CUDA cores


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CUDA_CORE_CASES, ids=ids(CUDA_CORE_CASES))
def test_the_cuda_core_kernel_is_close_to_float64(case):
    check(case, emit_gemm_simt(analyze_contraction(case.func()), A100), run_cuda_on_cpu)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "name",
    [
        "bias, gelu, residual",
        "gate and up",
        "q, k, v with biases",
        "scores of permuted heads",
        "values of permuted heads",
        "output transposed",
        "two outputs",
        "row factor",
        "ragged everywhere",
        "bfloat16",
    ],
)
def test_the_cuda_core_kernel_computes_what_tensor_cores_can(name):
    case = by_name(name)
    check(case, emit_gemm_simt(analyze_contraction(case.func()), A100), run_cuda_on_cpu)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "config"),
    [
        *(("float32", config) for config in CONFIGS),
        *(("odd pitch", config) for config in CONFIGS),
        *(("matrix times vector", CONFIGS[i]) for i in (0, -1)),
    ],
    ids=str,
)
def test_every_cuda_core_configuration_is_close_to_float64(name, config):
    case = by_name(name)
    kernel = emit_gemm_simt(analyze_contraction(case.func()), A100, config)
    check(case, kernel, run_cuda_on_cpu)


@pytest.mark.parametrize(
    ("name", "exchanges"), [("odd pitch", True), ("bias, gelu, residual", False)]
)
def test_sums_are_exchanged_where_rows_of_the_output_start_anywhere(name, exchanges):
    func = by_name(name).func()
    source = cuda_source(emit_gemm_simt(analyze_contraction(func), A100, CONFIGS[2]))
    assert ("__syncwarp" in source) is exchanges


@pytest.mark.one_in(2)
@pytest.mark.parametrize("extent", [1, 5, 70])
def test_one_cuda_core_kernel_serves_all_values_of_a_symbolic_size(extent):
    n = tirx.Var("n", "int64")
    func = fuse(graphs.bias_gelu, ((2, n, 33), FLOAT), ((33, 20), FLOAT), ((20,), FLOAT))
    kernel = emit_gemm_simt(analyze_contraction(func), A100)
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(s).astype(FLOAT) for s in ((2, extent, 33), (33, 20), (20,)))
    out = np.full((2, extent, 20), np.nan, FLOAT)
    assert run_cuda_on_cpu(kernel, [x, w, b, out]) == 1
    assert_close(out, graphs.gelu_of(x.astype(np.float64) @ w + b), FLOAT)


def test_attention_with_a_symbolic_sequence_runs_on_cuda_cores():
    n = tirx.Var("n", "int64")
    func = fuse(graphs.values(2), ((2, 2, n, n), FLOAT), ((2, n, 16), FLOAT))
    kernel = emit_gemm_simt(analyze_contraction(func), A100)
    rng = np.random.default_rng(0)
    p, v = (rng.standard_normal(s).astype(FLOAT) for s in ((2, 2, 13, 13), (2, 13, 16)))
    out = np.full((2, 13, 16), np.nan, FLOAT)
    run_cuda_on_cpu(kernel, [p, v, out])
    expected = (p.astype(np.float64) @ graphs.heads_of(v, 2)).transpose(0, 2, 1, 3)
    assert_close(out, expected.reshape(v.shape), FLOAT)


def test_exact_rounding_keeps_the_halves_between_operators():
    case = by_name("bias, gelu, residual")
    fast, exact = (emit_gemm_simt(analyze_contraction(case.func(), e), A100) for e in (False, True))
    inputs = case.arrays()
    found = []
    for kernel in (fast, exact):
        (output,) = outputs_of(case.func(), len(inputs))
        run_cuda_on_cpu(kernel, [*inputs, output])
        found.append(output.astype(np.float64))
    (expected,) = case.expected(inputs)
    errors = [np.abs(f - expected).mean() for f in found]
    assert errors[0] < errors[1] < 4 * errors[0]


def test_cuda_core_kernels_do_not_spill():
    wide = {f"wide_{i}": c for i, c in enumerate(CONFIGS)}
    func = fuse(graphs.bias_gelu, ((512, 512), FLOAT), ((512, 512), FLOAT), ((512,), FLOAT))
    contraction = analyze_contraction(func)
    kernels = {name: emit_gemm_simt(contraction, A100, c) for name, c in wide.items()}
    assert [r.spill_bytes for r in compile_cubins(kernels)] == [0] * len(CONFIGS)


def test_large_matrices_get_large_tiles_and_thin_ones_small_tiles():
    large = fuse(graphs.matmul, ((4096, 4096), FLOAT), ((4096, 4096), FLOAT))
    thin = fuse(graphs.matmul, ((4, 4096), FLOAT), ((4096, 4096), FLOAT))
    first = [simt_configs(analyze_contraction(f), A100)[0] for f in (large, thin)]
    assert min(first[0].block_m, first[0].block_n) >= 128
    assert first[1].block_m == 4


# ---- Hopper


@pytest.mark.one_in(15)
@pytest.mark.parametrize("case", TENSOR_CORE_CASES, ids=ids(TENSOR_CORE_CASES))
def test_the_hopper_kernel_is_close_to_float64(case):
    kernel = emit_gemm_hopper(analyze_contraction(case.func()), TINY_H200)
    check(case, kernel, run_hopper_on_cpu, slack=2.0)


def kinds(name: str, rows: bool = False):
    """One configuration of each form for a case; with `rows`, of each number of rows."""
    contraction = analyze_contraction(by_name(name).func())
    found = {}
    for c in hopper_configs(contraction, TINY_H200):
        found.setdefault((c.block_m if rows else 0, c.staged, c.deferred), c)
    return [
        pytest.param(name, c, id=f"{name}-{c.block_m}x{c.block_n}-{k}") for k, c in found.items()
    ]


@pytest.mark.one_in(16)
@pytest.mark.parametrize(
    ("name", "config"),
    [
        *kinds("bias, gelu, residual", rows=True),
        *kinds("q, k, v with biases"),
        *kinds("gate and up"),
    ],
)
def test_every_form_of_the_hopper_kernel_is_close_to_float64(name, config):
    case = by_name(name)
    kernel = emit_gemm_hopper(analyze_contraction(case.func()), TINY_H200, config)
    check(case, kernel, run_hopper_on_cpu, slack=2.0)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("extent", [1, 100, 300])
def test_one_hopper_kernel_serves_all_values_of_a_symbolic_row_count(extent):
    n = tirx.Var("n", "int64")
    func = fuse(graphs.bias_gelu, ((n, 128), HALF), ((128, 192), HALF), ((192,), HALF))
    kernel = emit_gemm_hopper(analyze_contraction(func), TINY_H200)
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(s).astype(HALF) for s in ((extent, 128), (128, 192), (192,)))
    out = np.full((extent, 192), np.nan, HALF)
    assert run_hopper_on_cpu(kernel, [x, w, b, out]) == 1
    expected = graphs.gelu_of(x.astype(np.float64) @ w + b)
    assert np.abs(out - expected).max() <= 2 * TOLERANCE[HALF] * np.abs(expected).max()


def test_a_slice_of_a_packed_weight_is_read_in_place():
    def emit(bb, x, w):
        return op.matmul(x, bb.emit(op.strided_slice(w, [1], [64], [192])))

    case = Case(
        "slice", emit, (((70, 64), HALF), ((64, 256), HALF)), lambda x, w: [x @ w[:, 64:192]]
    )
    kernel = emit_gemm_hopper(analyze_contraction(case.func()), TINY_H200)
    check(case, kernel, run_hopper_on_cpu, slack=2.0)


DEMO = {
    "bias gelu residual": (
        graphs.bias_gelu_residual,
        (4096, 4096),
        (4096, 4096),
        (4096,),
        (4096, 4096),
    ),
    "gate up": (graphs.gate_up, (2, 2048, 2048), (2048, 5504), (2048, 5504)),
    "qkv": (
        graphs.qkv_bias,
        (4096, 2048),
        *[(2048, n) for n in (4096, 1024, 1024)],
        (4096,),
        (1024,),
        (1024,),
    ),
    "scores": (graphs.scores(16), (2, 2048, 2048), (2, 2048, 2048)),
    "values": (graphs.values(16), (2, 16, 2048, 2048), (2, 2048, 2048)),
    "odd": (graphs.linear, (1000, 1000), (1000, 1000)),
    "16 rows": (graphs.linear, (16, 4096), (11008, 4096)),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", DEMO)
def test_hopper_kernels_compile_without_spills_or_serialised_wgmma(name):
    emit, *shapes = DEMO[name]
    contraction = analyze_contraction(fuse(emit, *((s, HALF) for s in shapes)))
    compiled = compile_hopper(emit_gemm_hopper(contraction, H200))
    assert (compiled.spill_bytes, compiled.remarks) == (0, ())


def test_exact_rounding_on_hopper_compiles_without_spills_and_is_close_to_float64():
    shapes = ((4096, 4096), (4096, 4096), (4096,), (4096, 4096))
    large = fuse(graphs.bias_gelu_residual, *((s, HALF) for s in shapes))
    compiled = compile_hopper(emit_gemm_hopper(analyze_contraction(large, exact=True), H200))
    assert (compiled.spill_bytes, compiled.remarks) == (0, ())
    case = by_name("bias, gelu, residual")
    kernel = emit_gemm_hopper(analyze_contraction(case.func(), exact=True), TINY_H200)
    check(case, kernel, run_hopper_on_cpu, slack=4.0)


def test_large_matrices_get_the_deferred_form_and_few_rows_the_direct_one():
    large, thin = (
        analyze_contraction(fuse(graphs.linear, ((m, 4096), HALF), ((4096, 4096), HALF)))
        for m in (4096, 16)
    )
    first = hopper_configs(large, H200)[0]
    assert (first.block_m, first.block_n, first.deferred) == (128, 256, True)
    first = hopper_configs(thin, H200)[0]
    assert (first.block_m, first.staged) == (64, False)


# ---- both


@pytest.mark.parametrize("emit", [emit_gemm_simt, emit_gemm_hopper])
def test_kernels_keep_the_parameters_and_say_what_they_are(emit):
    func = by_name("q, k, v").func()
    named = func.with_attr("global_symbol", "fused_qkv")
    kernel = emit(analyze_contraction(named), H200)
    assert same_parameters(kernel, func)
    assert kernel.attrs["global_symbol"] == "fused_qkv"
    assert kernel.attrs["op_pattern"] == 8
    for name in ("tirx.is_scheduled", "tirx.noalias", "tvm_fusion.tirx"):
        assert bool(kernel.attrs[name])
    assert "global_symbol" not in emit(analyze_contraction(func), H200).attrs


@pytest.mark.parametrize("emit", [emit_gemm_simt, emit_gemm_hopper])
def test_equal_functions_give_equal_kernels(emit):
    case = by_name("bias, gelu, residual")
    first, second = (emit(analyze_contraction(case.func()), H200) for _ in range(2))
    assert tvm_ffi.structural_equal(first, second)
    assert cuda_source(first) == cuda_source(second)


REFUSED = {
    "float32": (graphs.matmul, ((64, 64), FLOAT), ((64, 64), FLOAT)),
    "a pitch that is no multiple of 16 bytes": (graphs.linear, ((64, 60), HALF), ((64, 60), HALF)),
    "a computed right operand": (graphs.silu_of_weights, ((64, 64), HALF), ((64, 64), HALF)),
    "different left operands": (graphs.two_products, *[((64, 64), HALF)] * 4),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hopper_refuses(name):
    emit, *inputs = REFUSED[name]
    contraction = analyze_contraction(fuse(emit, *inputs))
    with pytest.raises(Unsupported):
        emit_gemm_hopper(contraction, H200)


def test_hopper_refuses_a_symbolic_depth():
    n = tirx.Var("n", "int64")
    func = fuse(graphs.matmul, ((64, n), HALF), ((n, 64), HALF))
    with pytest.raises(Unsupported, match="symbolic"):
        emit_gemm_hopper(analyze_contraction(func), H200)


def test_hopper_refuses_other_architectures():
    with pytest.raises(Unsupported, match="wgmma"):
        emit_gemm_hopper(analyze_contraction(by_name("plain").func()), A100)


def test_hopper_refuses_boxes_that_a_tile_does_not_fill():
    contraction = analyze_contraction(by_name("plain").func())
    narrow = next(c for c in hopper_configs(contraction, H200) if c.staged and c.block_n == 64)
    with pytest.raises(Unsupported, match="boxes"):
        emit_gemm_hopper(contraction, H200, dataclasses.replace(narrow, boxes=2))


def test_hopper_refuses_a_configuration_that_does_not_fit():
    contraction = analyze_contraction(by_name("plain").func())
    config = dataclasses.replace(hopper_configs(contraction, H200)[0], stages=40)
    with pytest.raises(Unsupported, match="shared memory"):
        emit_gemm_hopper(contraction, H200, config)
