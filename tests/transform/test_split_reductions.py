"""Reductions taken apart for a large device: where, in how many pieces, with the same results."""

import dataclasses
import functools

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_profile
from tvm_fusion.transform.decompose import Decompose
from tvm_fusion.transform.pipeline import lower
from tvm_fusion.transform.rewrites.reduction_stages import (
    Setting,
    needs_stages,
    on_chip_elements,
    stages,
)
from tvm_fusion.transform.rewrites.split_reductions import SplitReductions

from ..support.decompose_tools import operators
from ..support.graphs import module, plan_of
from ..support.helpers_tir import quick_executable
from ..support.mixed_cases import (
    layer_norm_backward,
    layer_norm_inputs,
    rms_norm_backward,
    rms_norm_inputs,
)

H200 = load_profile("nvidia_h200")
EAGER = dataclasses.replace(H200, launch_us=0.0)  # a second launch costs nothing: small ones split


def split(mod: tvm.IRModule) -> tvm.IRModule:
    return SplitReductions(EAGER)(Decompose(hw=EAGER)(mod))


def run(mod: tvm.IRModule, *arrays: np.ndarray) -> list[np.ndarray]:
    executable = quick_executable(mod)
    main = relax.VirtualMachine(executable, tvm.cpu())["main"]
    result = main(*[tvm.runtime.tensor(array) for array in arrays])
    many = not isinstance(result, tvm.runtime.Tensor)
    return [r.numpy() for r in result] if many else [result.numpy()]


def views(mod: tvm.IRModule) -> list[tuple[int, ...]]:
    """Shapes of the reshapes in main."""
    found = []
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            if getattr(binding.value, "op", None) == tvm.ir.Op.get("relax.reshape"):
                found.append(tuple(int(extent) for extent in binding.var.ty.shape))
    return found


def reducing(reduce, axis, keepdims=False):
    return lambda bb, x: reduce(x, axis=axis, keepdims=keepdims)


def random(shape, dtype="float32"):
    rng = np.random.default_rng(0)
    if dtype.startswith("int"):
        return rng.integers(-9, 9, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


# ---- how many pieces


@pytest.mark.parametrize(
    ("shape", "axes", "pieces"),
    [
        ((16384, 1024), (0,), [16, 1]),  # 16 blocks of 64 columns: 16 of each for two an SM
        ((8192, 4096), (0,), [4, 1]),
        ((2**26,), (0,), [2048, 1]),
        ((32, 56, 56, 256), (0, 1, 2), [64, 1]),
        ((32, 64, 64, 32, 10), (1, 2, 4), [1, 1]),  # outer axes first: 10 are no row
        ((32, 256, 56, 56), (0, 2, 3), [1, 1]),  # rows of 3136 first
        ((8191, 512), (0,), [33, 1]),  # a prime: padded
        ((16, 128256), (1,), [1]),  # a cluster of 8 blocks a row fills the device
        ((8192, 4096), (1,), [1]),
        ((65536, 65536), (0,), [1]),
        ((64, 64), (0,), [1]),
    ],
)
def test_reductions_that_would_starve_the_device_get_pieces(shape, axes, pieces):
    assert [stage.pieces for stage in stages(shape, axes, H200)] == pieces


@pytest.mark.parametrize(("rows", "pieces"), [(8192, 256), (6000, 250), (2048, 256), (1024, 128)])
def test_sums_beside_reductions_over_rows_get_a_piece_for_each_resident_block(rows, pieces):
    beside = Setting(frozenset({(rows, 4096)}))
    assert stages((rows, 4096), (0,), H200, beside)[0].pieces == pieces


@pytest.mark.parametrize(
    ("outer", "rows", "pieces"),
    [(1, 304, 304), (2, 304, 152), (1, 2, None), (1, 77, None)],
    ids=["all", "parts", "rows that are taken apart", "other points"],
)
def test_sums_over_all_rows_begin_with_rows_that_are_reduced_anyway(outer, rows, pieces):
    shape = (outer, 304 // outer, 13816)
    columns = 13816 if rows == 77 else 304 * 13816 // rows
    beside = Setting(frozenset({(rows, columns), (1, 304 * 13816)}))
    first, last = stages(shape, (1, 2), H200, beside)
    assert first.pieces == (pieces or stages(shape, (1, 2), H200)[0].pieces)
    assert last.pieces == 1


def test_pieces_of_a_mixed_kernel_are_whole_rows_or_none():
    beside = Setting(frozenset({(8191, 4096)}))
    first, _ = stages((8191, 4096), (0,), H200, beside)
    assert first.pieces < H200.num_sms  # as for sums alone


def test_a_smaller_device_needs_fewer_pieces():
    small = dataclasses.replace(H200, num_sms=16)
    assert len(stages((16384, 1024), (0,), small)) == 1


def test_a_device_without_clusters_splits_rows_that_another_spreads_over_a_cluster():
    ampere = dataclasses.replace(H200, arch="sm_80")
    assert stages((16, 2**20), (1,), ampere)[0].pieces > 1
    assert len(stages((16, 2**20), (1,), H200)) == 1


def test_rows_that_several_reductions_need_stay_together_longer():
    once, often = (Setting(chain=chain) for chain in (1, 12))
    assert len(stages((4, 2**20), (1,), H200, once)) > 1
    assert len(stages((4, 2**20), (1,), H200, often)) == 1


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((8192, 4096), (1,), False),
        ((8192, 4096), (0,), True),
        ((4, 8, 16, 16), (2, 3), False),
        ((4, 8, 16, 16), (0, 2, 3), True),
        ((4, 1, 16), (0, 2), False),
        ((1, 64, 16), (0, 2), False),
        ((300, 2**19), (1,), True),
    ],
)
def test_statistics_are_taken_in_one_pass_where_rows_do_not_stay_on_the_chip(shape, axes, expected):
    assert needs_stages(shape, axes, H200) is expected


