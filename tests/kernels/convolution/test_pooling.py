"""Convolutions whose results are pooled by the same kernel."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

import tvm_fusion
from tvm_fusion.config import load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.convolution.forms import CPU_WRITER, CUDA_WRITER
from tvm_fusion.kernels.convolution.geometry import read_convolution
from tvm_fusion.kernels.convolution.hopper import (
    RimConfig,
    emit_hopper,
    emit_rims,
    read_windows,
)
from tvm_fusion.kernels.gemm.hopper.config import HopperConfig
from tvm_fusion.kernels.gemm.mma.plan import MmaConfig
from tvm_fusion.transform.apply.place_parts import with_pitches

from ...support.conv_suites import last
from ...support.cuda_on_cpu import run_cuda_on_cpu
from ...support.graphs import module
from ...support.hopper_on_cpu import compile_hopper, run_hopper_on_cpu
from ...support.kernel_cases import outputs_of
from ...support.pooling import PooledConv
from .test_column_sums import POLICY, TINY_H200, configs
from .test_hopper import drawn

H200, A100 = load_profile("nvidia_h200"), load_profile("nvidia_a100")

CASES = [
    PooledConv(last((8, 8), (3, 3), 64, 64, batch=2), (2, 2)),
    PooledConv(last((9, 11), (3, 3), 64, 72, batch=3, epilogue="residual"), (2, 2), stored=True),
    PooledConv(last((13, 7), (3, 3), 64, 40, batch=2, epilogue="relu"), (2, 2), mean=True),
    PooledConv(last((10, 9), (3, 3), 64, 24, batch=3), (2, 2), mean=True, behind=True),
    PooledConv(last((9, 9), (3, 3), 64, 64, batch=2), (4, 4), order=(0, 3, 1, 2)),
    PooledConv(last((12, 10), (3, 3), 72, 33, batch=2), (2, 1), mean=True, stored=True),
    PooledConv(last((8, 9), (3, 3), 32, 32, groups=2, batch=2), (1, 2)),
    PooledConv(last((8, 9), (3, 3), 96, 40, batch=2, parts=(64, 32)), (2, 2)),
    PooledConv(last((8, 12), (2, 2), 32, 32, batch=2, stride=2, padding=(0,) * 4), (2, 2)),
    PooledConv(last((12, 7), (3, 3), 64, 72, batch=1), (4, 4)),  # one window a line
    PooledConv(last((21,), (7,), 96, 24, batch=3), (2,)),
    PooledConv(last((21,), (7,), 96, 24, batch=3), (8,), mean=True, stored=True),
    PooledConv(last((5, 6, 7), (3, 1, 3), 64, 64, batch=2), (2, 2, 2), stored=True),
    PooledConv(last((4, 2, 5), (3, 3, 3), 64, 16, batch=2), (1, 2, 2), mean=True),
    PooledConv(last((11, 9), (3, 3), 64, 64, batch=2, stride=2), (2, 2), stored=True),
]


def check(case, func, problem, config):
    """Runs a configuration; each output is poisoned before and close to float64 after."""
    inputs = case.conv.arrays()
    outputs, wanted = outputs_of(func, len(inputs)), case.expected(inputs)
    emit = emit_rims if isinstance(config, RimConfig) else emit_hopper
    assert run_hopper_on_cpu(emit(problem, TINY_H200, config), [*inputs, *outputs]) == 1
    close(outputs, wanted)


def close(outputs, wanted):
    for found, expected in zip(outputs, wanted, strict=True):
        assert np.abs(found.astype("float64") - expected).max() <= 1e-3 * np.abs(expected).max()


@pytest.mark.one_in(45)
@pytest.mark.parametrize("form", range(3))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_pooled_in_every_form_of_the_kernel(case, form):
    func = case.func()
    problem = read_convolution(func)
    found = configs(problem)
    check(case, func, problem, found[(form + CASES.index(case)) % len(found)])


def drawn_case(seed):
    """A random convolution that is pooled, some of the results stored, too."""
    rng = random.Random(seed)
    epilogue = rng.choice(("none", "relu", "scale_shift", "residual"))
    conv = replace(drawn(seed), epilogue=epilogue, dtype="float16")
    last_dim = conv.rank + 1
    window = tuple(rng.choice((1, 2, 4)[: n.bit_length()]) for n in conv.output_sizes)
    order = rng.choice((None, (0, last_dim, *range(1, last_dim))))
    return PooledConv(conv, window, *(rng.random() < 0.5 for _ in range(2)), order)


def is_pooled(seed):
    case = drawn_case(seed)
    positions = np.prod(case.window)
    return not case.conv.transposed and 1 < positions <= 16


@pytest.mark.one_in(32)
@pytest.mark.parametrize("seed", [s for s in range(200, 240) if is_pooled(s)])
def test_random_convolutions_pool_their_results_or_say_why_not(seed):
    case = drawn_case(seed)
    func, inputs = case.func(), case.conv.arrays()
    problem = read_convolution(func)
    for hw in (TINY_H200, A100):
        try:
            ranked = CUDA_WRITER.ranked(problem, hw, POLICY)
        except Unsupported:
            assert hw is A100
            assert case.stored
            assert not case.is_whole
            continue
        _, config = random.Random(seed).choice(ranked[:8])
        outputs = outputs_of(func, len(inputs))
        run = run_hopper_on_cpu if isinstance(config, HopperConfig) else run_cuda_on_cpu
        run(CUDA_WRITER.emit(problem, hw, POLICY, config), [*inputs, *outputs])
        close(outputs, case.expected(inputs))


@pytest.mark.one_in(16)
@pytest.mark.parametrize("case", [c for c in CASES if c.is_whole or not c.stored], ids=str)
@pytest.mark.parametrize("profile", [A100, TINY_H200], ids=lambda hw: hw.name)
def test_results_are_pooled_by_mma(case, profile):
    func = case.func()
    problem = read_convolution(func)
    ranked = CUDA_WRITER.ranked(problem, profile, POLICY)
    config = next(c for _, c in ranked if isinstance(c, MmaConfig))
    inputs = case.conv.arrays()
    outputs, wanted = outputs_of(func, len(inputs)), case.expected(inputs)
    kernel = CUDA_WRITER.emit(problem, profile, POLICY, config)
    assert run_cuda_on_cpu(kernel, [*inputs, *outputs]) == 1
    close(outputs, wanted)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("config_kind", [RimConfig, HopperConfig, MmaConfig])
def test_results_that_are_parts_of_a_concatenation_are_pooled(config_kind):
    """The skip of a U-Net is written where the whole has it; what is pooled is a part, too."""
    case = PooledConv(last((8, 6), (3, 3), 64, 64, batch=2), (2, 2), stored=True)
    func = case.func()
    shapes = [tuple(int(n) for n in param.ty.shape) for param in func.params]
    wholes = [*shapes[:-2], (2, 8, 6, 192), (2, 5, 3, 68)]
    problem = read_convolution(with_pitches(func, wholes))
    ranked = CUDA_WRITER.ranked(problem, TINY_H200, POLICY)
    kernel = CUDA_WRITER.emit(
        problem, TINY_H200, POLICY, next(c for _, c in ranked if type(c) is config_kind)
    )
    inputs = case.conv.arrays()
    arrays = [np.full(whole, np.nan, "float16") for whole in wholes[-2:]]
    run = run_cuda_on_cpu if config_kind is MmaConfig else run_hopper_on_cpu
    assert run(kernel, [*inputs, *arrays]) == 1
    parts = arrays[0][..., :64], arrays[1][:, :4, :, :64]
    close(parts, case.expected(inputs))
    assert [int(np.isfinite(array).sum()) for array in arrays] == [part.size for part in parts]


def test_a_mean_keeps_every_rounding_where_that_is_asked_for():
    case = CASES[2]
    func = case.func()
    (output,) = read_convolution(func, exact=True).segment.outputs
    assert str(output.partial.finish.value).count("float16") == 3  # the sum, 4, the mean
    problem = read_convolution(func, exact=True)
    check(case, func, problem, configs(problem)[0])


def test_boxes_hold_windows_within_the_rows_of_a_warp():
    def shape(sizes, window):
        conv = last(sizes, (3,) * len(sizes), 64, 64, batch=2)
        problem = read_convolution(PooledConv(conv, window).func())
        return read_windows(problem).segments[0].windows.shape

    assert shape((16, 16), (2, 2)) == (1, 8, 8)
    assert shape((64, 2), (8, 1)) == (1, 32, 2)
    assert shape((64, 8), (8, 1)) == (1, 32, 2)


# ---- plans


def plan_of(case, device="nvidia_h200", **options):
    """The groups of a convolution with its pooling, and the report."""
    report = tvm_fusion.explain(module(case.emit, *case.inputs), device, **options)
    found = report.plan["groups"]
    return [g["kernel_class"] for g in found if g["kernel_class"] not in ("view", "opaque")], report


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "case",
    [
        PooledConv(last((56, 56), (3, 3), 64, 64, batch=4, epilogue="residual"), (2, 2)),
        PooledConv(last((56, 56), (3, 3), 128, 128, batch=4), (2, 2), stored=True),
        PooledConv(last((15, 15), (3, 3), 64, 64, batch=4), (2, 2), mean=True, behind=True),
        PooledConv(last((31,), (3,), 64, 64, batch=4), (4,), order=(0, 2, 1)),
        PooledConv(last((8, 8, 8), (3, 3, 3), 64, 64, batch=2), (2, 2, 2)),
    ],
    ids=str,
)
def test_pooling_behind_a_convolution_is_no_kernel(case):
    kernels, _ = plan_of(case)
    assert kernels == ["convolution"]


def test_pooling_that_leaves_boxes_half_empty_has_a_kernel_of_its_own():
    """Windows of 16 x 1 of 20 x 4 positions: of a box's 32 or 64 lines 20 are there."""
    case = PooledConv(last((20, 4), (3, 3), 512, 512, batch=64), (16, 1))
    kernels, _ = plan_of(case)
    assert len(kernels) == 2
    assert plan_of(replace(case, window=(4, 1)))[0] == ["convolution"]


