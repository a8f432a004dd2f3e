"""`python -m tvm_fusion bench`: peers of a model, and where the suites are."""

import subprocess
import sys
from pathlib import Path

import pytest

from tvm_fusion import cli
from tvm_fusion.bench import compare
from tvm_fusion.bench.peers import PEERS, peers_of

ROOT = Path(__file__).parents[2]
NEW_COMMAND = "in a checkout: python -m tests.benchmarks --suite NAME"


@pytest.mark.parametrize(
    ("text", "peers"),
    [
        (None, ("tvm", "torch", "torch.compile")),
        ("torch,jax", ("torch", "torch.compile", "jax")),
        ("torch.eager, tvm,torch.eager", ("torch", "tvm")),
        ("onnxruntime,openvino", ("onnxruntime", "openvino")),
        ("none", ()),
    ],
)
def test_words_name_peers_of_a_model(text, peers):
    assert peers_of(text) == peers
    assert set(peers) <= PEERS.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments model --demo is required"),
        (["--demo", "--peers", "jaxx"], "did you mean 'jax'?"),
        (["--demo", "--peers", "sdpa"], "unknown peer 'sdpa'"),
        (["--demo", "--workers=2"], "unrecognized arguments: --workers=2"),
        (["--suite", "memory"], NEW_COMMAND),
        (["--workers", "14", "--suite", "memory", "--target", "cuda"], NEW_COMMAND),
        (["--suite"], NEW_COMMAND),
        (["--list"], NEW_COMMAND),
        (["--merge", "a.json", "b.json", "--out", "c.json"], NEW_COMMAND),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(compare, "bench", lambda *_, **__: pytest.fail("it began"))
    assert cli.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_the_suites_are_no_part_of_the_help(capsys):
    assert cli.main(["bench", "--help"]) == 0
    assert "suite" not in capsys.readouterr().out


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("arguments", [[], ["memory", "--target", "cuda"]])
def test_the_old_module_names_the_new_command(arguments):
    done = subprocess.run(
        [sys.executable, "-m", "tvm_fusion.bench", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert NEW_COMMAND in done.stderr
