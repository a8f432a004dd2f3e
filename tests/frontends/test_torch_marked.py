"""Tensors whose sign or conjugate PyTorch only marks: their memory holds other numbers."""

import pytest
import torch
from torch import nn

import tvm_fusion

X = torch.randn(4, 6)
Z = torch.complex(torch.randn(4), torch.randn(4))
MARKED = {
    "negative": (X, torch._neg_view(X)),
    "conjugate": (Z, Z.conj()),
    "imaginary part": (Z.imag, Z.conj().imag),
}


class Twice(nn.Module):
    def forward(self, x):
        return x * 2 + 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", MARKED)
def test_they_are_written_out(case):
    plain, marked = MARKED[case]
    for example in (plain, marked):
        compiled = tvm_fusion.compile(Twice(), "llvm", example_inputs=(example,))
        for x in (plain, plain, marked, plain):
            torch.testing.assert_close(compiled(x), x * 2 + 1)


def test_marked_buffers_are_written_out():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", Z.conj())

        def forward(self, x):
            return x * self.scale

    compiled = tvm_fusion.compile(Scaled(), "llvm", example_inputs=(Z,))
    torch.testing.assert_close(compiled(Z), Z * Z.conj())


def test_written_ones_have_the_new_values():
    class Writes(nn.Module):
        def forward(self, x, y):
            x.mul_(3)
            return x + y

    compiled = tvm_fusion.compile(Writes(), "llvm", example_inputs=(X.clone(), X))
    for _ in range(2):
        x = torch._neg_view(X.clone())
        wanted = X * -3
        torch.testing.assert_close(compiled(x, X), wanted + X)
        torch.testing.assert_close(x.resolve_neg(), wanted)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", MARKED)
def test_they_run_in_eager_mode_through_torch_compile(case):
    plain, marked = MARKED[case]
    compiled = torch.compile(Twice(), backend="tvm_fusion")
    with torch.no_grad():
        torch.testing.assert_close(compiled(plain), plain * 2 + 1)
        with pytest.warns(UserWarning, match="that PyTorch only marks"):
            torch.testing.assert_close(compiled(marked), marked * 2 + 1)
        torch.testing.assert_close(compiled(plain), plain * 2 + 1)
        torch.testing.assert_close(compiled(marked), marked * 2 + 1)
