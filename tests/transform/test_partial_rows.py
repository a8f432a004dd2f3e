"""Reductions over rows of products: which are split in two stages, with the same numbers, and what
the planner makes of them.
"""

import dataclasses

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.ir.graph import build_graph
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.hopper.kernel import emit_gemm_hopper
from tvm_fusion.kernels.gemm.mma.kernel import emit_gemm_mma
from tvm_fusion.plan.search.search import search
from tvm_fusion.transform.apply.materialize import materialize
from tvm_fusion.transform.apply.write_kernels import write_kernels
from tvm_fusion.transform.decompose import Decompose
from tvm_fusion.transform.pipeline import lower
from tvm_fusion.transform.rewrites.partial_rows import PartialRows, run_width

from ..support.cuda_on_cpu import run_cuda_on_cpu
from ..support.decompose_tools import operators
from ..support.graphs import module
from ..support.helpers_tir import quick_executable
from ..support.hopper_on_cpu import run_hopper_on_cpu

HALF, FLOAT = "float16", "float32"
H200, A100, CPU = (load_profile(name) for name in ("nvidia_h200", "nvidia_a100", "llvm"))


def hidden(bb, x, w, r):
    return bb.emit(op.add(bb.emit(op.matmul(x, w)), r))


def wide(bb, x):
    return bb.emit(op.astype(x, FLOAT))


def inverse_rms(bb, h, keepdims=True):
    """rsqrt(mean(h^2) + eps) of each row."""
    h = wide(bb, h)
    mean = bb.emit(op.mean(bb.emit(op.multiply(h, h)), axis=[-1], keepdims=keepdims))
    return bb.emit(op.rsqrt(bb.emit(op.add(mean, relax.const(1e-5, FLOAT)))))


def statistic(bb, x, w, r):
    h = hidden(bb, x, w, r)
    return [h, inverse_rms(bb, h)]


def statistics(bb, x, w, r):
    """Sum, maximum and root mean square of each row."""
    h = hidden(bb, x, w, r)
    total = bb.emit(op.sum(wide(bb, h), axis=[1]))
    return [h, total, bb.emit(op.max(h, axis=[-1])), inverse_rms(bb, h, keepdims=False)]


def block(bb, x, w, r):
    """The statistic goes into the epilogue of the next product, as `FoldFactors` leaves it."""
    h = hidden(bb, x, w, r)
    product = wide(bb, bb.emit(op.matmul(h, w)))
    return [h, bb.emit(op.astype(bb.emit(op.multiply(product, inverse_rms(bb, h))), HALF))]


def inputs(m, n, k=64):
    return [((m, k), HALF), ((k, n), HALF), ((m, n), HALF)]


def opened(mod, hw=H200):
    return Decompose(hw=hw)(mod)


def split(mod, **options):
    return PartialRows(H200, **options)(opened(mod))


def parts(mod):
    """Shapes of the partial results."""
    found = []
    for bound in mod["main"].body.blocks[0].bindings:
        if bound.var.name.endswith("_part"):
            found.append(tuple(int(extent) for extent in bound.var.ty.shape))
    return found


def run(mod, *arrays):
    executable = quick_executable(mod)
    main = relax.VirtualMachine(executable, tvm.cpu())["main"]
    return [result.numpy() for result in main(*[tvm.runtime.tensor(array) for array in arrays])]


def random(types):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape, dtype in types]


def expected_statistics(x, w, r):
    h = x @ w + r
    return [h, h.sum(-1), h.max(-1), 1 / np.sqrt((h * h).mean(-1) + 1e-5)]


def close(got, expected, tolerance=2e-3):
    assert got.shape == expected.shape
    assert np.abs(got.astype("float64") - expected).max() <= tolerance * np.abs(expected).max()


# ---- what is split


@pytest.mark.parametrize(
    ("columns", "width"),
    [(4096, 128), (256, 128), (192, 64), (128, 64), (64, None), (100, None), (None, None)],
)
def test_runs_are_the_widest_that_divide_a_row(columns, width):
    assert run_width(columns) == width


@pytest.mark.parametrize(("columns", "shape"), [(256, (8, 2)), (192, (8, 3))])
def test_a_split_reduction_gives_the_same_numbers(columns, shape):
    types = inputs(8, columns)
    mod = split(module(statistics, *types))
    assert parts(mod) == [shape] * 3
    arrays = random(types)
    expected = expected_statistics(*(a.astype("float64") for a in arrays))
    for got, wanted in zip(run(mod, *arrays), expected, strict=True):
        close(got, wanted)


