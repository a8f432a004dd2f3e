"""Never slower: what is taken without a measurement, what is measured, and what a measurement
decides.
"""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from tvm.relax import op

import tvm_fusion
from tests.plan.test_search import BIG, siblings, softmax, two_consumers
from tests.support.graphs import module, plan_of
from tvm_fusion.check import compared_module, compared_regions, kept_samples
from tvm_fusion.check.compared_regions import measured, settle_regions, settled
from tvm_fusion.check.sequential import (
    ERROR_RATE,
    LOOKS,
    RUNS,
    Budget,
    Comparison,
    Winner,
    paired,
    settle,
)
from tvm_fusion.compilation import one_function
from tvm_fusion.config import load_policy, load_profile, profile_file
from tvm_fusion.cost.learned.learned import Residual
from tvm_fusion.cost.learned.samples import read_samples
from tvm_fusion.errors import BuildError, PlanError
from tvm_fusion.flow.functions import planned_function
from tvm_fusion.flow.planned import Planned
from tvm_fusion.plan.decide.caution import Caution, Timed, Verdict, measured_whole, ratio_of
from tvm_fusion.plan.decide.decide import (
    caution_of,
    decide,
    hopeful_plan,
    judge,
    unfused_times,
    without,
)
from tvm_fusion.plan.differ import clusters, exchanged, in_order, regions
from tvm_fusion.plan.plan import Evidence, FusionPlan, PlannedGroup
from tvm_fusion.plan.refusal import RefusalCode
from tvm_fusion.plan.search.search import unfused_plan
from tvm_fusion.report.flip import flip
from tvm_fusion.transform.apply.region_module import region_module

F32 = "float32"
SMALL = ((64, 48), F32)


class FakeResidual:
    """Says by what factor ratios are off, by kernel class."""

    def __init__(self, **factors):
        self.factors = factors

    def ratio_quantile(self, coverage, kernel_class=None, close=False):
        assert close
        return self.factors.get(kernel_class, self.factors["other"])


def group(*ops, us, launch=0.0, kernel_class="pointwise", analytic=None):
    terms = {"launch": launch, "hbm": us - launch}
    return PlannedGroup(ops, kernel_class, predicted_us=us, terms=terms, analytic_us=analytic)


def launches(plan):
    return sum(g.kernel_class not in ("view", "opaque") for g in plan.groups)


# ---- the interval of a fusion


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(1.0, Verdict.SURE), (1.2, Verdict.SURE), (1.3, Verdict.UNDECIDED)],
)
def test_a_fusion_is_sure_while_its_interval_excludes_a_loss(factor, verdict):
    ratio = judge([group("a", "b", us=8.0)], {"a": 5.0, "b": 5.0}, Caution(factor, 1.0))
    assert ratio.value == pytest.approx(0.8)
    assert ratio.verdict is verdict


def test_a_fusion_that_is_slower_at_its_best_is_losing():
    ratio = judge([group("a", "b", us=15.0)], {"a": 5.0, "b": 5.0}, Caution(1.2, 1.0))
    assert ratio.verdict is Verdict.LOSING


def test_the_launch_itself_is_counted_and_not_in_doubt():
    together, apart = group("a", "b", us=6.0, launch=4.0), {"a": 5.0, "b": 5.0}
    assert judge([together], apart, Caution(2.5, 1.0)).high == pytest.approx((4 + 2 * 2.5) / 10)


def test_one_operator_alone_is_no_fusion():
    assert judge([group("a", us=5.0)], {"a": 5.0}, Caution(9.0, 9.0)) is None


def test_groups_that_recompute_an_operator_are_judged_together():
    both = [group("p", "a", us=6.0), group("p", "b", us=6.0)]
    ratio = judge(both, {"p": 5.0, "a": 5.0, "b": 5.0}, Caution(1.2, 1.0))
    assert ratio.value == pytest.approx(12 / 15)


def test_the_residual_says_the_factor_by_class_where_it_had_a_say():
    caution = Caution.of(load_policy(), FakeResidual(other=1.25, gemm=1.02))
    assert caution.factor("row", corrected=True) == 1.25
    assert caution.factor("gemm", corrected=True) == 1.02
    assert caution.factor("row", corrected=False) == load_policy().unknown_ratio
    assert caution.factor("gemm", corrected=False) == load_policy().unknown_ratio_gemm


def test_close_calls_are_judged_by_close_calls():
    """Fusions that save much are further off, and say nothing about those that save little."""
    ratios = {"all": np.linspace(0.0, 1.0, 200), "close": np.linspace(0.0, 0.1, 50)}
    ratios |= {"close gemm": np.linspace(0.0, 0.02, 40), "close row": np.linspace(0.0, 0.5, 10)}
    residual = Residual("d", "p", None, None, None, 1.0, ratios)
    caution = Caution.of(load_policy(), residual)
    assert caution.factor("pointwise", True) == pytest.approx(math.exp(0.09), abs=0.01)
    assert caution.factor("row", True) == caution.factor("pointwise", True)  # 10 pairs are too few
    assert caution.factor("gemm", True) == pytest.approx(math.exp(0.018), abs=0.01)
    assert residual.ratio_quantile(0.9) == pytest.approx(math.exp(0.9), abs=0.05)


