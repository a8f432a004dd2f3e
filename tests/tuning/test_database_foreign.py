"""Folders of MetaSchedule are imported; what nobody vouches for is tried in another process."""

import json
import os
import time

import pytest
import tvm
from tvm.s_tir.meta_schedule.database import JSONDatabase, TuningRecord

from tvm_fusion.config import resolve_target
from tvm_fusion.errors import InputError
from tvm_fusion.tuning.database import check, find_database, foreign, import_folders
from tvm_fusion.tuning.database.lines import BadLine
from tvm_fusion.tuning.database.metaschedule import RECORDS, WORKLOADS
from tvm_fusion.tuning.measure import processes

from ..support.tune_database import (
    TARGET,
    ForkedWorker,
    content,
    exported,
    in_child,
    lines,
    records_of,
    split_text,
    stock_records,
    times,
    write,
)
from ..support.tune_database import WORKLOADS as ALL

_, HW = resolve_target("llvm")


@pytest.fixture
def stock(tmp_path):
    """A folder that MetaSchedule wrote: of three workloads a record each."""
    folder = tmp_path / "stock"
    folder.mkdir()
    in_child(_commit, str(folder))
    return folder


def _commit(folder):
    database = JSONDatabase(work_dir=folder)
    for number, func in enumerate(ALL, 1):
        mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        loaded = database.commit_workload(mod)
        payload = [json.loads(split_text(func)), [number * 1e-6], json.loads(str(TARGET)), None]
        database.commit_tuning_record(TuningRecord.from_json(payload, loaded))


def import_(folder, into):
    (found,) = import_folders([folder], into, HW, TARGET).folders
    return found


def test_records_of_metaschedule_are_imported_as_unchecked(stock, tmp_path):
    before = lines(stock, WORKLOADS), lines(stock, RECORDS)
    found = import_(stock, tmp_path / "D")
    assert (found.counts, found.problems) == ({"added": 3, "present": 0}, ())
    database = find_database(tmp_path / "D", HW, TARGET)
    assert times(records_of(content(database))) == times(stock_records(stock))
    assert exported(database) == records_of(content(database))
    assert [trial.checked for _, trial in content(database)] == [False] * 3
    assert check(tmp_path / "D").folders[0].counts["unchecked"] == 3
    assert import_(stock, tmp_path / "D").counts == {"added": 0, "present": 3}
    assert (lines(stock, WORKLOADS), lines(stock, RECORDS)) == before
    with pytest.raises(InputError, match="no database of MetaSchedule"):
        import_(tmp_path / "D", tmp_path / "D")


# ---- what makes no sense, and what TVM fails on

GET = ["GetSBlock", [], ["add", "main"], ["b0"]]
SAMPLE = ["SampleCategorical", [], [[1, 2], [0.5, 0.5]], ["v0"]]
NODES = [
    {"type": "None"},
    {"type": "ir.PrimType", "data": {"span": 0, "dtype": "int64"}},
    {"type": "ffi.String", "data": "i"},
    {"type": "ir.Var", "data": {"span": 0, "ty": 1, "name": 2}},
]
INDICES = {"initial_indices": 4, "final_indices": 4, "inverse_index_map": 0}
ROOT = {"type": "tirx.IndexMap", "data": INDICES}


def array(*inner):
    return {"type": "ffi.Array", "data": list(inner)}


def with_index_map(nodes, root):
    graph = json.dumps({"root_index": root, "nodes": nodes, "metadata": {}})
    return [[GET, ["TransformBlockLayout", ["b0"], [graph], []]], []]


