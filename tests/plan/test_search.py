"""The plan search: what it fuses, what it refuses and with which code, determinism, plan files."""

import json

import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tests.support.graphs import module, plan_of
from tvm_fusion.config import load_policy
from tvm_fusion.demo import demo_module
from tvm_fusion.errors import PlanError
from tvm_fusion.kernels import registry
from tvm_fusion.plan.plan import FusionPlan
from tvm_fusion.plan.refusal import RefusalCode
from tvm_fusion.plan.search.search import search, unfused_plan

from ..pipelines.cells import launches, stock_fusion
from ..support.large_graphs import transformer

F16 = "float16"
BIG, ROW, COLUMN = ((4096, 4096), F16), ((4096,), F16), ((4096, 1), F16)
DEVICES = ("h200", "llvm")


def softmax(bb, x):
    return op.nn.softmax(x)


def layer_norm(bb, x, g, b):
    return op.nn.layer_norm(x, g, b, axes=[-1])


def rms_norm(bb, x, g):
    return op.nn.rms_norm(x, g, axes=[-1])


def add_rms_norm(bb, x, y, g):
    s = bb.emit(op.add(x, y))
    return s, bb.emit(op.nn.rms_norm(s, g, axes=[-1]))


def two_reductions(bb, x):
    return bb.emit(op.sum(x, axis=-1)), bb.emit(op.max(x, axis=-1))


def two_consumers(bb, x):
    a = bb.emit(op.sigmoid(x))
    return bb.emit(op.add(bb.emit(op.tanh(a)), x)), bb.emit(op.multiply(bb.emit(op.nn.relu(a)), x))


def exp_sum_product(bb, x):
    e = bb.emit(op.exp(bb.emit(op.multiply(x, relax.const(0.1, F16)))))
    return bb.emit(op.sum(e, axis=-1)), bb.emit(op.multiply(e, x))


def cross_entropy_rows(bb, x):
    return op.nn.log_softmax(x)


def linear(bb, x, w, b, r):
    y = bb.emit(op.nn.gelu(bb.emit(op.add(bb.emit(op.matmul(x, w)), b))))
    return bb.emit(op.add(y, r))


def siblings(bb, x, y, z):
    return bb.emit(op.add(x, y)), bb.emit(op.multiply(x, z))


ONE_LAUNCH = [
    (softmax, (BIG,)),
    (layer_norm, (BIG, ROW, ROW)),
    (rms_norm, (BIG, ROW)),
    (add_rms_norm, (BIG, BIG, ROW)),
    (two_reductions, (BIG,)),
    (two_consumers, (BIG,)),
    (exp_sum_product, (BIG,)),
    (cross_entropy_rows, (BIG,)),
    (linear, (BIG, BIG, ROW, BIG)),
    (siblings, (BIG, BIG, BIG)),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("emit", "inputs"), ONE_LAUNCH, ids=lambda v: getattr(v, "__name__", ""))
def test_these_are_planned_as_one_launch(emit, inputs, device):
    assert plan_of(module(emit, *inputs), device).launches == 1


