"""Slices that are written into, ELUs with scales, bounds that are tensors: numbers as in torch."""

import pytest
import torch
import torch.nn.functional as F

import tvm_fusion
from tests.support.frontend_tools import Function, check


def written(*where, value=None):
    """A copy of x with 2 x + 1, or a number, in a part of it."""

    def function(x):
        y = x.clone()
        y[where] = x[where] * 2 + 1 if value is None else value
        return y

    return function


@pytest.mark.one_in(21)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize(
    "where",
    [
        (slice(2, 5),),
        (slice(None, 1),),
        (slice(-2, None),),
        (slice(None), slice(7, 8, 2)),
        (slice(None), slice(1, 9, 3)),
        (slice(None, None, 2),),
        (slice(3, 4), slice(None, None, 4)),
        (slice(None), slice(8, 99, 5)),
        (slice(None),),
        (slice(4, 2),),
    ],
    ids=str,
)
def test_a_slice_is_written_as_in_pytorch(where, dtype):
    x = (torch.randn(7, 9) * 10).to(dtype)
    check(written(*where), x)
    check(written(*where, value=3), x)


def test_a_slice_is_written_and_the_result_turned():
    def function(x):
        y = x.clone()
        y[11:] += 1
        return torch.rot90(y, 3)

    check(function, torch.randn(16, 17))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "function",
    [F.selu, F.elu, lambda x: F.elu(x, 1.3), lambda x: F.celu(x, 0.7)],
    ids=["selu", "elu", "elu 1.3", "celu 0.7"],
)
def test_elus_have_their_scales(function):
    check(function, torch.randn(5, 33) * 2)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_values_are_clamped_to_tensors(dtype):
    x, low, high = (torch.randn(5, 9).to(dtype) for _ in range(3))
    check(lambda x, low: torch.clamp(x, min=low), x, low)
    check(lambda x, low, high: torch.clamp(x, low, high), x, low, high.float().abs())
    check(lambda x, y: F.cosine_similarity(x, y, -1), x, low)


def test_a_slice_with_steps_is_written_by_compiled_kernels():
    function = Function(written(slice(60, 122, 2)))
    x = torch.randn(140)
    compiled = tvm_fusion.compile(function, "llvm", example_inputs=(x,), verify=False)
    torch.testing.assert_close(compiled(x), function(x))
