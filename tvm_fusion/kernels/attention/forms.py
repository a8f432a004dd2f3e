"""The forms of an attention kernel on GPUs."""

from __future__ import annotations

from ..forms import Form, Writer
from .decode.kernel import DecodeConfig, attention_decode_ranked, emit_attention_decode
from .hopper.config import AttentionConfig
from .hopper.kernel import attention_hopper_ranked, emit_attention_hopper
from .mma.kernel import AttentionMmaConfig, attention_mma_ranked, emit_attention_mma
from .read.program import analyze_attention
from .versions import with_keyless, write_attention_versions

WRITER = Writer(
    "an attention",
    analyze_attention,
    (
        Form("hopper", AttentionConfig, attention_hopper_ranked, emit_attention_hopper),
        Form("decode", DecodeConfig, attention_decode_ranked, emit_attention_decode),
        Form("mma", AttentionMmaConfig, attention_mma_ranked, emit_attention_mma),
    ),
    write_attention_versions,
    with_keyless,
)
