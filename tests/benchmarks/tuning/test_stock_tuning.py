"""Tuning beside stock MetaSchedule: sessions of both, the module of stock's, and who is ahead."""

import functools
import json
from pathlib import Path

import pytest
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.support import nvcc

from tvm_fusion.config import resolve_target
from tvm_fusion.errors import InputError
from tvm_fusion.frontends import load
from tvm_fusion.runtime.build import cubin_cache

from ..workloads import make
from . import metaschedule, stock_tuning
from .stock_compare import compare, merge, table

HISTORIES = {
    "tvm_fusion": [(1, None), (2, 8.0), (3, 6.0), (4, 5.0)],
    "stock": [(1, 20.0), (2, 12.0), (3, 10.0)],
}


@pytest.fixture(autouse=True)
def one_builder(monkeypatch):
    """MetaSchedule starts a process for each core, which imports torch with TVM: 4.5 s."""
    monkeypatch.setattr(metaschedule, "available_cores", lambda: 1)


@derived_object
class Ran(ms.runner.PyRunnerFuture):
    def __init__(self, seconds, at_once):
        super().__init__()
        self.seconds, self.at_once = seconds, at_once

    def done(self):
        return self.at_once

    def result(self):
        if self.seconds is None:
            return ms.runner.RunnerResult(None, "Traceback\n  no such kernel\n")
        return ms.runner.RunnerResult([self.seconds], None)


@derived_object
class Scripted(ms.runner.PyRunner):
    """Gives times in turn for libraries that it looks at."""

    def __init__(self, seconds, at_once=True):
        super().__init__()
        self.seconds, self.at_once = list(seconds), at_once

    def run(self, runner_inputs):
        assert all(Path(str(i.artifact_path)).stat().st_size > 0 for i in runner_inputs)
        return [Ran(self.seconds.pop(0), self.at_once) for _ in runner_inputs]


def row_of(us, trials=3):
    return {
        "us": us,
        "trials": {"stock": trials, "tvm_fusion": 4},
        "history": HISTORIES,
        "clock_ratio": {"tvm_fusion": 1.0, "stock": 0.7},
        "ratio": None,
        "ahead_after": None,
        "ahead_from": None,
        "equal_trials_ratio": None,
    }


def few():
    """A search over a small population."""
    return ms.search_strategy.EvolutionarySearch(
        population_size=16, init_min_unmeasured=4, genetic_num_iters=1
    )


@pytest.mark.nightly
def test_a_row_of_both_tuners_on_this_cpu(tmp_path, capsys, monkeypatch):
    session = functools.partial(metaschedule.tune, strategy=few())
    monkeypatch.setattr(metaschedule, "tune", session)
    out = tmp_path / "row.json"
    arguments = ["--target", "llvm", "--trials", "3", "--minutes-per-row", "1", "--repeats", "3"]
    arguments += ["--scale", "0.02", "--only", "chain4", "--out", str(out)]
    assert stock_tuning.main(arguments) == 0
    assert "chain4" in capsys.readouterr().out
    result = json.loads(out.read_text())
    (row,) = result["rows"]
    assert row["failures"] == {}
    assert set(row["us"]) == {"tvm_fusion", "untuned", "stock", "tvm"}
    assert all(us > 0 for us in row["us"].values())
    assert max(row["errors"].values()) < 1e-5
    assert row["tuned_functions"]["stock"] == "1 of 1"
    for label in ("stock", "tvm_fusion"):
        trials, times = zip(*row["history"][label], strict=True)
        assert trials == tuple(range(1, row["trials"][label] + 1))
        assert 1 <= len(trials) <= 3
        assert list(times) == sorted(times, reverse=True)
    assert row["ratio"] == pytest.approx(row["us"]["stock"] / row["us"]["tvm_fusion"])


def softmax_module():
    instance = make("softmax", "cpu", "float32", 0.02)
    return load((instance.module, instance.inputs))


# Always: a session that is late.
@pytest.mark.nightly
@pytest.mark.usefixtures("no_torch")
def test_no_batch_begins_after_the_time_limit(tmp_path):
    target, _ = resolve_target("llvm")
    mod, runner = softmax_module(), Scripted([])
    tuning = metaschedule.tune(
        mod, target, tmp_path, trials=64, batch=2, seconds=1e-3, runner=runner, strategy=few()
    )
    assert tuning.cut_short
    assert tuning.history == []
    assert metaschedule.tuned_functions(mod, target, tuning) == (0, 1)


