"""Random graphs: every plan can run, costs no more than not fusing, and computes the right
numbers.
"""

import random

import pytest
from tvm.relax import op

import tvm_fusion
from tests.support.graphs import module, plan_of
from tvm_fusion.config import load_policy
from tvm_fusion.ir.graph import OpKind
from tvm_fusion.plan.search.search import unfused_plan

ROWS, COLUMNS = 6, 10
F32 = "float32"
X = ((ROWS, COLUMNS), F32)


def _unary(bb, rng, values):
    f = rng.choice([op.tanh, op.sigmoid, op.nn.relu, op.negative, op.abs])
    return f(rng.choice(values))


def _binary(bb, rng, values):
    a, b = rng.choice(values), rng.choice(values)
    return rng.choice([op.add, op.multiply, op.maximum])(a, b)


def _normalise(bb, rng, values):
    x = rng.choice(values)
    total = bb.emit(
        rng.choice([op.sum, op.max, op.mean])(x, axis=rng.choice([-1, 0]), keepdims=True)
    )
    return rng.choice([op.subtract, op.add])(x, total)


def _softmax(bb, rng, values):
    return op.nn.softmax(rng.choice(values), axis=rng.choice([-1, 0]))


def _turn(bb, rng, values):
    x = bb.emit(op.permute_dims(rng.choice(values)))
    return op.reshape(x, (ROWS, COLUMNS))


def _product(bb, rng, values):
    a, b = rng.choice(values), rng.choice(values)
    square = bb.emit(op.matmul(a, bb.emit(op.permute_dims(b))))
    return op.matmul(square, a)


def _halves(bb, rng, values):
    parts = bb.emit(op.split(rng.choice(values), 2, axis=1))
    return op.concat([bb.emit(parts[1]), bb.emit(parts[0])], 1)


STEPS = [_unary, _binary, _binary, _normalise, _softmax, _turn, _product, _halves]


def random_module(seed: int, steps: int):
    rng = random.Random(seed)

    def emit(bb, *inputs):
        values = list(inputs)
        for _ in range(steps):
            values.append(bb.emit(rng.choice(STEPS)(bb, rng, values)))
        results = {values[-1], rng.choice(values[2:])}
        return sorted(results, key=lambda v: v.name)

    return module(emit, X, X)


def check_runs(graph, plan) -> None:
    """Independent of the search: in plan order, every tensor a group reads has been stored by an
    earlier group.
    """
    by_name = {o.name: o for o in graph.ops}
    members = [{by_name[n].id for n in g.ops} for g in plan.groups]
    stored = {t.id for t in graph.tensors if t.producer is None and not t.is_inner}
    for g, ops in zip(plan.groups, members, strict=True):
        for i in sorted(ops):
            for t in graph.ops[i].inputs:
                assert graph.tensors[t].producer in ops or t in stored, (
                    g.ops,
                    graph.tensors[t].name,
                )
        assert len(ops) == 1 or all(graph.ops[i].kind is not OpKind.OPAQUE for i in ops)
        owned = {by_name[n].id for n in g.ops if n not in g.recomputed}
        stored |= {t for i in owned for t in graph.ops[i].outputs}
    missing = [t.name for t in graph.tensors if t.is_output and t.id not in stored]
    assert not missing


@pytest.mark.one_in(24)
@pytest.mark.parametrize("device", ["h200", "llvm"])
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_plans_can_run_and_are_predicted_no_slower_than_not_fusing(first, device):
    fused = 0
    for seed in range(first, first + 10):
        p = plan_of(random_module(seed, 9), device)
        check_runs(p.graph, p.plan)
        alone = unfused_plan(p.graph, p.hw, load_policy(None))
        assert p.plan.predicted_us <= alone.predicted_us + 1e-3
        fused += any(len(g.ops) > 1 for g in p.plan.groups)
    assert fused == 10


@pytest.mark.one_in(18)
@pytest.mark.parametrize("seed", range(1000, 1016))
def test_random_graphs_give_right_numbers_with_no_group_cut(seed):
    report = tvm_fusion.compile(random_module(seed, 8), "llvm", verify=True).report
    assert report.verify.passed
    assert [g.fallback for g in report.groups if g.fallback] == []
    assert report.launches.fused <= report.launches.unfused


def test_the_checker_sees_a_plan_in_the_wrong_order():
    p = plan_of(random_module(3, 9))
    groups = [g for g in p.plan.groups if g.kernel_class != "view"]
    reordered = type(p.plan)(
        p.plan.function, p.plan.fingerprint, "h200", "default", tuple(reversed(groups))
    )
    with pytest.raises(AssertionError):
        check_runs(p.graph, reordered)
