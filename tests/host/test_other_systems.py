"""What Linux alone has is hidden: the package imports, plans, runs on a CPU, and says what needs
Linux.
"""

import os
import subprocess
import sys
import textwrap

import pytest

HIDE = """
import ctypes, importlib, os, signal, sys
import filelock, numpy, torch, tvm  # what others hold on to is for them to do without

for name in ("fcntl", "resource"):
    sys.modules[name] = None
for name in ("sched_getaffinity", "sched_setaffinity", "killpg", "getpgid", "getuid", "geteuid",
             "register_at_fork", "nice", "sysconf", "fork", "O_DIRECTORY", "O_NOFOLLOW"):
    delattr(os, name)
for name in ("SIGKILL", "SIGALRM", "setitimer"):
    delattr(signal, name)

class Library(ctypes.CDLL):
    def __init__(self, name, *args, **more):
        if name is not None and "libcuda" in str(name):
            raise OSError(f"{name}: cannot open shared object file")
        super().__init__(name, *args, **more)

    def __getattr__(self, name):
        if name == "prctl":
            raise AttributeError("prctl")
        return super().__getattr__(name)

ctypes.CDLL = Library
"""


def run(code: str, folder, **variables: str) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "TVM_FUSION_CACHE": str(folder),
        **variables,
    }
    program = HIDE + textwrap.dedent(code)
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)


# Always: the demo here (`test_compile`), and what needs Linux.
@pytest.mark.nightly
def test_the_demo_is_planned_built_and_right_on_a_cpu(tmp_path):
    code = """
    from pathlib import Path

    import tvm_fusion
    from tvm_fusion import demo
    from tvm_fusion.calibrate.cpu import host_profile

    compiled = tvm_fusion.compile(demo.demo_module("llvm"), "llvm", verify=True)
    print(len(compiled.plan.groups), compiled.report.verify.passed)
    before = host_profile.core_time()
    host_profile.TASKS = Path("nowhere")
    time = host_profile.core_time()
    print(time.ran >= 0.5 * before.ran, time.waited)
    """
    found = run(code, tmp_path, TVM_FUSION_CALIBRATE="0")
    assert found.returncode == 0, found.stderr[-2000:]
    groups, passed, *times = found.stdout.split()
    assert 5 < int(groups) < 25
    assert [passed, *times] == ["True", "True", "0.0"]


def test_what_needs_linux_says_so(tmp_path):
    code = """
    from tvm_fusion.errors import TargetError
    from tvm_fusion.host.gpu_driver import gpu_attributes
    from tvm_fusion.runtime.graphs.driver import CudaDriver
    from tvm_fusion.tuning.measure.processes import Worker

    assert gpu_attributes() == {}
    for attempt in (lambda: Worker("a builder").send(print, (), 1.0), lambda: CudaDriver(0)):
        try:
            attempt()
        except TargetError as error:
            print(error)
    """
    found = run(code, tmp_path)
    tuning, graphs = found.stdout.splitlines()
    assert "need fcntl, resource, os.killpg, os.getpgid, prctl" in tuning
    assert "Tune and fuzz on Linux" in tuning
    assert "CUDA graphs need the driver library libcuda.so.1" in graphs
