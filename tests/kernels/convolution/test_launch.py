"""What the planner is told of convolutions."""

from __future__ import annotations

import dataclasses

import pytest

import tvm_fusion

from ...support.convolutions import Conv
from ...support.graphs import module

UP = Conv(
    (56, 56),
    (4, 4),
    128,
    64,
    8,
    strides=(2, 2),
    padding=(1, 1, 1, 1),
    transposed=True,
    data_layout="NHWC",
    weight_layout="IHWO",
    dtype="float16",
    epilogue="channels_moved",
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("stride", "inside"), [(2, False), (1, True)])
def test_a_change_of_layout_behind_phases_has_a_kernel_of_its_own(stride, inside):
    """One by one, the results of phases would be stored in parts of lines; others go by tiles."""
    conv = dataclasses.replace(UP, strides=(stride, stride))
    shapes = [conv.data_shape, conv.weight_shape, *conv.extra]
    mod = module(conv.emit, *((shape, conv.dtype) for shape in shapes))
    groups = tvm_fusion.explain(mod, "h200").plan["groups"]
    (found,) = [group for group in groups if group["kernel_class"] == "convolution"]
    result = mod["main"].body.blocks[0].bindings[-1].var.name
    assert (result in found["ops"]) == inside
