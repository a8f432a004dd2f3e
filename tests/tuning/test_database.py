"""Trials go into a file, and come back as they are; MetaSchedule sees those with a time."""

import json
import math

import pytest
import tvm
from tvm.s_tir.meta_schedule.database import JSONDatabase, Workload
from tvm.script import tirx as T

from tvm_fusion.errors import InputError
from tvm_fusion.tuning.database import Database, Trial, export, short_key, workload_key
from tvm_fusion.tuning.database.store import TRIALS

from ..support.counting import calls_of
from ..support.tune_database import (
    DEVICE,
    TARGET,
    WORKLOADS,
    content,
    expected,
    exported,
    failed,
    fill,
    in_child,
    ok,
    trials_of_all,
    workload,
)

A, B, _ = WORKLOADS
OTHER = tvm.target.Target({"kind": "llvm", "num-cores": 4})


@pytest.fixture
def database(tmp_path):
    """An empty one."""
    return Database(tmp_path / "D", DEVICE, target=TARGET)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "config"}, "none of class, trace"),
        ({"status": "slow"}, "none of ok, build"),
        ({"us": math.inf}, "not a finite number"),
        ({"us": math.nan}, "not a finite number"),
        ({"us": -1.0}, "not between 0"),
        ({"us": 1e16}, "not between 0"),
        ({"us": True}, "not a finite number"),
        ({"us": 10**400}, "not a finite number"),
        ({"us": None}, "has a median and samples"),
        ({"samples_us": ()}, "has a median and samples"),
        ({"samples_us": (1.0, math.inf)}, "not a finite number"),
        ({"samples_us": "12"}, "no sequence"),
        ({"status": "wrong"}, "has no times"),
        ({"error": math.nan}, "not a finite number"),
        ({"error": -0.5}, "negative"),
        ({"spread": -0.5}, "negative"),
        ({"predicted_us": 0.0}, "not greater than 0"),
        ({"text": ""}, "1 to 4096 ASCII"),
        ({"text": 'Config(form="reg")'}, "without quotes"),
        ({"text": "Config(form=\\reg)"}, "without quotes"),
        ({"text": "Config(\n)"}, "1 to 4096 ASCII"),
        ({"kind": "trace", "text": "default"}, "no JSON"),
        ({"kind": "trace", "text": "[[], []]"}, "not compact"),
        ({"kind": "trace", "text": "[1,[]]"}, "no trace"),
        ({"why": None}, "no text"),
        ({"date": "31.1.2026"}, "no ISO day"),
        ({"date": "2026-02-31"}, "day"),
    ],
)
def test_a_trial_refuses_what_no_trial_has(changes, message):
    fields = {"kind": "class", "text": "default", "status": "ok", "us": 1.0, "samples_us": (1.0,)}
    with pytest.raises(ValueError, match=message):
        Trial(**(fields | changes))
    with pytest.raises(ValueError, match="missing or not of a trial"):
        Trial.from_dict(fields)


def test_the_key_of_a_workload_is_the_hash_that_metaschedule_writes():
    for func in WORKLOADS:
        mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        assert workload_key(func) == Workload(mod).as_json()[0]
        assert int(short_key(workload_key(func)), 16) == int(workload_key(func))
    assert workload_key(A) == workload_key(workload(16)) != workload_key(B)
    assert workload_key(A) != workload_key(A.with_attr("tvm_fusion.rounding", "exact"))


def test_a_trial_is_one_line_that_is_appended_once_and_comes_back_as_it_is(database):
    before = b""
    for number, (func, trial) in enumerate(trials_of_all()):
        database.add(func, TARGET, trial)
        now = (database.path / TRIALS).read_bytes()
        assert now.startswith(before)
        new = [json.loads(line) for line in now[len(before) :].splitlines()]
        assert new[-1]["line"] == "trial"
        assert {name: new[-1][name] for name in trial.as_dict()} == trial.as_dict()
        assert len(new) == (3, 1, 2, 1, 1, 2, 1)[number]  # the device first, new workloads
        before = now
    fill(database.path)
    assert (database.path / TRIALS).read_bytes() == before
    again = Database(database.path, DEVICE)
    assert (content(again), again.problems) == (expected(), ())
    assert list(map(workload_key, again.workloads())) == list(map(workload_key, WORKLOADS))
    assert str(again.workloads()[1].attrs["tvm_fusion.class"]) == "pointwise"
    assert [trial.text for trial in again.trials(A)] == [f"Config(tile={n})" for n in (1, 2, 4)]
    assert again.trials(workload_key(A)) == again.trials(A)
    assert again.trials(workload(128)) == ()


def test_metaschedule_finds_the_text_of_a_class_choice_on_the_root_block(database, tmp_path):
    text = "RowConfig(form=reg, threads=[32, 8], tail={a: -1/2})"
    database.add(A, TARGET, ok(text, 2.0))
    export(database.path, tmp_path / "out")
    assert in_child(_annotation, str(tmp_path / "out")) == text


