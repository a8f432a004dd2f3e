"""Trials whose numbers nobody compared: not measured, as it were."""

from dataclasses import replace

import pytest

from tvm_fusion.config import resolve_target
from tvm_fusion.tuning.database import Database, check, export, folder_of, workload_key
from tvm_fusion.tuning.measure.trial_record import Trial
from tvm_fusion.tuning.session.choices import chosen
from tvm_fusion.tuning.session.lookup import tuned_kernels

from ..support.tune_database_tools import (
    DAY,
    DEVICE,
    TARGET,
    WORKLOADS,
    in_child,
    records_of,
    stock_records,
)

A, B, _ = WORKLOADS


def trial(text, us, count, error=1e-7):
    """A trial with this many samples, all the same."""
    return Trial("class", text, "ok", us, 0.0, (us,) * count, error, date=DAY)


FIRST = trial("default", 9.0, 9), trial("Way(n=1)", 7.0, 9)
FINAL = trial("default", 8.0, 45), trial("Way(n=1)", 6.0, 45)


@pytest.fixture
def folder(tmp_path):
    """Two tuned workloads; the finals of the first are unchecked, and all of the second."""
    database = Database.open(tmp_path / "D", DEVICE, target=TARGET)
    for one in (*FIRST, *(replace(x, error=None) for x in FINAL)):
        database.add(A, TARGET, one)
    for one in FINAL:
        database.add(B, TARGET, replace(one, error=None))
    return tmp_path / "D"


def test_a_trial_that_was_checked_is_not_replaced_by_one_that_was_not(folder):
    for read_only in (True, False):
        database = Database.open(folder, DEVICE, read_only=read_only)
        assert len(database) == 6
        assert database.trials(A) == FIRST
        assert [t.checked for t in database.trials(B)] == [False, False]
        assert (database.best(A), database.best(B)) == (FIRST[1], None)
        assert chosen(database.trials(A), 0.01) == FIRST[1]
        assert chosen(database.trials(B), 0.01) is None


def test_what_is_measured_again_counts(folder):
    database = Database.open(folder, DEVICE)
    database.add(B, TARGET, FIRST[0])
    database.add(B, TARGET, Trial("class", "Way(n=1)", "timeout", why="60 s", date=DAY))
    for found in (database, Database.open(folder, DEVICE)):
        assert [(t.status, t.checked) for t in found.trials(B)] == [("ok", True), ("timeout", True)]
        assert found.unchecked() == []


def test_check_counts_them_and_they_are_no_problem(folder):
    report = check(folder)
    assert (report.ok, report.folders[0].unchecked, report.folders[0].records) == (True, 2, 6)
    assert "2 trials are unchecked (from records of MetaSchedule)" in str(report)
    assert report.to_json()["folders"][0]["unchecked"] == 2
    database = Database.open(folder, DEVICE)
    for one in FINAL:
        database.add(B, TARGET, one)
    assert "unchecked" not in str(check(folder))


def test_metaschedule_sees_them(folder, tmp_path):
    database = Database.open(folder, DEVICE)
    export(folder, tmp_path / "out")
    counted = [(workload_key(f), t) for f in (A, B) for t in database.trials(f)]
    assert in_child(stock_records, tmp_path / "out") == records_of(counted)


def test_a_compilation_says_in_one_line_that_it_does_not_use_them(tmp_path, caplog):
    target, hw = resolve_target("llvm")
    for place, error in (("one", 0.0), ("two", None)):
        folder = tmp_path / place / folder_of(hw, target)
        database = Database.open(folder, folder.name, target=target)
        for func in (A, B):
            for one in FINAL:
                database.add(func, target, replace(one, error=error))
    kernels = tuned_kernels(tmp_path / "one", hw, target)
    assert kernels.trial(A).us == FINAL[1].us
    assert caplog.messages == []
    kernels = tuned_kernels(tmp_path / "two", hw, target)
    assert kernels.trial(A) is None
    (message,) = caplog.messages
    assert "the times of 2 untuned kernels are unchecked" in message
