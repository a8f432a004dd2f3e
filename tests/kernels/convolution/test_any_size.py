"""Convolutions of images and lines of symbolic size: each form at several sizes, on the emulator,
against float64; whole networks, whose sizes are parts of those of their inputs.
"""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.export import Dim

from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.flow.planned import Planned
from tvm_fusion.frontends import load
from tvm_fusion.ir.graph import OUTPUTS_ATTR, VERSIONS_ATTR
from tvm_fusion.kernels.convolution import forms
from tvm_fusion.kernels.convolution.forms import CUDA_WRITER
from tvm_fusion.kernels.convolution.geometry import read_convolution
from tvm_fusion.kernels.convolution.typical import several, sliding_sizes
from tvm_fusion.kernels.gemm.mma.plan import MmaConfig
from tvm_fusion.transform.apply.write_kernels import write_kernel

from ...support.conv_suites import last
from ...support.convolutions import Conv
from ...support.cuda_on_cpu import lower, run_cuda_on_cpu
from ...support.hopper_on_cpu import run_hopper_on_cpu
from ...support.module_on_cpu import EmulatedModule
from .test_any_batch import close, rarely

F = nn.functional
GPU, H200 = resolve_target("nvidia_h200")
POLICY = load_policy(None)
FORMS = {form.name: form for form in CUDA_WRITER.forms}
TILES = {"mma": MmaConfig(32, 64, 16, 32, 64, 3)}

LAST = last((5, 7), (3, 3), 64, 24, batch=1, epilogue="residual")
FIRST = Conv((6, 5), (3, 3), 5, 12, padding=(1,) * 4, epilogue="scale_shift", dtype="float16")
UP = Conv((4, 3), (3, 3), 16, 24, strides=(2, 2), padding=(1,) * 4, transposed=True)
KINDS = {
    "hopper": ("hopper", LAST),
    "hopper, steps": ("hopper", last((9, 7), (3, 3), 64, 72, batch=1, stride=2)),
    "hopper, dilated": ("hopper", last((9, 7), (3, 3), 64, 24, batch=1, dilation=2)),
    "hopper, groups": ("hopper", last((5, 7), (3, 3), 48, 32, batch=1, groups=2)),
    "hopper, a line": ("hopper", last((70,), (3,), 64, 24, batch=1)),
    "hopper, enlarged": ("hopper", replace(LAST, repeats=(2, 2))),
    "hopper, two parts": ("hopper", last((5, 7), (3, 3), 128, 24, batch=1, parts=(64, 64))),
    "hopper, computed": ("hopper", replace(LAST, prologue=True)),
    "rims": ("rims", LAST),
    "streams": ("streams", replace(LAST, prologue=True)),
    "depthwise": ("depthwise", replace(FIRST, channels=8, filters=8, groups=8)),
    "depthwise, steps": (
        "depthwise",
        replace(
            FIRST, channels=8, filters=8, groups=8, sizes=(6, 7), strides=(2, 2), dilation=(1, 2)
        ),
    ),
    "depthwise, channels last": (
        "depthwise",
        last((5, 7), (3, 3), 8, 8, batch=1, groups=8, epilogue="two_outputs"),
    ),
    "runs": ("runs", last((11, 9), (5, 5), 3, 12, batch=1, stride=2, epilogue="residual")),
    "runs, a line": ("runs", Conv((90,), (10,), 1, 8, strides=(5,), dtype="float16")),
    "mma, by copies": ("mma", replace(LAST, channels=10)),
    "mma, element by element": ("mma", FIRST),
    "mma, enlarged parts": (
        "mma",
        last((5, 7), (3, 3), 40, 24, batch=1, parts=(16, 24), repeats=(2, 2)),
    ),
    "simt": ("simt", replace(FIRST, dtype="float32", sizes=(3, 4), epilogue="residual")),
    "simt, a phase each": ("simt", replace(UP, channels=6, filters=8)),
}
# Of Hopper's the ranges of a size, below.
IN_CI = ("depthwise, steps", "runs", "mma, by copies")


