"""The form of an attention kernel on CPUs."""

from __future__ import annotations

from types import NoneType

from tvm import tirx

from ....config import HardwareProfile
from ....errors import Unsupported
from ...base import OnCPU, unranked, write_on_cpu
from ...cpu.machine import machine_of
from ...forms import Form, Writer
from ..read.model import Attention
from ..read.program import analyze_attention
from .kernel import write_attention


def _read_on_cpu(func: tirx.PrimFunc, exact: bool) -> tuple[OnCPU, Attention | None]:
    """The function, and the attention that it is if it can be read as one."""
    problem = OnCPU(func, exact)
    try:
        return problem, analyze_attention(func, exact)
    except Unsupported:
        return problem, None


def _emit_on_cpu(
    problem: tuple[OnCPU, Attention | None], hw: HardwareProfile, config: None
) -> tirx.PrimFunc:
    """The loops of an attention; those of any group where it has none."""
    loops, attention = problem
    try:
        if attention is not None:
            return write_attention(loops.func, attention, machine_of(hw))
    except Unsupported:
        pass
    return write_on_cpu(loops, hw)


WRITER = Writer("an attention", _read_on_cpu, (Form("loops", NoneType, unranked, _emit_on_cpu),))