def test_a_quantile_that_too_few_pairs_give_leaves_the_policys_constant():
    caution = Caution.of(load_policy(), FakeResidual(other=math.inf))
    assert caution.factor("row", corrected=True) == load_policy().unknown_ratio


def test_coverage_0_takes_predictions_as_they_are():
    caution = Caution.of(load_policy("aggressive"), FakeResidual(other=3.0))
    assert caution.is_none
    assert caution.factor("row", corrected=True) == 1.0


def test_the_interval_widens_on_both_sides():
    ratio = ratio_of([(8.0, 0.0, 1.25)], 10.0)
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((0.64, 0.8, 1.0))


# ---- what is taken without a measurement


def cautious(factor, gemm=None):
    return Caution(factor, factor if gemm is None else gemm)


def test_an_undecided_fusion_is_cut_and_said_so():
    p = plan_of(module(siblings, BIG, BIG, BIG))
    assert p.launches == 1
    plan = decide(p.graph, p.hw, load_policy(), caution=cautious(2.0))
    assert launches(plan) == 2
    assert RefusalCode.UNDECIDED in {r.code for r in plan.refusals}
    assert all(g.evidence is None for g in plan.groups)


def test_the_same_fusion_is_kept_with_a_favourable_interval():
    p = plan_of(module(siblings, BIG, BIG, BIG))
    plan = decide(p.graph, p.hw, load_policy(), caution=cautious(1.05))
    assert launches(plan) == 1
    evidence = plan.groups[0].evidence
    assert (evidence.kind, evidence.verdict) == ("model", "sure")
    assert evidence.low < evidence.ratio < evidence.high <= 1


def test_what_takes_the_same_instructions_apart_hides_no_gain_and_has_no_error():
    launch = Timed(100.0, 2.0, 1.5, common_us=90.0)
    ratio = ratio_of([launch], 106.0)
    assert ratio.high == pytest.approx((92.0 + 8.0 * 1.5) / 106.0)
    assert ratio.verdict is Verdict.SURE
    assert ratio_of([launch._replace(common_us=0.0)], 106.0).verdict is Verdict.UNDECIDED
    caution = Caution(1.5, 1.5, min_gain=0.1)
    assert not caution.gains_too_little(ratio)
    assert caution.charge_of(launch) == pytest.approx(0.5 * 8.0)
    assert caution.gains_too_little(ratio_of([launch._replace(common_us=0.0)], 106.0))


@pytest.mark.parametrize("device", ["h200", "llvm"])
def test_the_default_policy_loses_no_clear_fusion(device):
    p = plan_of(module(softmax, BIG), device)
    assert launches(decide(p.graph, p.hw, load_policy())) == p.launches


def adds_then_exps(bb, x, y, z):
    s = bb.emit(op.add(bb.emit(op.add(x, y)), z))
    for _ in range(4):
        s = bb.emit(op.exp(s))
    return s


def test_of_a_group_in_doubt_the_sure_pieces_are_taken():
    """Of a GPU with slow functions: the sums wait for memory and gain by fusion, the exponentials
    hardly do.
    """
    x = ((4096, 4096), F32)
    rate = load_profile("h200").special_per_s / 30
    p = plan_of(module(adds_then_exps, x, x, x), "h200", {"learned": False}, special_per_s=rate)
    assert p.launches == 1
    ratio = judge(
        clusters(p.graph, p.plan)[0],
        unfused_times(unfused_plan(p.graph, p.hw, load_policy())),
        cautious(1.0),
    )
    caution = cautious(1.02 / ratio.value)
    plan = decide(p.graph, p.hw, load_policy({"learned": False}), caution=caution)
    fused = [g for g in plan.groups if len(g.ops) > 1]
    assert fused
    assert 1 < launches(plan) < len(p.graph.ops)
    assert all(g.evidence.high <= 1 for g in fused)


def linear_then_softmax(bb, x, w):
    return op.nn.softmax(bb.emit(op.nn.relu(bb.emit(op.matmul(x, w)))))


def test_products_have_a_factor_of_their_own():
    p = plan_of(module(linear_then_softmax, BIG, BIG))
    plan = decide(p.graph, p.hw, load_policy(), caution=cautious(1000.0, gemm=1.0))
    fused = {g.kernel_class for g in plan.groups if len(g.ops) > 1}
    assert fused == {"gemm"}


@pytest.mark.parametrize("policy", ["conservative", "default"])
def test_every_fusion_of_a_cautious_policy_is_backed_by_an_interval(policy):
    p = plan_of(module(linear_then_softmax, BIG, BIG))
    plan = decide(p.graph, p.hw, load_policy(policy))
    fused = [g for g in plan.groups if len(g.ops) > 1]
    assert fused
    assert all(g.evidence.kind == "model" and g.evidence.high <= 1 for g in fused)
    assert plan.evidence.high <= 1


