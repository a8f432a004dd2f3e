"""Programs with symbolic sizes: what they compute, which sizes are measured, and what is told."""

import json
import sys

import pytest
import torch

from tvm_fusion.errors import InputError

from ..__main__ import main
from ..peers.registry import outputs_of
from ..real_models.child import Work
from ..real_models.models import Where, exact
from ..record import OURS
from ..rows.accuracy import relative_error
from . import suite
from .child import COMPILED, DYNAMIC, EAGER, FOR_SIZE, LABELS, sizes_of
from .child import main as measured
from .programs import ODD, PROGRAMS, made

TINY = Where("cpu", torch.float32, tiny=True)
QUICK = ("softmax_columns", "transposed_sum")


@pytest.mark.one_in(24)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_exports_with_open_sizes_and_computes_what_its_exact_copy_does(name):
    module, inputs = made(name, TINY)
    shapes = PROGRAMS[name].dynamic_shapes(module, tiny=True)
    with torch.no_grad():
        exported = torch.export.export(module, inputs(ODD), dynamic_shapes=shapes).module()
        for size in (PROGRAMS[name].least, PROGRAMS[name].most(tiny=True)):
            given = inputs(size)
            doubled = [x.double() if x.is_floating_point() else x for x in given]
            wanted = outputs_of(exact(module, torch.float64)(*doubled))
            for run in (module, exported):
                assert relative_error(outputs_of(run(*given)), wanted) < 1e-5


def test_there_are_25_programs_of_all_families():
    assert len(PROGRAMS) == 25
    assert all(any(axes for axes in program.axes) for program in PROGRAMS.values())


@pytest.mark.parametrize(
    ("most", "edges", "sizes"),
    [
        (4096, (), [1, 7, 64, 65, 4096]),
        (4096, (1, 16, 512, 2048), [1, 7, 512, 513, 4096]),
        (64, (), [1, 7, 32, 33, 64]),
        (33, (16, 32, 40), [1, 7, 16, 17, 33]),
    ],
)
def test_sizes_are_on_both_sides_of_an_edge_between_versions(most, edges, sizes):
    assert sizes_of(1, most, edges) == sizes


def test_a_program_is_told_before_and_after_it_is_timed():
    told = []
    labels = (OURS, FOR_SIZE, EAGER)
    work = Work(QUICK[0], "cpu", "float32", True, labels, 2)
    measured(work, lambda row: told.append(json.loads(json.dumps(row))), lambda: True)
    before, after = told
    assert before["us"] == {}
    assert before["failures"] == {}
    assert after["sizes"] == [1, 7, 16, 17, 33]
    assert set(after["us"]) == set(after["errors"]) == set(after["host_us"]) == set(labels)
    assert all(us > 0 for times in after["us"].values() for us in times)
    assert all(error < 1e-5 for errors in after["errors"].values() for error in errors)


def test_wrong_results_of_a_size_are_failures_of_that_size(monkeypatch):
    wrong = torch.nn.functional.softmax
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda x: wrong(x, -1) + (len(x.T) > 20))
    told = []
    work = Work(QUICK[0], "cpu", "float32", True, (DYNAMIC, COMPILED, EAGER), 2)
    measured(work, told.append, lambda: False)
    (row,) = told
    assert row["failures"].keys() == {f"{DYNAMIC} at 33", f"{COMPILED} at 33"}
    assert all("against float64" in why for why in row["failures"].values())


@pytest.mark.nightly
def test_all_compilers_are_right_on_small_programs(tmp_path):
    out = tmp_path / "symbolic.json"
    only = ["--only", ",".join(QUICK), "--target", "llvm", "--scale", "0.01", "--repeats", "2"]
    assert main(["--suite", suite.NAME, *only, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert sorted(row["name"] for row in rows) == sorted(QUICK)
    for row in rows:
        assert row["failures"] == {}
        assert row["us"].keys() == set(LABELS)


PROCESS = """
import json, sys
work = json.loads(sys.argv[1])
if work["name"] == "bert_layer":
    sys.exit("out of memory")
row = {"name": work["name"], "shape": "1x1", "sizes": [1, 7], "us": {}, "failures": {}}
row |= {"ready_s": {"tvm_fusion": 3.0, "tvm_fusion.for_size": 2.0}, "host_us": {}}
print(json.dumps(row), flush=True)
sys.stdin.readline()
row["us"] = {"tvm_fusion": [10.0, 20.0], "tvm_fusion.for_size": [8.0, 20.0]}
row["us"] |= {"torch.compile.dynamic": [12.0, None], "torch.compile": [1.0, 1.0]}
row["us"] |= {"torch": [40.0, 50.0]}
row["host_us"] = {"tvm_fusion": 5.5, "tvm_fusion.for_size": 5.0}
print(json.dumps(row), flush=True)
"""


def test_what_fails_is_told_and_the_rest_is_timed_kept_and_summed_up(monkeypatch, tmp_path):
    monkeypatch.setattr(suite, "CHILD", (sys.executable, "-S", "-c", PROCESS))
    out, told = tmp_path / "symbolic.json", []
    result = suite.measure(
        ["rows", "bert_layer"], "cpu", out, lambda _, line: told.append(line), tiny=True, workers=2
    )
    assert json.loads(out.read_text()) == json.loads(json.dumps(result))
    rows = {row["name"]: row for row in result["rows"]}
    assert len(told) == len(rows) == 2
    assert "out of memory" in rows["bert_layer"]["failures"]["case"]
    assert suite.has_failed(rows["bert_layer"])
    assert not suite.has_failed(rows["rows"])
    shown = suite.text(result)
    assert "once / for the size (2): geometric mean 1.12x, largest 1.25x (rows 1)" in shown
    assert "once (2): geometric mean 1.73x, least 1.20x (rows 1)" in shown
    assert "once / for a size (1): geometric mean 1.50x, largest 1.50x (rows)" in shown
    assert "once / for the size (1): geometric mean 1.10x, largest 1.10x (rows)" in shown


def test_programs_and_compilers_are_chosen_by_name():
    assert suite.names_of(None) == tuple(PROGRAMS)
    assert suite.names_of("rows,swiglu,lstm_batch", (1, 2)) == ("rows", "lstm_batch")
    assert suite.labels_of("torch,torch.compile.dynamic") == (OURS, DYNAMIC, EAGER)
    with pytest.raises(InputError, match="'row' is none of mean_squared"):
        suite.names_of("row")
    with pytest.raises(InputError, match="'jax' is none of tvm_fusion"):
        suite.labels_of("jax")
