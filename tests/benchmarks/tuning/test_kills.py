"""Sessions that are killed: what is seen of them, and what counts as a loss."""

import random
import sys
from dataclasses import replace

import pytest

from .killed_lane import Kill, Moment
from .killed_session import WatchedSession, marked
from .kills import main, summary


def test_what_a_session_says_and_starts_is_seen(tmp_path):
    code = (
        "import subprocess, sys\n"
        'print(\'{"phase": "building"}\', flush=True)\n'
        "print('{\"kept\": [1, {}]}', flush=True)\n"
        "print('no JSON', flush=True)\n"
        "subprocess.Popen(['sleep', '0.5'], stdout=subprocess.DEVNULL)\n"
        'print(\'{"phase": "saving"}\', flush=True)\n'
        'sys.stdout.write(\'{"phase": "cut\')\n'
        "sys.stdout.flush()\n"
        "import time; time.sleep(60)\n"
    )
    session = WatchedSession([sys.executable, "-c", code], tmp_path)
    assert session.wait_for({"phase": "saving"}, 1)
    assert session.wait_for({"kept": None}, 1)
    assert session.wait_until(session.seconds + 0.05)
    session.kill()
    assert (session.phase, session.kept) == ("saving", [[1, {}]])
    assert session.fact("finished") is None
    left, seconds = session.survivors()
    assert left == []
    assert seconds > 0
    assert marked("nobody") == []


def test_a_session_that_fails_or_ends_early_is_told(tmp_path):
    failing = WatchedSession([sys.executable, "-c", "raise SystemExit('no device')"], tmp_path)
    with pytest.raises(RuntimeError, match="no device"):
        failing.finish()
    ending = WatchedSession([sys.executable, "-c", ""], tmp_path)
    assert not ending.wait_for({"kept": None}, 1)
    assert not ending.wait_until(60.0)
    ending.finish()


@pytest.mark.parametrize("kind", ["time", "kept", "adding", "saving"])
def test_moments_are_drawn_the_same_for_the_same_seed(kind):
    one, same, other = (Moment.draw(kind, random.Random(seed), 20.0, 8) for seed in (1, 1, 2))
    assert one == same != other
    assert 0 <= one.seconds <= (20.0 if kind == "time" else 0.05)
    assert one.count == 0 if kind == "time" else 1 <= one.count <= 8


SOUND = Kill(0, "time", 1.0, "building", 5, 0, 1, 0, 3, (), 0.1, (), True, 1)
WHOLE = {"lost": 0, "again": 0, "problems": [], "left": [], "plan_is_saved": True, "compiled": True}


@pytest.mark.parametrize(
    ("kill", "finished"),
    [
        ({"lost": 1}, {}),
        ({"again": 1}, {}),
        ({"survivors": ("ptxas",)}, {}),
        ({"repaired": False}, {}),
        ({}, {"left": ["tvm_fusion_tune_abc"]}),
        ({}, {"problems": ["trials.jsonl line 3: the checksum is wrong"]}),
        ({}, {"plan_is_saved": False}),
        ({}, {"compiled": False}),
    ],
)
def test_anything_that_is_lost_or_left_over_counts(kill, finished):
    assert summary([SOUND], [WHOLE])["ok"]
    assert not summary([replace(SOUND, **kill)], [WHOLE | finished])["ok"]


@pytest.mark.nightly  # the process imports torch
def test_the_command_fails_for_a_workload_that_is_not_there():
    with pytest.raises(RuntimeError, match="unknown workload"):
        main(["--workloads", "softmix", "--kills", "1"])
