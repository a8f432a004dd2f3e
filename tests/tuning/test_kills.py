"""Sessions that are killed: what was kept is there, nothing is left over, and the next goes on.

In the nightly run, a kill of one kind and of three; `python -m tests.benchmarks.tuning.kills` does
as many as one likes. Always: `test_database_processes`, whose writers are killed at any moment, and
`test_processes`, which end with their session.
"""

import json

import pytest

from tvm_fusion.tuning.measure.processes import module_command

from ..benchmarks.tuning.kills import SETTINGS, kill_sessions

HERE = SETTINGS | {"spaces": ["class"], "builders": 1, "trials": 6}


def command(lane):
    def of(database, compiled):
        words = [
            *module_command("tests.support.tune_kill_session", torch=False),
            str(database),
            json.dumps(HERE),
        ]
        return [*words, *(["--compile"] if compiled else [])]

    return of


@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.parametrize(
    "kinds",
    [("adding",), pytest.param(("time", "kept", "adding"), marks=pytest.mark.nightly)],
)
def test_killed_sessions_lose_only_what_runs(tmp_path, kinds):
    said = []
    result = kill_sessions(
        command, tmp_path, kills=len(kinds), seed=3, settings=HERE, kinds=kinds, say=said.append
    )
    found = result["summary"]
    assert found["ok"], "\n".join([*said, json.dumps(result["finished"])])
    assert found["kills"] == len(result["kills"]) == len(kinds)
    assert {kill["kind"] for kill in result["kills"]} == set(kinds)
    assert (found["lost"], found["again"], found["survivors"]) == (0, 0, 0)
    assert result["kills"][-1]["before"] > 0
    assert max(kill["processes"] for kill in result["kills"]) >= 3  # a builder, its shell, a meter
    (finished,) = result["finished"]
    assert finished["told"] > result["kills"][-1]["before"]
