"""Matrix products: alone, in several types, from packed weights, and in batches."""

import torch
import torch.nn.functional as F
from torch import nn

from .gemm_layers import LAYERS
from .instance import Apply, Made, Product, Sizes, Workload

PLAIN_SHAPES = (  # M, N, K: layers of Llama-3-8B and BERT-large, and squares
    (16, 4096, 4096),
    (16, 14336, 4096),
    (16, 4096, 14336),
    (256, 4096, 4096),
    (256, 14336, 4096),
    (256, 4096, 14336),
    (256, 1024, 1024),
    (256, 4096, 1024),
    (2048, 1024, 4096),
    (2048, 4096, 1024),
    (2048, 4096, 4096),
    (4096, 14336, 4096),
    (4096, 3072, 1024),
    (8192, 4096, 14336),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
)
GROUP = 128  # weights along K that share a scale
PER_WORD, BITS, ZERO_POINT = 8, 4, 8
FLOAT8_FACTOR = 4  # with weights of deviation 1/4, results are of the order of one


class Int4Product(nn.Module):
    """x W^T with eight weights in each int32 word, the first in the lowest bits."""

    def __init__(self, sizes: Sizes, n: int, k: int) -> None:
        super().__init__()
        words = torch.randint(-(2**31), 2**31, (n, k // PER_WORD), device=sizes.device)
        self.register_buffer("packed", words.to(torch.int32))
        scales = 0.1 + torch.rand(n, k // GROUP, device=sizes.device)
        self.register_buffer("scales", (scales * k**-0.5 / 3).to(sizes.dtype))
        shifts = torch.arange(0, PER_WORD * BITS, BITS, device=sizes.device, dtype=torch.int32)
        self.register_buffer("shifts", shifts)

    def weight(self) -> torch.Tensor:
        """The weights in the type of their scales."""
        n, words = self.packed.shape
        values = (self.packed.reshape(n, words, 1) >> self.shifts) & (2**BITS - 1)
        groups = values.reshape(n, words * PER_WORD // GROUP, GROUP).to(self.scales.dtype)
        groups = (groups - ZERO_POINT) * self.scales.reshape(n, -1, 1)
        return groups.reshape(n, words * PER_WORD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return F.linear(x, self.weight())


class Int8Product(nn.Module):
    """x W^T with int8 weights and a scale for each column of the result."""

    def __init__(self, sizes: Sizes, n: int, k: int) -> None:
        super().__init__()
        weight = torch.randint(-127, 128, (n, k), device=sizes.device)
        self.register_buffer("packed", weight.to(torch.int8))
        scales = (0.5 + torch.rand(n, device=sizes.device)) / 73 * k**-0.5
        self.register_buffer("scales", scales.to(sizes.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return F.linear(x, self.packed.to(x.dtype)) * self.scales


def product(m: int, n: int, k: int, dtype: str | None = None) -> Workload:
    """A product of an input [M, K] and a weight [N, K]."""

    def make(sizes: Sizes) -> Made:
        rows, columns, inner = map(sizes.extent, (m, n, k))
        return Product(sizes, columns, inner), (sizes.normal(rows, inner),)

    return Workload(make, dtype, plain=True)


def _vector(module: type[nn.Module]) -> Workload:
    """One row times 11008 x 4096 weights."""

    def make(sizes: Sizes) -> Made:
        inner = sizes.multiple(4096, GROUP)
        return module(sizes, sizes.extent(11008), inner), (sizes.normal(1, inner),)

    return Workload(make, "float16", plain=module is Product)


def _from_float8(x: torch.Tensor) -> torch.Tensor:
    """x in float16, which holds every value of an 8-bit float; float64 stays."""
    return x if x.dtype == torch.float64 else x.half()


class ScaledProduct(nn.Module):
    """torch's own product of 8-bit floats, times a factor."""

    def __init__(self, inputs: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        device = inputs[0].device
        self.register_buffer("one", torch.ones((), device=device))
        self.register_buffer("factor", torch.full((), _factor(inputs[0]), device=device))

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        kind = torch.float16
        return torch._scaled_mm(x, weight.t(), self.factor, self.one, out_dtype=kind)


def _factor(x: torch.Tensor) -> float:
    return FLOAT8_FACTOR * x.shape[1] ** -0.5


def _float8(m: int, n: int, k: int) -> Workload:
    def make(sizes: Sizes) -> Made:
        rows, columns, inner = map(sizes.extent, (m, n, k))

        def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return F.linear(_from_float8(x), _from_float8(weight)) * _factor(x)

        x = sizes.normal(rows, inner)
        weight = sizes.normal(columns, inner, deviation=1 / FLOAT8_FACTOR)
        return Apply(function), (x, weight)

    return Workload(make, "float8_e4m3fn", plain=True, for_torch=ScaledProduct)


def _bmm(sizes: Sizes) -> Made:
    count, side = sizes.count(512), 64
    x, y = sizes.normal(count, side, side), sizes.normal(count, side, side, deviation=side**-0.5)
    return Apply(torch.bmm), (x, y)


GEMM: dict[str, Workload] = {
    **{f"gemm_{m}x{n}x{k}": product(m, n, k) for m, n, k in PLAIN_SHAPES},
    "gemm_bf16_4096x4096x4096": product(4096, 4096, 4096, "bfloat16"),
    "gemm_fp8_4096x4096x4096": _float8(4096, 4096, 4096),
    "gemm_fp32_4096x4096x4096": product(4096, 4096, 4096, "float32"),
    "bmm_512x64x64x64": Workload(_bmm, "float16", plain=True),
    "gemv_fp16": _vector(Product),
    "gemv_int8": _vector(Int8Product),
    "gemv_int4": _vector(Int4Product),
    **LAYERS,
}
