"""Row CUDA kernels: odd and symbolic lengths, pieces of rows, gathers, argmax; one kernel each."""

import dataclasses

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.relax import op
from tvm.script import tirx as T

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.ir.graph import build_graph
from tvm_fusion.kernels.gpu.windows import row_width
from tvm_fusion.kernels.program.analysis import analyze
from tvm_fusion.kernels.row.config import Form
from tvm_fusion.kernels.row.kernel import RowConfig, emit_row, row_configs
from tvm_fusion.kernels.row.kernel_class import Row
from tvm_fusion.plan.group_view import GroupView
from tvm_fusion.plan.refusal import RefusalCode

from ...support.cuda_on_cpu import compile_cubins, cuda_source, run_cuda_on_cpu
from ...support.graphs import module, plan_of
from ...support.kernel_cases import Case, assert_close, fuse, rms_of, softmax_of
from ...support.kernel_checks import assert_right

H200 = load_profile("nvidia_h200")
LOOP, BULK = Form.LOOP, Form.BULK
HALF, BRAIN, FLOAT = "float16", "bfloat16", "float32"


def softmax(bb, x):
    return op.nn.softmax(x, axis=-1)


def layernorm(bb, x, g, b):
    return op.nn.layer_norm(x, g, b, axes=[-1], epsilon=1e-5)


def masked_sum(bb, x, mask, s):
    """A tile, vectors of 1, 2 and 4 bytes that all rows share, outputs of both kinds."""
    y = bb.emit(op.where(mask, bb.emit(op.astype(x, FLOAT)), s))
    total = bb.emit(op.sum(y, axis=-1, keepdims=True))
    return relax.Tuple([total, bb.emit(op.subtract(y, total))])


def softmax_of_slice(bb, x):
    return op.nn.softmax(bb.emit(op.strided_slice(x, [1], [4], [int(x.ty.shape[1])])), axis=-1)


def embed_rmsnorm(bb, table, t, g):
    return op.nn.rms_norm(bb.emit(op.take(table, t, axis=0)), g, axes=[-1], epsilon=1e-5)


def softmax_of_picked_columns(bb, x, t):
    return op.nn.softmax(bb.emit(op.take(x, t, axis=1, mode="clip")), axis=-1)


def cross_entropy(bb, x, t):
    return op.nn.nll_loss(bb.emit(op.nn.log_softmax(x, axis=-1)), t, reduction="none")


def softmax_of_concat(bb, x, y):
    return op.nn.softmax(bb.emit(op.concat([x, y], axis=1)), axis=-1)


def softmax_of_transposed(bb, x):
    return op.nn.softmax(bb.emit(op.permute_dims(x, [1, 0])), axis=-1)


def batch_statistics(bb, x):
    y = bb.emit(op.astype(x, FLOAT))
    mean = bb.emit(op.mean(y, axis=[0, 2, 3]))
    return relax.Tuple([mean, bb.emit(op.variance(y, axis=[0, 2, 3]))])


def sum_of_two_axes(bb, x):
    return op.sum(x, axis=[1, 2])


def sum_with_a_gap(bb, x):
    return op.sum(bb.emit(op.nn.relu(x)), axis=[0, 2, 3])


def quotient_sum(bb, a, b):
    return op.sum(bb.emit(op.floor_divide(a, b)), axis=-1)


def argmax(bb, x):
    return op.argmax(x, axis=-1)


def argmin(bb, x):
    return op.argmin(x, axis=-1, keepdims=True)


def argmax_of_all(bb, x):
    return op.argmax(x)


def softmax_and_args(bb, x):
    p = bb.emit(op.nn.softmax(x, axis=-1))
    return relax.Tuple([p, bb.emit(argmax(bb, x)), bb.emit(argmin(bb, x)), bb.emit(argmax(bb, p))])


def norm_of(x, g, b):
    centred = x - x.mean(-1, keepdims=True)
    return [centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * g + b]


def masked_sum_of(x, mask, s):
    y = np.where(mask, x, s)
    return [y.sum(-1, keepdims=True), y - y.sum(-1, keepdims=True)]


def loss_of(x, t):
    top = x.max(-1)
    return [np.log(np.exp(x - top[:, None]).sum(-1)) + top - x[np.arange(len(x)), t]]


