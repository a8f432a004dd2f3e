"""A kernel class for CUDA whose configurations go wrong on the device."""

import math
from dataclasses import dataclass

import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad

from tvm_fusion.config import load_policy
from tvm_fusion.kernels.base import OnCPU
from tvm_fusion.kernels.forms import Form, Writer
from tvm_fusion.kernels.registry import family

from .tune_classes import Several, with_other_constants

RIGHT = "right"  # what is written untuned, too
WAYS = {  # and what comes of a trial
    "wrong": "wrong",
    "beyond": "crash",
    "endless": "timeout",
    "after": "ok",
}
FAR = 1 << 30  # elements: no tensor of the process lies there
NAP_NS = 1_000_000


@dataclass(frozen=True)
class DeadlyConfig:
    way: str


class Deadly(Several):
    """What `pointwise` writes, and what becomes of it on the way."""

    def __init__(self):
        super().__init__(tuple(WAYS))

    def writer(self, hw):
        return Writer("what is tested", OnCPU, (Form("ways", DeadlyConfig, self.rank, emit),))

    def rank(self, problem, hw, policy):
        return [(None, DeadlyConfig(way)) for way in (RIGHT, *self.ways)]


def emit(problem, hw, config):
    func = with_other_constants(problem.func) if config.way == "wrong" else problem.func
    policy = load_policy({"rounding": "exact"} if problem.exact else None)
    kernel = family("pointwise").write(func, hw, policy)
    change = {"beyond": beyond, "endless": endless}.get(config.way)
    return change(kernel) if change else kernel


def beyond(kernel):
    """The kernel with all that it reads and writes far behind the tensors."""
    least = min(math.prod(map(int, p.ty.shape)) for p in kernel.params)

    def moved(load):
        if math.prod(map(int, load.source.ty.shape)) < least:
            return load  # of a thread's own
        *outer, last = load.indices
        return tirx.BufferLoad(load.source, [*outer, last + FAR])

    return tvm_ffi.structural_map(kernel, (TensorLoad, moved))


def endless(kernel):
    """The kernel with a nap of weeks before each result."""
    nap = tirx.Evaluate(tirx.call_extern("int32", "__nanosleep", tirx.IntImm("uint32", NAP_NS)))

    def slowed(store):
        count = tirx.Var("nap", "int32")
        naps = tirx.For(count, 0, 1 << 30, tirx.ForKind.SERIAL, nap)
        return tirx.SeqStmt([naps, store])

    return tvm_ffi.structural_map(kernel, (tirx.BufferStore, slowed))
