"""`min_gain`: a fusion that saves less than this share of its operators' time is not taken,
whatever search found it.
"""

import pytest
from tvm.relax import op

from tests.support.graphs import module, plan_of
from tvm_fusion.config import load_policy
from tvm_fusion.errors import ConfigError
from tvm_fusion.plan.decide.caution import Caution, Ratio, Timed
from tvm_fusion.plan.decide.decide import decide, judge, unfused_times
from tvm_fusion.plan.refusal import RefusalCode
from tvm_fusion.plan.search.search import search, unfused_plan
from tvm_fusion.report.flip import flip

BIG = ((4096, 4096), "float32")
SEARCHES = {"greedy only": 0, "beam and exact": 4000}


def chain(bb, x, y):
    return bb.emit(op.multiply(bb.emit(op.exp(x)), y))


def policy(min_gain, evaluations=4000):
    return load_policy(
        {"coverage": 0.0, "min_gain": min_gain, "search_evaluations": evaluations, "probe": "off"}
    )


@pytest.fixture(scope="module")
def saved():
    """The graph's plan, and the share of the time that its one fusion saves."""
    p = plan_of(module(chain, BIG, BIG))
    plan = search(p.graph, p.hw, policy(0.0))
    apart = unfused_times(unfused_plan(p.graph, p.hw, policy(0.0)))
    return p, 1 - judge(plan.groups, apart, Caution.of(policy(0.0))).value


@pytest.mark.parametrize("evaluations", SEARCHES.values(), ids=SEARCHES)
def test_a_fusion_is_taken_while_it_saves_the_share(saved, evaluations):
    p, share = saved
    assert 0.2 < share < 0.8
    taken = decide(p.graph, p.hw, policy(share - 0.01, evaluations))
    assert [len(g.ops) for g in taken.groups] == [2]
    left = decide(p.graph, p.hw, policy(share + 0.01, evaluations))
    assert [len(g.ops) for g in left.groups] == [1, 1]


@pytest.mark.parametrize("evaluations", SEARCHES.values(), ids=SEARCHES)
def test_a_fusion_that_saves_too_little_says_from_which_share_on_it_is_taken(saved, evaluations):
    p, share = saved
    plan = decide(p.graph, p.hw, policy(share + 0.01, evaluations))
    (refusal,) = plan.refusals
    assert refusal.code is RefusalCode.NOT_PROFITABLE
    assert f"saves less than {share + 0.01:.1%}" in refusal.why
    told = flip(refusal.code.value, dict(refusal.numbers))
    assert told.startswith("policy: taken with min_gain = ")
    assert float(told.split()[5]) == pytest.approx(share, abs=2e-3)


def test_the_charge_is_the_larger_of_doubt_and_least_share():
    caution = Caution(1.2, 1.2, min_gain=0.5)
    assert caution.charge_of(Timed(10.0, 2.0, 1.2)) == pytest.approx(10.0)
    assert Caution(1.2, 1.2, min_gain=0.0).charge_of(Timed(10.0, 2.0, 1.2)) == pytest.approx(1.6)
    assert caution.gains_too_little(Ratio(0.6, 0.6, 0.6))
    assert not caution.gains_too_little(Ratio(0.5, 0.5, 0.5))


@pytest.mark.parametrize("share", [1, 1.5])
def test_no_fusion_saves_all_of_the_time(share):
    with pytest.raises(ConfigError, match="min_gain must be less than 1"):
        load_policy({"min_gain": share})
