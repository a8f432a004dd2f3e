"""The forms of an attention kernel, and all their configurations in the order of predicted time.

A form ranks its own configurations, in seconds of one launch, and writes a kernel from one of them;
lists of several forms are merged by those seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from ...config import HardwareProfile, Policy
from ...errors import Unsupported
from ..attention_model import Attention
from .attention_decode import DecodeConfig, attention_decode_ranked, emit_attention_decode
from .attention_hopper import attention_hopper_ranked, emit_attention_hopper
from .attention_hopper_config import AttentionConfig
from .attention_mma import AttentionMmaConfig, attention_mma_ranked, emit_attention_mma

Ranked = list[tuple[float, Any]]


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write an attention.

    Attributes
    ----------
    name : for messages.
    config : the class of its configurations.
    rank : (attention, hw, policy) -> predicted seconds and configuration, the fastest first; raises
        Unsupported where the form cannot compute the attention.
    emit : (attention, hw, config) -> the kernel.
    """

    name: str
    config: type
    rank: Callable[[Attention, HardwareProfile, Policy], Ranked]
    emit: Callable[[Attention, HardwareProfile, Any], tirx.PrimFunc]


FORMS = (
    Form("hopper", AttentionConfig, attention_hopper_ranked, emit_attention_hopper),
    Form("decode", DecodeConfig, attention_decode_ranked, emit_attention_decode),
    Form("mma", AttentionMmaConfig, attention_mma_ranked, emit_attention_mma),
)


def attention_ranked(attention: Attention, hw: HardwareProfile, policy: Policy) -> Ranked:
    """Predicted seconds and configurations of all forms, the fastest first.

    Raises
    ------
    Unsupported
        No form takes the attention; the message has each one's reason.
    """
    lists, reasons = [], []
    for form in FORMS:
        try:
            lists.append(form.rank(attention, hw, policy))
        except Unsupported as why:
            reasons.append(f"{form.name}: {why}")
    ranked = list(heapq.merge(*lists, key=lambda entry: entry[0]))
    if not ranked:
        raise Unsupported("; ".join(reasons))
    return ranked


def emit_attention(
    attention: Attention, hw: HardwareProfile, policy: Policy, config: Any = None
) -> tirx.PrimFunc:
    """Write an attention as one TIRx kernel.

    Parameters
    ----------
    attention : Attention
    hw : HardwareProfile
        A CUDA device.
    policy : Policy
    config : optional
        One of `attention_ranked`; where None, the first that can be written.

    Raises
    ------
    Unsupported
        The configuration, or no configuration at all, can be written.
    """
    if config is not None:
        return _form_of(config).emit(attention, hw, config)
    reasons = {}
    for _, choice in attention_ranked(attention, hw, policy):
        form = _form_of(choice)
        try:
            return form.emit(attention, hw, choice)
        except Unsupported as why:
            reasons[form.name] = f"{form.name}: {why}"
    raise Unsupported("; ".join(reasons.values()))


def _form_of(config: Any) -> Form:
    """The form that a configuration belongs to."""
    for form in FORMS:
        if type(config) is form.config:
            return form
    raise Unsupported(f"{type(config).__name__} is no configuration of an attention")