def below(limit, *shape):
    return lambda rng: rng.integers(0, limit, shape)


def softmax_case(rows, columns, dtype=HALF):
    inputs = (((rows, columns), dtype),)
    return Case(f"softmax_{rows}x{columns}_{dtype}", softmax, inputs, lambda x: [softmax_of(x)])


def norm_case(rows, columns, dtype=HALF):
    inputs = (((rows, columns), dtype), ((columns,), dtype), ((columns,), dtype))
    return Case(f"layernorm_{rows}x{columns}_{dtype}", layernorm, inputs, norm_of)


def masked_case(rows, columns):
    inputs = (((rows, columns), HALF), ((columns,), "bool"), ((columns,), FLOAT))
    return Case(f"masked_{rows}x{columns}", masked_sum, inputs, masked_sum_of)


def slice_case(rows, columns):
    inputs = (((rows, columns + 4), HALF),)
    return Case(
        f"slice_{rows}x{columns}", softmax_of_slice, inputs, lambda x: [softmax_of(x[:, 4:])]
    )


def embed_case(rows, columns):
    inputs = (((5, columns), HALF), ((rows,), "int64"), ((columns,), HALF))
    reference = lambda table, t, g: [rms_of(table[t], g)]  # noqa: E731
    name = f"embed_{rows}x{columns}"
    return Case(name, embed_rmsnorm, inputs, reference, {1: below(5, rows)})


def picked_case(rows, columns):
    inputs = (((rows, 50), HALF), ((columns,), "int64"))
    reference = lambda x, t: [softmax_of(x[:, t])]  # noqa: E731
    name = f"picked_{rows}x{columns}"
    return Case(name, softmax_of_picked_columns, inputs, reference, {1: below(50, columns)})


def loss_case(rows, columns):
    inputs = (((rows, columns), HALF), ((rows,), "int64"))
    make = {1: below(columns, rows)}
    return Case(f"loss_{rows}x{columns}", cross_entropy, inputs, loss_of, make)


def concat_case(left, right):
    inputs = (((3, left), HALF), ((3, right), HALF))
    reference = lambda x, y: [softmax_of(np.concatenate([x, y], 1))]  # noqa: E731
    return Case(f"concat_{left}_{right}", softmax_of_concat, inputs, reference)


def transposed_case(rows, columns):
    name = f"transposed_{rows}x{columns}"
    inputs = (((columns, rows), HALF),)
    return Case(name, softmax_of_transposed, inputs, lambda x: [softmax_of(x.T)])


def statistics_case(*shape, dtype=HALF):
    reference = lambda x: [x.mean((0, 2, 3)), x.var((0, 2, 3))]  # noqa: E731
    name = f"statistics_{'x'.join(map(str, shape))}_{dtype}"
    return Case(name, batch_statistics, ((shape, dtype),), reference)


