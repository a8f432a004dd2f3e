"""Data that a convolution computes in shared memory, before all taps read it: numbers on the
emulator, which groups are taken, refusals.
"""

import numpy as np
import pytest
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.convolution.boxes import box_shape
from tvm_fusion.kernels.convolution.geometry import read_convolution
from tvm_fusion.kernels.convolution.hopper import emit_streams, streams_ranked

from ...support.conv_suites import last, square
from ...support.convolutions import Conv
from ...support.graphs import module, plan_of
from ...support.hopper_on_cpu import compile_hopper, run_hopper_on_cpu
from ...support.kernel_cases import fuse, outputs_of

H200, POLICY = load_profile("nvidia_h200"), load_policy(None)
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2}
HALF, FLOAT = "float16", "float32"


def ran(func, inputs, config):
    outputs = outputs_of(func, len(inputs))
    kernel = emit_streams(read_convolution(func), H200, config)
    assert run_hopper_on_cpu(kernel, [*inputs, *outputs]) == 1
    return outputs


def error(got, wanted):
    return np.abs(got.astype(np.float64) - wanted).max() / np.abs(wanted).max()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "case",
    [
        last((9, 11), (3, 3), 64, 64, batch=2, epilogue="residual", prologue=True),
        last((12, 13), (3, 3), 72, 24, batch=1, dilation=2, padding=(1, 2, 0, 3), prologue=True),
        last((150,), (5,), 72, 24, batch=2, dtype="bfloat16", epilogue="silu", prologue=True),
        last((4, 5, 9), (3, 1, 3), 64, 32, batch=1, prologue=True),
    ],
    ids=repr,
)
def test_computed_boxes_are_close_to_float64(case):
    func = case.func()
    ranked = [config for _, config in streams_ranked(read_convolution(func), H200, POLICY)]
    inputs = case.arrays()
    for config in {ranked[0], ranked[-1]}:
        for got, wanted in zip(ran(func, inputs, config), case.expected(inputs), strict=True):
            assert error(got, wanted) <= TOLERANCE[case.dtype], config


# ---- norms whose statistics are known

IMAGES, SIZES, GROUPS, CHANNELS, FILTERS = 3, (9, 11), 9, 72, 40


