"""Plans run launch by launch on the CPU; device times and how they are read; what is collected."""

import json

import numpy as np
import pytest
import torch

from tests.support.graphs import module
from tvm_fusion.check.inputs import random_inputs
from tvm_fusion.check.plan_runner import PlanRunner, specs_of
from tvm_fusion.check.reference import run_built
from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.errors import BuildError, InputError, PlanError
from tvm_fusion.flow.planned import Planned
from tvm_fusion.ir.graph import build_graph
from tvm_fusion.plan.search.search import search, unfused_plan
from tvm_fusion.runtime.timing.launch_kernels import LaunchSpec
from tvm_fusion.runtime.timing.plan_timing import PlanTimes, by_launch, runs_of
from tvm_fusion.transform.pipeline import lower

from ..benchmarks.plans import collect, launch_check
from ..benchmarks.plans.graph_launches import Choice, opened, prepare_graph, queued_policy
from ..benchmarks.plans.launch_check import check_launches, difference
from ..benchmarks.plans.measured_graph import measure_graph, open_runner
from ..benchmarks.plans.quality import line, measure_quality, summary
from ..benchmarks.plans.random_graphs import graph_of, module_of
from ..benchmarks.plans.space import PlanSpace

POLICY = load_policy(None)


def runner_of(key: str) -> tuple[PlanRunner, list]:
    target, hw = resolve_target("llvm")
    mod = module_of(key)
    low, graph = graph_of(key, hw)
    return PlanRunner(low, graph, hw, POLICY, target), random_inputs(mod["main"])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", [0, 3, 5, 11])
def test_plans_give_the_numbers_of_the_compiled_module(seed):
    key = f"random-small:{seed}"
    runner, inputs = runner_of(key)
    target, hw = resolve_target("llvm")
    planned = Planned.of(module_of(key), target, hw, POLICY)
    wanted = run_built(planned.build().built, inputs)
    given = runner.run(planned.plan, inputs)
    for x, y in zip(given, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", [2, 7])
def test_every_plan_of_a_graph_gives_the_numbers_of_the_unfused_one(seed):
    runner, inputs = runner_of(f"random-small:{seed}:4")
    space = PlanSpace(runner.graph, runner.hw, runner.policy)
    wanted = runner.run(space.unfused(), inputs)
    plans = space.plans(12)
    assert runner.build(plans) == {}
    for plan in plans:
        for x, y in zip(runner.run(plan), wanted, strict=True):
            x, y = (torch.from_numpy(np.ascontiguousarray(a)) for a in map(as_float32, (x, y)))
            assert difference(x.reshape(-1), y.reshape(-1), 3e-2) is None


def as_float32(x: np.ndarray) -> np.ndarray:
    return x.astype("float32")


def test_plans_share_their_kernels():
    runner, _ = runner_of("random-small:1")
    unfused = unfused_plan(runner.graph, runner.hw, POLICY)
    runner.build([unfused])
    first = {spec: runner.kernel(spec) for spec in runner.specs(unfused)}
    runner.build([unfused, search(runner.graph, runner.hw, POLICY)])
    assert all(runner.kernel(spec) is kernel for spec, kernel in first.items())


def test_views_and_constants_are_found_in_memory():
    from tvm import relax
    from tvm.relax import op

    table = np.arange(12, dtype="float32").reshape(3, 4)

    def emit(bb, x):
        flat = bb.emit(op.reshape(bb.emit(op.exp(x)), (12,)))
        turned = bb.emit(op.reshape(flat, (3, 4)))
        whole = bb.emit(op.matmul(turned, relax.const(table.T.copy())))
        parts = bb.emit(op.split(whole, 3, axis=1))
        return bb.emit(op.negative(bb.emit(parts[1]))), bb.emit(op.tanh(flat))

    target, hw = resolve_target("llvm")
    low = lower(module(emit, ((4, 3), "float32")), target, hw=hw)
    graph = build_graph(low)
    runner = PlanRunner(low, graph, hw, POLICY, target)
    x = np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3)
    product = np.exp(x).reshape(3, 4) @ table.T
    for plan in (unfused_plan(graph, hw, POLICY), search(graph, hw, POLICY)):
        minus, curved = runner.run(plan, [x])
        np.testing.assert_allclose(minus, -product[:, 1:2], rtol=1e-5)
        np.testing.assert_allclose(curved, np.tanh(np.exp(x).reshape(12)), rtol=1e-5)


