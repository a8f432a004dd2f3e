"""What the planner is told of convolutions as products, from sizes, beside what forms predict."""

from __future__ import annotations

import dataclasses

import pytest

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.kernels.convolution.blocks import is_convolution
from tvm_fusion.kernels.convolution.forms import CUDA_WRITER
from tvm_fusion.kernels.convolution.geometry import read_convolution
from tvm_fusion.kernels.convolution.launch import sizes_of
from tvm_fusion.kernels.convolution.product_time import cuda_core_seconds, mma_seconds
from tvm_fusion.kernels.convolution.sizes import Sizes
from tvm_fusion.kernels.gemm.mma.plan import MmaConfig
from tvm_fusion.kernels.gemm.simt.config import SimtConfig
from tvm_fusion.plan.group_view import GroupView

from ...support.convolutions import Conv, plain
from ...support.graphs import module, plan_of

A100, H200 = load_profile("nvidia_a100"), load_profile("nvidia_h200")
POLICY = load_policy(None)
LAST = dict(data_layout="NHWC", weight_layout="OHWI", batch=32, dtype="float16")
UP = Conv((28, 28), (4, 4), 128, 64, 32, strides=(2, 2), padding=(1,) * 4, transposed=True)
CASES = {
    "middle": plain(sizes=(56, 56), channels=256, filters=256, **LAST),
    "late": plain(sizes=(7, 7), channels=512, filters=512, **LAST),
    "stem": Conv((224, 224), (7, 7), 3, 64, strides=(2, 2), padding=(3,) * 4, **LAST),
    "channels first": plain(sizes=(28, 28), channels=128, filters=128, batch=32, dtype="float16"),
    "groups": plain(sizes=(28, 28), channels=512, filters=512, groups=8, **LAST),
    "one tap of groups": plain(
        **dict(sizes=(28, 28), kernel=(1, 1), padding=(0,) * 4),
        **dict(channels=512, filters=256, groups=2, **LAST),
    ),
    "up": UP,
}


def sizes(conv: Conv) -> Sizes:
    """As the planner has them."""
    inputs = [(conv.data_shape, conv.dtype), (conv.weight_shape, conv.dtype)]
    graph = plan_of(module(conv.emit, *inputs), "nvidia_a100").graph
    outputs = tuple(t.id for t in graph.tensors if t.is_output)
    group = GroupView(graph, tuple(range(len(graph.ops))), outputs)
    return sizes_of(group, next(b for b in group.blocks if is_convolution(b)))


def ranked(conv: Conv, hw, config: type) -> float:
    """Seconds of the first configuration of a form, without the launch's gap."""
    form = next(f for f in CUDA_WRITER.forms if f.config is config)
    return form.rank(read_convolution(conv.func()), hw, POLICY)[0][0] - hw.kernel_gap_us * 1e-6


@pytest.mark.one_in(4)
@pytest.mark.parametrize("hw", [A100, H200], ids=["A100", "H200"])
@pytest.mark.parametrize("name", CASES)
def test_the_planner_predicts_what_the_forms_do(name, hw):
    conv = CASES[name]
    if conv.dtype == "float16":
        seconds = mma_seconds(sizes(conv), hw, POLICY)
        assert 0.6 <= seconds / ranked(conv, hw, MmaConfig) <= 1.5
    assert 0.5 <= cuda_core_seconds(sizes(conv), hw) / ranked(conv, hw, SimtConfig) <= 1.5


def test_float32_takes_three_products_unless_it_may_be_rounded():
    large = sizes(dataclasses.replace(UP, sizes=(64, 64), channels=256, filters=256))
    allowed = dataclasses.replace(POLICY, allow_tf32=True)
    split, rounded = (mma_seconds(large, H200, policy) for policy in (POLICY, allowed))
    assert 1.5 * rounded < split < 5 * rounded


def test_a_position_of_a_transposed_convolution_meets_a_part_of_the_taps():
    assert sizes(UP).taps == 4
