"""Whole models on a CPU: small configurations of `transformers` with random weights, one input.

Of language models the hidden states or, where there is a head, its scores of all tokens are the
output.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .conv import settle
from .instance import Made, Sizes, Workload
from .transformers import library
from .vision import calm, convnext_t, mobilenet_v3

WORDS = 5000


class Model(nn.Module):
    """A model as a function of one tensor to one tensor."""

    def __init__(self, model: nn.Module, output: str) -> None:
        super().__init__()
        self.model, self.output = model, output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        return getattr(self.model(x), self.output)


def _text(make: Callable[[Any, Sizes], nn.Module], tokens: int) -> Workload:
    def made(sizes: Sizes) -> Made:
        return make(library(), sizes), (torch.randint(0, WORDS, (1, sizes.extent(tokens))),)

    return Workload(made)


def _bert(transformers: Any, sizes: Sizes) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=sizes.multiple(256, 4),
        num_hidden_layers=sizes.count(4, 1),
        num_attention_heads=4,
        intermediate_size=sizes.extent(1024),
        max_position_embeddings=128,
    )
    return Model(transformers.BertModel(config, add_pooling_layer=False), "last_hidden_state")


def _gpt2(transformers: Any, sizes: Sizes) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_embd=sizes.multiple(384, 6),
        n_layer=sizes.count(4, 1),
        n_head=6,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return Model(transformers.GPT2LMHeadModel(config), "logits")


def _llama(transformers: Any, sizes: Sizes) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=sizes.multiple(256, 16),
        num_hidden_layers=sizes.count(4, 1),
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=sizes.extent(688),
        max_position_embeddings=128,
        use_cache=False,
    )
    return Model(transformers.LlamaModel(config), "last_hidden_state")


def _vit(sizes: Sizes) -> Made:
    transformers = library()
    config = transformers.ViTConfig(
        hidden_size=sizes.multiple(192, 3),
        num_hidden_layers=sizes.count(4, 1),
        num_attention_heads=3,
        intermediate_size=sizes.extent(768),
        image_size=sizes.multiple(224, 16),
    )
    model = transformers.ViTModel(config, add_pooling_layer=False)
    side = config.image_size
    return Model(model, "last_hidden_state"), (sizes.normal(1, 3, side, side),)


def _resnet18(sizes: Sizes) -> Made:
    transformers = library()
    widths = [sizes.extent(width) for width in (64, 128, 256, 512)]
    config = transformers.ResNetConfig(
        embedding_size=widths[0],
        hidden_sizes=widths,
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=1000,
    )
    side = sizes.multiple(224, 32)
    model = transformers.ResNetForImageClassification(config)
    return Model(model, "logits"), (sizes.normal(1, 3, side, side),)


def _network(make: Callable[[], nn.Module]) -> Workload:
    """A network of the suite of convolutional networks, on one contiguous image."""

    def made(sizes: Sizes) -> Made:
        side = sizes.multiple(224, 32)
        return calm(settle(make())), (sizes.normal(1, 3, side, side),)

    return Workload(made)


CPU_MODELS: dict[str, Workload] = {
    "bert_4x256_128": _text(_bert, 128),
    "gpt2_4x384_64": _text(_gpt2, 64),
    "llama_4x256_128": _text(_llama, 128),
    "vit_4x192": Workload(_vit),
    "resnet18": Workload(_resnet18),
    "mobilenet_v3_large": _network(mobilenet_v3),
    "convnext_t": _network(convnext_t),
}
