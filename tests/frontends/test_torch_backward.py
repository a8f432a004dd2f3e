"""Backward operators of core ATen beside PyTorch, and forms that programs write or ask sizes in."""

import pytest
import torch

from tests.support.frontend_tools import check

_aten = torch.ops.aten


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("x", "weight", "how"),
    [  # stride, padding, dilation, transposed, output padding, groups
        ((2, 4, 9, 10), (6, 2, 3, 2), ([2, 3], [1, 0], [1, 2], False, [0, 0], 2)),
        ((2, 4, 5, 6), (4, 3, 3, 2), ([2, 3], [1, 0], [1, 2], True, [1, 0], 2)),
        ((1, 4, 9), (6, 4, 3), ([2], [1], [1], False, [0], 1)),
    ],
)
def test_gradients_of_convolutions(x, weight, how):
    x, weight = torch.randn(x), torch.randn(weight)
    gradient = torch.randn_like(_aten.convolution(x, weight, None, *how))
    sizes = [gradient.shape[1]]

    def function(gradient, x, weight):
        return _aten.convolution_backward(gradient, x, weight, sizes, *how, [True] * 3)

    check(function, gradient, x, weight)


def test_gradients_of_pools():
    x = torch.randn(2, 3, 9, 8)
    pools = (
        ([2, 3], [2, 2], [1, 1], True, True, None),
        ([3, 3], [], [1, 1], False, False, None),
        ([3], [2], [0], True, False, 5),
    )
    given = [torch.randn_like(_aten.avg_pool2d(x, *pool)) for pool in pools]
    window = ([3, 2], [2, 2], [1, 1], [1, 1], True)
    largest, places = _aten.max_pool2d_with_indices(x, *window)

    def function(x, largest, places, adapted, *given):
        return (
            _aten.max_pool2d_with_indices_backward(largest, x, *window, places),
            _aten._adaptive_avg_pool2d_backward(adapted, x),
            *(_aten.avg_pool2d_backward(y, x, *pool) for y, pool in zip(given, pools, strict=True)),
        )

    check(function, x, largest, places, torch.randn(2, 3, 4, 5), *given)


def test_what_is_written_in_place_is_a_new_tensor():
    def function(x):
        angle = torch.empty_strided((4, 3), (1, 4))
        torch.atan2(x, x + 1, out=angle)
        return angle, x.clone().resize_(2, 3), x * torch.ops.aten.sym_numel(x)

    check(function, torch.randn(4, 3))
