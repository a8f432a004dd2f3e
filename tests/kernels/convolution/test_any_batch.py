"""Convolutions of a symbolic number of images: each form at several numbers of them, on the
emulator and on a CPU, against float64; whole networks; what is refused.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import tvm_fusion
from tvm_fusion.config import load_policy, load_profile, resolve_target
from tvm_fusion.errors import Unsupported
from tvm_fusion.flow.planned import Planned
from tvm_fusion.frontends import load
from tvm_fusion.kernels.convolution.boxes import box_shape
from tvm_fusion.kernels.convolution.cpu.kernel import ways
from tvm_fusion.kernels.convolution.forms import CUDA_WRITER
from tvm_fusion.kernels.convolution.geometry import Convolution, read_convolution
from tvm_fusion.kernels.convolution.hopper import IMAGES as IN_BOXES
from tvm_fusion.kernels.convolution.kernel_class import ConvolutionClass
from tvm_fusion.kernels.convolution.typical import numbers_of
from tvm_fusion.kernels.cpu.contraction.panels import wanted_panels
from tvm_fusion.kernels.cpu.machine import machine_of
from tvm_fusion.kernels.gemm.mma.plan import MmaConfig

from ...support.conv_suites import last
from ...support.convolutions import Conv
from ...support.cuda_on_cpu import run_cuda_on_cpu
from ...support.helpers_tir import call, compile_cpu
from ...support.hopper_on_cpu import run_hopper_on_cpu
from ...support.module_on_cpu import EmulatedModule

GPU, H200 = resolve_target("nvidia_h200")
CPU = load_profile("llvm")
POLICY, FAST = load_policy(None), load_policy({"rounding": "fast"})
FORMS = {form.name: form for form in CUDA_WRITER.forms}
IMAGES = (1, 2, 5)
TILES = {"mma": MmaConfig(32, 64, 16, 32, 64, 3)}
TOLERANCE = {"float16": 3e-3, "float32": 1e-5}


def read(conv: Conv) -> Convolution:
    found = read_convolution(conv.func(), conv.exact)
    assert found.is_symbolic
    return found


def close(conv: Conv, outputs, inputs) -> None:
    for got, expected in zip(outputs, conv.expected(inputs), strict=True):
        error = np.abs(got.astype("float64") - expected).max()
        assert error <= TOLERANCE[conv.dtype] * max(1.0, np.abs(expected).max())


LAST = last((5, 7), (3, 3), 64, 24, batch=1, epilogue="residual")
FIRST = Conv((6, 5), (3, 3), 5, 12, padding=(1,) * 4, epilogue="scale_shift", dtype="float16")
UP = Conv((4, 3), (3, 3), 16, 24, strides=(2, 2), padding=(1,) * 4, transposed=True)
DEPTHWISE = replace(FIRST, channels=8, filters=8, groups=8)
KINDS = {
    "hopper": ("hopper", LAST),
    "hopper, steps": ("hopper", last((9, 7), (3, 3), 64, 72, batch=1, stride=2)),
    "hopper, groups": ("hopper", last((5, 7), (3, 3), 48, 32, batch=1, groups=2)),
    "hopper, two parts": ("hopper", last((5, 7), (3, 3), 128, 24, batch=1, parts=(64, 64))),
    "hopper, one result an image": (
        "hopper",
        last((3, 3), (3, 3), 64, 24, batch=1, padding=(0,) * 4, epilogue="none"),
    ),
    "hopper, computed": ("hopper", replace(LAST, prologue=True)),
    "rims": ("rims", LAST),
    "streams": ("streams", replace(LAST, prologue=True)),
    "depthwise": ("depthwise", DEPTHWISE),
    "depthwise, channels last": (
        "depthwise",
        replace(DEPTHWISE, data_layout="NHWC", weight_layout="OHWI", epilogue="two_outputs"),
    ),
    "runs": ("runs", last((11, 9), (5, 5), 3, 12, batch=1, stride=2, epilogue="residual")),
    "mma, by copies": ("mma", replace(LAST, channels=10)),
    "mma, element by element": ("mma", FIRST),
    "mma, a line": ("mma", Conv((19,), (5,), 6, 8, padding=(2, 2), dtype="float16")),
    "mma, a phase each": ("mma", replace(UP, channels=8, filters=6, dtype="float16")),
    "simt": ("simt", replace(FIRST, dtype="float32", sizes=(3, 4), epilogue="residual")),
}


def rarely(cases, in_ci):
    """Cases of which only some run in CI."""
    return [c if c in in_ci else pytest.param(c, marks=pytest.mark.nightly) for c in cases]


IN_CI = ("hopper", "rims", "streams", "depthwise", "runs", "mma, by copies")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", rarely(KINDS, IN_CI))
def test_each_form_computes_any_number_of_images(kind):
    form, conv = KINDS[kind]
    conv = replace(conv, any_batch=True)
    found = read(conv)
    config = TILES.get(form) or FORMS[form].rank(found, H200, POLICY)[0][1]
    kernel = FORMS[form].emit(found, H200, config)
    run = run_hopper_on_cpu if form in ("hopper", "rims", "streams") else run_cuda_on_cpu
    for images in IMAGES:
        own = replace(conv, batch=images)
        inputs, outputs = own.arrays(), own.poisoned()
        assert run(kernel, [*inputs, *outputs]) == 1
        close(own, outputs, inputs)


def test_boxes_suit_few_images_and_many():
    assert box_shape((8, 7, 7), (1, 1, 1), (0, 2, 2)) == (8, 1, 8)
    found = read(replace(LAST, any_batch=True))
    images = found.windows[0].size
    for sizes, shape in (((images, 7, 7), (1, 8, 8)), ((images, 1, 1), (64, 1, 1))):
        many = numbers_of(found, sizes, IN_BOXES)
        assert box_shape(sizes, (1, 1, 1), (0, 2, 2), many=many) == shape


ON_CPU = {
    "Winograd": Conv((9, 10), (3, 3), 24, 32, padding=(1,) * 4, epilogue="residual"),
    "filters": replace(FIRST, sizes=(15, 14), strides=(2, 2), filters=48, dtype="float32"),
    "positions": replace(DEPTHWISE, sizes=(16, 15), dtype="float32"),
    "channels last": last((9, 11), (3, 3), 16, 24, batch=1, dtype="float32"),
    "images above positions": Conv((90,), (5,), 16, 24, padding=(2, 2), epilogue="residual"),
    "transposed": replace(UP, sizes=(7, 6)),
    "parts": Conv((9, 11), (3, 3), 40, 24, padding=(1,) * 4, parts=(16, 24), repeats=(2, 2)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", rarely(ON_CPU, ("images above positions", "parts")))
def test_direct_convolutions_on_a_cpu_take_any_number_of_images(kind):
    conv = replace(ON_CPU[kind], any_batch=True)
    func = conv.func()
    assert ways(read(conv), machine_of(CPU))
    kernel = ConvolutionClass().write(func, CPU, FAST)
    run = compile_cpu(kernel)
    for images in IMAGES:
        own = replace(conv, batch=images)
        inputs = own.arrays()
        given = list(inputs)
        for i, how in wanted_panels(kernel).items():
            given[i] = how.of(given[i])
        close(own, call(run, given, own.poisoned()), inputs)


def test_images_beside_each_other_in_memory_are_no_vectors_on_a_cpu():
    conv = Conv((9, 10), (3, 3), 24, 32, data_layout="CHWN", any_batch=True)
    with pytest.raises(Unsupported, match="symbolic number of neighbouring positions"):
        ways(read(conv), machine_of(CPU))


class Residual(nn.Module):
    """As ResNet begins: a stem, blocks with a shortcut, one with a stride, the mean."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 5, 2, 2, bias=False), nn.BatchNorm2d(16))
        self.a, self.b = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.c, self.d = nn.Conv2d(16, 32, 3, 2, 1), nn.Conv2d(16, 32, 1, 2)
        self.last = nn.Linear(32, 10)

    def forward(self, x):
        x = self.stem(x).relu()
        x = (x + self.b(self.a(x).relu())).relu()
        x = (self.c(x) + self.d(x)).relu()
        return self.last(x.mean((2, 3)))


