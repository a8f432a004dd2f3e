"""Trials go into a file, and come back as they are; MetaSchedule sees those with a time."""

import json
import math

import pytest
import tvm
from tvm.s_tir.meta_schedule.database import JSONDatabase, Workload
from tvm.script import tirx as T

from tvm_fusion.errors import InputError
from tvm_fusion.tuning.database import (
    Database,
    Trial,
    export,
    short_key,
    trace_text,
    workload_key,
)
from tvm_fusion.tuning.database.store import TRIALS

from ..support.tune_database_tools import (
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
    records_of,
    split_text,
    trials_of_all,
    workload,
)

A, B, C = WORKLOADS


@pytest.fixture
def database(tmp_path):
    return Database.open(tmp_path / "D", DEVICE, target=TARGET)


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


def test_a_trial_comes_back_from_json_as_it_is():
    for _, trial in expected():
        assert Trial.from_dict(json.loads(json.dumps(trial.as_dict()))) == trial
    with pytest.raises(ValueError, match="missing or not of a trial"):
        Trial.from_dict({"kind": "class"})


def test_the_key_of_a_workload_is_the_hash_that_metaschedule_writes():
    for func in WORKLOADS:
        mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        assert workload_key(func) == Workload(mod).as_json()[0]
        assert int(short_key(workload_key(func)), 16) == int(workload_key(func))
    assert workload_key(A) == workload_key(workload(16)) != workload_key(B)
    assert workload_key(A) != workload_key(A.with_attr("tvm_fusion.rounding", "exact"))


def test_trials_come_back_from_the_files_as_they_are(database):
    fill(database.path)
    again = Database.open(database.path, DEVICE)
    assert content(again) == expected()
    assert again.problems == ()
    assert again.keys == tuple(map(workload_key, WORKLOADS))
    assert tuple(map(workload_key, again.workloads())) == again.keys
    assert str(again.workloads()[1].attrs["tvm_fusion.class"]) == "pointwise"
    assert [trial.text for trial in again.trials(A)] == [f"Config(tile={n})" for n in (1, 2, 4)]
    assert again.best(A).text == "Config(tile=4)"
    assert again.best(B).kind == "trace"
    assert again.best(workload(128)) is None


def test_a_trial_is_one_line_that_is_appended(database):
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


def test_metaschedule_opens_an_export_and_sees_the_ok_trials(database):
    fill(database.path)
    assert exported(database) == records_of(expected())


def test_metaschedule_finds_the_text_of_a_class_choice_on_the_root_block(database, tmp_path):
    database.add(A, TARGET, ok("RowConfig(form=reg, threads=[32, 8], tail={a: -1/2})", 2.0))
    export(database.path, tmp_path / "out")
    text = in_child(_annotation, str(tmp_path / "out"))
    assert text == "RowConfig(form=reg, threads=[32, 8], tail={a: -1/2})"


def _annotation(folder):
    mod = tvm.IRModule({"main": A.with_attr("global_symbol", "main")})
    found = JSONDatabase(work_dir=folder).query_ir_module(mod, TARGET, "main")
    return str(found["main"].body.block.annotations["tvm_fusion.config"])


def test_the_memory_database_holds_one_kind_or_all(database):
    fill(database.path)
    again = Database.open(database.path, DEVICE, read_only=True)
    assert len(again.metaschedule()) == 5
    (record,) = again.metaschedule("trace").get_all_tuning_records()
    assert trace_text(record.trace) == split_text(B)


def test_of_equally_fast_trials_the_first_by_text_is_the_best(database):
    for text in ("B", "A", "C"):
        database.add(A, TARGET, ok(text, 2.0))
    database.add(A, TARGET, failed("0"))
    assert database.best(A).text == "A"
    assert database.best(workload_key(A)) == database.best(A)


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
    for found in (database, Database.open(database.path, DEVICE)):
        assert found.trials(A) == (trials[kept],)


def test_an_equal_trial_is_written_once(database):
    before = None
    for _ in range(2):
        fill(database.path)
        now = (database.path / TRIALS).read_bytes()
        assert before in (None, now)
        before = now


def test_the_same_trials_make_the_same_file(tmp_path):
    one, two = (fill(tmp_path / name).path / TRIALS for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


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
    assert Database.open(database.path, DEVICE).best(main).us == 2.0
    assert len(exported(database)) == 1


def test_a_trial_that_does_not_belong_here_is_refused(database, tmp_path):
    database.add(A, TARGET, ok("default", 2.0))
    other = tvm.target.Target({"kind": "llvm", "num-cores": 4})
    with pytest.raises(InputError, match=r"is of the target .*, not of"):
        database.add(A, other, ok("default", 2.0))
    with pytest.raises(InputError, match="does not replay"):
        database.add(A, TARGET, ok(split_text(A).replace('"add"', '"mul"'), 2.0, "trace"))
    bare = tvm.tirx.PrimFunc([], tvm.tirx.Evaluate(0))
    with pytest.raises(InputError, match="with a root block"):
        database.add(bare, TARGET, failed("default"))
    assert len(Database.open(database.path, DEVICE)) == len(database) == 1


def test_a_folder_of_another_device_or_target_is_not_opened(database):
    database.add(A, TARGET, ok("default", 2.0))
    with pytest.raises(InputError, match=r"is of test_cpu.*, not of other"):
        Database.open(database.path, "other")
    other = tvm.target.Target({"kind": "llvm", "num-cores": 4})
    with pytest.raises(InputError, match="is of the target"):
        Database.open(database.path, DEVICE, target=other)
    file = database.path / "file"
    file.write_text("")
    with pytest.raises(InputError, match="is not a folder"):
        Database.open(file, DEVICE)
    with pytest.raises(InputError, match="cannot make"):
        Database.open(file / "D", DEVICE)


def test_what_is_opened_for_reading_is_not_written(database):
    fill(database.path)
    reader = Database.open(database.path, None)
    assert (reader.device, reader.target) == (DEVICE, json.loads(str(TARGET)))
    for write in (
        lambda: reader.add(A, TARGET, ok("X", 1.0)),
        lambda: reader.save_plan("x", {}),
    ):
        with pytest.raises(InputError, match="opened for reading"):
            write()
    assert reader.plan("x") is None
    assert content(Database.open(database.path, DEVICE)) == expected()
