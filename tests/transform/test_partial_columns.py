"""Sums over positions of convolutions and rows of products: which are split in two stages, with the
same numbers, and what the planner makes of them.
"""

import dataclasses

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from tvm_fusion.transform.rewrites.partial_columns import PartialColumns

from ..support.cuda_on_cpu import run_cuda_on_cpu
from ..support.graphs import module
from ..support.hopper_on_cpu import run_hopper_on_cpu
from .test_partial_rows import (
    A100,
    CPU,
    FLOAT,
    H200,
    HALF,
    close,
    kernels,
    opened,
    parts,
    random,
    run,
    shapes,
    wide,
    written,
)
from .test_partial_rows import planned as planned_with


def convolved(bb, x, w, r, **options):
    """relu(conv2d(x, w) + r) in channels last."""
    attrs = {"padding": 1, "data_layout": "NHWC", "kernel_layout": "OHWI"} | options
    return bb.emit(op.nn.relu(bb.emit(op.add(bb.emit(op.nn.conv2d(x, w, **attrs)), r))))


def pooled(bb, x, w, r):
    return [bb.emit(op.mean(convolved(bb, x, w, r), axis=[1, 2]))]


def moments(bb, x, w, r):
    """h, and sums and sums of squares of each group of 16 channels, and of all images."""
    h = convolved(bb, x, w, r)
    n, p, q, c = (int(extent) for extent in h.ty.shape)
    groups = bb.emit(op.reshape(wide(bb, h), (n, p, q, c // 16, 16)))
    square = bb.emit(op.multiply(groups, groups))
    found = [bb.emit(op.sum(x, axis=[1, 2, 4], keepdims=True)) for x in (groups, square)]
    return [h, *found, bb.emit(op.sum(wide(bb, h), axis=[0, 1, 2]))]


def rows(bb, x, w, r):
    """Means over the positions of a product's rows."""
    h = bb.emit(op.nn.relu(bb.emit(op.add(bb.emit(op.matmul(x, w)), r))))
    return [bb.emit(op.mean(h, axis=[1, 2], keepdims=True))]


def grouped_rows(bb, x, w, r):
    """Sums of groups of 4 columns over the positions of a product's rows."""
    h = wide(bb, bb.emit(op.add(bb.emit(op.matmul(x, w)), r)))
    n, p, q, c = (int(extent) for extent in h.ty.shape)
    groups = bb.emit(op.reshape(h, (n, p, q, c // 4, 4)))
    return [bb.emit(op.sum(groups, axis=[1, 2, 4], keepdims=k)) for k in (True, False)]


def conv_types(n, p, q, c, f):
    return [((n, p, q, c), HALF), ((f, 3, 3, c), HALF), ((f,), HALF)]


def row_types(n, p, q, k, c):
    return [((n, p, q, k), HALF), ((k, c), HALF), ((c,), HALF)]


def split(mod, hw=H200):
    return PartialColumns(hw)(opened(mod, hw))


def planned(mod, hw=H200, rewrites=("partial_columns",)):
    return planned_with(mod, hw, rewrites)


# ---- what is split


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("emit", "types", "expected"),
    [
        (pooled, conv_types(2, 7, 9, 8, 16), [(2, 2, 3, 16)]),
        (pooled, conv_types(2, 28, 28, 8, 16), [(2, 7, 7, 16)]),
        (moments, conv_types(2, 6, 8, 8, 32), [(2, 32, 3, 1), (2, 32, 3, 1), (2, 3, 1, 32)]),
        (rows, row_types(3, 7, 7, 16, 8), [(3, 4, 8)]),
        (grouped_rows, row_types(3, 7, 7, 16, 8), [(3, 8, 4)] * 2),
    ],
)
def test_a_split_sum_gives_the_same_numbers(emit, types, expected):
    mod = module(emit, *types)
    assert parts(split(mod)) == expected
    arrays = random(types)
    for got, wanted in zip(run(split(mod), *arrays), run(opened(mod), *arrays), strict=True):
        close(got, wanted.astype("float64"), 1e-3)


def test_the_parts_are_tagged_as_parts_of_their_composite():
    mod = split(module(pooled, *conv_types(2, 7, 9, 8, 16)))
    tags = mod["main"].attrs["tvm_fusion.composites"]
    assert [tag for name, tag in tags.items() if name.endswith("_part")] == ["mean#1"]


def _of(reduce, **options):
    """A reduction of a convolution's results."""

    def emit(bb, x, w, r):
        return reduce(wide(bb, convolved(bb, x, w, r)), **options)

    return emit


def _behind_a_window(bb, x, w, r):
    return op.mean(bb.emit(op.nn.max_pool2d(convolved(bb, x, w, r), layout="NHWC")), axis=[1, 2])


def _of_rows_apart(bb, x, w, r):
    h = wide(bb, bb.emit(op.matmul(x, w)))
    return op.sum(h, axis=[0, 2])


@pytest.mark.parametrize(
    ("emit", "types"),
    [
        (_of(op.max, axis=[1, 2]), conv_types(2, 8, 8, 8, 16)),
        (_of(op.sum, axis=[3]), conv_types(2, 8, 8, 8, 16)),
        (_of(op.sum, axis=[2]), conv_types(2, 8, 8, 8, 16)),  # few rows
        (pooled, conv_types(2, 8, 8, 3, 16)),  # channels that the TMA does not read
        (_behind_a_window, conv_types(2, 8, 8, 8, 16)),
        (_of_rows_apart, row_types(3, 7, 16, 16, 8)),
    ],
)
def test_other_reductions_are_left_alone(emit, types):
    mod = opened(module(emit, *types))
    assert PartialColumns(H200)(mod).same_as(mod)


@pytest.mark.parametrize(("layers", "is_split"), [(1, True), (60, False)])
def test_a_small_share_of_all_results_is_left_alone(layers, is_split):
    def emit(bb, x, w, r):
        for _ in range(layers):
            x = convolved(bb, x, w, r)
        return op.mean(x, axis=[1, 2])

    mod = opened(module(emit, *conv_types(2, 8, 8, 16, 16)))
    assert PartialColumns(H200)(mod).same_as(mod) != is_split


@pytest.mark.parametrize("hw", [A100, CPU], ids=lambda hw: hw.name)
def test_devices_whose_kernels_write_no_partial_results_split_nothing(hw):
    mod = opened(module(pooled, *conv_types(2, 8, 8, 8, 16)), hw)
    assert PartialColumns(hw)(mod).same_as(mod)


# ---- statistics of one pass

GROUPS = 4


def normalized(bb, x, w, r):
    """h and a group norm of it."""
    h = bb.emit(op.add(bb.emit(op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="OHWI")), r))
    one, zero = (relax.const(np.full(16, v, HALF)) for v in (1, 0))
    options = {"num_groups": GROUPS, "channel_axis": 3, "axes": [1, 2], "epsilon": 1e-5}
    return [h, bb.emit(op.nn.group_norm(h, one, zero, **options))]


def normalized_by_hand(h):
    groups = h.astype("float64").reshape(*h.shape[:3], GROUPS, -1)
    centered = groups - groups.mean((1, 2, 4), keepdims=True)
    variance = groups.var((1, 2, 4), keepdims=True)
    return (centered / np.sqrt(variance + 1e-5)).reshape(h.shape)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_a_norm_needs_no_shift_beside_what_halves_lose(mean):
    """With means of 30 deviations; the sums are of h, and no shift is made of it."""
    types = conv_types(2, 16, 18, 8, 16)
    mod = split(module(normalized, *types))
    assert parts(mod) == [(2, 16, 14, 1)] * 2
    x, w, r = random(types)
    w, r = w / np.sqrt(np.float16(72)), np.full_like(r, mean)
    h, found = run(mod, x, w, r)
    close(found, normalized_by_hand(h), 2e-3)
    _, shifted = run(opened(module(normalized, *types)), x, w, r)
    close(found, shifted.astype("float64"), 2e-3)


def test_statistics_of_floats_keep_their_shift():
    types = [(shape, FLOAT) for shape, _ in conv_types(2, 16, 18, 8, 16)]

    def emit(bb, x, w, r):
        h = bb.emit(op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="OHWI"))
        return op.variance(bb.emit(op.add(h, r)), axis=[1, 2])

    mod = opened(module(emit, *types))
    assert PartialColumns(H200)(mod).same_as(mod)


def test_a_convolution_takes_along_the_statistics_of_its_norm():
    types = conv_types(2, 66, 66, 320, 320)

    def emit(bb, x, w, r):
        h = bb.emit(op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="OHWI"))
        one, zero = (relax.const(np.full(320, v, HALF)) for v in (1, 0))
        options = {"num_groups": 32, "channel_axis": 3, "axes": [1, 2], "epsilon": 1e-5}
        return op.nn.group_norm(bb.emit(op.add(h, r)), one, zero, **options)

    found = kernels(planned(module(emit, *types))[2])
    assert [g.kernel_class for g in found] == ["convolution", "row", "pointwise"]
    assert len(kernels(planned(module(emit, *types), rewrites=())[2])) > 3


# ---- plans


@pytest.mark.parametrize(
    ("emit", "types", "family"),
    [
        (pooled, conv_types(32, 28, 28, 128, 128), "convolution"),
        (rows, row_types(32, 56, 56, 64, 256), "gemm"),
        (rows, row_types(32, 7, 7, 512, 2048), "gemm"),
    ],
)
def test_what_is_only_averaged_is_not_written(emit, types, family):
    product, finish = kernels(planned(module(emit, *types))[2])
    assert (product.kernel_class, finish.kernel_class) == (family, "column")
    (n, p, q, _), ((*_, c), _) = types[0][0], types[-1]
    whole = n * p * q * c * 2
    assert finish.bytes <= whole / 2
    _, alone = kernels(planned(module(emit, *types), rewrites=())[2])
    assert alone.bytes >= whole


def test_a_depthwise_convolution_sums_nothing():
    def emit(bb, x, w, r):
        return op.mean(convolved(bb, x, w, r, groups=64), axis=[1, 2])

    types = [((8, 14, 14, 64), HALF), ((64, 3, 3, 1), HALF), ((64,), HALF)]
    mod = opened(module(emit, *types))
    assert PartialColumns(H200)(mod).same_as(mod)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("emit", "types", "reference"),
    [
        (pooled, conv_types(3, 7, 9, 64, 24), None),
        (rows, row_types(3, 7, 7, 64, 72), lambda x, w, r: np.maximum(x @ w + r, 0)),
    ],
    ids=["convolution", "product"],
)
def test_the_planned_kernels_compute_what_the_graph_says(emit, types, reference):
    hw = dataclasses.replace(H200, num_sms=2)
    mod = module(emit, *types)
    product, finish = written(*planned(mod, hw), hw)
    arrays = random(types)
    (wanted,) = run(opened(mod), *arrays)
    if reference is not None:
        h = reference(*(a.astype("float64") for a in arrays))
        close(wanted, h.mean((1, 2), keepdims=True))
    inputs = {shape: array for (shape, _), array in zip(types, arrays, strict=True)}
    (part,) = (shape for shape in shapes(product) if shape not in inputs)
    sums, found = np.full(part, np.nan, FLOAT), np.full(shapes(finish)[-1], np.nan, HALF)
    assert run_hopper_on_cpu(product, [inputs.get(s, sums) for s in shapes(product)]) == 1
    assert run_cuda_on_cpu(finish, [sums, found]) == 1
    close(found.reshape(wanted.shape), wanted.astype("float64"))