def test_the_longest_row_on_the_chip_is_half_the_registers_of_a_cluster():
    assert on_chip_elements(H200) == 8 * H200.registers_per_sm // 2


# ---- the same results


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("shape", "axis", "keepdims"),
    [
        ((512, 64), 0, False),
        ((512, 64), 0, True),
        ((1, 65536), 1, True),
        ((65536,), None, False),
        ((2, 8, 8, 3, 5), (1, 2, 4), True),
        ((4, 8, 8, 16), (0, 2, 3), False),
        ((509, 32), 0, False),
        ((1, 65537, 1), (1,), True),
        ((3, 512, 1, 40), (1, 2), False),
    ],
)
@pytest.mark.parametrize("name", ["sum", "max"])
def test_a_split_reduction_gives_the_same_numbers(name, shape, axis, keepdims):
    mod = module(reducing(getattr(op, name), axis, keepdims), (shape, "float32"))
    assert operators(split(mod)).count(name) > 1
    x = random(shape)
    expected = getattr(np, name)(x.astype("float64"), axis=axis, keepdims=keepdims)
    (got,) = run(split(mod), x)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("max", "int32"), ("min", "int32"), ("sum", "int32"), ("min", "float32"), ("prod", "float32")],
)
def test_padding_is_neutral(name, dtype):
    mod = module(reducing(getattr(op, name), 0), ((509, 32), dtype))
    assert "nn.pad" in operators(split(mod))
    x = random((509, 32), dtype)
    x = np.sign(x) * (1 + 0.01 * np.abs(x)) if name == "prod" else x - 20 if name == "max" else x
    x = x.astype(dtype)
    expected = getattr(np, name)(x.astype("float64"), axis=0)
    (got,) = run(split(mod), x)
    np.testing.assert_allclose(got.astype("float64"), expected, rtol=1e-4, atol=1e-4)


def test_the_pieces_are_tagged_as_parts_of_their_composite():
    mod = split(module(lambda bb, x: op.mean(x, axis=[0]), ((512, 64), "float16")))
    tags = mod["main"].attrs["tvm_fusion.composites"]
    parts = [name for name in tags if name.endswith("_part")]
    assert len(parts) == 1
    assert tags[parts[0]] == "mean#1"


# ---- siblings


def test_equal_reductions_over_the_same_data_are_split_alike():
    def emit(bb, x, y):
        product = bb.emit(op.multiply(x, y))
        sums = [bb.emit(op.sum(t, axis=[0])) for t in (x, product)]
        return relax.Tuple([*sums, bb.emit(op.max(y, axis=[0]))])

    mod = split(module(emit, ((512, 64), "float32"), ((512, 64), "float32")))
    assert views(mod) == [(16, 32, 64)] * 3


@pytest.mark.parametrize("rows_too", [False, True])
def test_sums_follow_the_reductions_over_rows_on_the_same_data_only(rows_too):
    def emit(bb, x, y):
        rows = bb.emit(op.sum(x if rows_too else y, axis=[1]))
        return relax.Tuple([bb.emit(op.sum(x, axis=[0])), rows])

    mod = module(emit, ((8192, 4096), "float32"), ((8192, 4096), "float32"))
    assert views(SplitReductions(H200)(mod)) == [(256, 32, 4096) if rows_too else (4, 2048, 4096)]


