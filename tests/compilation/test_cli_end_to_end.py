"""The command line with the real compiler, on the CPU."""

import json

import pytest

from tvm_fusion import cli

MODEL = """
from tvm.script import ir as I
from tvm.script import relax as R


@I.ir_module
class Model:
    @R.function
    def main(x: R.Tensor((8, 32), "float32")):
        with R.dataflow():
            y = R.exp(R.multiply(x, R.const(0.1, "float32")))
            total = R.sum(y, axis=[-1])
            R.output(y, total)
        return y, total
"""


@pytest.fixture
def model(tmp_path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return str(path)


def report(capsys, *arguments: str) -> dict:
    """Run a command that succeeds, without peers, and return its JSON object."""
    if arguments[0] == "compile":
        arguments = (*arguments, "--peers", "none")
    assert cli.main([*arguments, "--target", "llvm", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *arguments: str) -> str:
    """Run a command on bad input and return its one line."""
    assert cli.main([*arguments, "--target", "llvm"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()[-1]


def test_the_demo_is_compiled_run_verified_and_timed(capsys):
    data = report(capsys, "compile", "--demo")
    assert data["launches"]["fused"] <= 13 < 24 <= data["launches"]["unfused"]
    assert data["bytes"]["fused"] < data["bytes"]["unfused"]
    assert data["time_us"]["fused"] > 0
    assert data["time_us"]["unfused"] > 0
    assert data["verify"]["passed"] is True
    assert [group["fallback"] for group in data["groups"] if group["fallback"]] == []


def test_explain_builds_nothing(capsys, model):
    data = report(capsys, "explain", model)
    assert data["launches"]["fused"] == 1
    assert data["verify"] is None
    assert data["time_us"] == {"fused": None, "unfused": None}


def test_verify_gives_the_error_of_every_group(capsys, model):
    data = report(capsys, "verify", model)
    assert data["verify"]["passed"] is True
    assert data["groups"]
    assert all(group["error"] is not None for group in data["groups"])


def test_a_compiled_model_is_saved(capsys, model, tmp_path):
    report(capsys, "compile", model, "-o", str(tmp_path / "model.so"))
    assert (tmp_path / "model.so").stat().st_size > 0


def test_a_plan_can_be_run_again(capsys, model, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(report(capsys, "explain", model)["plan"]))
    assert report(capsys, "compile", model, "--plan", str(plan))["plan"] == json.loads(
        plan.read_text()
    )


def test_a_plan_for_another_module_is_refused(capsys, model, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(report(capsys, "explain", "--demo")["plan"]))
    assert "plan" in refusal(capsys, "compile", model, "--plan", str(plan))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"groups": 3}'])
def test_a_broken_plan_is_refused(capsys, model, tmp_path, text):
    plan = tmp_path / "plan.json"
    plan.write_text(text)
    assert "plan" in refusal(capsys, "compile", model, "--plan", str(plan))


@pytest.mark.parametrize("suffix", [".onnx", ".pt2", ".py", ".json", ".txt"])
def test_a_broken_model_is_refused(capsys, tmp_path, suffix):
    path = tmp_path / f"broken{suffix}"
    path.write_text("this is no model")
    line = refusal(capsys, "compile", str(path))
    assert line.startswith("tvm_fusion: error: ")
    assert path.name in line
