"""Models in real sizes with random weights: those of transformers and timm, and a diffusion block.

A language model is two cases: a text of 512 tokens (`_prefill`), and one token behind it
(`_decode`), both with a static cache that is written in place. Llama 3 8B decodes the last token
that its cache holds, of one text and of 16. `tiny` keeps the architecture with two layers of little
width.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..workloads.conv import channels_last, settle
from ..workloads.vision import UNetBlock

TEXT, CACHE = 512, 1024  # tokens
TINY_TEXT, TINY_CACHE = 12, 32
LONG_CACHE, BATCH = 2048, 16
IMAGES, IMAGE = 8, 224
TEXTS, WORDS = 8, 128
SAMPLES = 5 * 16000  # five seconds of sound

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Where:
    """Where a model lies, its type, and whether it is a small one."""

    device: str
    dtype: torch.dtype
    tiny: bool

    def of(self, full: Any, tiny: Any) -> Any:
        """What of the two is asked for."""
        return tiny if self.tiny else full

    def normal(self, *shape: int) -> torch.Tensor:
        """Normal values."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def tokens(self, count: int, length: int, words: int) -> torch.Tensor:
        """Texts."""
        return torch.randint(3, words, (count, length), device=self.device)


@dataclass(frozen=True, slots=True)
class Case:
    """A model and how it is called.

    Attributes
    ----------
    make : callable
        Takes a `Where`; returns the module in evaluation mode, and its inputs.
    convolutional : bool
        Whether most of the time goes into convolutions.
    large : bool
        Whether a device may have no room for an exact copy of it.
    """

    make: Callable[[Where], Made]
    convolutional: bool = False
    large: bool = False


class WithCache(nn.Module):
    """A language model with a static cache: tokens behind a position to the scores of the next."""

    def __init__(self, model: nn.Module, length: int) -> None:
        super().__init__()
        from transformers import StaticCache

        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        known = inspect.signature(model.forward).parameters
        self._argument = "cache" if "cache" in known else "past_key_values"  # of older releases

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Apply it to [1, tokens] and [], the number of tokens in the cache before these."""
        for layer in self.cache.layers:
            layer.cumulative_length.copy_(position)
        return self.step(tokens)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """The scores of the word behind tokens that follow those in the cache."""
        given = {self._argument: self.cache, "use_cache": True, "logits_to_keep": 1}
        return self.model(tokens, **given).logits


class First(nn.Module):
    """The first of a model's results."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Apply it."""
        return self.model(*inputs, return_dict=False)[0]


def exact(module: nn.Module, dtype: torch.dtype, large: bool = False) -> nn.Module:
    """A copy that computes in `dtype`, with the same numbers; of a `large` one the parameters of a
    layer are converted while it computes.
    """
    if large:
        made = copy.deepcopy(module, {id(x): x for x in module.parameters()})
        for part in made.modules():
            _converted_while_it_computes(part, dtype)
    else:
        made = copy.deepcopy(module).to(dtype)
    if isinstance(made, WithCache):
        for layer in made.cache.layers:
            layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
    return made


def _converted_while_it_computes(module: nn.Module, dtype: torch.dtype) -> None:
    own = dict(module.named_parameters(recurse=False))

    def convert(module: nn.Module, _: object) -> None:
        module._parameters.update((name, x.to(dtype)) for name, x in own.items())

    def restore(module: nn.Module, *_: object) -> None:
        module._parameters.update(own)

    if own:
        module.register_forward_pre_hook(convert)
        module.register_forward_hook(restore)


# ---- texts


def _of_transformers(name: str, where: Where, config: str, full: dict, tiny: dict) -> nn.Module:
    import transformers

    fields = getattr(transformers, config)(**where.of(full, full | tiny))
    with torch.device(where.device):
        model = getattr(transformers, name)._from_config(fields, dtype=where.dtype)
    return model.eval().requires_grad_(False)


def _language(name: str, fields: dict, tiny: dict, is_decode: bool, where: Where) -> Made:
    config = name.replace("ForCausalLM", "Config").replace("LMHeadModel", "Config")
    model = _of_transformers(name, where, config, fields, tiny)
    text, cache = where.of((TEXT, CACHE), (TINY_TEXT, TINY_CACHE))
    module = WithCache(model, cache)
    words = model.config.vocab_size
    tokens, start = where.tokens(1, text, words), torch.zeros((), dtype=torch.int64)
    start = start.to(where.device)
    with torch.no_grad():
        module.step(tokens)  # makes the cache as keys and values are, and fills it
    if not is_decode:
        return module, (tokens, start)
    return module, (where.tokens(1, 1, words), start + text)


def _last_token(name: str, fields: dict, tiny: dict, batch: int, where: Where) -> Made:
    config = name.replace("ForCausalLM", "Config")
    model = _of_transformers(name, where, config, fields, tiny)
    batch, length = where.of((batch, LONG_CACHE), (min(batch, 2), TINY_CACHE))
    module, words = WithCache(model, length), model.config.vocab_size
    with torch.no_grad():
        module.step(where.tokens(batch, length - 1, words))
    position = torch.full((), length - 1, dtype=torch.int64, device=where.device)
    return module, (where.tokens(batch, 1, words), position)


