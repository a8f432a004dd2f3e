"""Weights that are composed of other tensors (DTensor, quantised ones)."""

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import tvm_fusion.torch_backend  # noqa: F401 - makes the backend known


def test_new_values_of_weights_in_parts_are_seen():
    layer = nn.Linear(8, 4)
    layer.weight = nn.Parameter(TwoTensor(torch.randn(4, 8), torch.randn(4, 8)))
    other = nn.Linear(8, 4)
    model = nn.Sequential(layer, nn.ReLU())
    x = torch.randn(3, 8)
    with torch.no_grad():
        fused = torch.compile(model, backend="tvm_fusion", options={"verify": False})
        for factor in (1.0, 0.5, -2.0, 3.0):  # in time it becomes an input
            layer.weight.mul_(factor)
            for part in ("a", "b"):
                other.weight.copy_(getattr(layer.weight, part))
                other.bias.copy_(layer.bias)
                torch.testing.assert_close(getattr(fused(x), part), other(x).relu())
