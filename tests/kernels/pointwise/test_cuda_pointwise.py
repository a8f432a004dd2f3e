"""Pointwise CUDA kernels: numbers on the CPU emulator against float64, widths, resources."""

import dataclasses

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm.ir import TensorLoad, Var
from tvm.relax import op
from tvm.script import tirx as T

from tvm_fusion.config import load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.gpu import vectors
from tvm_fusion.kernels.pointwise.kernel import (
    PointwiseConfig,
    emit_pointwise,
    pointwise_config,
    pointwise_configs,
)
from tvm_fusion.kernels.program.analysis import analyze

from ...support.cuda_on_cpu import compile_cubins, cuda_source, ptxas_report, run_cuda_on_cpu
from ...support.kernel_cases import Case, assert_close, chain, fuse, gelu_of, rope, rotate_half
from ...support.kernel_checks import assert_right

H200 = load_profile("nvidia_h200")


def bias_gelu(bb, x, b):
    return op.nn.gelu(bb.emit(op.add(x, b)))


def two_outputs(bb, x, b):
    s = bb.emit(op.add(x, b))
    return relax.Tuple([bb.emit(op.tanh(s)), bb.emit(op.multiply(bb.emit(op.sigmoid(s)), x))])


def transpose_add(bb, x, y):
    return op.add(bb.emit(op.permute_dims(x, [1, 0])), y)


def merge_heads(bb, x):
    """[B, H, S, D] -> [B, S, H * D]."""
    b, h, s, d = (int(extent) for extent in x.ty.shape)
    return op.exp(bb.emit(op.reshape(bb.emit(op.permute_dims(x, [0, 2, 1, 3])), (b, s, h * d))))


def take_rows(bb, x, rows):
    return op.multiply(bb.emit(op.take(x, rows, axis=0)), relax.const(2.0, str(x.ty.dtype)))


def take_columns(bb, x, columns):
    return op.exp(bb.emit(op.take(x, columns, axis=1)))


def pick_or_zero(bb, x, mask):
    return op.where(mask, bb.emit(op.exp(x)), bb.emit(op.nn.relu(x)))


def pad(bb, x):
    return op.exp(bb.emit(op.nn.pad(x, [0, 0, 3, 2], pad_value=-1.0)))


def concat(bb, x, y):
    return op.concat([bb.emit(op.exp(x)), y], axis=-1)


def stride_two(bb, x):
    return op.negative(bb.emit(op.strided_slice(x, [1], [1], [999], [2])))


def slice_columns(bb, x):
    return op.exp(bb.emit(op.strided_slice(x, [1], [4], [20])))


def with_transpose(bb, x, y):
    """Two outputs over different axes."""
    return relax.Tuple([bb.emit(op.exp(x)), bb.emit(op.permute_dims(bb.emit(op.exp(y)), [1, 0]))])


def heads_and_keys(bb, q, k):
    """[B, S, H, D] -> [B, H, S, D] and [B, H, D, S], as attention wants them."""
    heads = bb.emit(op.permute_dims(bb.emit(op.negative(q)), [0, 2, 1, 3]))
    return relax.Tuple([heads, bb.emit(op.permute_dims(bb.emit(op.negative(k)), [0, 2, 3, 1]))])


def reshaped_outputs(bb, x):
    e = bb.emit(op.exp(x))
    return relax.Tuple([e, bb.emit(op.reshape(bb.emit(op.negative(x)), (2, 12)))])


def integers(bb, x, y):
    s = bb.emit(op.add(x, y))
    return relax.Tuple(
        [bb.emit(op.floor_divide(s, relax.const(3, str(x.ty.dtype)))), bb.emit(op.less(x, y))]
    )


def functions(bb, x):
    cube = op.power(x, relax.const(3.0, "float32"))
    parts = [op.sin(x), op.cos(x), op.sqrt(bb.emit(op.abs(x))), cube]
    return relax.Tuple([bb.emit(part) for part in parts])


def general_power(bb, x, y):
    return op.power(x, y)


def cast_down(bb, x):
    return op.astype(bb.emit(op.multiply(x, relax.const(3.0, "float32"))), "bfloat16")