CONV = last((56, 56), (3, 3), 64, 64, batch=4)


@dataclass(frozen=True)
class Behind(PooledConv):
    """A convolution with something else behind it."""

    emit_behind: Callable | None = None

    def emit(self, bb, *inputs):
        return self.emit_behind(bb, bb.emit(self.conv.emit(bb, *inputs)))


def _pool(size, stride, **more):
    options = {"pool_size": size, "strides": stride, "layout": "NHWC", **more}
    return lambda bb, h: op.nn.max_pool2d(h, **options)


def _two_reads(bb, h):
    """What is pooled goes into another operator with a tensor."""
    y = bb.emit(_pool(2, 2)(bb, h))
    return op.add(y, bb.emit(op.strided_slice(h, [1, 2], [0, 0], [28, 28])))


def _two_windows(bb, h):
    return relax.Tuple([bb.emit(_pool(size, size)(bb, h)) for size in (2, 4)])


@pytest.mark.parametrize(
    ("behind", "why"),
    [
        (_pool(3, 2, padding=1), "3 x 3 that lie over each other"),
        (_pool(3, 3), "3 x 3 positions, and a warp holds those of 2, 4, 8, 16"),
        (_pool(2, 3), "2 x 2 that lie apart"),
        (_pool(8, 8), "8 x 8 positions"),
        (_pool(2, 2, padding=1), "some of which are padding"),
        (_two_reads, "with other tensors"),
        (_two_windows, "no kernel of the convolution reduces its results"),
    ],
)
def test_other_windows_are_refused(behind, why):
    kernels, report = plan_of(Behind(CONV, (), emit_behind=behind))
    assert len(kernels) >= 2
    assert why in report.full()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("device", ["nvidia_a100", "nvidia_rtx4090"])
