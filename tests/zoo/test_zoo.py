"""Models of transformers and timm on a CPU give the numbers of torch: a few always, all nightly."""

import json
import types
from pathlib import Path

import pytest
import torch

from tvm_fusion.tuning.measure.processes import Answer

from ..support.tools import require_module
from ..support.unknown_operators import unknown
from . import __main__ as command
from . import judge
from .judge import ERROR, REFUSED, RIGHT, SLOW, SOURCES, Verdict, judged, largest_error, module_of


def results_of(source):
    path = Path(__file__).parents[1] / "results" / f"zoo_{source}.json"
    return json.loads(path.read_text())["models"]


# Not of the tables: these import all that they name, which takes seconds.
ALL = [tuple(name.split("/", 1)) for source in SOURCES for name in results_of(source)]
CHEAP = [("transformers", "falcon/step")]


@pytest.fixture(scope="module", autouse=True)
def _libraries():
    require_module("timm")
    require_module("transformers")


@pytest.mark.parametrize(("source", "name"), CHEAP)
def test_a_model_gives_the_numbers_of_torch(source, name):
    verdict = judged(source, name)
    assert (verdict.outcome, verdict.why) == (RIGHT, "")


@pytest.mark.parametrize("source", SOURCES)
def test_there_are_sixty_architectures_and_what_was_not_right_names_an_operator(source):
    table = module_of(source)
    assert len(table.TABLE) == 60
    models = results_of(source)
    assert list(models) == [f"{source}/{name}" for name in (*table.TABLE, *table.WAYS)]
    others = [facts for facts in models.values() if facts["outcome"] != RIGHT]
    assert len(others) <= 3
    assert {facts["outcome"] for facts in others} <= {REFUSED}
    assert all("cannot be converted to Relax at aten." in facts["why"] for facts in others)


class Partly(torch.nn.Module):
    """One of four products is left to eager execution, between two graphs."""

    def forward(self, x):
        y = (x @ x).softmax(-1)
        torch._dynamo.graph_break()
        between(y @ y, y.exp())
        return unknown(y @ x.relu()).sum(), x.exp()


@torch._dynamo.disable
def between(y, z):
    return y @ z


def test_through_torch_compile_what_stays_in_torch_is_counted(monkeypatch):
    x = torch.linspace(0, 1, 16).reshape(4, 4)
    table = types.SimpleNamespace(build=lambda name: (Partly(), (x,)))
    monkeypatch.setattr(judge, "module_of", lambda source: table)
    verdict = judge.judged_through_dynamo("timm", "partly")
    assert (verdict.outcome, verdict.why) == (RIGHT, "")
    found = verdict.dynamo
    assert found.breaks == found.breaks_of_dynamo == 2
    assert found.flop_inside == 0.75
    assert [("unknown" in text, "1 of" in text) for text in found.outside] == [(True, True)]
    assert "unknown" in command.line(verdict)
    told = command.result([verdict], 1.0)["through torch.compile"]
    assert told["less than 95 % of FLOP in our parts"] == ["timm/partly"]
    assert told["as a whole in eager mode"] == []
    assert command._read("timm", "partly", **command._kept(verdict)) == verdict


def test_numbers_that_differ_are_seen():
    one = torch.tensor([1.0, float("nan"), 3.0])
    assert largest_error([one], [one]) == 0
    assert largest_error([one + 0.3], [one]) == pytest.approx(0.1)
    assert largest_error([torch.nan_to_num(one)], [one]) == float("inf")
    assert largest_error([torch.full((3,), float("nan"))], [one]) == float("inf")


def test_processes_that_die_or_hang_are_told_apart(monkeypatch):
    died, hangs = Answer("crash", why="signal SIGSEGV"), Answer("timeout", why="no answer")
    found = [(("timm", "vgg"), died), (("transformers", "t5"), hangs)]
    monkeypatch.setattr(command, "answers", lambda *_: iter(found))
    verdicts = list(command.verdicts_of([name for name, _ in found]))
    assert [(v.outcome, v.why) for v in verdicts] == [(ERROR, died.why), (SLOW, hangs.why)]
    assert command.counts(verdicts) == {ERROR: 1, SLOW: 1}


def test_what_was_right_is_not_done_again_where_that_is_asked_for(monkeypatch, tmp_path):
    asked = []

    def answer(function, names, *options):
        asked.extend(names)
        return [(name, Answer("ok", Verdict(*name, RIGHT, error=1e-7))) for name in names]

    monkeypatch.setattr(command, "answers", answer)
    earlier, later = tmp_path / "earlier.json", tmp_path / "later.json"
    assert command.main(["--source", "timm", "--only", "vgg", "--out", str(earlier)]) == 0
    again = ["--only", "v[go]*", "--again", str(earlier), "--out", str(later)]
    assert command.main(again) == 0
    assert asked == [("timm", "vgg"), ("timm", "volo")]
    found = json.loads(later.read_text())
    assert found["counts"]["timm"] == {"right": 2}
    assert list(found["models"]) == ["timm/volo", "timm/vgg"]


@pytest.mark.nightly
@pytest.mark.parametrize(("source", "name"), ALL)
def test_every_model_gives_the_numbers_of_torch(source, name):
    (verdict,) = command.verdicts_of([(source, name)])
    assert (verdict.outcome, verdict.why) == (RIGHT, "")
