"""What a kernel reads before it waits for the kernels in front of it (see the contract in
`runtime.build.early_launches`).

    kernel(...) {
      first weights = load ahead (`memory`)     no launch of a call writes these
      before_wait
      body
    }
"""

from __future__ import annotations

import os

from tvm.script import tirx as T

from ...config import HardwareProfile
from .intrinsics import PREFIX

VARIABLE = "TVM_FUSION_EARLY_LAUNCHES"
MARK = "tvm_fusion.before_wait"
"""The attribute of the place of a kernel's wait."""
READS_AHEAD = "tvm_fusion.reads_ahead"
"""The attribute of a PrimFunc with the numbers of the parameters that are read in front of it."""
LOADS_AHEAD = frozenset(f"{PREFIX}load{size}_ahead" for size in (4, 8, 16))
"""Device functions that read memory in front of a wait (`memory.copy_in`)."""


def launches_early() -> bool:
    """Whether kernels of modules are launched early where a device can."""
    return os.environ.get(VARIABLE) == "1"


def reads_ahead(hw: HardwareProfile) -> bool:
    """Whether kernels for a device have something in front of their wait."""
    return launches_early() and hw.architecture.has_dependent_launch


def before_wait() -> None:
    """Ends what stands in front of a kernel's wait: indices, registers and loads ahead. On each way
    through the kernel, if on one.
    """
    with T.attr({MARK: 1}):
        T.evaluate(0)