def test_policies_differ_in_what_they_ask_of_a_fusion():
    x = ((4096, 4096), F32)
    p = plan_of(module(siblings, x, x, x), "llvm")
    found = {
        name: launches(decide(p.graph, p.hw, load_policy(name)))
        for name in ("conservative", "default", "aggressive")
    }
    assert found == {"conservative": 2, "default": 1, "aggressive": 1}
    kinds = {
        name: decide(p.graph, p.hw, load_policy(name)).groups[-1].evidence
        for name in ("default", "aggressive")
    }
    assert {name: e.kind for name, e in kinds.items()} == {
        "default": "model",
        "aggressive": "prediction",
    }


def test_deciding_twice_gives_the_same_bytes():
    p = plan_of(module(two_consumers, BIG), "llvm")
    plans = [decide(p.graph, p.hw, load_policy("conservative")).to_json() for _ in range(2)]
    assert plans[0] == plans[1]


# ---- regions in which plans differ


def cross(bb, x, y):
    a, b = bb.emit(op.exp(x)), bb.emit(op.exp(y))
    return bb.emit(op.tanh(a)), bb.emit(op.tanh(b))


def test_groups_that_wait_for_each_other_are_not_put_into_one_plan():
    p = plan_of(module(cross, SMALL, SMALL), "llvm")
    alone = unfused_plan(p.graph, p.hw, load_policy())
    a, b, c, d = (g.ops[0] for g in sorted(alone.groups, key=lambda g: g.ops))
    one, other = PlannedGroup((a, d), "pointwise"), PlannedGroup((b, c), "pointwise")
    assert exchanged(p.graph, alone, alone.groups, (one, other)) is None
    first, second = PlannedGroup((a, c), "pointwise"), PlannedGroup((b, d), "pointwise")
    assert {g.ops for g in exchanged(p.graph, alone, alone.groups, (first, second)).groups} == {
        (a, c),
        (b, d),
    }


def viewed(bb, x, y):
    """A view that two groups read."""
    a = bb.emit(op.exp(x))
    v = bb.emit(op.reshape(a, (48, 64)))
    return bb.emit(op.tanh(v)), bb.emit(op.multiply(v, y)), bb.emit(op.negative(a))


