"""Concatenations along channels that a convolution reads part by part: on the emulator in all forms
that take them, and on a CPU, against float64.
"""

from dataclasses import replace

import numpy as np
import pytest

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.convolution.forms import CUDA_WRITER
from tvm_fusion.kernels.convolution.geometry import Convolution, read_convolution
from tvm_fusion.kernels.convolution.hopper import HopperConfig, RimConfig
from tvm_fusion.kernels.convolution.kernel_class import ConvolutionClass
from tvm_fusion.kernels.cpu.contraction.panels import wanted_panels
from tvm_fusion.kernels.gemm.mma.plan import MmaConfig

from ...support.conv_suites import last
from ...support.convolutions import Conv, joined_convolution, plain
from ...support.cuda_on_cpu import run_cuda_on_cpu
from ...support.helpers_tir import call, compile_cpu, poisoned
from ...support.hopper_on_cpu import run_hopper_on_cpu
from ...support.kernel_cases import outputs_of

H200, A100, CPU = (load_profile(name) for name in ("nvidia_h200", "nvidia_a100", "llvm"))
POLICY = load_policy(None)
MMA_TILE = MmaConfig(32, 64, 16, 32, 64, 3)
MMA, SIMT = CUDA_WRITER.form_of(MMA_TILE), CUDA_WRITER.forms[-1]
HOPPER, RIMS = (
    next(form for form in CUDA_WRITER.forms if form.config is config)
    for config in (HopperConfig, RimConfig)
)
TOLERANCE = {"float16": 3e-3, "bfloat16": 2e-2, "float32": 1e-5}


def read(conv: Conv) -> Convolution:
    found = read_convolution(conv.func(), conv.exact)
    assert [int(s.channels.extent) for s in found.sources] == list(conv.parts)
    return found


def close(conv: Conv, outputs, inputs) -> None:
    for got, expected in zip(outputs, conv.expected(inputs), strict=True):
        error = np.abs(got.astype("float64") - expected).max()
        assert error <= TOLERANCE[conv.dtype] * max(1.0, np.abs(expected).max())


def on_emulator(conv: Conv, kernel, run=run_cuda_on_cpu) -> None:
    inputs = conv.arrays()
    outputs = outputs_of(conv.func(), len(inputs))
    assert run(kernel, [*inputs, *outputs]) == 1
    close(conv, outputs, inputs)


def rarely(cases, in_ci):
    """Cases of which only some run in CI."""
    return [c if c in in_ci else pytest.param(c, marks=pytest.mark.nightly) for c in cases]


@pytest.mark.parametrize("seed", rarely(range(48), in_ci=(1, 8)))
def test_a_random_concatenation_on_tensor_cores_and_cuda_cores(seed):
    dtype = ("float16", "bfloat16", "float32")[seed % 3]
    conv = replace(joined_convolution(seed), dtype=dtype)
    found = read(conv)
    if dtype == "float32":
        on_emulator(conv, SIMT.emit(found, H200, SIMT.rank(found, H200, POLICY)[0][1]))
    else:
        on_emulator(conv, MMA.emit(found, A100, MMA_TILE))


@pytest.mark.one_in(24)
@pytest.mark.parametrize("seed", range(48))
def test_a_random_concatenation_on_a_cpu(seed):
    conv = joined_convolution(seed)
    read(conv)
    policy = load_policy({"rounding": "exact" if conv.exact else "fast"})
    kernel = ConvolutionClass().write(conv.func(), CPU, policy)
    inputs = conv.arrays()
    given = list(inputs)
    for i, how in wanted_panels(kernel).items():
        given[i] = how.of(given[i])
    outputs = [poisoned(e.shape, conv.dtype) for e in conv.expected(inputs)]
    close(conv, call(compile_cpu(kernel), given, outputs), inputs)


UP = dict(repeats=(2, 2))
KINDS = {
    "two parts": last((5, 7), (3, 3), 128, 64, batch=2, parts=(64, 64), epilogue="residual"),
    "split terms": last((5, 7), (3, 3), 320, 64, batch=1, parts=(128, 192)),
    "one enlarged": last((3, 5), (3, 3), 104, 24, batch=1, parts=(64, 40), **UP),
    "one enlarged and padded": last(
        (3, 5), (3, 3), 128, 24, batch=1, parts=(64, 64), zeros=(1, 0, 0, 1), **UP
    ),
    "steps": last((7, 9), (3, 3), 128, 24, batch=2, parts=(64, 64), stride=2),
    "one tap": last((5, 7), (1, 1), 128, 24, batch=1, parts=(64, 64)),
    "a line": last((40,), (5,), 136, 24, batch=2, parts=(64, 64, 8), dilation=2),
}


@pytest.mark.parametrize("kind", rarely(KINDS, in_ci=("one enlarged and padded", "one tap")))
def test_parts_of_whole_steps_come_in_by_the_tma(kind):
    conv = KINDS[kind]
    found = read(conv)
    (_, config), *_ = HOPPER.rank(found, H200, POLICY)
    on_emulator(conv, HOPPER.emit(found, H200, config), run_hopper_on_cpu)


def test_all_taps_of_a_step_read_one_part():
    conv = KINDS["two parts"]
    found = read(conv)
    (_, config), *_ = RIMS.rank(found, H200, POLICY)
    on_emulator(conv, RIMS.emit(found, H200, config), run_hopper_on_cpu)


@pytest.mark.parametrize(
    ("parts", "why"),
    [((40, 64), "no multiples of 64 channels"), ((64, 4), "multiples? of 16 bytes")],
)
def test_other_parts_are_no_boxes(parts, why):
    conv = last((5, 7), (3, 3), sum(parts), 24, batch=1, parts=parts)
    with pytest.raises(Unsupported, match=why):
        HOPPER.rank(read(conv), H200, POLICY)
    assert MMA.rank(read(conv), H200, POLICY)


def test_few_channels_of_parts_are_no_lines():
    conv = plain(channels=8, parts=(3, 5), dtype="float16", data_layout="NHWC")
    for form in CUDA_WRITER.forms[:4]:
        with pytest.raises(Unsupported):
            form.rank(read(conv), H200, POLICY)
    assert MMA.rank(read(conv), H200, POLICY)