def quotient_case(rows, columns):
    inputs = (((rows, columns), "int32"), ((rows, columns), "int32"))
    make = {1: lambda rng: rng.integers(1, 5, (rows, columns)).astype("int32")}
    reference = lambda a, b: [(a // b).sum(-1)]  # noqa: E731
    return Case(f"quotient_{rows}x{columns}", quotient_sum, inputs, reference, make)


def arg_case(emit, rows, columns, dtype=HALF):
    reference = {argmax: lambda x: [x.argmax(-1)], argmin: lambda x: [x.argmin(-1)]}[emit]
    name = f"{emit.__name__}_{rows}x{columns}_{dtype}"
    return Case(name, emit, (((rows, columns), dtype),), reference)


def args_case(rows, columns):
    def reference(x):
        return [softmax_of(x), x.argmax(-1), x.argmin(-1), x.argmax(-1)]

    return Case(f"args_{rows}x{columns}", softmax_and_args, (((rows, columns), FLOAT),), reference)


def check(case, config=None, spoil=None, **changes):
    """Emits, runs on the emulator (which checks all bounds), compares."""
    func = case.func()
    program = analyze(func)
    config = dataclasses.replace(config or row_configs(program, H200)[0], **changes)
    kernel = emit_row(program, config, H200)
    inputs = case.arrays()
    if spoil:
        spoil(inputs)
    assert_right(case, func, kernel, inputs)


def ids(case):
    return case.name


# ---- rows that vectors do not divide

FORMS = {
    "lanes": RowConfig(threads=4, rows=8),
    "a_warp_each": RowConfig(threads=32, rows=2),
    "warps": RowConfig(threads=64),
    "a_cluster": RowConfig(threads=32, cluster=2),
    "a_loop": RowConfig(LOOP, 32, unroll=2),
    "a_prefetching_loop": RowConfig(LOOP, 32, unroll=1, prefetch=True, load="na"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_takes_rows_of_odd_length(form):
    check(norm_case(3, 63 if form == "lanes" else 1001), FORMS[form])


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "case",
    [
        softmax_case(1, 2),
        softmax_case(3, 7),
        softmax_case(1, 63, BRAIN),
        softmax_case(3, 65),
        softmax_case(2, 1002),
        softmax_case(2, 5003),
        norm_case(3, 65, FLOAT),
        norm_case(2, 1003),
        softmax_case(2, 1003, BRAIN),
        masked_case(3, 77),
        masked_case(2, 1002),
        slice_case(3, 77),
        slice_case(3, 1010),
        embed_case(6, 77),
        picked_case(3, 77),
        loss_case(3, 1001),
        quotient_case(3, 41),
        concat_case(40, 37),
        transposed_case(3, 77),
    ],
    ids=ids,
)
def test_the_best_guess_takes_rows_of_any_length(case):
    check(case)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "case", [embed_case(6, 77), picked_case(3, 77), slice_case(3, 1010)], ids=ids
)
def test_a_loop_takes_rows_that_lie_anywhere(case):
    check(case, RowConfig(LOOP, 32, unroll=1))


def test_running_sums_take_rows_of_odd_length_that_are_mostly_minus_infinity():
    def spoil(arrays):
        arrays[0][0, :520] = -np.inf
        arrays[0][1, 1:] = -np.inf

    check(softmax_case(3, 1001), FORMS["warps"], spoil)
    check(softmax_case(3, 1001), FORMS["a_prefetching_loop"], spoil)


def body_of(kernel):
    source = cuda_source(kernel)
    return source[source.rindex('extern "C"') :]


def test_rows_of_odd_length_are_read_and_written_in_whole_vectors():
    case = softmax_case(8, 5003)
    body = body_of(emit_row(analyze(case.func()), RowConfig(threads=128), H200))
    assert "tvmf_load16_nc" in body
    assert "tvmf_store16_wb" in body


def test_bulk_copies_refuse_rows_of_odd_length():
    with pytest.raises(Unsupported, match="vectors of 8"):
        emit_row(analyze(softmax_case(2, 1003).func()), RowConfig(BULK, 32, resident=1), H200)


# ---- rows in pieces


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("case", "config"),
    [
        (statistics_case(4, 3, 8, 8), None),
        (statistics_case(4, 3, 8, 8, dtype=FLOAT), RowConfig(LOOP, 32, width=4, prefetch=True)),
        (statistics_case(3, 5, 7, 7), None),
        (statistics_case(3, 5, 7, 7, dtype=BRAIN), RowConfig(LOOP, 32, width=1)),
        (statistics_case(2, 3, 6, 6), RowConfig(threads=16, rows=2, width=4)),
        (concat_case(64, 48), RowConfig(threads=32)),
        (concat_case(64, 48), RowConfig(LOOP, 32, unroll=1)),
        (transposed_case(6, 40), RowConfig(threads=8, rows=4)),
        (picked_case(3, 64), RowConfig(LOOP, 32, unroll=1, prefetch=True)),
    ],
    ids=lambda x: x.name if isinstance(x, Case) else None if x is None else x.tag,
)
def test_rows_in_pieces_are_right(case, config):
    check(case, config)


@pytest.mark.parametrize(("shape", "width"), [((4, 3, 8, 8), 8), ((4, 3, 6, 6), 4)])
def test_rows_in_pieces_are_read_in_the_widest_vectors_that_lie_within_one(shape, width):
    program = analyze(statistics_case(*shape).func())
    assert row_width(program) == width
    kernel = emit_row(program, RowConfig(threads=32, width=width), H200)
    assert f"tvmf_load{2 * width}_nc" in body_of(kernel)


def test_a_row_in_pieces_is_read_once():
    program = analyze(statistics_case(4, 3, 8, 8).func())
    body = body_of(emit_row(program, RowConfig(threads=32), H200))
    assert program.phases == 2
    assert body.count("tvmf_load16_nc(") == 1


# ---- argmax and argmin


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "case",
    [
        arg_case(argmax, 3, 1),
        arg_case(argmax, 1, 7),
        arg_case(argmax, 3, 1000),
        arg_case(argmin, 3, 1001, BRAIN),
        arg_case(argmax, 3, 63, FLOAT),
        arg_case(argmin, 3, 65, "int32"),
        arg_case(argmax, 3, 200, "int8"),
        arg_case(argmin, 2, 64, "uint8"),
        args_case(3, 1001),
        args_case(2, 1024),
        Case("of_all", argmax_of_all, (((6, 21), FLOAT),), lambda x: [x.argmax()]),
    ],
    ids=ids,
)
def test_argmax_and_argmin_are_right(case):
    check(case)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("form", ["lanes", "warps", "a_loop"])
