"""PyTorch's operator database is as `exceptions.toml` says: a small share of it always, in this
process; all of it in the nightly run. And what a run would say of results that are wrong.
"""

import json
from dataclasses import replace

import pytest
import torch

from tvm_fusion.tuning.measure.processes import Answer

from . import __main__, exceptions, judge
from .samples import NotJudged, Operator, Sample, entries, samples

CHECKED = ("float32", "complex64")
SHARE = 5  # entries that always run


def sample_of(function, *arguments) -> Sample:
    inputs = [x for x in arguments if isinstance(x, torch.Tensor)]
    module = Operator(function, (arguments, {}))
    return Sample(module, inputs, [module(*inputs)])


def test_a_share_of_the_database_is_as_listed():
    listed = exceptions.read()
    known = entries(list(CHECKED))
    assert listed.keys() <= set(entries(sorted({dtype for _, dtype in listed})))
    expected = [entry for entry in known if entry not in listed]
    for name, dtype in expected[:: len(expected) // SHARE]:
        found = judge.judge(name, dtype, "llvm")
        assert (found["outcome"], found["why"]) == ("right", ""), (name, dtype)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", CHECKED)
def test_the_database_is_as_listed(dtype):
    assert __main__.main(["--dtypes", dtype]) == 0


def test_wrong_results_are_told_from_right_ones():
    x = torch.linspace(-3, 3, 600).reshape(20, 30)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), 0.0])
    sample = sample_of(torch.mul, x, 3)
    (right,) = sample.expected
    assert judge.difference([right * (1 + 1e-7)], sample) == ""
    for at, value in ((3, 1.0), (0, 0.0), (1, -float("inf")), (2, float("nan"))):
        wrong = right.clone()
        wrong[0, at] = value
        assert judge.difference([wrong], sample).startswith(f"result 0 at (0, {at})")
        assert judge.difference([wrong], sample, only_types=True) == ""
    for other in ([right.double()], [right[None]], [right, right], []):
        assert judge.difference(other, sample, only_types=True).startswith("results are")
    counted = sample_of(torch.argsort, x[1])
    assert judge.difference([counted.expected[0].flip(0)], counted)


def test_an_error_of_eager_execution_may_be_made_here_too():
    x = torch.full((4096,), 0.1).half()
    summed = sample_of(lambda x: x.cumsum(0)[-1], x)
    exact = x.double().sum().half()
    assert judge.difference([exact], summed) == ""
    assert judge.difference([exact * 1.5], summed)


def test_what_is_compiled_is_judged_by_its_kind():
    x = torch.ones(3)
    assert judge.judge_sample(sample_of(torch.neg, x), "llvm").outcome == "right"
    refused = judge.judge_sample(sample_of(torch.bernoulli, x), "llvm")
    assert (refused.outcome, "rand" in refused.why) == ("refused", True)
    planted = replace(sample_of(torch.neg, x.int()), expected=[x.int()])
    assert judge.judge_sample(planted, "llvm").outcome == "wrong"


def test_through_torch_compile_what_stays_in_torch_is_right_and_named():
    x = torch.ones(2)  # of which each draw is 1
    random = "1 of 3 operators of a graph run in torch: aten.rand."
    for function, outside in ((torch.neg, ""), (torch.bernoulli, random)):
        found = judge.judge_sample_of_backend(sample_of(function, x), "llvm")
        assert (found.outcome, found.outside[: len(random)]) == ("right", outside)
    broken = judge.judge_sample_of_backend(sample_of(lambda x: x[x > 1], x), "llvm")
    assert (broken.outcome, "graph break" in broken.why) == ("right", True)
    planted = replace(sample_of(torch.neg, x.int()), expected=[x.int()])
    assert judge.judge_sample_of_backend(planted, "llvm").outcome == "wrong"


@pytest.mark.parametrize("name", ["normal.in_place", "multinomial", "randn_like", "bernoulli"])
def test_random_results_are_not_judged_whatever_seed_a_sample_sets(name):
    with pytest.raises(NotJudged, match="random"):
        samples(name, "float32")


