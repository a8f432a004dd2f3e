"""Models in real sizes: what they compute, how they are timed, and what is told of them."""

import json
import math
import re
import sys

import pytest
import torch

from tvm_fusion.errors import InputError

from ..__main__ import main
from ..record import OURS
from . import suite
from .child import EAGER, GRAPHS, TUNED, Work, compiled
from .child import main as measured
from .models import CASES, Where, WithCache, exact, make

TINY = Where("cpu", torch.float32, tiny=True)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2_prefill",
        "gemma2_2b_decode",
        "llama_8b_decode_16",
        "t5_base_encoder",
        "swin_t",
        "wav2vec2_base",
    ],
)
def test_a_small_one_computes_what_its_exact_copy_does(name):
    module, inputs = make(name, TINY)
    with torch.no_grad():
        doubled = [x.double() if x.is_floating_point() else x for x in inputs]
        wanted = exact(module, torch.float64, CASES[name].large)(*doubled)
        given = module(*inputs)
    assert wanted.dtype == torch.float64
    torch.testing.assert_close(given.double(), wanted, atol=1e-4, rtol=1e-4)


def test_a_step_gives_the_scores_of_the_whole_text_and_may_be_repeated():
    module, (token, position) = make("llama_1b_decode", TINY)
    text, _ = make("llama_1b_prefill", TINY)[1]
    with torch.no_grad():
        steps = [module(token, position) for _ in range(2)]
        whole = WithCache(module.model, 32)
        wanted = whole.step(torch.cat([text, token], 1))
    for scores in steps:
        torch.testing.assert_close(scores, wanted, atol=1e-5, rtol=1e-5)


def test_a_case_is_told_before_and_after_it_is_timed():
    told = []
    work = Work("unet_block", "cpu", "float32", True, (EAGER,), 2)
    measured(work, lambda row: told.append(json.loads(json.dumps(row))), lambda: True)
    before, after = told
    assert before["wall_us"] == {}
    assert before["failures"] == {}
    assert before["errors"][EAGER] < 1e-5
    assert after["wall_us"][EAGER] > 0


def test_wrong_results_and_compilers_without_time_are_failures(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module, **_: lambda *x: module(*x) * math.nan)
    work = Work("unet_block", "cpu", "float32", True, (OURS, EAGER, TUNED), 2, patience_s=1.0)
    with torch.no_grad():
        row, calls = compiled(work, math.inf)
    assert list(calls) == [EAGER]
    assert "not finite" in row["failures"][OURS]
    assert row["errors"][OURS] is None
    assert "no time was left" in row["failures"][TUNED]


@pytest.mark.nightly
def test_all_compilers_are_right_on_a_small_step(tmp_path):
    out = tmp_path / "models.json"
    only = ["--only", "gpt2_decode,unet_block", "--target", "llvm", "--scale", "0.01"]
    assert main(["--suite", suite.NAME, *only, "--repeats", "2", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert sorted(row["name"] for row in rows) == ["gpt2_decode", "unet_block"]
    for row in rows:
        assert row["failures"] == {}
        assert row["wall_us"].keys() == {OURS, EAGER, GRAPHS, TUNED}
        assert row["notes"] == []  # nothing runs outside our parts


PROCESS = """
import faulthandler, json, signal, sys, threading, time
faulthandler.register(signal.SIGUSR1, all_threads=False)
work = json.loads(sys.argv[1])
if work["name"] == "bert_base":
    sys.exit("out of memory")
if work["name"] == "vit_b16":
    print("begins:", "torch.compile", time.monotonic(), file=sys.stderr, flush=True)
    for _ in range(120):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    time.sleep(60)
row = {"name": work["name"], "shape": "1x1", "wall_us": {}, "notes": [], "failures": {}}
print(json.dumps(row), flush=True)
sys.stdin.readline()
if work["name"] == "swin_t":
    sys.exit("lost the device")
row["wall_us"] = {"tvm_fusion": 10.0, "torch": 40.0, "torch.reduce-overhead": 12.0}
print(json.dumps(row), flush=True)
"""


def test_what_fails_is_told_and_the_rest_is_timed_and_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(suite, "CHILD", (sys.executable, "-S", "-c", PROCESS))
    out, told = tmp_path / "models.json", []
    names = ["resnet50", "bert_base", "vit_b16", "swin_t"]
    result = suite.measure(
        names, "cpu", out, lambda _, line: told.append(line), tiny=True, workers=4, ready_s=2.0
    )
    assert json.loads(out.read_text()) == json.loads(json.dumps(result))
    rows = {row["name"]: row for row in result["rows"]}
    assert len(told) == len(rows) == 4
    assert "out of memory" in rows["bert_base"]["failures"]["case"]
    late = r"not compiled after 2 s, at torch.compile for [012] s, in <string>:\d+ <module>"
    assert re.fullmatch(late, rows["vit_b16"]["failures"]["case"])
    assert "lost the device" in rows["swin_t"]["failures"]["timing"]
    assert rows["resnet50"]["best_peer"] == GRAPHS
    assert rows["resnet50"]["best_peer_ratio"] == pytest.approx(1.2)
    assert "all (1): geometric mean 1.20x, least 1.20x (resnet50)" in suite.text(result)


def test_rows_of_earlier_runs_stay_and_those_measured_again_are_the_later_ones(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(suite, "CHILD", (sys.executable, "-S", "-c", PROCESS))
    out = tmp_path / "models.json"

    def run(*names, **how):
        how = {"tiny": True, "ready_s": 20.0} | how
        return suite.measure(names, "cpu", out, lambda *_: None, **how)

    run("resnet50", "bert_base")
    monkeypatch.setattr(suite, "CHILD", (sys.executable, "-S", "-c", PROCESS.replace("12.0", "9")))
    result = run("swin_t", "resnet50")
    assert json.loads(out.read_text()) == json.loads(json.dumps(result))
    assert [row["name"] for row in result["rows"]] == ["bert_base", "swin_t", "resnet50"]
    assert result["rows"][-1]["best_peer_ratio"] == pytest.approx(0.9)
    assert all(row["date"] == result["date"] for row in result["rows"])
    with pytest.raises(InputError, match=r"models.json does not go with this run: scale is 0.0"):
        run("unet_block", tiny=False)


def test_models_are_chosen_by_name_and_in_parts():
    assert suite.names_of(None) == tuple(CASES)
    assert suite.names_of("vit_b16,swin_t,resnet50", (1, 2)) == ("vit_b16", "resnet50")
    with pytest.raises(InputError, match="'vit' is no model; there are gpt2_prefill"):
        suite.names_of("vit")


def test_models_need_a_device_that_is_known(capsys):
    assert main(["--suite", suite.NAME, "--target", "metal"]) == 2
    assert "'metal' is none of cuda, llvm" in capsys.readouterr().err
