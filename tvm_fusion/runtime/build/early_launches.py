"""Kernels of a module that are launched before the kernel in front of them has ended.

    kernel(...) {                            kernel(...) {
      body                                     griddepcontrol.wait
    }                                          griddepcontrol.launch_dependents
                                               body
                                             }

On devices of compute capability 9.0 and later (programmatic dependent launch): a kernel's blocks
take the places that the last blocks of the kernel in front of it leave, and what a launch costs is
over when that one ends. Each kernel waits at its start until all kernels before it have ended and
what they wrote can be read, so that nothing is read or written too early: it ends only behind those
that it waited for. A kernel of somebody else, which does not say that it may be followed early, is
followed when it ends.

Asked for by `TVM_FUSION_EARLY_LAUNCHES=1`. What profilers say of a kernel's time holds its wait
then; `timing.apart` takes that out. On an H200 (2026-11-27, CUDA graphs, us a call, without and
with it): eight transformer blocks of one token 180.2 and 159.8, four of 512 tokens 187.0 and 183.0,
ResNet-50 of 32 images 782.7 and 786.9, sorts and scans of 1000 x 1000 298.0 and 299.4. Short
kernels gain, long ones do not. 200 calls of each were bitwise those without it, and so were 100 on
a stream, without a CUDA graph, of all but one: none was of the blocks of one token, which were
compiled anew for that, without a graph. Why is not known: that module was not compared with one
of late launches, so neither other kernels nor a fault of early launches is ruled out.
"""

from __future__ import annotations

import os

import tvm
from tvm import tirx

from ...config.targets import architecture_of
from ...kernels.gpu.intrinsics import device_call
from .lowering import COOPERATIVE, LAUNCH_PARAMS

VARIABLE = "TVM_FUSION_EARLY_LAUNCHES"
DYNAMIC_SMEM = "tirx.use_dyn_shared_memory"
"""The launch parameter of a kernel with shared memory of a size that the launch tells: the last."""
EARLY = "tirx.use_programtic_dependent_launch"

_START = 'asm volatile("griddepcontrol.wait;\\n griddepcontrol.launch_dependents;" ::: "memory");'


def launches_early() -> bool:
    """Whether kernels of modules are launched early where a device can."""
    return os.environ.get(VARIABLE) == "1"


def launched_early(kernels: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Lowered kernels that are launched early and wait; the same on devices that cannot, and where
    they are not to.
    """
    if not launches_early() or not architecture_of(target).has_dependent_launch:
        return kernels
    functions = {gvar: _early(func) for gvar, func in kernels.functions_items()}
    return tvm.IRModule(functions, attrs=kernels.attrs)


def _early(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A kernel that waits at its start; as it is what is no kernel, and one whose blocks wait for
    each other, which all have to have places at once.
    """
    names = [str(name) for name in func.attrs.get(LAUNCH_PARAMS, ())]
    if not names or COOPERATIVE in names:
        return func
    last = [name for name in names if name == DYNAMIC_SMEM]
    others = [name for name in names if name != DYNAMIC_SMEM]
    start = tirx.Evaluate(device_call("void", "wait_for_kernels_before", "", _START))
    func = func.with_body(tirx.SeqStmt([start, func.body]))
    return func.with_attr(LAUNCH_PARAMS, [*others, EARLY, *last])
