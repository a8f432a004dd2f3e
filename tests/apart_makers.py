"""What processes of `bench.apart` are asked to make in tests; imports little, since each process
imports it again.
"""

import os

from tvm_fusion._cores import usable_cores
from tvm_fusion.bench.apart import THREADS


def make_something(what):
    """A call, and what surrounds it in its process."""
    if what == "fail":
        raise ValueError("the maker's own words")
    if what == "die":
        os._exit(7)
    calls = []
    threads = {name: os.environ.get(name) for name in THREADS}
    return lambda: calls.append(what), (os.getpid(), threads, len(usable_cores()))


def make_death():
    """A call that ends its process."""
    return lambda: os._exit(9), None
