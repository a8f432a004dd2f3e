"""Which rewrites of a graph a plan is made with, and plans that name some."""

from dataclasses import replace

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import PlanError
from tvm_fusion.flow.planned import Planned
from tvm_fusion.plan.plan import FusionPlan
from tvm_fusion.transform.pipeline import lower, open_composites, rewrite
from tvm_fusion.transform.rewrites.rewrites import REWRITES, candidates

from ..support.graphs import module

H200, CPU = load_profile("nvidia_h200"), load_profile("llvm_cpu")
DEFAULT, EXACT = load_policy("default"), load_policy({"rounding": "exact"})
ROWS, WIDTH = 2048, 1024


def norm_and_product(bb, x):
    """rms_norm(x) W with constants of its own."""
    rng = np.random.default_rng(0)
    gain = relax.const(rng.uniform(0.5, 1.5, WIDTH).astype("float16"))
    matrix = relax.const(rng.standard_normal((WIDTH, WIDTH)).astype("float16"))
    return op.matmul(bb.emit(op.nn.rms_norm(x, gain, axes=[-1])), matrix)


def planned(policy=DEFAULT, hw=H200, plan=None) -> Planned:
    mod = module(norm_and_product, ((ROWS, WIDTH), "float16"))
    return Planned.of(mod, hw.to_target(), hw, policy, plan)


def test_a_rewrite_is_kept_where_the_predicted_time_falls():
    found = planned()
    assert found.plan.rewrites == ("fold_factors",)
    plain = planned(plan=None, policy=EXACT)
    assert plain.plan.rewrites == ()
    assert found.plan.predicted_us < plain.plan.predicted_us


def test_a_plan_with_rewrites_is_read_back_and_runs_the_same_graph():
    found = planned()
    again = planned(plan=found.plan.to_dict())
    assert again.plan == found.plan
    assert again.graph.fingerprint() == found.graph.fingerprint()
    assert FusionPlan.from_dict(found.plan.to_dict()).rewrites == ("fold_factors",)


def test_a_plan_with_a_rewrite_that_does_not_exist_is_refused_with_the_names_that_do():
    plan = replace(planned().plan, rewrites=("fold_everything",))
    with pytest.raises(PlanError, match=r"fold_everything.*fold_factors"):
        planned(plan=plan)


def test_a_plan_that_rounds_elsewhere_is_refused_where_rounding_has_to_be_exact():
    plan = planned().plan
    with pytest.raises(PlanError, match=r"fold_factors.*exact"):
        planned(policy=EXACT, plan=plan)


def test_a_cpu_folds_factors_only_and_exact_rounding_moves_no_rounding():
    assert candidates(CPU, DEFAULT) == ("fold_factors",)
    assert candidates(CPU, EXACT) == ()
    exact = set(candidates(H200, EXACT))
    assert "lean_weights" in exact
    assert not exact & {"fold_factors", "partial_rows"}


@pytest.mark.parametrize("tf32", [False, True])
def test_weights_are_stored_for_tensor_cores_that_the_policy_allows(tf32):
    names = candidates(H200, replace(DEFAULT, allow_tf32=tf32))
    assert ("lean_weights_tf32" in names) is tf32
    assert ("lean_weights" in names) is not tf32


@pytest.mark.parametrize("name", REWRITES)
def test_a_graph_without_products_is_returned_as_it_is(name):
    mod = module(lambda bb, x: op.exp(x), ((8, 16), "float16"))
    opened = open_composites(mod, H200.to_target(), hw=H200)
    assert rewrite(opened, name, H200.to_target(), H200).same_as(opened)


def test_lowering_with_rewrites_does_not_depend_on_the_order_of_their_names():
    mod = module(norm_and_product, ((ROWS, WIDTH), "float16"))
    names = ["lean_weights", "fold_factors"]
    one, other = (lower(mod, H200.to_target(), hw=H200, rewrites=n) for n in (names, names[::-1]))
    assert one.script() == other.script()
