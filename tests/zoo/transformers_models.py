"""Architectures of transformers, one a line: its name in transformers' registries, what is taken of
it, and the fields that the rule of `shrunk` does not get right.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .shrunk import BATCH, TOKENS, inputs, shrunk

BASE, CAUSAL, SEQ2SEQ = "base", "causal", "seq2seq"

TABLE: dict[str, tuple[str, dict[str, Any]]] = {
    # encoders
    "albert": (BASE, {}),
    "bert": (BASE, {}),
    "big_bird": (BASE, {}),
    "canine": (BASE, {}),
    "convbert": (BASE, {}),
    "deberta-v2": (BASE, {}),
    "fnet": (BASE, {}),
    "funnel": (BASE, {"block_sizes": [1, 1], "num_decoder_layers": 1}),
    "modernbert": (BASE, {}),
    "mpnet": (BASE, {}),
    "roformer": (BASE, {}),
    # decoders
    "bloom": (CAUSAL, {}),
    "deepseek_v3": (CAUSAL, {}),
    "falcon": (CAUSAL, {}),
    "gemma2": (CAUSAL, {}),
    "gemma3_text": (CAUSAL, {}),
    "gpt2": (CAUSAL, {}),
    "gpt_neox": (CAUSAL, {}),
    "gpt_oss": (CAUSAL, {}),
    "gptj": (CAUSAL, {"rotary_dim": 8}),
    "llama": (CAUSAL, {}),
    "mixtral": (CAUSAL, {}),
    "mpt": (CAUSAL, {}),
    "qwen2_moe": (CAUSAL, {}),
    "qwen3": (CAUSAL, {}),
    "xlnet": (CAUSAL, {}),
    # state spaces and recurrences, alone and beside attention
    "falcon_mamba": (CAUSAL, {}),
    "jamba": (CAUSAL, {}),
    "lfm2": (CAUSAL, {}),
    "mamba": (CAUSAL, {}),
    "mamba2": (CAUSAL, {"num_heads": 4, "n_groups": 2, "chunk_size": 8}),
    "recurrent_gemma": (CAUSAL, {}),
    "rwkv": (CAUSAL, {"context_length": 48}),
    # encoders and decoders
    "bart": (SEQ2SEQ, {}),
    "m2m_100": (SEQ2SEQ, {}),
    "prophetnet": (SEQ2SEQ, {}),
    "switch_transformers": (SEQ2SEQ, {}),
    "t5": (SEQ2SEQ, {}),
    # images
    "beit": (BASE, {}),
    "convnextv2": (BASE, {}),
    "detr": (BASE, {}),
    "dinov2": (BASE, {}),
    "focalnet": (BASE, {"embed_dim": 16}),
    "mobilevit": (BASE, {}),
    "resnet": (BASE, {}),
    "segformer": (BASE, {}),
    "swinv2": (BASE, {"embed_dim": 16}),
    "videomae": (BASE, {}),
    "vit": (BASE, {}),
    # sounds and series
    "audio-spectrogram-transformer": (BASE, {}),
    "patchtst": (BASE, {"num_input_channels": 3}),
    "speech_to_text": (SEQ2SEQ, {}),
    "wav2vec2": (BASE, {}),
    "wavlm": (BASE, {}),
    "whisper": (SEQ2SEQ, {}),
    # of several kinds
    "blip": (BASE, {}),
    "clip": (BASE, {}),
    "llava": (BASE, {"image_token_index": 3}),
    "layoutlmv3": (BASE, {"coordinate_size": 4, "shape_size": 8}),
    "lxmert": (BASE, {}),
}


REGISTRIES = {
    BASE: auto.MODEL_MAPPING_NAMES,
    CAUSAL: auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    SEQ2SEQ: auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    | auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
}
IMAGE_TOKENS = {"llava": 16}  # parts of an image that stand in a text

WAYS = (
    "gpt2/whole",
    "llama/whole",
    "gemma3_text/whole",
    "llama/step",
    "falcon/step",
    "llama/in_place",
)

Built = tuple[torch.nn.Module, dict[str, torch.Tensor]]


# ---- decoding: some tokens, then one more with what was kept of them


class Whole(torch.nn.Module):
    """A text, and a token after it: both in one call, what is kept of the first beside it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, next_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = self.model(input_ids=input_ids, use_cache=True)
        kept = first.past_key_values
        return first.logits, self.model(next_ids, cache=kept, use_cache=True).logits


class Step(torch.nn.Module):
    """A token after others of which keys and values are given; those of all are returned."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, next_ids: torch.Tensor, *kept: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache = transformers.DynamicCache(list(zip(kept[::2], kept[1::2], strict=True)))
        logits = self.model(next_ids, cache=cache, use_cache=True).logits
        pairs = ((layer.keys, layer.values) for layer in cache.layers)
        return logits, *(tensor for pair in pairs for tensor in pair)


class InPlace(torch.nn.Module):
    """A token after others, whose keys and values stand in buffers of the module: written there."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        model.generation_config.use_cache = True
        model.generation_config.cache_implementation = "static"
        self.step = TorchExportableModuleWithStaticCache(model, BATCH, 2 * TOKENS)

    def forward(self, next_ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        for n, layer in enumerate(self.step.static_cache.layers):
            layer.keys = self.step.get_buffer(f"key_cache_{n}")
            layer.values = self.step.get_buffer(f"value_cache_{n}")
            layer.cumulative_length = self.step.get_buffer(f"cumulative_length_{n}")
        return self.step(input_ids=next_ids, cache_position=position)


def _whole(model: torch.nn.Module) -> Built:
    given = inputs(("input_ids",), model.config)
    return Whole(model), {**given, "next_ids": given["input_ids"][:, -1:] + 1}


def _step(model: torch.nn.Module) -> Built:
    """With what an eager call keeps."""
    given = inputs(("input_ids",), model.config)["input_ids"]
    with torch.no_grad():
        kept = model.eval()(given, use_cache=True).past_key_values
    pairs = [(layer.keys, layer.values) for layer in kept.layers]
    return Step(model), (given[:, -1:] + 1, *(tensor for pair in pairs for tensor in pair))


def _in_place(model: torch.nn.Module) -> Built:
    return InPlace(model), {"next_ids": torch.full((BATCH, 1), 5), "position": torch.tensor([3])}


DECODING = {"whole": _whole, "step": _step, "in_place": _in_place}


def build(name: str) -> Built:
    """A small model of an architecture and inputs for it, in the order of its forward;
    "NAME/WAY" for one of `DECODING`.
    """
    name, _, way = name.partition("/")
    head, given = TABLE[name]
    config = shrunk(CONFIG_MAPPING[name], given)
    names = REGISTRIES[head][name]  # several, the most usual one first
    model = getattr(transformers, names if isinstance(names, str) else names[0])(config)
    if way:
        return DECODING[way](model)
    names = inspect.signature(model.forward).parameters
    return model, inputs(names, config, IMAGE_TOKENS.get(name, 0))