KNOWN = {  # and the launches of their plans
    "demo block": (lambda: demo_module("llvm"), {"h200": 7, "llvm": 10}),
    "layer": (lambda: transformer(1), {"h200": 8, "llvm": 10}),
    "two consumers": (lambda: module(two_consumers, BIG), {"h200": 1, "llvm": 1}),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", KNOWN)
def test_known_graphs_take_so_many_launches_and_more_by_tvms_fusion(name):
    make, expected = KNOWN[name]
    mod = make()
    assert {device: plan_of(mod, device).launches for device in DEVICES} == expected
    stock = launches(tvm.transform.Sequential(stock_fusion())(mod))["main"]
    assert stock > max(expected.values())


def chain_then_broadcast(bb, x, y):
    for _ in range(4):
        x = bb.emit(op.exp(x))
    return bb.emit(op.add(x, y))


@pytest.mark.parametrize("device", DEVICES)
def test_a_costly_chain_is_not_recomputed_through_a_broadcast(device):
    """tvm#20342: exps on [4096, 1], then a broadcast to [4096, 4096]."""
    p = plan_of(module(chain_then_broadcast, COLUMN, BIG), device)
    assert p.launches == 2
    refusal = next(r for r in p.plan.refusals if r.code is RefusalCode.RECOMPUTE)
    assert dict(refusal.numbers)["factor"] > dict(refusal.numbers)["allowed"]


def test_a_cheap_operator_is_inlined_through_a_broadcast():
    p = plan_of(module(lambda bb, x, y: bb.emit(op.add(bb.emit(op.add(x, x)), y)), COLUMN, BIG))
    assert p.launches == 1


def long_chain_then_broadcast(bb, x, y):
    for _ in range(60):
        x = bb.emit(op.exp(x))
    return bb.emit(op.add(x, y))


def cycle_trap(bb, x):
    """a feeds b and c; c is opaque and feeds b: a and b may not become one kernel."""
    a = bb.emit(op.exp(x))
    c = bb.emit(relax.call_dps_packed("somewhere.f", (a,), out_ty=x.ty))
    return bb.emit(op.add(a, c))


def test_a_cycle_through_an_opaque_operator_is_refused():
    p = plan_of(module(cycle_trap, BIG), policy={"allow_rematerialisation": False})
    assert p.launches == 2
    assert "cycle" in p.codes


def test_a_group_never_contains_both_ends_of_an_outside_path():
    p = plan_of(module(cycle_trap, BIG))
    for g in p.plan.groups:
        owned = set(g.ops) - set(g.recomputed)
        assert len(owned) <= 1


def remat(bb, x):
    """A cheap producer of two row sums whose rows differ, so that they cannot share a kernel."""
    a = bb.emit(op.multiply(x, relax.const(2.0, F16)))
    wider = bb.emit(op.reshape(a, (2048, 8192)))
    return bb.emit(op.sum(a, axis=-1)), bb.emit(op.max(wider, axis=-1))


@pytest.mark.parametrize("device", DEVICES)
def test_a_cheap_producer_is_recomputed_in_its_consumers_where_that_saves_traffic(device):
    p = plan_of(module(remat, BIG), device)
    assert p.launches == 2
    producer = next(o.name for o in p.graph.ops if o.func.startswith("multiply"))
    assert sum(producer in g.ops for g in p.plan.groups) == 2
    without = plan_of(module(remat, BIG), device, policy={"allow_rematerialisation": False})
    assert p.plan.predicted_us < without.plan.predicted_us
    assert sum(producer in g.ops for g in without.plan.groups) == 1


def prologue(bb, x, y, w):
    return bb.emit(op.matmul(bb.emit(op.multiply(x, y)), w))


def row_after_product(bb, x, w):
    return bb.emit(op.sum(bb.emit(op.matmul(x, w)), axis=-1))


def two_products(bb, x, w, v):
    return bb.emit(op.matmul(bb.emit(op.matmul(x, w)), v))


def other_sizes(bb, x, y):
    """A small tensor that is an output by itself, and read through a broadcast by a large one."""
    a = bb.emit(op.add(x, x))
    return a, bb.emit(op.add(bb.emit(op.reshape(a, (4096, 1))), y))


def off_row(bb, x):
    s = bb.emit(op.sum(x, axis=-1))
    return bb.emit(op.add(x, s))


REFUSED = [
    (prologue, (BIG, BIG, BIG), {}, "prologue"),
    (row_after_product, (BIG, BIG), {}, "epilogue"),
    (two_products, (BIG, BIG, BIG), {}, "several_contractions"),
    (off_row, (BIG,), {}, "off_row"),
    (chain_then_broadcast, (COLUMN, BIG), {}, "recompute"),
    (softmax, (BIG,), {"max_group_ops": 2}, "group_size"),
    (long_chain_then_broadcast, (COLUMN, BIG), {"max_recompute": 1e9}, "not_profitable"),
    (other_sizes, (((64, 64), F16), BIG), {"allow_rematerialisation": False}, "space_mismatch"),
]


@pytest.mark.parametrize(
    ("emit", "inputs", "policy", "code"), REFUSED, ids=lambda v: v if isinstance(v, str) else ""
)
def test_each_refusal_has_its_code(emit, inputs, policy, code):
    assert code in plan_of(module(emit, *inputs), policy=policy or None).codes


def transposed_exp(bb, x):
    return bb.emit(op.astype(bb.emit(op.exp(bb.emit(op.permute_dims(x)))), "float32"))


def test_conversions_and_moves_of_data_do_not_count_as_operators_of_a_group():
    planned = plan_of(module(transposed_exp, BIG), policy={"max_group_ops": 1})
    assert planned.launches == 1


def column_sum(bb, x):
    return bb.emit(op.sum(bb.emit(op.exp(x)), axis=0))


def test_a_reduction_of_leading_axes_takes_its_prologue_and_is_two_launches_where_it_starves():
    planned = plan_of(module(column_sum, BIG))
    first, second = planned.plan.groups
    assert first.kernel_class == second.kernel_class == "column"
    assert planned.graph.ops[0].name in first.ops
    assert "not_trailing" in planned.codes


def test_a_neighbour_that_cannot_be_read_is_named():
    p = plan_of(module(cycle_trap, BIG))
    refusal = next(r for r in p.plan.refusals if r.code is RefusalCode.OPAQUE)
    assert "no call_tir" in refusal.why


def test_a_group_whose_parameters_do_not_fit_is_refused():
    alone = {"allow_rematerialisation": False}
    p = plan_of(module(two_consumers, BIG), policy=alone, kernel_param_bytes=16)
    assert "parameter_bytes" in p.codes


def test_operators_of_different_dataflow_blocks_stay_apart():
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(*BIG))
    with bb.function("main", [x], pure=False):
        with bb.dataflow():
            a = bb.emit_output(op.exp(x))
        b = bb.emit(relax.Call(relax.ExternFunc("somewhere.f"), [a], ty_args=[a.ty]))
        with bb.dataflow():
            out = bb.emit_output(op.add(bb.emit(op.tanh(a)), b))
        bb.emit_func_output(out)
    p = plan_of(bb.get())
    assert {"region", "opaque"} <= p.codes


