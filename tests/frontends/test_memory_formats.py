"""Torch tensors with channels last are taken and returned as they lie."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn as nn

import tvm_fusion
from tests.support.convolutional_blocks import BLOCKS
from tests.transform.test_assign_layouts import moving, run
from tvm_fusion.compilation import compiler
from tvm_fusion.config import resolve_target
from tvm_fusion.frontends.memory_formats import FORMATS, formats_of
from tvm_fusion.frontends.torch.model import from_exported_program
from tvm_fusion.runtime.calls.channels_last import returned, taken
from tvm_fusion.runtime.calls.signature import Signature
from tvm_fusion.torch_backend import part_calls
from tvm_fusion.transform import AssignLayouts
from tvm_fusion.transform.functions.unique_names import UniqueNames
from tvm_fusion.transform.layouts.memory_formats import MemoryFormats, takes_formats, with_formats


def last(tensor: torch.Tensor) -> torch.Tensor:
    has_format = tensor.ndim in FORMATS
    return tensor.to(memory_format=FORMATS[tensor.ndim]) if has_format else tensor


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "formats", "stay"),
    [
        ("squeeze_excite", MemoryFormats((True,), (True,)), 0),
        ("transposed_unet", MemoryFormats((True,), (True,)), 0),
        ("resnet", MemoryFormats((True,), (False,)), 0),
        ("whisper_front", MemoryFormats((False,), (False,)), 1),
    ],
)
def test_nothing_moves_at_borders_that_have_channels_last(name, formats, stay):
    make, shapes, _ = BLOCKS[name]
    torch.manual_seed(0)
    model, inputs = make().eval(), [last(torch.randn(shape)) for shape in shapes]
    with torch.no_grad():
        program, expected = torch.export.export(model, tuple(inputs)), model(*inputs)
    assert formats_of(program) == formats
    mod = from_exported_program(program, "a test")
    assert formats.fits(mod) == (name != "whisper_front")
    made = with_formats(mod, formats)
    assigned = AssignLayouts()(UniqueNames()(made))
    assert len(moving(assigned)) == stay
    given = taken(Signature.of(made).in_formats(formats), inputs)
    assert all(
        t.is_contiguous() and t.data_ptr() == x.data_ptr()
        for t, x in zip(given, inputs, strict=True)
    )
    (found,) = returned(formats, tuple(torch.from_numpy(x) for x in run(assigned, given)))
    if formats.outputs[0]:
        assert found.stride() == expected.stride()
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=2e-5)


class Contiguous(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous()


@pytest.mark.parametrize(
    ("make", "shape", "outputs"),
    [
        (lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), (2, 4, 9, 9), 1),
        (lambda: nn.Sequential(nn.Conv3d(4, 8, 3), nn.ReLU()), (2, 4, 5, 9, 9), 1),
        (lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), Contiguous()), None, 0),
        (lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), None, 0),
    ],
)
def test_outputs_lie_as_those_of_eager_mode(make, shape, outputs):
    torch.manual_seed(0)
    model, x = make().eval(), last(torch.randn(shape or (2, 4, 9, 9)))
    with torch.no_grad():
        eager = model(x)
    assert formats_of(torch.export.export(model, (x,))) == MemoryFormats((True,), (bool(outputs),))
    if eager.ndim in FORMATS:
        assert eager.is_contiguous(memory_format=FORMATS[eager.ndim]) == bool(outputs)


def test_formats_of_another_number_of_tensors_do_not_fit():
    model = nn.Conv2d(4, 4, 3)
    program = torch.export.export(model.eval(), (torch.zeros(1, 4, 8, 8),))
    mod = from_exported_program(program, "a test")
    assert MemoryFormats((True,), (True,)).fits(mod)
    assert not MemoryFormats((True, False), (True,)).fits(mod)
    assert not MemoryFormats((False,), (False,)).fits(mod)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("takes", [True, False])
def test_the_backend_keeps_formats_where_convolutions_have_channels_last(takes, monkeypatch):
    made, compile_ = [], compiler.compile
    monkeypatch.setattr(
        compiler, "compile", lambda *a, **k: made.append(compile_(*a, **k)) or made[-1]
    )
    assert takes_formats(resolve_target("nvidia_h200")[0])
    assert not takes_formats(resolve_target("llvm")[0])
    monkeypatch.setattr(part_calls, "takes_formats", lambda _target: takes)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="tvm_fusion", options={"verify": False})
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for x in (last(torch.randn(2, 4, 8, 8)), torch.randn(2, 4, 8, 8)):
            found, expected = compiled(x), model(x)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
            assert found.stride() == expected.stride()
            taken = made[-1].signature.inputs[0].shape
            assert (taken == (2, 8, 8, 4)) == (takes and not x.is_contiguous())


def test_weights_of_bfloat16_may_lie_in_channels_last():
    model = torch.nn.Conv2d(8, 4, 3).bfloat16().to(memory_format=torch.channels_last)
    x = torch.randn(1, 8, 6, 5).bfloat16().to(memory_format=torch.channels_last)
    compiled = tvm_fusion.compile(model, "llvm", example_inputs=(x,))
    torch.testing.assert_close(compiled(x), model(x).detach(), atol=1e-2, rtol=1e-2)
