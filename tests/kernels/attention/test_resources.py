"""What a block of an attention takes: that of the form that will be written."""

import pytest

from tests.support.attention_graphs import Graph, softmaxed
from tests.support.graphs import module, plan_of
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.kernels.attention.decode.kernel import DecodeConfig
from tvm_fusion.kernels.attention.hopper.config import AttentionConfig
from tvm_fusion.kernels.attention.kernel_class import AttentionClass
from tvm_fusion.kernels.attention.mma.kernel import AttentionMmaConfig
from tvm_fusion.kernels.base import Fit
from tvm_fusion.plan.group_view import GroupView

from ...support.attention_graphs import one_group

KIND = AttentionClass()
POLICY = load_policy(None)


def attention(queries, keys):
    """Attention of float16 operands of 64 terms."""
    shapes = [((1, 16, n, 64), "float16") for n in (queries, keys, keys)]
    return module(lambda bb, q, k, v: softmaxed(Graph(bb), Graph(bb).scores(q, k), v), *shapes)


def asked(mod, device):
    """The group as the planner has it, its resources, and the configuration ranked first."""
    hw = load_profile(device)
    graph = plan_of(mod, device).graph
    ops = tuple(range(len(graph.ops)))
    outputs = tuple(t.id for t in graph.tensors if t.is_output)
    group = GroupView(graph, ops, outputs)
    fit = KIND.accepts(group, hw, POLICY)
    assert isinstance(fit, Fit)
    return KIND.resources(group, fit, hw), KIND.ranked(one_group(mod).func, hw, POLICY)[0][1]


@pytest.mark.parametrize(
    ("queries", "keys", "device", "form"),
    [
        (2048, 2048, "nvidia_h200", AttentionConfig),
        (1, 4096, "nvidia_h200", DecodeConfig),
        (2048, 2048, "nvidia_a100", AttentionMmaConfig),
        (1, 4096, "nvidia_a100", DecodeConfig),
    ],
)
def test_resources_are_those_of_the_form_that_is_written(queries, keys, device, form):
    hw = load_profile(device)
    needs, first = asked(attention(queries, keys), device)
    assert isinstance(first, form)
    assert needs.threads == first.threads
    assert 0 < needs.smem_bytes <= hw.smem_per_block_bytes
    assert needs.registers_per_thread <= hw.max_registers_per_thread
    assert needs.registers_per_thread * needs.threads <= hw.registers_per_sm


def test_nobody_has_to_have_asked_for_the_fit_of_this_group_before():
    hw = load_profile("nvidia_h200")
    graph = plan_of(attention(1, 4096), "nvidia_h200").graph
    outputs = tuple(t.id for t in graph.tensors if t.is_output)
    ops = tuple(range(len(graph.ops)))
    fit = KIND.accepts(GroupView(graph, ops, outputs), hw, POLICY)
    fresh = GroupView(graph, ops, outputs)
    assert KIND.resources(fresh, fit, hw) == asked(attention(1, 4096), "nvidia_h200")[0]
