"""Tensors without elements: nothing computes them, on any target."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

import tvm_fusion
from tvm_fusion.errors import InputError
from tvm_fusion.transform.lower.drop_empty import DropEmpty

CASES = {
    "rows": (lambda x: op.exp(op.add(x, x)), [(0, 8)]),
    "columns": (lambda x: op.exp(op.add(x, x)), [(8, 0)]),
    "softmax of no rows": (lambda x: op.nn.softmax(x), [(0, 8)]),
    "softmax of no columns": (lambda x: op.nn.softmax(x), [(8, 0)]),
    "norm": (lambda x, g: op.nn.layer_norm(x, g, g, [-1]), [(0, 8), (8,)]),
    "sums of no rows": (lambda x: op.sum(x, [-1]), [(0, 8)]),
    "sums of nothing": (lambda x: op.exp(op.sum(x, [-1])), [(8, 0)]),
    "column sums of nothing": (lambda x: op.exp(op.sum(x, [0])), [(0, 8)]),
    "turned": (lambda x: op.exp(op.permute_dims(x)), [(0, 8)]),
    "product of no rows": (lambda x, y: op.exp(op.matmul(x, y)), [(0, 8), (8, 16)]),
    "product of no columns": (lambda x, y: op.exp(op.matmul(x, y)), [(8, 4), (4, 0)]),
    "product of no depth": (lambda x, y: op.exp(op.matmul(x, y)), [(8, 0), (0, 16)]),
    "no batch": (lambda x, y: op.matmul(x, y), [(0, 8, 4), (0, 4, 6)]),
    "convolution": (lambda x, w: op.nn.conv2d(x, w), [(0, 8, 8, 8), (4, 8, 3, 3)]),
    "joined": (lambda x, y: op.exp(op.concat([op.exp(x), op.tanh(y)], 0)), [(0, 8), (4, 8)]),
    "padded": (lambda x: op.exp(op.nn.pad(op.exp(x), [0, 1, 0, 0])), [(0, 4)]),
    "cut": (lambda x: op.split(op.exp(x), [0, 3], 0), [(8, 4)]),
}


def module(build, *shapes):
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{i}", relax.TensorType(s, "float32")) for i, s in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(build(*params)))
        builder.emit_func_output(out)
    return builder.get()


def arrays(value):
    values = value if isinstance(value, list | tuple) else [value]
    return [np.asarray(v.numpy() if hasattr(v, "numpy") else v) for v in values]


def assert_written(compiled):
    assert not [r for r in compiled.plan.refusals if r.code.value in ("writer", "build")]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_a_module_with_an_empty_tensor_runs_on_the_cpu(name):
    build, shapes = CASES[name]
    mod = module(build, *shapes)
    compiled = tvm_fusion.compile(mod, "llvm", verify=True)
    assert_written(compiled)
    found = arrays(compiled(*[np.ones(s, "float32") for s in shapes]))
    ty = mod["main"].ret_ty
    fields = ty.fields if isinstance(ty, relax.TupleType) else [ty]
    assert [list(a.shape) for a in found] == [[int(e) for e in f.shape.values] for f in fields]
    assert all(np.isfinite(a).all() for a in found)
    assert compiled.report.verify.passed


@pytest.mark.parametrize("name", CASES)
def test_a_module_with_an_empty_tensor_is_generated_for_a_gpu(name):
    build, shapes = CASES[name]
    compiled = tvm_fusion.compile(module(build, *shapes), "h200")
    assert_written(compiled)


def test_sums_and_products_of_nothing_are_zero():
    build, shapes = CASES["sums of nothing"]
    (found,) = arrays(tvm_fusion.compile(module(build, *shapes), "llvm")(np.ones(shapes[0], "f4")))
    np.testing.assert_array_equal(found, np.ones(8))


@pytest.mark.parametrize("reduce", [op.max, op.min, op.mean, op.argmax, op.variance])
@pytest.mark.parametrize("target", ["llvm", "h200"])
def test_the_largest_of_no_elements_is_refused_by_tensor_and_axis(reduce, target):
    axis = 1 if reduce is op.argmax else [1]
    with pytest.raises(InputError, match=r"of x0, a tensor of shape \[8, 0\]: axis 1"):
        tvm_fusion.compile(module(lambda x: reduce(x, axis), (8, 0)), target)


def test_attention_without_keys_is_refused():
    attend = module(lambda q, k: op.nn.attention(q, k, k), (2, 8, 4, 16), (2, 0, 4, 16))
    with pytest.raises(InputError, match=r"of x1, .* axis 1"):
        tvm_fusion.compile(attend, "llvm")


def test_a_module_without_empty_tensors_is_left_as_it_is():
    mod = module(lambda x: op.exp(x), (4, 8))
    assert DropEmpty()(mod).same_as(mod) or tvm.ir.structural_equal(DropEmpty()(mod), mod)


def test_dropping_twice_is_dropping_once():
    build, shapes = CASES["joined"]
    once = DropEmpty()(relax.transform.CanonicalizeBindings()(module(build, *shapes)))
    tvm.ir.assert_structural_equal(DropEmpty()(once), once)


def test_no_rows_of_symbolic_length_have_a_kernel_that_writes_nothing():
    size = tvm.tirx.Var("n", "int64")
    mod = module(lambda x: op.exp(op.add(x, x)), (0, size))
    compiled = tvm_fusion.compile(mod, "llvm")
    assert_written(compiled)
    assert arrays(compiled(np.ones((0, 5), "float32")))[0].shape == (0, 5)