def test_samples_are_the_same_in_each_run():
    first, second = (samples("addmm", "float32") for _ in range(2))
    assert len(first) == 2
    for a, b in zip(first, second, strict=True):
        assert all(map(torch.equal, a.inputs + a.expected, b.inputs + b.expected))
    with pytest.raises(NotJudged, match="no tensor among its inputs"):
        samples("ones", "float32")


@pytest.mark.parametrize("text", ["[a]\noutcome = 'right'\nwhy = 'x'", "[a]\noutcome = 'refused'"])
def test_the_list_gives_reasons(tmp_path, text):
    path = tmp_path / "list.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match="a reason"):
        exceptions.read(path)


def test_an_entry_stands_once_in_the_list(tmp_path):
    path = tmp_path / "list.toml"
    one = "outcome = 'refused'\nwhy = 'x'\n"
    path.write_text(f"[a]\n{one}all = ['abs']\n[b]\n{one}int64 = ['abs']\n")
    with pytest.raises(ValueError, match="abs"):
        exceptions.read(path)


def test_what_is_worse_or_other_than_listed_fails_and_what_is_better_is_told():
    entry, listed = ("abs", "bool"), {("abs", "bool"): ("kept", "refused")}
    assert exceptions.deviations({entry: "refused"}, listed) == ([], [])
    assert exceptions.deviations({entry: "right"}, listed)[0] == []
    assert len(exceptions.deviations({entry: "right"}, listed)[1]) == 1
    for outcome in ("wrong", "crash", "not judged"):
        assert len(exceptions.deviations({entry: outcome}, listed)[0]) == 1
    assert len(exceptions.deviations({entry: "refused"}, {})[0]) == 1


def test_the_share_of_what_inductor_has_right_is_counted(monkeypatch, capsys):
    ours = {"neg": "right", "abs": "refused", "sin": "refused", "ones": "not judged"}
    theirs = {"neg": "right", "abs": "right", "sin": "wrong"}

    def answered(function, calls, **options):
        by = theirs if function is judge.judge_inductor else ours
        assert [call[0] for call in calls] == [name for name in ours if name in by]
        for call in calls:
            breaks = "1 graph break" if (by, call[0]) == (theirs, "neg") else ""
            yield call, Answer("ok", {"outcome": by[call[0]], "why": breaks, "outside": ""})

    monkeypatch.setattr(__main__, "answers", answered)
    monkeypatch.setattr(__main__, "entries", lambda dtypes: [(name, "bool") for name in ours])
    __main__.main(["--dtypes", "bool", "--beside", "inductor"])
    said = capsys.readouterr().out
    assert "2 right by inductor, 1 right by inductor and here" in said
    assert "1 right by inductor as one graph" in said
    assert "bool: 50.0% of right by inductor are right here" in said
    assert "bool: 0.0% of right by inductor as one graph are right here" in said


def test_earlier_results_are_built_on(monkeypatch, capsys, tmp_path):
    asked, names = [], ["neg", "abs", "sin"]
    ours = {"neg": "right", "abs": "refused", "sin": "right"}

    def answered(function, calls, **options):
        by = {call[0]: ours[call[0]] if function is judge.judge else "right" for call in calls}
        asked.append(list(by))
        for call in calls:
            yield call, Answer("ok", {"outcome": by[call[0]], "why": "", "outside": ""})

    def run(name, *given):
        out = tmp_path / name
        __main__.main(["--dtypes", "bool", "--out", str(out), *given])
        return json.loads(out.read_text()), str(out)

    monkeypatch.setattr(__main__, "answers", answered)
    monkeypatch.setattr(__main__, "entries", lambda dtypes: [(name, "bool") for name in names])
    first, file = run("first.json", "--beside", "inductor", "--only", "[na]*")
    assert (first["inductor of"], asked.pop()) == ([], ["neg", "abs"])
    second, other = run("second.json", "--beside", "inductor", "--inductor-of", file)
    assert (second["inductor of"][0]["file"], asked.pop()) == (file, ["sin"])
    assert second["counts"]["bool"]["right by inductor and here"] == 2
    ours["abs"] = "right"
    third, _ = run("third.json", "--only", "abs", "--onto", other)
    assert [row["operator"] for row in third["rows"]] == names
    assert third["counts"]["bool"]["right by inductor and here"] == 3
    (part,) = third["parts"]
    assert (part["command"], part["entries that stay"]) == (second["command"], 2)
    assert third["inductor of"] == second["inductor of"]
    monkeypatch.setattr(__main__, "VERSIONS", {"torch": "0"})
    with pytest.raises(SystemExit, match="made with"):
        run("fourth.json", "--only", "abs", "--onto", other)


