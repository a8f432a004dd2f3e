"""The benchmark: workloads, peers, checks, and what is written down."""

import json
import math
from pathlib import Path

import pytest
import torch
import tvm

from tvm_fusion.config import load_profile
from tvm_fusion.errors import InputError, TargetError

from ..support.runtime_cases import LLVM
from . import workloads
from .__main__ import main
from .peers.registry import PEERS, outputs_of, tvm_default
from .rows import together
from .rows.accuracy import checked_error, reference, relative_error
from .rows.together import limit_us
from .run import run_suite

SMALL = 0.02
ROW_KEYS = {
    "name",
    "shape",
    "dtype",
    "ours_us",
    "launches",
    "limit_us",
    "error",
    "registers",
    "spill_bytes",
    "peers_us",
}


@pytest.mark.parametrize("name", workloads.SUITES["all"])
def test_every_workload_runs_and_is_its_own_reference_up_to_rounding(name):
    instance = workloads.make(name, "cpu", "float32", SMALL)
    again = workloads.make(name, "cpu", "float32", SMALL)
    assert all(torch.equal(x, y) for x, y in zip(instance.inputs, again.inputs, strict=True))
    wanted, _ = reference(instance)
    with torch.no_grad():
        given = outputs_of(instance.module(*instance.inputs))
    assert all(w.dtype == torch.float64 for w in wanted if w.is_floating_point() and w.itemsize > 1)
    assert relative_error(given, wanted) < 1e-5
    assert sum(x.nbytes for x in instance.inputs) < 2**24


def test_full_sizes_and_limits_are_those_of_the_table():
    h200 = load_profile("nvidia_h200")
    rows = torch.empty(8192, 4096, dtype=torch.float16, device="meta")
    softmax = workloads.Instance("softmax", torch.nn.Identity(), (rows,), "float16")
    assert softmax.shape == "8192x4096"
    assert limit_us(softmax, [rows], 0, h200) == pytest.approx(31.4, rel=0.01)
    assert limit_us(softmax, [rows], 2 * 4096**3, h200) == pytest.approx(177.5, rel=0.01)


@pytest.mark.parametrize(
    ("given", "error"),
    [([[1.0, 2.0]], 0.0), ([[1.0, 1.0]], 0.5), ([[1.0, math.nan]], math.inf), ([[1.0]], math.inf)],
    ids=["equal", "half", "NaN", "another shape"],
)
def test_errors_are_relative_to_the_largest_reference(given, error):
    tensors = [torch.tensor(g) for g in given]
    assert relative_error(tensors, [torch.tensor([1.0, 2.0], dtype=torch.float64)]) == error


def test_an_output_that_is_not_written_shows_as_an_infinite_error():
    buffer, wanted = torch.ones(4), [torch.ones(4, dtype=torch.float64)]
    assert checked_error(lambda: buffer, (), wanted) == math.inf
    assert checked_error(lambda: buffer.fill_(1), (), wanted) == 0
    assert checked_error(lambda: torch.ones(4), (), wanted) == 0
    buffer.fill_(1)
    assert checked_error(lambda: buffer, (buffer,), wanted) == 0  # an input, not ours to fill


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "few.json"
    names = ("softmax", "fanout2", "swiglu_mlp")
    returned = run_suite(names, ("torch", "tvm"), "llvm", out, scale=SMALL, repeats=3, budget_s=0.2)
    return returned, json.loads(out.read_text())


def test_a_run_returns_what_it_writes(results):
    returned, written = results
    assert returned == written
    assert {"device", "date", "versions", "command", "rows"} <= written.keys()
    assert written["versions"]["apache-tvm"]
    assert [row["name"] for row in written["rows"]] == ["softmax", "fanout2", "swiglu_mlp"]


def test_every_row_has_times_errors_and_launches(results):
    for row in results[1]["rows"]:
        assert row.keys() >= ROW_KEYS
        assert row["failures"] == {}
        assert row["ours_us"] > 0
        assert row["limit_us"] > 0
        assert row["launches"] >= 1
        assert 0 < row["error"] < 1e-4
        assert row["peers_us"].keys() == {"torch", "tvm"}
        assert all(us > 0 for us in row["peers_us"].values())


def test_what_fails_is_recorded_and_the_run_goes_on(monkeypatch, tmp_path):
    def broken(_instance, _target):
        raise RuntimeError("\n  the peer's own words\nand a traceback")

    def wrong(instance, _target):
        return lambda: torch.zeros_like(instance.inputs[0])

    def unready(*_):
        raise MemoryError("no room")

    monkeypatch.setitem(PEERS, "torch", broken)
    monkeypatch.setitem(PEERS, "jax", wrong)
    make = workloads.make
    monkeypatch.setattr(
        workloads, "make", lambda name, *a: unready() if name == "softmax" else make(name, *a)
    )
    result = run_suite(
        ["softmax", "chain4"], ("torch", "jax"), "llvm", scale=SMALL, repeats=3, budget_s=0.1
    )
    lost, row = result["rows"]
    assert lost["failures"] == {"workload": "MemoryError: no room"}
    assert lost["ours_us"] is None
    assert row["failures"]["torch"] == "RuntimeError: the peer's own words and a traceback"
    assert row["failures"]["jax"] == "an error of 1.0e+00 against float64; 1e-04 is allowed"
    assert row["peers_us"]["torch"] is None
    assert row["peers_us"]["jax"] > 0
    assert row["ours_us"] > 0


