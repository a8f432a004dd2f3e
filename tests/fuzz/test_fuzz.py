"""Random torch programs: how they are drawn, judged, reduced, and run by the command."""

import argparse
import importlib.util
import json
import random

import pytest
import torch

from tests.support import fuzz_judges
from tvm_fusion._arguments import fuzz_arguments
from tvm_fusion.cli import main
from tvm_fusion.errors import BuildError
from tvm_fusion.fuzz import command
from tvm_fusion.fuzz.campaign import STEPS, Campaign, Runner, draw_program, reduced
from tvm_fusion.fuzz.draw import Draft
from tvm_fusion.fuzz.torch_program import Input, Program, Statement
from tvm_fusion.fuzz.verdict import CRASH, ERROR, REFUSED, RIGHT, WRONG, Verdict, judged, judged_run

from ..support.tune_sessions import end_time_of_what_hangs

SOFTMAX = Program(
    (
        Input("x0", "torch.randn((9, 14))[..., 1::2]"),
        Input("x1", "torch.randn((9, 1)).expand(9, 7)"),
    ),
    (
        Statement("v0", "{out} = torch.tanh({0}) + {1}", ("x0", "x1")),
        Statement("v1", "{out} = {0}.clone()\n{out}[2:] *= 0.5", ("v0",)),
        Statement("v2", "{out} = torch.softmax({0}, 0)", ("v1",)),
        Statement("v3", "{out} = {0}.sum(1)", ("v2",)),
        Statement("v4", "{out} = torch.relu({0})", ("x1",)),
    ),
    ("v3", "v4"),
    seed=5,
)


# ---- drawing


@pytest.mark.parametrize("seed", range(6))
def test_a_seed_draws_the_same_program_whose_values_float64_agrees_with(seed):
    program = draw_program(seed, 12)
    assert program == draw_program(seed, 12)
    arguments = program.arguments()
    own, exact = program.eager(arguments), program.exact(arguments)
    for x, ref in zip(own, exact, strict=True):
        assert x.shape == ref.shape
        if not x.is_floating_point():
            assert torch.equal(x, ref)
        else:
            assert ref.dtype == torch.float64
            assert (x.double() - ref).abs().max() <= 0.1 * ref.abs().max() + 1e-3


@pytest.mark.one_in(40)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_each_step_draws_statements_that_torch_runs(step):
    kept = 0
    for seed in range(8):
        draft = Draft(random.Random(seed), seed, "float32")
        for shape in ((7, 9), (3, 5, 8), (2, 6, 5, 7)):
            draft.input(shape, "float32")
        draft.input((7, 9), "bool")
        draft.input((7, 9), "int32")
        draft.keep(Statement("v0", "{out} = {0} * 2", ("x0",)))
        statement = step.draw(draft)
        kept += statement is not None and draft.keep(statement)
    assert kept >= 2


def test_a_refused_statement_leaves_the_values_as_they_were():
    draft = Draft(random.Random(0), 0, "float32")
    draft.input((4,), "float32")
    assert draft.keep(Statement("v0", "{out} = {0} + 1", ("x0",)))
    before = draft.own["v0"].clone()
    assert not draft.keep(Statement("v1", "{0}[:] += float('inf')\n{out} = {0}", ("v0",)))
    assert torch.equal(draft.own["v0"], before)
    assert list(draft.own) == ["x0", "v0"]


def test_programs_hold_views_writes_and_each_type():
    sources = [draw_program(seed, 40) for seed in range(100, 112)]
    text = "".join(p.source() + "".join(i.code for i in p.inputs) for p in sources)
    for word in ("] += ", ".expand(", "[..., 1::2]", ".transpose(", "bool", "int", "float16"):
        assert word in text


# ---- judging


def judged_as(change):
    arguments = SOFTMAX.arguments()

    def run(given):
        return [change(x) for x in SOFTMAX.eager(given)]

    return judged_run(SOFTMAX, lambda: run, [arguments])


def test_a_right_program_is_right():
    assert judged_as(lambda x: x) == Verdict(RIGHT)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda x: x * 1.001, "error"),
        (lambda x: x.double(), "float64"),
        (lambda x: x[:1], "not float32"),
        (lambda x: torch.full_like(x, float("nan")), "error inf"),
    ],
    ids=["numbers", "type", "shape", "nan"],
)
def test_a_wrong_output_is_named(change, what):
    verdict = judged_as(change)
    assert (verdict.kind, verdict.output) == (WRONG, 0)
    assert what in verdict.why


@pytest.mark.parametrize(
    ("error", "kind"), [(BuildError("no schedule"), REFUSED), (KeyError("x"), ERROR)], ids=str
)
def test_what_fails_to_compile_is_refused_or_an_internal_error(error, kind):
    def build():
        raise error

    verdict = judged_run(SOFTMAX, build, [SOFTMAX.arguments()])
    assert verdict.kind == kind
    assert verdict.failed == (kind == ERROR)


def test_a_program_is_judged_on_llvm():
    assert judged(SOFTMAX, "llvm") == Verdict(RIGHT)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("off", "kind"), [(0.0, RIGHT), (4e-14, RIGHT), (4e-12, WRONG)])
