"""How long the package takes to import, beyond TVM: 1.5 s where TVM itself takes two."""

import subprocess
import sys

MOST, TRIES = 0.75, 3
PROGRAM = """
import time
began = time.process_time()
import tvm
there = time.process_time()
import tvm_fusion
tvm_fusion.compile
print((time.process_time() - there) / (there - began))
"""


def share_of_tvm() -> float:
    """CPU seconds over those of TVM, in a fresh process: a slow machine has more of both."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    return float(run.stdout)


def test_the_package_is_imported_in_three_quarters_of_what_tvm_takes():
    """0.5 when this was written. The least of three counts, as far as they are needed."""
    each = [share_of_tvm()]
    while min(each) >= MOST and len(each) < TRIES:
        each.append(share_of_tvm())
    assert min(each) < MOST, each
