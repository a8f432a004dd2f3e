"""Lines of unknown origin are tried in a process of their own."""

import json
import os
import time

import pytest
import tvm
from tvm.s_tir.meta_schedule.database import JSONDatabase, TuningRecord

from tvm_fusion.config import resolve_target
from tvm_fusion.errors import InputError
from tvm_fusion.tuning.database import check, foreign, import_folders, workload_key
from tvm_fusion.tuning.database.lines import BadLine
from tvm_fusion.tuning.database.metaschedule import RECORDS, WORKLOADS
from tvm_fusion.tuning.measure import processes

from ..support.tune_database_files import copy_of_sound, lines, write
from ..support.tune_database_tools import (
    TARGET,
    ForkedWorker,
    content,
    in_child,
    records_of,
    split_text,
    stock_records,
    times,
)
from ..support.tune_database_tools import WORKLOADS as ALL

A, B, C = ALL
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
    return import_folders([folder], into, HW, TARGET)


def database_of(place):
    from tvm_fusion.tuning.database import find_database

    return find_database(place, HW, TARGET)


def test_records_of_metaschedule_are_imported_as_unchecked(stock, tmp_path):
    before = lines(stock, WORKLOADS), lines(stock, RECORDS)
    (found,) = import_(stock, tmp_path / "D").folders
    assert (found.counts, found.problems) == ({"added": 3, "present": 0}, ())
    database = database_of(tmp_path / "D")
    assert times(records_of(content(database))) == times(stock_records(stock))
    assert [trial.checked for _, trial in content(database)] == [False] * 3
    assert check(tmp_path / "D").folders[0].counts["unchecked"] == 3
    (again,) = import_(stock, tmp_path / "D").folders
    assert again.counts == {"added": 0, "present": 3}
    assert (lines(stock, WORKLOADS), lines(stock, RECORDS)) == before
    with pytest.raises(InputError, match="no database of MetaSchedule"):
        import_(tmp_path / "D", tmp_path / "D")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda p: p.__setitem__(0, json.loads(split_text(A).replace("add", "mul"))), ""),
        (lambda p: p.__setitem__(0, [[["Fly", [], [], []]], []]), ""),
        (lambda p: p.__setitem__(3, [["TENSOR", "float32", [17, 8]]] * 2), "arguments are not"),
        (lambda p: p.__setitem__(3, [["TENSOR"]]), ""),
        (lambda p: p[2].__setitem__("num-cores", 64), "of another target"),
        (lambda p: p.__setitem__(2, None), "not a workload's line and a record"),
        (lambda p: p.__setitem__(0, [[["GetSBlock"]], []]), ""),
        (lambda p: p.__setitem__(0, [7]), "is no trace"),
        (lambda p: p.__setitem__(1, []), "not a workload's line and a record"),
        (lambda p: p.__setitem__(1, ["fast"]), ""),
        (lambda p: p.__setitem__(1, [1e10]), "not between 0 and"),
        (lambda p: p.append(None), "not a workload's line and a record"),
    ],
)
def test_a_record_that_does_not_replay_or_makes_no_sense_is_left_out(
    stock, tmp_path, monkeypatch, change, why
):
    monkeypatch.setattr(foreign, "Worker", ForkedWorker)
    first, *others = lines(stock, RECORDS)
    payload = json.loads(first)[1]
    change(payload)
    write(stock, [json.dumps([0, payload]).encode() + b"\n", *others], RECORDS)
    (found,) = import_(stock, tmp_path / "D").folders
    assert found.counts["added"] == 2
    (problem,) = found.problems
    assert problem.where == f"{RECORDS} line 1"
    assert why in problem.why
    assert [key for key, _ in content(database_of(tmp_path / "D"))] == [
        workload_key(B),
        workload_key(C),
    ]


@pytest.mark.parametrize("index", [-1, 3, 10**30])
def test_a_record_of_no_line_is_left_out(stock, tmp_path, monkeypatch, index):
    monkeypatch.setattr(foreign, "Worker", ForkedWorker)
    first, *others = lines(stock, RECORDS)
    write(stock, [json.dumps([index, json.loads(first)[1]]).encode() + b"\n", *others], RECORDS)
    (found,) = import_(stock, tmp_path / "D").folders
    assert (found.counts["added"], len(found.problems)) == (2, 1)
    assert "which cannot be used" in found.problems[0].why


