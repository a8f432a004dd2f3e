"""Convolutions on Hopper's tensor cores: numbers on the emulator, boxes, refusals."""

import random
import re
import statistics
from dataclasses import replace

import numpy as np
import pytest
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.convolution.geometry import read_convolution
from tvm_fusion.kernels.convolution.hopper import (
    box_shape,
    emit_hopper,
    emit_rims,
    hopper_ranked,
    read_windows,
    rims_ranked,
)

from ...fit_gemm_cost import accuracy, load_convolutions
from ...support.conv_suites import CHANNELS_LAST_WEIGHTS, last, square
from ...support.convolutions import DATA_LAYOUTS, WEIGHT_LAYOUTS, Conv, random_convolution
from ...support.cuda_on_cpu import cuda_source, ptxas_report
from ...support.hopper_on_cpu import run_hopper_on_cpu
from ...support.kernel_cases import fuse, outputs_of

H200, A100 = load_profile("nvidia_h200"), load_profile("nvidia_a100")
POLICY = load_policy(None)
TF32 = load_policy({"allow_tf32": True})
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-3}


def drawn(seed: int) -> Conv:
    """A convolution that the TMA can read, of a kind and with sizes that the seed decides on."""
    rng, case = random.Random(seed), random_convolution(seed)
    rank = case.rank
    groups = rng.choice((1, 1, 1, 2, 3)) if rank < 3 else 1
    channels, filters = (groups * rng.choice(n) for n in ((8, 16, 40, 64, 96), (8, 24, 64, 72)))
    weights = rng.choice((CHANNELS_LAST_WEIGHTS[rank], WEIGHT_LAYOUTS[rank][1]))
    if case.transposed:
        weights = case.weight_layout
    dtype = rng.choice(("float16", "bfloat16"))
    layout = "" if case.transposed else DATA_LAYOUTS[rank][1]
    return replace(
        case,
        channels=channels,
        filters=filters,
        groups=groups,
        data_layout=layout or case.data_layout,
        weight_layout=weights,
        dtype=dtype,
        prologue=False,
        constant=False,
    )


def check(case: Conv, policy=POLICY, sample: int = 2, seed: int = 0) -> int:
    """Runs some configurations; each output is poisoned before and close to float64 after."""
    func = case.func()
    problem = read_convolution(func, case.exact)
    ranked = [config for _, config in hopper_ranked(problem, H200, policy)]
    chosen = [ranked[0], *random.Random(seed).sample(ranked, min(sample - 1, len(ranked)))]
    inputs = case.arrays(seed)
    wanted = case.expected(inputs)
    for config in chosen:
        outputs = outputs_of(func, len(inputs))
        assert run_hopper_on_cpu(emit_hopper(problem, H200, config), [*inputs, *outputs]) == 1
        for got, expected in zip(outputs, wanted, strict=True):
            error = np.abs(got.astype(np.float64) - expected).max() / np.abs(expected).max()
            assert error <= TOLERANCE[case.dtype], config
    return len(ranked)


TAKEN = [seed for seed in range(24) if not drawn(seed).transposed]


@pytest.mark.one_in(24)
@pytest.mark.parametrize("seed", TAKEN)
def test_random_convolutions_are_close_to_float64(seed):
    check(drawn(seed), seed=seed)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "case",
    [
        last((9, 7), (3, 3), 64, 64, batch=2, epilogue="residual"),
        last((9, 7), (3, 3), 64, 72, batch=2, epilogue="two_outputs"),
        last((14, 14), (3, 3), 512, 64, batch=1, epilogue="residual"),  # split terms
        last((8, 8), (1, 1), 64, 128, batch=3, stride=2),
        last((40,), (7,), 96, 32, batch=2, dilation=3),
        last((3, 6, 5), (3, 1, 3), 64, 64, batch=2),
        last((9, 9), (3, 3), 32, 32, batch=1, groups=2),
        last((6, 6), (3, 3), 64, 64, batch=1, dtype="bfloat16", epilogue="silu"),
    ],
    ids=repr,
)
def test_kinds_are_close_to_float64(case):
    assert check(case, sample=4) > 1


