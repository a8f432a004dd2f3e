"""The command line: arguments, exit status, and what goes to which stream."""

import json
import os
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from tvm_fusion import cli, compilation
from tvm_fusion.config import load_policy
from tvm_fusion.errors import BuildError, FrontendError, PlanError, VerificationError
from tvm_fusion.host import interrupts
from tvm_fusion.host.interrupts import INTERRUPTED
from tvm_fusion.host.stages import stepped
from tvm_fusion.plan.plan import FusionPlan
from tvm_fusion.report.facts import (
    Comparison,
    GroupReport,
    PairReport,
    RefusalReport,
    Verification,
)
from tvm_fusion.report.screen import Report
from tvm_fusion.runtime.timing.timing import TimeReport

GROUP = GroupReport("fused_add", ("add", "exp"), (), "pointwise", 1, 8, 24, 1.0, 3.0)
REFUSAL = RefusalReport(
    "CYCLE", ("exp", "sum"), "sum feeds exp through a path outside", flip="model: move it"
)
REPORT = Report(
    target="llvm_cpu",
    launches=Comparison(1, 2),
    bytes=Comparison(8, 24),
    plan={"groups": []},
    groups=(GROUP,),
    refusals=(REFUSAL,),
    verify=Verification(True, 1e-6),
    times={"fused": TimeReport(1.0, 1.0, 1.0, 3, "wall")},
)


