"""Medians on a GPU: kernels, where TVM calls a sort of the host."""

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.relax import op

from tvm_fusion.check.plain import plain_module
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.flow.planned import Planned
from tvm_fusion.ir.blocks import calls_host
from tvm_fusion.transform.lower.sorts import OpenMedians
from tvm_fusion.transform.pipeline import lower

from ..support.graphs import module
from ..support.module_on_cpu import EmulatedModule

HW = load_profile("nvidia_h100")
SHAPE = (3, 7, 4)


def medians(axis, keepdims):
    def build(bb, x):
        found = op.median(op.multiply(x, relax.const(2.0)), axis, keepdims)
        return found[0] if axis is not None else found

    return build


@pytest.mark.one_in(9)
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_they_run_in_kernels(axis, keepdims):
    mod = module(medians(axis, keepdims), (SHAPE, "float32"))
    emulated = EmulatedModule.of(Planned.of(mod, HW.to_target(), HW, load_policy(None)))
    x = np.random.default_rng(0).standard_normal(SHAPE).astype("float32")
    (given,) = emulated([x])
    ordered = np.sort(2 * (x.ravel() if axis is None else x), axis=-1 if axis is None else axis)
    count = ordered.shape[-1 if axis is None else axis]
    wanted = np.take(ordered, (count - 1) // 2, axis=-1 if axis is None else axis)
    assert tuple(given.shape) == tuple(int(e) for e in mod["main"].ret_ty.shape.values)
    np.testing.assert_array_equal(given.reshape(wanted.shape), wanted)


@pytest.mark.parametrize("lowered", [lower, plain_module])
def test_no_kernel_calls_the_host(lowered):
    low = lowered(module(medians(1, False), (SHAPE, "float32")), HW.to_target())
    bodies = [f.body for f in low.functions.values() if not isinstance(f, relax.Function)]
    assert bodies
    assert not any(calls_host(body) for body in bodies)


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (lambda bb, x: op.sum(x, 1), SHAPE),
        (lambda bb, x: op.median(x, []), SHAPE),
        (lambda bb, x: op.median(x, [0, 1]), SHAPE),
        (lambda bb, x: op.median(x, 1), (3, tirx.Var("n", "int64"))),
    ],
    ids=["no median", "no axis", "two axes", "symbolic"],
)
def test_other_modules_stay_the_same(call, shape):
    mod = module(lambda bb, x: bb.emit(call(bb, x)), (shape, "float32"))
    assert OpenMedians()(mod).same_as(mod)
