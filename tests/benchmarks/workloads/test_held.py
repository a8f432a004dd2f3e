"""Drawn programs: what a seed gives, and that we compute it."""

import json

import pytest
import torch

from .. import workloads
from ..__main__ import main
from ..predicted import Predicted, predict, text
from ..run import run_suite
from .held import CLASSES, EACH, SEEDS, SUITE, class_of, names_of_seed
from .held.draw import ELEMENTS

SMALL = 0.002
FIRST, REST = (
    [n for seed in SEEDS for n in names_of_seed(seed) if n.endswith("_0_0") is first]
    for first in (True, False)
)


def made(name, scale=1.0):
    return workloads.make(name, "meta", workloads.dtype_of(name, "none"), scale)


def test_a_seed_gives_programs_of_each_class():
    assert len(workloads.SUITES[SUITE]) == len(SEEDS) * len(CLASSES) * EACH
    assert workloads.names_of(SUITE, None, 77) == names_of_seed(77)
    assert {class_of(name) for name in names_of_seed(77)} == set(CLASSES)
    assert class_of("softmax") == class_of("held_scan_0") == ""


def test_sizes_are_drawn_evenly_a_third_of_them_odd():
    instances = [made(name) for name in workloads.SUITES[SUITE]]
    assert {i.dtype for i in instances} == {"float16", "bfloat16", "float32"}
    largest = [max(x.numel() for x in i.inputs) for i in instances]
    assert max(largest) < 2 * ELEMENTS[1]
    extents = [e for i in instances for e in i.inputs[0].shape if e > 16]
    assert 0.2 < sum(e % 2 for e in extents) / len(extents) < 0.5


def test_equal_names_give_equal_programs_in_every_size():
    for name in names_of_seed(1):
        one, again, small = made(name), made(name), made(name, SMALL)
        assert [x.shape for x in one.inputs] == [x.shape for x in again.inputs]
        assert [x.dim() for x in one.inputs] == [x.dim() for x in small.inputs]
        assert sum(x.numel() for x in small.inputs) < 1e7


def check(name):
    (row,) = predict([name], "nvidia_h200", scale=SMALL)
    assert row.failure == ""
    assert row.launches >= 1
    (row,) = run_suite([name], [], "llvm", scale=SMALL, repeats=1, budget_s=0.01)["rows"]
    assert row["failures"] == {}
    assert row["error"] is not None


@pytest.mark.one_in(18)
@pytest.mark.parametrize("name", FIRST)
def test_a_program_of_each_class_is_planned_for_a_gpu_and_right_on_a_cpu(name):
    check(name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", REST)
def test_all_programs_are_planned_for_a_gpu_and_right_on_a_cpu(name):
    check(name)


def test_predicted_times_are_a_table_and_json(capsys, tmp_path):
    arguments = ["--suite", SUITE, "--seed", "9", "--only", "held_int8_rows_9_0", "--predict"]
    arguments += ["--target", "nvidia_h200", "--scale", "0.01", "--out", str(tmp_path / "x.json")]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "held_int8_rows_9_0" in shown
    assert "1 programs, predicted over limit: geometric mean" in shown
    assert "0 by no class of ours" in shown
    (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert row["classes"] == {"row": 1}
    assert row["predicted_us"] > row["limit_us"] > 0
    assert torch.Size(map(int, row["shape"].split("x"))).numel() > 0


def test_programs_that_the_model_knows_nothing_of_count_in_no_mean():
    known = Predicted("known", launches=1, predicted_us=6.0, limit_us=3.0)
    unknown = Predicted("unknown", launches=1, others={"sort": 1}, predicted_us=0.0, limit_us=3.0)
    *_, told = text([known, unknown]).splitlines()
    assert "2 programs, predicted over limit: geometric mean   2.00, most   2.00" in told
    assert told.endswith("1 by no class of ours: sort")
    assert "geometric mean" not in text([unknown])
