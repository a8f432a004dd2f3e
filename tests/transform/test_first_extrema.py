"""argmax and argmin of rows in which no element is better than the worst: the first place."""

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.relax import op

import tvm_fusion
from tvm_fusion.check.plain import plain_build, plain_module
from tvm_fusion.check.reference import runner
from tvm_fusion.config import load_policy, load_profile, resolve_target
from tvm_fusion.flow.planned import Planned

from ..support.graphs import module
from ..support.module_on_cpu import EmulatedModule

LLVM = resolve_target("llvm")[0]
HW = load_profile("nvidia_h100")
WORST = {"uint8": 0, "int8": -128, "int32": -(2**31), "float32": -np.inf}
SHAPE = (3, 40)


def found(bb, x, name, axis):
    return getattr(op, name)(x, axis)


def mirrored(value, dtype):
    """The worst for a minimum."""
    return -value if dtype == "float32" else np.iinfo(dtype).max


@pytest.mark.one_in(6)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", WORST)
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_a_row_of_the_worst_has_its_first_place(name, dtype, axis):
    worst = WORST[dtype] if name == "argmax" else mirrored(WORST[dtype], dtype)
    x = np.full(SHAPE, worst, dtype)
    x[1, 7] = 1  # better than the worst
    mod = module(lambda bb, x: found(bb, x, name, axis), (SHAPE, dtype))
    wanted = getattr(np, name)(x, axis)
    np.testing.assert_array_equal(tvm_fusion.compile(mod, "llvm", verify=False)(x), wanted)
    (plain,) = runner(plain_build(plain_module(mod, LLVM), LLVM))([x])
    np.testing.assert_array_equal(plain, wanted)
    planned = Planned.of(mod, HW.to_target(), HW, load_policy(None))
    np.testing.assert_array_equal(EmulatedModule.of(planned)([x])[0], wanted)


def test_what_is_fused_with_it_stays_fused():
    def scaled(bb, x):
        return bb.emit(op.argmax(bb.emit(op.multiply(x, relax.const(2.0))), 1))

    mod = module(scaled, (SHAPE, "float32"))
    planned = Planned.of(mod, HW.to_target(), HW, load_policy(None))
    assert [g.kernel_class for g in planned.plan.groups] == ["row"]


def test_any_number_of_rows():
    rows = tirx.Var("rows", "int64")
    mod = module(lambda bb, x: op.argmax(x, 1), ((rows, 40), "float32"))
    compiled = tvm_fusion.compile(mod, "llvm", verify=False)
    for count in (1, 3):
        x = np.full((count, 40), -np.inf, "float32")
        np.testing.assert_array_equal(compiled(x), np.zeros(count))