def over_all(bb, x, w, r):
    """Sum, largest size, and whether any element is infinite, as numbers of all rows."""
    h = hidden(bb, x, w, r)
    total = bb.emit(op.sum(wide(bb, h), keepdims=True))
    return [h, total, bb.emit(op.max(bb.emit(op.abs(h)), axis=[0, 1])), any_infinite(bb, h)]


def any_infinite(bb, h):
    return bb.emit(op.max(bb.emit(op.astype(bb.emit(op.isinf(h)), "int8"))))


@pytest.mark.parametrize("infinite", [False, True])
def test_reductions_over_all_rows_are_split_into_runs_too(infinite):
    types = inputs(8, 256)
    mod = split(module(over_all, *types))
    assert parts(mod) == [(8, 2)] * 3
    arrays = random(types)
    arrays[2][3, 200] = np.inf if infinite else 0
    h = arrays[0].astype("float64") @ arrays[1] + arrays[2]
    _, total, largest, flag = run(mod, *arrays)
    if not infinite:
        close(total, h.sum(keepdims=True))
        close(largest, np.abs(h).max())
    assert flag == infinite


def test_symbolic_rows_and_leading_axes_are_kept():
    n = tvm.tirx.Var("n", "int64")
    types = [((2, n, 64), HALF), ((64, 256), HALF), ((2, n, 256), HALF)]
    mod = split(module(statistic, *types))
    assert operators(mod).count("sum") == 2
    x, w, r = random([((2, 5, 64), HALF), ((64, 256), HALF), ((2, 5, 256), HALF)])
    h, found = run(mod, x, w, r)
    expected = x.astype("float64") @ w + r
    close(h, expected)
    close(found, 1 / np.sqrt((expected * expected).mean(-1, keepdims=True) + 1e-5))


def test_the_parts_are_tagged_as_parts_of_their_composite():
    mod = split(module(statistic, *inputs(8, 256)))
    tags = mod["main"].attrs["tvm_fusion.composites"]
    assert [tag for name, tag in tags.items() if name.endswith("_part")] == ["mean#1"]


def test_a_statistic_that_goes_behind_the_next_product_is_split():
    assert parts(split(module(block, *inputs(8, 256, 256)))) == [(8, 2)]


def test_splitting_twice_changes_nothing_more():
    once = split(module(statistic, *inputs(8, 256)))
    assert PartialRows(H200)(once).same_as(once)


def rms_norm(bb, x, w, r):
    h = hidden(bb, x, w, r)
    return [h, bb.emit(op.multiply(wide(bb, h), inverse_rms(bb, h)))]


def softmax(bb, x, w, r):
    return op.nn.softmax(hidden(bb, x, w, r), axis=-1)


def columns_too(bb, x, w, r):
    h = wide(bb, hidden(bb, x, w, r))
    return [bb.emit(op.sum(h, axis=[axis])) for axis in (0, 1)]


def no_product(bb, x, w, r):
    return [bb.emit(op.matmul(x, w)), inverse_rms(bb, r)]


def of_columns(bb, x, w, r):
    return op.sum(wide(bb, hidden(bb, x, w, r)), axis=[0])


def of_halves(bb, x, w, r):
    h = hidden(bb, x, w, r)
    return op.sum(bb.emit(op.permute_dims(h, (1, 0))), axis=[-1])


@pytest.mark.parametrize(
    "emit", [rms_norm, softmax, columns_too, no_product, of_columns, of_halves]
)
def test_what_a_kernel_of_rows_does_at_no_cost_is_left_alone(emit):
    mod = opened(module(emit, *inputs(256, 256)))
    assert PartialRows(H200)(mod).same_as(mod)


@pytest.mark.parametrize(
    ("n", "k", "dtype"), [(100, 64, HALF), (64, 64, HALF), (256, 60, HALF), (256, 64, FLOAT)]
)
def test_rows_that_hold_no_runs_and_other_products_are_left_alone(n, k, dtype):
    types = [(shape, dtype) for shape, _ in inputs(8, n, k)]
    mod = opened(module(statistic, *types))
    assert PartialRows(H200)(mod).same_as(mod)


@pytest.mark.parametrize(("emit", "count"), [(rms_norm, 1), (softmax, 1)])
def test_statistics_that_come_back_are_split_on_request(emit, count):
    types = inputs(8, 256)
    mod = split(module(emit, *types), returning=True)
    assert len(parts(mod)) == count


