"""Which groups are refused before a kernel class is asked."""

import pytest
from tvm.relax import op

from tests.support.graphs import module, plan_of

BIG = ((4096, 4096), "float16")
CHAIN = (op.exp, op.tanh, op.sigmoid, op.sqrt)


def chain(bb, x):
    for operator in CHAIN:
        x = bb.emit(operator(x))
    return x


@pytest.mark.parametrize("device", ["h200", "llvm"])
def test_a_group_may_be_as_large_as_its_limit(device):
    planned = plan_of(module(chain, BIG), device, policy={"max_group_ops": len(CHAIN)})
    assert planned.launches == 1
    assert "group_size" not in planned.codes


@pytest.mark.parametrize("device", ["h200", "llvm"])
def test_a_group_of_one_operator_more_than_its_limit_is_refused(device):
    planned = plan_of(module(chain, BIG), device, policy={"max_group_ops": len(CHAIN) - 1})
    refusal = next(r for r in planned.plan.refusals if r.code.value == "group_size")
    assert dict(refusal.numbers) == {"ops": len(CHAIN), "allowed": len(CHAIN) - 1}
    assert planned.launches == 2
    assert max(len(group.ops) for group in planned.plan.groups) < len(CHAIN)
