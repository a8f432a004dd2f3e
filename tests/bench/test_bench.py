"""The benchmark: workloads, peers, checks, and what is written down."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

from tvm_fusion.bench import compare, suite, workloads
from tvm_fusion.bench.accuracy import checked_error, reference, relative_error
from tvm_fusion.bench.peers import PEERS, outputs_of, tvm_default
from tvm_fusion.bench.run import run_suite
from tvm_fusion.bench.suite import limit_us
from tvm_fusion.bench.twin import torch_library, twin
from tvm_fusion.cli import bench_main
from tvm_fusion.config import load_profile
from tvm_fusion.demo import demo_block
from tvm_fusion.errors import InputError, TargetError, Unsupported
from tvm_fusion.runtime.build.build import build
from tvm_fusion.runtime.calls.compiled_module import CompiledModule

from ..support.runtime_cases import LLVM, relax_module

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

    monkeypatch.setattr("tvm_fusion.compilation.compiler.Job.compile", broken)
    out = tmp_path / "new" / "chain4.json"
    arguments = ["chain4", "--peers", "torch.eager", "--target", "llvm", "--scale", "0.01"]
    assert bench_main([*arguments, "--repeats", "3", "--out", str(out)]) == 1
    (row,) = json.loads(out.read_text())["rows"]
    assert row["failures"] == {"tvm_fusion": "RuntimeError: our own words"}
    assert (row["ours_us"], row["error"]) == (None, None)
    assert row["peers_us"]["torch"] > 0


@pytest.mark.parametrize(
    ("names", "peers", "message"),
    [(["softmux"], ["torch"], "softmux"), (["softmax"], ["torsh"], "torsh")],
)
def test_misspelt_names_stop_a_run_before_it_begins(names, peers, message, monkeypatch):
    monkeypatch.setattr(suite, "measure", lambda *_: pytest.fail("it began"))
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


def test_the_demo_block_computes_the_same_in_torch():
    mod = demo_block(1, 16, 64, 4, 96, "float32")
    x = np.random.default_rng(0).standard_normal((1, 16, 64)).astype("float32")
    function, constants = twin(mod, torch_library("cpu"))
    given = function(constants, torch.from_numpy(x))
    wanted = CompiledModule.of(build(mod, LLVM))(x)
    np.testing.assert_allclose(given.numpy(), wanted, rtol=1e-4, atol=1e-5)


def _many_operators(bb, x, w):
    op = relax.op
    emit = bb.emit
    y = emit(op.nn.layer_norm(x, w, w, axes=[-1]))
    y = emit(op.nn.gelu(emit(op.add(y, emit(op.permute_dims(x))))))
    top = emit(op.max(y, axis=[1], keepdims=True))
    total = emit(op.sum(emit(op.exp(emit(op.subtract(y, top)))), axis=[1]))
    rows = emit(op.take(y, relax.const(np.asarray([2, 0], "int64")), axis=0))
    wide = emit(op.astype(emit(op.expand_dims(total, 0)), "float64"))
    half = emit(op.strided_slice(y, [1], [0], [8], [2]))
    parts = emit(relax.Tuple([y, top]))
    first = emit(relax.TupleGetItem(parts, 0))
    return relax.Tuple([emit(op.mean(first)), rows, wide, half])


def test_a_twin_computes_what_the_module_computes():
    mod = relax_module(_many_operators, ("x", (8, 8), "float32"), ("w", (8,), "float32"))
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal(shape).astype("float32") for shape in ((8, 8), (8,)))
    function, constants = twin(mod, torch_library("cpu"))
    given = function(constants, torch.from_numpy(x), torch.from_numpy(w))
    wanted = CompiledModule.of(build(mod, LLVM))(x, w)
    for got, want in zip(given, wanted, strict=True):
        assert got.numpy().dtype == want.dtype
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-5)


def test_a_twin_refuses_an_operator_that_it_does_not_know():
    mod = relax_module(lambda bb, x: relax.op.sort(x), ("x", (8,), "float32"))
    with pytest.raises(Unsupported, match=r"no operator relax\.sort"):
        twin(mod, torch_library("cpu"))


@pytest.mark.usefixtures("no_torch")
def test_a_model_is_timed_fused_and_unfused_and_by_peers():
    mod = relax_module(lambda bb, x: relax.op.sort(x), ("x", (32, 64), "float32"))
    report = compare.bench(mod, target="llvm", peers=("tvm", "torch"))
    assert report.time_us.fused > 0
    assert report.time_us.unfused > 0
    assert report.times["tvm"].low_us <= report.times["tvm"].median_us
    assert "this process needs no torch" in report.times["torch"].failure
    assert all(group.measured_us > 0 for group in report.groups)


def test_a_model_can_be_timed_without_torch():
    code = "import sys; sys.modules['torch'] = None; from tvm_fusion.bench.compare import bench"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.gpu
def test_a_run_on_the_gpu_times_kernels_and_reports_registers():
    result = run_suite(["softmax"], ("torch", "tvm"), "cuda", scale=0.25, repeats=5)
    (row,) = result["rows"]
    assert row["failures"] == {}
    assert row["registers"] > 0
    assert row["spill_bytes"] == 0
    assert row["peers_launches"]["torch"] == 1
    assert row["ours_us"] > row["limit_us"] / 2


@pytest.mark.parametrize(("suite", "count"), [("memory", 12), ("gemm", 12)])
def test_the_tables_of_the_readme_are_what_the_files_hold(suite, count):
    root = Path(__file__).resolve().parents[2]
    rows = {
        r["name"]: r for r in json.loads((root / f"tests/results/{suite}.json").read_text())["rows"]
    }
    lines = [line for line in (root / "README.md").read_text().splitlines() if "x |" in line]
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
