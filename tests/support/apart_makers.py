"""What processes of `bench.apart` are asked to make in tests; imports little, since each process
imports it again.
"""

import os
import threading
import time

from tvm_fusion.bench.apart import THREADS
from tvm_fusion.host.cores import usable_cores


def make_something(what):
    """A call, and what surrounds it in its process."""
    if what == "fail":
        raise ValueError("the maker's own words")
    if what == "die":
        os._exit(7)
    calls = []
    threads = {name: os.environ.get(name) for name in THREADS}
    return lambda: calls.append(what), (os.getpid(), threads, len(usable_cores()))


def make_variables(names):
    """No call, but the variables of a process."""
    return None, {name: os.environ.get(name) for name in names}


def make_spinner():
    """A call that leaves a thread at work for a while; and how many are still at work."""

    def spin():
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            pass

    return lambda: threading.Thread(target=spin).start(), threading.active_count() - 1


def make_death():
    """A call that ends its process."""
    return lambda: os._exit(9), None