@pytest.mark.parametrize("hw", [A100, CPU], ids=lambda hw: hw.name)
def test_devices_whose_kernels_write_no_partial_results_split_nothing(hw):
    mod = opened(module(statistic, *inputs(8, 256)), hw)
    assert PartialRows(hw)(mod).same_as(mod)


# ---- plans


def planned(mod, hw=H200, rewrites=("partial_rows",)):
    low = lower(mod, hw.to_target(), hw=hw, rewrites=rewrites)
    graph = build_graph(low)
    return low, graph, search(graph, hw, load_policy(None))


def kernels(plan):
    return [g for g in plan.groups if g.kernel_class not in ("view", "opaque")]


def written(low, graph, plan, hw):
    """The kernels of a plan, in its order."""
    found = materialize(low, graph, plan)
    classes = {name: group.kernel_class for name, group in found.groups.items()}
    done = write_kernels(found.mod, classes, hw, load_policy(None))
    assert done.failures == {}
    names = {group.ops: name for name, group in found.groups.items()}
    return [done.mod[names[group.ops]] for group in kernels(plan)]


def shapes(kernel):
    return [tuple(int(extent) for extent in param.ty.shape) for param in kernel.params]


def test_a_product_and_the_statistic_of_its_rows_read_the_rows_once():
    mod = module(statistic, *inputs(4096, 4096, 4096))
    product, finish = kernels(planned(mod)[2])
    assert (product.kernel_class, finish.kernel_class) == ("gemm", "row")
    assert finish.bytes == 4096 * 32 * 4 + 4096 * 4
    _, whole = kernels(planned(mod, rewrites=())[2])
    assert whole.bytes == 4096 * 4096 * 2 + 4096 * 4


def test_a_block_with_a_folded_norm_is_two_products_and_a_small_kernel():
    mod = module(block, *inputs(4096, 4096, 4096))
    first, finish, second = kernels(planned(mod)[2])
    assert [g.kernel_class for g in (first, finish, second)] == ["gemm", "row", "gemm"]
    assert finish.bytes < 1e6


def test_the_planned_kernels_compute_what_the_graph_says():
    hw = dataclasses.replace(H200, num_sms=2)
    types = inputs(72, 256, 192)
    gemm, finish = written(*planned(module(statistic, *types), hw), hw)
    x, w, r = random(types)
    sums, h = np.full((72, 2), np.nan, FLOAT), np.full((72, 256), np.nan, HALF)
    found = np.full((72, 1), np.nan, FLOAT)
    own = {(72, 192): [x], (192, 256): [w], (72, 256): [r, h], (72, 2): [sums]}
    assert run_hopper_on_cpu(gemm, [own[shape].pop(0) for shape in shapes(gemm)]) == 1
    assert shapes(finish) == [(72, 2), (72, 1)]
    assert run_cuda_on_cpu(finish, [sums, found]) == 1
    expected = x.astype("float64") @ w + r
    close(h, expected)
    close(found, 1 / np.sqrt((expected * expected).mean(-1, keepdims=True) + 1e-5))


def clamped(bb, x, w, r):
    """What T5 does in float16: all is clamped if any of it is infinite."""
    h = hidden(bb, x, w, r)
    flag = bb.emit(op.astype(any_infinite(bb, h), "bool"))
    limit = bb.emit(op.where(flag, relax.const(64504.0, HALF), relax.const(65504.0, HALF)))
    h = bb.emit(op.maximum(h, bb.emit(op.negative(limit))))
    return bb.emit(op.minimum(h, limit))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", ["hopper", "mma"])
def test_whether_any_element_is_infinite_is_found_where_a_product_computes_it(form):
    types = inputs(72, 256, 192)
    low, graph, plan = planned(module(clamped, *types))
    assert [g.kernel_class for g in kernels(plan)][:2] == ["gemm", "row"]
    assert kernels(plan)[1].bytes < 72 * 256  # not of the elements
    names = {group.ops: name for name, group in materialize(low, graph, plan).groups.items()}
    func = materialize(low, graph, plan).mod[names[kernels(plan)[0].ops]]
    emit, on_cpu = {
        "hopper": (emit_gemm_hopper, run_hopper_on_cpu),
        "mma": (emit_gemm_mma, run_cuda_on_cpu),
    }[form]
    kernel = emit(analyze_contraction(func), H200 if form == "hopper" else A100)
    for place, value in (((0, 0), 1), ((3, 200), np.inf), ((71, 255), -np.inf), ((10, 5), 65504)):
        x, w, r = random(types)
        x[10], w[:, 5] = 1, 1  # 192 more than the largest half rounds to infinity
        r[place] = value
        h, flags = np.full((72, 256), np.nan, HALF), np.full((72, 2), 7, "int8")
        own = {(72, 192): [x], (192, 256): [w], (72, 256): [r, h], (72, 2): [flags]}
        assert on_cpu(kernel, [own[shape].pop(0) for shape in shapes(kernel)]) == 1
        wanted = np.isinf(h).reshape(72, 2, 128).any(-1)
        assert wanted.sum() == (value != 1)
        np.testing.assert_array_equal(flags, wanted)