def test_operators_outside_our_parts_are_counted(monkeypatch, capsys, tmp_path):
    outside = {"neg": "", "abs": "1 of 1", "sin": ""}

    def answered(function, calls, **options):
        ours = function is judge.judge_backend
        assert ours or function is judge.judge_inductor
        for call in calls:
            breaks = "with 1 graph breaks" if call[0] == "sin" else ""
            value = {"outcome": "right", "why": breaks, "outside": outside[call[0]] * ours}
            yield call, Answer("ok", value)

    monkeypatch.setattr(__main__, "answers", answered)
    monkeypatch.setattr(__main__, "entries", lambda dtypes: [(name, "bool") for name in outside])
    out = tmp_path / "found.json"
    given = ["--dtypes", "bool", "--beside", "inductor", "--through", "torch.compile"]
    assert __main__.main([*given, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "bool: 2 right, no operator of a graph outside our parts\n" in said
    assert "bool: 1 right, no operator of a graph outside our parts, no graph break\n" in said
    assert "66.7% of right by inductor are right here, no operator of a graph outside" in said
    assert "50.0% of right by inductor as one graph are right here, no operator" in said
    result = json.loads(out.read_text())
    assert result["through"] == "torch.compile"
    assert [row.get("outside") for row in result["rows"]] == [None, "1 of 1", None]


def test_the_command_tells_of_processes_that_died(monkeypatch, capsys, tmp_path):
    answers = {
        "neg": Answer("crash", why="the process died (signal SIGFPE)"),
        "abs": Answer("ok", {"outcome": "right", "why": "", "outside": ""}),
        "sin": Answer("timeout", why="no answer"),
    }

    def answered(function, calls, **options):
        yield from ((call, answers[call[0]]) for call in calls)

    monkeypatch.setattr(__main__, "answers", answered)
    only = [word for name in answers for word in ("--only", name)]
    out = tmp_path / "found.json"
    assert __main__.main(["--dtypes", "float32", *only, "--out", str(out)]) == 1
    said = capsys.readouterr().out
    assert "float32: 1 right, 1 timeout, 1 crash" in said
    assert "neg of float32: crash, not right" in said
    rows = json.loads(out.read_text())["rows"]
    assert {row["operator"] for row in rows} == answers.keys()
    assert __main__.main(["--dtypes", "float32", "--only", "abs"]) == 0


def test_of_equal_elements_any_may_come_first():
    x = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    sample = sample_of(torch.argsort, x)
    for places, outcome in (([3, 1, 2, 0], "right"), ([0, 1, 2, 3], "wrong")):
        given = [torch.tensor([places])]
        assert judge._compared(sample, given, "argsort").outcome == outcome
    assert judge._compared(sample, [torch.tensor([[1, 3, 2, 0]])], "abs").outcome == "wrong"
    least = Sample(sample.module, [x], list(torch.kthvalue(x, 1)))  # without the axis
    for place, outcome in ((3, "right"), (2, "wrong")):
        given = (least.expected[0], torch.tensor([place]))
        assert judge._compared(least, given, "kthvalue").outcome == outcome
