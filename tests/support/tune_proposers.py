"""Proposers that are slow, die or hang, for the tests of evolution in processes."""

import os
import time
from pathlib import Path


def wait_for_file(place, ask):
    """Proposes nothing as soon as the file that is called as the workload is there."""
    while not Path(ask.workload).exists():
        time.sleep(0.01)
    return []


def hang(place, ask):
    time.sleep(3600)


def die(place, ask):
    os.abort()


def refuse(place, ask):
    from tvm_fusion.errors import Unsupported

    raise Unsupported("no design space")


def count_up(place, ask):
    """Texts that say what the proposer was told."""
    return [f"{ask.workload}{len(ask.told) + i}" for i in range(ask.batch)]