def test_a_forbidden_group_is_not_planned_again():
    p = plan_of(module(softmax, BIG))
    again = search(p.graph, p.hw, load_policy(None), forbidden=frozenset({p.plan.groups[0].ops}))
    assert p.plan.groups[0].ops not in [g.ops for g in again.groups]


def test_every_operator_is_owned_once():
    p = plan_of(demo_module("cuda"))
    p.plan.check(p.graph)
    assert p.launches <= 13


def test_the_unfused_plan_fuses_nothing_and_is_predicted_slower():
    p = plan_of(demo_module("llvm"), "llvm")
    alone = unfused_plan(p.graph, p.hw, load_policy(None))
    assert all(len(g.ops) == 1 for g in alone.groups)
    assert p.plan.predicted_us < alone.predicted_us


def test_a_plan_survives_its_file(tmp_path):
    p = plan_of(demo_module("llvm"), "llvm")
    p.plan.save(tmp_path / "plan.json")
    again = FusionPlan.load(tmp_path / "plan.json")
    assert again.to_json() == p.plan.to_json()
    again.check(p.graph)


def test_a_plan_for_another_module_is_refused():
    p, q = plan_of(module(softmax, BIG)), plan_of(module(rms_norm, BIG, ROW))
    with pytest.raises(PlanError, match="another module"):
        p.plan.check(q.graph)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a plan"),
        ('{"version": 99}', "version"),
        ('{"version": 1}', "broken"),
    ],
)
def test_a_broken_plan_file_is_a_plan_error(tmp_path, text, message):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(PlanError, match=message):
        FusionPlan.load(tmp_path / "p.json")


def test_a_plan_that_lost_an_operator_is_refused():
    p = plan_of(module(softmax, BIG))
    data = json.loads(p.plan.to_json())
    data["groups"][0]["ops"].pop()
    with pytest.raises(PlanError, match="in no group"):
        FusionPlan.from_dict(data).check(p.graph)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ops": []}, "no operators"),
        ({"ops": [1]}, "by their names"),
        ({"terms": None}, "broken"),
        ({"predicted_us": None}, "no number"),
        ({"kernel_class": "nonsense"}, "no kernel class is called nonsense"),
    ],
)
def test_a_group_that_cannot_be_is_a_plan_error(change, message):
    p = plan_of(module(softmax, BIG))
    data = json.loads(p.plan.to_json())
    data["groups"][0] |= change
    with pytest.raises(PlanError, match=message):
        FusionPlan.from_dict(data).check(p.graph, registry.names())


def test_an_operator_that_no_group_owns_is_refused():
    p = plan_of(module(softmax, BIG))
    data = json.loads(p.plan.to_json())
    data["groups"][0]["recomputed"] = data["groups"][0]["ops"][:1]
    with pytest.raises(PlanError, match="in no group"):
        FusionPlan.from_dict(data).check(p.graph)
