"""Layers on several devices: what is told of them, and that processes agree."""

import json
import sys

import pytest

from tvm_fusion.errors import InputError

from ..__main__ import main
from ..record import OURS
from . import suite
from .child import EAGER, PLAIN, covered

PROCESS = """
import json, sys
work = json.loads(sys.argv[1])
if work["name"] == "llama_8b_prefill":
    sys.exit("out of memory")
row = {"name": work["name"], "shape": "1x1", "wall_us": {}, "outside_share": {}, "notes": []}
row |= {"failures": {}, "predicted_us": 7.0, "collectives": [{"predicted_us": 3.0}] * 2}
print(json.dumps(row), flush=True)
sys.stdin.readline()
row["wall_us"] = {"tvm_fusion": 10.0, "torch": 40.0, "torch.reduce-overhead": 12.0}
row["kernel_us"] = {"tvm_fusion": 9.0}
print(json.dumps(row | {"is_last": False}), flush=True)
if work["name"] == "llama_8b_decode_1":
    sys.exit("lost the device")
row["outside_share"] = {"tvm_fusion": 0.04}
print(json.dumps(row), flush=True)
"""


@pytest.mark.parametrize(("simulated", "step_us"), [((), 13.0), ((4, 8), 15.0)])
def test_what_fails_is_told_and_the_rest_is_timed_and_kept(
    monkeypatch, tmp_path, simulated, step_us
):
    monkeypatch.setattr(suite, "CHILD", (sys.executable, "-S", "-c", PROCESS))
    out, told = tmp_path / "ranks.json", []
    names = ["llama_8b_prefill", "llama_8b_decode_1", "llama_8b_decode_16"]
    result = suite.measure(
        names,
        "cpu",
        out,
        lambda _, line: told.append(line),
        simulated=simulated,
        tiny=True,
        ready_s=30.0,
    )
    assert json.loads(out.read_text()) == json.loads(json.dumps(result))
    rows = {row["name"]: row for row in result["rows"]}
    assert len(told) == len(rows) == 3 * max(1, len(simulated))
    of = "1_of_8" if simulated else "x2"
    assert "out of memory" in rows[f"llama_8b_prefill_{of}"]["failures"]["case"]
    assert rows[f"llama_8b_decode_1_{of}"]["wall_us"][OURS] == 10.0  # what was told before
    last = rows[f"llama_8b_decode_16_{of}"]
    assert last["best_peer_ratio"] == pytest.approx(1.2)
    assert last["step_us"] == step_us
    assert "ours 10 us (4% outside)" in suite.line(last)


def test_a_mesh_of_one_is_beside_the_plain_model(monkeypatch, tmp_path):
    added = """row["wall_us"] = {"tvm_fusion": 10.0, "tvm_fusion.plain": 9.9}
row |= {"kernel_us": {"tvm_fusion": 8.0, "tvm_fusion.plain": 8.0}, "is_as_plain": True}
"""
    process = PROCESS.replace(
        'row["outside_share"] = {"tvm', added + 'row["outside_share"] = {"tvm'
    )
    monkeypatch.setattr(suite, "CHILD", (sys.executable, "-S", "-c", process))
    how = {"tiny": True, "ready_s": 30.0, "labels": (OURS, PLAIN)}
    result = suite.measure(
        ["llama_8b_decode_16"], "cpu", tmp_path / "one.json", lambda *_: None, ranks=1, **how
    )
    (row,) = result["rows"]
    assert row["plain_wall_ratio"] == pytest.approx(0.99)
    assert row["plain_kernel_ratio"] == 1.0
    assert row["best_peer"] is None  # the plain model is ours, too
    line = suite.line(row)
    assert "plain / ours, wall: 0.990" in line
    assert "equal to the plain model's" in line
    for many in ({"ranks": 2}, {"ranks": 1, "simulated": [4]}):
        with pytest.raises(InputError, match=r"--peers: tvm_fusion.plain is for --ranks 1"):
            suite.measure(["llama_8b_prefill"], "cpu", None, lambda *_: None, **many, **how)


def test_names_and_peers_are_looked_up():
    assert suite.labels_of(None) == (OURS, *suite.PEERS)
    assert suite.labels_of(EAGER) == (OURS, EAGER)
    with pytest.raises(InputError, match="--only: 'llama' is none of llama_8b_prefill"):
        suite.names_of("llama")


def test_what_spans_cover_together_counts_once():
    assert covered([(5, 9), (0, 4), (3, 6), (20, 21)]) == 10
    assert covered([]) == 0


@pytest.mark.nightly
def test_two_processes_give_what_one_does(tmp_path):
    out = tmp_path / "ranks.json"
    only = ["--only", "llama_8b_decode_1,llama_8b_prefill,fsdp_8b_prefill", "--peers", EAGER]
    how = ["--target", "llvm", "--scale", "0.01", "--repeats", "2", "--out", str(out)]
    assert main(["--suite", suite.NAME, *only, *how]) == 0
    for row in json.loads(out.read_text())["rows"]:
        assert row["failures"] == {}
        assert row["outside"] == {}
        assert row["wall_us"].keys() == {OURS, EAGER}


@pytest.mark.nightly
def test_a_mesh_of_one_gives_what_the_plain_model_does(tmp_path):
    out = tmp_path / "one.json"
    how = ["--only", "llama_8b_decode_1,llama_8b_prefill", "--peers", PLAIN, "--ranks", "1"]
    how += ["--target", "llvm", "--scale", "0.01", "--repeats", "2", "--out", str(out)]
    assert main(["--suite", suite.NAME, *how]) == 0
    for row in json.loads(out.read_text())["rows"]:
        assert row["failures"] == {}
        assert row["outside"] == {}
        assert row["wall_us"].keys() == {OURS, PLAIN}
        assert row["collectives"] == []
