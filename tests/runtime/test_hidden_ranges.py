"""Integers with bounds that become floats: TVM's analysis of their products ends in an error."""

import numpy as np
import pytest
import torch

import tvm_fusion


class Rotary(torch.nn.Module):
    """Angles of positions behind a first one, as language models have them."""

    def forward(self, first, rates):
        angles = (torch.arange(12) + first).float()[:, None] * rates[None]
        angles = torch.cat([angles, angles], -1)
        return angles.cos().half(), angles.sin().half()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", ["nvidia_h200", "llvm"])
def test_angles_of_counted_positions_compile(target):
    inputs = (torch.tensor(3), torch.rand(16))
    module = tvm_fusion.compile(torch.export.export(Rotary(), inputs), target, verify=False)
    if target == "llvm":
        for got, wanted in zip(module(*inputs), Rotary()(*inputs), strict=True):
            np.testing.assert_allclose(got, wanted, atol=2e-3)
