"""Images of other sizes are what PyTorch makes of them, also where elements are no numbers."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tvm_fusion
from tvm_fusion.frontends.torch.images.interpolation import TAPS, Resize

from ..support.frontend_tools import Function

MODES = {
    "linear": ("upsample_linear1d.vec", {"mode": "linear"}),
    "cubic": ("upsample_bicubic2d.vec", {"mode": "bicubic"}),
    "filtered": ("_upsample_bilinear2d_aa.default", {"mode": "bilinear", "antialias": True}),
    "filtered cubic": ("_upsample_bicubic2d_aa.default", {"mode": "bicubic", "antialias": True}),
}
SIZES = [(9, 13), (9, 4), (9, 9), (7, 14), (5, 1), (1, 5), (16, 7)]


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize(("old", "new"), SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_taps_are_those_of_pytorch(mode, old, new, align_corners):
    name, options = MODES[mode]
    taps = TAPS[name](Resize(old, new, align_corners, None, "float32"))
    one_axis = mode == "linear"
    for value in (1.0, np.nan) if mode == "cubic" else (1.0, np.nan, np.inf):
        images = torch.randn(old, 1, old)
        images[torch.arange(old), 0, torch.arange(old)] = value  # in one place of each
        size = [new] if one_axis else [new, 2]
        given = images if one_axis else images[..., None].repeat(1, 1, 1, 2)
        wanted = F.interpolate(given, size=size, align_corners=align_corners, **options)
        wanted = wanted[:, 0] if one_axis else wanted[:, 0, :, 0]
        with np.errstate(invalid="ignore"):
            got = (images[:, 0].numpy()[:, taps.places] * taps.shares.astype("float32")).sum(1)
        np.testing.assert_allclose(got, wanted, atol=2e-5)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((2, 3, 9), "float32", {"scale_factor": 1.7, "mode": "linear"}),
        ((2, 3, 5, 6), "float32", {"scale_factor": 2, "mode": "bilinear"}),
        ((2, 3, 5, 6), "float16", {"size": (13, 4), "mode": "bilinear", "align_corners": True}),
        ((1, 2, 3, 4, 5), "float64", {"size": (5, 3, 9), "mode": "trilinear"}),
        ((2, 3, 9, 10), "float32", {"scale_factor": 1.7, "mode": "bicubic"}),
        ((2, 3, 9, 10), "float32", {"scale_factor": 0.6, "mode": "bicubic", "antialias": True}),
    ],
)
def test_default_checks_pass(shape, dtype, options):
    """They compare with PyTorch, with NaN and infinities among the inputs, too."""
    x = torch.randn(shape, dtype=getattr(torch, dtype))
    model = Function(functools.partial(F.interpolate, **options)).eval()
    compiled = tvm_fusion.compile(model, "llvm", example_inputs=(x,))
    assert compiled.report.verify.source_note is None


def test_half_of_any_size_is_enlarged_to_what_it_gives():
    class Halved(torch.nn.Module):
        def forward(self, x):
            return F.interpolate(F.max_pool2d(x, 2), scale_factor=2.0) * 2

    sizes = {axis: torch.export.Dim(f"n{axis}", min=4, max=64) for axis in (2, 3)}
    program = torch.export.export(Halved(), (torch.randn(1, 2, 8, 8),), dynamic_shapes=(sizes,))
    module = tvm_fusion.compile(program, target="llvm_cpu")
    for rows, columns in ((8, 8), (9, 7)):
        x = torch.randn(1, 2, rows, columns)
        torch.testing.assert_close(module(x), Halved()(x))


def test_a_size_in_parts_of_another_one_is_enlarged():
    class Parts(torch.nn.Module):
        def forward(self, x, y):
            return F.interpolate(x[:, :, : x.shape[2] // y.shape[0]], scale_factor=8.0) * y.sum()

    sizes = {2: torch.export.Dim("n", min=4, max=64)}, {0: torch.export.Dim("m", min=2, max=4)}
    given = torch.randn(1, 2, 16), torch.randn(3)
    program = torch.export.export(Parts(), given, dynamic_shapes=sizes)
    module = tvm_fusion.compile(program, target="llvm_cpu")
    x, y = torch.randn(1, 2, 9), torch.randn(2)
    torch.testing.assert_close(module(x, y), Parts()(x, y))
