"""A warning where a tuner of TVM meets a written kernel, of which it can change nothing.

MetaSchedule asks the rule that a block names, `schedule_rule`, for the schedules of the block. That
of written kernels, which `kernel_bodies` puts there, warns and leaves the kernel as it is: a tuner
would else build, measure and search for minutes and end without a sample, silently.
"""

from __future__ import annotations

import warnings

import tvm_ffi
from tvm import s_tir

RULE = "tvm_fusion.written"
"""What blocks name, under the key of MetaSchedule's annotation, "schedule_rule"."""

_TEXT = (
    "a tuner of TVM is given kernels that tvm_fusion wrote, and finds nothing to tune in them. Let "
    "Fuse(write=False) fuse for the tuner, and Fuse() write behind it what it leaves; or tune "
    "these kernels with tvm_fusion.tune"
)


def _written(schedule: s_tir.Schedule, _block: s_tir.schedule.SBlockRV) -> list[s_tir.Schedule]:
    """The one schedule of a written kernel: itself."""
    warnings.warn(_TEXT, stacklevel=1)  # once, as Python's filters have it
    return [schedule]


def register_rule() -> None:
    """Make the rule known to MetaSchedule, for CPUs and GPUs."""
    for key in ("cpu", "gpu"):
        tvm_ffi.register_global_func(f"s_tir.meta_schedule.{key}.{RULE}", _written, override=True)