def test_plans_of_mixed_regions_run_and_are_right():
    mod = module(viewed, SMALL, ((48, 64), F32))
    planned = planned_function(mod, "llvm", "aggressive")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((64, 48)).astype(F32), rng.standard_normal((48, 64)).astype(F32)
    e = np.exp(x)
    expected = np.tanh(e.reshape(48, 64)), e.reshape(48, 64) * y, -e
    found = regions(planned.graph, planned.alone, planned.plan)
    assert found
    for region in found:
        mixed = exchanged(planned.graph, planned.alone, region.careful, region.hopeful)
        assert in_order(planned.graph, mixed.groups) == mixed.groups
        compiled = tvm_fusion.compile(mod, "llvm", plan=mixed, verify=False)
        for got, want in zip(compiled(x, y), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_plans_that_agree_have_no_region():
    p = plan_of(module(softmax, BIG))
    assert regions(p.graph, p.plan, p.plan) == ()


def test_a_region_by_itself_computes_the_same_either_way():
    from tvm_fusion.check.inputs import random_inputs
    from tvm_fusion.check.plan_runner import PlanRunner

    planned = planned_function(module(viewed, SMALL, ((48, 64), F32)), "llvm", "aggressive")
    (region,) = regions(planned.graph, planned.alone, planned.plan)
    number = {o.name: o.id for o in planned.graph.ops}
    views = {number[n] for g in region.hopeful for n in g.ops} - set(region.ops)
    part = region_module(planned.low, planned.graph, region.ops, views)
    runner = PlanRunner(part.mod, part.graph, planned.hw, planned.policy, planned.target)
    inputs = random_inputs(part.mod["main"])
    results = [
        runner.run(part.plan(side, "llvm_cpu", "p"), inputs)
        for side in (region.hopeful, region.careful)
    ]
    assert len(results[0]) == 3
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_region_with_symbolic_extents_is_left_alone():
    from tvm import tirx

    n = tirx.Var("n", "int64")
    planned = planned_function(module(softmax, ((n, 48), F32)), "llvm")
    assert region_module(planned.low, planned.graph, [o.id for o in planned.graph.ops]) is None


# ---- the sequential test


def noisy(seed, gain=0.0, noise=0.02, heavy=False, drift=0.0):
    """A sampler of pairs around 100 and 100 + gain, with noise, outliers and a common drift."""
    rng = random.Random(seed)
    taken = itertools.count()

    def one(middle, common):
        value = middle * (common + noise * rng.gauss(0, 1))
        return value * (5 if heavy and rng.random() < 0.03 else 1)

    def sample(count):
        pairs = []
        for _ in range(count):
            common = 1 + drift * next(taken)
            pairs.append((one(100, common), one(100 + gain, common)))
        return pairs

    return sample


def unlimited():
    return Budget(1e9, clock=lambda: 0.0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "kind", [{}, {"heavy": True}, {"drift": 0.001}], ids=["normal", "outliers", "drift"]
)
def test_noise_passes_for_a_gain_no_oftener_than_stated(kind):
    runs = 1500
    wins = sum(
        settle(noisy(seed, **kind), unlimited()).winner is Winner.FIRST for seed in range(runs)
    )
    deviation = math.sqrt(runs * ERROR_RATE * (1 - ERROR_RATE))
    assert wins <= runs * ERROR_RATE + 2 * deviation


def test_a_clear_difference_is_seen_at_the_first_look():
    for gain, winner in ((5.0, Winner.FIRST), (-5.0, Winner.SECOND)):
        comparison = settle(noisy(1, gain=gain), unlimited())
        assert (comparison.winner, comparison.pairs) == (winner, LOOKS[0])


def test_a_small_difference_takes_more_looks():
    comparison = settle(noisy(3, gain=0.8), unlimited())
    assert comparison.winner is Winner.FIRST
    assert comparison.pairs > LOOKS[0]
    assert comparison.difference > 3 * comparison.error


def test_equal_times_without_any_noise_are_a_tie():
    comparison = settle(lambda n: [(7.0, 7.0)] * n, unlimited())
    assert (comparison.winner, comparison.pairs) == (Winner.NEITHER, LOOKS[-1])


def test_fewer_pairs_than_the_first_look_decide_nothing():
    assert Comparison.of([(1.0, 2.0), (1.0, 2.1), (1.0, 2.0)]).winner is Winner.NEITHER


class Clock:
    """A clock that sampling moves on."""

    def __init__(self, per_pair):
        self.now, self.per_pair = 0.0, per_pair

    def __call__(self):
        return self.now

    def wrap(self, sample):
        def timed(count):
            self.now += count * self.per_pair
            return sample(count)

        return timed


@pytest.mark.parametrize("seconds", [30.0, 65.0, 1000.0])
def test_the_budget_is_not_exceeded(seconds):
    clock = Clock(per_pair=1.0)
    comparison = settle(clock.wrap(noisy(2)), Budget(seconds, clock))
    assert clock.now <= seconds
    assert comparison.pairs == max(n for n in LOOKS if n + 2 <= seconds)


def test_a_budget_that_does_not_reach_for_a_look_decides_nothing():
    clock = Clock(per_pair=1.0)
    assert settle(clock.wrap(noisy(2, gain=50)), Budget(10.0, clock)) is None
    assert clock.now <= 10


def test_a_spent_budget_times_nothing():
    def never(count):
        raise AssertionError("sampled without a budget")

    assert settle(never, Budget(0.0, clock=lambda: 0.0)) is None


def test_who_goes_first_changes_so_that_the_place_gives_no_advantage():
    rng = random.Random(0)

    def times(swapped, rounds):
        first = [100 + rng.gauss(0, 0.5) for _ in range(rounds)]
        second = [104 + rng.gauss(0, 0.5) for _ in range(rounds)]  # who runs second is slower
        return (second, first) if swapped else (first, second)

    assert settle(lambda n: paired(times, n), unlimited()).winner is Winner.NEITHER


def test_one_interruption_is_no_sample():
    def times(swapped, rounds):
        return [1.0] * rounds, [1.0 if k % RUNS else 99.0 for k in range(rounds)]

    assert set(paired(times, 4)) == {(1.0, 1.0)}


# ---- what a measurement decides


FASTER = Comparison(10.0, 14.0, 4.0, 0.1, 20)
SLOWER = Comparison(14.0, 10.0, -4.0, 0.1, 20)
TIE = Comparison(10.0, 10.1, 0.1, 0.1, 320)
EQUAL = [(9.0, 10.0), (11.0, 10.0)]  # pairs


@pytest.fixture
def contested():
    """A function whose plan has left out a fusion that was in doubt."""
    planned = planned_function(module(siblings, SMALL, SMALL, SMALL), "llvm")
    hopeful = hopeful_plan(planned.graph, planned.hw, planned.policy)
    assert launches(hopeful) == 1
    return replace(planned, plan=unfused_plan(planned.graph, planned.hw, planned.policy))


@pytest.mark.parametrize(
    ("comparison", "count", "code"),
    [(FASTER, 1, None), (SLOWER, 2, RefusalCode.SLOWER), (TIE, 2, RefusalCode.UNDECIDED)],
    ids=["faster", "slower", "tie"],
)
def test_a_region_is_fused_only_if_that_measures_faster(
    monkeypatch, contested, comparison, count, code
):
    monkeypatch.setattr(compared_regions, "compared", lambda *_: comparison)
    plan = settle_regions(contested, Budget(60.0))
    assert launches(plan) == count
    assert [r.code for r in plan.refusals] == ([] if code is None else [code])
    if code is None:
        evidence = plan.groups[0].evidence
        assert (evidence.kind, evidence.together_us, evidence.samples) == ("measured", 10.0, 20)


def test_without_a_measurement_a_region_stays_as_it_is(monkeypatch, contested):
    monkeypatch.setattr(compared_regions, "compared", lambda *_: None)
    before = contested.plan
    assert settle_regions(contested, Budget(60.0)) == before


def test_a_spent_budget_builds_nothing(monkeypatch, contested):
    monkeypatch.setattr(compared_regions, "timed", None)
    assert settle_regions(contested, Budget(0.0)) == contested.plan


def two_times_siblings(bb, x, y, z, u, v, w):
    return (*siblings(bb, x, y, z), *siblings(bb, u, v, w))


def test_regions_of_equal_structure_are_measured_once(monkeypatch):
    planned = planned_function(module(two_times_siblings, *[SMALL] * 6), "llvm")
    alone = unfused_plan(planned.graph, planned.hw, planned.policy)
    names = [g.ops[0] for g in alone.groups]
    pairs = [PlannedGroup((a, b), "pointwise") for a, b in (names[:2], names[2:])]
    hopeful = exchanged(planned.graph, alone, alone.groups, pairs)
    planned, asked = replace(planned, plan=alone), []
    monkeypatch.setattr(compared_regions, "hopeful_plan", lambda *_: hopeful)
    monkeypatch.setattr(compared_regions, "compared", lambda *a: asked.append(a) or FASTER)
    assert launches(settle_regions(planned, Budget(60.0))) == 2
    assert len(asked) == 1


def test_a_refusal_of_what_was_measured_faster_is_dropped(contested):
    hopeful = hopeful_plan(contested.graph, contested.hw, contested.policy)
    (region,) = regions(contested.graph, contested.plan, hopeful)
    plan = settled(contested.graph, contested.plan, region, TIE)
    assert len(plan.refusals) == 1
    assert settled(contested.graph, plan, region, FASTER).refusals == ()


def test_after_a_contest_the_plan_is_judged_by_what_was_measured(monkeypatch, contested):
    stale = Evidence("model", "sure", 0.9, 0.9, 0.9)
    contested = replace(contested, plan=replace(contested.plan, evidence=stale))
    monkeypatch.setattr(compared_regions, "compared", lambda *_: FASTER)
    evidence = settle_regions(contested, Budget(60.0)).evidence
    assert (evidence.kind, evidence.verdict) == ("measured", "sure")
    assert evidence.ratio == pytest.approx(10 / 14, abs=1e-3)


def test_measured_groups_beside_predicted_ones_are_judged_together():
    alone = {"a": 10.0, "b": 10.0, "c": 10.0, "d": 10.0}
    p = plan_of(module(two_times_siblings, *[SMALL] * 6))
    names = [op.name for op in p.graph.ops]
    apart = dict(zip(names, alone.values(), strict=True))
    first = replace(group(*names[:2], us=12.0), evidence=measured(FASTER))
    second = group(*names[2:], us=12.0)
    plan = replace(p.plan, groups=(first, second))
    evidence = measured_whole(p.graph, plan, apart, cautious(1.25)).evidence
    assert evidence.kind == "model"
    assert evidence.ratio == pytest.approx((20 * 10 / 14 + 12) / 40, abs=1e-3)
    assert evidence.high == pytest.approx((20 * 10.3 / 14 + 15) / 40, abs=1e-3)


@pytest.mark.parametrize("comparison", [SLOWER, TIE], ids=["slower", "tie"])
def test_what_was_measured_takes_the_place_of_what_the_model_said(comparison):
    planned = planned_function(module(siblings, BIG, BIG, BIG), "h200")
    plan = decide(planned.graph, planned.hw, planned.policy, caution=cautious(2.0))
    planned = replace(planned, plan=plan)
    assert RefusalCode.UNDECIDED in {r.code for r in planned.plan.refusals}
    hopeful = hopeful_plan(planned.graph, planned.hw, planned.policy)
    (region,) = regions(planned.graph, planned.plan, hopeful)
    plan = settled(planned.graph, planned.plan, region, comparison)
    (refusal,) = plan.refusals
    assert refusal.why.startswith("measured together")
    assert "without a measurement" not in refusal.why


def test_a_faster_fusion_that_would_make_a_circle_says_so(monkeypatch, contested):
    hopeful = hopeful_plan(contested.graph, contested.hw, contested.policy)
    (region,) = regions(contested.graph, contested.plan, hopeful)
    monkeypatch.setattr(compared_regions, "exchanged", lambda *_: None)
    plan = settled(contested.graph, contested.plan, region, FASTER)
    (refusal,) = plan.refusals
    assert refusal.code is RefusalCode.CYCLE
    assert "measured together 10.0 us, apart 14.0 us: faster" in refusal.why
    assert "no clear gain" not in refusal.why


def test_a_region_that_cannot_be_timed_stays_as_it_is(monkeypatch, contested):
    def fails(*_):
        raise BuildError("on purpose")

    monkeypatch.setattr(compared_regions, "timed", fails)
    assert settle_regions(contested, Budget(60.0)) == contested.plan


@pytest.mark.parametrize(
    ("comparison", "said"), [(SLOWER, "less than 9.7 us"), (TIE, "less than 9.8 us")]
)
def test_the_number_that_would_turn_a_measurement_is_told(comparison, said):
    r = compared_regions.slower(comparison, ("a", "b"))
    assert said in flip(r.code.value, dict(r.numbers))


def test_the_number_that_would_make_a_fusion_sure_is_told():
    p = plan_of(module(siblings, BIG, BIG, BIG))
    plan = decide(p.graph, p.hw, load_policy(), caution=cautious(2.0))
    (r,) = (r for r in plan.refusals if r.code is RefusalCode.UNDECIDED)
    told = flip(r.code.value, dict(r.numbers))
    numbers = dict(r.numbers)
    assert f"{numbers['apart_us'] / numbers['together_us']:.3g}" in told
    assert "--measure" in told


def test_evidence_of_a_duel_has_its_interval():
    evidence = measured(FASTER)
    assert evidence.ratio == pytest.approx(10 / 14, abs=1e-3)
    assert evidence.high - evidence.ratio == pytest.approx(0.3 / 14, abs=1e-3)
    assert measured(SLOWER).verdict == "losing"


# ---- the whole module


def raced(monkeypatch, planned, slow):
    """A function whose module is slower than the unfused one while `slow(plan)`, compared."""

    plans = {}

    def built(self):
        made = build(self)
        plans[id(made.built)] = self.plan
        return made

    def sampler(built, inputs):
        fused = 12.0 if slow(plans[id(built[0])]) else 8.0
        return lambda n: [(fused, 10.0)] * n

    build = Planned.build
    monkeypatch.setattr(Planned, "build", built)
    monkeypatch.setattr(compared_module, "sampler", sampler)
    return compared_module.not_slower(planned.build(), planned.build_unfused(), Budget(600.0))


def three_pairs(bb, x, y, z):
    return tuple(bb.emit(op.tanh(bb.emit(op.exp(t)))) for t in (x, y, z))


@pytest.fixture
def fused_pairs():
    """Three fusions, the later ones less sure to gain."""
    extents = ((64, 48), F32), ((32, 17), F32), ((8, 5), F32)
    planned = planned_function(module(three_pairs, *extents), "llvm", "aggressive")
    alone = unfused_plan(planned.graph, planned.hw, planned.policy)
    names = [g.ops[0] for g in alone.groups]
    evidence = [Evidence("model", "sure", r, r, r) for r in (0.5, 0.6, 0.7)]
    number = {o.name: o.id for o in planned.graph.ops}
    chains = [
        (n, planned.graph.ops[planned.graph.consumers(number[n])[0]].name)
        for n in names
        if planned.graph.consumers(number[n])
    ]
    pairs = [
        PlannedGroup(c, "pointwise", evidence=e) for c, e in zip(chains, evidence, strict=True)
    ]
    return replace(planned, plan=exchanged(planned.graph, alone, alone.groups, pairs))


def test_a_module_that_is_not_slower_keeps_its_fusions(monkeypatch, fused_pairs):
    made, comparison = raced(monkeypatch, fused_pairs, lambda plan: False)
    assert launches(made.planned.plan) == 3
    assert comparison.winner is Winner.FIRST
    assert made.planned.plan.evidence.kind == "measured"


def test_of_a_slower_module_the_least_sure_fusions_are_cut_first(monkeypatch, fused_pairs):
    worst = max(fused_pairs.plan.groups, key=lambda g: g.evidence.high).ops
    made, _ = raced(monkeypatch, fused_pairs, lambda plan: any(g.ops == worst for g in plan.groups))
    plan = made.planned.plan
    assert launches(plan) == 4
    assert worst not in {g.ops for g in plan.groups}
    assert [r.where for r in plan.refusals if r.code is RefusalCode.SLOWER] == [worst]


def test_a_module_that_stays_slower_is_run_unfused(monkeypatch, fused_pairs):
    made, comparison = raced(monkeypatch, fused_pairs, lambda plan: True)
    plan = made.planned.plan
    assert comparison is None
    assert plan.fingerprint == fused_pairs.whole.alone.fingerprint
    assert all(len(g.ops) == 1 for g in plan.groups)
    assert RefusalCode.SLOWER in {r.code for r in plan.refusals}


def test_a_budget_that_ends_while_the_module_is_slower_leaves_it_unfused(monkeypatch, fused_pairs):
    clock = Clock(per_pair=1.0)
    monkeypatch.setattr(
        compared_module, "sampler", lambda *_: clock.wrap(lambda n: [(12.0, 10.0)] * n)
    )
    unfused = fused_pairs.build_unfused()
    made, _ = compared_module.not_slower(fused_pairs.build(), unfused, Budget(30.0, clock))
    assert clock.now <= 30
    assert not made.planned.plan.opened


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("factor", "opened"), [(1.01, True), (1e6, False)])
@pytest.mark.parametrize("seconds", [0.0, 1e6], ids=["no look", "no clear difference"])
def test_without_a_verdict_the_interval_of_the_model_decides(
    monkeypatch, fused_pairs, factor, opened, seconds
):
    """Unfused is the default: the fused module stays only where the interval excludes a loss."""
    monkeypatch.setattr(compared_module, "caution_of", lambda *_: cautious(factor))
    monkeypatch.setattr(compared_module, "sampler", lambda *_: lambda n: (EQUAL * n)[:n])
    groups = tuple(halved(g) for g in fused_pairs.plan.groups)
    planned = replace(fused_pairs, plan=replace(fused_pairs.plan, groups=groups))
    made, comparison = compared_module.not_slower(
        planned.build(), planned.build_unfused(), Budget(seconds)
    )
    plan = made.planned.plan
    assert plan.opened is opened
    assert launches(plan) == (3 if opened else 6)
    if not opened:
        (refusal,) = (r for r in plan.refusals if r.where == compared_module.WHOLE)
        assert refusal.code is RefusalCode.UNDECIDED
        assert comparison is None