# Always: kinds of convolutions, above, and random ones.
@pytest.mark.nightly
@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "case",
    [  # windows of one element or one position
        last((6, 1), (3, 3), 64, 64, batch=1),
        last((12, 3), (3, 3), 64, 64, batch=1, epilogue="residual", padding=(1, 0, 1, 0)),
        last((2, 2), (3, 3), 64, 64, batch=8, stride=2, epilogue="residual"),
        last((1, 6), (3, 3), 64, 64, batch=4),
        last((32, 1), (3, 3), 64, 64, batch=1, epilogue="two_outputs"),
        last((1, 1, 9), (1, 3, 3), 64, 64, batch=3),
    ],
    ids=repr,
)
def test_windows_of_one_element_keep_rows_in_order(case):
    check(case, sample=5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "case",
    [
        last((5, 7), (3, 3), 64, 64, batch=1, repeats=(2, 2), epilogue="residual"),
        last((9,), (4,), 64, 64, batch=2, repeats=(4,), padding=(1, 1), stride=3),
        pytest.param(
            last((5, 4), (3, 3), 64, 64, batch=1, repeats=(3, 2), zeros=(0, 0, 1, 0)),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            last((3, 2, 3), (3, 3, 3), 64, 64, batch=1, repeats=(2, 2, 1), dilation=2),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=repr,
)
def test_enlarged_data_is_read_where_its_elements_lie(case):
    check(case, sample=1)


def test_zeros_in_the_place_of_some_repetitions_are_refused():
    def emit(bb, x, w):
        y = bb.emit(op.strided_slice(bb.emit(op.repeat(x, 2, 1)), [1], [1], [16]))
        return op.nn.conv1d(y, w, padding=1, data_layout="NWC", kernel_layout="OWI")

    func = fuse(emit, ((1, 8, 64), "float16"), ((64, 3, 64), "float16"))
    with pytest.raises(Unsupported, match="some repetitions"):
        read_windows(read_convolution(func))


def test_an_element_that_several_positions_slide_over_is_refused():
    case = last((1,), (3,), 64, 64, batch=5, padding=(2, 2))
    with pytest.raises(Unsupported, match="another order"):
        read_windows(read_convolution(case.func()))


def test_boxes_leave_windows_of_one_position_alone():
    assert box_shape((8, 1, 1), (1, 1, 1), (0, 2, 2)) == (64, 1, 1)
    assert box_shape((4, 1, 6), (1, 1, 1), (0, 2, 2))[1] == 1


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    "case",
    [
        last((9, 11), (3, 3), 64, 64, batch=2, epilogue="residual"),
        last((16, 8), (3, 3), 128, 32, batch=2, epilogue="two_outputs"),
        last((12, 12), (3, 5), 48, 32, batch=1, groups=2),
        last((8, 9), (3, 3), 64, 64, batch=1, weight_layout="HWIO"),
        last((12, 13), (3, 3), 64, 24, batch=1, dilation=2, padding=(1, 2, 0, 3)),
        last((150,), (5,), 72, 24, batch=2, dtype="bfloat16", epilogue="silu"),
        last((8, 5, 9), (3, 1, 3), 64, 32, batch=1),
    ],
    ids=repr,
)
def test_boxes_with_rims_are_close_to_float64(case):
    func = case.func()
    problem = read_convolution(func)
    ranked = [config for _, config in rims_ranked(problem, H200, POLICY)]
    inputs = case.arrays()
    for config in {ranked[0], ranked[-1]}:
        outputs = outputs_of(func, len(inputs))
        run_hopper_on_cpu(emit_rims(problem, H200, config), [*inputs, *outputs])
        for got, expected in zip(outputs, case.expected(inputs), strict=True):
            error = np.abs(got.astype(np.float64) - expected).max() / np.abs(expected).max()
            assert error <= TOLERANCE[case.dtype], config


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (square(9, 3, 64, 64, batch=1, stride=2), "same elements"),
        (square(9, 1, 64, 64, batch=1), "same elements"),
    ],
)
def test_rims_are_for_taps_of_the_same_elements(case, why):
    with pytest.raises(Unsupported, match=why):
        rims_ranked(read_convolution(case.func()), H200, POLICY)


