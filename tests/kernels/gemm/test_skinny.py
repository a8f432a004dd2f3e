"""Skinny products on CUDA: numbers on the emulator against float64, resources, PTX, refusals."""

import dataclasses
import re
import subprocess

import numpy as np
import pytest
import tvm_ffi
from tvm import relax, te, tirx
from tvm.ir.prim.expr import BitwiseAnd, RShift
from tvm.relax import op

from tvm_fusion.config import load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.skinny.bits import Field, field_of, linear_of
from tvm_fusion.kernels.gemm.skinny.config import SkinnyConfig
from tvm_fusion.kernels.gemm.skinny.kernel import emit_gemm_skinny
from tvm_fusion.kernels.gemm.skinny.rank import skinny_ranked

from ...support import gemm_cases as graphs
from ...support.cuda_on_cpu import compile_cubins, cuda_source, run_cuda_on_cpu
from ...support.gemm_cases import BRAIN, FLOAT, HALF, case
from ...support.kernel_cases import TOLERANCE, Case, assert_close, fuse, outputs_of

H200, A100 = load_profile("nvidia_h200"), load_profile("nvidia_a100")
TINY_H200 = dataclasses.replace(H200, num_sms=2)

# ---- graphs


def linear_of_int8(bb, x, w, s):
    """x (w s)^T with a factor for each column."""
    weights = bb.emit(op.multiply(bb.emit(op.astype(w, str(x.ty.dtype))), s))
    return op.matmul(x, bb.emit(op.permute_dims(weights, (1, 0))))


