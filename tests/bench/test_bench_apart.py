"""Compilers in processes of their own, asked in turns, and the suites for CPUs."""

import json
import os

import pytest
import torch
import tvm

from tvm_fusion import cli
from tvm_fusion.bench import workloads
from tvm_fusion.bench.accuracy import reference, relative_error
from tvm_fusion.bench.apart import (
    INSTRUCTIONS,
    PROCESSORS,
    SLOW_REPEATS,
    Failed,
    Process,
    cores_for,
    in_rounds,
)
from tvm_fusion.bench.options import CPU_PEERS
from tvm_fusion.bench.peers import outputs_of, peer
from tvm_fusion.bench.run import limited, run_suite
from tvm_fusion.errors import InputError, Unsupported
from tvm_fusion.host.cores import physical_cores, usable_cores
from tvm_fusion.kernels.cpu.machine import machine_of

from ..support.apart_makers import make_death, make_something, make_spinner, make_variables
from ..support.runtime_cases import LLVM

SMALL = 0.02


@pytest.mark.usefixtures("no_torch")
def test_a_process_has_threads_and_cores_of_its_own_and_lives_on_after_a_failure():
    before = dict(os.environ)
    with Process(make_something, 1) as process:
        pid, threads, cores = process.make("a")
        assert pid != os.getpid()
        assert set(threads.values()) == {"1"}
        assert cores == 1
        assert 0 < process.time(3) < 1
        with pytest.raises(Failed, match=r"^ValueError: the maker's own words$"):
            process.make("fail")
        assert process.make("b")[0] == pid
    assert dict(os.environ) == before
    assert len(usable_cores()) >= cores


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("instructions", [None, *INSTRUCTIONS])
def test_a_process_keeps_to_a_set_of_instructions_and_its_neighbours_do_not(instructions):
    names = sorted({name for limits in INSTRUCTIONS.values() for name in limits})
    here = {name: os.environ.get(name) for name in names}
    with Process(make_variables, 1, instructions=instructions) as process:
        found = process.make(names)
    assert found == here | INSTRUCTIONS.get(instructions, {})
    assert {name: os.environ.get(name) for name in names} == here


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_our_kernels_keep_to_the_instructions_of_a_run(instructions):
    named, target, hw = limited(instructions, 1)
    assert target.same_as(named)
    assert target.attrs["mcpu"] == PROCESSORS[instructions]
    with target:
        assert machine_of(hw).vector_bytes == 32


@pytest.mark.usefixtures("no_torch")
def test_a_process_that_died_says_so_and_the_next_request_has_a_new_one():
    with Process(make_something, 1) as process:
        first = process.make("a")[0]
        with pytest.raises(Failed, match="ended with status 7"):
            process.make("die")
        assert process.make("b")[0] != first


@pytest.mark.usefixtures("no_torch")
def test_who_does_not_answer_in_time_is_given_up():
    with Process(make_something, 1) as process, pytest.raises(Failed, match=r"within 0\.001 s"):
        process.make("a", limit_s=0.001)


@pytest.mark.usefixtures("no_torch")
def test_threads_that_go_on_after_a_call_are_waited_for():
    with Process(make_spinner, 1) as process:
        process.make()
        process.time()
        assert process.make() == 0


@pytest.mark.usefixtures("no_torch")
def test_the_death_of_one_is_no_end_for_the_others():
    with Process(make_death, 1) as mortal, Process(make_something, 1) as other:
        mortal.make()
        other.make("a")
        times, failures = in_rounds({"mortal": mortal, "other": other}, repeats=4)
    assert failures == {"mortal": "its process ended with status 9"}
    assert times["other"].samples == 4


class Slow:
    """Stands in for a process."""

    def __init__(self, log, name, seconds):
        self.log, self.name, self.seconds = log, name, seconds

    def time(self, number, _limit):
        self.log.append((self.name, number))
        return self.seconds


def test_turns_alternate_and_slow_calls_get_few_of_them():
    log = []
    processes = {"slow": Slow(log, "slow", 0.5), "fast": Slow(log, "fast", 0.0001)}
    times, _ = in_rounds(processes, repeats=SLOW_REPEATS + 2)
    turns = [("slow", 1), ("fast", 20)] * SLOW_REPEATS + [("fast", 20)] * 2
    assert log == [("slow", 1)] * 2 + [("fast", 1)] * 2 + turns
    assert times["slow"].median_us == 5e5
    assert (times["slow"].samples, times["fast"].samples) == (SLOW_REPEATS, SLOW_REPEATS + 2)


