"""Convolutions whose results are summed over blocks of positions by the same kernel."""

import random
from dataclasses import replace

import numpy as np
import pytest

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.convolution.boxes import best_run, box_shape
from tvm_fusion.kernels.convolution.forms import CPU_WRITER, CUDA_WRITER
from tvm_fusion.kernels.convolution.geometry import read_convolution
from tvm_fusion.kernels.convolution.hopper import RimConfig, StreamConfig, read_windows
from tvm_fusion.kernels.gemm.hopper.config import HopperConfig

from ...support.column_sums import ReducedConv
from ...support.conv_suites import last
from ...support.hopper_on_cpu import run_hopper_on_cpu
from ...support.kernel_cases import outputs_of
from .test_hopper import drawn

H200 = load_profile("nvidia_h200")
TINY_H200 = replace(H200, num_sms=2)
POLICY = load_policy(None)

CASES = [
    ReducedConv(last((7, 7), (3, 3), 64, 72, batch=3, epilogue="residual"), (1, 2, 8, 1)),
    ReducedConv(last((8, 11), (3, 3), 64, 40, batch=2), (1, 2, 8, 1), order=(0, 3, 1, 2)),
    ReducedConv(last((14, 13), (3, 3), 64, 64, batch=2), (1, 4, 4, 1), stored=False),
    ReducedConv(last((11, 9), (3, 3), 64, 64, batch=2, stride=2), (1, 16, 1, 1)),
    ReducedConv(last((9, 20), (3, 3), 32, 32, batch=1, groups=2), (1, 1, 16, 1)),
    ReducedConv(last((20,), (7,), 96, 24, batch=3), (1, 16, 1), stored=False),
    ReducedConv(last((4, 4), (3, 3), 64, 64, batch=9, epilogue="silu"), (1, 4, 4, 1)),
    ReducedConv(last((2, 2), (3, 3), 64, 64, batch=9), (4, 2, 2, 1)),  # images in a block
    ReducedConv(last((3, 5, 6), (3, 1, 3), 64, 64, batch=2), (1, 1, 2, 8, 1)),
    ReducedConv(last((7, 9), (3, 3), 64, 72, batch=3, prologue=True), (1, 2, 8, 1)),
]


def configs(problem):
    """The first configuration of each form of the kernel and of its epilogue."""
    found = {}
    for _, config in CUDA_WRITER.ranked(problem, TINY_H200, POLICY):
        if isinstance(config, HopperConfig):
            kind = type(config), config.staged, config.deferred, config.split > 1
            found.setdefault(kind, config)
    return list(found.values())


def check(case, func, problem, config):
    """Runs a configuration; each output is poisoned before and close to float64 after."""
    inputs = case.conv.arrays()
    outputs, wanted = outputs_of(func, len(inputs)), case.expected(inputs)
    kernel = CUDA_WRITER.emit(problem, TINY_H200, POLICY, config)
    assert run_hopper_on_cpu(kernel, [*inputs, *outputs]) == 1
    pairs = zip(outputs, wanted, strict=True)
    errors = [np.abs(o.astype("float64") - e).max() / np.abs(e).max() for o, e in pairs]
    assert max(errors) <= 1e-3, config
    rounded = config.deferred or case.conv.prologue  # what is computed in front is stored as halves
    assert max(errors[-2:]) <= (5e-4 if rounded else 2e-6), config


@pytest.mark.one_in(20)
@pytest.mark.parametrize("form", range(3))
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.conv.output_shape}-{c.heights}")
def test_positions_are_summed_in_every_form_of_the_kernel(case, form):
    func = case.func()
    problem = read_convolution(func)
    found = configs(problem)
    check(case, func, problem, found[(form + CASES.index(case)) % len(found)])


def drawn_case(seed):
    """A random convolution, summed over the positions of each image or of all of them."""
    rng = random.Random(seed)
    epilogue = rng.choice(("none", "relu", "scale_shift", "residual"))
    conv = replace(drawn(seed), epilogue=epilogue, dtype="float16")
    rank = len(conv.output_shape) - 1
    reduced = range(rng.randint(0, 1), rank)
    run = best_run(conv.output_shape[:-1], (1, *conv.strides), reduced)
    order = rng.choice((None, (0, rank, *range(1, rank))))
    return ReducedConv(conv, (*run, 1), rng.random() < 0.5, order)


def is_summed(seed):
    """Whether filters of a drawn convolution lie side by side, as those of sums have to."""
    conv = drawn(seed)
    return not conv.transposed and conv.data_layout.endswith("C")


@pytest.mark.one_in(60)
@pytest.mark.parametrize("seed", [s for s in range(100, 150) if is_summed(s)])
def test_random_convolutions_sum_up_their_results(seed):
    case = drawn_case(seed)
    func = case.func()
    problem = read_convolution(func)
    check(case, func, problem, random.Random(seed).choice(configs(problem)))


def test_a_kernel_with_rims_sums_positions_too():
    problem = read_convolution(CASES[0].func())
    found = {type(config) for _, config in CUDA_WRITER.ranked(problem, H200, POLICY)}
    assert RimConfig in found


# Always: random convolutions, and positions in every form.
@pytest.mark.nightly
def test_computed_boxes_sum_positions_too():
    case = next(case for case in CASES if case.conv.prologue)
    func = case.func()
    problem = read_convolution(func)
    config = next(c for c in configs(problem) if isinstance(c, StreamConfig))
    check(case, func, problem, config)


def test_boxes_hold_whole_blocks_side_by_side():
    assert box_shape((32, 7, 7), (1, 1, 1), (0, 0, 0)) == (8, 1, 8)
    assert box_shape((32, 7, 7), (1, 1, 1), (0, 0, 0), run=(1, 2, 8)) == (1, 8, 8)
    assert read_windows(read_convolution(CASES[2].func())).segments[0].windows.shape == (1, 16, 4)
    with pytest.raises(Unsupported, match="no box"):
        box_shape((2, 40), (1, 1), (0, 0), run=(1, 128))


@pytest.mark.parametrize(
    ("sizes", "reduced", "run"),
    [
        ((32, 7, 7), (1, 2), (1, 2, 8)),
        ((32, 28, 28), (1, 2), (1, 4, 4)),
        ((8, 56, 56), (0, 1, 2), (1, 2, 8)),
        ((8, 100), (1,), (1, 16)),
    ],
)
def test_blocks_are_those_that_boxes_waste_the_least_for(sizes, reduced, run):
    assert best_run(sizes, (1,) * len(sizes), reduced) == run


def test_blocks_of_other_sizes_are_refused():
    case = ReducedConv(CASES[0].conv, (1, 4, 8, 1))
    with pytest.raises(Unsupported):
        read_convolution(case.func())


def test_loops_of_a_cpu_take_no_convolution_that_sums_its_results():
    _, convolution = CPU_WRITER.read(CASES[0].func(), False)
    assert convolution is None