@pytest.mark.parametrize("kind", rarely(KINDS, IN_CI))
def test_each_form_computes_images_of_any_size(kind):
    form, conv = KINDS[kind]
    conv = replace(conv, any_size=True, any_batch=True)
    found = read_convolution(conv.func(), conv.exact)
    assert sliding_sizes(found)
    config = TILES.get(form) or FORMS[form].rank(found, H200, POLICY)[0][1]
    kernel = FORMS[form].emit(found, H200, config)
    run = run_hopper_on_cpu if form in ("hopper", "rims", "streams") else run_cuda_on_cpu
    sizes = [conv.sizes, tuple(2 * n + 3 + i for i, n in enumerate(conv.sizes))]
    if all(n > 0 for n in replace(conv, sizes=(1,) * conv.rank).output_sizes):
        sizes.append((1,) * conv.rank)
    for images, size in enumerate(sizes, 1):
        own = replace(conv, batch=images, sizes=size)
        inputs, outputs = own.arrays(), own.poisoned()
        assert run(kernel, [*inputs, *outputs]) == 1
        close(own, outputs, inputs)


@pytest.mark.parametrize(
    ("conv", "most"),
    [
        (last((70,), (3,), 64, 24, batch=1, epilogue="residual", any_size=True), 65_536),
        (last((5, 7), (3, 3), 64, 24, batch=1, any_batch=True), 2048),
    ],
    ids=["length", "images"],
)
def test_each_range_of_a_size_is_right_at_its_edges(conv, most, monkeypatch):
    monkeypatch.setattr(forms, "EXTENTS", (3, most))
    kernel = write_kernel(conv.func().with_attr(OUTPUTS_ATTR, 1), "convolution", H200, POLICY)
    assert [*map(int, kernel.attrs[VERSIONS_ATTR])] == [3]
    lowered = lower(kernel)
    for size in (1, 2, 3, 4, 7):
        own = replace(conv, sizes=(size,)) if conv.any_size else replace(conv, batch=size)
        inputs, outputs = own.arrays(), own.poisoned()
        assert run_hopper_on_cpu(lowered, [*inputs, *outputs]) == 1
        close(own, outputs, inputs)


DEEP = Conv((40,), (7,), 16, 16, groups=16, padding=(3, 3), epilogue="residual", dtype="float16")
IMAGES = Conv((6, 40), (3, 3), 16, 16, groups=16, padding=(1,) * 4, dtype="float16")


@pytest.mark.parametrize(
    ("conv", "ranges"),
    [
        (replace(DEEP, any_size=True), ("8", "of8_upto_64", "of8_beyond", "64")),
        (replace(IMAGES, any_batch=True), None),
        (last((40,), (7,), 16, 16, batch=2, groups=16, any_size=True), ("8",)),
    ],
    ids=["lines", "images", "channels last"],
)
def test_the_direct_form_is_right_at_the_edges_of_its_ranges(conv, ranges, monkeypatch):
    monkeypatch.setattr(forms, "LENGTHS", (8, 64, 20_000))
    monkeypatch.setattr(forms, "SIZES", (3, 2048) if conv.any_batch else (8, 20_000))
    kernel = write_kernel(conv.func().with_attr(OUTPUTS_ATTR, 1), "convolution", H200, POLICY)
    if ranges is not None:
        assert (*map(str, kernel.attrs[VERSIONS_ATTR]),) == ranges
    lowered = lower(kernel)
    for size in (1, 3, 4) if conv.any_batch else (1, 7, 8, 9, 16, 33, 63, 64, 65, 72, 120):
        own = replace(conv, batch=size) if conv.any_batch else replace(conv, sizes=(size,))
        inputs, outputs = own.arrays(), own.poisoned()
        assert run_cuda_on_cpu(lowered, [*inputs, *outputs]) == 1
        close(own, outputs, inputs)
    for one in lowered.versions:
        if "of8_beyond" in one.kernel:
            assert re.search(r"tvmf_store(8|16)_wb\(", one.source)


