"""The benchmark of tuning: rows tuned within a time, then timed beside their untuned builds."""

import json

import pytest

from tvm_fusion.errors import InputError

from .builds import Build, Builds
from .gains import main, summary

OPTIONS = ["--target", "llvm", "--scale", "0.05", "--trials", "2", "--builders", "1"]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    out = folder / "tuning.json"
    options = [*OPTIONS, "--suite", "bias_gelu", "--minutes", "0.4", "--repeats", "3"]
    status = main([*options, "--work-dir", str(folder / "database"), "--out", str(out)])
    return status, json.loads(out.read_text())


# Always: `tuning/test_run`, and summaries of rows.
@pytest.mark.nightly
@pytest.mark.long
def test_a_row_has_its_trials_and_both_times(result):
    status, found = result
    assert status == 0
    (row,) = found["rows"]
    assert (row["name"], row["failures"]) == ("bias_gelu", {})
    assert row["tuning"]["trials"] >= 1
    assert row["gain"] == pytest.approx(row["untuned_us"] / row["tuned_us"])
    assert row["untuned_launches"] == 1
    assert row["tuned_launches"] == 1 or not row["same_kernels"]
    assert row["tuned_error"] < 1e-4


@pytest.mark.nightly
def test_the_summary_is_that_of_the_rows(result):
    _, found = result
    (row,) = found["rows"]
    assert found["summary"]["geomean_gain"] == pytest.approx(row["gain"])
    assert found["summary"]["trials"] == row["tuning"]["trials"]
    assert found["summary"]["missing"] == []


def test_rows_without_a_time_are_missing_not_counted():
    rows = [
        {"name": "a", "gain": 2.0, "failures": {}, "tuning": None, "tuning_s": 1.0},
        {"name": "b", "gain": 9.0, "failures": {"tuned": "wrong"}, "tuning": None, "tuning_s": 1.0},
    ]
    found = summary(rows)
    assert found["missing"] == ["b"]
    assert found["geomean_gain"] == pytest.approx(2.0)


def test_timing_needs_what_tuning_wrote(tmp_path):
    options = [*OPTIONS, "--stage", "time", "--work-dir", str(tmp_path)]
    with pytest.raises(InputError, match="needs what --stage tune wrote"):
        main([*options, "--suite", "bias_gelu", "--out", str(tmp_path / "none.json")])


def test_a_build_that_failed_says_why():
    builds = Builds({("a", "tuned"): Build("a.so", (("add",),)), ("a", "untuned"): "no nvcc"})
    assert builds.of("a", "tuned").same_as(Build("b.so", (("add",),)))
    assert not builds.of("a", "tuned").same_as(Build("b.so", (("add",),), ("Way(way=fast)",)))
    with pytest.raises(RuntimeError, match="untuned: no nvcc"):
        builds.of("a", "untuned")