# Always: sessions of this package that are late (`tuning/test_command`).
@pytest.mark.nightly
@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("at_once", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_session_that_is_late_keeps_what_was_measured_last(tmp_path, monkeypatch, at_once):
    """Whether results of a batch are there or waited for when the scheduler looks for a task."""
    batches = iter([False, False, True])
    monkeypatch.setattr(metaschedule._Limit, "is_over", lambda self: _late(self, next(batches)))
    target, _ = resolve_target("llvm")
    mod, runner = softmax_module(), Scripted([None, 3e-4, 2e-4, 4e-4], at_once)
    tuning = metaschedule.tune(mod, target, tmp_path, 64, 2, runner=runner, strategy=few())
    assert tuning.cut_short
    assert [n for n, _ in tuning.history] == [1, 2, 3, 4]
    assert [us for _, us in tuning.history] == [None, *map(pytest.approx, (300.0, 200.0, 200.0))]
    assert dict(tuning.failed) == {"run: no such kernel": 1}
    assert metaschedule.tuned_functions(mod, target, tuning) == (1, 1)


def _late(limit, ended):
    limit.ended = ended
    return ended


@pytest.mark.usefixtures("no_torch")
def test_stock_is_built_for_a_gpu_by_its_own_compiler(tmp_path, monkeypatch):
    cubin_cache.install()
    callback = tvm.get_global_func("tvm_callback_cuda_compile")
    target, _ = resolve_target("nvidia_h200")
    instance = make("transpose_add", "cpu", "float16", 1.0)
    mod = load((instance.module, instance.inputs))
    rules = ms.space_generator.PostOrderApply(
        sch_rules="cuda", postprocs="cuda", mutator_probs="cuda"
    )
    tuning = metaschedule.tune(
        mod, target, tmp_path, 4, 4, runner=Scripted([1e-4] * 4), space=rules, strategy=few()
    )
    assert tuning.trials >= 1
    assert tuning.best_us == pytest.approx(100.0)
    assert metaschedule.tuned_functions(mod, target, tuning) == (1, 1)
    executable = metaschedule.build(mod, target, tuning)
    source = executable.mod.imports[0].imports[0].inspect_source()
    assert "fused_transpose_add_relu_kernel" in source
    monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", "nvcc")
    with target:
        assert len(nvcc.tvm_callback_cuda_compile(source)) > 1000
    assert tvm.get_global_func("tvm_callback_cuda_compile") == callback


def test_who_is_ahead_and_from_when():
    row = row_of({"tvm_fusion": 5.0, "stock": 7.0})
    compare(row)
    assert row["ratio"] == pytest.approx(1.4)
    assert row["ahead_after"] == 3
    assert row["ahead_from"] == 2
    assert row["equal_trials_ratio"] == pytest.approx(7 / 6)
    row = row_of({"tvm_fusion": 5.0, "stock": 4.0})
    compare(row)
    assert row["ahead_after"] is None


def test_without_stock_nothing_is_said():
    row = row_of({"tvm_fusion": 5.0})
    compare(row)
    assert row["ratio"] is None
    assert row["ahead_after"] is None


def test_results_of_several_runs_are_joined(tmp_path):
    def saved(name, trials, row, day=1):
        path = tmp_path / name
        result = {"trials": trials, "command": name, "date": f"2026-01-0{day}", "rows": [row]}
        path.write_text(json.dumps(result))
        return path

    empty = {"failures": {"stock": "no"}, "spent_s": 1.0, "us": {}, "trials": {}}
    empty |= {"ratio": None, "ahead_after": None, "ahead_from": None}
    first, second = saved("a", 8, {"name": "x"} | empty), saved("b", 8, {"name": "y"} | empty, 2)
    result = merge([first, second])
    found = [(row["name"], row["date"]) for row in result["rows"]]
    assert found == [("x", "2026-01-01"), ("y", "2026-01-02")]
    assert (result["date"], result["command"]) == ("2026-01-02", "a; b")
    third = saved("c", 8, {"name": "z"} | empty, 3)
    (tmp_path / "both").write_text(json.dumps(result))
    again = merge([tmp_path / "both", third])
    assert [row["date"] for row in again["rows"]] == [f"2026-01-0{day}" for day in (1, 2, 3)]
    assert "  stock: no" in table(result["rows"])
    with pytest.raises(InputError, match="trials differs"):
        merge([first, saved("d", 9, {"name": "z"} | empty)])
