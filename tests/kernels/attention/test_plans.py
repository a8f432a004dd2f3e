"""Where the planner sees attention: one launch for two products and all between, whatever the
spelling, and the reasons where it is not.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.frontends import load
from tvm_fusion.ir.graph import build_graph
from tvm_fusion.kernels.attention.kernel_class import AttentionClass
from tvm_fusion.kernels.attention.roles import attention_cores
from tvm_fusion.plan.group_view import GroupView
from tvm_fusion.plan.refusal import Refusal
from tvm_fusion.plan.search.search import unfused_plan
from tvm_fusion.transform.pipeline import lower

from ...support.attention_cases import CASES
from ...support.frontend_tools import Function
from ...support.graphs import module, plan_of

SIZES = {"B": 2, "H": 8, "M": 512, "N": 512, "D": 64, "E": 64}

# What stays outside: the launches of the plan, and why.
APART = {
    "rotated q and k": 2,  # a rotation of q and k is computed once, in front
    "scaled values": 2,  # so is a factor of each value
    "rows that see no key are 0": 2,  # a reduction of the mask itself
    "safe softmax, added mask": 2,
}
REFUSED = {"boolean mask made additive", "boolean mask times a large number"}


def attentions(planned):
    return [g for g in planned.plan.groups if g.kernel_class == "attention"]


@pytest.mark.one_in(48)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_spelling_is_one_launch(case):
    planned = plan_of(case.with_sizes(**SIZES).module())
    if case.name in REFUSED:  # the mask of halves makes weights of float32
        assert not attentions(planned)
        return
    assert len(attentions(planned)) == 1
    assert planned.launches == APART.get(case.name, 1)


def test_the_whole_of_it_is_offered_to_the_search_and_nothing_else():
    (case,) = (c for c in CASES if c.name == "[B, S, H * D] with head permutes")
    hw = load_profile("h200")
    graph = build_graph(lower(case.module(), hw.to_target(), hw=hw))
    (core,) = attention_cores(graph)
    products = [o for o in core if any(b.is_contraction for b in graph.ops[o].blocks)]
    assert len(products) == 2
    on_paths = graph.descendants[products[0]] & graph.ancestors[products[1]]
    assert {o for o in range(len(graph.ops)) if on_paths >> o & 1} <= set(core)


def chain(softmax):
    def emit(bb, x, w, v):
        scores = bb.emit(op.matmul(x, w))
        if softmax:
            scores = bb.emit(op.nn.softmax(scores))
        return op.matmul(scores, v)

    return module(emit, *[((512, 512), "float16")] * 3)


def test_two_products_alone_are_no_core():
    hw = load_profile("h200")
    for softmax in (False, True):
        low = lower(chain(softmax), hw.to_target(), hw=hw)
        assert len(list(attention_cores(build_graph(low)))) == softmax


def layers(count, also_weights=False):
    """Attention after attention; with `also_weights` the last one's weights are a result."""

    def emit(bb, x, *weights):
        for q, k, v in zip(*[iter(weights)] * 3, strict=True):
            projected = [bb.emit(op.matmul(x, w)) for w in (q, k, v)]
            turned = bb.emit(op.permute_dims(projected[1], [0, 2, 1]))
            scores = bb.emit(
                op.multiply(op.matmul(projected[0], turned), relax.const(0.125, "float16"))
            )
            p = bb.emit(op.nn.softmax(scores))
            x = bb.emit(op.matmul(p, projected[2]))
        return (x, p) if also_weights else x

    shapes = [((4, 256, 64), "float16")] + [((64, 64), "float16")] * (3 * count)
    return module(emit, *shapes)


def expanded(x, groups):
    b, h, n, d = x.shape
    return x[:, :, None].expand(b, h, groups, n, d).reshape(b, h * groups, n, d)


def of_expanded(q, k, v, mask):
    k, v = expanded(k, 4), expanded(v, 4)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def of_grouped(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def written_out(q, k, v, mask):
    k, v = expanded(k, 4), expanded(v, 4)
    scores = torch.where(mask, q @ k.transpose(2, 3) / 8, torch.finfo(q.dtype).min)
    return F.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("attend", "queries"), [(of_expanded, 1), (of_grouped, 64), (written_out, 64)]
)
def test_keys_of_grouped_heads_are_read_from_a_cache_where_they_lie(attend, queries):
    def step(q, k, v, keys, values, start):
        places = start + torch.arange(queries)
        keys, values = keys.index_copy(2, places, k), values.index_copy(2, places, v)
        return attend(q, keys, values, torch.arange(1024) <= places[:, None]), keys, values

    q, k, cache = (
        torch.zeros(1, h, n, 64).half() for h, n in ((32, queries), (8, queries), (8, 1024))
    )
    planned = plan_of(load(Function(step), (q, k, k, cache, cache, torch.tensor(3))))
    assert len(attentions(planned)) == 1
    assert max(g.bytes for g in planned.plan.groups) < 32 * 1024 * 64 * 2  # of all heads


def test_every_layer_has_its_own():
    planned = plan_of(layers(3))
    assert len(attentions(planned)) == 3
    assert planned.launches == 6


def test_weights_that_are_a_result_stay_in_memory():
    assert not attentions(plan_of(layers(1, also_weights=True)))


def test_a_policy_of_exact_roundings_keeps_scores_in_memory():
    planned = plan_of(layers(1), policy={"rounding": "exact"})
    assert not attentions(planned)


def core_view(mod, device="h200"):
    hw = load_profile(device)
    graph = build_graph(lower(mod, hw.to_target(), hw=hw))
    (core,) = attention_cores(graph)
    written = [t for o in core for t in graph.ops[o].outputs]
    outputs = [
        t
        for t in written
        if graph.tensors[t].is_output or not set(graph.tensors[t].consumers) <= set(core)
    ]
    return GroupView(graph, core, tuple(outputs)), hw


def test_reasons_of_the_class_name_what_is_in_the_way():
    policy = load_policy(None)
    kernel = AttentionClass()
    view, hw = core_view(layers(1))
    assert not isinstance(kernel.accepts(view, hw, policy), Refusal)
    exact = kernel.accepts(view, hw, load_policy({"rounding": "exact"}))
    assert "rounded" in exact.why
    view, hw = core_view(layers(1, also_weights=True))
    assert "read by others" in kernel.accepts(view, hw, policy).why


def test_hidden_keys_cost_half_of_a_triangle():
    (plain,) = (c for c in CASES if c.name == "[B, H, S, D]")
    (causal,) = (c for c in CASES if c.name == "causal by index")
    sizes = {**SIZES, "M": 4096, "N": 4096}
    times = [
        attentions(plan_of(c.with_sizes(**sizes).module()))[0].predicted_us for c in (plain, causal)
    ]
    assert 0.5 < times[1] / times[0] < 0.7


def test_a_mask_that_is_a_constant_triangle_is_computed():
    mask = np.triu(np.full((512, 512), -np.inf), 1).astype(np.float16)

    def emit(bb, q, k, v):
        turned = bb.emit(op.permute_dims(k, [0, 2, 1]))
        scores = bb.emit(op.add(op.matmul(q, turned), relax.const(mask, "float16")))
        return op.matmul(op.nn.softmax(scores), v)

    planned = plan_of(module(emit, *[((8, 512, 64), "float16")] * 3))
    assert planned.launches == 1
    (group,) = attentions(planned)
    assert not any(t.is_constant for t in planned.graph.tensors)
    assert (
        group.predicted_us < unfused_plan(planned.graph, planned.hw, load_policy(None)).predicted_us
    )
