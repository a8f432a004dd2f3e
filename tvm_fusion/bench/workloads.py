"""What is measured: operators and layers as plain torch modules, with their inputs.

The first twelve are bound by memory. Norms and losses compute in float32 inside, as models do; for
the float64 reference they compute in float64.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..demo import causal_mask, rope_tables
from ..errors import InputError

try:
    import torch
    import torch.nn.functional as F
    from torch import nn
except ImportError as error:
    raise ImportError("benchmarks need torch: pip install 'tvm_fusion[torch]'") from error

SMALLEST_EXTENT = 64
HEADS = 16


@dataclass(frozen=True, slots=True)
class Instance:
    """A workload in one size, on one device.

    Attributes
    ----------
    name : str
        The workload's.
    module : torch.nn.Module
        In evaluation mode.
    inputs : tuple of torch.Tensor
        Its inputs.
    dtype : str
        Of the floating-point inputs, such as "float16".
    """

    name: str
    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    dtype: str

    @property
    def shape(self) -> str:
        """Shapes of the inputs: "8192x4096, 4096"."""
        return ", ".join("x".join(map(str, x.shape)) or "scalar" for x in self.inputs)


def require(names: Iterable[str]) -> None:
    """Raise InputError for a name that is no workload's."""
    for name in names:
        if name not in _WORKLOADS:
            raise InputError(f"unknown workload {name!r}; there are {', '.join(_WORKLOADS)}")


def make(name: str, device: str, dtype: str, scale: float = 1.0) -> Instance:
    """Make a workload; equal arguments give equal values.

    Parameters
    ----------
    name : str
        One of `SUITES["all"]`.
    device : str
        torch's name of a device.
    dtype : str
        Of weights and floating-point inputs.
    scale : float
        Factor on every large extent, none below 64.
    """
    require([name])
    torch.manual_seed(2026)
    module, inputs = _WORKLOADS[name](_Sizes(device, getattr(torch, dtype), scale))
    return Instance(name, module.to(device, getattr(torch, dtype)).eval(), inputs, dtype)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Draws inputs in the sizes of one run."""

    device: str
    dtype: torch.dtype
    scale: float

    def extent(self, full: int) -> int:
        return max(SMALLEST_EXTENT, int(full * self.scale))

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def large(self, *full: int) -> torch.Tensor:
        return self.normal(*map(self.extent, full))

    def labels(self, count: int, classes: int) -> torch.Tensor:
        return torch.randint(0, self.extent(classes), (self.extent(count),), device=self.device)


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in float32 at least."""
    return x if x.dtype == torch.float64 else x.float()


def rms(x: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6) -> torch.Tensor:
    """RMS norm over the last axis, as Llama writes it."""
    y = wide(x)
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype) * weight


class Apply(nn.Module):
    """A function as a module without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Call it."""
        return self.function(*inputs)


class RMSNorm(nn.Module):
    """`rms` with a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis."""
        return rms(x, self.weight)


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


def _fanout(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.sigmoid(x) * 1.5
    return torch.tanh(a) + x, torch.relu(a) * x


def _remat(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.exp(x * 0.1)
    return a.sum(-1), a * x


def _add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return total, rms(total, weight)


def _conv_block(sizes: _Sizes) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    full = sizes.scale >= 1
    channels, side, batch = sizes.extent(256), 56 if full else 14, 32 if full else 4
    return ConvBlock(channels), (sizes.normal(batch, channels, side, side),)


_Maker = Callable[[_Sizes], tuple[nn.Module, tuple[torch.Tensor, ...]]]


def _function(function: Callable[..., Any], *shapes: Iterable[int]) -> _Maker:
    return lambda sizes: (Apply(function), tuple(sizes.large(*shape) for shape in shapes))


_SQUARE, _ROWS, _ROW = (8192, 8192), (8192, 4096), (4096,)

_MEMORY: dict[str, _Maker] = {
    "chain4": _function(lambda x: torch.relu((x + 1) * 2) ** 2, _SQUARE),
    "sigmoid_tanh": _function(lambda x: torch.sigmoid(x) * torch.tanh(x + 1), _SQUARE),
    "fanout2": _function(_fanout, _SQUARE),
    "remat_reduce": _function(_remat, _SQUARE),
    "softmax": _function(lambda x: torch.softmax(x, -1), _ROWS),
    "layernorm": lambda s: (nn.LayerNorm(s.extent(4096)), (s.large(*_ROWS),)),
    "rmsnorm": lambda s: (RMSNorm(s.extent(4096)), (s.large(*_ROWS),)),
    "add_rmsnorm": _function(_add_rmsnorm, _ROWS, _ROWS, _ROW),
    "bias_gelu": _function(lambda x, b: F.gelu(x + b), _ROWS, _ROW),
    "swiglu_act": _function(lambda a, b: F.silu(a) * b, _SQUARE, _SQUARE),
    "cross_entropy": lambda s: (
        Apply(lambda x, t: F.cross_entropy(wide(x), t)),
        (s.large(4096, 32000), s.labels(4096, 32000)),
    ),
    "transpose_add": _function(lambda x, y: torch.relu(x.permute(1, 0) + y), _SQUARE, _SQUARE),
}

_WORKLOADS: dict[str, _Maker] = _MEMORY | {
    "linear_bias_gelu": lambda s: (
        nn.Sequential(nn.Linear(s.extent(4096), s.extent(4096)), nn.GELU()),
        (s.large(4096, 4096),),
    ),
    "swiglu_mlp": lambda s: (SwiGLU(s.extent(4096), s.extent(11008)), (s.large(2048, 4096),)),
    "attention": lambda s: (
        Attention(s.extent(2048)),
        (s.normal(2, s.extent(2048), s.extent(2048)),),
    ),
    "block": lambda s: (
        Block(s.extent(2048), s.extent(5504)),
        (s.normal(2, s.extent(2048), s.extent(2048)),),
    ),
    "demo_block": lambda s: (
        Block(s.extent(2048), s.extent(5504), RotaryAttention(s.extent(2048), s.extent(2048))),
        (s.normal(2, s.extent(2048), s.extent(2048)),),
    ),
    "decode_mlp": lambda s: (
        SwiGLU(s.extent(4096), s.extent(11008)),
        (s.normal(1, s.extent(4096)),),
    ),
    "conv_bn_relu": _conv_block,
}

SUITES = {
    "memory": tuple(_MEMORY),
    "flow": (*_MEMORY, "demo_block"),
    "all": tuple(_WORKLOADS),
}