class Mobile(nn.Module):
    """As MobileNet's blocks: 1 x 1, depthwise, 1 x 1 with a shortcut; pooling before."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.wide, self.thin = nn.Conv2d(8, 24, 1), nn.Conv2d(24, 8, 1)
        self.apart = nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.last = nn.Conv2d(8, 16, 1)

    def forward(self, x):
        x = nn.functional.max_pool2d(nn.functional.hardswish(self.stem(x)), 2)
        y = nn.functional.hardswish(self.apart(nn.functional.hardswish(self.wide(x))))
        return self.last(x + self.thin(y)).mean((2, 3))


def exported(model: type[nn.Module], dtype: torch.dtype):
    torch.manual_seed(0)
    net = model().eval()
    program = torch.export.export(
        net.to(dtype),
        (torch.randn(3, 3, 13, 12).to(dtype),),
        dynamic_shapes=({0: Dim("images", max=7)},),
    )
    return net, program


# Always: each form, above, and a network on a CPU, below.
@pytest.mark.nightly
@pytest.mark.parametrize("model", rarely((Residual, Mobile), (Mobile,)))
def test_a_network_has_all_convolutions_in_kernels_that_take_any_number_of_images(model):
    net, program = exported(model, torch.float16)
    planned = Planned.of(load(program), GPU, H200, POLICY)
    assert "fallback" not in {g.kernel_class for g in planned.plan.groups}
    emulated = EmulatedModule.of(planned)
    assert not emulated.cuts
    for images in (1, 2, 5, 7):
        x = torch.randn(images, 3, 13, 12).half()
        (found,) = emulated([x.numpy()])
        with torch.no_grad():
            wanted = net.double()(x.double())
        torch.testing.assert_close(torch.tensor(found).double(), wanted, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("model", rarely((Residual, Mobile), (Residual,)))
def test_a_compiled_network_takes_any_number_of_images_on_a_cpu(model):
    net, program = exported(model, torch.float32)
    module = tvm_fusion.compile(program, target="llvm")
    for images in (1, 2, 5, 7):
        x = torch.randn(images, 3, 13, 12)
        with torch.no_grad():
            wanted = net.double()(x.double())
        net.float()
        torch.testing.assert_close(module(x).double(), wanted, atol=1e-4, rtol=1e-4)