def halved(g):
    """A group that is predicted to take half of nearly nothing."""
    return replace(g, predicted_us=1e-3, terms={}) if len(g.ops) > 1 else g


def test_a_module_that_lost_once_needs_a_measured_gain(monkeypatch, fused_pairs):
    monkeypatch.setattr(compared_module, "caution_of", lambda *_: cautious(1.0))
    looks = iter([[(12.0, 10.0)], EQUAL])

    def sampler(*_):
        pairs = next(looks)
        return lambda n: (pairs * n)[:n]

    monkeypatch.setattr(compared_module, "sampler", sampler)
    unfused = fused_pairs.build_unfused()
    made, _ = compared_module.not_slower(fused_pairs.build(), unfused, Budget(1e6))
    assert not made.planned.plan.opened


def test_the_plan_of_an_unfused_module_can_be_run_again(monkeypatch):
    mod = module(softmax, SMALL)
    monkeypatch.setattr(compared_module, "sampler", lambda *_: lambda n: [(12.0, 10.0)] * n)
    first = tvm_fusion.compile(mod, "llvm", measure=True)
    assert first.report.verify.passed
    assert not first.plan.opened
    again = tvm_fusion.compile(mod, "llvm", plan=first.plan.to_dict())
    assert again.plan == first.plan
    assert again.report.verify.passed


