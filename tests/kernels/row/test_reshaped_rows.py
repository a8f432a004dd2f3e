"""Norms whose results are reshaped, and what is computed of them then: one row kernel."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.flow.planned import Planned
from tvm_fusion.frontends import load

from ...support.module_on_cpu import EmulatedModule

H200 = load_profile("nvidia_h200")
POLICY = dataclasses.replace(load_policy(None), probe="off")


def group_norm(x, scale, shift):
    return F.group_norm(x, 4, scale, shift)


PROGRAMS = {
    "a norm of samples and channels": (lambda x: F.instance_norm(x), [(3, 5, 17, 13)]),
    "with work behind it": (lambda x: torch.tanh(F.instance_norm(x)), [(3, 5, 16, 16)]),
    "groups of columns, and a residual": (
        lambda x, s, b, r: torch.sigmoid(group_norm(x, s, b)) * r,
        [(30, 44), (44,), (44,), (30, 44)],
    ),
    "groups of channels, and a vector": (
        lambda x, s, b, v: F.silu(group_norm(x, s, b)) * v,
        [(3, 20, 7, 9), (20,), (20,), (9,)],
    ),
    "rows are cut otherwise": (
        lambda x: (torch.softmax(x.reshape(6, 4, 10), -1).reshape(24, 10) * 2).reshape(3, 80),
        [(24, 10)],
    ),
}


def planned(program, inputs):
    class Module(torch.nn.Module):
        def forward(self, *args):
            return program(*args)

    found = load((Module(), tuple(inputs)))
    return Planned.of(found, H200.to_target(), H200, POLICY)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("program", "shapes"), PROGRAMS.values(), ids=PROGRAMS)
def test_what_follows_a_reshaped_norm_is_in_its_kernel(program, shapes):
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    plan = planned(program, inputs)
    assert [g.kernel_class for g in plan.plan.groups if g.kernel_class != "view"] == ["row"]
    module = EmulatedModule.of(plan)
    (got,) = module([x.numpy() for x in inputs])
    assert not module.failures
    assert not module.cuts
    expected = program(*(x.double() for x in inputs)).numpy()
    assert np.abs(got - expected).max() <= 1e-6 * np.abs(expected).max()


def test_a_row_value_is_not_read_by_another_shape():
    """The mean of a row stands beside elements of other rows."""

    def program(x):
        return torch.softmax(x, -1).reshape(4, 36) * x.sum(-1).reshape(36)

    plan = planned(program, [torch.randn(36, 4)])
    assert len([g for g in plan.plan.groups if g.kernel_class != "view"]) > 1
