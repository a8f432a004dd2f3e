"""Every ONNX backend test of the list must pass through the whole package on llvm: always
one of 24 of the tests of each operator, and one at least, in the nightly run all.
"""

import sys
from collections import defaultdict

import pytest

from ..support.onnx_conformance import Worker, grow_list, read_list, run_all, worker_command

LEAST = 1075  # the list only grows: raise this with it
SHARDS = 12  # of a part of the list, for the processes that run tests to share
EVERY = 24

FAKE_WORKER = """
import json, os, sys, time
print("ready", flush=True)
for name in map(str.strip, sys.stdin):
    if name.startswith("crash"):
        os.abort()
    if name.startswith("hang"):
        time.sleep(60)
    print(json.dumps({"status": name, "why": ""}), flush=True)
"""


@pytest.fixture(scope="module")
def worker():
    """A process for all shards that this one runs."""
    found = Worker(worker_command("fused"))
    yield found
    if found.process:
        found.stop()


def operator_of(name: str) -> str:
    """The operator that a test of the list is about: argmax for `test_argmax_keepdims_random`."""
    words = name.split("_")
    return words[2] if words[1] == "operator" else words[1]


def parts(names: list[str]) -> dict[str, list[str]]:
    """every 24th test of each operator, its first among them, and the rest."""
    by_operator = defaultdict(list)
    for name in names:
        by_operator[operator_of(name)].append(name)
    often = [name for own in by_operator.values() for name in own[::EVERY]]
    return {"often": often, "rest": sorted(set(names) - set(often))}


def test_the_part_that_is_run_often_has_tests_of_each_operator():
    names = read_list()
    often, rest = parts(names).values()
    assert sorted(often + rest) == names
    assert set(map(operator_of, often)) == set(map(operator_of, names))
    assert len(often) >= LEAST / EVERY


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("part", ["often", pytest.param("rest", marks=pytest.mark.nightly)])
def test_the_listed_tests_pass_fused(worker, part, shard):
    names = parts(read_list())[part][shard::SHARDS]
    results = [worker.run(name, timeout_s=60) for name in names]
    wrong = [f"{r.status} {r.name}: {r.why[:200]}" for r in results if r.status != "pass"]
    assert not wrong, f"{len(wrong)} of {len(results)}:\n" + "\n".join(wrong)


def test_the_list_has_not_shrunk_and_is_sorted():
    names = read_list()
    assert len(names) >= LEAST
    assert names == sorted(set(names))


def test_a_list_grows_by_new_names_only(tmp_path):
    path = tmp_path / "list.txt"
    assert grow_list(["test_b", "test_a"], path) == 2
    assert grow_list(["test_c"], path) == 3
    assert read_list(path) == ["test_a", "test_b", "test_c"]


@pytest.mark.parametrize("workers", [1, 3])
def test_a_crash_or_a_hang_costs_one_test_only(workers):
    names = ["pass", "crash 1", "fail", "crash 2", "hang", "pass 2", "error"]
    command = [sys.executable, "-c", FAKE_WORKER]
    results = run_all(names, command, workers=workers, timeout_s=3)
    assert [r.name for r in results] == names
    statuses = [r.status for r in results]
    assert statuses == ["pass", "crash", "fail", "crash", "timeout", "pass 2", "error"]


def test_a_worker_that_does_not_start_is_an_error():
    with pytest.raises(RuntimeError, match="did not start"):
        run_all(["test_abs"], [sys.executable, "-c", "raise SystemExit(3)"])
