"""The CPU of this machine is measured at first use, kept, and left alone where something is wrong
with that.
"""

import json
import math
from types import SimpleNamespace

import pytest
from tvm.relax import op

import tvm_fusion
from tests.support.graphs import module
from tvm_fusion.calibrate.cpu import host_profile as host
from tvm_fusion.calibrate.cpu import host_profile as waiting
from tvm_fusion.calibrate.cpu import launch as cpu_launch
from tvm_fusion.calibrate.cpu import quick as cpu_quick
from tvm_fusion.config import load_profile, resolve_target
from tvm_fusion.config.hardware import HOST_NUMBERS
from tvm_fusion.host.threads import thread_count, use_calibrated_threads
from tvm_fusion.plan.plan import FusionPlan

SHIPPED = load_profile("llvm_cpu")
RATES = {"special_per_s": 5e9, "fma_per_s_f32": 3e11, "launch_us": 2.5}


def trial(values, waiting=0.0, seconds=0.5):
    return host._Trial(dict(values), seconds, waiting)


@pytest.fixture
def first_use(tmp_path, monkeypatch):
    """An empty cache, and rates that need no measurement; the number of times they were taken."""
    taken = []

    def measured(base, deadline):
        taken.append(base.name)
        return trial(RATES)

    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    monkeypatch.setenv(host.VARIABLE, "1")
    monkeypatch.setattr(host, "_measured", measured)
    host._host_profile.cache_clear()
    yield taken
    host._host_profile.cache_clear()
    use_calibrated_threads(None)


def again():
    """The profile as another process finds it."""
    host._host_profile.cache_clear()
    return host.host_profile()


@pytest.mark.parametrize("target", ["llvm", "cpu", "LLVM", None])
def test_this_cpu_is_measured_once(first_use, target, monkeypatch):
    monkeypatch.setattr("tvm_fusion.config.targets.present_gpu_profile", lambda: None)
    found = resolve_target(target)[1]
    assert found.special_per_s == RATES["special_per_s"]
    assert found.launch_us == found.graph_launch_us == found.queued_launch_us == 2.5
    assert found.hbm_bytes_per_s == SHIPPED.hbm_bytes_per_s
    assert found.num_sms == thread_count()
    assert again() == found
    assert first_use == ["llvm_cpu"]


def test_the_shipped_profile_has_a_name_and_its_own_numbers(first_use):
    assert resolve_target("llvm_cpu")[1] == SHIPPED
    assert not first_use


def test_a_switch_leaves_the_shipped_profile(first_use, monkeypatch):
    monkeypatch.setenv(host.VARIABLE, "0")
    assert again() == SHIPPED
    assert not first_use


def test_what_is_measured_beside_other_programs_is_neither_used_nor_kept(
    first_use, monkeypatch, caplog
):
    trials = iter([trial({"special_per_s": 1e8}, waiting=0.2), trial(RATES)])
    monkeypatch.setattr(host, "_measured", lambda base, deadline: next(trials))
    assert again() == SHIPPED
    assert "other programs took its cores for 20% of the time" in caplog.text
    assert not host.calibration_file().exists()
    assert again().special_per_s == RATES["special_per_s"]
    assert host.calibration_file().exists()


@pytest.fixture
def steps(monkeypatch):
    """Two steps of half a second, whose trials are given; the steps that were run."""
    now, taken, trials = 0.0, [], []

    def timed(measure, bench):
        nonlocal now
        now += 0.5
        taken.append(measure)
        return trials.pop(0)

    monkeypatch.setattr(cpu_quick, "STEPS", ("first", "second"))
    monkeypatch.setattr(host, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(host, "_trial", timed)
    return trials, taken


def test_a_step_that_others_disturb_is_repeated_while_there_is_time(steps):
    trials, taken = steps
    trials += [trial({"a": 1}, 0.3), trial({"a": 2}, 0.01), *[trial({"b": 3}, 0.2)] * 9]
    found = host._measured(SHIPPED, 3.0)
    assert found.values == {"a": 2, "b": 3}
    assert found.waiting == pytest.approx((0.01 + 0.2) / 2)
    assert taken == ["first"] * 2 + ["second"] * 4


def test_what_others_disturb_beyond_hope_ends_with_its_step(steps):
    trials, taken = steps
    trials += [trial({"a": 1}, 0.4)] * 9
    with pytest.raises(host.DisturbedError, match="40%"):
        host._measured(SHIPPED, 3.0)
    assert taken == ["first"] * 3


def test_time_on_cores_is_that_of_all_threads(tmp_path, monkeypatch):
    threads = {"1": "5000000000 2000000000 7", "2": "1000000000 500000000 1", "3": ""}
    for name, text in threads.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text)
    monkeypatch.setattr(waiting, "TASKS", tmp_path)
    now = waiting.core_time()
    assert now == pytest.approx((6.0, 2.5))
    assert now.waiting_since(waiting.CoreTime(5.0, 2.0)) == pytest.approx(0.5 / 1.5)
    assert now.waiting_since(waiting.CoreTime(7.0, 3.0)) == 0.0


def test_where_the_system_tells_no_waiting_it_is_guessed_from_preemptions(tmp_path, monkeypatch):
    used = SimpleNamespace(ru_utime=3.0, ru_stime=1.0, ru_nivcsw=100)
    monkeypatch.setattr(waiting, "TASKS", tmp_path)
    monkeypatch.setattr("resource.getrusage", lambda who: used)
    assert waiting.core_time() == pytest.approx((4.0, 100 * waiting.SLICE_S))


