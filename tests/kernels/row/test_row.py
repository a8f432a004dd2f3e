"""Row CUDA kernels in every form: numbers on the CPU emulator against float64, resources."""

import dataclasses

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.relax import op
from tvm.script import tirx as T

from tvm_fusion.config import load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.program.analysis import analyze
from tvm_fusion.kernels.row.config import Form
from tvm_fusion.kernels.row.kernel import RowConfig, emit_row, row_configs

from ...support.cuda_on_cpu import compile_cubins, cuda_source, run_cuda_on_cpu
from ...support.kernel_cases import (
    Case,
    assert_close,
    fuse,
    gelu_of,
    half_softmax,
    rms_of,
    rotate_half,
    softmax_of,
)
from ...support.kernel_checks import assert_right
from ...support.row_graphs import add_rmsnorm, cross_entropy, exp_sum, layernorm, rmsnorm, softmax

H200, A100 = load_profile("nvidia_h200"), load_profile("nvidia_a100")


def scaled_softmax_lse(bb, x, m, s):
    """softmax(x * s[row] + m[column]) and its log-sum-exp: outputs of both shapes."""
    y = bb.emit(op.add(bb.emit(op.multiply(bb.emit(op.astype(x, "float32")), s)), m))
    top = bb.emit(op.max(y, axis=-1, keepdims=True))
    e = bb.emit(op.exp(bb.emit(op.subtract(y, top))))
    t = bb.emit(op.sum(e, axis=-1, keepdims=True))
    p = bb.emit(op.astype(bb.emit(op.divide(e, t)), str(x.ty.dtype)))
    return relax.Tuple([p, bb.emit(op.add(top, bb.emit(op.log(t))))])


def stats(bb, x):
    """Several reductions in one phase, of several kinds; outputs made of row scalars only."""
    y = bb.emit(op.astype(x, "float32"))
    square = bb.emit(op.multiply(y, y))
    top = bb.emit(op.max(y, axis=-1))
    spread = bb.emit(op.subtract(top, bb.emit(op.mean(y, axis=-1))))
    return relax.Tuple([top, bb.emit(op.min(y, axis=-1)), bb.emit(op.sum(square, axis=-1)), spread])


def two_scalars(bb, x):
    """Two row scalars under expressions that print alike."""
    y = bb.emit(op.astype(x, "float32"))
    two = relax.const(2.0, "float32")
    a = bb.emit(op.multiply(bb.emit(op.mean(y, axis=-1, keepdims=True)), two))
    b = bb.emit(op.multiply(bb.emit(op.max(y, axis=-1, keepdims=True)), two))
    return op.add(bb.emit(op.multiply(y, a)), b)


def gelu_softmax_mul(bb, x, z, b):
    p = bb.emit(op.nn.softmax(bb.emit(op.nn.gelu(bb.emit(op.add(x, b)))), axis=-1))
    return op.multiply(p, z)


def softmax_of_transposed(bb, x):
    return op.nn.softmax(bb.emit(op.permute_dims(x, [1, 0])), axis=-1)


def masked_softmax(bb, x, mask):
    low = bb.emit(op.subtract(x, relax.const(1e4, str(x.ty.dtype))))
    return op.nn.softmax(bb.emit(op.where(mask, x, low)), axis=-1)


def causal_softmax(bb, x):
    return op.nn.softmax(bb.emit(op.tril(x)), axis=-1)


def embed_rmsnorm(bb, table, t, g):
    return op.nn.rms_norm(bb.emit(op.take(table, t, axis=0)), g, axes=[-1], epsilon=1e-5)


def rotated_sum(bb, x):
    return op.sum(bb.emit(rotate_half(bb, x)), axis=-1)


def padded_max(bb, x):
    return op.max(bb.emit(op.nn.pad(x, [0, 0, 1, 2], pad_value=0.5)), axis=-1)


def mean_of_two_axes(bb, x):
    return op.mean(x, axis=[-2, -1], keepdims=True)


def product_and_integer_sum(bb, x, k):
    return relax.Tuple([bb.emit(op.prod(x, axis=-1)), bb.emit(op.sum(k, axis=-1))])


