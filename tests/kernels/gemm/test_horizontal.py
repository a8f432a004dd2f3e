"""Independent pointwise work of different sizes in one launch: plans, refusals, numbers."""

import numpy as np
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_profile
from tvm_fusion.kernels.pointwise.kernel import emit_pointwise
from tvm_fusion.kernels.program.analysis import analyze

from ...support.cuda_on_cpu import run_cuda_on_cpu
from ...support.graphs import module, plan_of
from ...support.kernel_cases import assert_close, fuse, outputs_of

H200 = load_profile("nvidia_h200")
SIZES = [(40, 32), (31,), (5, 7, 3)]


def momentum(bb, *tensors):
    """New momentum and parameter of each (parameter, gradient, momentum)."""
    results = []
    for p, g, m in zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True):
        dtype = str(p.ty.dtype)
        m = bb.emit(op.add(bb.emit(op.multiply(m, relax.const(0.9, dtype))), g))
        step = bb.emit(op.multiply(m, relax.const(0.01, dtype)))
        results += [bb.emit(op.subtract(p, step)), m]
    return relax.Tuple(results)


def shapes(sizes, dtype="float32"):
    return [(size, dtype) for size in sizes for _ in range(3)]


def test_updates_of_tensors_of_unequal_sizes_are_one_launch():
    (group,) = plan_of(module(momentum, *shapes(SIZES))).plan.groups
    assert group.kernel_class == "pointwise"
    assert len(group.ops) == 4 * len(SIZES)


def test_one_launch_computes_all_of_them_right():
    func = fuse(momentum, *shapes(SIZES))
    rng = np.random.default_rng(3)
    inputs = [rng.standard_normal(shape).astype(dtype) for shape, dtype in shapes(SIZES)]
    results = outputs_of(func, len(inputs))
    run_cuda_on_cpu(emit_pointwise(analyze(func), H200), [*inputs, *results])
    for k in range(len(SIZES)):
        p, g, m = (x.astype(np.float64) for x in inputs[3 * k : 3 * k + 3])
        assert_close(results[2 * k], p - 0.01 * (0.9 * m + g), "float32")
        assert_close(results[2 * k + 1], 0.9 * m + g, "float32")


def test_work_that_waits_for_the_other_group_is_not_joined():
    def emit(bb, x, y):
        total = bb.emit(op.sum(bb.emit(op.exp(x)), axis=[0, 1]))
        return relax.Tuple([bb.emit(op.exp(x)), bb.emit(op.add(y, total))])

    planned = plan_of(module(emit, ((64, 64), "float32"), ((128,), "float32")))
    owner = {name: i for i, group in enumerate(planned.plan.groups) for name in group.ops}
    assert len(set(owner.values())) > 1


def test_a_cpu_keeps_them_apart():
    groups = plan_of(module(momentum, *shapes(SIZES)), "llvm").plan.groups
    assert len(groups) == len(SIZES)


def test_an_output_computed_from_one_of_another_size_is_no_side_by_side_work():
    def emit(bb, x):
        y = bb.emit(op.exp(x))
        return relax.Tuple([y, bb.emit(op.tanh(bb.emit(op.strided_slice(y, [0], [0], [8]))))])

    groups = plan_of(module(emit, ((4096, 4096), "float32"))).plan.groups
    assert len(groups) == 2
