"""A module that was planned before is not planned again, and nothing but the same one is."""

from dataclasses import replace

import pytest
from tvm import relax

from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.flow import plan_cache, variants
from tvm_fusion.flow import plan_cache as cache_key
from tvm_fusion.flow.variants import best_plan
from tvm_fusion.kernels import registry
from tvm_fusion.kernels.pointwise.kernel_class import Pointwise

TARGET, H200 = resolve_target("nvidia_h200")
POLICY = load_policy({"probe": "off"})


def module(name: str = "y", factor: float = 2.0, rows: int = 64):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((rows, 256), "float16"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.multiply(x, relax.const(factor, "float16")), name_hint=name)
            z = builder.emit_output(relax.op.nn.softmax(relax.op.exp(y)))
        builder.emit_func_output(z)
    return builder.get()


@pytest.fixture
def searches(tmp_path, monkeypatch):
    """Counts the searches; plans are kept in a folder of the test's own."""
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    monkeypatch.setenv(plan_cache.VARIABLE, "1")
    found, search = [], variants.searched_plan

    def counted(*args):
        found.append(args)
        return search(*args)

    monkeypatch.setattr(variants, "searched_plan", counted)
    return found


def plan_of(mod, policy=POLICY, hw=H200) -> str:
    _, graph, plan = best_plan(mod, TARGET, hw, policy)
    plan.check(graph)
    return plan.to_json()


def test_the_second_time_the_plan_is_read(searches):
    low, graph, plan = best_plan(module(), TARGET, H200, POLICY)
    again_low, again_graph, again = best_plan(module(), TARGET, H200, POLICY)
    assert len(searches) == 1
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert again_graph.fingerprint() == graph.fingerprint()
    assert again_low.script() == low.script()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("other", "policy", "hw"),
    [
        (module(factor=3.0), POLICY, H200),
        (module(rows=65), POLICY, H200),
        (module(name="other"), POLICY, H200),
        (module(), replace(POLICY, max_group_ops=2), H200),
        (module(), POLICY, replace(H200, num_sms=H200.num_sms - 1)),
    ],
    ids=["constant", "shape", "name", "policy", "device"],
)
def test_what_differs_is_planned(searches, other, policy, hw):
    plan_of(module())
    planned = plan_of(other, policy, hw)
    assert len(searches) == 2
    plan_of(other, policy, hw)
    assert len(searches) == 2
    assert plan_of(other, policy, hw) == planned


@pytest.mark.parametrize("text", ["", "{}", '{"plan": {}, "names": []}', "[1]", "\x00"])
def test_a_damaged_plan_is_made_again(searches, text, tmp_path):
    first = plan_of(module())
    (file,) = (tmp_path / "plans").glob("*.json")
    whole = file.read_text()
    file.write_text(text)
    assert plan_of(module()) == first
    assert len(searches) == 2
    assert file.read_text() == whole


def test_a_plan_of_other_names_is_not_taken(searches, tmp_path):
    plan_of(module())
    (file,) = (tmp_path / "plans").glob("*.json")
    file.write_text(file.read_text().replace('"names": ["main"', '"names": ["other"'))
    plan_of(module())
    assert len(searches) == 2


def test_it_can_be_switched_off(searches, tmp_path, monkeypatch):
    monkeypatch.setenv(plan_cache.VARIABLE, "0")
    assert plan_of(module()) == plan_of(module())
    assert len(searches) == 2
    assert not (tmp_path / "plans").exists()


def test_nothing_is_kept_with_a_kernel_class_of_the_users(searches, tmp_path):
    class Mine(Pointwise):
        name = "mine"

    registry.register(Mine())
    try:
        plan_of(module())
        plan_of(module())
    finally:
        registry.unregister("mine")
    assert len(searches) == 2
    assert not (tmp_path / "plans").exists()


def test_a_changed_package_plans_again(searches, monkeypatch):
    plan_of(module())
    monkeypatch.setattr(cache_key, "package_state", lambda: "another")
    plan_of(module())
    assert len(searches) == 2


def test_a_folder_that_cannot_be_written_is_left_alone(searches, tmp_path):
    (tmp_path / "plans").write_text("a file in its place")
    assert plan_of(module()) == plan_of(module())
    assert len(searches) == 2
