"""Bits of numbers: compiled with all checks, and as PyTorch has them."""

import math

import pytest
import torch

import tvm_fusion
from tests.support.emulated_programs import emulated
from tests.support.frontend_tools import Function
from tvm_fusion.errors import FrontendError
from tvm_fusion.fuzz.torch_program import Input, Program, Statement
from tvm_fusion.fuzz.verdict import RIGHT

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
EDGES = [0.0, -0.0, 1.5, -2.0, math.inf, -math.inf, math.nan]


def compiled(function, *inputs):
    return tvm_fusion.compile((Function(function), inputs), "llvm")


def edges(dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    numbers = [*EDGES, info.max, info.min, info.tiny, -info.tiny, info.smallest_normal / 4]
    return torch.tensor(numbers, dtype=dtype)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_bits_of_computed_numbers_and_numbers_of_computed_bits(dtype):
    integer = INTEGERS[dtype.itemsize]

    def function(x, y, i):
        return (
            torch.copysign(x, y), torch.signbit(x), x.view(integer), (y * 3).view(integer) + 1,
            (i ^ 1).view(dtype),
        )  # fmt: skip

    x, y = edges(dtype), edges(dtype).flip(0)
    inputs = x, y, x.view(integer)
    for result, wanted in zip(compiled(function, *inputs)(*inputs), function(*inputs), strict=True):
        number = wanted.is_floating_point()
        assert (
            torch.allclose(result, wanted, rtol=0, atol=0, equal_nan=True)
            if number
            else (torch.equal(result, wanted))
        )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_halves_have_their_bits(dtype):
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    numbers = bits.view(dtype)
    numbers = torch.where(numbers.isnan(), math.nan, numbers)  # the payload of NaN is not kept

    def function(bits, numbers):
        return bits.view(dtype).float(), numbers.view(torch.int16)

    found, back = compiled(function, bits, numbers)(bits, numbers)
    assert torch.equal(found.nan_to_num(7.0), bits.view(dtype).float().nan_to_num(7.0))
    assert torch.equal(back, numbers.view(torch.int16))


def test_elements_are_joined_and_taken_apart():
    def function(bytes_, half, single, mask):
        return (
            bytes_.view(torch.int32), bytes_.view(torch.float32), half.view(torch.float32),
            single.view(torch.float64), single.view(torch.uint8), single.view(torch.bfloat16),
            mask.view(torch.int8),
        )  # fmt: skip

    generator = torch.Generator().manual_seed(0)
    single = torch.rand(3, 4, generator=generator) + 1
    half = (torch.rand(3, 8, generator=generator) + 1).half()
    inputs = torch.arange(64, dtype=torch.uint8).view(4, 16), half, single, single > 1.5
    for result, wanted in zip(compiled(function, *inputs)(*inputs), function(*inputs), strict=True):
        assert result.dtype == wanted.dtype
        assert torch.equal(result, wanted)


def test_bits_as_booleans_are_refused():
    with pytest.raises(FrontendError, match=r"viewed as torch\.bool: take real numbers"):
        compiled(lambda x: x.view(torch.bool), torch.zeros(4, dtype=torch.uint8))


def test_a_gpu_looks_at_the_same_bits():
    inputs = Input("x0", "torch.randn((16, 17))"), Input("x1", "torch.randn((16, 17)).half()")
    statements = (
        Statement("v0", "{out} = torch.copysign({0} + 1, {1})", ("x0", "x1")),
        Statement(
            "v1", "{out} = torch.signbit(torch.copysign({0}, {1})) | ({1} < 0)", ("x1", "v0")
        ),
    )
    program = Program(inputs, statements, ("v0", "v1"))
    assert emulated(program, "nvidia_h100").verdict.kind == RIGHT