class StubCompiler:
    """Stands for the compiler: remembers the calls, answers with `report`, or raises."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.saved: list[str] = []
        self.report = REPORT
        self.error: BaseException | None = None
        self.noise = ""

    def compile(self, model, **options):
        return types.SimpleNamespace(
            report=self._answer("compile", model, options), save=self.saved.append
        )

    def compile_beside(self, model, peers, **options):
        return self.compile(model, peers=peers, **options)

    def explain(self, model, **options):
        return replace(self._answer("explain", model, options), verify=None)

    def bench(self, model, **options):
        return self._answer("bench", model, options)

    def _answer(self, command, model, options):
        self.calls.append((command, model, options))
        os.write(1, self.noise.encode())
        print(self.noise, end="")
        if self.error is not None:
            raise self.error
        return self.report


@pytest.fixture
def compiler(monkeypatch) -> StubCompiler:
    stub = StubCompiler()
    modules = {
        "compilation.compiler": types.SimpleNamespace(compile=stub.compile, explain=stub.explain),
        "bench.compare": types.SimpleNamespace(
            bench=stub.bench, compile_beside=stub.compile_beside
        ),
        "demo": types.SimpleNamespace(demo_module=lambda kind: f"demo for {kind}"),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"tvm_fusion.{name}", module)
    monkeypatch.setattr(compilation, "compiler", modules["compilation.compiler"], raising=False)
    monkeypatch.delenv("TVM_FUSION_DEBUG", raising=False)
    return stub


@pytest.fixture
def model(tmp_path) -> str:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"")
    return str(path)


def fails(capsys, arguments: list[str], status: int) -> str:
    """Run the command line, expect `status`, and return its only line, on standard error."""
    assert cli.main(arguments) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("command", ["compile", "explain", "verify", "bench"])
def test_each_command_prints_a_report_of_the_demo(compiler, capsys, command):
    assert cli.main([command, "--demo", "--target", "llvm"]) == 0
    assert capsys.readouterr().out.startswith("tvm_fusion on llvm_cpu\n")
    ((called, module, options),) = compiler.calls
    assert called == ("compile" if command == "verify" else command)
    assert module == "demo for llvm"
    assert options["target"] == "llvm"
    assert options["policy"] == load_policy()
    assert options["plan"] is None


@pytest.mark.parametrize("peers", [None, "tvm,openvino", "none"])
def test_compile_times_the_model_and_leaves_the_check_to_the_policy(compiler, peers):
    cli.main(["compile", "--demo", *([] if peers is None else ["--peers", peers])])
    options = compiler.calls[0][2]
    if peers == "none":
        assert options["time"] is True
    else:
        named = tuple(peers.split(",")) if peers else ("tvm", "torch", "torch.compile")
        assert options["peers"] == named
    assert options["measure"] is False
    assert "verify" not in options


@pytest.mark.parametrize("command", ["compile", "explain"])
def test_measure_is_asked_for_with_its_budget(compiler, command):
    assert cli.main([command, "--demo", "--target", "llvm", "--measure", "--budget", "7"]) == 0
    options = compiler.calls[0][2]
    assert options["measure"] is True
    assert options["policy"] == replace(load_policy(), measure_budget_s=7.0)


def test_a_budget_without_measure_is_refused(compiler, capsys):
    assert cli.main(["compile", "--demo", "--target", "llvm", "--budget", "7"]) == 2
    assert "--measure" in capsys.readouterr().err


def test_verify_reports_on_every_group_whatever_the_policy_says(compiler):
    cli.main(["verify", "--demo"])
    assert compiler.calls[0][2]["verify"] == "report"


def test_verify_fails_where_the_target_cannot_run(compiler, capsys):
    compiler.report = replace(REPORT, target="nvidia_h200", verify=None)
    line = fails(capsys, ["verify", "--demo", "--target", "h200"], 1)
    assert "nothing was verified: this machine cannot run nvidia_h200" in line


@pytest.mark.parametrize("command", ["compile", "explain", "verify", "bench"])
def test_json_is_exactly_one_object_on_stdout(compiler, capfd, command):
    compiler.noise = "chatter of a library\n"
    assert cli.main([command, "--demo", "--json"]) == 0
    out, err = capfd.readouterr()
    assert out.count("\n") == 1
    assert json.loads(out)["launches"] == {"fused": 1, "unfused": 2}
    assert err.count("chatter") == 2


def test_a_model_file_is_passed_on(compiler, model):
    assert cli.main(["compile", model]) == 0
    assert compiler.calls[0][1] == model


def test_the_compiled_module_is_saved_where_output_says(compiler, tmp_path):
    assert cli.main(["compile", "--demo", "-o", str(tmp_path / "model.so")]) == 0
    assert compiler.saved == [str(tmp_path / "model.so")]


@pytest.mark.parametrize("command", ["compile", "explain", "bench"])
def test_the_report_is_written_as_a_page_where_html_says(compiler, tmp_path, capsys, command):
    page = tmp_path / "page.html"
    assert cli.main([command, "--demo", "--json", "--html", str(page)]) == 0
    assert '"name":"fused_add"' in page.read_text()
    assert json.loads(capsys.readouterr().out)["groups"]
    assert cli.main([command, "--demo", "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "no such directory" in capsys.readouterr().err
    assert len(compiler.calls) == 1  # refused before the work


def test_a_plan_file_is_passed_on(compiler, tmp_path):
    plan = tmp_path / "plan.json"
    FusionPlan("main", "", "llvm_cpu", "default", ()).save(plan)
    cli.main(["compile", "--demo", "--plan", str(plan)])
    assert compiler.calls[0][2]["plan"] == plan


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ("aggressive", "aggressive"),
        ("rounding=exact", {"rounding": "exact"}),
        ("min_gain=0.5, verify=false", {"min_gain": 0.5, "verify": False}),
    ],
)
def test_a_policy_is_a_name_or_a_list_of_keys(compiler, given, policy):
    assert cli.main(["compile", "--demo", "--policy", given]) == 0
    assert compiler.calls[0][2]["policy"] == load_policy(policy)


def test_a_failed_check_is_status_1_and_still_reports(compiler, capsys):
    compiler.report = replace(REPORT, verify=Verification(False, 0.5))
    assert cli.main(["verify", "--demo"]) == 1
    assert "FAILED" in capsys.readouterr().out


PAIR = PairReport(
    ("add..exp", "sum"), "y (8 B) between them", "costs 1 us", refusals=(REFUSAL,), names=("a", "b")
)


def test_why_prints_the_answer_about_one_pair(compiler, capsys):
    compiler.report = replace(REPORT, pair=PAIR)
    assert cli.main(["explain", "--demo", "--why", "exp,sum"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a and b: y (8 B) between them",
        "price: costs 1 us",
        "why apart: CYCLE: exp, sum: sum feeds exp through a path outside",
        "to turn it: model: move it",
    ]
    assert compiler.calls[0][2]["why"] == "exp,sum"


def test_why_with_json_has_the_answer(compiler, capsys):
    compiler.report = replace(REPORT, pair=PAIR)
    assert cli.main(["explain", "--demo", "--json", "--why", "add,exp"]) == 0
    pair = json.loads(capsys.readouterr().out)["pair"]
    assert (pair["names"], pair["price"]) == (["a", "b"], "costs 1 us")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "arguments are required: COMMAND"),
        (["compile"], "one of the arguments model --demo is required"),
        (["compile", "a.onnx", "--demo"], "not allowed with argument"),
        (["explian", "--demo"], "invalid choice: 'explian'"),
        (["compile", "--demo", "--colour"], "unrecognized arguments: --colour"),
        (["verify", "--demo", "--output=x"], "unrecognized arguments: --output=x"),
        (["compile", "nowhere.onnx"], "no such model file: nowhere.onnx"),
        (["compile", "--demo", "--target", "h21"], "unknown target 'h21'"),
        (["compile", "--demo", "--target", "h2000"], "did you mean 'h200'?"),
        (["compile", "--demo", "--policy", "min_gian=1"], "did you mean 'min_gain'?"),
        (["compile", "--demo", "--policy", "agressive"], "did you mean 'aggressive'?"),
        (["compile", "--demo", "--policy", "min_gain=1,exact"], "expected KEY=VALUE, got 'exact'"),
        (["compile", "--demo", "--policy", "nowhere.toml"], "no such file: nowhere.toml"),
        (
            ["compile", "--demo", "--plan", "nowhere.json"],
            "nowhere.json: there is no such plan file",
        ),
        (["compile", "--demo", "-o", "nowhere/model.so"], "there is no such directory"),
        (["explain", "--demo", "--why", "exp"], "takes two names"),
    ],
)
def test_bad_input_is_one_line_and_status_2(compiler, capsys, arguments, message):
    assert message in fails(capsys, arguments, 2)


@pytest.mark.parametrize("error", [FrontendError("broken\nmodel"), PlanError("another module")])
def test_input_that_the_compiler_refuses_is_status_2(compiler, capsys, error):
    compiler.error = error
    assert " ".join(str(error).split()) in fails(capsys, ["compile", "--demo"], 2)


@pytest.mark.parametrize("error", [VerificationError("too wrong"), BuildError("no nvcc")])
def test_a_failure_of_the_compiler_is_status_1(compiler, capsys, error):
    compiler.error = error
    assert str(error) in fails(capsys, ["compile", "--demo", "--json"], 1)


def test_an_unexpected_error_is_one_line_that_says_how_to_see_more(compiler, capsys):
    compiler.error = ZeroDivisionError("division\nby zero")
    line = fails(capsys, ["compile", "--demo"], 1)
    assert "ZeroDivisionError: division by zero (set TVM_FUSION_DEBUG=1" in line


def test_debugging_raises_the_error(compiler, monkeypatch):
    monkeypatch.setenv("TVM_FUSION_DEBUG", "1")
    compiler.error = ZeroDivisionError("division by zero")
    with pytest.raises(ZeroDivisionError):
        cli.main(["compile", "--demo"])


def test_every_command_can_be_quiet():
    (commands,) = (a for a in cli._parser()._actions if isinstance(a.choices, dict))
    assert len(commands.choices) >= 10
    for name, command in commands.choices.items():
        assert "--quiet" in command._option_string_actions, name


def test_an_interrupt_is_a_line_that_says_what_is_kept_and_how_to_go_on(compiler, capsys):
    compiler.error = KeyboardInterrupt()
    assert "interrupted; plans and kernels that were ready are kept in" in fails(
        capsys, ["compile", "--demo"], INTERRUPTED
    )


def test_an_interrupt_that_arrives_as_another_error_is_an_interrupt(compiler, capsys, monkeypatch):
    compiler.error = RuntimeError("KeyboardInterrupt")  # as callbacks of TVM's pass it on
    monkeypatch.setattr(interrupts, "_received", True)
    assert "tvm_fusion: interrupted; " in fails(capsys, ["compile", "--demo"], INTERRUPTED)


def test_an_interrupt_that_got_lost_ends_the_next_step(monkeypatch):
    seen = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        for item in stepped("kernels written", range(4), 4):
            seen.append(item)
            monkeypatch.setattr(interrupts, "_received", item == 2)
    assert seen == [0, 1, 2]


def test_stdout_is_restored_after_an_error(compiler, capfd):
    compiler.error = BuildError("no nvcc")
    cli.main(["compile", "--demo"])
    os.write(1, b"still here\n")
    assert capfd.readouterr().out == "still here\n"


@pytest.mark.usefixtures("no_torch")
def test_the_module_runs_as_a_program_and_shows_its_commands():
    done = subprocess.run(
        [sys.executable, "-m", "tvm_fusion", "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert all(command in done.stdout for command in ("compile", "explain", "verify", "bench"))
