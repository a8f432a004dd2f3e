"""The forms of an attention kernel, and all their configurations in the order of predicted time.

A form ranks its own configurations, in seconds of one launch, and writes a kernel from one of them;
lists of several forms are merged by those seconds.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from ...config import HardwareProfile, Policy
from ..forms import Form, Ranked, emitted, ranked
from .decode.kernel import DecodeConfig, attention_decode_ranked, emit_attention_decode
from .hopper.config import AttentionConfig
from .hopper.kernel import attention_hopper_ranked, emit_attention_hopper
from .mma.kernel import AttentionMmaConfig, attention_mma_ranked, emit_attention_mma
from .read.model import Attention

FORMS = (
    Form("an attention", "hopper", AttentionConfig, attention_hopper_ranked, emit_attention_hopper),
    Form("an attention", "decode", DecodeConfig, attention_decode_ranked, emit_attention_decode),
    Form("an attention", "mma", AttentionMmaConfig, attention_mma_ranked, emit_attention_mma),
)


def attention_ranked(attention: Attention, hw: HardwareProfile, policy: Policy) -> Ranked:
    """Predicted seconds and configurations of all forms, the fastest first (see `forms.ranked`)."""
    return ranked(FORMS, attention, hw, policy)


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
    return emitted(FORMS, attention, hw, policy, config)