def test_a_given_plan_is_timed_and_left_as_it_is(monkeypatch, fused_pairs):
    given = replace(fused_pairs, given=True)
    made, comparison = raced(monkeypatch, given, lambda plan: True)
    plan = made.planned.plan
    assert comparison.winner is Winner.SECOND
    assert launches(plan) == 3
    assert plan.evidence.verdict == "losing"


# ---- end to end


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    return tmp_path / "samples" / "llvm_cpu.jsonl"


def doubtful():
    """A policy to which every fusion is in doubt."""
    return {"unknown_ratio": 1e6, "unknown_ratio_gemm": 1e6, "measure_budget_s": 20}


def test_what_is_in_doubt_is_measured_and_kept_where_it_is_faster(cache):
    x = ((256, 512), F32)
    mod = module(two_consumers, x)
    unmeasured = tvm_fusion.compile(mod, "llvm", policy=doubtful(), verify=False)
    assert unmeasured.launches == 5
    compiled = tvm_fusion.compile(mod, "llvm", policy=doubtful(), measure=True, verify=True)
    assert compiled.report.verify.passed
    assert min(compiled.report.time_us.fused, compiled.report.time_us.unfused) > 0
    for g in compiled.plan.groups:
        if len(g.ops) > 1:
            assert (g.evidence.kind, g.evidence.verdict) == ("measured", "sure")
            assert g.evidence.high < 1
    kept = read_samples(cache)
    assert not kept.problems
    assert {s.kernel_class for s in kept.launches} == {"pointwise"}
    assert all(s.work and s.us > 0 for s in kept.launches)
    again = tvm_fusion.compile(mod, "llvm", plan=compiled.plan.to_dict(), verify=False)
    assert again.plan == compiled.plan


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("target", "verify", "changes", "budget_s"),
    [
        ("llvm", True, {}, 2),
        ("llvm", True, {"settle_budget_s": 0.5}, 0.5),
        ("llvm", True, {"settle_budget_s": 0}, None),
        ("llvm", True, {"unknown_ratio": 1.0}, None),  # nothing is in doubt
        ("llvm", False, {}, None),
        ("llvm_cpu", True, {}, None),
    ],
)
def test_doubts_are_settled_by_default_on_the_cpu_of_this_machine_where_it_is_checked(
    monkeypatch, target, verify, changes, budget_s
):
    known, budgets = replace(load_profile("llvm_cpu"), host="this CPU"), []
    monkeypatch.setattr("tvm_fusion.config.targets.host_profile", lambda: known)

    def contested(planned, budget):
        budgets.append(budget.seconds)
        return planned

    monkeypatch.setattr(one_function, "contested", contested)
    mod = module(lambda bb, x: op.exp(bb.emit(op.add(x, x))), SMALL)
    policy = {**doubtful(), **changes}
    tvm_fusion.compile(mod, target, policy=policy, verify=verify)
    assert budgets == ([] if budget_s is None else [budget_s])


