"""Matrix products with work around them: epilogues, siblings, norms, decoding, LoRA, experts."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .instance import Apply, Made, Sizes, Workload, rms
from .models import HEADS, SwiGLU

LORA_SCALE = 2.0
TOKENS = (768, 256, 512, 256, 768, 512, 512, 512)  # of each expert


class Fused(nn.Module):
    """A function of weights, which are parameters, behind the inputs."""

    def __init__(self, function: Callable[..., Any], *weights: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.names = tuple(f"weight{i}" for i in range(len(weights)))
        for name, value in zip(self.names, weights, strict=True):
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Call it."""
        return self.function(*inputs, *[getattr(self, name) for name in self.names])


def weight(sizes: Sizes, n: int, k: int) -> torch.Tensor:
    """[N, K] such that products with normal values are of the order of one."""
    return sizes.normal(n, k, deviation=k**-0.5)


def norm_weight(sizes: Sizes, width: int) -> torch.Tensor:
    """Of a norm: around one."""
    return 1 + sizes.normal(width, deviation=0.1)


def _residual(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w) + r


def _gate_up(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def _qkv(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(F.linear(x, w) for w in weights)


def _rmsnorm_qkv(
    x: torch.Tensor, norm: torch.Tensor, *weights: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return _qkv(rms(x, norm), *weights)


def _lora(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Three projections, each with an update of low rank: x W^T + 2 (x A^T) B^T."""
    triples = zip(weights[::3], weights[1::3], weights[2::3], strict=True)
    return tuple(
        F.linear(x, w) + F.linear(F.linear(x, down), up) * LORA_SCALE for w, down, up in triples
    )


def _block_tail(
    x: torch.Tensor, r: torch.Tensor, w1: torch.Tensor, norm: torch.Tensor, w2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A projection and its residual, and the next projection of what RMSNorm makes of them."""
    h = F.linear(x, w1) + r
    return h, F.linear(rms(h, norm), w2)


def _widths(sizes: Sizes) -> tuple[int, list[int]]:
    """The inputs and the three outputs of Llama-3-8B's attention."""
    return sizes.extent(4096), [sizes.extent(n) for n in (4096, 1024, 1024)]


def _make_residual(sizes: Sizes) -> Made:
    side = sizes.extent(4096)
    return Fused(_residual, weight(sizes, side, side)), (
        sizes.normal(side, side),
        sizes.normal(side, side),
    )


def _make_gate_up(sizes: Sizes) -> Made:
    inner, hidden = sizes.extent(4096), sizes.extent(11008)
    weights = [weight(sizes, hidden, inner) for _ in range(2)]
    return Fused(_gate_up, *weights), (sizes.large(4096, 4096),)


def _make_qkv(sizes: Sizes) -> Made:
    inner, widths = _widths(sizes)
    weights = [weight(sizes, n, inner) for n in widths]
    return Fused(_qkv, *weights), (sizes.large(4096, 4096),)


def _make_rmsnorm_qkv(sizes: Sizes) -> Made:
    inner, widths = _widths(sizes)
    weights = [weight(sizes, n, inner) for n in widths]
    return Fused(_rmsnorm_qkv, norm_weight(sizes, inner), *weights), (sizes.large(4096, 4096),)


def _make_lora(sizes: Sizes) -> Made:
    inner, widths = _widths(sizes)
    weights = []
    for n in widths:
        weights += [weight(sizes, n, inner), weight(sizes, 16, inner), weight(sizes, n, 16)]
    return Fused(_lora, *weights), (sizes.large(4096, 4096),)


def _make_block_tail(sizes: Sizes) -> Made:
    side = sizes.extent(4096)
    first, norm = weight(sizes, side, side), norm_weight(sizes, side)
    module = Fused(_block_tail, first, norm, weight(sizes, side, side))
    return module, (sizes.normal(side, side), sizes.normal(side, side))


def token_counts(total: int, experts: int) -> list[int]:
    """The tokens of each expert, in the proportions of `TOKENS`."""
    counts = [total * n // sum(TOKENS[:experts]) for n in TOKENS[: experts - 1]]
    return [*counts, total - sum(counts)]


def _make_experts(sizes: Sizes) -> Made:
    """SwiGLU of eight experts; tokens stand in the order of the experts that take them."""
    hidden, inner = sizes.extent(2048), sizes.extent(1024)
    counts = token_counts(sizes.extent(sum(TOKENS)), sizes.count(len(TOKENS), 3))

    def experts(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        parts = []
        for i, part in enumerate(x.split(counts)):
            gate, up, down = weights[3 * i : 3 * i + 3]
            parts.append(F.linear(_gate_up(part, gate, up), down))
        return torch.cat(parts)

    weights = []
    for _ in counts:
        weights += [weight(sizes, inner, hidden), weight(sizes, inner, hidden)]
        weights.append(weight(sizes, hidden, inner))
    return Fused(experts, *weights), (sizes.normal(sum(counts), hidden),)


def _decode(rows: int) -> Workload:
    return Workload(
        lambda s: (SwiGLU(s.extent(4096), s.extent(11008)), (s.normal(rows, s.extent(4096)),)),
        "float16",
    )


def _split_heads(x: torch.Tensor) -> torch.Tensor:
    """[batch, length, heads * width] as [batch, heads, length, width]."""
    batch, length, width = x.shape
    return x.reshape(batch, length, HEADS, width // HEADS).permute(0, 2, 1, 3)


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    q, k = _split_heads(q), _split_heads(k)
    return torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5


def _values(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.matmul(p, _split_heads(v)).permute(0, 2, 1, 3).reshape(v.shape)


def _make_scores(sizes: Sizes) -> Made:
    shape = (2, sizes.extent(2048), sizes.multiple(2048, HEADS))
    return Apply(_scores), (sizes.normal(*shape), sizes.normal(*shape))


def _make_values(sizes: Sizes) -> Made:
    length, width = sizes.extent(2048), sizes.multiple(2048, HEADS)
    p = sizes.normal(2, HEADS, length, length, deviation=length**-0.5)
    return Apply(_values), (p, sizes.normal(2, length, width))


LAYERS: dict[str, Workload] = {
    "linear_residual": Workload(_make_residual, "float16"),
    "gate_up": Workload(_make_gate_up, "float16"),
    "qkv": Workload(_make_qkv, "float16"),
    "rmsnorm_qkv": Workload(_make_rmsnorm_qkv, "float16"),
    "decode_mlp_1": _decode(1),
    "decode_mlp_16": _decode(16),
    "lora_qkv": Workload(_make_lora, "float16"),
    "moe": Workload(_make_experts, "float16"),
    "attention_scores": Workload(_make_scores, "float16"),
    "attention_values": Workload(_make_values, "float16"),
    "block_tail": Workload(_make_block_tail, "float16"),
}