def normed(bb, x, mean, scale, gain, w, grouped: bool):
    """silu of a GroupNorm without its statistics; of data that is grouped already, or not."""
    emit, shape = bb.emit, (IMAGES, *SIZES, CHANNELS)
    if not grouped:
        x = emit(op.reshape(x, (IMAGES, *SIZES, GROUPS, CHANNELS // GROUPS)))
    x = emit(op.multiply(emit(op.subtract(emit(op.astype(x, FLOAT)), mean)), scale))
    x = emit(op.reshape(emit(op.astype(emit(op.add(x, gain)), HALF)), shape))
    y = emit(op.nn.silu(x))
    return op.nn.conv2d(y, w, padding=1, data_layout="NHWC", kernel_layout="OHWI")


def norm(grouped: bool):
    """The fused PrimFunc, its inputs and what comes out."""
    data, per = (IMAGES, *SIZES, CHANNELS), CHANNELS // GROUPS
    statistics, weights = (IMAGES, 1, 1, GROUPS, 1), (FILTERS, 3, 3, CHANNELS)
    own = (*data[:-1], GROUPS, per) if grouped else data
    shapes = [(own, HALF), (statistics, FLOAT), (statistics, FLOAT), ((GROUPS, per), FLOAT)]
    func = fuse(lambda bb, *xs: normed(bb, *xs, grouped), *shapes, (weights, HALF))
    rng = np.random.default_rng(0)
    x, mean, scale, gain = (rng.standard_normal(s).astype(d) for s, d in shapes)
    w = (rng.standard_normal(weights) / np.sqrt(9 * CHANNELS)).astype(HALF)
    y = (x.astype(float).reshape(*data[:-1], GROUPS, per) - mean) * scale + gain
    y = (y / (1 + np.exp(-y))).reshape(data)
    plain = Conv(SIZES, (3, 3), CHANNELS, FILTERS, IMAGES, padding=(1,) * 4)
    order = (0, 3, 1, 2)
    wanted = plain.expected([y.transpose(order), w.transpose(order)])[0]
    return func, [x, mean, scale, gain, w], wanted.transpose(0, 2, 3, 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("grouped", [False, True])
def test_zeros_of_padding_count_behind_the_function_of_an_image(grouped):
    func, inputs, wanted = norm(grouped)
    ranked = [config for _, config in streams_ranked(read_convolution(func), H200, POLICY)]
    for config in {ranked[0], ranked[len(ranked) // 2]}:
        (got,) = ran(func, inputs, config)
        assert error(got, wanted) <= TOLERANCE[HALF], config


def test_kernels_do_not_spill_and_multiply_while_they_compute():
    problem = read_convolution(norm(False)[0])
    ranked = [config for _, config in streams_ranked(problem, H200, POLICY)]
    widest = max(ranked, key=lambda config: (config.block_m * config.block_n, config.block_n))
    compiled = compile_hopper(emit_streams(problem, H200, widest))
    assert (compiled.spill_bytes, compiled.remarks) == (0, ())


# ---- which are taken


def summed(bb, x, y, w):
    x = bb.emit(op.nn.relu(bb.emit(op.add(x, y))))
    return op.nn.conv2d(x, w, padding=1, data_layout="NHWC", kernel_layout="OHWI")


def by_position(bb, x, s, w):
    x = bb.emit(op.multiply(x, s))
    return op.nn.conv2d(x, w, padding=1, data_layout="NHWC", kernel_layout="OHWI")


@pytest.mark.parametrize(
    ("func", "why"),
    [
        (square(9, 3, 64, 64, batch=1).func(), "not computed"),
        (square(9, 3, 64, 64, batch=1, stride=2, prologue=True).func(), "same elements"),
        (square(9, 3, 64, 64, batch=1, groups=2, prologue=True).func(), "computed, for groups"),
        (fuse(summed, *2 * [((1, 9, 9, 64), HALF)], ((64, 3, 3, 64), HALF)), "2 matrices"),
        (
            fuse(by_position, *(((1, 9, 9, n), HALF) for n in (64, 1)), ((64, 3, 3, 64), HALF)),
            "between positions",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_not_computed_for_all_taps_is_refused_with_its_reason(func, why):
    with pytest.raises(Unsupported, match=why):
        streams_ranked(read_convolution(func), H200, POLICY)


@pytest.mark.parametrize(("channels", "taken"), [(64, True), (512, False)])
def test_a_norm_is_applied_on_the_way_where_that_is_predicted_to_pay(channels, taken):
    def emit(bb, x, scale, shift, w):
        y = bb.emit(op.multiply(bb.emit(op.astype(x, FLOAT)), scale))
        y = bb.emit(op.nn.silu(bb.emit(op.astype(bb.emit(op.add(y, shift)), HALF))))
        return op.nn.conv2d(y, w, padding=1, data_layout="NHWC", kernel_layout="OHWI")

    vector = ((8, 1, 1, channels), FLOAT)
    data, weights = ((8, 56, 56, channels), HALF), ((channels, 3, 3, channels), HALF)
    plan = plan_of(module(emit, data, vector, vector, weights), "nvidia_h200").plan
    assert len(plan.groups) == (1 if taken else 2)


def test_a_group_norm_is_applied_through_the_reshapes_of_its_groups():
    def emit(bb, x, gain, shift, w):
        x = bb.emit(op.nn.group_norm(x, gain, shift, 32, 3, [1, 2]))
        y = bb.emit(op.nn.silu(x))
        return op.nn.conv2d(y, w, padding=1, data_layout="NHWC", kernel_layout="OHWI")

    shapes = [(4, 64, 64, 64), (64,), (64,), (64, 3, 3, 64)]
    plan = plan_of(module(emit, *((s, HALF) for s in shapes)), "nvidia_h200").plan
    (taken,) = [group for group in plan.groups if group.kernel_class == "convolution"]
    assert taken.terms["computed"] > 0
    assert not any(group.kernel_class == "pointwise" for group in plan.groups)


def test_a_box_has_one_image_where_numbers_of_an_image_are_read():
    sizes, steps, reach = (8, 1, 8), (1, 1, 1), (0, 0, 2)
    assert box_shape(sizes, steps, reach, rims=True) == (8, 1, 8)
    assert box_shape(sizes, steps, reach, rims=True, alone=[0])[0] == 1
