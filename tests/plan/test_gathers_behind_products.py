"""What a tensor says of which elements of a product are read is a launch of its own."""

import pytest
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.kernels.convolution.kernel_class import ConvolutionClass
from tvm_fusion.kernels.gemm.kernel_class import Gemm
from tvm_fusion.plan.group_view import GroupView
from tvm_fusion.plan.refusal import Refusal, RefusalCode

from ..support.graphs import module, plan_of

DEVICE = "nvidia_h200"
HALF = "float16"


def product(bb, x, w):
    return bb.emit(op.add(bb.emit(op.matmul(x, w)), relax.const(1.0, HALF)))


def convolution(bb, x, w):
    layouts = {"data_layout": "NHWC", "kernel_layout": "OHWI"}
    return bb.emit(op.nn.relu(bb.emit(op.nn.conv2d(x, w, padding=1, **layouts))))


CASES = {
    "product": (Gemm, product, ((128, 64), (64, 96)), 0),
    "convolution": (ConvolutionClass, convolution, ((2, 14, 14, 64), (64, 3, 3, 64)), 1),
}


def graph_of(emit, shapes, axis, gathers):
    def emitted(bb, x, w, places):
        found = emit(bb, x, w)
        return op.nn.relu(bb.emit(op.take(found, places, axis)) if gathers else found)

    extent = shapes[0][axis]
    inputs = [*((shape, HALF) for shape in shapes), ((extent,), "int64")]
    return plan_of(module(emitted, *inputs), DEVICE)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("gathers", [True, False])
def test_a_family_of_products_takes_no_reads_at_places_of_a_tensor(case, gathers):
    family, emit, shapes, axis = case
    found = graph_of(emit, shapes, axis, gathers)
    graph = found.graph
    outputs = tuple(tensor.id for tensor in graph.tensors if tensor.is_output)
    view = GroupView(graph, tuple(range(len(graph.ops))), outputs)
    fit = family().accepts(view, load_profile(DEVICE), load_policy(None))
    assert isinstance(fit, Refusal) == gathers
    if gathers:
        assert fit.code is RefusalCode.SPACE_MISMATCH
        assert "places that a tensor names" in fit.why
