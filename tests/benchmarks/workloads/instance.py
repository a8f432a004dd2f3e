"""A workload in one size, and what workloads are written with.

Norms and losses compute in float32 inside, as models do; for the float64 reference they compute in
float64.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm_fusion.errors import InputError

try:
    import torch
    from torch import nn
except ImportError as error:
    raise InputError("benchmarks need torch: pip install 'tvm_fusion[torch]'") from error

SMALLEST_EXTENT = 64


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
    unread_bytes : int
        Bytes of the inputs that no output depends on: rows of a table that no index names.
    torch_module : torch.nn.Module or None
        What torch runs in place of `module`, where it has an operator of its own for the work.
    peers : mapping of str to Callable
        As `Workload.peers`.
    flop_share : float
        As `Workload.flop_share`.
    """

    name: str
    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    dtype: str
    unread_bytes: int = 0
    torch_module: nn.Module | None = None
    peers: Mapping[str, Callable[..., Callable[..., Any]]] = field(default_factory=dict)
    flop_share: float = 1.0

    @property
    def for_torch(self) -> nn.Module:
        """What torch's compilers are measured on."""
        return self.torch_module or self.module

    @property
    def shape(self) -> str:
        """Shapes of the inputs: "8192x4096, 4096"."""
        return ", ".join("x".join(map(str, x.shape)) or "scalar" for x in self.inputs)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Draws inputs in the sizes of one run.

    Attributes
    ----------
    device : str
        torch's name of a device.
    dtype : torch.dtype
        Of floating-point inputs.
    scale : float
        Factor on extents.
    """

    device: str
    dtype: torch.dtype
    scale: float

    def extent(self, full: int) -> int:
        """A large extent: scaled, 64 at least, odd if it was odd; a small one as it is."""
        if full <= SMALLEST_EXTENT:
            return full
        scaled = max(SMALLEST_EXTENT, int(full * self.scale))
        return scaled | (full % 2)

    def count(self, full: int, least: int = 2) -> int:
        """A batch, a side of an image, a number of heads: scaled, `least` at least."""
        return min(full, max(least, int(full * self.scale)))

    def multiple(self, full: int, of: int) -> int:
        """A scaled extent that `of` divides."""
        return max(of, self.extent(full) // of * of)

    def normal(self, *shape: int, deviation: float = 1.0) -> torch.Tensor:
        """Normal values in exactly this shape."""
        kind = self.dtype if self.dtype.itemsize > 1 else torch.float32
        values = torch.randn(*shape, device=self.device, dtype=kind)
        return (values if deviation == 1 else values * deviation).to(self.dtype)

    def large(self, *full: int) -> torch.Tensor:
        """Normal values, each extent scaled."""
        return self.normal(*map(self.extent, full))

    def labels(self, count: int, classes: int) -> torch.Tensor:
        """Classes drawn evenly, int64; both extents scaled."""
        return torch.randint(0, self.extent(classes), (self.extent(count),), device=self.device)


Made = tuple[nn.Module, tuple[torch.Tensor, ...]] | tuple[nn.Module, tuple[torch.Tensor, ...], int]


@dataclass(frozen=True, slots=True)
class Workload:
    """How to make a workload.

    Attributes
    ----------
    make : Callable[[Sizes], Made]
        Gives module and inputs, and where it is not 0 the bytes of the inputs that stay unread.
    dtype : str or None
        Its dtype where a run asks for none.
    plain : bool
        Whether it is one matrix product and nothing else, which every library has a kernel for.
    for_torch : Callable or None
        Makes, of the inputs, the module that torch runs in its place.
    peers : mapping of str to Callable
        Peers that only some workloads have: each makes, of the inputs, a function of them.
    wall : bool
        Whether wall time of a call with CUDA graphs and memory are measured as well.
    flop_share : float
        Part of the operations of its matrix products that any output depends on: masks hide the
        rest.
    """

    make: Callable[[Sizes], Made]
    dtype: str | None = None
    plain: bool = False
    for_torch: Callable[[tuple[torch.Tensor, ...]], nn.Module] | None = None
    peers: Mapping[str, Callable[..., Callable[..., Any]]] = field(default_factory=dict)
    wall: bool = False
    flop_share: float = 1.0

    def instance(self, name: str, device: str, dtype: str, scale: float) -> Instance:
        """Make it in one size; equal arguments give equal values."""
        torch.manual_seed(2026)
        kind = getattr(torch, dtype)
        with torch.device(device):  # parameters are drawn where they will be
            module, inputs, *unread = self.make(Sizes(device, kind, scale))
        module = module.to(device, kind).eval()
        theirs = self.for_torch(inputs) if self.for_torch else None
        return Instance(
            name, module, inputs, dtype, *(unread or [0]), theirs, self.peers, self.flop_share
        )


class Apply(nn.Module):
    """A function as a module without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Call it."""
        return self.function(*inputs)


class Product(nn.Module):
    """x W^T."""

    def __init__(self, sizes: Sizes, n: int, k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(sizes.normal(n, k, deviation=k**-0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return nn.functional.linear(x, self.weight)


class RMSNorm(nn.Module):
    """`rms` with a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis."""
        return rms(x, self.weight)


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in float32 at least."""
    return x if x.dtype == torch.float64 else x.float()


def rms(x: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6) -> torch.Tensor:
    """RMS norm over the last axis, as Llama writes it."""
    y = wide(x)
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype) * weight


def applied(
    function: Callable[..., Any], *shapes: Iterable[int], dtype: str | None = None
) -> Workload:
    """A function of normal inputs, every extent of their shapes scaled."""

    def make(sizes: Sizes) -> Made:
        return Apply(function), tuple(sizes.large(*shape) for shape in shapes)

    return Workload(make, dtype)