@pytest.mark.parametrize("columns", [201, 240])
def test_the_first_of_equal_values_wins_in_every_form(form, columns):
    def spoil(arrays):
        x = arrays[0]
        x[0] = 0
        x[1, ::2] = -0.0
        x[1, 1::2] = 0.0
        x[2] = -np.inf
        x[3] = np.round(x[3])
        x[4] = np.finfo(x.dtype).min

    check(arg_case(argmax, 5, columns, FLOAT), dataclasses.replace(FORMS[form], width=4), spoil)
    check(arg_case(argmin, 5, columns), FORMS[form], spoil)


def test_nan_never_is_the_extremum_of_an_argmax():
    case = arg_case(argmax, 3, 1001)
    x = case.arrays()[0]
    x[0, ::3] = np.nan
    x[1] = np.nan
    found = np.full(3, -7)
    kernel = emit_row(analyze(case.func()), RowConfig(threads=64), H200)
    run_cuda_on_cpu(kernel, [x, found])
    largest = np.where(np.isnan(x), -np.inf, x).argmax(-1)
    np.testing.assert_array_equal(found, largest)


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_an_argmax_of_64_bit_values_is_refused(dtype):
    with pytest.raises(Unsupported, match="argmax of"):
        emit_row(analyze(arg_case(argmax, 2, 64, dtype).func()), RowConfig(width=2), H200)
    found = plan_of(module(argmax, ((512, 4096), dtype)), "nvidia_h200")
    assert [group.kernel_class for group in found.plan.groups] == ["fallback"]