TRACES = [
    (json.loads(split_text(ALL[0]).replace("add", "mul")), "ScheduleError"),
    ([7], "is no trace"),
    ([[], [None]], ""),
    ([[], [float("nan")]], "not JSON"),
    ({}, "is no trace"),
    ([[], [], []], "is no trace"),
    ([[3], []], "TypeError"),
    ([[["GetSBlock"]], []], ""),
    ([[["Nonsense", [], [], []]], []], "Nonsense"),
    ([[["UnsafeSetDType", [], [0, "float32"], []]], []], "UnsafeSetDType"),
    ([[["GetLoops", ["b7"], [], []]], []], "not defined: b7"),
    ([[["GetSBlock", [], [None], ["b0"]]], []], "crash"),
    ([[["GetLoops", [None], [], []]], []], "TypeError"),
    ([[GET], [[900, 1]]], ""),  # TVM reads beyond an array: a crash, or nothing
    ([[GET], [["0", 1]]], "json decision"),
    ([[SAMPLE], []], "decisions of the trace are not those"),
    ([[SAMPLE], [[0, 900]]], "Check failed"),
    (with_index_map([], 0), "invalid node index"),
    (with_index_map([*NODES, array(3), ROOT], 4), "TypeError"),
    (with_index_map([*NODES, array(3), ROOT], 6), "invalid node index"),
    (with_index_map([*NODES, array(4), ROOT], 5), "crash"),
    (with_index_map([*NODES, array(99), ROOT], 5), "invalid node index"),
    (with_index_map([*NODES, array(1), ROOT], 5), "TypeError"),
    (with_index_map([*NODES, array(3), {"type": "tirx.PrimFunc", "data": {}}], 5), ""),
    ([[GET, ["TransformBlockLayout", ["b0"], ["{}"], []]], []], "root_index"),
    ([[GET, ["TransformLayout", ["b0", "{"], [0, 0, None, 1], []]], []], "not defined: {"),
]
PARTS = [
    (1, [], "not a workload's line and a record"),
    (1, ["fast"], ""),
    (1, [1e10], "not between 0 and"),
    (2, None, "not a workload's line and a record"),
    (2, json.loads(str(TARGET)) | {"num-cores": 64}, "of another target"),
    (3, [["TENSOR", "float32", [17, 8]]] * 2, "arguments are not"),
    (3, [["TENSOR"]], ""),
]


def test_what_does_not_replay_or_makes_no_sense_is_left_out_and_ends_no_session(
    stock, tmp_path, monkeypatch
):
    monkeypatch.setattr(foreign, "Worker", ForkedWorker)
    sound = lines(stock, RECORDS)
    record = json.loads(sound[0])[1]
    bad = [([0, [trace, *record[1:]]], why) for trace, why in TRACES]
    bad += [([0, [*record[:k], part, *record[k + 1 :]]], why) for k, part, why in PARTS]
    bad += [([index, record], "which cannot be used") for index in (-1, 3, 10**30)]
    bad += [([0, [*record, None]], "not a workload's line")]
    monkeypatch.setattr(foreign, "MOST_CRASHES", len(bad))  # a heap may have more of them
    write(stock, [*(json.dumps(x).encode() + b"\n" for x, _ in bad), *sound], RECORDS)
    found = import_(stock, tmp_path / "D")
    assert found.counts["added"] == 3
    wheres = [f"{RECORDS} line {n}" for n in range(1, len(bad) + 1)]
    assert [problem.where for problem in found.problems] == wheres
    for problem, (line, why) in zip(found.problems, bad, strict=True):
        assert why in problem.why, line
    assert len(find_database(tmp_path / "D", HW, TARGET)) == 3


@pytest.fixture
def judge():
    with foreign.Judge() as found:
        yield found


def test_a_line_that_ends_the_process_or_hangs_costs_itself(judge, monkeypatch):
    monkeypatch.setattr(foreign, "MOST_CRASHES", 2)
    with pytest.raises(BadLine, match="ValueError: invalid literal"):
        judge(int, "x")
    with pytest.raises(BadLine, match=r"fails on it: crash, .*SIGABRT"):
        judge(os.abort)
    assert judge(len, "abc") == 3
    monkeypatch.setattr(foreign, "PART_S", 0.2)
    with pytest.raises(BadLine, match="fails on it: timeout"):
        judge(time.sleep, 60)
    with pytest.raises(BadLine, match="not tried, after other lines that crash TVM"):
        judge(len, "abc")


def test_where_no_process_can_be_started_nothing_is_taken_over(stock, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "module_command", lambda module, torch: ["false"])
    with pytest.raises(InputError, match="does not start"):
        import_(stock, tmp_path / "D")
    assert len(find_database(tmp_path / "D", HW, TARGET)) == 0
