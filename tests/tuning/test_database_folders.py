"""Folders of devices: found, checked, merged, exported; trials in them that nobody checked."""

import json

import pytest
import tvm

from tvm_fusion.config import resolve_target
from tvm_fusion.errors import InputError, NothingTuned
from tvm_fusion.tuning.database import (
    Database,
    check,
    device_folder,
    device_folders,
    export,
    find_database,
    folder_of,
    merge,
    workload_key,
)
from tvm_fusion.tuning.database.store import TRIALS
from tvm_fusion.tuning.session.choices import chosen
from tvm_fusion.tuning.session.lookup import tuned_kernels

from ..support.tune_database import (
    DEVICE,
    TARGET,
    WORKLOADS,
    content,
    expected,
    exported,
    failed,
    fill,
    ok,
    records_of,
    stock_records,
    workload,
)

A, B, C = WORKLOADS
OTHER = tvm.target.Target({"kind": "llvm", "num-cores": 4})
_, HW = resolve_target("llvm")


@pytest.fixture
def database(tmp_path):
    """A sound database of one device."""
    return fill(tmp_path / "D" / DEVICE)


def test_each_device_target_and_compiler_has_its_own_folder(monkeypatch):
    name = device_folder("../Tesla V100/µ", "tvm0.27.0.post1", "nvcc 13.0 (r13)", "12ab")
    assert name == "Tesla_V100-tvm0.27.0.post1-nvcc_13.0_r13-12ab"
    assert len(device_folder(*["x" * 500] * 5)) < 255
    monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", "nvcc")
    found = {}
    for name in ("llvm", "nvidia_h200", "nvidia_h100"):
        target, hw = resolve_target(name)
        found[name] = folder_of(hw, target)
        assert found[name] == folder_of(hw, target)
        assert found[name].startswith(f"{hw.name}-tvm{tvm.__version__}-")
    assert len(set(found.values())) == 3
    assert folder_of(HW, TARGET) != folder_of(HW, OTHER)
    with_host = tvm.target.Target({"kind": "llvm", "num-cores": 2, "host": {"kind": "llvm"}})
    assert folder_of(HW, TARGET) == folder_of(HW, with_host)


def test_a_database_is_found_by_its_device(tmp_path):
    with pytest.raises(InputError, match="there is no database"):
        find_database(tmp_path / "D", HW, TARGET, read_only=True)
    database = find_database(tmp_path / "D", HW, TARGET)
    database.add(A, TARGET, ok("default", 2.0))
    again = find_database(tmp_path / "D", HW, TARGET, read_only=True)
    assert again.trials(A)[0].us == 2.0
    assert again.path == tmp_path / "D" / folder_of(HW, TARGET)
    with pytest.raises(NothingTuned, match=r'holds nothing for .*"num-cores": 4.*"num-cores": 2'):
        find_database(tmp_path / "D", HW, OTHER, read_only=True)
    assert len(list((tmp_path / "D").iterdir())) == 1
    with pytest.raises(InputError, match="is not a folder"):
        find_database(database.path / TRIALS, HW, TARGET)


def test_check_counts_what_is_in_all_folders(database, tmp_path):
    other = fill(tmp_path / "D" / "other", "other", OTHER)
    other.save_plan("x", {})
    report = check(tmp_path / "D")
    assert report.ok
    assert [folder.device for folder in report.folders] == ["other", DEVICE]
    counts = {"workloads": 3, "records": 5, "failures": 2, "unchecked": 0, "quarantined": 0}
    assert [f.counts for f in report.folders] == [counts | {"plans": n} for n in (1, 0)]
    assert f"{other.path}: 3 workloads, 5 records, 2 failures, 0 unchecked, 1 plans" in str(report)
    assert json.loads(json.dumps(report.to_json()))["folders"][1]["records"] == 5
    for tool in (check, lambda path: merge([path], tmp_path / "F")):
        with pytest.raises(InputError, match="there is no folder"):
            tool(tmp_path / "nothing")


def test_who_only_reads_tells_of_damage_and_leaves_it(database, tmp_path, caplog):
    file = database.path / TRIALS
    file.write_bytes(file.read_bytes().replace(b'"us":4.0', b'"us":5.0') + b"garbage\n")
    before = {path: path.read_bytes() for path in database.path.iterdir()}
    said = [
        "trials.jsonl line 3: the checksum is wrong; would be taken out by the next tune",
        "trials.jsonl line 12: not JSON of finite numbers (Expecting value: line 1 column 1 "
        "(char 0)); would be taken out by the next tune",
    ]
    assert list(map(str, check(tmp_path / "D").problems)) == said
    assert caplog.messages == []  # the report has them
    reader = Database(database.path, DEVICE, read_only=True)
    reader.refresh()
    assert caplog.messages == [
        "2 problems in the database, listed by: python -m tvm_fusion tune --db-check --work-dir "
        f"{database.path}"
    ]
    assert list(map(str, reader.problems)) == said
    assert {path: path.read_bytes() for path in database.path.iterdir()} == before
    caplog.clear()
    Database(database.path, DEVICE)
    assert [text.rsplit("; ", 1)[1] for text in caplog.messages] == ["taken out", "taken out"]
    report = check(tmp_path / "D")
    assert (report.ok, report.folders[0].counts["quarantined"]) == (True, 2)


def _taken(report):
    return [(folder.counts["added"], folder.counts["present"]) for folder in report.folders]