def silu(x):
    return x / (1 + np.exp(-x))


def case(name, emit, *inputs, reference, make=None):
    return Case(name, emit, inputs, reference, make or {})


def bf16(shape):
    return (shape, "bfloat16")


def f16(*shape):
    return (shape, "float16")


def f32(*shape):
    return (shape, "float32")


def chain_of(x):
    return [np.maximum(np.exp(0.5 * x) + x, 0)]


def two_of(x, b):
    s = x + b
    return [np.tanh(s), x / (1 + np.exp(-s))]


def turned(x):
    h = x.shape[-1] // 2
    return np.concatenate([-x[..., h:], x[..., :h]], -1)


CASES = [
    case("chain", chain, f16(6, 40), reference=chain_of),
    case("chain_one_element", chain, f16(1, 1), reference=chain_of),
    case("chain_prime", chain, f16(7, 13), reference=chain_of),
    case("chain_one_off_a_vector", chain, f16(3, 257), reference=chain_of),
    case("chain_float32", chain, f32(5, 33), reference=chain_of),
    case("chain_bfloat16", chain, bf16((5, 24)), reference=chain_of),
    case("bias_gelu", bias_gelu, f16(4, 40), f16(40), reference=lambda x, b: [gelu_of(x + b)]),
    case("bias_gelu_odd", bias_gelu, f16(3, 7), f16(7), reference=lambda x, b: [gelu_of(x + b)]),
    case("two_outputs", two_outputs, f16(2, 3, 24), f16(24), reference=two_of),
    case("broadcast_column", two_outputs, f16(5, 24), f16(5, 1), reference=two_of),
    case("broadcast_middle", two_outputs, f32(2, 3, 8), f32(2, 1, 8), reference=two_of),
    case(
        "transpose_add", transpose_add, f16(12, 20), f16(20, 12), reference=lambda x, y: [x.T + y]
    ),
    case(
        "merge_heads",
        merge_heads,
        f16(2, 3, 5, 16),
        reference=lambda x: [np.exp(x.transpose(0, 2, 1, 3).reshape(2, 5, 48))],
    ),
    case("take_rows", take_rows, f16(4, 24), ((5,), "int64"), reference=lambda x, t: [2 * x[t]]),
    case(
        "take_columns",
        take_columns,
        f16(5, 4),
        ((9,), "int32"),
        reference=lambda x, t: [np.exp(x[:, t])],
    ),
    case(
        "mask",
        pick_or_zero,
        f16(5, 9),
        ((5, 9), "bool"),
        reference=lambda x, m: [np.where(m, np.exp(x), np.maximum(x, 0))],
    ),
    case(
        "pad",
        pad,
        f16(3, 11),
        reference=lambda x: [np.exp(np.pad(x, [(0, 0), (3, 2)], constant_values=-1.0))],
    ),
    case(
        "concat_between_vectors",
        concat,
        f16(3, 6),
        f16(3, 10),
        reference=lambda x, y: [np.concatenate([np.exp(x), y], -1)],
    ),
    case(
        "concat_of_vectors",
        concat,
        f16(3, 16),
        f16(3, 24),
        reference=lambda x, y: [np.concatenate([np.exp(x), y], -1)],
    ),
    case("stride_two", stride_two, f16(3, 20), reference=lambda x: [-x[:, 1::2]]),
    case("slice", slice_columns, f16(3, 24), reference=lambda x: [np.exp(x[:, 4:20])]),
    case("rotate_half", rotate_half, f16(2, 3, 32), reference=lambda x: [turned(x)]),
    case(
        "rope",
        rope,
        f16(2, 3, 5, 16),
        f16(5, 16),
        f16(5, 16),
        reference=lambda x, c, s: [x * c + turned(x) * s],
    ),
    case(
        "siblings",
        with_transpose,
        f16(40, 24),
        f16(24, 72),
        reference=lambda x, y: [np.exp(x), np.exp(y).T],
    ),
    case(
        "heads_and_keys",
        heads_and_keys,
        f16(2, 40, 3, 32),
        f16(2, 40, 3, 32),
        reference=lambda q, k: [-q.transpose(0, 2, 1, 3), -k.transpose(0, 2, 3, 1)],
    ),
    case(
        "transpose_of_tails",
        transpose_add,
        f16(70, 45),
        f16(45, 70),
        reference=lambda x, y: [x.T + y],
    ),
    case("reshaped", reshaped_outputs, f16(4, 6), reference=lambda x: [np.exp(x), -x]),
    case(
        "integers",
        integers,
        ((5, 7), "int32"),
        ((5, 7), "int32"),
        reference=lambda x, y: [(x + y) // 3, x < y],
        make={0: lambda rng: rng.integers(-9, 9, (5, 7)).astype("int32")},
    ),
    case(
        "bytes",
        integers,
        ((3, 20), "int8"),
        ((3, 20), "int8"),
        reference=lambda x, y: [(x + y) // 3, x < y],
    ),
    case(
        "functions",
        functions,
        f32(3, 8),
        reference=lambda x: [np.sin(x), np.cos(x), np.sqrt(np.abs(x)), x**3],
        make={0: lambda rng: (1000 * rng.standard_normal((3, 8))).astype("float32")},
    ),
    case(
        "power_of_negatives",
        general_power,
        f32(4, 8),
        f32(8),
        reference=lambda x, y: [x**y],
        make={1: lambda rng: np.arange(-3, 5).astype("float32")},
    ),
    case("cast_down", cast_down, f32(3, 10), reference=lambda x: [3 * x]),
]


def check(case, config=None, exact=False):
    """Emits, runs on the emulator, compares."""
    func = case.func()
    program = analyze(func, exact=exact)
    kernel = emit_pointwise(program, H200, config)
    assert_right(case, func, kernel)
    return kernel


def pieces(bb, *parts):
    return op.exp(bb.emit(op.concat(parts, axis=-1)))


def test_conditions_of_equal_pieces_are_decided_once(monkeypatch):
    asked = []
    plain = vectors.below
    monkeypatch.setattr(vectors, "below", lambda *args: asked.append(args[0]) or plain(*args))
    program = analyze(fuse(pieces, *[((8, 64), "float16")] * 8))
    found = vectors.vector_elements(program, 8)
    assert len(found) == 8
    # of each of 7 borders the condition and its negation, in the first column and in any
    assert len(asked) == 7 * 2 * 2


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_kernel_computes_what_float64_says(case):
    check(case)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "config",
    [
        PointwiseConfig(threads=32, width=1),
        PointwiseConfig(threads=64, width=4, unroll=2),
        PointwiseConfig(threads=32, width=2, unroll=3),
        PointwiseConfig(threads=64, width=8, across=0),
        PointwiseConfig(threads=32, width=4, across=0),
    ],
    ids=str,
)
def test_every_configuration_computes_the_same(config):
    check(case("two", two_outputs, f16(3, 5, 24), f16(24), reference=two_of), config)


def plus_row(bb, x, s):
    return op.multiply(bb.emit(op.exp(x)), s)


def row_times(x, s):
    return [np.exp(x) * s]


def dequantised(bb, x, s):
    return op.multiply(bb.emit(op.astype(x, "float16")), s)


FLAT = [
    case("bias", bias_gelu, f16(5, 63), f16(63), reference=lambda x, b: [gelu_of(x + b)]),
    case("rows_shorter_than_a_vector", two_outputs, f16(40, 3), f16(3), reference=two_of),
    case("rows_of_one_vector_and_one", two_outputs, f16(17, 9), f16(9), reference=two_of),
    case("a_factor_a_row", plus_row, f16(9, 21), f16(9, 1), reference=row_times),
    case("a_factor_a_short_row", plus_row, f16(50, 3), f16(50, 1), reference=row_times),
    case("middle_axis", two_outputs, f32(2, 3, 7), f32(2, 1, 7), reference=two_of),
    case("two_axes", plus_row, bf16((3, 3, 11)), bf16((3, 1, 1)), reference=row_times),
    case("four_axes", plus_row, f16(2, 3, 5, 7), f16(1, 3, 1, 7), reference=row_times),
    case("rows_picked", take_rows, f16(4, 13), ((5,), "int64"), reference=lambda x, t: [2 * x[t]]),
    case(
        "bytes_and_halves",
        dequantised,
        ((6, 37), "int8"),
        f16(37),
        reference=lambda x, s: [x.astype("f8") * s],
    ),
    case("padded", pad, f16(3, 12), reference=lambda x: [padded(x)]),
]


def padded(x):
    return np.exp(np.pad(x, [(0, 0), (3, 2)], constant_values=-1.0))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", FLAT, ids=lambda c: c.name)
@pytest.mark.parametrize("unroll", [1, 2])
def test_vectors_run_across_the_ends_of_rows(case, unroll):
    config = pointwise_config(analyze(case.func()), H200)
    assert config.flat
    kernel = check(case, dataclasses.replace(config, threads=32, unroll=unroll))
    assert "tvmf_store16_wb(" in body_of(kernel)


def body_of(kernel):
    source = cuda_source(kernel)
    return source[source.rindex('extern "C"') :]


def test_flat_vectors_of_an_odd_row_length_serve_all_numbers_of_rows():
    n = tirx.Var("n", "int64")
    program = analyze(fuse(bias_gelu, ((n, 63), "float16"), ((63,), "float16")))
    assert pointwise_config(program, H200).flat
    kernel = emit_pointwise(program, H200)
    for rows in (0, 1, 2, 9):
        rng = np.random.default_rng(rows)
        x, b = (rng.standard_normal(s).astype("float16") for s in ((rows, 63), (63,)))
        y = np.full_like(x, np.nan)
        run_cuda_on_cpu(kernel, [x, b, y])
        if rows:
            assert_close(y, gelu_of(x.astype("f8") + b.astype("f8")), "float16")


def test_an_output_in_another_order_is_not_flat():
    func = fuse(transpose_add, f16(63, 45), f16(45, 63))
    assert any(c.flat for c in pointwise_configs(analyze(func), H200))
    program = analyze(fuse(two_outputs, f16(3, 24), f16(24)))
    assert not any(c.flat for c in pointwise_configs(program, H200))
    with pytest.raises(Unsupported, match="flat vectors of 16"):
        emit_pointwise(program, H200, PointwiseConfig(64, 16, flat=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("unroll", [2, 4])
@pytest.mark.parametrize("columns", [32 * 8 * 4, 32 * 8 * 4 + 8, 999])
def test_all_vectors_of_a_thread_are_loaded_before_the_first_is_stored(unroll, columns):
    kernel = check(
        case("long", chain, f16(3, columns), reference=chain_of),
        PointwiseConfig(32, 8, unroll=unroll),
    )
    body = body_of(kernel)
    first_store = body.index("tvmf_store16_wb(")
    assert body[:first_store].count("tvmf_load16_nc(") == unroll


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [(8192, 8192), (64, 64), (8192, 1001), (5, 7)])
def test_every_ranked_configuration_is_one_the_emitter_takes(shape):
    program = analyze(fuse(bias_gelu, f16(*shape), f16(shape[1])))
    configs = pointwise_configs(program, H200)
    assert len(set(configs)) == len(configs)
    for config in configs:
        emit_pointwise(program, H200, config)


def test_more_vectors_a_thread_are_ranked_first_where_few_bytes_are_in_flight():
    program = analyze(fuse(chain, f16(8192, 8192)))
    slow = dataclasses.replace(H200, bytes_in_flight_latency_s=4 * H200.bytes_in_flight_latency_s)
    assert pointwise_configs(program, slow)[0].unroll > pointwise_configs(program, H200)[0].unroll


def test_rows_are_split_among_blocks_and_the_tail_is_computed():
    check(case("long", chain, f16(3, 999), reference=chain_of), PointwiseConfig(64, 8))


def test_exact_rounding_rounds_what_the_unfused_graph_stores():
    x = np.linspace(-4, 4, 64).astype("float16").reshape(2, 32)
    func = fuse(chain, f16(2, 32))
    exact = np.empty_like(x)
    run_cuda_on_cpu(emit_pointwise(analyze(func, exact=True), H200), [x, exact])
    e = np.exp((x * np.float16(0.5)).astype("float32")).astype("float16")
    stepwise = np.maximum(
        (e.astype("float32") + x.astype("float32")).astype("float16"), np.float16(0)
    )
    np.testing.assert_array_equal(exact, stepwise)
    fast = np.empty_like(x)
    run_cuda_on_cpu(emit_pointwise(analyze(func), H200), [x, fast])
    assert (fast != exact).any()


@pytest.mark.parametrize("rows", [0, 1, 7, 300])
@pytest.mark.parametrize("columns", [24, 25])
def test_symbolic_rows_are_compiled_once_for_all_sizes(rows, columns):
    n = tirx.Var("n", "int64")
    func = fuse(two_outputs, ((n, columns), "float16"), ((columns,), "float16"))
    kernel = emit_pointwise(analyze(func), H200)
    rng = np.random.default_rng(1)
    x, b = (rng.standard_normal(s).astype("float16") for s in ((rows, columns), (columns,)))
    outputs = [np.full_like(x, np.nan), np.full_like(x, np.nan)]
    run_cuda_on_cpu(kernel, [x, b, *outputs])
    for output, expected in zip(outputs, two_of(x.astype("f8"), b.astype("f8")), strict=True):
        assert_close(output, expected, "float16")


def test_symbolic_contiguous_programs_keep_wide_vectors():
    n = tirx.Var("n", "int64")
    kernel = emit_pointwise(analyze(fuse(chain, ((n, 24), "float16"))), H200)
    assert "tvmf_load16_nc" in cuda_source(kernel)
    x = np.random.default_rng(2).standard_normal((5, 24)).astype("float16")
    y = np.full_like(x, np.nan)
    run_cuda_on_cpu(kernel, [x, y])
    assert_close(y, chain_of(x.astype("f8"))[0], "float16")


WIDTHS = [
    ("a contiguous half program reads and writes 16 bytes", CASES[0], 1, "load16"),
    ("a bfloat16 program too", next(c for c in CASES if c.name == "chain_bfloat16"), 1, "load16"),
    (
        "a slice that starts at 8 bytes reads 8 bytes",
        next(c for c in CASES if c.name == "slice"),
        2,
        "load8",
    ),
    (
        "both sides of a concatenation at a vector",
        next(c for c in CASES if c.name == "concat_of_vectors"),
        2,
        "load16",
    ),
    ("merged heads", next(c for c in CASES if c.name == "merge_heads"), 1, "load16"),
    ("rows picked by an index", next(c for c in CASES if c.name == "take_rows"), 1, "load16"),
]


@pytest.mark.parametrize(
    ("case", "loads", "kind"), [w[1:] for w in WIDTHS], ids=[w[0] for w in WIDTHS]
)
def test_accesses_are_as_wide_as_alignment_allows(case, loads, kind):
    source = cuda_source(emit_pointwise(analyze(case.func()), H200, PointwiseConfig(64, 8)))
    body = source[source.rindex('extern "C"') :]
    assert body.count(f"tvmf_{kind}_nc(") == loads


def test_the_number_of_threads_shrinks_with_the_work():
    large = analyze(fuse(chain, f16(4096, 4096)))
    small = analyze(fuse(chain, f16(64, 64)))
    assert pointwise_config(large, H200).threads == 256
    assert pointwise_config(small, H200).threads == 64


def test_lanes_walk_along_the_axis_in_which_strided_reads_are_consecutive():
    transposed = analyze(fuse(transpose_add, f16(64, 128), f16(128, 64)))
    assert pointwise_config(transposed, H200).across == 0
    assert pointwise_config(analyze(CASES[0].func()), H200).across is None


def test_walking_across_rows_of_unknown_number_is_refused():
    n = tirx.Var("n", "int64")
    program = analyze(fuse(two_outputs, ((n, 24), "float16"), ((24,), "float16")))
    with pytest.raises(Unsupported, match="unknown number"):
        emit_pointwise(program, H200, PointwiseConfig(64, 8, across=0))


@T.prim_func(s_tir=True)
def scaled_by_value(X: T.Buffer((4, 6), "float32"), Y: T.Buffer((4, 6), "float32"), n: T.int64):
    for i, j in T.grid(4, 6):
        with T.sblock("scale"):
            vi, vj = T.axis.remap("SS", [i, j])
            Y[vi, vj] = X[vi, vj] * T.Cast("float32", n)


def test_numbers_are_passed_by_value():
    x = np.arange(24, dtype="float32").reshape(4, 6)
    y = np.full_like(x, np.nan)
    run_cuda_on_cpu(emit_pointwise(analyze(scaled_by_value), H200), [x, y, 3])
    np.testing.assert_array_equal(y, 3 * x)


def test_a_choice_may_be_multiplied():
    def masked(bb, x, y, mask, c):
        less = bb.emit(op.subtract(x, y))
        kept = bb.emit(op.where(mask, less, c))
        return op.maximum(bb.emit(op.multiply(x, kept)), kept)

    shape = (8, 64)
    kernel = emit_pointwise(
        analyze(fuse(masked, f16(*shape), f16(*shape), (shape, "bool"), f16())), H200
    )
    assert compile_cubins({"masked": kernel})
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(shape).astype("float16") for _ in range(2))
    mask, out = rng.random(shape) < 0.5, np.full(shape, np.nan, "float16")
    run_cuda_on_cpu(kernel, [x, y, mask, np.array(0.5, "float16"), out])
    wide, less = x.astype("float32"), x.astype("float32") - y
    kept = np.where(mask, less, np.float32(0.5))
    np.testing.assert_array_equal(out, np.maximum(wide * kept, kept).astype("float16"))


def test_a_program_with_reductions_is_refused():
    program = analyze(fuse(lambda bb, x: op.sum(x, axis=-1), f16(4, 8)))
    with pytest.raises(Unsupported, match="reduces"):
        emit_pointwise(program, H200)


def test_vectors_that_would_cross_a_row_are_refused():
    program = analyze(fuse(bias_gelu, f16(4, 12), f16(12)))
    with pytest.raises(Unsupported, match="cross the end"):
        emit_pointwise(program, H200, PointwiseConfig(64, 8))


def test_the_kernel_keeps_the_parameters_and_is_marked():
    func = fuse(two_outputs, f16(2, 3, 24), f16(24)).with_attr("global_symbol", "two")
    kernel = emit_pointwise(analyze(func), H200)
    for mine, theirs in zip(kernel.params, func.params, strict=True):
        assert [int(e) for e in mine.ty.shape] == [int(e) for e in theirs.ty.shape]
        assert str(mine.ty.dtype) == str(theirs.ty.dtype)
    expected = {
        "tirx.is_scheduled": True,
        "op_pattern": 8,
        "tirx.noalias": True,
        "tvm_fusion.tirx": True,
    }
    assert {key: kernel.attrs[key] for key in expected} == expected
    assert kernel.attrs["global_symbol"] == "two"


def test_names_that_are_no_identifiers_are_renamed():
    x = te.placeholder((4, 6), "float32", "gpu_0/data")
    y = te.compute((4, 6), lambda *i: te.exp(x[i]), "0:out")
    kernel = emit_pointwise(analyze(te.create_prim_func([x, y])), H200)
    assert len(compile_cubins({"renamed": kernel})) == 1


def test_equal_programs_give_equal_code():
    sources = {cuda_source(emit_pointwise(analyze(CASES[0].func()), H200)) for _ in range(2)}
    assert len(sources) == 1


def test_all_kernels_become_cubins_without_spills():
    kernels = {c.name: emit_pointwise(analyze(c.func()), H200) for c in CASES}
    huge = analyze(fuse(bias_gelu, f16(70000, 40000), f16(40000)))
    kernels["offsets_of_64_bits"] = emit_pointwise(huge, H200)
    resources = compile_cubins(kernels)
    assert {r.kernel for r in resources} == set(kernels)
    assert [r for r in resources if r.spill_bytes] == []


def test_a_pool_of_a_pool_is_read_by_vectors_that_leave_registers():
    """Each result is made of 49 elements."""

    def emit(bb, x):
        options = {"padding": (1, 1), "layout": "NHWC"}
        y = bb.emit(op.nn.max_pool2d(x, (3, 3), (2, 2), **options))
        return relax.Tuple([y, bb.emit(op.nn.max_pool2d(y, (3, 3), **options))])

    program = analyze(fuse(emit, ((8, 28, 28, 64), "float16")))
    config = pointwise_config(program, H200)
    assert config.width == 4
    kernel = emit_pointwise(program, H200, config)
    assert "0 bytes spill stores" in ptxas_report(cuda_source(kernel), H200.arch)


def test_a_sine_of_any_angle_is_at_most_one():
    def sines(bb, x):
        return relax.Tuple([bb.emit(op.sin(x)), bb.emit(op.cos(x))])

    program = analyze(fuse(sines, f32(8)))
    near, far = [0.0, -1.5, 3e3, -1e5], [1e8, -1e10, 3e38, -np.inf]
    x = np.array(near + far, "float32")
    sine, cosine = np.full(8, 7, "float32"), np.full(8, 7, "float32")
    kernel = emit_pointwise(program, H200)
    run_cuda_on_cpu(kernel, [x, sine, cosine])
    for given, wanted in ((sine, np.sin), (cosine, np.cos)):
        np.testing.assert_allclose(given[:4], wanted(x[:4].astype("float64")), atol=3e-7)
        assert np.all(np.abs(given[4:7]) <= 1)
        assert np.isnan(given[7])


def triangle_beside_its_bias(bb, x, b):
    """The upper triangle of each matrix, where it equals a bias a column."""
    above = bb.emit(op.triu(x))
    return op.where(bb.emit(op.equal(above, b)), above, bb.emit(op.multiply(above, b)))


def largest_spelled_out(func):
    """Nodes of the longest value that is bound, with what it uses spelled out, down to what reads
    memory: TVM's simplifier puts bound values into each other.
    """
    sizes, lengths = {}, []

    def see(bind):
        nodes = []
        tvm_ffi.structural_walk(bind.value, [(tvm.ir.Expr, nodes.append)])
        lengths.append(sum(sizes.get(node, 1) if isinstance(node, Var) else 1 for node in nodes))
        reads = any(isinstance(node, TensorLoad) for node in nodes)
        sizes[bind.var] = 1 if reads else lengths[-1]

    tvm_ffi.structural_walk(func.body, [(tirx.Bind, see)])
    return max(lengths)


@pytest.mark.parametrize("shape", [(21, 15), (3, 7, 5, 9), (4, 6, 3)], ids=str)
def test_flat_vectors_do_not_carry_the_towers_of_their_coordinates(shape):
    func = fuse(triangle_beside_its_bias, (shape, "float16"), (shape[-1:], "float16"))
    program = analyze(func)
    (config,) = [c for c in pointwise_configs(program, H200) if c.flat][:1]
    assert largest_spelled_out(emit_pointwise(program, H200, config)) <= 80


def rows_of_rows(bb, x, y):
    """Reads of another tensor at quotients of the coordinates."""
    wide = bb.emit(op.repeat(x, 3, axis=1))
    return op.add(bb.emit(op.repeat(wide, 2, axis=0)), y)


def test_quotients_of_held_coordinates_are_those_of_the_device():
    func = fuse(rows_of_rows, ((4, 3), "float32"), ((8, 9), "float32"))
    program = analyze(func)
    (config,) = [c for c in pointwise_configs(program, H200) if c.flat][:1]
    kernel = emit_pointwise(program, H200, config)
    found = []
    kinds = (tirx.FloorDiv, tirx.FloorMod)
    tvm_ffi.structural_walk(kernel.body, [(kind, found.append) for kind in kinds])
    assert found == []
    x, y = np.arange(12, dtype="float32").reshape(4, 3), np.ones((8, 9), "float32")
    got = np.zeros((8, 9), "float32")
    run_cuda_on_cpu(kernel, [x, y, got])
    np.testing.assert_array_equal(got, x.repeat(3, axis=1).repeat(2, axis=0) + y)
