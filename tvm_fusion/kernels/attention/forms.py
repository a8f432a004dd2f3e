"""The forms of an attention kernel."""

from __future__ import annotations

from types import NoneType

from tvm import tirx

from ...config import HardwareProfile
from ...errors import Unsupported
from ..base import OnCPU, unranked, write_on_cpu
from ..cpu.machine import machine_of
from ..forms import Form, Writer
from .cpu.kernel import write_attention
from .decode.kernel import DecodeConfig, attention_decode_ranked, emit_attention_decode
from .hopper.config import AttentionConfig
from .hopper.kernel import attention_hopper_ranked, emit_attention_hopper
from .mma.kernel import AttentionMmaConfig, attention_mma_ranked, emit_attention_mma
from .read.model import Attention
from .read.program import analyze_attention

WRITER = Writer(
    "an attention",
    analyze_attention,
    (
        Form("hopper", AttentionConfig, attention_hopper_ranked, emit_attention_hopper),
        Form("decode", DecodeConfig, attention_decode_ranked, emit_attention_decode),
        Form("mma", AttentionMmaConfig, attention_mma_ranked, emit_attention_mma),
    ),
)


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


CPU_WRITER = Writer(
    "an attention", _read_on_cpu, (Form("loops", NoneType, unranked, _emit_on_cpu),)
)
