"""What stayed apart is told by the class that came closest, with its cost and one action."""

import dataclasses

import pytest
from tvm.relax import op

from tvm_fusion.config import load_policy
from tvm_fusion.kernels import registry
from tvm_fusion.plan.explain.true_reasons import Apart, true_reasons
from tvm_fusion.plan.legality import Evaluator
from tvm_fusion.report.flip import KINDS, flip

from ..support.graphs import Refuses, module, plan_of


def attention(bb, q, k, v):
    scores = bb.emit(op.matmul(q, bb.emit(op.permute_dims(k, [0, 2, 1]))))
    return bb.emit(op.matmul(bb.emit(op.nn.softmax(scores)), v))


def widened(bb, q, k, v):
    """Attention of halves, its weights and result in float32."""
    return attention(bb, *(bb.emit(op.astype(x, "float32")) for x in (q, k, v)))


def heads(dtype, features=64):
    return [((8, 256, features), dtype)] * 3


def gelu_between(bb, x, first, second):
    hidden = bb.emit(op.nn.gelu(bb.emit(op.matmul(x, first))))
    return bb.emit(op.matmul(hidden, second))


def norm_first(bb, x, gamma, weight):
    normed = bb.emit(op.nn.rms_norm(x, gamma, axes=[-1]))
    return bb.emit(op.matmul(normed, weight))


def told(planned, policy=None):
    return true_reasons(planned.graph, planned.hw, load_policy(policy), planned.plan)


def test_weights_of_float32_are_refused_by_the_class_of_attention():
    planned = plan_of(module(widened, *heads("float16")))
    assert planned.launches == 3
    (refusal,) = told(planned)
    assert (refusal.kernel_class, len(refusal.where)) == ("attention", 3)
    assert "weights of float32 would be rounded for tensor cores" in refusal.why
    assert refusal.action.startswith("dtype: keep the weights in float16")
    assert 0 < refusal.cost_us < planned.plan.predicted_us


@pytest.mark.parametrize(
    ("emit", "policy", "action"),
    [
        (widened, {}, "dtype: keep the weights in float16"),
        (attention, {"rounding": "exact"}, 'policy: rounding = "fast"'),
    ],
)
def test_the_action_turns_the_refusal(emit, policy, action):
    refused = plan_of(module(emit, *heads("float16")), policy=policy)
    assert told(refused, policy)[0].action.startswith(action)
    done = plan_of(module(attention, *heads("float16")))
    assert (refused.launches > 1, done.launches) == (True, 1)
    assert told(done) == ()


def test_a_class_of_the_users_does_not_hide_the_reasons_of_the_others():
    models = (
        module(widened, *heads("float16")),
        module(gelu_between, *[((64, 64), "float16")] * 3),
    )
    alone = [told(plan_of(mod)) for mod in models]
    registry.register(Refuses())
    try:
        beside = [plan_of(mod) for mod in models]
        assert [told(planned) for planned in beside] == alone
        evaluator = Evaluator(beside[1].graph, beside[1].hw, load_policy())
        apart = Apart(evaluator, beside[1].plan)
        reasons = apart.reasons(apart.together(range(len(beside[1].plan.groups))))
        assert {r.kernel_class for r in reasons} > {"refuses", "gemm", "row", "pointwise"}
    finally:
        registry.unregister("refuses")


@pytest.mark.parametrize("device", ["h200", "llvm_cpu"])
def test_the_dearest_refusal_comes_first_and_each_has_one_action(device):
    models = (
        module(gelu_between, *[((512, 512), "float32")] * 3),
        module(norm_first, ((2048, 512), "float32"), ((512,), "float32"), ((512, 512), "float32")),
    )
    for mod in models:
        refusals = told(plan_of(mod, device))
        assert refusals
        costs = [r.cost_us for r in refusals]
        assert None not in costs
        assert costs == sorted(costs, reverse=True)
        for r in refusals:
            kind, _, said = (r.action or flip(r.code.value, dict(r.numbers))).partition(": ")
            assert kind in KINDS
            assert said


def test_a_refusal_costs_what_the_launches_take_beyond_the_limit_of_one():
    planned = plan_of(
        module(norm_first, ((2048, 512), "float16"), ((512,), "float16"), ((512, 512), "float16"))
    )
    (refusal,) = told(planned)
    apart = Apart(Evaluator(planned.graph, planned.hw, load_policy()), planned.plan)
    assert refusal.cost_us == pytest.approx(
        planned.plan.predicted_us - apart.limit_us(range(len(planned.plan.groups)))
    )
    slower = dataclasses.replace(planned.hw, hbm_bytes_per_s=planned.hw.hbm_bytes_per_s / 1000)
    least = Apart(Evaluator(planned.graph, slower, load_policy()), planned.plan)
    assert least.limit_us((0, 1)) > apart.limit_us((0, 1))


def test_a_plan_of_many_refusals_asks_again_for_the_dearest_ones_only(monkeypatch):
    planned = plan_of(module(gelu_between, *[((64, 64), "float16")] * 3))
    monkeypatch.setattr("tvm_fusion.plan.explain.true_reasons.MOST_ASKED", 0)
    assert {r.kernel_class for r in told(planned)} == {None}