def test_a_number_is_taken_as_a_tensor_without_axes():
    from tvm.relax import op

    target, hw = resolve_target("llvm")
    mod = module(lambda bb, x, y: op.add(x, y), ((4, 3), "float32"), ((), "float32"))
    low = lower(mod, target, hw=hw)
    graph = build_graph(low)
    runner = PlanRunner(low, graph, hw, POLICY, target)
    x, y = np.ones((4, 3), "float32"), np.array(2, "float32")
    (found,) = runner.run(unfused_plan(graph, hw, POLICY), [x, y])
    np.testing.assert_array_equal(found, x + y)


def test_times_have_a_number_for_every_launch_and_plans_are_interleaved():
    runner, inputs = runner_of("random-small:2")
    plans = [unfused_plan(runner.graph, runner.hw, POLICY), search(runner.graph, runner.hw, POLICY)]
    runner.build(plans)
    runner.set_inputs(inputs)
    found = runner.time(plans, repeats=4)
    for plan, times in zip(plans, found, strict=True):
        assert len(times.launches_us) == len(specs_of(plan, runner.graph))
        assert len(times.spans_us) == 4
        assert times.sum_us > 0
        assert times.clock == "wall"
        assert max(times.launches_us) <= max(times.spans_us)


def test_a_launch_that_cannot_be_written_is_named_and_its_plan_refused():
    runner, inputs = runner_of("random-small:1")
    spec = runner.specs(unfused_plan(runner.graph, runner.hw, POLICY))[0]
    wrong = LaunchSpec(spec.ops, (spec.stores[0] + 1,), spec.kernel_class)
    assert "does not write these" in runner.build([(wrong,)])[wrong]
    assert not runner.can_run((wrong,))
    with pytest.raises(BuildError, match="no kernel"):
        runner.run((wrong,), inputs)


def test_a_plan_without_launches_has_no_time():
    runner, _ = runner_of("random-small:1")
    with pytest.raises(PlanError):
        runner.time([()])


# ---- what CUPTI reports
def test_kernels_between_those_of_others_are_one_run_of_a_plan():
    events = [("spin", 0, 5), ("max", 5, 9), ("launch_a", 10, 12), ("launch_b", 13, 14)]
    events += [("spin", 20, 25), ("launch_a", 30, 32)]
    assert runs_of(events) == [[(10, 12), (13, 14)], [(30, 32)]]


def test_the_kernels_of_a_launch_are_one_interval():
    run = [(10, 12), (13, 14), (15, 19)]
    assert by_launch(run, [1, 2]) == [(10, 12), (13, 19)]


def test_the_span_holds_the_gaps_and_the_sum_does_not():
    samples = [[(0.0, 2.0), (3.0, 4.0)], [(10.0, 13.0), (14.0, 15.0)], [(0.0, 1.0), (2.0, 3.0)]]
    times = PlanTimes.of(samples, "kernel")
    assert times.span_us == 4.0
    assert times.sum_us == 3.0
    assert times.launches_us == (2.0, 1.0)
    assert times.spans_us == (4.0, 5.0, 3.0)


# ---- what is collected
CHOICE = Choice("llvm", launches=8, plans=6)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare_graph("random-small:4", CHOICE, tmp_path_factory.mktemp("kernels"))


def test_lines_of_a_graph_name_its_launches_and_plans(prepared):
    found = measure_graph(prepared, "llvm", repeats=2)
    assert found.problems == []
    launches = [x for x in found.lines if "us" in x]
    plans = [x for x in found.lines if "groups" in x]
    graph = opened(prepared.key, "llvm")[1]
    ops, tensors = {o.name for o in graph.ops}, {t.name for t in graph.tensors}
    assert len(plans) == len(prepared.plans)
    for x in launches:
        assert set(x["ops"]) <= ops
        assert set(x["stores"]) <= tensors
        assert x["us"] > 0
        assert x["cold_us"] > 0
    assert {tuple(map(tuple, p["groups"])) for p in plans} > {
        tuple((o.name,) for o in graph.ops if o.kind.value == "call_tir")
    }
    assert json.loads(json.dumps(found.lines)) == found.lines