def test_our_own_failure_is_recorded_and_is_the_exit_status(monkeypatch, tmp_path):
    def broken(*_args, **_options):
        raise RuntimeError("our own words")

    monkeypatch.setattr("tests.benchmarks.rows.ours.compile_function", broken)
    out = tmp_path / "new" / "chain4.json"
    arguments = ["--suite", "chain4", "--peers", "torch.eager", "--target", "llvm"]
    assert main([*arguments, "--scale", "0.01", "--repeats", "3", "--out", str(out)]) == 1
    (row,) = json.loads(out.read_text())["rows"]
    assert row["failures"] == {"tvm_fusion": "RuntimeError: our own words"}
    assert (row["ours_us"], row["error"]) == (None, None)
    assert row["peers_us"]["torch"] > 0


@pytest.mark.parametrize(
    ("names", "peers", "message"),
    [(["softmux"], ["torch"], "softmux"), (["softmax"], ["torsh"], "torsh")],
)
def test_misspelt_names_stop_a_run_before_it_begins(names, peers, message, monkeypatch):
    monkeypatch.setattr(together, "measure", lambda *_: pytest.fail("it began"))
    with pytest.raises(InputError, match=message):
        run_suite(names, peers, "llvm")


def test_a_run_without_the_device_is_refused(monkeypatch):
    monkeypatch.setattr("tvm.runtime.Device.exist", False)
    with pytest.raises(TargetError, match="no cuda device"):
        run_suite(["softmax"], [], "nvidia_h200")


def test_8_bit_floats_come_from_tvm_though_torch_takes_none_by_dlpack(monkeypatch):
    wanted = torch.tensor([1.5, -448.0, 0.0, 0.125]).to(torch.float8_e4m3fn)
    value = tvm.runtime.from_dlpack(wanted.clone().view(torch.uint8))
    value = value._create_view(value.shape, "float8_e4m3fn")
    take = torch.from_dlpack

    def refuse(tensor):
        if "float8" in str(tensor.dtype):
            raise BufferError("no such type")
        return take(tensor)

    monkeypatch.setattr(torch, "from_dlpack", refuse)
    (given,) = outputs_of(value)
    assert given.dtype == wanted.dtype
    assert torch.equal(given.view(torch.uint8), wanted.view(torch.uint8))


def test_the_default_pipeline_of_tvm_gives_right_numbers():
    instance = workloads.make("layernorm", "cpu", "float32", SMALL)
    assert (
        checked_error(tvm_default(instance, LLVM), instance.inputs, reference(instance)[0]) < 1e-5
    )


@pytest.mark.gpu
def test_a_run_on_the_gpu_times_kernels_and_reports_registers():
    result = run_suite(["softmax"], ("torch", "tvm"), "cuda", scale=0.25, repeats=5)
    (row,) = result["rows"]
    assert row["failures"] == {}
    assert row["registers"] > 0
    assert row["spill_bytes"] == 0
    assert row["peers_launches"]["torch"] == 1
    assert row["ours_us"] > row["limit_us"] / 2


def _figures(root):
    return (root / "tutorials/pages/figures.md").read_text().splitlines()


@pytest.mark.parametrize(("suite", "count"), [("memory", 12), ("gemm", 12)])
def test_the_tables_of_figures_are_what_the_files_hold(suite, count):
    root = Path(__file__).resolve().parents[2]
    rows = {
        r["name"]: r for r in json.loads((root / f"tests/results/{suite}.json").read_text())["rows"]
    }
    lines = [line for line in _figures(root) if "x |" in line]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = [cells for cells in table if cells[0].split()[0] in rows]
    assert len(found) == count
    for cells in found:
        row = rows[cells[0].split()[0]]
        assert cells[1:3] == [str(row["launches"]), f"{row['ours_us']:.1f}"]
        assert cells[-1] == f"{row['best_peer_ratio']:.2f}x"


@pytest.mark.parametrize(("name", "count"), [("gemm", 36), ("gemm_sweep", 60)])
def test_every_measured_product_was_right_and_none_slower_than_unfused(name, count):
    root = Path(__file__).resolve().parents[2]
    rows = json.loads((root / f"tests/results/{name}.json").read_text())["rows"]
    assert len(rows) == count
    for row in rows:
        assert row["error"] < 1e-2, row["name"]
        assert "ours" not in row["failures"], row["name"]
        assert row["fallbacks"] == [], row["name"]
        assert row["spill_bytes"] == 0, row["name"]
        assert row["ours_us"] <= 1.02 * row["unfused_us"], row["name"]