def test_a_profile_with_a_rate_that_nobody_measured_is_trusted_less(tmp_path):
    text = profile_file("llvm_cpu").read_text()
    measured, guessed = tmp_path / "measured.toml", tmp_path / "guessed.toml"
    measured.write_text(text)
    guessed.write_text(text.replace('source = "measured', 'source = "estimate', 1))
    policy = load_policy()
    plain = caution_of(load_profile(measured), policy)
    assert plain == caution_of(load_profile("llvm_cpu"), policy)
    doubting = caution_of(load_profile(guessed), policy)
    assert doubting.unknown == doubting.unknown_gemm == policy.unmeasured_ratio > plain.unknown


def test_nothing_is_kept_if_the_user_says_so(cache, monkeypatch):
    monkeypatch.setenv(kept_samples.KEEP_VARIABLE, "0")
    mod = module(siblings, SMALL, SMALL, SMALL)
    tvm_fusion.explain(mod, "llvm", policy=doubtful(), measure=True)
    assert not cache.exists()


def test_explain_measures_only_when_asked(cache, monkeypatch):
    mod = module(siblings, SMALL, SMALL, SMALL)
    asked = []
    monkeypatch.setattr(compared_regions, "compared", lambda *a: asked.append(a) or FASTER)
    assert tvm_fusion.explain(mod, "llvm", policy=doubtful()).launches.fused == 2
    assert not asked
    report = tvm_fusion.explain(mod, "llvm", policy=doubtful(), measure=True)
    assert report.launches.fused == 1
    assert "timed 0.71" in report.full()


