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

from tvm import tirx
from tvm.script import tirx as T

from ...config import HardwareProfile
from .intrinsics import PREFIX

VARIABLE = "TVM_FUSION_EARLY_LAUNCHES"
EARLY_ATTR = "tvm_fusion.launch_early"
"""The attribute of a PrimFunc whose kernels may be launched early: whether that pays whatever they
read; else it does where they read ahead."""
MARK = "tvm_fusion.before_wait"
"""The attribute of the place of a kernel's wait."""
READS_AHEAD = "tvm_fusion.reads_ahead"
"""The attribute of a PrimFunc with the numbers of the parameters that are read in front of it."""
LOADS_AHEAD = frozenset(f"{PREFIX}load{size}_ahead" for size in (4, 8, 16))
"""Device functions that read memory in front of a wait (`memory.copy_in`)."""


def asked() -> str:
    """Which kernels are launched early where a device can: "none", "all", or those "that pay"."""
    return {"0": "none", "1": "all"}.get(os.environ.get(VARIABLE, ""), "that pay")


def is_to_be_early(func: tirx.PrimFunc) -> bool:
    """Whether the kernels of a written PrimFunc are to be launched early."""
    if asked() != "that pay":
        return asked() == "all"
    marks = func.attrs or {}
    return EARLY_ATTR in marks and (bool(marks[EARLY_ATTR]) or READS_AHEAD in marks)


def reads_ahead(hw: HardwareProfile) -> bool:
    """Whether kernels for a device have something in front of their wait."""
    return asked() != "none" and hw.architecture.has_dependent_launch


def before_wait() -> None:
    """Ends what stands in front of a kernel's wait: indices, registers and loads ahead. On each way
    through the kernel, if on one.
    """
    with T.attr({MARK: 1}):
        T.evaluate(0)