def sum_of_middle_axis(bb, x):
    return op.sum(x, axis=1)


def log_sum_exp_reshaped(bb, x):
    shape = [int(e) for e in x.ty.shape]
    flat = bb.emit(op.reshape(x, (shape[0] * shape[1], shape[2])))
    top = bb.emit(op.max(flat, axis=-1))
    return relax.Tuple([top, bb.emit(op.exp(x))])


def lse_of(x, m, s):
    y = x * s + m
    top = y.max(-1, keepdims=True)
    return [softmax_of(y), top + np.log(np.exp(y - top).sum(-1, keepdims=True))]


def loss_of(x, t):
    picked = x[np.arange(len(x)), np.clip(t, 0, None)]
    top = x.max(-1)
    lse = np.log(np.exp(x - top[:, None]).sum(-1)) + top
    return [np.where(t == -100, 0, lse - picked)]


def norm_of(x, g, b):
    centred = x - x.mean(-1, keepdims=True)
    return [centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * g + b]


def stats_of(x):
    return [x.max(-1), x.min(-1), (x * x).sum(-1), x.max(-1) - x.mean(-1)]


def exp_sum_of(x):
    e = np.exp(0.125 * x)
    return [e.sum(-1), e * x]


def labels(rows, columns):
    def make(rng):
        t = rng.integers(0, columns, (rows,))
        t[rows // 2] = -100
        return t

    return make


def softmax_case(rows, columns, dtype="float16", emit=softmax):
    name = f"{emit.__name__}_{rows}x{columns}_{dtype}"
    return Case(name, emit, (((rows, columns), dtype),), lambda x: [softmax_of(x)])


def norm_case(rows, columns, dtype="float16"):
    inputs = (((rows, columns), dtype), ((columns,), dtype), ((columns,), dtype))
    return Case(f"layernorm_{rows}x{columns}_{dtype}", layernorm, inputs, norm_of)


def rms_case(rows, columns, dtype="float16"):
    inputs = (((rows, columns), dtype), ((columns,), dtype))
    reference = lambda x, g: [rms_of(x, g)]  # noqa: E731
    return Case(f"rmsnorm_{rows}x{columns}_{dtype}", rmsnorm, inputs, reference)


def add_rms_case(rows, columns, dtype="float16"):
    m = ((rows, columns), dtype)
    reference = lambda x, r, g: [x + r, rms_of(x + r, g)]  # noqa: E731
    return Case(
        f"add_rmsnorm_{rows}x{columns}", add_rmsnorm, (m, m, ((columns,), dtype)), reference
    )


def loss_case(rows, columns):
    inputs = (((rows, columns), "float16"), ((rows,), "int64"))
    return Case(
        f"cross_entropy_{rows}x{columns}",
        cross_entropy,
        inputs,
        loss_of,
        {1: labels(rows, columns)},
    )


def exp_sum_case(rows, columns):
    return Case(f"exp_sum_{rows}x{columns}", exp_sum, (((rows, columns), "float16"),), exp_sum_of)


def lse_case(rows, columns):
    inputs = (((rows, columns), "float16"), ((columns,), "float32"), ((rows, 1), "float32"))
    return Case(f"softmax_lse_{rows}x{columns}", scaled_softmax_lse, inputs, lse_of)


def small(name, emit, *inputs, reference, make=None):
    return Case(name, emit, inputs, reference, make or {})


CASES = [
    softmax_case(5, 1000),
    softmax_case(3, 1003),
    softmax_case(2, 2),
    softmax_case(1, 4096, "float32"),
    softmax_case(3, 512, "bfloat16"),
    softmax_case(37, 128),
    softmax_case(3, 4096, emit=half_softmax),
    norm_case(5, 1000),
    norm_case(3, 257, "float32"),
    rms_case(5, 4096),
    rms_case(2, 768, "bfloat16"),
    add_rms_case(5, 1000),
    loss_case(5, 1000),
    loss_case(3, 8192),
    exp_sum_case(5, 1000),
    exp_sum_case(2, 8200),
    lse_case(4, 1000),
    small("stats", stats, ((2, 3, 1000), "float16"), reference=stats_of),
    small(
        "two_scalars",
        two_scalars,
        ((3, 1000), "float16"),
        reference=lambda x: [x * 2 * x.mean(-1, keepdims=True) + 2 * x.max(-1, keepdims=True)],
    ),
    small(
        "gelu_softmax_mul",
        gelu_softmax_mul,
        ((2, 3, 264), "float16"),
        ((2, 3, 264), "float16"),
        ((264,), "float16"),
        reference=lambda x, z, b: [softmax_of(gelu_of(x + b)) * z],
    ),
    small(
        "softmax_of_transposed",
        softmax_of_transposed,
        ((40, 6), "float16"),
        reference=lambda x: [softmax_of(x.T)],
    ),
    small(
        "masked_softmax",
        masked_softmax,
        ((2, 3, 40), "float16"),
        ((2, 1, 40), "bool"),
        reference=lambda x, m: [softmax_of(np.where(m, x, x - 1e4))],
    ),
    small(
        "causal_softmax",
        causal_softmax,
        ((20, 20), "float16"),
        reference=lambda x: [softmax_of(np.tril(x))],
    ),
    small(
        "embed_rmsnorm",
        embed_rmsnorm,
        ((4, 64), "float16"),
        ((6,), "int64"),
        ((64,), "float16"),
        reference=lambda table, t, g: [rms_of(table[t], g)],
    ),
    small(
        "rotated_sum",
        rotated_sum,
        ((3, 32), "float32"),
        reference=lambda x: [x[:, :16].sum(-1) - x[:, 16:].sum(-1)],
    ),
    small(
        "padded_max",
        padded_max,
        ((4, 13), "float16"),
        reference=lambda x: [np.maximum(x.max(-1), 0.5)],
    ),
    small(
        "mean_of_two_axes",
        mean_of_two_axes,
        ((4, 6, 8), "float16"),
        reference=lambda x: [x.mean((-2, -1), keepdims=True)],
    ),
    small(
        "product_and_integer_sum",
        product_and_integer_sum,
        ((3, 40), "float32"),
        ((3, 40), "int8"),
        reference=lambda x, k: [x.prod(-1), k.sum(-1)],
    ),
    small(
        "sum_of_middle_axis",
        sum_of_middle_axis,
        ((3, 40, 5), "float16"),
        reference=lambda x: [x.sum(1)],
    ),
    small("softmax_double", softmax, ((3, 40), "float64"), reference=lambda x: [softmax_of(x)]),
    small(
        "odd_bfloat16",
        half_softmax,
        ((3, 41), "bfloat16"),
        reference=lambda x: [softmax_of(x)],
    ),
    small(
        "rows_under_two_shapes",
        log_sum_exp_reshaped,
        ((2, 3, 40), "float16"),
        reference=lambda x: [x.max(-1), np.exp(x)],
    ),
]


def check(case, config=None, hw=H200, exact=False, spoil=None, **changes):
    """Emits, runs on the emulator, compares; returns the program's kernel."""
    func = case.func()
    program = analyze(func, exact=exact)
    config = dataclasses.replace(config or row_configs(program, hw)[0], **changes)
    kernel = emit_row(program, config, hw)
    inputs = case.arrays()
    if spoil:
        spoil(inputs)
    assert_right(case, func, kernel, inputs)
    return kernel


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_best_guess_computes_what_float64_says(case):
    check(case)


LOOP, BULK, REGISTERS = Form.LOOP, Form.BULK, Form.REGISTERS

FORMS = {
    "less_than_a_warp": RowConfig(threads=4, rows=8),
    "one_lane": RowConfig(threads=1, rows=32),
    "a_warp_each": RowConfig(threads=32, rows=4),
    "two_warps": RowConfig(threads=64),
    "three_warps": RowConfig(threads=96),
    "many_warps": RowConfig(threads=512),
    "several_rows_of_several_warps": RowConfig(threads=64, rows=2),
    "without_online_sums": RowConfig(threads=64, online=False),
    "narrow_vectors": RowConfig(threads=64, width=2),
    "a_cluster": RowConfig(threads=32, cluster=4),
    "a_cluster_of_warps": RowConfig(threads=64, cluster=2),
    "a_loop": RowConfig(LOOP, 32, unroll=2),
    "a_loop_of_warps": RowConfig(LOOP, 64, unroll=3, load="cs", store="cs"),
    "a_prefetching_loop": RowConfig(LOOP, 32, unroll=1, prefetch=True, load="na", min_blocks=3),
    "a_loop_with_phases": RowConfig(LOOP, 64, unroll=1, online=False),
    "a_streaming_cluster": RowConfig(LOOP, 32, cluster=4, unroll=1),
    "a_prefetching_cluster": RowConfig(LOOP, 64, cluster=2, unroll=1, prefetch=True, load="na"),
    "a_ring": RowConfig(BULK, 32, resident=1),
    "a_ring_of_three": RowConfig(BULK, 64, resident=2, stages=3),
    "a_ring_of_clusters": RowConfig(BULK, 32, resident=1, cluster=2),
}
"""Forms a row of 1,040 columns can take; on few multiprocessors, resident blocks take turns."""

FEW_SMS = dataclasses.replace(H200, num_sms=5)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_computes_a_softmax(form):
    check(softmax_case(11, 1040), FORMS[form], FEW_SMS)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "form",
    ["less_than_a_warp", "three_warps", "a_cluster", "a_loop_of_warps", "a_ring_of_clusters"],
)
def test_every_form_computes_mixed_outputs(form):
    check(lse_case(11, 1040), FORMS[form], FEW_SMS)


