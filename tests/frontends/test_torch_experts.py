"""Rows in groups, each by a matrix of its own, and what models of experts have beside them."""

import numpy as np
import pytest
import torch
from torch import nn

import tvm_fusion
from tests.support.frontend_tools import check
from tvm_fusion.errors import FrontendError


@pytest.mark.parametrize("ends", [(2, 2, 7), (0, 0, 7), (7, 7, 7)])
def test_rows_are_multiplied_by_the_matrix_of_their_group(ends):
    torch.manual_seed(0)
    x, weight = torch.randn(7, 16), torch.randn(3, 16, 8)
    check(
        lambda *tensors: nn.functional.grouped_mm(*tensors[:2], offs=tensors[2]),
        x.bfloat16(),
        weight.bfloat16(),
        torch.tensor(ends, dtype=torch.int32),
    )


def test_rows_of_no_group_are_zero_where_the_model_says_so():
    import transformers.integrations.moe  # noqa: F401 (registers the operator)

    check(
        torch.ops.transformers.grouped_mm_fallback,
        torch.randn(5, 4),
        torch.randn(2, 4, 3),
        torch.tensor([1, 3]),
    )


class Asserted(nn.Module):
    def forward(self, x):
        torch._check_tensor_all(x > 0)
        return x * 2


def test_assertions_of_values_are_dropped():
    inputs = (torch.ones(3),)
    compiled = tvm_fusion.compile(Asserted(), "llvm", example_inputs=inputs, verify=False)
    np.testing.assert_array_equal(compiled(*inputs), [2, 2, 2])


class Kept(nn.Module):
    """Tensors that are neither buffers nor inputs."""

    def __init__(self):
        super().__init__()
        self.kept = [torch.zeros(3)]

    def forward(self, x):
        self.kept[0][1:].add_(1)
        return x + self.kept[0]


def test_a_tensor_that_the_model_keeps_and_writes_is_refused_with_its_line():
    with pytest.raises(FrontendError, match=r"add_.*test_torch_experts.py:\d+.*keeps as an attri"):
        tvm_fusion.compile(Kept(), "llvm", example_inputs=(torch.ones(3),), verify=False)