@pytest.mark.parametrize(
    ("dtype", "reduce", "count"),
    [("int8", op.max, 1), ("int8", op.sum, 2), ("int32", op.max, 2), ("int32", op.sum, 2)],
)
def test_integers_that_float32_does_not_hold_are_not_reduced_in_a_product(dtype, reduce, count):
    def emit(bb, x, w, r):
        h = bb.emit(op.astype(hidden(bb, x, w, r), dtype))
        return reduce(bb.emit(op.reshape(h, (512, 4, 128))), axis=[-1])

    plan = planned(module(emit, *inputs(512, 512, 512)), rewrites=())[2]
    assert len(kernels(plan)) == count


def test_an_rms_norm_between_products_with_constant_weights_leaves_its_statistic_alone():
    rng = np.random.default_rng(0)

    def emit(bb, x, w, r):
        gamma, second = (
            relax.const(rng.standard_normal(s).astype(HALF)) for s in ((1024,), (1024, 512))
        )
        h = hidden(bb, x, w, r)
        normal = bb.emit(op.nn.rms_norm(h, gamma, axes=[-1], epsilon=1e-5))
        return [h, bb.emit(op.matmul(normal, second))]

    mod = module(emit, *inputs(4096, 1024, 1024))
    found = kernels(planned(mod, rewrites=("fold_factors", "partial_rows"))[2])
    assert [g.kernel_class for g in found] == ["gemm", "row", "gemm"]
    assert found[1].bytes == 4096 * 8 * 4 + 4096 * 4


# ---- what a product's kernel takes along


@pytest.mark.parametrize(
    ("view", "axis", "reduce", "expected"),
    [
        ((256, 2, 128), 2, op.max, True),
        ((256, 4, 64), 2, op.max, True),
        ((2, 128, 4, 64), 3, op.max, True),
        ((256, 8, 32), 2, op.max, False),  # no tile is worth such runs
        ((256, 2, 128), 2, op.min, False),
        ((256, 2, 128), 1, op.max, False),
        ((128, 512), 1, op.max, False),
    ],
)
def test_runs_of_columns_are_all_that_a_product_reduces(view, axis, reduce, expected):
    def emit(bb, x, w, r):
        h = bb.emit(op.reshape(bb.emit(op.matmul(x, w)), view))
        return reduce(h, axis=[axis], keepdims=True)

    plan = planned(module(emit, *inputs(256, 256, 256)), rewrites=())[2]
    assert (len(kernels(plan)) == 1) is expected


def test_a_statistic_that_is_applied_to_its_rows_stays_with_whoever_applies_it():
    def norm_of_heads(bb, x, w, gamma):
        heads = bb.emit(op.reshape(bb.emit(op.matmul(x, w)), (4096, 16, 128)))
        return op.nn.rms_norm(heads, gamma, axes=[-1], epsilon=1e-5)

    types = (((4096, 2048), HALF), ((2048, 2048), HALF), ((128,), HALF))
    found = kernels(planned(module(norm_of_heads, *types), rewrites=())[2])
    assert [g.kernel_class for g in found] == ["gemm", "row"]


@pytest.mark.parametrize("hw", [A100, CPU], ids=lambda hw: hw.name)
def test_other_devices_take_no_reduction_into_a_product(hw):
    def emit(bb, x, w, r):
        h = wide(bb, hidden(bb, x, w, r))
        view = bb.emit(op.reshape(bb.emit(op.multiply(h, h)), (512, 4, 128)))
        return op.sum(view, axis=[-1])

    mod = module(emit, *inputs(512, 512, 512))
    assert len(kernels(planned(mod, hw, rewrites=())[2])) == 2
    assert len(kernels(planned(mod, rewrites=())[2])) == 1
