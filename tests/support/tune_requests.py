"""Requests that go wrong, for the tests of worker processes."""

import importlib.util
import os
import signal
import sys
import time


def echo(value):
    return value


def fail(why):
    raise ValueError(why)


def hang():
    time.sleep(3600)


def nap(seconds):
    time.sleep(seconds)
    return seconds


def wait_for_file(path):
    while not os.path.exists(path):
        time.sleep(0.01)


def die():
    os.kill(os.getpid(), signal.SIGSEGV)


def leave():
    print("the driver is gone", flush=True)
    os._exit(3)


def eat(count):
    return len(bytearray(count))


def start_child(path):
    """Starts a process that outlives an answer, and waits for it."""
    import subprocess

    child = subprocess.Popen(["sleep", "3600"])
    with open(path, "w") as file:
        file.write(str(child.pid))
    child.wait()


def make_temporary():
    """The path of a folder for temporary files, which stays."""
    import tempfile

    return tempfile.mkdtemp()


def limit_memory(count):
    """Lets the process have so many bytes more than it has, which differs by what it imports."""
    import resource
    from pathlib import Path

    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmData" in x]
    count += int(line.split()[1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (count, count))


def process_number():
    return os.getpid()


def threads():
    """That kernels run on."""
    from tvm_fusion.host.threads import kernel_threads

    return kernel_threads()


def torch_seen():
    """Whether torch can be imported, whether it can be found, and what lies under its name."""
    found = importlib.util.find_spec("torch") is not None
    try:
        import torch  # noqa: F401
    except ImportError:
        return False, found, "torch" in sys.modules
    return True, found, hasattr(sys.modules["torch"], "Tensor")