def test_a_plan_says_what_was_measured_and_reads_back(first_use):
    mod = module(lambda bb, x: op.exp(bb.emit(op.add(x, x))), ((64, 64), "float32"))
    plan = tvm_fusion.explain(mod, "llvm").plan
    assert plan["measured"]["special_per_s"] == RATES["special_per_s"]
    assert set(plan["measured"]) == {"host", *HOST_NUMBERS}
    assert FusionPlan.from_dict(plan).measured == plan["measured"]
    assert tvm_fusion.explain(mod, "llvm_cpu").plan["measured"] == {}


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[1]",
        '{"cpu": "x"}',
        '{"cpu": "x", "threads": 2, "date": "", "values": {"special_per_s": 0}}',
        '{"cpu": "x", "threads": 2, "date": "", "values": {"special_per_s": NaN}}',
        '{"cpu": "x", "threads": 2, "date": "", "values": {"num_sms": "two"}}',
        '{"cpu": "x", "threads": 2, "date": "", "values": []}',
        '{"cpu": "x", "threads": 0, "date": "", "values": {}}',
        '{"cpu": "x", "threads": 2, "date": "", "values": {"l2_bytes": 5}}',
    ],
)
def test_of_a_damaged_calibration_a_message_tells_the_file(first_use, damage, caplog):
    again()
    file = host.calibration_file()
    file.write_text(damage)
    assert again() == SHIPPED
    assert str(file) in caplog.text
    assert "shipped profile" in caplog.text
    assert file.read_text() == damage


def test_an_interrupted_calibration_keeps_nothing_and_says_so(first_use, monkeypatch, caplog):
    def interrupted(base, deadline):
        raise KeyboardInterrupt

    monkeypatch.setattr(host, "_measured", interrupted)
    assert again() == SHIPPED
    assert "interrupted" in caplog.text
    assert not host.calibration_file().exists()


def test_a_folder_that_cannot_be_written_costs_the_file_only(first_use, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path / "file"))
    assert again().special_per_s == RATES["special_per_s"]


def test_a_benchmark_that_fails_and_one_out_of_time_leave_the_shipped_value(monkeypatch):
    def broken(bench):
        raise RuntimeError("no")

    now = 0.0

    def slow(bench):
        nonlocal now
        now += 5.0
        return {"fma_per_s_f32": 2e11}

    monkeypatch.setattr(cpu_quick, "STEPS", (broken, slow, slow))
    monkeypatch.setattr(host, "time", SimpleNamespace(perf_counter=lambda: now))
    assert host._measured(SHIPPED, 1.0).values == {"fma_per_s_f32": 2e11}
    assert host._measured(SHIPPED, 1.0).values == {}


@pytest.mark.parametrize(("faster", "threads"), [(1.01, 2), (1.4, 4)])
def test_hyper_threads_are_used_where_they_are_clearly_faster(monkeypatch, faster, threads):
    found = ({"special_per_s": 1e9, "launch_us": 2.0}, {"special_per_s": faster * 1e9})
    trials = iter(map(trial, found))
    set_to = []
    monkeypatch.setattr(host, "_measured", lambda base, deadline: next(trials))
    monkeypatch.setattr(host, "asked_threads", lambda: None)
    monkeypatch.setattr(host, "thread_count", lambda: 2)
    monkeypatch.setattr(host, "available_cores", lambda: 4)
    monkeypatch.setattr(host, "use_calibrated_threads", set_to.append)
    assert host.calibrated(SHIPPED).threads == threads
    assert set_to == ([4] if threads == 4 else [4, None])


def test_each_rate_can_be_measured(monkeypatch):
    monkeypatch.setattr(host, "core_time", lambda: waiting.CoreTime(1.0, 0.0))
    found = host._measured(SHIPPED, math.inf).values
    assert set(found) <= set(HOST_NUMBERS)
    assert {"fma_per_s_f32", "hbm_bytes_per_s", "l2_bytes_per_s", "kernel_gap_us"} <= set(found)
    assert all(value > 0 for value in found.values())


def test_a_measured_calibration_is_what_its_file_says(first_use):
    again()
    data = json.loads(host.calibration_file().read_text())
    assert data["values"] == RATES
    assert host.Calibration.from_dict(data).threads == thread_count()


@pytest.mark.parametrize(("woken", "added"), [(1.0, {"launch_us": 0.8}), (0.1, {})])
def test_both_calibrations_mean_the_same_by_a_launch(monkeypatch, woken, added):
    """What waking the cores adds, left out where it is below the noise."""
    bench = SimpleNamespace(target=None, cores=2)
    monkeypatch.setattr(cpu_launch, "build", lambda chain, target: None)
    monkeypatch.setattr(cpu_launch.CompiledModule, "of", built_of)
    seconds = [32 * 0.2e-6, 32 * woken * 1e-6]
    bench.times = lambda calls: dict(zip(calls, seconds, strict=True))
    times = iter(seconds)
    monkeypatch.setattr(cpu_quick, "quick_s", lambda call: next(times))
    expected = {"kernel_gap_us": 0.2, **added}
    assert cpu_quick.launches(bench) == pytest.approx(expected)
    found = {m.field: m.value for m in cpu_launch.measure(bench).values}
    assert {k: v for k, v in found.items() if k in expected} == pytest.approx(expected)
    assert found.keys() - expected.keys() == (
        {*cpu_launch.WAKES} - {"launch_us"} if added else set()
    )


def built_of(built):
    return SimpleNamespace(bind=lambda *inputs: None)