def test_kernels_are_ranked_for_images_of_several_sizes_none_of_which_divides_much():
    found = read_convolution(replace(LAST, any_size=True, any_batch=True).func())
    sizes = [[w.size for w in c.windows] for c in several(found)]
    assert sizes == [[8, 33, 33], [8, 91, 91], [8, 257, 257]]
    line = read_convolution(last((70,), (3,), 64, 24, batch=2, any_size=True).func())
    assert [[w.size for w in c.windows] for c in several(line)] == [
        [2, 1025],
        [2, 8193],
        [2, 65537],
    ]


class Down(nn.Module):
    """Halved three times: the sizes of inner layers are parts of those of the input."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 5, 2, 2, bias=False), nn.BatchNorm2d(8))
        self.a, self.b = nn.Conv2d(8, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.c = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        x = F.max_pool2d(self.stem(x).relu(), 3, 2, 1)
        x = self.a(x).relu()
        return x + self.c(F.hardswish(self.b(x)))


class Line(nn.Module):
    """As the front of a model of speech."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv1d(8, 16, 3, padding=1), nn.Conv1d(16, 24, 3, 2, 1)

    def forward(self, x):
        return F.gelu(self.b(F.gelu(self.a(x))))


class Unet(nn.Module):
    """Halved and enlarged again in two ways: to the size before, as PyTorch alone can tell."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 24, 3, 2, 1)
        self.up, self.c = nn.ConvTranspose2d(24, 8, 2, 2), nn.Conv2d(40, 8, 3, padding=1)

    def forward(self, x):
        x = self.a(x).relu()
        y = self.b(x).relu()
        z = self.c(torch.cat([F.interpolate(y, scale_factor=2.0), x], 1))
        return z + self.up(y)


NETWORKS = {
    Down: ((2, 3, 40, 36), {2: Dim("height", min=9, max=64), 3: Dim("width", min=9, max=64)}),
    Line: ((2, 8, 60), {2: Dim("length", min=5, max=99)}),
    Unet: (
        (2, 3, 16, 12),
        {2: 2 * Dim("rows", min=2, max=32), 3: 2 * Dim("columns", min=2, max=32)},
    ),
}
SIZES = {
    Down: ((9, 10), (33, 40), (64, 17)),
    Line: ((5,), (64,), (99,)),
    Unet: ((4, 6), (22, 18)),
}


def exported(model: type[nn.Module], dtype: torch.dtype):
    torch.manual_seed(0)
    shape, sizes = NETWORKS[model]
    net = model().eval().to(dtype)
    return net, torch.export.export(
        net, (torch.randn(shape, dtype=dtype),), dynamic_shapes=(sizes,)
    )


# Always: each form, and a network of any number of images (`test_any_batch`).
@pytest.mark.nightly
@pytest.mark.parametrize("dtype", rarely((torch.float16, torch.float32), (torch.float16,)))
@pytest.mark.parametrize("model", rarely(NETWORKS, (Unet,)))
def test_a_network_has_all_convolutions_in_kernels_that_take_images_of_any_size(model, dtype):
    net, program = exported(model, dtype)
    planned = Planned.of(load(program), GPU, H200, POLICY)
    assert "fallback" not in {g.kernel_class for g in planned.plan.groups}
    emulated = EmulatedModule.of(planned)
    assert not emulated.cuts
    for sizes in SIZES[model]:
        x = torch.randn(*NETWORKS[model][0][:2], *sizes, dtype=dtype)
        (found,) = emulated([x.numpy()])
        with torch.no_grad():
            wanted = net.double()(x.double())
        net.to(dtype)
        tolerance = 5e-3 if dtype == torch.float16 else 1e-4
        torch.testing.assert_close(
            torch.tensor(found).double(), wanted, atol=tolerance, rtol=tolerance
        )
