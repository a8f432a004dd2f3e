"""Fourier transforms: their numbers beside float64, and all forms beside PyTorch."""

import pytest
import torch

import tvm_fusion
from tests.support.frontend_tools import Function, check
from tvm_fusion.errors import FrontendError
from tvm_fusion.frontends import load
from tvm_fusion.frontends.torch.complex import fourier

# Of one product, of several, of primes small and large, and of what is twice a large prime.
SIZES = (1, 2, 3, 7, 16, 100, 127, 128, 129, 256, 400, 509, 521, 768, 1021, 1024, 2042, 16000)
MOST = 6e-7  # of the norm; PyTorch's own transforms in float32 are off by up to 3e-7


def error(given: torch.Tensor, exact: torch.Tensor) -> float:
    assert given.shape == exact.shape
    return float((given - exact).norm() / exact.norm())


@pytest.mark.parametrize("n", SIZES)
def test_transforms_are_near_those_in_float64(n):
    torch.manual_seed(0)
    x, z = torch.randn(2, n), torch.randn(2, n, dtype=torch.complex64)
    half = torch.randn(2, n // 2 + 1, dtype=torch.complex64)
    wide, real = z.to(torch.complex128), x.double()
    assert error(fourier._c2c(z, [1], 0, True), torch.fft.fft(wide)) < MOST
    assert error(fourier._c2c(z, [1], 1, False), torch.fft.ifft(wide, norm="ortho")) < MOST
    assert error(fourier._r2c(x, [1], 2, True), torch.fft.rfft(real, norm="forward")) < MOST
    assert error(fourier._r2c(x, [1], 0, False), torch.fft.fft(real)) < MOST
    exact = torch.fft.irfft(half.to(torch.complex128), n)
    assert error(fourier._c2r(half, [1], 2, n), exact) < MOST


def test_a_transform_in_float64_is_exact():
    x = torch.randn(3, 1042, dtype=torch.complex128)
    assert error(fourier._c2c(x, [1], 0, True), torch.fft.fft(x)) < 2e-15


# Always: transforms beside float64, below, and signals in windows.
@pytest.mark.nightly
def test_all_forms():
    torch.manual_seed(0)
    x, z = torch.randn(3, 6, 9), torch.randn(3, 6, 5, dtype=torch.complex64)

    def function(x, z):
        fft = torch.fft
        return (
            *(
                fft.fft(x),
                fft.fft(z, 7, 1, "ortho"),
                fft.ifft(x, dim=0),
                fft.ifft(z, norm="forward"),
            ),
            *(fft.rfft(x), fft.rfft(x, 12, 0), fft.irfft(z), fft.irfft(z, 9), fft.irfft(z, 4, 1)),
            *(fft.hfft(z, 8), fft.ihfft(x, norm="ortho"), fft.fft2(x).real, fft.ifft2(z, (4, 8))),
            *(
                fft.fftn(x, dim=(0, 2)),
                fft.rfftn(x),
                fft.irfftn(z, (2, 9)),
                fft.rfft2(x, norm="forward"),
            ),
            *(fft.fftshift(fft.fft(z)), fft.fft(torch.arange(6)), x.new_zeros(2) + fft.fftfreq(2)),
        )

    check(function, x, z)


def test_signals_in_windows_come_back():
    signal, window = torch.randn(2, 400), torch.hann_window(64)

    def function(signal, window):
        spectrum = torch.stft(signal, 64, 16, window=window, return_complex=True)
        power = spectrum.abs() ** 2
        return spectrum, power, torch.istft(spectrum * 0.5, 64, 16, window=window, length=400)

    check(function, signal, window)


def test_only_what_is_read_is_computed():
    x = torch.randn(4, 16, 24)
    model = Function(lambda x: torch.fft.fftn(x, dim=(1, 2)).real)  # FNet's mixing of tokens
    module = tvm_fusion.compile(model, "llvm", example_inputs=(x,), verify=False)
    torch.testing.assert_close(module(x), model(x), rtol=1e-5, atol=1e-4)
    assert module.launches <= 4  # two products an axis, of which one has the difference


def test_a_size_that_changes_is_refused_where_it_is_transformed():
    x = torch.randn(4, 16)
    size = torch.export.Dim("size", min=3, max=64)
    free = load(Function(torch.fft.rfft), (x,), dynamic_shapes=(({0: size},),))
    assert len(free["main"].params) == 1
    with pytest.raises(FrontendError, match="an axis of symbolic size"):
        load(Function(torch.fft.rfft), (x,), dynamic_shapes=(({1: size},),))
