"""tune() and compile(..., database=D): from a model to measured kernels, and back."""

import json
import shutil

import pytest
import tvm

import tvm_fusion
from tvm_fusion.cli import main
from tvm_fusion.compilation.tuned_parts import TunedParts
from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.errors import InputError
from tvm_fusion.flow.functions import planned_function
from tvm_fusion.flow.planned import Planned
from tvm_fusion.kernels import registry
from tvm_fusion.tuning.session.choices import DEFAULT

from ..support.tune_sessions import OPTIONS, chain_module, several


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A database of the chain's kernel, whose `fast` way won, and what tuning returned."""
    folder = tmp_path_factory.mktemp("tuned")
    with several(("plain", "fast", "wrong")):
        yield folder, tvm_fusion.tune(chain_module(), "llvm", database=folder, **OPTIONS)


def test_the_best_right_choice_is_taken(tuned):
    _, result = tuned
    task = next(t for t in result.tasks if t.launches)
    assert task.choice == "Way(way=fast)"
    assert (task.trials, task.failed) == (3, 1)
    assert result.best_us < result.untuned_us
    assert not result.interrupted


def test_a_second_session_has_nothing_left_to_do(tuned):
    folder, first = tuned
    again = tvm_fusion.tune(chain_module(), "llvm", database=folder, **OPTIONS)
    assert again.trials == 0
    assert [(t.name, t.choice) for t in again.tasks] == [(t.name, t.choice) for t in first.tasks]
    assert again.plan.to_dict() == first.plan.to_dict()


def test_the_report_says_what_was_chosen(tuned, monkeypatch):
    folder, _ = tuned
    now = tvm_fusion.tune(chain_module(), "llvm", database=folder, **OPTIONS)
    task = next(t for t in now.tasks if t.launches)

    def reported():
        options = {"policy": "aggressive", "database": folder, "verify": False}
        report = tvm_fusion.compile(chain_module(), "llvm", **options).report
        (group,) = report.to_json()["groups"]
        return group["tuned"], report.full()

    said, text = reported()
    assert (said["choice"], said["us"], said["untuned_us"]) == (
        "Way(way=fast)",
        task.best_us,
        task.untuned_us,
    )
    assert "Way(way=fast): " in text
    monkeypatch.setattr(registry.family("tested"), "ways", ("plain",))
    said, text = reported()
    assert said["choice"] == DEFAULT
    assert "the choice is stale: tested does not offer Way(way=fast)" in text
    untuned = tvm_fusion.compile(chain_module(), "llvm", policy="aggressive", verify=False).report
    assert untuned.to_json()["groups"][0]["tuned"] is None
    assert "by itself" not in untuned.full()


def test_the_same_database_gives_the_same_kernels(tuned):
    folder, _ = tuned

    def written():
        planned = planned_function(
            chain_module(), "llvm", load_policy("aggressive"), tuned=TunedParts(folder).of
        )
        return planned, planned.fuse()

    (planned, first), (_, second) = written(), written()
    assert tvm.ir.save_json(first) == tvm.ir.save_json(second)
    assert [t.text for t in planned.tuned.used.values()] == ["Way(way=fast)"]
    target, hw = resolve_target("llvm")
    untuned = Planned.of(chain_module(), target, hw, load_policy("aggressive")).fuse()
    assert tvm.ir.save_json(untuned) != tvm.ir.save_json(first)


def test_a_choice_that_is_no_longer_offered_is_stale(tuned, monkeypatch):
    folder, _ = tuned
    monkeypatch.setattr(registry.family("tested"), "ways", ("plain",))
    planned = planned_function(
        chain_module(), "llvm", load_policy("aggressive"), tuned=TunedParts(folder).of
    )
    planned.fuse()
    assert not planned.tuned.used
    assert "does not offer Way(way=fast)" in next(iter(planned.tuned.stale.values()))


def test_a_database_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(InputError, match="there is no database"):
        tvm_fusion.compile(chain_module(), "llvm", database=tmp_path / "none")


def test_another_policy_is_another_workload(tuned):
    folder, _ = tuned
    policy = {"unknown_ratio": 1.0, "coverage": 0.0, "rounding": "exact"}
    planned = planned_function(
        chain_module(), "llvm", load_policy(policy), tuned=TunedParts(folder).of
    )
    planned.fuse()
    assert not planned.tuned.used
    assert not planned.tuned.stale


# Always: `test_command`, and the folder by `test_database` and `test_database_foreign`.
@pytest.mark.nightly
@pytest.mark.long
def test_the_command_line_tunes_and_looks_after_its_folder(tuned, tmp_path, capsys):
    folder = shutil.copytree(tuned[0], tmp_path / "tuned")  # which gets another trial
    model = tmp_path / "chain.json"
    model.write_text(tvm.ir.save_json(chain_module()))
    here = ["--work-dir", str(folder)]
    options = ["--target", "llvm", "--policy", "aggressive", "--trials", "1", "--json"]
    assert main(["tune", str(model), *here, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    task = found["tasks"][0]
    assert task["choice"]  # the fast way, or a schedule of the other space that the trial found
    assert task["best_us"] <= task["untuned_us"]
    assert main(["tune", "--db-check", *here]) == 0
    assert main(["tune", "--db-export", str(tmp_path / "plain"), *here]) == 0
    merged = tmp_path / "merged"
    assert main(["tune", "--db-merge", str(folder), "--work-dir", str(merged)]) == 0
    assert any(merged.iterdir())
    taken = ["--work-dir", str(tmp_path / "taken"), "--target", "llvm"]
    capsys.readouterr()
    assert main(["tune", "--db-import", str(tmp_path / "plain"), *taken, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["folders"]
    assert report["added"] > 1
    assert report["problems"] == []
    capsys.readouterr()
    assert main(["tune", str(model), *here, "--rpc", "nowhere:1"]) == 2
    assert "--rpc needs --key" in capsys.readouterr().err
