"""Folders of devices: found, checked, merged, exported; plans in them."""

import json
import shutil

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
)
from tvm_fusion.tuning.database.store import TRIALS

from ..support.counting import calls_of
from ..support.tune_database_tools import (
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


@pytest.fixture
def database(tmp_path):
    """A sound database of one device."""
    return fill(tmp_path / "D" / DEVICE)


def test_names_of_folders_are_taken_by_any_file_system():
    name = device_folder("../Tesla V100/µ", "0.27.0.post1", "nvcc 13.0 (r13)", "0.1.0", "12ab")
    assert name == "Tesla_V100-tvm0.27.0.post1-nvcc_13.0_r13-fusion0.1.0-12ab"
    assert len(device_folder(*["x" * 500] * 5)) < 255


def test_each_device_target_and_compiler_has_its_own_folder(monkeypatch):
    monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", "nvcc")
    found = {}
    for name in ("llvm", "nvidia_h200", "nvidia_h100"):
        target, hw = resolve_target(name)
        found[name] = folder_of(hw, target)
        assert found[name] == folder_of(hw, target)
        assert found[name].startswith(f"{hw.name}-tvm{tvm.__version__}-")
    assert len(set(found.values())) == 3
    _, hw = resolve_target("llvm")
    assert folder_of(hw, TARGET) != folder_of(hw, OTHER)
    with_host = tvm.target.Target({"kind": "llvm", "num-cores": 2, "host": {"kind": "llvm"}})
    assert folder_of(hw, TARGET) == folder_of(hw, with_host)


def test_a_database_is_found_by_its_device(tmp_path):
    _, hw = resolve_target("llvm")
    with pytest.raises(InputError, match="there is no database"):
        find_database(tmp_path / "D", hw, TARGET, read_only=True)
    database = find_database(tmp_path / "D", hw, TARGET)
    database.add(A, TARGET, ok("default", 2.0))
    again = find_database(tmp_path / "D", hw, TARGET, read_only=True)
    assert again.best(A).us == 2.0
    assert again.path == tmp_path / "D" / folder_of(hw, TARGET)
    with pytest.raises(NothingTuned, match=r'holds nothing for .*"num-cores": 4.*"num-cores": 2'):
        find_database(tmp_path / "D", hw, OTHER, read_only=True)
    assert len(list((tmp_path / "D").iterdir())) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is not a folder"):
        find_database(tmp_path / "file", hw, TARGET)


def test_a_plan_comes_back_as_it_is(database):
    plan = {"groups": [{"ops": ["a", "b"], "us": 1.25}], "b": None, "a": "é"}
    assert database.plan("0123abcd") is None
    database.save_plan("0123abcd", plan)
    again = Database.open(database.path, DEVICE, read_only=True)
    assert again.plan("0123abcd") == plan
    assert list(again.plan("0123abcd")) == list(plan)
    assert again.problems == ()
    database.save_plan("0123abcd", {"groups": []})
    assert again.plan("0123abcd") == {"groups": []}
    with pytest.raises(ValueError, match="JSON"):
        database.save_plan("x", {"us": float("inf")})


def test_a_plan_is_written_to_a_folder_that_is_gone(database):
    shutil.rmtree(database.path)
    database.save_plan("key", {"function": "main"})
    assert Database.open(database.path, None).plan("key") == {"function": "main"}


def test_check_counts_what_is_in_all_folders(database, tmp_path):
    other = fill(tmp_path / "D" / "other", "other", OTHER)
    other.save_plan("x", {})
    report = check(tmp_path / "D")
    assert report.ok
    assert [folder.device for folder in report.folders] == ["other", DEVICE]
    assert [(f.workloads, f.records, f.failures, f.plans) for f in report.folders] == [
        (3, 5, 2, 1),
        (3, 5, 2, 0),
    ]
    assert f"{other.path}: 3 workloads, 5 records, 2 failures, 1 plans" in str(report)
    assert json.loads(json.dumps(report.to_json()))["folders"][1]["records"] == 5
    with pytest.raises(InputError, match="there is no folder"):
        check(tmp_path / "nothing")


def test_check_tells_of_damage_and_leaves_it(database, tmp_path, caplog):
    file = database.path / TRIALS
    file.write_bytes(file.read_bytes().replace(b'"us":4.0', b'"us":5.0') + b"garbage\n")
    before = {path: path.read_bytes() for path in database.path.iterdir()}
    for _ in range(2):
        report = check(tmp_path / "D")
        assert not report.ok
        assert [str(problem) for problem in report.problems] == [
            "trials.jsonl line 3: the checksum is wrong; would be taken out by the next tune",
            "trials.jsonl line 12: not JSON of finite numbers (Expecting value: line 1 column 1 "
            "(char 0)); would be taken out by the next tune",
        ]
    assert {path: path.read_bytes() for path in database.path.iterdir()} == before
    assert caplog.messages == []  # the report has them
    Database.open(database.path, DEVICE)
    assert [text.rsplit("; ", 1)[1] for text in caplog.messages] == ["taken out", "taken out"]
    report = check(tmp_path / "D")
    assert (report.ok, report.folders[0].quarantined) == (True, 2)


def test_who_reads_a_damaged_database_hears_of_it_in_one_line(database, caplog):
    file = database.path / TRIALS
    file.write_bytes(file.read_bytes() + b"garbage\n\n")
    reader = Database.open(database.path, DEVICE, read_only=True)
    assert caplog.messages == [
        "2 problems in the database, listed by: python -m tvm_fusion tune --db-check --work-dir "
        f"{database.path}"
    ]
    assert "would be taken out by the next tune" in str(reader.problems[0])
    reader.refresh()
    assert len(caplog.messages) == 1


def test_databases_are_merged_and_devices_stay_apart(database, tmp_path):
    fill(tmp_path / "E" / "other", "other", OTHER)
    second = Database.open(tmp_path / "E" / DEVICE, DEVICE, target=TARGET)
    added = [(workload(128), ok("default", 1.0)), (A, ok("Config(tile=8)", 2.0))]
    for func, trial in [(A, ok("Config(tile=4)", 3.0)), *added, (B, failed("X"))]:
        second.add(func, TARGET, trial)
    database.save_plan("a", {"us": 1.0})
    second.save_plan("a", {"us": 2.0})
    second.save_plan("b", {"us": 3.0})
    sources = [tmp_path / "D", tmp_path / "E"]
    found = merge(sources, tmp_path / "F")
    assert [(m.added, m.present) for m in found.folders] == [(7, 0), (7, 0), (3, 1)]
    assert [folder.name for folder in device_folders(tmp_path / "F")] == ["other", DEVICE]
    merged = Database.open(tmp_path / "F" / DEVICE, DEVICE)
    assert content(merged)[:7] == expected()
    assert set(content(merged)) == {*expected(), *content(second)}
    assert (merged.plan("a"), merged.plan("b")) == ({"us": 1.0}, {"us": 3.0})
    counted = [(key, t) for key in merged.keys for t in merged.trials(key)]
    assert exported(merged) == records_of(counted)
    assert [x["added"] for x in json.loads(json.dumps(found.to_json()))["folders"]] == [7, 7, 3]
    again = merge(sources, tmp_path / "F")
    assert [(m.added, m.present) for m in again.folders] == [(0, 7), (0, 7), (0, 4)]
    assert merge([tmp_path / "F"], tmp_path / "F").folders[0].added == 0


def test_what_is_damaged_in_a_source_is_not_merged(database, tmp_path):
    file = database.path / TRIALS
    file.write_bytes(file.read_bytes().replace(b"signal 11", b"signal 12") + b"garbage\n")
    before = file.read_bytes()
    (merged,) = merge([tmp_path / "D"], tmp_path / "F").folders
    assert (merged.added, file.read_bytes()) == (5, before)
    assert "trials.jsonl line 12: not JSON" in str(merged)
    found = Database.open(tmp_path / "F" / DEVICE, DEVICE)
    assert found.problems == ()
    assert found.best(C).us == 16.0


def test_a_source_that_does_not_say_its_device_is_not_merged(database, tmp_path):
    file = database.path / TRIALS
    file.write_bytes(file.read_bytes().split(b"\n", 1)[1])
    (merged,) = merge([tmp_path / "D"], tmp_path / "F").folders
    assert (merged.added, merged.into) == (0, None)
    assert "nothing says of which device it is" in str(merged)
    with pytest.raises(InputError, match="there is no folder"):
        merge([tmp_path / "nothing"], tmp_path / "F")


def test_an_export_is_a_folder_for_metaschedule(database, tmp_path):
    database.add(A, TARGET, failed("Config(tile=1)", "wrong"))  # takes its time back
    (found,) = export(tmp_path / "D", tmp_path / "out").folders
    assert (found.workloads, found.records) == (3, 4)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "database_tuning_record.json",
        "database_workload.json",
    ]
    assert stock_records(tmp_path / "out") == records_of(expected()[2:])
    with pytest.raises(InputError, match="holds a database already"):
        export(tmp_path / "D", tmp_path / "out")
    with pytest.raises(InputError, match="there is no database"):
        export(tmp_path / "nothing", tmp_path / "out2")


def test_several_devices_are_exported_to_one_folder_each(database, tmp_path):
    fill(tmp_path / "D" / "other", "other", OTHER)
    report = export(tmp_path / "D", tmp_path / "out")
    assert str(tmp_path / "out" / "other") in json.dumps(report.to_json())
    found = report.folders
    assert [x.path.name for x in found] == ["other", DEVICE]
    assert [x.records for x in found] == [5, 5]


def test_trials_are_read_in_a_few_calls_each(tmp_path, monkeypatch):
    """260 when this was written; an append of a process that shares the folder reads them, too."""
    monkeypatch.setattr("tvm_fusion.host.appended_files.os.fsync", lambda file: None)
    database = Database.open(tmp_path / "D", DEVICE, target=TARGET)
    calls = {}
    for n in range(300):
        database.add(WORKLOADS[n % 3], TARGET, ok(f"Config(tile={n})", 1.0 + n))
        if n + 1 in (100, 300):
            calls[n + 1] = calls_of(lambda: Database.open(tmp_path / "D", DEVICE))
    assert calls[300] < 400 * 300
    assert calls[300] < 3.5 * calls[100]
    assert len(Database.open(tmp_path / "D", DEVICE)) == 300
