"""Layers of models of `transformers` with random weights: Llama 3 8B, BERT large, ViT B/16.

Llama's layer takes its rotary tables from buffers, as a model computes them once for all layers.
Decoding writes one position into caches that are inputs, and attends to all positions up to it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tvm_fusion.errors import InputError

from .instance import Made, Sizes, Workload

CONTEXT = 2048
LLAMA_WIDTH, ROPE_THETA, RMS_EPSILON = 128, 500000.0, 1e-5  # of Llama 3; of a head
ENCODER_WIDTH, ENCODER_EPSILON = 64, 1e-12  # of BERT and ViT: heads, and norms
GROUPED = "tvm_fusion_grouped"  # the name of `grouped_attention` among those of transformers


class Layer(nn.Module):
    """A layer of an encoder, on [batch, length, width]."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        return first(self.layer(x))


class LlamaLayer(nn.Module):
    """A decoder layer of Llama on the first tokens of a text."""

    def __init__(self, config: Any, length: int) -> None:
        super().__init__()
        from transformers.models.llama import modeling_llama

        self.layer = modeling_llama.LlamaDecoderLayer(config, 0)
        rotary = modeling_llama.LlamaRotaryEmbedding(config)
        tables = rotary(torch.zeros(1), torch.arange(length)[None])
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, table.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to [batch, length, width]."""
        return first(self.layer(x, position_embeddings=(self.cos, self.sin)))


class LlamaStep(LlamaLayer):
    """A decoder layer of Llama on one token of each text, with caches of fixed size."""

    def forward(
        self, x: torch.Tensor, position: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Apply the layer to [batch, 1, width] and write to the caches.

        The caches are [batch, key heads, context, head width], the position is an int64 [1].
        """
        numbers = torch.arange(keys.shape[2], device=keys.device)
        tables = tuple(table.index_select(1, position) for table in (self.cos, self.sin))
        result = self.layer(
            x,
            attention_mask=(numbers <= position)[None, None, None],
            past_key_values=Caches(position, keys, values),
            position_embeddings=tables,
        )
        return first(result)


class Caches:
    """What `transformers` asks of caches, for one layer."""

    def __init__(self, position: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.position, self.keys, self.values = position, keys, values

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_args: Any, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values, and return all."""
        self.keys.index_copy_(2, self.position, keys)
        self.values.index_copy_(2, self.position, values)
        return self.keys, self.values


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_options: Any,
) -> tuple[torch.Tensor, None]:
    """The library's attention for one query a text: the heads of a group are rows of one product,
    so that no key is copied (`transformers` repeats the caches for the heads when it is traced).
    """
    batch, heads, _, width = query.shape
    rows = query.reshape(batch, key.shape[1], heads // key.shape[1], width)
    mixed = F.scaled_dot_product_attention(
        rows, key, value, attn_mask=attention_mask, scale=scaling
    )
    return mixed.reshape(batch, 1, heads, width), None


def first(result: Any) -> torch.Tensor:
    """The hidden states among what a layer returns."""
    return result[0] if isinstance(result, tuple) else result


def llama_config(sizes: Sizes, attention: str = "sdpa") -> Any:
    """Llama 3 8B; reduced, with fewer heads of the same width."""
    transformers = library()
    key_heads = sizes.count(8, 1)
    return transformers.LlamaConfig(
        hidden_size=sizes.multiple(4096, 4 * LLAMA_WIDTH),
        num_attention_heads=4 * key_heads,
        num_key_value_heads=key_heads,
        head_dim=LLAMA_WIDTH,
        intermediate_size=sizes.extent(14336),
        num_hidden_layers=1,
        vocab_size=64,
        max_position_embeddings=8192,
        rms_norm_eps=RMS_EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        attn_implementation=attention,
    )


def library() -> Any:
    """The package transformers."""
    try:
        import transformers
    except ImportError as error:
        raise InputError("these workloads need transformers: pip install transformers") from error
    return transformers


def _prefill(batch: int, length: int) -> Callable[[Sizes], Made]:
    def make(sizes: Sizes) -> Made:
        config = llama_config(sizes)
        rows = sizes.extent(length)
        x = sizes.normal(sizes.count(batch, 1), rows, config.hidden_size)
        return LlamaLayer(config, rows), (x,)

    return make


def decode_step(batch: int) -> Callable[[Sizes], Made]:
    """A layer of Llama on the next token of some texts."""

    def make(sizes: Sizes) -> Made:
        library().AttentionInterface.register(GROUPED, grouped_attention)
        config = llama_config(sizes, GROUPED)
        batch_now, context = sizes.count(batch, 1), sizes.extent(CONTEXT)
        cache = (batch_now, config.num_key_value_heads, context, config.head_dim)
        inputs = (
            sizes.normal(batch_now, 1, config.hidden_size),
            torch.tensor([context - 1], device=sizes.device),
            sizes.normal(*cache),
            sizes.normal(*cache),
        )
        return LlamaStep(config, context), inputs

    return make


def _bert(sizes: Sizes) -> Made:
    heads = sizes.count(16)
    config = library().BertConfig(
        hidden_size=ENCODER_WIDTH * heads,
        num_attention_heads=heads,
        intermediate_size=sizes.extent(4096),
        num_hidden_layers=1,
        vocab_size=64,
        attn_implementation="sdpa",
    )
    from transformers.models.bert.modeling_bert import BertLayer

    x = sizes.normal(sizes.count(16), sizes.extent(512), config.hidden_size)
    return Layer(BertLayer(config)), (x,)


def _vit(sizes: Sizes) -> Made:
    heads = sizes.count(12)
    config = library().ViTConfig(
        hidden_size=ENCODER_WIDTH * heads,
        num_attention_heads=heads,
        intermediate_size=sizes.extent(3072),
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    from transformers.models.vit.modeling_vit import ViTLayer

    x = sizes.normal(sizes.count(32), sizes.extent(197), config.hidden_size)
    return Layer(ViTLayer(config)), (x,)


def _layer(make: Callable[[Sizes], Made]) -> Workload:
    return Workload(make, "float16", wall=True)


TRANSFORMERS: dict[str, Workload] = {
    "llama_prefill_1x2048": _layer(_prefill(1, 2048)),
    "llama_prefill_8x512": _layer(_prefill(8, 512)),
    "llama_decode_1": _layer(decode_step(1)),
    "llama_decode_16": _layer(decode_step(16)),
    "bert_large_16x512": _layer(_bert),
    "vit_base_32x197": _layer(_vit),
}