# ---- left alone


@pytest.mark.parametrize(
    ("emit", "inputs"),
    [
        (reducing(op.sum, 0), (("n", 64), "float32")),
        (reducing(op.sum, 1), ((512, 64), "float32")),
        (reducing(op.sum, 0), ((0, 64), "float32")),
        (lambda bb, x: op.exp(x), ((512, 64), "float32")),
    ],
    ids=["symbolic", "rows", "empty", "no reduction"],
)
def test_what_cannot_be_split_or_need_not_be_is_returned_as_it_is(emit, inputs):
    shape, dtype = inputs
    size = tvm.tirx.Var("n", "int64") if "n" in shape else None
    mod = module(emit, ([size if e == "n" else e for e in shape], dtype))
    assert SplitReductions(EAGER)(mod).same_as(mod)


def test_layers_that_residuals_join_are_no_one_reading():
    """Each has a maximum over all of its results, as those of T5 in half precision."""

    def layers(bb, x, w):
        for _ in range(8):
            x = bb.emit(op.multiply(x, bb.emit(op.max(x))))
            x = bb.emit(op.add(x, bb.emit(op.matmul(x, w))))
        return x

    mod = module(layers, ((1024, 768), "float16"), ((768, 768), "float16"))
    assert operators(SplitReductions(H200)(mod)).count("max") == 16


def test_a_cpu_splits_nothing():
    mod = module(reducing(op.sum, 0), ((16384, 1024), "float32"))
    cpu = load_profile("llvm")
    assert len(plan_of(mod, "llvm").graph.ops) == 1
    assert len(lower(mod, cpu.to_target(), hw=cpu)["main"].body.blocks[0].bindings) == 1


# ---- plans


def kernels(mod: tvm.IRModule) -> list[str]:
    return [g.kernel_class for g in plan_of(mod).plan.groups if g.kernel_class != "view"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("given", [True, False])
def test_layer_norm_backward_is_one_mixed_kernel_and_the_finishing_sums(given):
    mod = module(layer_norm_backward(), *layer_norm_inputs(8192, 4096, "float16", given))
    assert kernels(mod) == ["mixed", "column"]


def test_rms_norm_backward_is_one_mixed_kernel_and_the_finishing_sum():
    mod = module(rms_norm_backward(), *rms_norm_inputs(8192, 4096, "float16"))
    assert kernels(mod) == ["mixed", "column"]


def group_norm_silu(bb, x, g, b):
    y = op.nn.group_norm(x, g, b, 32, channel_axis=3, axes=[1, 2], epsilon=1e-5)
    return op.nn.silu(bb.emit(y))


def instance_norm(bb, x, g, b):
    return op.nn.instance_norm(x, g, b, channel_axis=3, axes=[1, 2])


def batch_norm(axis):
    return lambda bb, x, *parameters: op.nn.batch_norm(x, *parameters, axis=axis, training=True)


def softmax(axis):
    return lambda bb, x: op.nn.softmax(x, axis=axis)


def three_softmaxes(bb, x):
    for axis in (1, 0, 1):
        x = bb.emit(op.nn.softmax(x, axis=axis))
    return x


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("emit", "shape", "parameters", "expected"),
    [
        (group_norm_silu, (32, 64, 64, 320), 2, ["column"]),
        (instance_norm, (32, 64, 64, 256), 2, ["column"]),
        (batch_norm(1), (16, 256, 56, 56), 4, ["column"]),
        (softmax(0), (4096, 4096), 0, ["column"]),
        (softmax(1), (64, 512, 513), 0, ["column"]),
        (three_softmaxes, (32, 32), 0, ["row", "column", "row"]),
    ],
)
def test_dependent_reductions_that_fill_the_device_are_one_kernel(
    emit, shape, parameters, expected
):
    channels = shape[1 if parameters == 4 else -1]  # batch norm has them second
    vectors = [((channels,), "float16")] * parameters
    assert kernels(module(emit, (shape, "float16"), *vectors)) == expected


def test_group_norm_in_one_kernel_takes_its_statistics_in_one_pass():
    vectors = [((320,), "float16")] * 2
    mod = module(group_norm_silu, ((32, 64, 64, 320), "float16"), *vectors)
    (group,) = [g for g in plan_of(mod).plan.groups if g.kernel_class == "column"]
    assert group.bytes <= 2.1 * 2 * 32 * 64 * 64 * 320
    split = SplitReductions(H200)(Decompose(hw=H200)(mod))
    assert any("typical" in var.name_hint for var in split.functions)


