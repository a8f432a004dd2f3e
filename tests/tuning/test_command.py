"""`python -m tvm_fusion tune`: what it says, and what it refuses."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import tvm

import tvm_fusion
from tvm_fusion.cli import main
from tvm_fusion.errors import ConfigError, InputError
from tvm_fusion.tuning.command import table, to_json
from tvm_fusion.tuning.database import check
from tvm_fusion.tuning.database.trial import Trial
from tvm_fusion.tuning.session import contested
from tvm_fusion.tuning.session import tune as tune_module
from tvm_fusion.tuning.session.result import TunedTask, TuneResult, failures_of
from tvm_fusion.tuning.session.settings import load_settings
from tvm_fusion.tuning.session.tune import held_interrupts

from ..support import graphs
from ..support.tune_sessions import BUILDERS, METER, SETTINGS, chain_module, make_session

KEPT = Path("tuned")


@pytest.fixture
def model(tmp_path, two_ways):
    """A chain's file, whose kernel has two choices."""
    path = tmp_path / "chain's model.json"
    path.write_text(tvm.ir.save_json(chain_module()))
    return str(path)


def tune(model, folder, *options):
    return main(["tune", model, "--target", "llvm", "--work-dir", str(folder), *options])


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trials", "-3"], "tune: trials must be at least 1, not -3"),
        (["--minutes", "-1"], "tune: minutes must be at least 0, not -1.0"),
        (["--key", "k"], "give both"),
        (["--token-file", "t"], "give both"),
        (["--rpc", "nowhere:1", "--key", "k", "--token-file", "t"], "--token-file t: "),
        (["--rpc", "nowhere:1"], "--rpc needs --key"),
        (["--policy", "min_gain=a"], "min_gain"),
    ],
)
def test_bad_options_are_named(model, tmp_path, capsys, options, message):
    assert tune(model, tmp_path / "d", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        (None, {"trials": "3"}, "tune: trials: expected int, got '3'"),
        (None, {"trials": 1.5}, "tune: trials: expected int, got 1.5"),
        (None, {"minutes": "3"}, "tune: minutes: expected float, got '3'"),
        ({"repeats": 1}, {}, "tuning settings: repeats must be at least 3, not 1"),
        ({"spaces": ["clas"]}, {}, "did you mean 'class'"),
        (3, {}, "expected a file or a mapping, got 3"),
    ],
)
def test_bad_settings_are_named(settings, arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_settings(settings, **arguments)


def test_a_file_of_settings_is_named(tmp_path):
    file = tmp_path / "quick.toml"
    file.write_text('[repeats]\nvalue = 1\nunit = "count"\nsource = "choice"\n')
    with pytest.raises(ConfigError, match=r"quick\.toml: repeats must be at least 3"):
        load_settings(file)
    file.write_text(file.read_text().replace("= 1", "= 5"))
    found = load_settings(file, trials=7, minutes=None)
    assert (found.name, found.repeats, found.trials) == ("quick", 5, 7)
    assert found.minutes == load_settings().minutes


@pytest.mark.parametrize("name", ["builders", "meters"])
def test_no_workers_are_refused(tmp_path, name):
    with pytest.raises(InputError, match=f"{name}: none are given"):
        tvm_fusion.tune(chain_module(), "llvm", database=tmp_path, **{name: []})


def test_a_model_without_kernels_is_refused(tmp_path):
    identity = graphs.module(lambda bb, x: x, ((4, 6), "float32"))
    with pytest.raises(InputError, match="there is nothing to tune"):
        tvm_fusion.tune(identity, "llvm", database=tmp_path, settings=SETTINGS)


# ---- what is said


def share_processes(monkeypatch):
    """Sessions build and measure in the processes of all tests."""
    monkeypatch.setattr(tune_module, "make_builders", lambda settings: BUILDERS)
    monkeypatch.setattr(tune_module, "LocalMeter", lambda: METER)
    monkeypatch.setattr(tune_module, "stop_all", lambda workers: None)


@pytest.mark.long
def test_a_session_says_why_it_ends(model, tmp_path, capsys, monkeypatch):
    file = tmp_path / "quick.toml"
    file.write_text('spaces = ["class"]\n[builders]\nvalue = 1\nunit = "count"\nsource = "test"\n')
    options = ["--settings", str(file), "--policy", "unknown_ratio=1.0,coverage=0.0"]
    assert tune(model, tmp_path / "d", *options, "--trials", "1") == 0
    assert "this session: 1 trials in" in (said := capsys.readouterr().out)
    assert "all trials are made" in said
    share_processes(monkeypatch)  # the first session had its own
    assert tune(model, tmp_path / "d", *options, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ended"] in (
        "nothing is left to try",
        "no trial is expected to save 0.05 % of the time",
    )
    assert found["untimed"] == []
    assert tune(model, tmp_path / "d", *options, "--minutes", "0.0001", "--json") == 0
    assert json.loads(capsys.readouterr().out)["ended"] in (found["ended"], "the time is up")


@pytest.mark.usefixtures("tested")
def test_a_session_that_is_late_says_so():
    session, kept, _ = make_session(load_settings({"minutes": 1e-9}))
    session.run()
    assert session.ended == "the time is up"
    assert kept.found == []


def test_kernels_without_a_time_are_counted():
    timed = TunedTask("row:a", 2, 5, 1, 10.0, 8.0, "Way(way=fast)")
    untimed = TunedTask("row:b", 1, 1, 1, None, None, "none")
    other = TunedTask("row:c", 0, 1, 1, None, None, "none")
    result = TuneResult(
        (timed, untimed, other), None, 4, 12.3, False, "all trials are made", database=KEPT
    )
    assert (result.untuned_us, result.best_us) == (20.0, 16.0)
    assert result.untimed == (untimed,)
    assert "kernels: 20.0 -> 16.0 us, 1.25x, without 1 not measured" in table(result)
    assert "this session: 4 trials in 12 s; all trials are made" in table(result)
    assert to_json(result)["untimed"] == ["row:b"]


def test_a_result_prints_in_ten_lines_that_name_its_folder():
    trace = "[[" + "x" * 500 + "]]"
    tasks = [TunedTask(f"row:{i}", 2, 5, 1, 10.0 + i, 8.0, trace) for i in range(30)]
    tasks += [TunedTask("row:b", 1, 1, 1, None, None, "none")]
    failures = failures_of([failed("build", "no shared memory is left\nat all")])
    result = TuneResult(tuple(tasks), None, 4, 12.3, True, "stopped", failures, database=KEPT)
    printed = str(result).splitlines()
    assert len(printed) == 10
    assert max(map(len, printed)) <= 120
    assert printed[:3] == [
        "4 trials in 12 s; stopped",
        "kernels: 1470.0 -> 480.0 us, 3.06x, without 1 not measured",
        f"  row:29: 2 x 39.0 -> 8.0 us, 5 trials: {trace[:60]}...",
    ]
    assert "  and 27 more: see .tasks" in printed
    assert "compile(model, target, database='tuned')" in printed[-2]
    nothing = TuneResult((), None, 0, 0.1, False, "the time is up", database=KEPT)
    assert str(nothing).splitlines()[:2] == [
        "0 trials in 0 s; the time is up",
        "no kernel was measured",
    ]
    assert "tuned" in str(nothing).splitlines()[-1]


def failed(status, why):
    return Trial("class", "Way(way=fast)", status, why=why)


def test_the_commonest_cause_of_failed_trials_is_said():
    alike = [failed("wrong", f"output 0: error {e:.2e} above 1.00e-06") for e in (2e-6, np.inf)]
    failures = failures_of([failed("build", "no shared memory is left"), *alike])
    assert (failures.count, failures.commonest, failures.status) == (3, 2, "wrong")
    result = TuneResult((), None, 4, 12.3, False, "all trials are made", failures, database=KEPT)
    said = "3 trials failed; 2 of them alike: wrong: output 0: error 2.00e-06 above 1.00e-06"
    assert said in table(result)
    assert to_json(result)["failures"]["commonest"] == 2


def test_nothing_is_said_of_failures_where_there_are_none():
    assert failures_of([]) is None
    result = TuneResult((), None, 4, 12.3, False, "all trials are made", database=KEPT)
    assert "failed;" not in table(result)
    assert to_json(result)["failures"] is None


# ---- Ctrl-C


def test_an_interrupt_before_the_first_trial_is_said(model, tmp_path, capsys, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(contested, "contested", stop)
    monkeypatch.setattr("sys.argv", ["tvm_fusion", "tune", model, "--work-dir", "d"])
    assert tune(model, tmp_path / "d") == 130
    said = capsys.readouterr().err
    assert "interrupted; before the first trial; the same command begins again" in said
    assert said.endswith(f"tune '{tmp_path}/chain'\"'\"'s model.json' --work-dir d\n")


# Always: interrupts of a session (`test_session`), and those that are held.
@pytest.mark.nightly
def test_an_interrupt_while_the_plan_is_kept_loses_nothing(model, tmp_path, monkeypatch, capsys):
    settle = contested.settled

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return settle(*arguments)

    monkeypatch.setattr(contested, "settled", interrupted)
    assert tune(model, tmp_path / "d", "--trials", "1") == 130
    said = capsys.readouterr()
    assert "what was measured is kept, and the same command goes on" in said.err
    assert "all trials are made" in said.out
    (folder,) = check(tmp_path / "d").folders
    assert folder.counts["plans"] == 1


def test_interrupts_are_held():
    before = signal.getsignal(signal.SIGINT)
    with held_interrupts() as came:
        os.kill(os.getpid(), signal.SIGINT)
        assert came == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is before