def test_float32_is_rounded_only_where_the_policy_allows():
    case = last((8, 8), (3, 3), 32, 32, batch=1, dtype="float32", epilogue="scale_shift")
    assert check(case, TF32)
    with pytest.raises(Unsupported, match="may not be rounded"):
        hopper_ranked(read_convolution(case.func()), H200, POLICY)


@pytest.mark.parametrize(
    ("sizes", "strides", "boxes"),
    [
        ((32, 56, 56), (1, 1, 1), 32 * 49),
        ((32, 28, 28), (1, 1, 1), 8 * 49),
        ((32, 14, 14), (1, 2, 2), 2 * 49),
        ((32, 7, 7), (1, 1, 1), 28),
        ((1, 1500), (1, 2), 24),
        ((2, 8, 28, 28), (1, 1, 1, 1), 2 * 2 * 49),
    ],
)
def test_boxes_waste_as_few_rows_as_there_are_boxes(sizes, strides, boxes):
    shape = box_shape(sizes, strides, (0,) * len(sizes))
    assert int(np.prod(shape)) == 64
    counts = [-(-n // size) for n, size in zip(sizes, shape, strict=True)]
    assert int(np.prod(counts)) == boxes


def test_steps_that_the_tma_does_not_take_are_refused():
    with pytest.raises(Unsupported, match="16 elements"):
        read_windows(read_convolution(square(32, 16, 8, 64, stride=16, batch=1).func()))


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (square(9, 3, 12, 64, batch=1), "multiple of 16 bytes"),
        (square(9, 3, 32, 32, batch=1, groups=32), "one filter or one channel"),
        (square(9, 3, 64, 64, batch=1, data_layout="NCHW"), "not contiguous"),
        (square(9, 3, 64, 64, batch=1, weight_layout="OIHW"), "not contiguous|16 bytes"),
        (square(9, 3, 64, 64, batch=1, groups=2, prologue=True), "computed, for groups"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_addressed_is_refused_with_its_reason(case, why):
    with pytest.raises(Unsupported, match=why):
        read_windows(read_convolution(case.func()))


def test_other_devices_are_refused():
    with pytest.raises(Unsupported, match="no wgmma"):
        hopper_ranked(read_convolution(square(9, 3, 64, 64).func()), A100, POLICY)


def test_predicted_times_are_near_those_of_a_sweep_and_choices_near_the_best():
    found = accuracy(load_convolutions())
    assert len(found) >= 40
    errors = [error for _, every, _ in found.values() for error in every]
    regrets = [regret for regret, _, _ in found.values()]
    assert statistics.median(errors) <= 0.09
    assert statistics.median(regrets) <= 1.01
    assert statistics.mean(regrets) <= 1.03
    assert max(regrets) <= 1.2


@pytest.mark.parametrize("tall", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_tiles_do_not_spill(tall):
    problem = read_convolution(square(56, 3, 128, 128, epilogue="residual").func())
    shapes = {}
    for _, config in hopper_ranked(problem, H200, POLICY):
        alone = config.staged and config.split == 1 and config.multicast == 1
        if alone and (config.block_m > 128) == tall:
            shapes.setdefault((config.block_m, config.block_n, config.deferred), config)
    wanted = {(192, 128), (256, 128), (256, 64)} if tall else {(64, 64), (128, 128), (128, 256)}
    assert {key[:2] for key in shapes} >= wanted
    for config in shapes.values():
        report = ptxas_report(cuda_source(emit_hopper(problem, H200, config)), "sm_90a")
        assert " 0 bytes spill stores" in report, config


def test_stores_of_elements_do_not_compute_the_place_of_their_tile_again():
    line = last((600,), (3,), 64, 512, stride=2, batch=16, epilogue="channels_moved")
    problem = read_convolution(line.func())
    config = hopper_ranked(problem, H200, POLICY)[0][1]
    source = cuda_source(emit_hopper(problem, H200, config))
    stores = re.findall(r"T_transpose_intermediate_ptr\[.*\] = .*", source)
    assert len(stores) >= 16
    assert not any("blockIdx" in store for store in stores)
    check(replace(line, batch=2, filters=128))