def test_softmax_over_few_columns_is_split():
    mod = module(softmax(0), ((65536, 512), "float16"))
    assert kernels(mod).count("column") == 4


def test_few_multiprocessors_keep_more_together():
    shape, levels = (65536, 512), Setting(levels=2)
    assert len(stages(shape, (0,), H200, levels)) == 2
    assert len(stages(shape, (0,), dataclasses.replace(H200, num_sms=16), levels)) == 1


@pytest.mark.parametrize(
    ("shape", "axes", "levels", "count"),
    [
        ((16384, 1024), (0,), 0, 2),  # nothing waits for the sum
        ((4096, 4096), (0,), 2, 1),
        ((4096, 4096), (0,), 0, 2),
        ((32, 64, 64, 32, 10), (1, 2, 4), 1, 1),
        ((32, 64, 64, 32, 10), (1, 2, 4), 0, 2),
        ((16, 256, 56, 56), (0, 2, 3), 1, 1),
        ((32, 256, 56, 56), (0, 2, 3), 1, 2),  # too long for what planes lose
        ((32, 56, 56, 256), (0, 1, 2), 1, 2),  # 8 blocks
        ((4, 64, 4, 64, 4096), (0, 2, 4), 1, 3),  # no column kernel walks in that order
    ],
)
def test_what_is_computed_with_afterwards_is_split_later(shape, axes, levels, count):
    assert len(stages(shape, axes, H200, Setting(levels=levels))) == count


@pytest.mark.parametrize("levels", [0, 1])
def test_axes_of_one_element_need_no_stages(levels):
    assert stages((1, 4096), (0,), H200, Setting(levels=levels)) == []


def test_only_what_comes_back_to_its_points_counts_as_dependent():
    def emit(bb, x, y, comes_back):
        total = bb.emit(op.sum(x, axis=[0], keepdims=True))
        used = bb.emit(op.multiply(x, bb.emit(op.exp(total)))) if comes_back else y
        return relax.Tuple([total, used])

    def sums(comes_back):
        inputs = [((4096, 4096), "float16")] * 2
        mod = module(functools.partial(emit, comes_back=comes_back), *inputs)
        return operators(SplitReductions(H200)(mod)).count("sum")

    assert (sums(True), sums(False)) == (1, 2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("shape", "axis", "expected"),
    [
        ((32, 256, 56, 56), 1, ["row", "column", "pointwise"]),
        ((32, 56, 56, 256), 3, ["column", "column", "pointwise"]),
    ],
)
def test_batch_norm_in_training_is_three_kernels(shape, axis, expected):
    mod = module(batch_norm(axis), (shape, "float16"), *[((256,), "float16")] * 4)
    assert kernels(mod) == expected


N = tvm.tirx.Var("n", "int64")
# shape: the shape behind the first of two reductions
WHOLE = {
    (N, 1024): (N, 1),
    (3, N, 16, 64): (3, N, 1, 1),
    (64, N): (64, 1),
    (128, 1, N): (128, 1, 1),
}


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("shape", WHOLE, ids=str)
def test_a_full_reduction_of_symbolic_size_has_rows_to_share_out(shape, name):
    reduce = getattr(op, name)
    mod = split(module(lambda bb, x: reduce(x), (shape, "float32")))
    found = [b for b in mod["main"].body.blocks[0].bindings if b.value.op.name == f"relax.{name}"]
    first, second = (binding.var.ty for binding in found)
    assert list(map(str, first.shape)) == [str(_extent(e)) for e in WHOLE[shape]]
    assert second.ndim == 0
    x = np.random.default_rng(3).random([5 if e is N else e for e in shape], "float32")
    np.testing.assert_allclose(run(mod, x)[0], getattr(np, name)(x), rtol=1e-5)


def _extent(extent):
    return tvm.tirx.IntImm("int64", extent) if isinstance(extent, int) else extent


@pytest.mark.parametrize(
    ("shape", "axes"), [((N, 1024), [0]), ((N, 1024), [1]), ((N, 63), None), ((N,), None)]
)
def test_other_reductions_of_symbolic_size_stay(shape, axes):
    assert (
        split(module(lambda bb, x: op.sum(x, axes), (shape, "float32"))).script().count("R.sum(")
        == 1
    )
