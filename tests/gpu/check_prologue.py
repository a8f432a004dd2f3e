"""Functions in front of a convolution on a GPU, in the convolution's kernel and apart: error
against float32, and times of the kernels.

    python tests/gpu/check_prologue.py [--only TEXT] [--repeats N] [--json F]

Convolutions in float16 (bfloat16 where the name says so), channels last. "inside" is with the
function in the kernel wherever that can be (what computing it takes counts for little, so that
predicted times are not those of the package), "apart" with none, "chosen" what the package chooses.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tvm_fusion
from tests.gpu.inside_or_apart import command
from tvm_fusion.kernels.convolution import kernel_class, launch
from tvm_fusion.plan import structure

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TAKES, WAYS = kernel_class.computes_data, launch.ways_to_compute
CHEAP = 0.1  # of the seconds that computing takes, where it is to be inside


class Activated(nn.Module):
    """A convolution of silu(x + 1), which is not 0 where x is: what padding must not become."""

    def __init__(
        self, rank: int, channels: int, filters: int, kernel: int = 3, **more: Any
    ) -> None:
        super().__init__()
        options = {"padding": kernel // 2, **more}
        self.conv = CONVOLUTIONS[rank](channels, filters, kernel, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.silu(x + 1))


class Known(Activated):
    """A convolution behind a norm with known numbers of an image and a channel, and silu."""

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ones = (1,) * (x.ndim - 2)
        scale, shift = (v.view(*v.shape, *ones) for v in (scale, shift))
        return self.conv(F.silu(x.float() * scale + shift).to(x.dtype))


class Residual(nn.Module):
    """A residual block of a diffusion U-Net."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(32, channels) for _ in range(2))
        convs = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.convs = nn.ModuleList(convs)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            h = conv(F.silu(norm(h)))
        return x + h


class Preactivated(nn.Module):
    """Two blocks of a residual network with pre-activation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(layer for _ in range(2) for layer in self._layers(channels)))
            for _ in range(2)
        )

    @staticmethod
    def _layers(channels: int) -> list[nn.Module]:
        norm = nn.BatchNorm2d(channels)
        nn.init.normal_(norm.weight, 1, 0.2)
        nn.init.normal_(norm.bias, 0, 0.3)
        norm.running_mean.normal_(0, 0.3)
        norm.running_var.uniform_(0.5, 1.5)
        return [norm, nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1, bias=False)]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def known(images: int, channels: int, filters: int, *sizes: int) -> tuple:
    """A module with numbers of an image, and the shapes of its inputs."""
    numbers = (images, channels)
    return Known(len(sizes), channels, filters), (*numbers, *sizes), numbers, numbers


def cases() -> dict[str, tuple]:
    """Modules and the shapes of their inputs."""
    return {
        "pre-activation 56x56 64 b32": (Preactivated(64), (32, 64, 56, 56)),
        "pre-activation 56x56 64 b8": (Preactivated(64), (8, 64, 56, 56)),
        "pre-activation 28x28 128 b32": (Preactivated(128), (32, 128, 28, 28)),
        "known 64x64 320-320 b2": known(2, 320, 320, 64, 64),
        "known 64x64 320-320 b8": known(8, 320, 320, 64, 64),
        "known 32x32 640-640 b2": known(2, 640, 640, 32, 32),
        "known 128x128 128-128 b4": known(4, 128, 128, 128, 128),
        "residual block 64x64 320 b2": (Residual(320), (2, 320, 64, 64)),
        "residual block 32x32 320 b2": (Residual(320), (2, 320, 32, 32)),
        "silu 64x64 512-512 b4": (Activated(2, 512, 512), (4, 512, 64, 64)),
        "silu 57x61 64-64": (Activated(2, 64, 64), (5, 64, 57, 61)),
        "known 35x37 320-320": known(3, 320, 320, 35, 37),
        "known 61x53 136-96 bfloat16": known(3, 136, 96, 61, 53),
        "silu line 3001": (Activated(1, 64, 64, 5, dilation=2, padding=4), (5, 64, 3001)),
        "silu volume 17x18x19": (Activated(3, 64, 64), (2, 64, 17, 18, 19)),
    }


def cheap(*args: Any) -> Any:
    """Ways to compute data, which are to be taken."""
    ways, once = WAYS(*args)
    return [dataclasses.replace(way, seconds=CHEAP * way.seconds) for way in ways], once


def compiled(module: nn.Module, inputs: list[Tensor], way: str) -> Any:
    """The module, each way."""
    kernel_class.computes_data = (lambda *_: False) if way == "apart" else TAKES
    launch.ways_to_compute = cheap if way == "inside" else WAYS
    structure._RECENT.clear()  # what was found out of groups the other way
    try:
        return tvm_fusion.compile(module, "cuda", example_inputs=tuple(inputs), verify=False)
    finally:
        kernel_class.computes_data, launch.ways_to_compute = TAKES, WAYS
        structure._RECENT.clear()


if __name__ == "__main__":
    told = __doc__.split("\n\n")[0]
    with torch.no_grad():
        sys.exit(command(told, cases(), ("inside", "apart", "chosen"), compiled))
