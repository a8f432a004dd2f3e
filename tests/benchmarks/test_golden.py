"""Plans and kernels are those of the digests in `golden/`: in the nightly run a tenth of the cases
of `benchmarks.golden`, always a quarter of these; and its comparison.
"""

import collections
import functools
import os
import subprocess
import sys

import pytest

from tests.benchmarks import golden
from tests.benchmarks.golden_cases import cases, kind_of
from tvm_fusion.kernels.gpu.ahead import VARIABLE

LEAST = {
    "suites": 150,
    "random": 40,
    "exact": 12,
    "symbolic": 8,
    "weights": 12,
    "functions": 4,
    "probed": 3,
}
CASE, DEVICE = "weights/int8", "llvm_cpu"

held = functools.cache(golden.stored)


@pytest.fixture(autouse=True)
def late_launches(monkeypatch):
    """As the digests were made."""
    monkeypatch.setenv(VARIABLE, golden.SETTINGS[VARIABLE])


def tenth() -> list[str]:
    """Of the half of a kind's cases with the fewest kernels each fifth, without the first, which
    takes long.
    """
    kinds = collections.defaultdict(list)
    for name, found in held("nvidia_h200").items():
        if name != golden.MADE_WITH:
            kinds[kind_of(name)].append((len(found["kernels"]), name))
    halves = [sorted(found)[: (len(found) + 1) // 2] for found in kinds.values()]
    return [name for half in halves for _, name in half[1::5]]


@pytest.mark.one_in(40)
@pytest.mark.parametrize("name", tenth())
def test_a_tenth_of_the_plans_and_kernels_are_as_they_were(name):
    here, case = golden.versions(), cases()[name]
    devices = [
        device
        for device in golden.DEVICES
        if case.is_for(device) and case.needs not in golden.other_tools(held(device), here)
    ]
    if not devices:
        pytest.skip(f"the digests are of another version of {case.needs}")
    _, found = golden.found_of(name, devices)
    assert {device: golden.change(held(device)[name], now) for device, now in found.items()} == {
        device: "" for device in devices
    }


@pytest.mark.parametrize(("kind", "least"), LEAST.items())
def test_there_are_cases_of_each_kind(kind, least):
    assert collections.Counter(map(kind_of, cases()))[kind] >= least


@pytest.mark.parametrize("device", golden.DEVICES)
def test_the_files_hold_the_cases_that_there_are(device):
    here = {name for name, case in cases().items() if case.is_for(device)}
    assert set(held(device)) == {*here, golden.MADE_WITH}


# ---- the comparison


def store(folder, **stored):
    """A file of one device, with the case's digests by default."""
    made = held(DEVICE)[golden.MADE_WITH] | stored.pop("made", {})
    golden.store(DEVICE, {golden.MADE_WITH: made, **stored.pop("cases", {})}, folder)


def run(folder, *argv):
    return golden.main(["--only", f"{CASE}*", "--device", DEVICE, "--jobs", "1", *argv], folder)


def test_a_changed_digest_is_told_by_name_and_written_on_demand(tmp_path, capsys):
    right = held(DEVICE)[CASE]
    kernel = next(iter(right["kernels"]))
    kernels = {**right["kernels"], kernel: "0", "other": "0"}
    wrong = {**right, "plan": {"main": "0"}, "kernels": kernels}
    store(tmp_path, cases={CASE: wrong})
    assert run(tmp_path) == 1
    assert (
        f"{CASE} {DEVICE}: plan, kernels {kernel} -other\n1 of 1 changed" in capsys.readouterr().out
    )
    assert run(tmp_path, "--update") == 0
    assert golden.stored(DEVICE, tmp_path)[CASE] == right
    capsys.readouterr()
    assert run(tmp_path) == 0
    assert capsys.readouterr().out.startswith("0 of 1 changed, 0 failed")


def test_new_cases_and_those_that_are_gone_are_told(tmp_path, capsys):
    store(tmp_path, cases={f"{CASE}_before": held(DEVICE)[CASE]})
    assert run(tmp_path) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == [f"{CASE} {DEVICE}: new", f"{CASE}_before {DEVICE}: gone"]
    assert run(tmp_path, "--update") == 0
    assert set(golden.stored(DEVICE, tmp_path)) == {CASE, golden.MADE_WITH}


def test_a_case_that_fails_is_told_and_never_written(tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise ValueError("it is refused")

    monkeypatch.setattr(golden, "digests", fail)
    right = held(DEVICE)[CASE]
    store(tmp_path, cases={CASE: right})
    assert run(tmp_path) == 1
    assert "error ValueError: it is refused" in capsys.readouterr().out
    assert run(tmp_path, "--update") == 1
    assert golden.stored(DEVICE, tmp_path)[CASE] == right


def test_cases_that_need_another_version_of_a_tool_are_left_out_and_updated_with_all_others(
    tmp_path, capsys
):
    name = "weights/batch_norm"
    store(tmp_path, cases={name: held(DEVICE)[name]}, made={"torch": "0.1"})
    only = ("--only", name)
    assert run(tmp_path, *only) == 0
    assert "1 left out: their digests are of torch 0.1" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="update all"):
        run(tmp_path, *only, "--update")


# Always: `test_plan_bytes`, with other hash seeds.
@pytest.mark.nightly
def test_neither_hash_seed_nor_threads_nor_the_case_before_change_digests():
    env = {**os.environ, "PYTHONHASHSEED": "7", "TVM_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.benchmarks.golden", "--only", "weights/int4"]
    done = subprocess.run([*command, "--jobs", "1"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("0 of 4 changed")


@pytest.mark.parametrize(
    ("argv", "message"),
    [(("--only", "gem/*"), "no case is called gem/"), (("--part", "5/4"), "I from 1 to N")],
)
def test_what_selects_no_case_is_an_error(argv, message):
    with pytest.raises(SystemExit, match=message):
        golden.main([*argv, "--jobs", "1"])
