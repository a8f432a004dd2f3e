"""The number of threads that kernels run on, and who gets to say."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from tvm_fusion.host import threads as _threads
from tvm_fusion.host.cores import granted_cores, physical_cores, usable_cores

CORES = len(usable_cores())


def machine(root, siblings):
    """A file system that tells which hyper-threads share a core."""
    for core, shared in siblings.items():
        folder = root / f"sys/devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(shared + "\n")
    return root


def groups(root, lines, files):
    """A file system that tells what control groups grant."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("".join(line + "\n" for line in lines))
    for path, text in files.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def run_python(code, **environment):
    """What a new process prints, and what it logs."""
    inherited = {k: v for k, v in os.environ.items() if k not in _threads.VARIABLES}
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**inherited, **environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split(), run.stderr


@pytest.mark.parametrize(
    ("siblings", "cores", "physical"),
    [
        ({0: "0", 1: "1"}, {0, 1}, 2),  # no hyper-threading
        ({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, {0, 1, 2, 3}, 2),  # neighbours
        ({0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5"}, {0, 1, 4, 5}, 2),  # halves
        ({0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5"}, {0, 1, 5}, 2),  # a mask that splits a core
        ({0: "0,4", 4: "0,4"}, {4}, 1),
        ({}, {0, 1, 7}, 3),  # a system that does not say
    ],
)
def test_hyper_threads_of_a_core_count_once(tmp_path, siblings, cores, physical):
    assert len(physical_cores(cores, machine(tmp_path, siblings))) == physical


@pytest.mark.parametrize(
    ("lines", "files", "granted"),
    [
        (["0::/"], {"cpu.max": "150000 100000"}, 1.5),
        (["0::/"], {"cpu.max": "max 100000"}, None),
        (["0::/a/b"], {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3.0),
        (["0::/a/b"], {"a/b/cpu.max": "50000 100000", "a/cpu.max": "300000 100000"}, 0.5),
        (["0::/gone"], {"cpu.max": "200000 100000"}, 2.0),  # seen from within a container
        (
            ["4:cpu,cpuacct:/box", "1:memory:/box"],
            {
                "cpu,cpuacct/box/cpu.cfs_quota_us": "200000",
                "cpu,cpuacct/box/cpu.cfs_period_us": "50000",
            },
            4.0,
        ),
        (
            ["4:cpu,cpuacct:/box"],
            {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"},
            2.5,
        ),
        (["4:cpu:/"], {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ([], {}, None),
    ],
)
def test_the_time_that_control_groups_grant_is_read(tmp_path, lines, files, granted):
    assert granted_cores(groups(tmp_path, lines, files)) == granted


def test_a_system_without_control_groups_grants_all(tmp_path):
    assert granted_cores(tmp_path) is None


@pytest.mark.parametrize(("granted", "count"), [(None, 8), (100.0, 8), (3.9, 3), (0.5, 1)])
def test_a_granted_part_of_a_core_carries_no_thread(monkeypatch, granted, count):
    monkeypatch.setattr("tvm_fusion.host.cores.granted_cores", lambda: granted)
    monkeypatch.setattr("tvm_fusion.host.cores.usable_cores", lambda: frozenset(range(8)))
    from tvm_fusion.host import cores as _cores

    assert _cores.available_cores() == count


@pytest.mark.parametrize(
    ("value", "threads"),
    [("1", 1), ("3", 3), (" 2 ", 2), ("2,1", 2), ("0", None), ("-1", None), ("all", None),
     ("", None), ("1.5", None), ("4", 4), ("5", 4), ("1000000", 4)],
)  # fmt: skip
def test_only_a_number_of_threads_that_there_is_counts(caplog, value, threads):
    assert _threads._asked("TVM_NUM_THREADS", value, 4) == threads
    wrong = threads is None or value in ("5", "1000000")
    assert ("TVM_NUM_THREADS" in caplog.text) == wrong


def test_calibrated_threads_take_the_place_of_the_physical_cores(monkeypatch):
    monkeypatch.setattr(_threads, "asked_threads", lambda: None)
    try:
        _threads.use_calibrated_threads(1)
        assert (_threads.thread_count(), _threads.kernel_threads()) == (1, 1)
        monkeypatch.setattr(_threads, "asked_threads", lambda: CORES)
        assert _threads.kernel_threads() == CORES  # the user wins
    finally:
        _threads.use_calibrated_threads(None)


@pytest.mark.parametrize("count", [0, -1, 10**6])
def test_a_calibration_cannot_ask_for_threads_that_there_are_not(count):
    with pytest.raises(ValueError, match="threads on"):
        _threads.use_calibrated_threads(count)


NO_TORCH = """if True:
    import sys
    sys.modules["torch"] = None  # TVM imports it where it finds it
"""
COUNT = """if True:
    import threading
    import tvm
    from tvm_fusion.config.targets import cpu_target
    from tvm_fusion.host.threads import kernel_threads
    def say():
        print(kernel_threads(), tvm.runtime.num_threads(), cpu_target().attrs["num-cores"])
    say()
    thread = threading.Thread(target=say)
    thread.start()
    thread.join()
"""


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("variables", "threads", "said"),
    [
        ({}, None, ""),
        ({"TVM_NUM_THREADS": "1"}, 1, ""),
        ({"TVM_NUM_THREADS": str(CORES), "OMP_NUM_THREADS": "1"}, CORES, ""),
        ({"TVM_NUM_THREADS": "many"}, None, "TVM_NUM_THREADS='many' is no number of threads"),
        ({"TVM_NUM_THREADS": "4096"}, CORES, "TVM_NUM_THREADS=4096 is more than"),
    ],
)
def test_every_thread_the_target_and_tvm_s_pool_agree_on_the_number(variables, threads, said):
    printed, logged = run_python(NO_TORCH + COUNT, **variables)
    expected = threads or _threads._found_threads()
    assert printed == [str(expected)] * 6
    assert logged.count(said) == 1 if said else not logged


def test_a_thread_that_has_a_smaller_pool_is_told():
    printed, logged = run_python(
        NO_TORCH
        + """if True:
        import os, tvm
        os.environ["TVM_NUM_THREADS"] = "1"
        tvm.runtime.num_threads()  # a kernel of TVM's own would do the same
        os.environ["TVM_NUM_THREADS"] = "2"
        from tvm_fusion.host.threads import kernel_threads
        print(kernel_threads(), kernel_threads())
        """
    )
    if CORES > 1:
        assert printed == ["1", "1"]
        assert logged.count("ran a kernel through TVM alone before") == 1


def test_a_compiled_module_and_its_report_use_all_threads_in_every_thread():
    import torch

    import tvm_fusion

    class Chain(torch.nn.Module):
        def forward(self, x):
            return torch.relu(x + 1)

    x = torch.randn(7, 33)
    module = tvm_fusion.compile((Chain(), (x,)), "llvm")
    assert module.report.threads == _threads.thread_count()
    assert f"{_threads.thread_count()} thread" in str(module.report).splitlines()[0]
    assert module.report.to_json()["threads"] == _threads.thread_count()
    found = []

    def call():
        numbers = module(x.numpy())
        found.extend([numbers, _threads.kernel_threads(), os.sched_getaffinity(0)])

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    np.testing.assert_array_equal(found[0], torch.relu(x + 1).numpy())
    assert found[1:] == [_threads.thread_count(), set(usable_cores())]