@pytest.mark.parametrize("form", ["a_warp_each", "many_warps", "a_prefetching_loop", "a_ring"])
def test_every_form_computes_dependent_reductions(form):
    check(norm_case(7, 1040), FORMS[form], FEW_SMS)


@pytest.mark.parametrize(
    "form", ["two_warps", "a_cluster_of_warps", "a_prefetching_loop", "a_ring"]
)
def test_rows_that_are_all_but_one_minus_infinity_give_no_nan(form):
    def spoil(arrays):
        arrays[0][0, :520] = -np.inf
        arrays[0][1, 1:] = -np.inf

    check(softmax_case(6, 1040), FORMS[form], FEW_SMS, spoil=spoil)


def test_the_label_pick_of_a_cross_entropy_never_reads_out_of_bounds():
    check(loss_case(5, 1040), RowConfig(LOOP, 64, unroll=2, prefetch=True))


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_symbolic_rows_are_compiled_once_for_all_sizes(rows):
    n = tirx.Var("n", "int64")
    func = fuse(add_rmsnorm, ((n, 264), "float16"), ((n, 264), "float16"), ((264,), "float16"))
    program = analyze(func)
    kernel = emit_row(program, row_configs(program, H200)[0], H200)
    rng = np.random.default_rng(3)
    x, r, g = (rng.standard_normal(s).astype("float16") for s in ((rows, 264), (rows, 264), (264,)))
    outputs = [np.full_like(x, np.nan), np.full_like(x, np.nan)]
    run_cuda_on_cpu(kernel, [x, r, g, *outputs])
    s = x.astype("f8") + r.astype("f8")
    for output, expected in zip(outputs, [s, rms_of(s, g.astype("f8"))], strict=True):
        assert_close(output, expected, "float16")