@T.prim_func(s_tir=True)
def place_in_reverse(X: T.Buffer((4, 8), FLOAT), Y: T.Buffer((4,), "int32")):
    V = T.sblock_alloc_buffer((4,), FLOAT)
    for i, k in T.grid(4, 8):
        with T.sblock("place"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                Y[vi] = -1
                V[vi] = T.float32(-3e38)
            Y[vi] = T.Select(
                V[vi] > X[vi, vk] or (V[vi] == X[vi, vk] and Y[vi] < 7 - vk), Y[vi], 7 - vk
            )
            V[vi] = T.Select(V[vi] > X[vi, vk], V[vi], X[vi, vk])


def test_an_argmax_whose_index_is_not_the_column_is_refused():
    with pytest.raises(Unsupported, match="instead of the column"):
        analyze(place_in_reverse)


# ---- symbolic lengths


def symbolic(emit, *inputs):
    """The program of a graph whose sizes "m" and "n" are variables."""
    sizes = {name: tirx.Var(name, "int64") for name in "mn"}
    shapes = [(tuple(sizes.get(e, e) for e in shape), dtype) for shape, dtype in inputs]
    return analyze(fuse(emit, *shapes))


SYMBOLIC = {
    "softmax": (softmax, [((3, "n"), HALF)], lambda x: [softmax_of(x)], [1, 7, 64, 65, 501]),
    "layernorm": (
        layernorm,
        [(("m", "n"), FLOAT), (("n",), FLOAT), (("n",), FLOAT)],
        norm_of,
        [2, 63, 301],
    ),
    "eights": (sum_of_two_axes, [(("m", "n", 8), HALF)], lambda x: [x.sum((1, 2))], [1, 40]),
    "argmax": (argmax, [(("m", "n"), BRAIN)], lambda x: [x.argmax(-1)], [1, 65, 301]),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("name", SYMBOLIC)
def test_rows_of_symbolic_length_are_compiled_once_for_all(name, prefetch):
    emit, inputs, reference, lengths = SYMBOLIC[name]
    program = symbolic(emit, *inputs)
    first = row_configs(program, H200)[0]
    assert first.form is LOOP
    config = dataclasses.replace(first, threads=32, unroll=2, prefetch=prefetch)
    kernel = emit_row(program, config, H200)
    for n in lengths:
        sizes = {"m": 2, "n": n}
        arrays = []
        for shape, dtype in inputs:
            made = Case("", emit, ((tuple(sizes.get(e, e) for e in shape), dtype),), reference)
            arrays += made.arrays()
        exact = [a.astype("f8") for a in arrays]
        output = program.outputs[0]
        full = arrays[0].shape if output.full else arrays[0].shape[:1]
        poison = 77 if output.dtype.startswith("int") else np.nan
        got = np.full(full, poison, output.dtype)
        run_cuda_on_cpu(kernel, [*arrays, got])
        assert_close(got, reference(*exact)[0], output.dtype)


def test_only_loops_take_rows_of_symbolic_length():
    with pytest.raises(Unsupported, match="symbolic length"):
        emit_row(symbolic(softmax, ((4, "n"), HALF)), RowConfig(), H200)


# ---- plans

BIG = ((512, 4096), HALF)
ONE_KERNEL = {
    "argmax": (argmax, (BIG,)),
    "argmin": (argmin, (BIG,)),
    "softmax_and_args": (softmax_and_args, (((512, 4096), FLOAT),)),
    "embedding_and_norm": (
        embed_rmsnorm,
        (((1000, 4096), HALF), ((512,), "int64"), ((4096,), HALF)),
    ),
    "loss": (cross_entropy, (BIG, ((512,), "int64"))),
}


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_these_are_planned_as_one_kernel_on_a_gpu(name):
    emit, inputs = ONE_KERNEL[name]
    groups = plan_of(module(emit, *inputs), "h200").plan.groups
    assert [group.kernel_class for group in groups] == ["row"]


def fit_of(emit, *inputs):
    """What the class says of a whole graph as one group."""
    graph = build_graph(relax.transform.LegalizeOps()(module(emit, *inputs)))
    ops = tuple(range(len(graph.ops)))
    return Row().accepts(GroupView(graph, ops, graph.ops[-1].outputs), H200, load_policy(None))


def sum_of_leading_axis(bb, x):
    return op.sum(x, axis=0)


def test_reductions_with_kept_axes_between_are_rows():
    fit = fit_of(sum_with_a_gap, ((8, 64, 28, 28), HALF))
    assert (fit.rows, fit.columns) == (64, 8 * 28 * 28)


def test_reductions_whose_contiguous_axis_is_kept_are_no_rows():
    refusal = fit_of(sum_of_leading_axis, ((64, 128), HALF))
    assert refusal.code is RefusalCode.NOT_TRAILING


LARGE = [
    softmax_case(8192, 5003),
    softmax_case(8192, 4095),
    softmax_case(65536, 63),
    softmax_case(4096, 1001, FLOAT),
    norm_case(8192, 5003),
    norm_case(8192, 4095),
    arg_case(argmax, 8192, 32000),
    args_case(4096, 5003),
    loss_case(4096, 32003),
    statistics_case(32, 256, 56, 56),
    statistics_case(32, 512, 14, 14),
    embed_case(8192, 4096),
]


# Always: kernels of rows of other lengths (`test_row`).
@pytest.mark.nightly
def test_all_large_kernels_become_cubins_without_spills():
    kernels = {}
    for case in LARGE:
        program = analyze(case.func())
        kernels[case.name] = emit_row(program, row_configs(program, H200)[0], H200)
    program = symbolic(layernorm, (("m", "n"), HALF), (("n",), HALF), (("n",), HALF))
    kernels["symbolic"] = emit_row(program, row_configs(program, H200)[0], H200)
    resources = compile_cubins(kernels)
    assert {r.kernel for r in resources} == set(kernels)
    assert [r for r in resources if r.spill_bytes] == []
