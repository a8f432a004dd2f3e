"""Tuned kernels in users' Relax pipelines, and MetaSchedule's database functions."""

from __future__ import annotations

import inspect
import logging
import shutil
from contextlib import nullcontext

import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.s_tir import meta_schedule as ms

import tvm_fusion
from tvm_fusion.errors import InputError, NothingTuned
from tvm_fusion.transform import Fuse, Materialize, WriteKernels, plan
from tvm_fusion.tuning.database import lines
from tvm_fusion.tuning.database.metaschedule import WORKLOADS
from tvm_fusion.tuning.database.store import TRIALS
from tvm_fusion.tuning.session import tune as session

from ..pipelines.cells import LLVM, launches
from ..pipelines.modules import cases
from ..support.tuned_blocks import (
    BEST_US,
    OTHER,
    PRODUCT,
    TARGET,
    UNTUNED_US,
    block,
    check_numbers,
    fill,
    kernels,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A database of TARGET."""
    path = tmp_path_factory.mktemp("tuned")
    fill(path)
    return path


@pytest.fixture(scope="module")
def tuned(folder):
    """`block` with its tuned kernels."""
    return Fuse(TARGET, database=folder)(block())


# ---- Fuse


def test_the_tuned_kernel_is_written(tuned):
    untuned = kernels(Fuse(TARGET)(block()))
    changed = [name for name, func in kernels(tuned).items() if not _is_equal(func, untuned[name])]
    assert changed == [PRODUCT]
    check_numbers(tvm.compile(tuned, TARGET))


def _of_pass(mod, **given):
    fused = []
    Fuse(TARGET, on_plan=fused.append, **given)(mod)
    return fused[0].report()


REPORTS = {
    "pass": _of_pass,
    "compile": lambda mod, **given: tvm_fusion.compile(mod, TARGET, verify=False, **given).report,
    "explain": lambda mod, **given: tvm_fusion.explain(mod, TARGET, **given),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("around", [False, True], ids=["argument", "with"])
@pytest.mark.parametrize("way", REPORTS)
def test_reports_say_what_was_chosen(folder, way, around):
    with tvm_fusion.TuningDatabase(folder) if around else nullcontext():
        report = REPORTS[way](block(), **({} if around else {"database": folder}))
    said = [group.get("tuned") for group in report.to_json()["groups"]]
    assert [(s["choice"], s["us"], s["untuned_us"]) for s in said] == [
        ("trace", BEST_US, UNTUNED_US),
        ("default", UNTUNED_US, UNTUNED_US),
    ]


def _is_equal(a: tirx.PrimFunc, b: tirx.PrimFunc) -> bool:
    return tvm_ffi.structural_equal(a, b, map_free_vars=True)


@pytest.mark.parametrize("way", ["argument", "with", "union", "member without a name"])
def test_a_database_enters_as_argument_and_around_a_pipeline(folder, tuned, way):
    database = tvm_fusion.TuningDatabase(folder)
    stock = ms.database.MemoryDatabase()
    if way == "argument":
        found = Fuse(TARGET, database=database)(block())
    else:
        unions = {
            "with": database,
            "union": ms.database.UnionDatabase(stock, database),
            "member without a name": ms.database.OrderedUnionDatabase(
                tvm_fusion.TuningDatabase(folder), stock
            ),
        }
        with unions[way]:
            found = tvm.transform.Sequential([Fuse(TARGET)])(block())
    tvm.ir.assert_structural_equal(found, tuned)


@pytest.mark.parametrize("around", [False, True], ids=["argument", "with"])
def test_the_stages_take_it(folder, tuned, around):
    given = {} if around else {"database": folder}
    with tvm_fusion.TuningDatabase(folder) if around else nullcontext():
        plans = plan(block(), TARGET, **given)
        stages = [Materialize(plans, TARGET), WriteKernels(TARGET, **given)]
        found = tvm.transform.Sequential(stages)(block())
    tvm.ir.assert_structural_equal(found, tuned)


def test_the_registered_pipeline_takes_it_in_both_ways(folder):
    given = relax.get_pipeline("tvm_fusion", target=TARGET, database=folder)(block())
    with tvm_fusion.TuningDatabase(folder), TARGET:
        around = relax.get_pipeline("tvm_fusion")(block())
        executable = tvm.compile(block(), TARGET, relax_pipeline="tvm_fusion")
    tvm.ir.assert_structural_equal(around, given)
    without = relax.get_pipeline("tvm_fusion", target=TARGET)(block())
    assert not _is_equal(given[PRODUCT], without[PRODUCT])
    check_numbers(executable)


def test_databases_of_metaschedule_change_nothing():
    wanted = Fuse(TARGET)(block())
    empty = ms.database.MemoryDatabase()
    of_a_function = ms.database.ScheduleFnDatabase(lambda schedule: False)
    with ms.database.UnionDatabase(empty, of_a_function):
        tvm.ir.assert_structural_equal(Fuse(TARGET)(block()), wanted)


# ---- what MetaSchedule asks


def test_it_answers_as_a_database_of_metaschedule(folder):
    database = tvm_fusion.TuningDatabase(folder)
    records = database.get_all_tuning_records()
    assert len(database) == len(records) == 3
    assert {type(record) for record in records} == {ms.database.TuningRecord}
    [product] = [r.workload for r in records if float(r.run_secs[0]) == pytest.approx(1e-5)]
    top = database.get_top_k(product, 5)
    assert [float(r.run_secs[0]) for r in top] == pytest.approx([1e-5, 2e-5])
    assert len(database.get_top_k(product, 1)) == 1
    unknown = ms.database.Workload(_main(_other_function()))
    assert list(database.get_top_k(unknown, 1)) == []
    stamped = [_main(func) for func in kernels(Fuse(TARGET, write=False)(block())).values()]
    for mod in (*(record.workload.mod for record in records), *stamped):
        assert database.has_workload(mod)
    for mod in (unknown.mod, tvm.IRModule({})):
        assert not database.has_workload(mod)


def test_a_query_gets_a_schedule_or_nothing(folder):
    database = tvm_fusion.TuningDatabase(folder)
    functions = kernels(Fuse(TARGET, write=False)(block()))
    record = database.query(_main(functions.pop(PRODUCT)), TARGET, kind="record")
    assert float(record.run_secs[0]) == pytest.approx(1e-5)
    assert [inst.kind.name for inst in record.trace.insts].count("Parallel") == 2
    [norm] = functions.values()  # the untuned kernel is best, and no schedule
    assert database.query(_main(norm), TARGET, kind="record") is None
    assert database.query(_main(_other_function()), TARGET) is None
    assert database.query(_main(norm), OTHER) is None


def test_apply_database_schedules_what_it_can_and_fuse_writes_the_rest(folder):
    fused = Fuse(TARGET, write=False)(block())
    with TARGET, tvm_fusion.TuningDatabase(folder):
        applied = relax.transform.MetaScheduleApplyDatabase()(fused)
        written = Fuse()(applied)
        again = relax.transform.MetaScheduleApplyDatabase()(written)
    scheduled = [n for n, f in kernels(applied).items() if "tirx.is_scheduled" in f.attrs]
    assert scheduled == [PRODUCT]
    assert launches(written) == launches(fused)
    tvm.ir.assert_structural_equal(again, written)
    for mod in (applied, written):
        check_numbers(tvm.compile(mod, TARGET))


def test_a_tuner_of_tvm_cannot_write_to_it(folder):
    database = tvm_fusion.TuningDatabase(folder)
    with pytest.raises(InputError, match="give TVM's tuner a database of its own"):
        database.commit_workload(_main(_other_function()))
    with pytest.raises(InputError, match="give TVM's tuner a database of its own"):
        database.commit_tuning_record(database.get_all_tuning_records()[0])
    copy = ms.database.MemoryDatabase()
    database.dump_pruned(copy)
    assert len(copy) == 2


def _main(func: tirx.PrimFunc) -> tvm.IRModule:
    return tvm.IRModule({"main": func})


def _other_function() -> tirx.PrimFunc:
    mod = relax.transform.LegalizeOps()(cases(LLVM)["rows"].make())
    return next(iter(kernels(mod).values()))


# ---- databases that are none, or not for this


def test_a_database_of_another_target_is_an_error_where_it_is_given(folder):
    with pytest.raises(NothingTuned, match=r'holds nothing for .*"num-cores": 4.*"num-cores": 2'):
        Fuse(OTHER, database=folder)(block())


def test_a_database_of_another_target_around_a_compilation_is_said_to_be_unused(folder, caplog):
    with tvm_fusion.TuningDatabase(folder), caplog.at_level(logging.WARNING):
        compiled = tvm_fusion.compile(block(), OTHER, verify=False)
        found = Fuse(OTHER)(block())
    tvm.ir.assert_structural_equal(found, Fuse(OTHER)(block()))
    assert not any(group.get("tuned") for group in compiled.report.to_json()["groups"])
    said = [m for m in caplog.messages if "nothing tuned is used" in m]
    assert len(said) == 2
    assert all("holds nothing for" in message for message in said)


def test_a_database_of_another_device_of_the_module_is_said_to_be_unused(folder, caplog):
    mod = cases(dict(OTHER.export()))["vdevice"].make()
    with caplog.at_level(logging.WARNING):
        fused = Fuse(database=folder)(mod)
    assert launches(fused) == {"main": 1}
    assert any("nothing tuned is used" in message for message in caplog.messages)


def test_a_damaged_line_costs_itself_only(folder, tmp_path, caplog):
    shutil.copytree(folder, tmp_path / "tuned")
    [file] = (tmp_path / "tuned").glob(f"*/{TRIALS}")
    file.write_text(file.read_text() + "{\n")
    with caplog.at_level(logging.WARNING):
        database = tvm_fusion.TuningDatabase(tmp_path / "tuned")
        found = Fuse(TARGET, database=database)(block())
    tvm.ir.assert_structural_equal(found, Fuse(TARGET, database=folder)(block()))
    assert len(database) == 3
    assert any("problems in the database" in message for message in caplog.messages)


def _other_files(path):
    (path / "notes.txt").write_text("")


def _json_database(path):
    (path / WORKLOADS).write_text("")


def _another_format(path):
    database = fill(path)
    file = database.path / TRIALS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "VERSION", 3)
        first = lines.Content(database.device, database.target).lines(lines.Content())
    file.write_text("".join([*first, *file.read_text().splitlines(keepends=True)[1:]]))


def _one_device(path):
    (path / TRIALS).write_text("")


WRONG = {
    "missing": (lambda path: path.rmdir(), "there is no database"),
    "empty": (lambda path: None, "is no database of tvm_fusion: it is empty"),
    "other files": (_other_files, r"is no database of tvm_fusion.*it holds notes\.txt"),
    "MetaSchedule's": (_json_database, r"of MetaSchedule, not of tvm_fusion.*JSONDatabase"),
    "another format": (_another_format, "has version 3 of the format.* reads version 2"),
    "one device's": (_one_device, "is the folder of one device in a database: name the"),
}
OPENED = {
    "database": lambda path: len(tvm_fusion.TuningDatabase(path)),
    "pass": lambda path: Fuse(TARGET, database=path)(block()),
    "compile": lambda path: tvm_fusion.compile(block(), TARGET, database=path),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("by", OPENED)
def test_what_is_no_database_is_not_opened(tmp_path, kind, by):
    path = tmp_path / "D"
    path.mkdir()
    make, message = WRONG[kind]
    make(path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=message):
        OPENED[by](path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", [kind for kind in WRONG if kind not in ("missing", "empty")])
def test_tuning_begins_in_no_folder_of_something_else(tmp_path, kind):
    make, message = WRONG[kind]
    make(tmp_path)
    with pytest.raises(InputError, match=message.split(":")[0]):
        tvm_fusion.tune(block(), TARGET, database=tmp_path)


def test_a_place_that_cannot_be_written_is_said_before_anything_is_planned(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "planned_functions", lambda *_: pytest.fail("planned"))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file is not a folder"):
        tvm_fusion.tune(block(), TARGET, database=tmp_path / "file")
    with pytest.raises(InputError, match=r"cannot make .*tuned: .*file is not a folder"):
        tvm_fusion.tune(block(), TARGET, database=tmp_path / "file" / "tuned")
    monkeypatch.setattr("os.access", lambda path, _: path != tmp_path)  # root may write anywhere
    with pytest.raises(InputError, match=r"cannot write to .*: make it writable"):
        tvm_fusion.tune(block(), TARGET, database=tmp_path / "tuned")


def test_what_is_given_as_a_database_has_to_be_one():
    with pytest.raises(InputError, match=r"a folder or a tvm_fusion\.TuningDatabase, not a Mem"):
        Fuse(TARGET, database=ms.database.MemoryDatabase())(block())
    with pytest.raises(InputError, match=r"TuningDatabase: give a folder .*, not a NoneType"):
        tvm_fusion.TuningDatabase(None)


# ---- tune


def test_tune_documents_its_parameters():
    documented = inspect.getdoc(tvm_fusion.tune)
    for name in inspect.signature(tvm_fusion.tune).parameters:
        assert name in documented
