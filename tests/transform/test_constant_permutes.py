"""Permutations of constants: what TVM's constant folding makes of them, sooner."""

import numpy as np
import pytest
import tvm
from tvm import relax

from tvm_fusion.config import resolve_target
from tvm_fusion.transform import pipeline as lowering
from tvm_fusion.transform.lower.permuted_weights import legalize_permutes
from tvm_fusion.transform.lower.weight_recipes import BLOCK, permuted

TARGET, H200 = resolve_target("nvidia_h200")
LARGE = BLOCK + 37

SHAPES = [
    ((3, 5), None),
    ((LARGE, 2 * LARGE), None),
    ((LARGE, LARGE), (0, 1)),
    ((3, LARGE, LARGE), (0, 2, 1)),
    ((LARGE, 3, LARGE), (2, 1, 0)),
    ((LARGE, 3, LARGE), (1, 0, 2)),
    ((3, 1, LARGE, LARGE), (0, 2, -1, 1)),
]


@pytest.mark.parametrize(("shape", "axes"), SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_elements_are_where_numpy_puts_them(shape, axes, dtype):
    array = (np.arange(np.prod(shape)) % 2039).reshape(shape).astype(dtype)
    axes = axes or tuple(range(len(shape)))[::-1]
    result = permuted(array, axes)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result.numpy(), array.transpose(axes))


def module(dtype: str, axes=None):
    """A weight stored (out, in), and an input that is permuted in the same way."""
    builder = relax.BlockBuilder()
    weight = relax.const(np.random.default_rng(0).standard_normal((6, 4)), dtype)
    x = relax.Var("x", relax.TensorType((6, 4), dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.permute_dims(x, axes))
            w = builder.emit(relax.op.permute_dims(weight, axes))
            z = builder.emit_output(relax.op.exp(builder.emit(relax.op.add(y, w))))
        builder.emit_func_output(z)
    return builder.get()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("axes", [None, (1, 0), (0, 1), (-1, 0)])
@pytest.mark.parametrize("decompose", [True, False])
def test_the_lowered_module_is_that_of_tvms_folding(dtype, axes, decompose, monkeypatch):
    mod = module(dtype, axes)
    ours = lowering.lower(mod, TARGET, decompose, H200)
    default = tvm.ir.Op.get("relax.permute_dims").get_attr("FLegalize")
    monkeypatch.setattr(lowering, "legalize_permutes", lambda _: default)
    theirs = lowering.lower(mod, TARGET, decompose, H200)
    tvm.ir.assert_structural_equal(ours, theirs)
    assert ours.script() == theirs.script()


@pytest.mark.parametrize(("dtype", "folded"), [("float16", True), ("float64", False)])
def test_weights_in_the_types_of_kernels_are_constants_before_anything_is_folded(dtype, folded):
    legalize = relax.transform.LegalizeOps({"relax.permute_dims": legalize_permutes()})
    bindings = legalize(module(dtype))["main"].body.blocks[0].bindings
    constants = [isinstance(binding.value, tvm.ir.Constant) for binding in bindings]
    assert constants == [False, folded, False, False]