def _annotation(folder):
    mod = tvm.IRModule({"main": A.with_attr("global_symbol", "main")})
    found = JSONDatabase(work_dir=folder).query_ir_module(mod, TARGET, "main")
    return str(found["main"].body.block.annotations["tvm_fusion.config"])


@pytest.mark.parametrize(
    ("statuses", "kept"),
    [
        (["ok", "crash"], 0),
        (["timeout", "ok"], 1),
        (["ok", "ok"], 1),
        (["ok", "wrong", "crash"], 1),
        (["wrong", "ok"], 1),
        (["crash", "timeout"], 1),
        (["ok", "unchecked"], 0),
        (["unchecked", "ok", "unchecked"], 1),
        (["wrong", "unchecked"], 0),
        (["unchecked", "crash"], 1),
        (["crash", "unchecked"], 1),
    ],
)
def test_of_several_trials_of_a_choice_the_latest_that_speaks_of_the_kernel_counts(
    database, statuses, kept
):
    error = {"ok": 0.0, "unchecked": None}
    trials = [
        ok("A", 2.0 + n, error=error[s]) if s in error else failed("A", s)
        for n, s in enumerate(statuses)
    ]
    for trial in trials:
        database.add(A, TARGET, trial)
    assert len(database) == len(trials)
    for found in (database, Database(database.path, DEVICE, read_only=True)):
        assert found.trials(A) == (trials[kept],)
        assert found.counted() == [(workload_key(A), trials[kept])]


def test_a_workload_of_symbolic_shape_has_trials_too(database):
    @T.prim_func(s_tir=True)
    def main(a: T.handle, b: T.handle):
        n = T.int64()
        A = T.match_buffer(a, (n, 8), "float32")
        B = T.match_buffer(b, (n, 8), "float32")
        for i, j in T.grid(n, 8):
            with T.sblock("add"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj] + T.float32(1.5)

    database.add(main, TARGET, ok("default", 2.0))
    assert Database(database.path, DEVICE).trials(main)[0].us == 2.0
    assert len(exported(database)) == 1


def test_a_trial_that_does_not_belong_here_is_refused(database):
    database.add(A, TARGET, ok("default", 2.0))
    with pytest.raises(InputError, match=r"is of the target .*, not of"):
        database.add(A, OTHER, ok("default", 2.0))
    bare = tvm.tirx.PrimFunc([], tvm.tirx.Evaluate(0))
    with pytest.raises(InputError, match="with a root block"):
        database.add(bare, TARGET, failed("default"))
    assert len(Database(database.path, DEVICE)) == len(database) == 1


def test_a_folder_of_another_device_or_target_is_not_opened(folder):
    with pytest.raises(InputError, match=r"is of test_cpu.*, not of other"):
        Database(folder, "other")
    with pytest.raises(InputError, match="is of the target"):
        Database(folder, DEVICE, target=OTHER)
    with pytest.raises(InputError, match="is not a folder"):
        Database(folder / TRIALS, DEVICE)
    with pytest.raises(InputError, match="cannot make"):
        Database(folder / TRIALS / "D", DEVICE)


def test_what_is_opened_for_reading_is_not_written(folder):
    reader = Database(folder, None)
    assert (reader.device, reader.target) == (DEVICE, json.loads(str(TARGET)))
    for write in (
        lambda: reader.add(A, TARGET, ok("X", 1.0)),
        lambda: reader.save_plan("x", {}),
    ):
        with pytest.raises(InputError, match="opened for reading"):
            write()
    assert reader.plan("x") is None
    assert content(Database(folder, DEVICE)) == expected()


def test_a_plan_comes_back_as_it_is(folder):
    plan = {"groups": [{"ops": ["a", "b"], "us": 1.25}], "b": None, "a": "é"}
    database = Database(folder, DEVICE)
    assert database.plan("0123abcd") is None
    database.save_plan("0123abcd", plan)
    again = Database(folder, DEVICE, read_only=True)
    assert again.plan("0123abcd") == plan
    assert list(again.plan("0123abcd")) == list(plan)
    assert again.problems == ()
    database.save_plan("0123abcd", {"groups": []})
    assert again.plan("0123abcd") == {"groups": []}
    with pytest.raises(ValueError, match="JSON"):
        database.save_plan("x", {"us": float("inf")})


def test_trials_are_read_in_a_few_calls_each(database, monkeypatch):
    """260 when this was written; an append of a process that shares the folder reads them, too."""
    monkeypatch.setattr("tvm_fusion.host.appended_files.os.fsync", lambda file: None)
    calls = {}
    for n in range(300):
        database.add(WORKLOADS[n % 3], TARGET, ok(f"Config(tile={n})", 1.0 + n))
        if n + 1 in (100, 300):
            calls[n + 1] = calls_of(lambda: Database(database.path, DEVICE))
    assert calls[300] < 400 * 300
    assert calls[300] < 3.5 * calls[100]
    assert len(Database(database.path, DEVICE)) == 300
