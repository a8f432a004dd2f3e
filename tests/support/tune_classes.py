"""A kernel class for the tests of tuning: configurations that are fast, slow, wrong or deadly."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import tvm_ffi
from tvm import s_tir, tirx

from tvm_fusion.cost.traffic import Resources, Traffic
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.base import Family, Fit, OnCPU, write_on_cpu
from tvm_fusion.kernels.forms import Form, Writer
from tvm_fusion.kernels.registry import family
from tvm_fusion.plan.refusal import RefusalCode

HUNG = "TVM_FUSION_TESTS_HUNG"  # names a file: a process that hangs writes its number there
WAYS = ("plain", "fast", "wrong", "refused", "hanging", "dying", "greedy")


@dataclass(frozen=True)
class Way:
    way: str


class Several(Family):
    """Takes what `pointwise` takes; `default` is slow."""

    name = "tested"

    def __init__(self, ways=WAYS):
        self.ways = ways

    def accepts(self, group, hw, policy):
        fit = family("pointwise").accepts(group, hw, policy)
        if not isinstance(fit, Fit):
            return group.refuse(RefusalCode.SPACE_MISMATCH, "not pointwise")
        return Fit(self.name, fit.rows, fit.columns, fit.evaluations)

    def traffic(self, group, fit, hw) -> Traffic:
        return family("pointwise").traffic(group, fit, hw)

    def resources(self, group, fit, hw) -> Resources:
        return Resources(32, 0)

    def writer(self, hw):
        return Writer("what is tested", OnCPU, (Form("ways", Way, self.rank, emit),))

    def rank(self, problem, hw, policy):
        return [(None, Way(way)) for way in self.ways]


def emit(problem, hw, config) -> tirx.PrimFunc:
    func, way = problem.func, config.way
    if way == "refused":
        raise Unsupported("no such way")
    if way == "hanging":
        if HUNG in os.environ:
            Path(os.environ[HUNG]).write_text(str(os.getpid()))
        time.sleep(3600)
    if way == "dying":
        os.abort()
    if way == "greedy":
        bytearray(1 << 42)
    if way == "wrong":
        func = with_other_constants(func)
    if way == "fast":
        return write_on_cpu(problem, hw)
    return many_times(func).with_attr("tirx.is_scheduled", True)  # its own loops


def many_times(func: tirx.PrimFunc, count: int = 50) -> tirx.PrimFunc:
    """The function that does all its work `count` times over: slower than `fast` also where other
    programs take the machine's cores.
    """
    root = func.body.block
    again = tirx.For(tirx.Var("again", "int64"), 0, count, tirx.ForKind.SERIAL, root.body)
    block = s_tir.SBlock(
        root.iter_vars,
        root.reads,
        root.writes,
        root.name_hint,
        again,
        root.init,
        root.alloc_buffers,
        root.match_buffers,
        root.annotations,
    )
    return func.with_body(s_tir.SBlockRealize([], True, block))


def with_other_constants(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with all its floating-point constants doubled."""

    def doubled(constant: tirx.FloatImm) -> tirx.FloatImm:
        return tirx.FloatImm(str(constant.ty.dtype), 2 * constant.value)

    return tvm_ffi.structural_map(func, (tirx.FloatImm, doubled))
