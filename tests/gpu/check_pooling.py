"""Pooling behind convolutions on a GPU, in the convolution's kernel and apart: error against
float32, and times of the kernels.

    python tests/gpu/check_pooling.py [--only TEXT] [--repeats N] [--json F]

Convolutions in float16 (bfloat16 where the name says so), channels last, with an activation and
windows that lie beside each other. Results hold NaN before the checked run; times are medians of
the sum of a call's kernels (CUPTI), interleaved, the L2 cleaned before each call.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.nn.functional as F
from torch import Tensor, nn

import tvm_fusion
from tests.gpu.inside_or_apart import command
from tvm_fusion.kernels.convolution import kernel_class
from tvm_fusion.kernels.gemm.partials import row_runs
from tvm_fusion.plan import structure

CONVOLUTIONS = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
POOLS = {
    "max": {3: F.max_pool1d, 4: F.max_pool2d, 5: F.max_pool3d},
    "avg": {3: F.avg_pool1d, 4: F.avg_pool2d, 5: F.avg_pool3d},
}
WINDOWS = kernel_class.windows_of


class Layer(nn.Module):
    """A convolution, an activation or a residual, and pooling; with `skip` both are results."""

    def __init__(self, rank, channels, filters, kind, window, skip=False, kernel=3, **more):
        super().__init__()
        options = {"padding": kernel // 2, **more}
        self.conv = CONVOLUTIONS[rank](channels, filters, kernel, **options)
        self.pool, self.window, self.skip = POOLS[kind][rank], window, skip

    def forward(self, x, *residual):
        h = self.conv(x)
        h = F.relu(h + residual[0]) if residual else F.silu(h)
        pooled = self.pool(h, self.window)
        return (h, pooled) if self.skip else pooled


class Down(nn.Module):
    """The way down of a U-Net; what it skips to is a result, too."""

    def __init__(self, *widths):
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.steps = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairs)

    def forward(self, x):
        skips = []
        for step in self.steps:
            skips.append(F.silu(step(x)))
            x = F.max_pool2d(skips[-1], 2)
        return (*skips, x)


def blocks(first: int, *widths: tuple[int, int]) -> nn.Sequential:
    """Blocks of a VGG: so many convolutions of a width, and pooling."""
    layers: list[nn.Module] = []
    for width, count in widths:
        for _ in range(count):
            layers += [nn.Conv2d(first, width, 3, padding=1), nn.ReLU()]
            first = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def cases() -> dict[str, tuple]:
    """Modules and the shapes of their inputs."""
    square = {
        f"{size}x{size} {c}-{c} b{n}": (Layer(4, c, c, "max", 2), (n, c, size, size))
        for size, c, n in ((112, 64, 32), (56, 128, 32), (56, 256, 8), (14, 512, 1), (112, 128, 1))
    }
    return square | {
        "28x28 512-512 b8 avg": (Layer(4, 512, 512, "avg", 2), (8, 512, 28, 28)),
        "112x112 64-64 b8, skip": (Layer(4, 64, 64, "max", 2, True), (8, 64, 112, 112)),
        "VGG 64, 128, 256 b8": (blocks(64, (64, 1), (128, 2), (256, 2)), (8, 64, 112, 112)),
        "down 64-128-256 b4": (Down(64, 64, 128, 256), (4, 64, 128, 128)),
        "9x11 64-72, skip": (Layer(4, 64, 72, "max", 2, True), (3, 64, 9, 11)),
        "13x7 64-40 avg": (Layer(4, 64, 40, "avg", 2), (2, 64, 13, 7)),
        "15x15 128-33 2x1": (Layer(4, 128, 33, "max", (2, 1)), (2, 128, 15, 15)),
        "9x9 4x4, residual": (Layer(4, 64, 64, "max", 4), (5, 64, 9, 9), (5, 64, 9, 9)),
        "line 21 avg 8, skip": (Layer(3, 96, 24, "avg", 8, True, 7), (3, 96, 21)),
        "volume 5x6x7": (Layer(5, 64, 64, "max", 2), (2, 64, 5, 6, 7)),
        "2 groups, 1x2": (Layer(4, 64, 64, "max", (1, 2), groups=2), (2, 64, 8, 9)),
        "stride 2, bfloat16": (Layer(4, 64, 64, "max", 2, stride=2), (2, 64, 11, 9)),
    }


def compiled(module: nn.Module, inputs: list[Tensor], way: str) -> Any:
    """The module with pooling in the kernels of convolutions, or by kernels of its own."""
    kernel_class.windows_of = WINDOWS if way == "inside" else row_runs
    structure._RECENT.clear()  # what was found out of groups with the other windows
    try:
        return tvm_fusion.compile(module, "cuda", example_inputs=tuple(inputs), verify=False)
    finally:
        kernel_class.windows_of = WINDOWS
        structure._RECENT.clear()


if __name__ == "__main__":
    sys.exit(command(__doc__.split("\n\n")[0], cases(), ("inside", "apart"), compiled))
