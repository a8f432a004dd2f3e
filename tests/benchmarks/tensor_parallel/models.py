"""Layers of Llama, cut for several processes as torch does."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..real_models.models import Where
from ..workloads.transformers import GROUPED, Caches, first, grouped_attention, library

CONTEXT, TINY_CONTEXT = 2048, 16  # tokens of a text, and of a cache
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj")
COLUMNS += ("mlp.up_proj",)
ROWS = ("self_attn.o_proj", "mlp.down_proj")
LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}


@dataclass(frozen=True, slots=True)
class Case:
    """Layers and what they are called with.

    Attributes
    ----------
    fields : dict
        Of `LlamaConfig`.
    layers : int
    texts : int
    is_decode : bool
        One token of each text, at the end of a cache; else all tokens of it.
    is_sharded : bool
        The weights of each layer lie in parts and are gathered for a call (`fully_shard`), and
        processes have texts of their own; else processes compute parts of each layer.
    """

    fields: dict[str, int]
    layers: int = 4
    texts: int = 1
    is_decode: bool = False
    is_sharded: bool = False


CASES = {
    "llama_8b_prefill": Case(LLAMA_8B),
    "llama_8b_decode_1": Case(LLAMA_8B, is_decode=True),
    "llama_8b_decode_16": Case(LLAMA_8B, texts=16, is_decode=True),
    "llama_70b_prefill": Case(LLAMA_70B),
    "llama_70b_decode_1": Case(LLAMA_70B, is_decode=True),
    "llama_70b_decode_16": Case(LLAMA_70B, texts=16, is_decode=True),
    "llama_1b_decode_16": Case(LLAMA_1B, 2, 16, is_decode=True),  # what a CPU has time for
    "fsdp_8b_prefill": Case(LLAMA_8B, layers=36, is_sharded=True),  # 7.9e9 parameters
}


class Text(nn.Module):
    """Layers on the first tokens of texts."""

    def __init__(self, config: Any, length: int) -> None:
        super().__init__()
        from transformers.models.llama import modeling_llama

        numbers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(modeling_llama.LlamaDecoderLayer(config, n) for n in numbers)
        tables = modeling_llama.LlamaRotaryEmbedding(config)(
            torch.zeros(1), torch.arange(length)[None]
        )
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, table.clone())

    def forward(self, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        """Apply all layers to [texts, tokens, width]."""
        around = self.around(*given)
        for number, layer in enumerate(self.layers):
            x = self.apply_layer(layer, number, x, around)
        return x

    def exact(self, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        """The same in float32, with a copy of one layer at a time."""
        x = x.float()
        around = [v.float() if v.is_floating_point() else v for v in self.around(*given)]
        for number, layer in enumerate(self.layers):
            x = self.apply_layer(copy.deepcopy(layer).float(), number, x, around)
        return x

    def around(self) -> Sequence[torch.Tensor]:
        """What all layers take."""
        return self.cos, self.sin

    def apply_layer(
        self, layer: nn.Module, number: int, x: torch.Tensor, around: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Apply one layer."""
        return first(layer(x, position_embeddings=tuple(around)))

    def keep(self, rank: int, ranks: int) -> None:
        """Leave what other processes compute to them."""


class Step(Text):
    """Layers on one token of each text, with caches of fixed size."""

    def __init__(self, config: Any, length: int, texts: int) -> None:
        super().__init__(config, length)
        shape = texts, config.num_key_value_heads, length, config.head_dim
        for name in self.names():
            self.register_buffer(name, torch.randn(shape))

    def names(self) -> list[str]:
        """Of the caches."""
        return [f"{of}_{n}" for n in range(len(self.layers)) for of in ("keys", "values")]

    def around(self, position: torch.Tensor) -> Sequence[torch.Tensor]:
        numbers = torch.arange(self.cos.shape[1], device=position.device)
        tables = (table.index_select(1, position) for table in (self.cos, self.sin))
        return *tables, (numbers <= position)[None, None, None], position

    def apply_layer(
        self, layer: nn.Module, number: int, x: torch.Tensor, around: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        cos, sin, mask, position = around
        caches = [getattr(self, f"{of}_{number}") for of in ("keys", "values")]
        if x.dtype != caches[0].dtype:  # exact: the caches stay as they are
            caches = [cache.to(x.dtype) for cache in caches]
        result = layer(
            x,
            attention_mask=mask,
            past_key_values=Caches(position, *caches),
            position_embeddings=(cos, sin),
        )
        return first(result)

    def keep(self, rank: int, ranks: int) -> None:
        for name in self.names():
            setattr(self, name, getattr(self, name).chunk(ranks, 1)[rank].clone())


def make(name: str, where: Where, rank: int = 0) -> tuple[Text, tuple[torch.Tensor, ...]]:
    """A case on one device; equal arguments give equal numbers, and so do all ranks, but for texts
    of their own.
    """
    case = CASES[name]
    library().AttentionInterface.register(GROUPED, grouped_attention)
    context = where.of(CONTEXT, TINY_CONTEXT)
    config = library().LlamaConfig(
        **where.of(case.fields, TINY),
        num_hidden_layers=where.of(case.layers, 2),
        vocab_size=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        attn_implementation=GROUPED if case.is_decode else "sdpa",
    )
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(where.dtype)
    try:
        with torch.device(where.device):
            of = (Step, (case.texts,)) if case.is_decode else (Text, ())
            module = of[0](config, context, *of[1])
    finally:
        torch.set_default_dtype(dtype)
    module = module.eval().requires_grad_(False).to(where.device, where.dtype)
    torch.manual_seed(1 + rank * case.is_sharded)
    x = where.normal(case.texts, 1 if case.is_decode else context, config.hidden_size)
    if not case.is_decode:
        return module, (x,)
    return module, (x, torch.tensor([context - 1], device=where.device))


def cut(name: str, module: Text, device: str, rank: int, ranks: int) -> Text:
    """Make it one of several processes; a group of them is there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import parallel

    mesh = init_device_mesh(device.partition(":")[0], (ranks,))
    if CASES[name].is_sharded:
        for layer in module.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(module, mesh=mesh)
    plan = {name: parallel.ColwiseParallel() for name in COLUMNS}
    plan |= {name: parallel.RowwiseParallel() for name in ROWS}
    for layer in module.layers:
        parallel.parallelize_module(layer, mesh, plan, src_data_rank=None)  # all have the same
    module.keep(rank, ranks)
    return module
