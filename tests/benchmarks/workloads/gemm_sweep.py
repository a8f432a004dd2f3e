"""Sixty products in sizes of every kind, each with one of six epilogues."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .gemm_layers import Fused, weight
from .instance import Made, Product, Sizes, Workload

SWEEP_SHAPES = (  # M, N, K; the epilogues follow each other, so every sixth is plain
    # plain, bias, relu, gelu, residual, gate
    (1, 4096, 4096),
    (1, 11008, 4096),
    (3, 4096, 4096),
    (7, 4096, 11008),
    (16, 1024, 1024),
    (16, 11008, 4096),
    (33, 4096, 4096),
    (33, 1000, 4096),
    (64, 4096, 4096),
    (64, 14336, 4096),
    (100, 4096, 1024),
    (100, 4096, 4096),
    (127, 4096, 4096),
    (127, 1024, 4096),
    (128, 4096, 4096),
    (128, 4097, 4096),
    (200, 4096, 4096),
    (200, 2048, 2048),
    (256, 333, 4096),
    (256, 4096, 999),
    (256, 768, 3072),
    (300, 1024, 4096),
    (300, 1001, 1001),
    (384, 3072, 768),
    (300, 4096, 4096),
    (500, 2000, 1500),
    (500, 4096, 4096),
    (512, 1024, 1024),
    (512, 512, 16384),
    (512, 4096, 4096),
    (777, 1024, 4096),
    (777, 777, 777),
    (1000, 1000, 808),
    (1000, 1001, 999),
    (1000, 4096, 1000),
    (1000, 333, 1001),
    (1000, 1000, 1000),
    (1024, 1024, 1024),
    (1024, 4096, 1024),
    (1024, 16, 4096),
    (1500, 3000, 1000),
    (1500, 1500, 1500),
    (1500, 3000, 808),
    (2048, 2048, 2048),
    (2048, 4096, 16),
    (2048, 4096, 40),
    (2048, 1024, 4096),
    (2048, 5504, 2048),
    (3000, 3000, 3000),
    (3000, 1000, 999),
    (3000, 4096, 1001),
    (4096, 64, 4096),
    (4096, 333, 2048),
    (4096, 2048, 808),
    (4096, 4096, 40),
    (64, 128, 16384),
    (16384, 256, 256),
    (65536, 64, 128),
    (8192, 1024, 1000),
    (2049, 2049, 2049),
)


def _bias(x: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w, b)


def _bias_relu(x: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.relu(F.linear(x, w, b))


def _bias_gelu(x: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b))


def _residual(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w) + r


def _silu_gate(x: torch.Tensor, g: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, w)) * g


# What is behind the product, and what it takes: a row of parameters, a full input, or nothing
EPILOGUES: dict[str, tuple[Callable[..., torch.Tensor] | None, str]] = {
    "plain": (None, ""),
    "bias": (_bias, "row"),
    "bias_relu": (_bias_relu, "row"),
    "bias_gelu": (_bias_gelu, "row"),
    "residual": (_residual, "full"),
    "silu_gate": (_silu_gate, "full"),
}


def _workload(m: int, n: int, k: int, epilogue: str) -> Workload:
    function, operand = EPILOGUES[epilogue]

    def make(sizes: Sizes) -> Made:
        rows, columns, inner = map(sizes.extent, (m, n, k))
        x = sizes.normal(rows, inner)
        if function is None:
            return Product(sizes, columns, inner), (x,)
        w = weight(sizes, columns, inner)
        if operand == "row":
            return Fused(function, sizes.normal(columns), w), (x,)
        return Fused(function, w), (x, sizes.normal(rows, columns))

    return Workload(make, "float16", plain=function is None)


def epilogue_of(name: str) -> str:
    """The epilogue that a name of the sweep ends in."""
    return name.split("_", 2)[2]


SWEEP: dict[str, Workload] = {
    f"sweep_{m}x{n}x{k}_{epilogue}": _workload(m, n, k, epilogue)
    for (m, n, k), epilogue in zip(SWEEP_SHAPES, [*EPILOGUES] * 10, strict=True)
}
