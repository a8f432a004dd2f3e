"""The suites for CPUs, whose compilers are asked in turns."""

import json
import os
import time

import pytest
import torch
import tvm

from tvm_fusion.bench.apart import INSTRUCTIONS, PROCESSORS, Failed
from tvm_fusion.errors import InputError, Unsupported
from tvm_fusion.host.cores import physical_cores, usable_cores
from tvm_fusion.kernels.cpu.machine import machine_of

from ...support.runtime_cases import LLVM
from .. import workloads
from ..__main__ import main
from ..peers.names import CPU_PEERS
from ..peers.registry import outputs_of, peer
from ..run import limited, run_suite
from . import apart
from .accuracy import reference, relative_error

SMALL = 0.02


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_our_kernels_keep_to_the_instructions_of_a_run(instructions):
    named, target, hw = limited(instructions, 1)
    assert target.same_as(named)
    assert target.attrs["mcpu"] == PROCESSORS[instructions]
    with target:
        assert machine_of(hw).vector_bytes == 32


class Here:
    """Makes and times calls in this process, as `bench.apart.Process` does in another one."""

    def __init__(self, make, threads, instructions=None):
        self._make_call, self._asked, self._call = make, (), None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def begin(self, *arguments):
        self._asked = arguments

    def finish(self):
        try:
            self._call, told = self._make_call(*self._asked)
        except Exception as error:
            raise Failed(f"{type(error).__name__}: {error}") from error
        return told

    def make(self):
        self.begin()
        return self.finish()

    def time(self, number, _limit):
        began = time.perf_counter()
        for _ in range(number):
            self._call()
        return (time.perf_counter() - began) / number

    def close(self):
        pass


@pytest.fixture(
    scope="module",
    params=[Here, pytest.param(apart.Process, marks=[pytest.mark.long, pytest.mark.nightly])],
)
def result(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "few.json"
    names, peers = ("argmax_1024x1000", "layers_64x784x256x10"), ("torch", "torch.matmul")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(torch.is_grad_enabled()):
        patch.setattr(apart, "Process", request.param)
        patch.setenv(apart.CALIBRATE, os.environ[apart.CALIBRATE])
        returned = run_suite(names, peers, "llvm", out, scale=SMALL, repeats=3, threads=1)
    torch.set_num_threads(threads)
    assert returned == json.loads(out.read_text())
    return returned


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
    assert counts == {"cpu": 40, "cpu_products": 30, "cpu_models": 7}
    for name in workloads.SUITES["cpu_products"]:
        rows, terms, columns = map(int, name.removeprefix("product_").split("x"))
        instance = workloads.make(name, "cpu", "float32")
        assert instance.inputs[0].shape == (rows, terms)
        assert instance.module.weight.shape == (columns, terms)
        assert rows <= 512
        assert 64 <= min(terms, columns) <= max(terms, columns) <= 4096


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*workloads.SUITES["cpu"], *workloads.SUITES["cpu_models"]])
def test_every_workload_for_a_cpu_is_its_own_reference_up_to_rounding(name):
    instance = workloads.make(name, "cpu", "float32", SMALL)
    wanted, _ = reference(instance)
    with torch.no_grad():
        given = outputs_of(instance.module(*instance.inputs))
    assert relative_error(given, wanted) < 1e-5


@pytest.mark.one_in(6)
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


@pytest.mark.parametrize("threads", [0, -1, 10**6])
def test_more_threads_than_cores_or_none_are_one_line(threads, capsys):
    assert main(["--suite", "cpu", "--threads", str(threads), "--target", "llvm"]) == 2
    assert "--threads: expected 1 to" in capsys.readouterr().err