def test_exact_rounding_rounds_what_the_unfused_graph_stores():
    x = np.random.default_rng(4).standard_normal((2, 64)).astype("float16")
    program = analyze(fuse(half_softmax, ((2, 64), "float16")), exact=True)
    y = np.full_like(x, np.nan)
    run_cuda_on_cpu(emit_row(program, row_configs(program, H200)[0], H200), [x, y])
    difference = (x - x.max(-1, keepdims=True)).astype("float32")
    e = np.exp(difference).astype("float16").astype("float32")
    total = e.astype("f8").sum(-1, keepdims=True).astype("float16").astype("float32")
    np.testing.assert_array_equal(y, (e / total).astype("float16"))


def test_listed_configurations_run():
    case = add_rms_case(5, 520)
    configs = row_configs(analyze(case.func()), H200)
    for config in configs[:: len(configs) // 8]:
        check(case, config)


def config_of(case, hw=H200):
    return row_configs(analyze(case.func()), hw)[0]


@pytest.mark.parametrize(
    ("case", "forms", "several", "clusters"),
    [
        (softmax_case(65536, 128), [REGISTERS], True, [1]),
        (softmax_case(8192, 4096), [REGISTERS], False, [1]),
        (softmax_case(8192, 5003), [REGISTERS], False, [1]),
        (softmax_case(1, 65536), [REGISTERS, LOOP], False, [8]),
        (softmax_case(4096, 65536), [LOOP, BULK], False, [1, 2]),
        (loss_case(4096, 32000), [LOOP], False, [1]),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_the_best_guess_follows_the_length_of_the_rows(case, forms, several, clusters):
    config = config_of(case)
    assert config.form in forms
    assert config.cluster in clusters
    assert (config.rows >= 8) == several


def test_devices_without_clusters_stream_long_rows():
    assert config_of(softmax_case(4096, 65536), A100).form is LOOP
    check(softmax_case(2, 1040), FORMS["a_loop"], A100)


def test_clusters_are_refused_on_devices_without_them():
    program = analyze(softmax_case(2, 1040).func())
    with pytest.raises(Unsupported, match="no thread block clusters"):
        emit_row(program, FORMS["a_cluster"], A100)


def test_programs_without_reductions_are_refused():
    program = analyze(fuse(lambda bb, x: op.exp(x), ((4, 8), "float16")))
    with pytest.raises(Unsupported, match="does not reduce"):
        emit_row(program, RowConfig(), H200)


@pytest.mark.parametrize("config", [RowConfig(threads=4, rows=2), RowConfig(threads=48)], ids=str)
def test_blocks_that_are_not_whole_warps_are_refused(config):
    with pytest.raises(Unsupported, match="threads"):
        emit_row(analyze(softmax_case(2, 1040).func()), config, H200)


def softmax_of_slice(bb, x):
    size = int(x.ty.shape[1])
    return op.nn.softmax(bb.emit(op.strided_slice(x, [1], [4], [size - 12])), axis=-1)


STREAMS = [
    (
        "picked by data",
        embed_rmsnorm,
        lambda n: [((4, n), "float16"), ((6,), "int64"), ((n,), "float16")],
    ),
    ("not aligned", softmax_of_slice, lambda n: [((6, n + 16), "float16")]),
]


@pytest.mark.parametrize(("emit", "inputs"), [s[1:] for s in STREAMS], ids=[s[0] for s in STREAMS])
def test_rows_that_bulk_copies_cannot_bring_are_not_streamed(emit, inputs):
    with pytest.raises(Unsupported, match="cannot be streamed"):
        emit_row(analyze(fuse(emit, *inputs(1040))), FORMS["a_ring"], H200)
    assert row_configs(analyze(fuse(emit, *inputs(65536))), H200)[0].form is not BULK


def test_equal_programs_give_equal_code():
    case = add_rms_case(5, 1000)
    kernels = [emit_row(analyze(case.func()), config_of(case), H200) for _ in range(2)]
    assert cuda_source(kernels[0]) == cuda_source(kernels[1])


@T.prim_func(s_tir=True)
def all_and_any(X: T.Buffer((5, 24), "bool"), A: T.Buffer((5,), "bool"), B: T.Buffer((5,), "bool")):
    for i, k in T.grid(5, 24):
        with T.sblock("all"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                A[vi] = T.bool(True)
            A[vi] = A[vi] and X[vi, vk]
    for i, k in T.grid(5, 24):
        with T.sblock("any"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                B[vi] = T.bool(False)
            B[vi] = B[vi] or X[vi, vk]


def test_bools_are_reduced_by_all_and_any():
    x = np.random.default_rng(5).random((5, 24)) < 0.5
    x[0], x[1] = True, False
    every, some = np.zeros(5, bool), np.zeros(5, bool)
    program = analyze(all_and_any)
    run_cuda_on_cpu(emit_row(program, row_configs(program, H200)[0], H200), [x, every, some])
    np.testing.assert_array_equal(every, x.all(-1))
    np.testing.assert_array_equal(some, x.any(-1))


@T.prim_func(s_tir=True)
def pick_of_a_pick(
    X: T.Buffer((5, 24), "float32"),
    U: T.Buffer((5, 3), "int64"),
    V: T.Buffer((5,), "int64"),
    Y: T.Buffer((5,), "float32"),
):
    S = T.sblock_alloc_buffer((5,), "float32")
    for i, k in T.grid(5, 24):
        with T.sblock("sum"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                S[vi] = T.float32(0)
            S[vi] = S[vi] + X[vi, vk]
    for i in range(5):
        with T.sblock("pick"):
            vi = T.axis.spatial(5, i)
            Y[vi] = S[vi] + T.if_then_else(V[vi] >= T.int64(0), X[vi, U[vi, V[vi]]], T.float32(0))


def test_a_conditional_pick_may_depend_on_another():
    rng = np.random.default_rng(7)
    x = rng.standard_normal((5, 24)).astype("float32")
    u, v = rng.integers(0, 24, (5, 3)), np.array([2, -1, 0, 1, -(10**6)])
    y = np.full(5, np.nan, "float32")
    program = analyze(pick_of_a_pick)
    run_cuda_on_cpu(emit_row(program, row_configs(program, H200)[0], H200), [x, u, v, y])
    picked = [x[i, u[i, v[i]]] if v[i] >= 0 else 0.0 for i in range(5)]
    assert_close(y, x.astype("f8").sum(-1) + np.array(picked), "float32")


@T.prim_func(s_tir=True)
def sum_from_two(X: T.Buffer((5, 24), "float32"), Y: T.Buffer((5,), "float32")):
    for i, k in T.grid(5, 24):
        with T.sblock("sum"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                Y[vi] = T.float32(2)
            Y[vi] = Y[vi] + X[vi, vk]


def test_an_initial_value_that_counts_is_added_once():
    x = np.random.default_rng(6).standard_normal((5, 24)).astype("float32")
    y = np.full(5, np.nan, "float32")
    run_cuda_on_cpu(emit_row(analyze(sum_from_two), RowConfig(threads=64, width=4), H200), [x, y])
    assert_close(y, 2 + x.astype("f8").sum(-1), "float32")


def test_a_softmax_has_one_barrier():
    kernel = emit_row(analyze(softmax_case(5, 4096).func()), RowConfig(threads=128), H200)
    source = cuda_source(kernel)
    assert source[source.rindex('extern "C"') :].count("tvm_builtin_cuda_cta_sync()") == 1


LARGE = [
    softmax_case(8192, 4096),
    softmax_case(4096, 65536),
    softmax_case(8192, 5003),
    norm_case(8192, 4096),
    add_rms_case(8192, 4096),
    add_rms_case(8192, 4096, "float32"),
    rms_case(8192, 16384),
    loss_case(4096, 32000),
    exp_sum_case(8192, 8192),
]


def test_all_kernels_become_cubins_without_spills():
    kernels = {}
    for case in CASES + LARGE:
        program = analyze(case.func())
        kernels[case.name] = emit_row(program, row_configs(program, H200)[0], H200)
    resources = compile_cubins(kernels)
    assert {r.kernel for r in resources} == set(kernels)
    assert [r for r in resources if r.spill_bytes] == []


def test_a_sum_over_axes_of_one_element_is_written():
    """A filter of one channel and one tap: the columns are all at 0, of the type of the index."""

    def convolved(bb, x, w):
        return op.nn.conv1d(x, w, padding=1, groups=4)

    program = analyze(fuse(convolved, ((8, 4, 16), "float32"), ((4, 1, 1), "float32")))
    assert (len(program.reductions), int(program.columns)) == (1, 1)
