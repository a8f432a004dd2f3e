"""Layers as PyTorch has them, also where it has short cuts and special values."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tvm_fusion

from ..support.frontend_tools import Function

NAN = float("nan")


CASES = {
    "unequal": (lambda x: (x != 1, x == 1, torch.where(x != 1, x * 2, 0.0)), [1.0, NAN, 2.0]),
    "hinge": (
        lambda x: F.hinge_embedding_loss(x * 0.5, x, reduction="none"),
        [1.0, NAN, -1.0, 0.5],
    ),
    "softmax of a scalar": (lambda x: (torch.softmax(x, 0), torch.log_softmax(x, -1)), 2.0),
    "searches": (
        lambda x: (
            torch.bucketize(x, torch.tensor([0.0, 1.0, 2.0]), right=True),
            torch.searchsorted(torch.tensor([0.0, 1.0, NAN]), x.half(), out_int32=True),
            torch.searchsorted(torch.tensor([[0, 1, 1, 2]]), x[None].nan_to_num().int()),
        ),
        [0.0, NAN, 1.0, -1.0, 9.0],
    ),
    "maxima of NaN": (
        lambda x: F.max_pool2d(x, 2, 1, return_indices=True),
        [[[[1.0, NAN, 2.0], [NAN, 0.0, NAN], [1.0, 1.0, 1.0]]]],
    ),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", CASES)
def test_special_values(name):
    function, numbers = CASES[name]
    x = torch.tensor(numbers)
    compiled = tvm_fusion.compile(Function(function), "llvm", example_inputs=(x,))
    torch.testing.assert_close(compiled(x), function(x), equal_nan=True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.topk(x[0, 0], 3),  # NaN among others: PyTorch takes any
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1),  # NaN in a filter
        lambda x, w: torch.linalg.svdvals(w),
    ],
)
def test_what_pytorch_leaves_open_is_not_compared(function):
    inputs = torch.randn(1, 4, 5, 16), torch.randn(4, 3, 3, 3)
    compiled = tvm_fusion.compile(Function(function), "llvm", example_inputs=inputs)
    torch.testing.assert_close(compiled(*inputs), function(*inputs), atol=1e-4, rtol=1e-4)


def test_masked_transformers_compute_what_they_are_trained_with():
    """In evaluation mode PyTorch packs what the mask leaves, and fills the rest with zeros."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    packs = torch.backends.mha.get_fastpath_enabled()
    x, padding = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False, True, True]])

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = model

        def forward(self, x, padding):
            return self.encoder(x, src_key_padding_mask=padding)

    compiled = tvm_fusion.compile(Masked().eval(), "llvm", example_inputs=(x, padding))
    wanted = model(x, src_key_padding_mask=padding).detach()  # with gradients, so without packing
    torch.testing.assert_close(compiled(x, padding), wanted, atol=1e-5, rtol=1e-4)
    assert torch.backends.mha.get_fastpath_enabled() == packs


def test_inputs_are_given_as_the_model_takes_them():
    cell, x = nn.LSTMCell(5, 4).eval(), torch.randn(3, 5)
    state = torch.randn(3, 4), torch.randn(3, 4)
    compiled = tvm_fusion.compile(cell, "llvm", example_inputs=(x, state))
    for given in ((x, state), (x, list(state)), (x, *state)):
        for one, wanted in zip(compiled(*given), cell(x, state), strict=True):
            torch.testing.assert_close(one, wanted, atol=1e-5, rtol=1e-4)


def test_numbers_within_lists_are_part_of_the_program():
    x, target = torch.randn(9, 2, 5).log_softmax(2), torch.tensor([[1, 2], [3, 3]])
    loss = nn.CTCLoss()
    compiled = tvm_fusion.compile(loss, "llvm", example_inputs=(x, target, (9, 8), (2, 1)))
    torch.testing.assert_close(compiled(x, target, (9, 8), (2, 1)), loss(x, target, (9, 8), (2, 1)))
    with pytest.raises(tvm_fusion.errors.InputError, match="compiled for 8"):
        compiled(x, target, (9, 7), (2, 1))