def test_databases_are_merged_and_devices_stay_apart(database, tmp_path):
    fill(tmp_path / "E" / "other", "other", OTHER)
    second = Database(tmp_path / "E" / DEVICE, DEVICE, target=TARGET)
    added = [(workload(128), ok("default", 1.0)), (A, ok("Config(tile=8)", 2.0))]
    for func, trial in [(A, ok("Config(tile=4)", 3.0)), *added, (B, failed("X"))]:
        second.add(func, TARGET, trial)
    database.save_plan("a", {"us": 1.0})
    second.save_plan("a", {"us": 2.0})
    second.save_plan("b", {"us": 3.0})
    sources = [tmp_path / "D", tmp_path / "E"]
    found = merge(sources, tmp_path / "F")
    assert _taken(found) == [(7, 0), (7, 0), (3, 1)]
    assert [folder.name for folder in device_folders(tmp_path / "F")] == ["other", DEVICE]
    merged = Database(tmp_path / "F" / DEVICE, DEVICE)
    assert content(merged)[:7] == expected()
    assert set(content(merged)) == {*expected(), *content(second)}
    assert (merged.plan("a"), merged.plan("b")) == ({"us": 1.0}, {"us": 3.0})
    assert exported(merged) == records_of(merged.counted())
    assert [x["added"] for x in json.loads(json.dumps(found.to_json()))["folders"]] == [7, 7, 3]
    assert _taken(merge(sources, tmp_path / "F")) == [(0, 7), (0, 7), (0, 4)]
    assert _taken(merge([tmp_path / "F"], tmp_path / "F")) == [(0, 7), (0, 10)]


def test_what_is_damaged_in_a_source_is_not_merged(database, tmp_path):
    file = database.path / TRIALS
    file.write_bytes(file.read_bytes().replace(b"signal 11", b"signal 12") + b"garbage\n")
    before = file.read_bytes()
    merged = merge([tmp_path / "D"], tmp_path / "F")
    assert (_taken(merged), file.read_bytes()) == ([(5, 0)], before)
    assert "trials.jsonl line 12: not JSON" in str(merged)
    found = Database(tmp_path / "F" / DEVICE, DEVICE)
    assert found.problems == ()
    assert found.trials(C)[0].us == 16.0


def test_a_source_that_does_not_say_its_device_is_not_merged(database, tmp_path):
    file = database.path / TRIALS
    file.write_bytes(file.read_bytes().split(b"\n", 1)[1])
    merged = merge([tmp_path / "D"], tmp_path / "F")
    assert (_taken(merged), merged.folders[0].device) == ([(0, 0)], None)
    assert not (tmp_path / "F").exists()
    assert "nothing says of which device it is" in str(merged)


def test_an_export_is_a_folder_for_metaschedule(database, tmp_path):
    database.add(A, TARGET, failed("Config(tile=1)", "wrong"))  # takes its time back
    (found,) = export(tmp_path / "D", tmp_path / "out").folders
    assert found.counts == {"workloads": 3, "records": 4}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "database_tuning_record.json",
        "database_workload.json",
    ]
    assert stock_records(tmp_path / "out") == records_of(expected()[2:])
    with pytest.raises(InputError, match="holds a database already"):
        export(tmp_path / "D", tmp_path / "out")
    with pytest.raises(InputError, match="there is no database"):
        export(tmp_path / "nothing", tmp_path / "out2")
    with pytest.raises(InputError, match="cannot write"):
        export(tmp_path / "D", database.path / TRIALS / "out")


def test_several_devices_are_exported_to_one_folder_each(database, tmp_path):
    fill(tmp_path / "D" / "other", "other", OTHER)
    report = export(tmp_path / "D", tmp_path / "out")
    assert str(tmp_path / "out" / "other") in json.dumps(report.to_json())
    assert [x.path.name for x in report.folders] == ["other", DEVICE]
    assert [x.counts["records"] for x in report.folders] == [5, 5]


# ---- trials whose numbers nobody compared: not measured, as it were


@pytest.fixture(params=[0.0, None], ids=["checked", "unchecked"])
def unchecked(request, tmp_path):
    """A database with two tuned workloads, and whether nobody checked their trials."""
    database = find_database(tmp_path / "D", HW, TARGET)
    for func in (A, B):
        for text, us in (("default", 8.0), ("Way(n=1)", 6.0)):
            one = ok(text, us, error=request.param, spread=0.0)
            database.add(func, TARGET, one)
    return database, request.param is None


def test_nothing_is_chosen_by_unchecked_trials_and_check_counts_them(unchecked, tmp_path, caplog):
    database, is_unchecked = unchecked
    kernels = tuned_kernels(tmp_path / "D", HW, TARGET)
    for trial in (kernels.trial(A), chosen(database.trials(B), 0.01)):
        assert trial is None if is_unchecked else trial is not None
    assert len(caplog.messages) == is_unchecked
    assert all("times of 2 untuned kernels are unchecked" in text for text in caplog.messages)
    report = check(tmp_path / "D")
    assert (report.ok, report.folders[0].counts["records"]) == (True, 4)
    assert report.to_json()["folders"][0]["unchecked"] == (4 if is_unchecked else 0)
    assert ("4 trials are unchecked (from records of Meta" in str(report)) == is_unchecked
    assert exported(database) == records_of(database.counted())  # MetaSchedule sees them
    database.add(A, TARGET, ok("default", 9.0))
    database.add(B, TARGET, failed("default", "timeout"))  # what is measured again counts
    counts = check(tmp_path / "D").folders[0].counts
    assert counts["unchecked"] == (2 if is_unchecked else 0)
    kept = [t.status for t in database.trials(workload_key(B))]
    assert kept == ["timeout" if is_unchecked else "ok", "ok"]