GET = ["GetSBlock", [], ["add", "main"], ["b0"]]
NODES = [
    {"type": "None"},
    {"type": "ir.PrimType", "data": {"span": 0, "dtype": "int64"}},
    {"type": "ffi.String", "data": "i"},
    {"type": "ir.Var", "data": {"span": 0, "ty": 1, "name": 2}},
]
INDICES = {"initial_indices": 4, "final_indices": 4, "inverse_index_map": 0}
ROOT = {"type": "tirx.IndexMap", "data": INDICES}


def with_index_map(nodes, root):
    graph = json.dumps({"root_index": root, "nodes": nodes, "metadata": {}})
    return [[GET, ["TransformBlockLayout", ["b0"], [graph], []]], []]


def array(*inner):
    return {"type": "ffi.Array", "data": list(inner)}


MALFORMED = [
    [[], [None]],
    {},
    [[], [], []],
    [[3], []],
    [[["Nonsense", [], [], []]], []],
    [[["GetLoops", ["b7"], [], []]], []],
    [[["GetSBlock", [], [None], ["b0"]]], []],  # crashes TVM
    [[["GetLoops", [None], [], []]], []],
    [[GET], [[900, 1]]],
    [[["SampleCategorical", [], [[1, 2], [0.5, 0.5]], ["v0"]]], []],
    [[["SampleCategorical", [], [[1, 2], [0.5, 0.5]], ["v0"]]], [[0, 900]]],
    [[GET], [["0", 1]]],
    with_index_map([], 0),
    with_index_map([*NODES, array(3), ROOT], 4),
    with_index_map([*NODES, array(3), ROOT], 6),
    with_index_map([*NODES, array(4), ROOT], 5),  # crashes TVM
    with_index_map([*NODES, array(99), ROOT], 5),
    with_index_map([*NODES, array(1), ROOT], 5),
    with_index_map([*NODES, array(3), {"type": "tirx.PrimFunc", "data": {}}], 5),
    [[GET, ["TransformBlockLayout", ["b0"], ["{}"], []]], []],
    [[GET, ["TransformLayout", ["b0", "{"], [0, 0, None, 1], []]], []],
]


def test_a_malformed_trace_ends_no_session_and_is_left_out(stock, tmp_path, monkeypatch):
    monkeypatch.setattr(foreign, "Worker", ForkedWorker)
    monkeypatch.setattr(foreign, "MOST_CRASHES", len(MALFORMED))  # as many as heaps allow
    first = json.loads(lines(stock, RECORDS)[0])[1]
    records = [json.dumps([0, [trace, *first[1:]]]).encode() + b"\n" for trace in MALFORMED]
    write(stock, [*records, *lines(stock, RECORDS)], RECORDS)
    (found,) = import_(stock, tmp_path / "D").folders
    assert found.counts["added"] == 3
    assert [problem.where for problem in found.problems] == [
        f"{RECORDS} line {n}" for n in range(1, len(MALFORMED) + 1)
    ]
    assert sum("it: crash" in problem.why for problem in found.problems) >= 2


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
    assert len(database_of(tmp_path / "D")) == 0


def test_check_replays_all_records_on_demand(tmp_path, monkeypatch):
    asked = []

    def judge(judge, function, *arguments):
        asked.append((function, arguments[0]))
        raise BadLine("no")

    monkeypatch.setattr(foreign.Judge, "__call__", judge)
    report = check(copy_of_sound(tmp_path / "D"), replay=True)
    assert [key for _, key in asked] == [
        workload_key(func) for func, parts in ((A, 3), (B, 3), (C, 2)) for _ in range(parts)
    ]
    assert [problem.why for problem in report.folders[0].problems] == ["no"] * 8


def test_sound_records_replay_in_the_process_itself(tmp_path):
    assert check(copy_of_sound(tmp_path / "D"), replay=True).ok