def test_other_devices_pool_whole_windows_and_store_what_they_hold(device):
    case = PooledConv(CONV, (2, 2))
    odd = replace(case, conv=last((15, 15), (3, 3), 64, 64, batch=4))
    assert plan_of(case, device)[0] == plan_of(odd, device)[0] == ["convolution"]
    assert plan_of(replace(case, stored=True), device)[0] == ["convolution"]
    kernels, report = plan_of(replace(odd, stored=True), device)
    assert len(kernels) == 2
    assert "no kernel of the convolution reduces its results" in report.full()


def test_a_cpu_pools_by_loops_of_their_own():
    kernels, _ = plan_of(PooledConv(CONV, (2, 2)), "llvm")
    assert len(kernels) == 2


def test_loops_of_a_cpu_take_no_convolution_that_pools_its_results():
    _, convolution = CPU_WRITER.read(CASES[0].func(), False)
    assert convolution is None


@pytest.mark.nightly
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize(("size", "channels"), [(112, 64), (56, 256)])
def test_kernels_that_pool_compile_without_spills(size, channels, stored):
    conv = last((size, size), (3, 3), channels, channels)
    problem = read_convolution(PooledConv(conv, (2, 2), stored=stored).func())
    kept = (c for c in configs(problem) if not c.deferred)  # a kept tile of 128 x 256 spills alone
    for config in itertools.islice(kept, 2):
        emit = emit_rims if isinstance(config, RimConfig) else emit_hopper
        compiled = compile_hopper(emit(problem, H200, config))
        assert (compiled.spill_bytes, compiled.remarks) == (0, ())
