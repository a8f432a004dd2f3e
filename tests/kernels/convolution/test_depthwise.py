"""Convolutions of few channels a group on CUDA: numbers on the emulator, resources, refusals."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics

import numpy as np
import pytest
from tvm import tirx

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.convolution.depthwise.config import DepthwiseConfig
from tvm_fusion.kernels.convolution.depthwise.kernel import emit_depthwise
from tvm_fusion.kernels.convolution.depthwise.problem import direct_problem
from tvm_fusion.kernels.convolution.depthwise.rank import depthwise_ranked, ranked, shapes
from tvm_fusion.kernels.convolution.depthwise.shape import Roles, Shape
from tvm_fusion.kernels.convolution.depthwise.time import registers_of, sums_seconds
from tvm_fusion.kernels.convolution.forms import CUDA_WRITER
from tvm_fusion.kernels.convolution.geometry import read_convolution
from tvm_fusion.kernels.convolution.launch import START_SECONDS

from ...fit_gemm_cost import H100, accuracy, direct_us, load_direct, with_choice
from ...support.convolutions import Conv, plain, random_convolution
from ...support.cuda_on_cpu import (
    Watch,
    compile_cubins,
    cuda_source,
    run_cuda_on_cpu,
    without_each_barrier,
)
from ...support.helpers_tir import poisoned

H200 = load_profile("nvidia_h200")
FAST = load_policy({})
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def kernel_of(conv: Conv, config: DepthwiseConfig) -> tirx.PrimFunc:
    return emit_depthwise(read_convolution(conv.func(), conv.exact), H200, config)


def check(conv: Conv, kernel: tirx.PrimFunc) -> None:
    """Every element is written once, and close to float64."""
    inputs = conv.arrays()
    expected = conv.expected(inputs)
    outputs = [poisoned(e.shape, conv.dtype) for e in expected]
    watch = Watch(len(outputs))
    assert run_cuda_on_cpu(kernel, [*inputs, *outputs], watch) == 1
    assert all((counts == 1).all() for counts in watch.counts)
    for got, wanted in zip(outputs, expected, strict=True):
        error = np.abs(got.astype("float64") - wanted).max()
        assert error <= TOLERANCE[conv.dtype] * max(1.0, np.abs(wanted).max())


# ---- random ones


def small(seed: int, few: bool) -> Conv:
    """A convolution that the emulator takes a moment for: depthwise, or of few channels a group."""
    rng = random.Random(seed)
    while True:
        conv = random_convolution(rng.randrange(10**6))
        each = conv.channels // conv.groups
        terms = each * int(np.prod(conv.kernel))
        results = conv.batch * conv.filters * int(np.prod(conv.output_sizes))
        strides = conv.transposed and max(conv.strides) > 1
        if not strides and each <= 32 and (each > 1) == few and results * terms < 1_000_000:
            return conv


def any_config(conv: Conv, seed: int) -> DepthwiseConfig:
    """One of all that can be written, rolling or not, in registers or not, of any block."""
    rng = random.Random(seed)
    numbers = direct_problem(read_convolution(conv.func(), conv.exact)).numbers
    found = list(shapes(numbers))
    for some in rng.sample(found, len(found)):
        block = {"lanes": rng.choice((1, 3, 8)), "tasks": rng.choice((2, 5, 8))}
        config = dataclasses.replace(some.config, **block)
        shape = Shape(Roles(numbers, config.rolls), config)
        try:
            shape.check(H200)
        except Unsupported:
            continue
        if registers_of(shape) < 200 and shape.fmas < 1000:
            return config
    raise AssertionError("no configuration")


@pytest.mark.one_in(8)
@pytest.mark.parametrize("seed", range(40))
def test_a_random_depthwise_convolution(seed):
    conv = small(seed, few=False)
    check(conv, kernel_of(conv, any_config(conv, seed)))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("seed", range(30))
def test_a_random_convolution_of_few_channels(seed):
    conv = small(seed, few=True)
    check(conv, kernel_of(conv, any_config(conv, seed)))


# ---- one of each kind, in the configuration that is thought to be fastest

DEPTHWISE = plain(channels=24, filters=24, groups=24, data_layout="NHWC", dtype="float16")
CASES = {
    "channels_last": DEPTHWISE,
    "channels_first": dataclasses.replace(DEPTHWISE, data_layout="NCHW", sizes=(9, 12)),
    "residual": dataclasses.replace(DEPTHWISE, epilogue="residual", sizes=(8, 8)),
    "residual_channels_first": dataclasses.replace(
        DEPTHWISE, epilogue="residual", data_layout="NCHW", sizes=(8, 16)
    ),
    "two_outputs_bfloat16": dataclasses.replace(
        DEPTHWISE, epilogue="two_outputs", dtype="bfloat16"
    ),
    "layout_changes": dataclasses.replace(DEPTHWISE, epilogue="channels_moved"),
    "stride_2": dataclasses.replace(DEPTHWISE, strides=(2, 2), sizes=(14, 14)),
    "odd_channels": dataclasses.replace(DEPTHWISE, channels=13, filters=13, groups=13),
    "multiplier": dataclasses.replace(DEPTHWISE, filters=72),
    "multiplier_channels_first": dataclasses.replace(
        DEPTHWISE, filters=48, data_layout="NCHW", dtype="float32"
    ),
    "far_taps": dataclasses.replace(
        DEPTHWISE, sizes=(20, 20), dilation=(6, 6), padding=(6,) * 4, epilogue="silu"
    ),
    "far_taps_channels_first": dataclasses.replace(
        DEPTHWISE, sizes=(20, 24), dilation=(6, 9), padding=(6, 9) * 2, data_layout="NCHW"
    ),
    "dilated_strided": dataclasses.replace(
        DEPTHWISE, sizes=(21, 18), dilation=(3, 2), strides=(2, 3), padding=(3, 2) * 2
    ),
    "large_filters": dataclasses.replace(
        DEPTHWISE,
        sizes=(12, 14),
        kernel=(11, 11),
        padding=(5,) * 4,
        channels=8,
        filters=8,
        groups=8,
    ),
    "more_padding_than_taps": dataclasses.replace(DEPTHWISE, padding=(7, 6, 9, 8)),
    "one_dimension": Conv(
        (70,), (9,), 32, 32, 2, 32, padding=(4, 4), data_layout="NWC", dtype="float16"
    ),
    "long_filter": Conv((90,), (70,), 8, 8, 2, 8, padding=(30, 39), dtype="float32"),
    "three_dimensions": Conv(
        (5, 6, 7), (3, 3, 3), 16, 16, 2, 16, padding=(1,) * 6, data_layout="NDHWC", dtype="float16"
    ),
    "grouped": plain(channels=16, filters=32, groups=4, data_layout="NHWC", dtype="float16"),
    "grouped_channels_first": plain(channels=12, filters=12, groups=4, strides=(2, 1)),
    "one_row_of_several": plain(
        sizes=(4, 22), kernel=(1, 1), padding=(0,) * 4, channels=3, filters=4, strides=(4, 1)
    ),
    "few_channels": plain(channels=3, data_layout="NHWC", strides=(2, 2), kernel=(7, 7)),
    "function_of_the_data": dataclasses.replace(DEPTHWISE, prologue=True),
    "exact": dataclasses.replace(DEPTHWISE, epilogue="residual", exact=True),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_the_first_configuration_is_close_to_float64(name):
    conv = CASES[name]
    problem = read_convolution(conv.func(), conv.exact)
    (_, config), *_ = depthwise_ranked(problem, H200, FAST)
    check(conv, emit_depthwise(problem, H200, config))


# Taps of a window three rows apart and strides of two: a walk goes down the rows of one phase.
DILATED_IN_PHASES = {
    "channels_last": Conv(
        *((9, 9), (3, 3), 8, 1, 2, 1, (2, 2), (4, 1, 3, 1), (3, 1)),
        data_layout="NHWC",
        weight_layout="OHWI",
    ),
    "three_dimensions_moved": Conv(
        *((3, 5, 5), (1, 1, 2), 1, 8, 1, 1, (9, 1, 2), (0, 2, 2, 2, 1, 5), (1, 3, 3)),
        data_layout="NDHWC",
        weight_layout="ODHWI",
        epilogue="channels_moved",
    ),
}


# Always: the first configurations, random convolutions, and those of networks.
@pytest.mark.nightly
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", DILATED_IN_PHASES)
def test_every_configuration_of_rows_in_phases_compiles(name):
    conv = DILATED_IN_PHASES[name]
    problem = read_convolution(conv.func())
    configs = [config for _, config in depthwise_ranked(problem, H200, FAST)]
    assert any(config.rolls for config in configs)
    for number, config in enumerate(configs):
        kernel = emit_depthwise(problem, H200, config)
        if number % 8 == 0:
            check(conv, kernel)
        else:
            cuda_source(kernel)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("taps", [5, 7])
@pytest.mark.parametrize("rows", [1, 3, 6, 9, 14])
def test_rows_at_both_ends_of_a_walk_go_to_some_sums_only(taps, rows):
    """Walks that are shorter than a filter, that end with the data, that have all of it."""
    conv = plain(
        sizes=(14, 5),
        kernel=(taps, 3),
        padding=(taps // 2, 1) * 2,
        channels=4,
        filters=4,
        groups=4,
        data_layout="NHWC",
    )
    check(conv, kernel_of(conv, DepthwiseConfig(2, 2, 5, rows, 2, 3, True, True)))


def test_weights_in_shared_memory_wait_for_all_warps():
    conv = CASES["channels_last"]
    kernel = kernel_of(conv, DepthwiseConfig(2, 2, 4, 3, 12, 8, True, True))
    (without,) = without_each_barrier(kernel)
    inputs = conv.arrays()
    (expected,) = conv.expected(inputs)
    for seed in range(4):
        got, wrong = (poisoned(expected.shape, conv.dtype) for _ in range(2))
        run_cuda_on_cpu(kernel, [*inputs, got], seed=seed)
        run_cuda_on_cpu(without, [*inputs, wrong], seed=seed)
        assert np.abs(got - expected).max() <= TOLERANCE["float16"] * np.abs(expected).max()
        assert np.isnan(wrong).any()


def test_exact_rounding_keeps_the_halves_between_operators():
    exact, fast = CASES["exact"], dataclasses.replace(CASES["exact"], exact=False)
    inputs = exact.arrays()
    (expected,) = exact.expected(inputs)
    errors = []
    for conv in (fast, exact):
        problem = read_convolution(conv.func(), conv.exact)
        output = poisoned(expected.shape, conv.dtype)
        kernel = emit_depthwise(problem, H200, depthwise_ranked(problem, H200)[0][1])
        run_cuda_on_cpu(kernel, [*inputs, output])
        errors.append(np.abs(output.astype("float64") - expected).mean())
    assert errors[0] < errors[1] < 4 * errors[0]


# ---- what is chosen


def network(size: int, channels: int, taps: int, stride: int, layout: str = "NHWC") -> Conv:
    """A layer of a network at batch 32."""
    return Conv(
        (size, size),
        (taps, taps),
        channels,
        channels,
        32,
        channels,
        (stride, stride),
        (taps // 2,) * 4,
        data_layout=layout,
        dtype="float16",
        epilogue="scale_shift",
        constant=False,
    )


LAYERS = [(112, 64, 3, 1), (56, 144, 5, 2), (28, 240, 5, 1), (56, 96, 7, 1), (7, 768, 7, 1)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_kernels_of_networks_do_not_spill(layout):
    kernels = {}
    for size, channels, taps, stride in LAYERS:
        problem = read_convolution(network(size, channels, taps, stride, layout).func())
        for n, (_, config) in enumerate(depthwise_ranked(problem, H200)[:2]):
            kernels[f"layer_{size}_{taps}_{n}"] = emit_depthwise(problem, H200, config)
    found = compile_cubins(kernels)
    assert len(found) == len(kernels)
    assert {r.kernel: r.spill_bytes for r in found if r.spill_bytes} == {}


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_predictions_are_not_below_the_time_of_the_bytes(layer):
    size, channels, _, stride = layer
    problem = read_convolution(network(*layer).func())
    moved = 2 * 32 * channels * (size**2 + (size // stride) ** 2)
    seconds = [s for s, _ in depthwise_ranked(problem, H200)]
    assert seconds == sorted(seconds)
    assert seconds[0] > moved / H200.hbm_bytes_per_s


def test_stores_that_change_the_layout_are_of_several_results_each():
    found = {}
    for layout, epilogue in [("NHWC", "channels_moved"), ("NHWC", "relu"), ("NCHW", "relu")]:
        conv = dataclasses.replace(network(56, 128, 3, 1, layout), epilogue=epilogue)
        problem = read_convolution(conv.func())
        assert direct_problem(problem).numbers.is_turned == (epilogue == "channels_moved")
        found[layout, epilogue] = depthwise_ranked(problem, H200)[0]
    seconds, config = found["NHWC", "channels_moved"]
    assert config.columns % 8 == 0
    assert seconds > 2 * found["NHWC", "relu"][0]
    assert found["NCHW", "relu"][0] < 1.5 * found["NHWC", "relu"][0]


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_tensors_may_have_more_elements_than_32_bits_count(layout):
    """Of 2**32 elements; their number was once taken in 32 bits, as 0."""
    conv = dataclasses.replace(network(1024, 64, 3, 1, layout), batch=64)
    problem = read_convolution(conv.func())
    kernel = emit_depthwise(problem, H200, depthwise_ranked(problem, H200)[0][1])
    assert "(int64_t)" in cuda_source(kernel)


def test_predicted_times_are_near_those_of_a_sweep_and_choices_near_the_best():
    kernels = load_direct()
    layers = with_choice(kernels)
    assert len(layers) == 14
    found = accuracy(layers, predicted_us=direct_us).values()
    assert statistics.median(error for _, every, _ in found for error in every) <= 0.08
    regrets = [regret for regret, _, _ in found]
    assert statistics.median(regrets) <= 1.03
    assert max(regrets) <= 1.15
    others = {work: kernels[work] for work in kernels.keys() - layers.keys()}
    found = accuracy(others, predicted_us=direct_us).values()
    assert statistics.median(error for _, every, _ in found for error in every) <= 0.18


def test_what_the_planner_takes_is_near_the_fastest_kernel():
    errors = []
    for work, times in with_choice(load_direct()).items():
        numbers = work.numbers
        results = math.prod(w.size for w in numbers.windows) * numbers.groups * numbers.filters
        terms = numbers.channels * math.prod(w.taps for w in numbers.windows)
        body = sums_seconds(results, terms, H100)
        seconds = START_SECONDS + max(body, work.moved / H100.hbm_bytes_per_s)
        errors.append(abs(seconds * 1e6 / min(times.values()) - 1))
    assert statistics.median(errors) <= 0.1
    assert max(errors) <= 0.25


def test_predictions_need_numbers_only():
    problem = read_convolution(network(56, 128, 3, 1).func())
    numbers = direct_problem(problem).numbers
    few, many = (ranked(numbers, H200, 1e8, operations)[0][0] for operations in (2, 200))
    assert few < many


def test_the_writer_of_convolutions_takes_it_for_depthwise_ones():
    problem = CUDA_WRITER.read(network(56, 128, 3, 1).func(), False)
    assert isinstance(CUDA_WRITER.ranked(problem, H200, FAST)[0][1], DepthwiseConfig)


# ---- refusals


def refused(conv: Conv, config: DepthwiseConfig | None = None) -> str:
    problem = read_convolution(conv.func(), conv.exact)
    write = depthwise_ranked if config is None else emit_depthwise
    with pytest.raises(Unsupported) as error:
        write(problem, H200, config)
    return str(error.value)


def test_many_channels_are_left_to_matrix_products():
    assert "64 channels are matrix products" in refused(plain(channels=64))


def test_transposed_strides_are_refused():
    conv = Conv((9,), (3,), 8, 8, groups=8, strides=(2,), transposed=True)
    assert "transposed convolution with a stride" in refused(conv)


def test_integers_are_refused():
    assert "int32" in refused(plain(dtype="int32"))


def test_weights_that_no_block_can_hold_are_refused():
    conv = Conv((70_000,), (65_000,), 2, 2, groups=2)
    assert "in shared memory" in refused(conv)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"channels": 16, "filters": 16}, "16 channels and 16 filters a thread"),
        ({"lanes": 64, "tasks": 32}, "blocks of 2048 threads"),
    ],
    ids=["channels", "threads"],
)
def test_a_configuration_that_does_not_suit_is_refused(change, reason):
    config = dataclasses.replace(DepthwiseConfig(2, 2, 4, 3, 4, 2, True, False), **change)
    assert reason in refused(DEPTHWISE, config)
