"""Layers of models: what matrix products or convolutions bind."""

import torch
import torch.nn.functional as F
from torch import nn

from tvm_fusion.demo import causal_mask, rope_tables

from .instance import Made, RMSNorm, Sizes, Workload

HEADS = 16


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the MLP."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Written out: softmax(Q K^T / sqrt(d)) V, with no call of a fused attention."""

    def __init__(self, width: int, heads: int = HEADS) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend within [batch, sequence, width]."""
        batch, length, width = x.shape
        split = (batch, length, self.heads, self.head_width)
        q = self.query(x).reshape(split).permute(0, 2, 1, 3)
        k = self.key(x).reshape(split).permute(0, 2, 3, 1)
        v = self.value(x).reshape(split).permute(0, 2, 1, 3)
        p = torch.softmax(torch.matmul(q, k) * (1.0 / self.head_width**0.5), dim=-1)
        return self.out(torch.matmul(p, v).permute(0, 2, 1, 3).reshape(batch, length, width))


class RotaryAttention(Attention):
    """`Attention` with RoPE on queries and keys and an additive causal mask, as in the demo."""

    def __init__(self, width: int, length: int, heads: int = HEADS) -> None:
        super().__init__(width, heads)
        tables = (*rope_tables(length, self.head_width, "float32"), causal_mask(length, "float16"))
        for name, table in zip(("cos", "sin", "mask"), tables, strict=True):
            self.register_buffer(name, torch.from_numpy(table))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """RoPE on [batch, length, heads, head width]."""
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to what came before within [batch, sequence, width]."""
        batch, length, width = x.shape
        split = (batch, length, self.heads, self.head_width)
        q = self.rotate(self.query(x).reshape(split)).permute(0, 2, 1, 3)
        k = self.rotate(self.key(x).reshape(split)).permute(0, 2, 3, 1)
        v = self.value(x).reshape(split).permute(0, 2, 1, 3)
        scores = torch.matmul(q, k) * (1.0 / self.head_width**0.5) + self.mask
        mixed = torch.matmul(torch.softmax(scores, dim=-1), v)
        return self.out(mixed.permute(0, 2, 1, 3).reshape(batch, length, width))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, hidden: int, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)
        self.attention, self.mlp = attention or Attention(width), SwiGLU(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ConvBlock(nn.Module):
    """Two 3x3 convolutions with batch norm and ReLU, and a residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to [batch, channels, height, width]."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + x)


def _conv_block(sizes: Sizes) -> Made:
    full = sizes.scale >= 1
    channels, side, batch = sizes.extent(256), 56 if full else 14, 32 if full else 4
    return ConvBlock(channels), (sizes.normal(batch, channels, side, side),)


MODELS: dict[str, Workload] = {
    "linear_bias_gelu": Workload(
        lambda s: (
            nn.Sequential(nn.Linear(s.extent(4096), s.extent(4096)), nn.GELU()),
            (s.large(4096, 4096),),
        )
    ),
    "swiglu_mlp": Workload(
        lambda s: (SwiGLU(s.extent(4096), s.extent(11008)), (s.large(2048, 4096),))
    ),
    "attention": Workload(
        lambda s: (
            Attention(s.extent(2048)),
            (s.normal(2, s.extent(2048), s.extent(2048)),),
        ),
        wall=True,
    ),
    "block": Workload(
        lambda s: (
            Block(s.extent(2048), s.extent(5504)),
            (s.normal(2, s.extent(2048), s.extent(2048)),),
        ),
        wall=True,
    ),
    "demo_block": Workload(
        lambda s: (
            Block(s.extent(2048), s.extent(5504), RotaryAttention(s.extent(2048), s.extent(2048))),
            (s.normal(2, s.extent(2048), s.extent(2048)),),
        ),
        wall=True,
    ),
    "decode_mlp": Workload(
        lambda s: (
            SwiGLU(s.extent(4096), s.extent(11008)),
            (s.normal(1, s.extent(4096)),),
        )
    ),
    "conv_bn_relu": Workload(_conv_block),
}
