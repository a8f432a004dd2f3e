"""Operands that are read backwards: the TMA takes no pitch below 0."""

import re

import numpy as np
import pytest
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.flow.planned import Planned

from ...support.graphs import module
from ...support.module_on_cpu import EmulatedModule

HW = load_profile("nvidia_h100")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_product_of_a_flipped_operand_is_right_on_a_gpu(axis):
    mod = module(
        lambda bb, x, w: op.matmul(bb.emit(op.flip(x, axis)), w),
        ((64, 64), "float16"),
        ((64, 64), "float16"),
    )
    planned = Planned.of(mod, HW.to_target(), HW, load_policy(None))
    calls = re.findall(r"cuTensorMapEncodeTiled.*", planned.write().mod.script())
    assert not any(re.search(r", -\d", call) for call in calls)
    x, w = (np.random.default_rng(n).standard_normal((64, 64)).astype("float16") for n in (0, 1))
    (found,) = EmulatedModule.of(planned)([x, w])
    wanted = np.flip(x, axis).astype("float64") @ w.astype("float64")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-3 * np.abs(wanted).max())