def test_float64_is_held_against_a_reference_that_rounds_as_it_does(off, kind):
    """torch and plain loops add up terms that are alike, each time off in the same direction."""
    program = Program(
        (Input("x0", "torch.relu(torch.randn((63, 5, 9))).to(torch.float64)"),),
        (Statement("v0", "{out} = {0}.var((0, 1, 2), correction=0)", ("x0",)),),
        ("v0",),
        seed=3,
    )
    arguments = program.arguments()
    x = arguments[0].numpy().astype("longdouble")
    variance = float(((x - x.mean()) ** 2).mean())
    given = torch.tensor(variance * (1 + off), dtype=torch.float64)
    assert judged_run(program, lambda: lambda _: [given], [arguments]).kind == kind


def test_what_is_copied_from_memory_that_is_written_meanwhile_is_cloned():
    """The values of such a copy are undefined in torch."""
    program = draw_program(170535, 40)
    assert any("copy_" in s.code and ".clone()" in s.code for s in program.statements)
    assert judged(program, "llvm") == Verdict(RIGHT)


# ---- reducing


def test_a_program_is_reduced_to_what_fails():
    small = reduced(SOFTMAX, lambda p: "softmax" in p.source(), 60)
    assert [s.code for s in small.statements] == ["{out} = torch.softmax({0}, 0)"]
    (given,) = small.inputs
    assert given.code == "torch.randn((1, 1))"


def test_a_write_that_matters_is_kept_and_sizes_that_matter_too():
    def fails(program):
        rows = [x.shape[0] for x in program.arguments()]
        return "*= 0.5" in program.source() and max(rows, default=0) > 4

    small = reduced(SOFTMAX, fails, 60)
    assert [s.name for s in small.statements] == ["v1"]
    assert small.arguments()[0].shape[0] == 5


def test_a_reduced_program_is_a_test_by_itself():
    text = SOFTMAX.standalone("llvm", "A title.")
    space = {"__name__": "standalone"}
    exec(compile(text, "standalone.py", "exec"), space)
    inputs = [space["drawn"](*of) for of in space["INPUTS"]]
    assert all(map(torch.equal, inputs, SOFTMAX.arguments()))
    assert all(map(torch.equal, space["forward"](*inputs), SOFTMAX.eager(tuple(inputs))))
    space["test_the_program_is_right"]()


# ---- the run


# Always: processes of `tuning/test_processes`, and those of `test_zoo`.
@pytest.mark.nightly
def test_processes_that_die_or_hang_end_no_run(monkeypatch, tmp_path_factory):
    end_time_of_what_hangs(monkeypatch, tmp_path_factory)
    campaign = Campaign("llvm", "here", 5)
    with Runner("llvm", limit_s=60, judge=fuzz_judges.by_seed) as runner:
        while len(campaign.verdicts) < 7:
            runner.run(campaign, len(campaign.verdicts), 0.05)
    kinds = [campaign.verdicts[seed].kind for seed in range(7)]
    assert kinds == [RIGHT, REFUSED, WRONG, ERROR, CRASH, CRASH, CRASH]
    for seed, word in ((4, "SIGFPE"), (5, "SIGSEGV"), (6, "no answer within 60 s")):
        assert word in campaign.verdicts[seed].why
    result = json.loads(json.dumps(campaign.to_json("command")))
    assert result["counts"] == {RIGHT: 1, REFUSED: 1, ERROR: 1, WRONG: 1, CRASH: 3}
    assert result["refused"] == {"FrontendError: no": [1]}
    assert [f["seed"] for f in result["failures"]] == [2, 3, 4, 5, 6]


def test_programs_are_reduced_in_a_process():
    with Runner("llvm", judge=fuzz_judges.fails_of_softmax) as runner:
        small = runner.reduced(SOFTMAX, runner.judged(SOFTMAX), 60.0)
    assert [s.code for s in small.statements] == ["{out} = torch.softmax({0}, 0)"]


# Always: a program is judged here, and one reduced in a process.
@pytest.mark.nightly
def test_the_command_writes_counts_and_seeds(tmp_path, capsys):
    out = tmp_path / "found"
    options = ["--minutes", "0.001", "--statements", "5", "--seed", "0", "--out", str(out)]
    assert main(["fuzz", "--target", "llvm", "--json", *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / "fuzz.json").read_text())
    assert printed["seeds"] == [0, 0]
    assert printed["counts"][RIGHT] == 1


@pytest.mark.nightly
def test_what_is_known_is_written_while_the_command_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "WRITE_EVERY_S", 0.0)

    def stopped(self, campaign, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "reduce", stopped)
    options = ["--minutes", "0.001", "--statements", "5", "--out", str(tmp_path)]
    parser = argparse.ArgumentParser()
    fuzz_arguments(parser)
    with pytest.raises(KeyboardInterrupt):
        command.main(parser.parse_args(["--target", "llvm", *options]))
    assert json.loads((tmp_path / "fuzz.json").read_text())["programs"] == 1


def test_the_command_says_that_it_needs_torch(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else found(name)
    )
    assert main(["fuzz", "--target", "llvm", "--minutes", "1"]) == 2
    assert "torch, which is not installed" in capsys.readouterr().err


def test_the_command_refuses_no_time(capsys):
    assert main(["fuzz", "--target", "llvm", "--minutes", "0"]) == 2
    assert "above 0" in capsys.readouterr().err