def test_a_machine_without_the_device_measures_nothing(cache, caplog):
    report = tvm_fusion.explain(module(softmax, SMALL), "h200", measure=True)
    assert report.launches.fused == 1
    if "no cuda device" not in caplog.text:
        assert tvm_fusion.config.resolve_target("cuda")


# ---- plan files


def test_evidence_survives_a_plan_file(tmp_path):
    p = plan_of(module(siblings, BIG, BIG, BIG))
    plan = decide(p.graph, p.hw, load_policy())
    assert plan.groups[0].evidence is not None
    plan.save(tmp_path / "plan.json")
    assert FusionPlan.load(tmp_path / "plan.json") == plan


def test_a_plan_of_version_1_is_read_without_evidence():
    p = plan_of(module(siblings, BIG, BIG, BIG))
    data = decide(p.graph, p.hw, load_policy()).to_dict()
    for g in data["groups"]:
        for key in ("evidence", "analytic_us", "low_us", "high_us"):
            del g[key]
    del data["evidence"]
    plan = FusionPlan.from_dict({**data, "version": 1})
    assert [g.evidence for g in plan.groups] == [None]
    assert plan.version == 2


def test_a_plan_of_a_later_version_is_refused():
    p = plan_of(module(siblings, BIG, BIG, BIG))
    with pytest.raises(PlanError, match="version 2"):
        FusionPlan.from_dict({**p.plan.to_dict(), "version": 3})


def test_broken_evidence_is_a_broken_plan():
    p = plan_of(module(siblings, BIG, BIG, BIG))
    data = p.plan.to_dict()
    data["groups"][0]["evidence"] = {"kind": "model"}
    with pytest.raises(PlanError, match="broken plan"):
        FusionPlan.from_dict(data)


def test_cutting_a_group_drops_its_evidence():
    p = plan_of(module(siblings, BIG, BIG, BIG))
    plan = decide(p.graph, p.hw, load_policy())
    alone = unfused_plan(p.graph, p.hw, load_policy())
    cut = without(p.graph, plan, plan.groups[0], alone, _any_refusal(p))
    assert [g.evidence for g in cut.groups] == [None, None]
    assert cut.refusals == (*plan.refusals, _any_refusal(p))


def _exp_and_two_readers(bb, x):
    e = bb.emit(op.exp(x))
    t = bb.emit(op.tanh(e))
    return [e, bb.emit(op.add(e, t))]


def test_a_plan_is_judged_again_when_a_group_of_it_is_cut():
    planned = planned_function(module(two_times_siblings, *[SMALL] * 6), "llvm", "aggressive")
    fused = [g for g in planned.plan.groups if len(g.ops) > 1]
    before = planned.plan.evidence
    after = planned.cut(fused[0], RefusalCode.BUILD, "on purpose").plan.evidence
    assert after is None if len(fused) == 1 else after.ratio > before.ratio


@pytest.mark.parametrize(
    ("failed", "left"),
    [
        (("lv", "lv1"), {("lv",), ("lv1",), ("lv2",)}),  # lv2's group waits for lv1 and owns lv
        (("lv", "lv2"), {("lv", "lv1"), ("lv",), ("lv2",)}),
    ],
)
def test_a_plan_that_recomputes_can_run_after_a_group_of_it_failed(failed, left):
    mod = module(_exp_and_two_readers, ((64, 64), "float32"))
    data = planned_function(mod, "llvm", "default").plan.to_dict()
    kernel = {"kernel_class": "pointwise"}
    data["groups"] = [
        {"ops": ["lv", "lv1"], "recomputed": ["lv"], **kernel},
        {"ops": ["lv", "lv2"], **kernel},
    ]
    planned = planned_function(mod, "llvm", "default", data)
    group = next(g for g in planned.plan.groups if g.ops == failed)
    cut = planned.cut(group, RefusalCode.BUILD, "on purpose")
    assert {g.ops for g in cut.plan.groups} == left
    assert cut.write().planned.plan == cut.plan


def _any_refusal(p):
    from tvm_fusion.plan.refusal import Refusal

    return Refusal(RefusalCode.BUILD, p.plan.groups[0].ops, "on purpose")