@pytest.mark.parametrize("threads", [0, -1, 10**6])
def test_more_threads_than_cores_or_none_are_refused(threads, capsys):
    with pytest.raises(InputError, match="--threads: expected 1 to"):
        cores_for(threads)
    arguments = ["bench", "--suite", "cpu", "--threads", str(threads), "--target", "llvm"]
    assert cli.main(arguments) == 2
    assert "--threads: expected 1 to" in capsys.readouterr().err


def test_physical_cores_come_before_second_threads_of_them(monkeypatch):
    pairs = frozenset({frozenset({0, 2}), frozenset({1, 3})})
    monkeypatch.setattr("tvm_fusion.bench.apart.usable_cores", lambda: frozenset(range(4)))
    monkeypatch.setattr("tvm_fusion.bench.apart.physical_cores", lambda _: pairs)
    assert [cores_for(count) for count in (1, 2, 3)] == [[0], [0, 1], [0, 1, 2]]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "few.json"
    names = ("argmax_1024x1000", "layers_64x784x256x10")
    peers = ("torch", "torch.matmul")
    returned = run_suite(names, peers, "llvm", out, scale=SMALL, repeats=3, threads=1)
    assert returned == json.loads(out.read_text())
    return returned


@pytest.mark.long
def test_rows_have_medians_quartiles_errors_and_the_ratio_to_the_best_peer(result):
    for row in result["rows"]:
        assert row["failures"].keys() == {"torch.matmul"}  # no product alone
        assert row["ours_us"] > 0
        assert row["best_peer_ratio"] == row["peers_us"]["torch"] / row["ours_us"]
        assert row["launches"] >= 1
        assert row["error"] < 1e-5
        assert row["samples"] == {"tvm_fusion": 3, "torch": 3}
        low, high = row["quartiles_us"]["tvm_fusion"]
        assert 0 < row["least_us"]["tvm_fusion"] <= low <= row["ours_us"] <= high


def test_a_result_names_the_processor_and_its_threads(result):
    assert result["threads"] == 1
    assert result["rates"] == "as shipped"
    assert result["method"] == "wall time, each in a process of its own, 1 threads"
    assert result["cpu"]["cores"] == len(physical_cores(usable_cores()))
    assert result["cpu"]["hardware_threads"] >= result["cpu"]["cores"] >= 1
    assert result["versions"]["torch"] == torch.__version__.partition("+")[0]


def test_threads_are_for_cpus():
    with pytest.raises(InputError, match="the target is cuda"):
        run_suite(["softmax"], [], "nvidia_h200", threads=1)


def test_the_suites_for_cpus_hold_what_their_names_say():
    counts = {name: len(workloads.SUITES[name]) for name in CPU_PEERS}
    assert counts == {"cpu": 40, "cpu_products": 30, "cpu_models": 5}
    for name in workloads.SUITES["cpu_products"]:
        rows, terms, columns = map(int, name.removeprefix("product_").split("x"))
        instance = workloads.make(name, "cpu", "float32")
        assert instance.inputs[0].shape == (rows, terms)
        assert instance.module.weight.shape == (columns, terms)
        assert rows <= 512
        assert 64 <= min(terms, columns) <= max(terms, columns) <= 4096


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [*workloads.SUITES["cpu"], *workloads.SUITES["cpu_models"]])
def test_every_workload_for_a_cpu_is_its_own_reference_up_to_rounding(name):
    instance = workloads.make(name, "cpu", "float32", SMALL)
    wanted, _ = reference(instance)
    with torch.no_grad():
        given = outputs_of(instance.module(*instance.inputs))
    assert relative_error(given, wanted) < 1e-5


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", workloads.SUITES["cpu"][::4])
def test_programs_for_a_cpu_compile_and_are_right(name):
    (row,) = run_suite([name], [], "llvm", scale=SMALL, repeats=1, budget_s=0.01)["rows"]
    assert row["failures"] == {}
    assert row["error"] < 1e-5
    assert row["launches"] >= 1


@pytest.mark.parametrize("label", ["torch.matmul", "onnxruntime", "openvino"])
def test_peers_of_a_cpu_compute_what_torch_does(label):
    if label != "torch.matmul":
        pytest.importorskip(label)
        pytest.importorskip("onnxscript")
    instance = workloads.make("product_27x258x1077", "cpu", "float32", SMALL)
    with torch.no_grad():
        given = outputs_of(peer(label)(instance, LLVM)())
        assert relative_error(given, reference(instance)[0]) < 1e-6


@pytest.mark.parametrize("label", ["onnxruntime", "openvino"])
def test_peers_of_a_cpu_refuse_a_gpu(label):
    instance = workloads.make("product_27x258x1077", "cpu", "float32", SMALL)
    target = tvm.target.Target("nvidia/nvidia-h100")
    with pytest.raises(Unsupported, match="on a CPU only"):
        peer(label)(instance, target)
