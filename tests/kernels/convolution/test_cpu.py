"""Convolutions on a CPU against float64."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.kernels.convolution.kernel_class import ConvolutionClass
from tvm_fusion.kernels.cpu.contraction.panels import wanted_panels

from ...support.convolutions import Conv, random_convolution
from ...support.helpers_tir import call, compile_cpu, poisoned

TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def written(conv: Conv):
    policy = load_policy({"rounding": "exact" if conv.exact else "fast"})
    return ConvolutionClass().write(conv.func(), load_profile("llvm"), policy)


def check(conv: Conv) -> None:
    kernel = written(conv)
    arrays = conv.arrays()
    expected = conv.expected(arrays)
    given = list(arrays)
    for i, how in wanted_panels(kernel).items():
        given[i] = how.of(given[i])
    outputs = [poisoned(e.shape, conv.dtype) for e in expected]
    got = call(compile_cpu(kernel), given, outputs)
    for a, b in zip(got, expected, strict=True):
        scale = max(1.0, np.abs(b).max())
        assert np.isfinite(a.astype("float64")).all()
        assert np.abs(a.astype("float64") - b).max() <= TOLERANCE[conv.dtype] * scale


@pytest.mark.parametrize("seed", range(60))
def test_a_random_convolution(seed):
    check(random_convolution(seed))