def linear_of_int4(group, zeros=False, transposed=False):
    """Weights of 4 bits, eight in an int32 along the sum, in groups with a factor each."""

    def dequantised(w, s, z, depth, dtype):
        def element(n, k):
            at = (k // 8, n) if transposed else (n, k // 8)
            number = (w[at] >> (k % 8 * 4).astype("int32")) & 15
            place = (k // group, n) if transposed else (n, k // group)
            zero = z[place] if zeros else tirx.const(8, dtype)
            return (number.astype(dtype) - zero) * s[place]

        columns = w.shape[1 if transposed else 0]
        return te.compute((columns, depth), element, name="weights")

    def emit(bb, x, w, s, *z):
        depth, dtype = int(x.ty.shape[-1]), str(x.ty.dtype)

        def compute(*args):
            return dequantised(args[0], args[1], args[-1], depth, dtype)

        weights = bb.emit_te(compute, w, s, *z)
        return op.matmul(x, bb.emit(op.permute_dims(weights, (1, 0))))

    return emit


def matmul_of_int4(bb, x, w, z, s):
    """Weights of 4 bits, eight in an int32 along the columns, with zero points."""

    def compute(w, z, s):
        def element(k, n):
            number = (w[k, n // 8] >> (n % 8 * 4).astype("int32")) & 15
            return (number.astype(HALF) - z[k // 64, n]) * s[k // 64, n]

        return te.compute((w.shape[0], w.shape[1] * 8), element, name="weights")

    return op.matmul(x, bb.emit_te(compute, w, z, s))


def linear_of_bytes(bb, x, w, s):
    """Weights of 4 bits, two in a byte, signed."""

    def compute(w, s):
        def element(n, k):
            number = (w[n, k // 2] >> (k % 2 * 4).astype("uint8")) & tirx.const(15, "uint8")
            return (number.astype(HALF) - tirx.const(8, HALF)) * s[n]

        return te.compute((w.shape[0], int(x.ty.shape[-1])), element, name="weights")

    return op.matmul(x, bb.emit(op.permute_dims(bb.emit_te(compute, w, s), (1, 0))))


def linear_of_halves(bb, x, w, s):
    """Weights of 4 bits, two in a byte: those of the first half of the sum in the lower bits."""
    half = int(w.ty.shape[1])

    def compute(w, s):
        def element(n, k):
            number = (w[n, k % half] >> (k // half * 4).astype("uint8")) & tirx.const(15, "uint8")
            return (number.astype(HALF) - tirx.const(8, HALF)) * s[n]

        return te.compute((w.shape[0], 2 * half), element, name="weights")

    return op.matmul(x, bb.emit(op.permute_dims(bb.emit_te(compute, w, s), (1, 0))))


def silu_times_up(bb, g, u, w):
    activation = bb.emit(op.multiply(bb.emit(op.nn.silu(g)), u))
    return op.matmul(activation, bb.emit(op.permute_dims(w, (1, 0))))


def row_factor(bb, x, s, w):
    scaled = bb.emit(op.multiply(x, s))
    return op.matmul(scaled, bb.emit(op.permute_dims(w, (1, 0))))


def linear_gate_up(bb, x, g, u):
    gate, up = (bb.emit(graphs.linear(bb, x, w)) for w in (g, u))
    return op.multiply(bb.emit(op.nn.silu(gate)), up)


def decode_scores(bb, q, k):
    """Scores of one token: heads share keys in groups, [b, g, h, d] by [b, s, g * d]."""
    b, g, _, d = (int(n) for n in q.ty.shape)
    keys = bb.emit(op.reshape(k, (b, int(k.ty.shape[1]), g, d)))
    keys = bb.emit(op.permute_dims(keys, (0, 2, 3, 1)))
    return op.multiply(bb.emit(op.matmul(q, keys)), relax.const(0.125, HALF))


def decode_values(bb, p, v):
    """Values of one token, merged: [b, h, 1, s] by [b, s, h * d]."""
    b, h, _, s = (int(n) for n in p.ty.shape)
    width = int(v.ty.shape[2])
    values = bb.emit(op.reshape(v, (b, s, h, width // h)))
    out = bb.emit(op.matmul(p, bb.emit(op.permute_dims(values, (0, 2, 1, 3)))))
    return op.reshape(bb.emit(op.permute_dims(out, (0, 2, 1, 3))), (b, 1, width))


# ---- cases


def whole(low, high, dtype, shape):
    return lambda rng: rng.integers(low, high, shape).astype(dtype)


def fours(w, depth):
    """The numbers of 4 bits in words along the last axis."""
    k = np.arange(depth)
    return (w.astype(np.int64)[:, k // 8] >> (k % 8 * 4)) & 15


def int4_case(name, m, n, k, group, dtype=HALF):
    def reference(x, w, s):
        return [x @ ((fours(w, k) - 8) * s[:, np.arange(k) // group]).T]

    inputs = (((m, k), dtype), ((n, k // 8), "int32"), ((n, k // group), dtype))
    words = whole(-(2**31), 2**31 - 1, "int32", (n, k // 8))
    return Case(name, linear_of_int4(group), inputs, reference, {1: words})


def int8_case(name, m, n, k, dtype=HALF):
    inputs = (((m, k), dtype), ((n, k), "int8"), ((n, 1), dtype))
    make = {1: whole(-128, 127, "int8", (n, k))}
    return Case(name, linear_of_int8, inputs, lambda x, w, s: [x @ (w * s).T], make)


def decode_scores_of(q, k):
    b, g, _, d = q.shape
    return [q @ k.reshape(b, -1, g, d).transpose(0, 2, 3, 1) * 0.125]


def decode_values_of(p, v):
    b, h, _, s = p.shape
    out = p @ v.reshape(b, s, h, -1).transpose(0, 2, 1, 3)
    return [out.transpose(0, 2, 1, 3).reshape(b, 1, -1)]


def int4_zeros(x, w, s, z):
    group = np.arange(256) // 128
    return [x @ ((fours(w, 256) - z[:, group]) * s[:, group]).T]


def int4_transposed(x, w, s):
    return [x @ ((fours(w.T, 256) - 8) * s.T[:, np.arange(256) // 128]).T]


def int4_along_n(x, w, z, s):
    group = np.arange(128) // 64
    return [x @ ((fours(w, 48) - z[group]) * s[group])]


def bytes_of_fours(x, w, s):
    k = np.arange(256)
    return [x @ (((w[:, k // 2] >> (k % 2 * 4)) & 15).astype(int) - 8).T * s]


def halves_of_fours(x, w, s):
    return [x @ (np.concatenate([w & 15, w >> 4], 1).astype(int) - 8).T * s]


WORDS = whole(-(2**31), 2**31 - 1, "int32", (24, 32))
CASES = [
    case("1 row", graphs.linear, [(1, 512), (72, 512)], lambda x, w: [x @ w.T]),
    case("16 rows", graphs.linear, [(16, 512), (72, 512)], lambda x, w: [x @ w.T]),
    case("2 rows, (K, N)", graphs.matmul, [(2, 256), (256, 72)], lambda x, w: [x @ w]),
    case("5 rows, (K, N)", graphs.matmul, [(5, 256), (256, 72)], lambda x, w: [x @ w]),
    case("gate and up", linear_gate_up, [(1, 256), (48, 256), (48, 256)],
         lambda x, g, u: [(x @ g.T) * graphs.sigmoid(x @ g.T) * (x @ u.T)]),
    case("gate and up, (K, N)", graphs.gate_up, [(2, 64), (64, 48), (64, 48)],
         lambda x, g, u: [(x @ g) * graphs.sigmoid(x @ g) * (x @ u)]),
    case("q, k, v", graphs.qkv_bias, [(3, 64), (64, 48), (64, 16), (64, 16), (48,), (16,), (16,)],
         lambda x, q, k, v, a, b, c: [x @ q + a, x @ k + b, x @ v + c]),
    int8_case("int8", 3, 40, 128),
    int8_case("int8 by bfloat16", 2, 40, 128, BRAIN),
    int4_case("int4, a group a step", 1, 24, 256, 128),
    int4_case("int4, groups of a thread", 5, 24, 256, 32),
    int4_case("int4, groups of two threads", 2, 24, 256, 64),
    int4_case("int4 by bfloat16", 2, 24, 256, 128, BRAIN),
    int4_case("int4, 16 rows", 16, 24, 256, 128),
    Case("int4 with zero points", linear_of_int4(128, zeros=True),
         (((2, 256), HALF), ((24, 32), "int32"), ((24, 2), HALF), ((24, 2), HALF)), int4_zeros,
         {1: WORDS, 3: lambda rng: rng.integers(0, 16, (24, 2)).astype(HALF)}),
    Case("int4, (K, N)", linear_of_int4(128, transposed=True),
         (((2, 256), HALF), ((32, 24), "int32"), ((2, 24), HALF)), int4_transposed,
         {1: whole(-(2**31), 2**31 - 1, "int32", (32, 24))}),
    Case("int4 along the columns", matmul_of_int4,
         (((3, 128), HALF), ((128, 6), "int32"), ((2, 48), HALF), ((2, 48), HALF)), int4_along_n,
         {1: whole(-(2**31), 2**31 - 1, "int32", (128, 6)),
          2: lambda rng: rng.integers(0, 16, (2, 48)).astype(HALF)}),
    Case("int4 in bytes", linear_of_bytes,
         (((2, 256), HALF), ((24, 128), "uint8"), ((24,), HALF)), bytes_of_fours,
         {1: whole(0, 256, "uint8", (24, 128))}),
    Case("int4 in halves", linear_of_halves,
         (((2, 256), HALF), ((24, 128), "uint8"), ((24,), HALF)), halves_of_fours,
         {1: whole(0, 256, "uint8", (24, 128))}),
    case("computed rows", silu_times_up, [(2, 256), (2, 256), (40, 256)],
         lambda g, u, w: [(g * graphs.sigmoid(g) * u) @ w.T]),
    case("rows with a factor", row_factor, [(3, 256), (3, 1), (40, 256)],
         lambda x, s, w: [(x * s) @ w.T]),
    case("odd sizes", graphs.linear, [(2, 51), (43, 51)], lambda x, w: [x @ w.T]),
    case("odd columns", graphs.linear_bias_residual, [(2, 64), (43, 64), (43,), (2, 43)],
         lambda x, w, b, r: [x @ w.T + b + r]),
    case("pitch of 8 bytes", graphs.linear, [(1, 36), (20, 36)], lambda x, w: [x @ w.T]),
    case("scores of one token", decode_scores, [(2, 2, 3, 32), (2, 40, 64)], decode_scores_of),
    case("values of one token", decode_values, [(2, 2, 1, 40), (2, 40, 64)], decode_values_of),
    case("bfloat16", graphs.linear, [(2, 256), (40, 256)], lambda x, w: [x @ w.T], BRAIN),
    case("float32", graphs.linear, [(2, 256), (40, 256)], lambda x, w: [x @ w.T], FLOAT),
    case("float64", graphs.matmul, [(2, 33), (33, 17)], lambda x, w: [x @ w], "float64"),
    case("two outputs", graphs.two_outputs, [(2, 64), (64, 40)],
         lambda x, w: [x @ w, np.maximum(x @ w, 0)]),
    case("sum of integers", graphs.integers, [(2, 64), (64, 40)],
         lambda x, w: [x.astype(int) @ w.astype(int)], "int8"),
]  # fmt: skip


def kinds(each: Case) -> dict[tuple[str, int], SkinnyConfig]:
    """The best configuration of every way to multiply."""
    best = {}
    for _, config in skinny_ranked(analyze_contraction(each.func()), TINY_H200):
        best.setdefault((config.tensor, config.width), config)
    return best


def by_name(name: str) -> Case:
    return next(each for each in CASES if each.name == name)


def check(each: Case, kernel: tirx.PrimFunc, slack: float = 2.0) -> None:
    """Every output is poisoned before, and close to float64 after."""
    inputs = each.arrays()
    outputs = outputs_of(each.func(), len(inputs))
    assert run_cuda_on_cpu(kernel, [*inputs, *outputs]) == 1
    for got, expected in zip(outputs, each.expected(inputs), strict=True):
        dtype = str(got.dtype)
        if dtype not in TOLERANCE:
            assert_close(got, expected, dtype)
            continue
        error = np.abs(got.astype(np.float64) - expected.reshape(got.shape)).max()
        assert error <= slack * TOLERANCE[dtype] * np.abs(expected).max()


# ---- numbers


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", [each.name for each in CASES])
def test_the_kernels_of_all_ways_to_multiply_are_close_to_float64(name):
    """Looked for in the test: ranking the ways of all cases took 5 s of each process's start."""
    each = by_name(name)
    for config in kinds(each).values():
        check(each, emit_gemm_skinny(analyze_contraction(each.func()), TINY_H200, config))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", ["16 rows", "int4, a group a step", "int4, (K, N)"])
def test_weights_on_their_way_through_shared_memory_arrive(name, stages):
    each = by_name(name)
    contraction = analyze_contraction(each.func())
    config = next(c for _, c in skinny_ranked(contraction, TINY_H200) if c.stages)
    config = dataclasses.replace(config, stages=stages)
    check(each, emit_gemm_skinny(contraction, TINY_H200, config))


@pytest.mark.parametrize("name", ["int4, groups of a thread", "computed rows"])
def test_exact_rounding_keeps_the_halves_between_operators(name):
    each = by_name(name)
    check(each, emit_gemm_skinny(analyze_contraction(each.func(), exact=True), TINY_H200), 4.0)


# ---- bits


def word(bits=32, signed=True):
    return tirx.Var("h", f"{'int' if signed else 'uint'}{bits}")


def shape_of(found: Field) -> tuple[int, int, bool]:
    return found.shift, found.bits, found.signed


W, B = word(), word(8, signed=False)


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        ((W >> 12) & 15, (12, 4, False)),
        (tirx.Cast("int64", W) >> tirx.const(28, "int64"), (28, 4, True)),
        ((W << 24) >> 28, (4, 4, True)),
        (tirx.FloorDiv(B, tirx.const(16, "uint8")), (4, 4, False)),
        (tirx.FloorMod(B, tirx.const(16, "uint8")), (0, 4, False)),
        (tirx.Cast("int32", B), (0, 8, False)),
        (tirx.Cast("int8", W >> 8), (8, 8, True)),
    ],
)
def test_a_field_follows_from_shifts_masks_and_casts(expr, expected):
    found = field_of(expr)
    assert found is not None
    assert shape_of(found) == expected


SEVENTY, ALL = tirx.const(70, "int32"), tirx.const(-1, "int32")
OTHERS = [W + 1, W * 3, W & 5, tirx.FloorDiv(W, 3), W >> word(), BitwiseAnd(W, ALL)]
OTHERS += [kind(SEVENTY, W) for kind in (RShift, tirx.FloorDiv, tirx.FloorMod)]


@pytest.mark.parametrize("expr", OTHERS)
def test_other_integers_are_no_fields(expr):
    assert field_of(expr) is None


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_a_byte_of_a_word_keeps_its_sign_on_its_way_to_a_half(dtype):
    byte = tirx.Cast(dtype, BitwiseAnd(W, tirx.const(255, "int32")))
    found = linear_of(tirx.Cast(FLOAT, tirx.Cast(HALF, byte)), lambda _: False)
    assert shape_of(found.field) == (0, 8, dtype == "int8")


def test_a_difference_that_wraps_around_is_not_folded_into_the_conversion():
    wrapped = tirx.Cast("uint32", (W & 15) - 8)
    assert linear_of(tirx.Cast(FLOAT, wrapped), lambda _: False) is None


def test_a_zero_point_is_folded_into_the_conversion():
    expr = tirx.Cast(FLOAT, (W >> 4) & 15) - tirx.const(8.0, FLOAT)
    found = linear_of(expr, lambda _: False)
    assert (found.scale, found.shift, found.rest) == (1.0, -8.0, None)
    inside = linear_of(tirx.Cast(FLOAT, ((W >> 4) & 15) - 8), lambda _: False)
    assert (inside.scale, inside.shift) == (1.0, -8.0)


# ---- the code

X, X16, FOURS = ((1, 4096), HALF), ((16, 4096), HALF), ((4096, 512), "int32")
LARGE = {
    "half_1": (graphs.linear, X, ((11008, 4096), HALF)),
    "half_4": (graphs.linear, ((4, 4096), HALF), ((11008, 4096), HALF)),
    "half_16": (graphs.linear, X16, ((11008, 4096), HALF)),
    "wide_2": (graphs.matmul, ((2, 4096), HALF), ((4096, 11008), HALF)),
    "gate_1": (linear_gate_up, X, *[((11008, 4096), HALF)] * 2),
    "int8_1": (linear_of_int8, X, ((11008, 4096), "int8"), ((11008, 1), HALF)),
    "int4_1": (linear_of_int4(128), X, ((11008, 512), "int32"), ((11008, 32), HALF)),
    "rows_4": (
        matmul_of_int4,
        ((4, 4096), HALF),
        ((4096, 1376), "int32"),
        *[((64, 11008), HALF)] * 2,
    ),
    "words_1": (
        linear_of_int4(128, transposed=True),
        X,
        ((512, 11008), "int32"),
        ((32, 11008), HALF),
    ),
    "int4_16": (linear_of_int4(128), X16, FOURS, ((4096, 32), HALF)),
}


def large(name: str):
    emit, *inputs = LARGE[name]
    return analyze_contraction(fuse(emit, *inputs))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("profile", "arch"), [(H200, "sm_90a"), (A100, "sm_80")])
def test_large_kernels_compile_without_spills(profile, arch):
    kernels = {name: emit_gemm_skinny(large(name), profile) for name in LARGE}
    compiled = compile_cubins(kernels, arch)
    assert [r.kernel for r in compiled if r.spill_bytes] == []
    assert len(compiled) == len(LARGE)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["half_1", "half_16", "wide_2", "int8_1", "int4_1"])
def test_weights_are_loaded_16_bytes_at_a_time(name, tmp_path):
    contraction = large(name)
    config = next(c for _, c in skinny_ranked(contraction, H200) if c.stages == 0)
    source = cuda_source(emit_gemm_skinny(contraction, H200, config))
    weights = re.findall(r"tvmf_load(\d+)_na\(\(&\(\w+\[\w+\]\)\), \(&\(p1_ptr", source)
    assert weights
    assert set(weights) == {"16"}
    code = tmp_path / "kernel.cu"
    code.write_text(source)
    ptx = tmp_path / "kernel.ptx"
    command = ["nvcc", "-arch=sm_90a", "-ptx", "-diag-suppress=177", "-o", str(ptx), str(code)]
    subprocess.run(command, check=True, capture_output=True)
    assert "ld.global.nc.L1::no_allocate.v4.u32" in ptx.read_text()


def test_small_integers_are_converted_without_conversion_instructions():
    for name in ("int8_1", "int4_1"):
        source = cuda_source(emit_gemm_skinny(large(name), H200))
        assert "tvmf_masked" in source
        assert not re.search(r"\(float\)\(?\(?\w+ >> ", source)


# ---- the shell


def test_the_kernel_keeps_its_name_and_says_what_it_is():
    func = by_name("q, k, v").func().with_attr("global_symbol", "fused_qkv")
    kernel = emit_gemm_skinny(analyze_contraction(func), H200)
    assert kernel.attrs["global_symbol"] == "fused_qkv"
    assert kernel.attrs["op_pattern"] == 8
    for name in ("tirx.is_scheduled", "tirx.noalias", "tvm_fusion.tirx"):
        assert bool(kernel.attrs[name])


def test_equal_functions_give_equal_kernels():
    each = by_name("int4, a group a step")
    first, second = (emit_gemm_skinny(analyze_contraction(each.func()), H200) for _ in range(2))
    assert tvm_ffi.structural_equal(first, second)
    assert cuda_source(first) == cuda_source(second)


def test_predicted_times_rise_and_follow_the_bytes():
    times = {name: [s for s, _ in skinny_ranked(large(name), H200)] for name in LARGE}
    for ranked in times.values():
        assert ranked == sorted(ranked)
        assert ranked[0] > 0
    assert times["int4_1"][0] < 0.6 * times["half_1"][0]
    assert times["half_1"][0] < times["gate_1"][0]


def test_many_rows_are_multiplied_on_tensor_cores():
    assert skinny_ranked(large("half_16"), H200)[0][1].tensor == HALF


REFUSED = {
    "17 rows": (graphs.linear, ((17, 64), HALF), ((64, 64), HALF)),
    "symbolic": (graphs.linear, ((tirx.Var("n", "int64"), 64), HALF), ((64, 64), HALF)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_shapes_are_refused(name):
    emit, *inputs = REFUSED[name]
    contraction = analyze_contraction(fuse(emit, *inputs))
    with pytest.raises(Unsupported):
        skinny_ranked(contraction, H200)
    with pytest.raises(Unsupported):
        emit_gemm_skinny(contraction, H200)


def test_older_devices_are_refused():
    turing = dataclasses.replace(A100, arch="sm_75")
    with pytest.raises(Unsupported, match="sm_80"):
        skinny_ranked(large("half_1"), turing)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"steps": 3}, "runs of 3"),
        ({"tensor": BRAIN, "steps": 8}, "not bfloat16"),
        ({"warps_k": 32, "warps_n": 2}, "threads"),
        ({"stages": 64}, "ring"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(change, why):
    contraction = large("half_1")
    config = dataclasses.replace(skinny_ranked(contraction, H200)[0][1], **change)
    with pytest.raises(Unsupported, match=why):
        emit_gemm_skinny(contraction, H200, config)