def test_a_launch_with_wrong_numbers_is_found_and_its_plans_are_left_out(prepared):
    runner = open_runner(prepared, "llvm")
    unfused = set(prepared.plans[0].specs)
    fused = next(s for p in prepared.plans for s in p.specs if s not in unfused)
    right = runner._calls[fused]
    runner._calls[fused] = lambda: None  # leaves the poison
    wrong = check_launches(runner, prepared, lambda text: None)
    assert list(wrong) == [fused]
    assert "nan" in wrong[fused]
    runner._calls[fused] = right
    assert check_launches(runner, prepared, lambda text: None) == {}


def test_what_only_rounds_less_is_not_wrong(prepared, monkeypatch):
    runner = open_runner(prepared, "llvm")
    monkeypatch.setattr(launch_check, "TOLERANCE", dict.fromkeys(launch_check.TOLERANCE, 1e-5))
    found = open_runner(prepared, "llvm")
    assert check_launches(found, prepared, lambda text: None) == {}
    monkeypatch.setattr(launch_check, "_is_rounding", lambda runner, spec: False)
    assert check_launches(runner, prepared, lambda text: None)


def test_a_difference_is_judged_by_the_largest_value():
    wanted = torch.tensor([1.0, -8.0, float("inf")])
    assert difference(wanted + 0.01, wanted, 2e-3) is None
    assert "1 elements" in difference(wanted + torch.tensor([0.0, 0.1, 0.0]), wanted, 2e-3).why
    assert difference(torch.tensor([1.0, float("nan"), 0.0]), wanted, 2e-3).missing == 1
    assert "50.00%" in difference(torch.tensor([1, 3]), torch.tensor([1, 2]), 0.0).why
    assert difference(torch.arange(9), torch.arange(9), 0.0) is None


def test_a_collection_can_be_resumed(tmp_path, capsys):
    out = tmp_path / "kernels.jsonl"
    common = ["--target", "llvm", "--launches", "6", "--plans", "4", "--repeats", "2"]
    assert collect.main([*common, "--keys", "random-small:0", "--out", str(out)]) == 0
    first = out.read_text()
    out.write_text(first + '{"graph": "random-small:1", "op')  # killed in the middle of a line
    capsys.readouterr()
    arguments = [*common, "--keys", "random-small:0-1", "--out", str(out), "--resume"]
    assert collect.main(arguments) == 0
    assert "random-small:0:" not in capsys.readouterr().out
    lines = [json.loads(x) for x in out.read_text().splitlines()]
    assert lines[0]["device"] == "llvm_cpu"
    assert {x["graph"] for x in lines[1:]} == {"random-small:0", "random-small:1"}
    assert out.read_text().startswith(first)


def test_a_file_of_another_device_is_not_gone_on_with(tmp_path):
    output = collect.Output(tmp_path / "kernels.jsonl")
    header = {"version": 1, "device": "nvidia_h200"}
    output.begin(header, False)
    with pytest.raises(InputError, match="device"):
        output.begin(header | {"device": "llvm_cpu"}, True)


def test_quality_compares_chosen_best_and_unfused(tmp_path):
    choice = Choice("llvm", launches=20, plans=20, everything=True)
    ready = prepare_graph("random-small:9", choice, tmp_path)
    assert ready.complete
    assert ready.plans[ready.chosen].specs == specs_of(
        search(opened(ready.key, "llvm")[1], resolve_target("llvm")[1], queued_policy()),
        opened(ready.key, "llvm")[1],
    )
    row = measure_quality(ready, "llvm", (2, 5))
    assert row["failures"] == []
    assert row["plans"] == len(ready.plans)
    assert row["best_us"] <= min(row["chosen_us"], row["unfused_us"])
    assert row["graph"] in line(row)
    assert summary([row, {"graph": "other", "failures": ["no"]}])["measured"] == 1
