"""Functions of the data in front of a convolution, computed between shared memory and wgmma."""

import numpy as np
import pytest
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.convolution.geometry import read_convolution
from tvm_fusion.kernels.convolution.hopper import emit_hopper, hopper_ranked, rims_ranked

from ...support.graphs import module, plan_of
from ...support.hopper_on_cpu import compile_hopper, run_hopper_on_cpu
from ...support.kernel_cases import fuse, outputs_of

H200, POLICY = load_profile("nvidia_h200"), load_policy(None)
HALF, FLOAT = "float16", "float32"


def emit(stride=1, dilation=1):
    """relu(x s + b) and a 3 x 3 convolution, channels last: padding is 0 where relu(b) is not."""

    def graph(bb, x, s, b, w):
        x = bb.emit(op.multiply(bb.emit(op.astype(x, FLOAT)), s))
        y = bb.emit(op.astype(bb.emit(op.add(x, b)), HALF))
        options = {"strides": stride, "dilation": dilation, "padding": dilation}
        y = bb.emit(op.nn.relu(y))
        return op.nn.conv2d(y, w, data_layout="NHWC", kernel_layout="OHWI", **options)

    return graph


def shapes(images, height, width, channels, filters):
    vector = ((channels,), FLOAT)
    return (
        ((images, height, width, channels), HALF),
        vector,
        vector,
        ((filters, 3, 3, channels), HALF),
    )


def expected(x, s, b, w, stride, dilation):
    x, s, b, w = (a.astype("float64") for a in (x, s, b, w))
    data = np.pad(np.maximum(x * s + b, 0), ((0, 0), (dilation,) * 2, (dilation,) * 2, (0, 0)))
    rows, columns = x.shape[1], x.shape[2]
    taps = [
        data[:, r * dilation :, c * dilation :][:, :rows:stride, :columns:stride] @ w[:, r, c].T
        for r in range(3)
        for c in range(3)
    ]
    return sum(taps)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("sizes", "stride", "dilation"),
    [
        ((1, 9, 7, 64, 64), 1, 1),
        ((1, 9, 9, 40, 40), 2, 1),  # channels that end within a step
        ((1, 6, 8, 128, 32), 1, 2),  # split terms
    ],
)
def test_padding_is_zero_behind_the_function(sizes, stride, dilation):
    func = fuse(emit(stride, dilation), *shapes(*sizes))
    problem, rng = read_convolution(func), np.random.default_rng(0)
    inputs = [rng.standard_normal(shape).astype(dtype) for shape, dtype in shapes(*sizes)]
    inputs[3] *= np.float16(0.05)
    wanted = expected(*inputs, stride, dilation)
    ranked = [config for _, config in hopper_ranked(problem, H200, POLICY)]
    config = next(c for c in ranked if (c.split > 1) == (dilation > 1))
    (output,) = outputs_of(func, len(inputs))
    assert run_hopper_on_cpu(emit_hopper(problem, H200, config), [*inputs, output]) == 1
    assert np.abs(output - wanted).max() <= 2e-3 * np.abs(wanted).max()


def test_tiles_do_not_spill_and_rims_are_refused():
    problem = read_convolution(fuse(emit(), *shapes(4, 56, 56, 128, 128)))
    config = hopper_ranked(problem, H200, POLICY)[0][1]
    compiled = compile_hopper(emit_hopper(problem, H200, config))
    assert (compiled.spill_bytes, compiled.remarks) == (0, ())
    with pytest.raises(Unsupported, match="computed"):
        rims_ranked(problem, H200, POLICY)


def test_boxes_that_few_tiles_share_take_the_function_in_and_boxes_with_waste_leave_it_apart():
    def classes(*sizes):
        plan = plan_of(module(emit(), *shapes(*sizes)), "nvidia_h200").plan
        return [group.kernel_class for group in plan.groups]

    assert classes(1, 28, 28, 128, 128) == ["convolution"]
    assert classes(32, 56, 56, 64, 64) == ["convolution"]
    assert classes(32, 14, 14, 512, 512) == ["pointwise", "convolution"]
