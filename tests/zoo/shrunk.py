"""Small configurations of transformers by a rule, and inputs that fit them.

A field gets the number that `SIZES` has for its name, where it is a number; of a list as many small
numbers as it has entries, rising where they are widths. Configurations within (of a text part, of
a vision part) are shrunk likewise. What the rule breaks for an architecture is said in its line of
the table (`transformers_models.TABLE`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

HIDDEN, HEADS, LAYERS, TOKENS, WORDS, IMAGE, PATCH = 32, 2, 2, 12, 99, 32, 8
BATCH = 2

_NAMES = (
    (
        HIDDEN,
        "hidden_size d_model n_embd embed_dim embedding_size dim projection_dim "
        "encoder_hidden_size decoder_hidden_size word_embed_proj_dim emb_dim conv_channels "
        "attention_hidden_size q_lora_rank kv_lora_rank lru_width intermediate_dim "
        "codevector_dim proj_codevector_dim hidden_dim",
    ),
    (
        2 * HIDDEN,
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner d_ff ffn_hidden_size "
        "dim_feedforward moe_intermediate_size shared_expert_intermediate_size d_inner "
        "visual_feat_dim",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
        "num_key_value_heads num_kv_heads num_experts_per_tok",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
        "num_encoder_layers num_decoder_layers l_layers x_layers r_layers",
    ),
    (4, "num_experts num_local_experts n_routed_experts num_queries num_frames"),
    (
        HIDDEN // HEADS,
        "head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim state_size num_mel_bins "
        "input_feat_per_channel coordinate_size shape_size",
    ),
    (
        4 * TOKENS,
        "max_position_embeddings n_positions max_source_positions max_target_positions "
        "max_length max_2d_position_embeddings",
    ),
    (WORDS, "vocab_size"),
    (IMAGE, "image_size img_size input_size"),
    (PATCH, "patch_size"),
)
SIZES = {name: size for size, names in _NAMES for name in names.split()}
DEPTHS = ("depths", "layer_depths", "num_blocks")
WIDTHS = ("hidden_sizes", "embed_dims", "embed_dim", "conv_dim")
HEAD_COUNTS = ("num_attention_heads", "num_heads")
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def shrunk(config: type, given: Mapping[str, Any]) -> Any:
    """A small configuration of a class of transformers; `given` fields have the values given."""
    return config(**_fields(config, given))


def _fields(
    config: type, given: Mapping[str, Any], preset: Mapping[str, Any] | None = None
) -> dict:
    """What a configuration is made with; `preset` are defaults of it as a part of another one."""
    fields = dict(preset or {})
    for field in dataclasses.fields(config):
        value = _small(field.name, fields.get(field.name, field.default))
        if value is not None:
            fields[field.name] = value
    parts = config.sub_configs_defaults
    for name, part in parts.items():
        of_any_kind = not issubclass(part.config_class, PreTrainedConfig)
        kind = part.get_config_class(part.model_type) if of_any_kind else part.config_class
        fields[name] = _fields(kind, given.get(name, {}), part.init_kwargs)
        if of_any_kind:
            fields[name]["model_type"] = part.model_type
    return fields | {name: value for name, value in given.items() if name not in parts}


def _small(name: str, default: Any) -> Any:
    """The value of a field by its name; None where it stays as it is."""
    if isinstance(default, list | tuple):
        if name in DEPTHS:
            return [1] * len(default)
        if name in WIDTHS:
            return [16 * (n + 1) for n in range(len(default))]
        if name in HEAD_COUNTS:
            return [HEADS] * len(default)
    if name == "use_cache":
        return False
    if name in TOKEN_IDS:
        return TOKEN_IDS[name] if isinstance(default, int) else None
    if isinstance(default, int) and not isinstance(default, bool) and name in SIZES:
        return min(default, SIZES[name])
    return None


def inputs(names: Iterable[str], config: Any, image_tokens: int = 0) -> dict[str, torch.Tensor]:
    """Tensors for the parameters of a forward, of those whose names are known here; each text
    begins with so many places for parts of its image.
    """
    draw = torch.Generator().manual_seed(0)
    text, vision, audio = (
        getattr(config, f"{part}_config", config) for part in ("text", "vision", "audio")
    )
    size = getattr(vision, "image_size", IMAGE)
    height, width = size if isinstance(size, list | tuple) else (size, size)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn((BATCH, *shape), generator=draw)

    def words() -> torch.Tensor:
        last = getattr(text, "vocab_size", WORDS)
        found = torch.randint(3, last, (BATCH, image_tokens + TOKENS), generator=draw)
        if image_tokens:
            found[:, :image_tokens] = config.image_token_id
        return found

    def counted_words() -> torch.Tensor:
        """The last words of the second text are padding."""
        counted = torch.ones((BATCH, image_tokens + TOKENS), dtype=torch.int64)
        counted[1, -3:] = 0
        return counted

    def boxes() -> torch.Tensor:
        corners = torch.randint(0, 24, (BATCH, TOKENS, 2), generator=draw)
        return torch.cat([corners, corners + 5], -1)

    def images() -> torch.Tensor:
        frames = getattr(config, "num_frames", None)
        image = (getattr(vision, "num_channels", 3), height, width)
        return normal(*image) if frames is None else normal(frames, *image)

    def sounds() -> torch.Tensor:
        """Samples, or the bins of a spectrogram."""
        bins = getattr(config, "num_mel_bins", None)
        return normal(800) if bins is None else normal(config.max_length, bins)

    def features() -> torch.Tensor:
        if hasattr(audio, "input_feat_per_channel"):
            return normal(4 * TOKENS, audio.input_feat_per_channel)
        return normal(audio.num_mel_bins, 2 * audio.max_source_positions)

    makers = {
        "input_ids": words,
        "attention_mask": counted_words,
        "decoder_input_ids": words,
        "bbox": boxes,
        "pixel_values": images,
        "input_values": sounds,
        "input_features": features,
        "past_values": lambda: normal(config.context_length, config.num_input_channels),
        "visual_feats": lambda: normal(5, config.visual_feat_dim),
        "visual_pos": lambda: normal(5, config.visual_pos_dim),
    }
    known = [name for name in names if name in makers]
    if "input_ids" not in known and "attention_mask" in known:
        known.remove("attention_mask")
    return {name: makers[name]() for name in known}