def _languages(**models: tuple[str, dict, dict]) -> dict[str, Case]:
    return {
        f"{key}_{'decode' if is_decode else 'prefill'}": Case(partial(_language, *of, is_decode))
        for key, of in models.items()
        for is_decode in (False, True)
    }


def _encoder(name: str, config: str, fields: dict, tiny: dict, where: Where) -> Made:
    model = _of_transformers(name, where, config, fields, tiny)
    count, length = where.of((TEXTS, WORDS), (2, TINY_TEXT))
    return First(model), (where.tokens(count, length, model.config.vocab_size),)


_NARROW = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 99}
_THIN = {**_NARROW, "intermediate_size": 96}
_GROUPED = {**_THIN, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
_LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rope_theta": 5e5,
}
_QWEN3_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
# Gemma 2 of 2B. No text here is longer than its window of 4096 tokens, so that all layers see the
# whole text; only "eager" caps the scores of attention.
_GEMMA2_2B = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 256000,
    "layer_types": ["full_attention"] * 26,
    "attn_implementation": "eager",
}
_T5_BASE = {
    "d_model": 768,
    "d_kv": 64,
    "d_ff": 3072,
    "num_layers": 12,
    "num_heads": 12,
    "vocab_size": 32128,
}


# ---- images, sounds


def _timm(name: str, tiny: dict, size: int, where: Where) -> Made:
    import timm

    with torch.device(where.device):
        model = timm.create_model(name, **where.of({}, {"num_classes": 10, **tiny}))
        settle(model)
    images = where.normal(*where.of((IMAGES, 3, IMAGE, IMAGE), (2, 3, size, size)))
    model = model.to(where.dtype).eval().requires_grad_(False)
    return model.to(memory_format=torch.channels_last), (channels_last(images),)


def _wav2vec2(where: Where) -> Made:
    tiny = {**_THIN, "conv_dim": [32] * 7, "num_conv_pos_embeddings": 16}
    tiny |= {"num_conv_pos_embedding_groups": 4, "feat_extract_norm": "group"}
    model = _of_transformers("Wav2Vec2Model", where, "Wav2Vec2Config", {}, tiny)
    return First(model), (where.normal(1, where.of(SAMPLES, 2000)),)


def _unet_block(where: Where) -> Made:
    channels, embedding, heads, side, groups = where.of((640, 1280, 10, 64, 32), (32, 16, 2, 8, 4))
    with torch.device(where.device):
        module = UNetBlock(channels, embedding, heads, groups).to(where.dtype)
    images = channels_last(where.normal(2, channels, side, side))
    module = module.eval().requires_grad_(False).to(memory_format=torch.channels_last)
    return module, (images, where.normal(2, embedding))


_GPT2_TINY = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 99, "n_positions": 64}
_BERT_TINY = {**_THIN, "max_position_embeddings": 64}
_FLAT = {"depth": 2, "embed_dim": 64, "num_heads": 2, "img_size": 32}
_SWIN_TINY = {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 4), "img_size": 56}
_RESNET_TINY = {"layers": (1, 1, 1, 1), "channels": (16, 16, 32, 32)}

CASES: dict[str, Case] = {
    **_languages(
        gpt2=("GPT2LMHeadModel", {}, _GPT2_TINY),
        llama_1b=("LlamaForCausalLM", _LLAMA_1B, _GROUPED),
        qwen3_06b=("Qwen3ForCausalLM", _QWEN3_06B, _GROUPED),
        gemma2_2b=(
            "Gemma2ForCausalLM",
            _GEMMA2_2B,
            {**_GROUPED, "layer_types": ["full_attention"] * 2},
        ),
    ),
    **{
        name: Case(partial(_last_token, "LlamaForCausalLM", _LLAMA_8B, _GROUPED, n), large=True)
        for name, n in {"llama_8b_decode": 1, "llama_8b_decode_16": BATCH}.items()
    },
    "bert_base": Case(partial(_encoder, "BertModel", "BertConfig", {}, _BERT_TINY)),
    "t5_base_encoder": Case(
        partial(
            _encoder,
            "T5EncoderModel",
            "T5Config",
            _T5_BASE,
            {"d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_heads": 2},
        )
    ),
    "modernbert_base": Case(
        partial(_encoder, "ModernBertModel", "ModernBertConfig", {}, {**_THIN, "pad_token_id": 0})
    ),
    "vit_b16": Case(partial(_timm, "vit_base_patch16_224", _FLAT, 32)),
    "swin_t": Case(partial(_timm, "swin_tiny_patch4_window7_224", _SWIN_TINY, 56)),
    "resnet50": Case(partial(_timm, "resnet50", _RESNET_TINY, 32), convolutional=True),
    "wav2vec2_base": Case(_wav2vec2),
    "unet_block": Case(_unet_block, convolutional=True),
}


def make(name: str, where: Where) -> Made:
    """A case of this name; equal arguments give equal numbers."""
    torch.manual_seed(0)
    return CASES[name].make(where)
