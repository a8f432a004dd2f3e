"""Cores of a process whose threads TVM pins."""

import os
import subprocess
import sys
import threading

import pytest

from tvm_fusion.host.cores import on_all_cores, usable_cores, use_all_cores
from tvm_fusion.host.threads import kernel_threads

ALL = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
pytestmark = pytest.mark.skipif(len(ALL) < 2, reason="one core, or a system without affinities")
ONE = {min(ALL, default=0)}


@pytest.fixture
def pinned():
    """The main thread on one core, as TVM leaves it."""
    os.sched_setaffinity(0, ONE)
    yield
    os.sched_setaffinity(0, ALL)


def child_cores():
    code = "import os; print(len(os.sched_getaffinity(0)))"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)


def test_a_pinned_thread_hides_no_core(pinned):
    assert usable_cores() == ALL
    assert child_cores() == 1
    with on_all_cores():
        assert child_cores() == len(ALL)
    assert os.sched_getaffinity(0) == ONE
    use_all_cores()
    assert os.sched_getaffinity(0) == ALL


@pytest.mark.usefixtures("no_torch")
def test_cores_of_another_thread_count():
    """TVM may have pinned the thread before this package was imported."""
    code = """if True:
        import os, threading
        waiting, cores = threading.Event(), os.sched_getaffinity(0)
        threading.Thread(target=waiting.wait).start()
        os.sched_setaffinity(0, {min(cores)})
        from tvm_fusion.host.cores import usable_cores
        print(usable_cores() == cores)
        waiting.set()
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "True\n", run.stderr


def test_a_thread_pool_pins_nobody():
    found = []

    def first_use():
        found.extend([kernel_threads(), os.sched_getaffinity(0)])

    thread = threading.Thread(target=first_use)
    thread.start()
    thread.join()
    assert found[0] >= 1
    assert found[1] == ALL
