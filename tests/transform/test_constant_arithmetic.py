"""Arithmetic on constants while it is legalized: bit for bit what TVM's FoldConstant makes."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_profile
from tvm_fusion.transform.lower.constant_arithmetic import MOST_ELEMENTS, folding
from tvm_fusion.transform.pipeline import lower
from tvm_fusion.transform.rewrites.factors import is_constant

TARGET = tvm.target.Target("llvm")
KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def batch_norm(dtype: str) -> tvm.IRModule:
    """Scale and shift of a batch norm, from constants alone, on an input."""
    rng = np.random.default_rng(3)
    weight, bias, mean, var = (rng.uniform(0.3, 2.0, 96).astype(KINDS[dtype]) for _ in range(4))
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 96, 5), dtype))
    with bb.function("main", [x]):
        with bb.dataflow():
            wide = [
                bb.emit(op.astype(relax.const(a, dtype), "float32"))
                for a in (weight, bias, mean, var)
            ]
            shifted = bb.emit(op.add(wide[3], relax.const(1e-5, "float32")))
            scale = bb.emit(op.multiply(wide[0], bb.emit(op.rsqrt(shifted))))
            scaled = bb.emit(op.multiply(wide[2], scale))
            shift = bb.emit(op.subtract(wide[1], bb.emit(op.divide(scaled, wide[0]))))
            shift = bb.emit(op.multiply(bb.emit(op.negative(shift)), wide[0]))
            half = bb.emit(op.astype(bb.emit(op.sqrt(scale)), dtype))
            rows = [bb.emit(op.reshape(v, (1, 96, 1))) for v in (scale, shift)]
            y = bb.emit(op.multiply(bb.emit(op.astype(x, "float32")), rows[0]))
            y = bb.emit(op.add(y, rows[1]))
            z = bb.emit(op.multiply(x, bb.emit(op.expand_dims(half, [0, 2]))))
            out = bb.emit_output(relax.Tuple([y, z]))
        bb.emit_func_output(out)
    return bb.get()


def legalized(mod: tvm.IRModule, table, fold: bool) -> tvm.IRModule:
    passes = [relax.transform.LegalizeOps(table)]
    passes += [relax.transform.FoldConstant()] if fold else []
    passes += [relax.transform.CanonicalizeBindings(), relax.transform.DeadCodeElimination()]
    with TARGET:
        return tvm.transform.Sequential(passes)(mod)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", KINDS)
def test_constants_are_those_of_fold_constant_bit_for_bit(dtype):
    mod = batch_norm(dtype)
    tvm.ir.assert_structural_equal(legalized(mod, folding({}), False), legalized(mod, {}, True))


def test_what_is_large_or_no_constant_stays_an_operator():
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    large = relax.const(np.ones(MOST_ELEMENTS + 1, "float32"))
    small = relax.const(np.ones(4, "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            parts = [bb.emit(op.add(x, small)), bb.emit(op.sqrt(large)), bb.emit(op.sqrt(small))]
            out = bb.emit_output(relax.Tuple(parts))
        bb.emit_func_output(out)
    found = legalized(bb.get(), folding({}), False)
    calls = [
        b.value
        for block in found["main"].body.blocks
        for b in block.bindings
        if isinstance(b.value, relax.Call)
    ]
    assert len(calls) == 2


def test_a_legalization_of_ours_is_kept_for_what_is_no_constant():
    asked = []

    def ours(builder, call):
        asked.append(call)
        return tvm.ir.Op.get("relax.add").get_attr("FLegalize")(builder, call)

    legalized(batch_norm("float32"), folding({"relax.add": ours}), False)
    assert len(asked) == 2


def test_lean_constants_stay_lean():
    """What LeanConstants narrows is widened in kernels, not here."""
    rng = np.random.default_rng(1)
    gamma = relax.const(rng.uniform(0.5, 2.0, 4096).astype("float16"))
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((64, 4096), "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            wide = bb.emit(op.astype(gamma, "float32"))
            out = bb.emit_output(bb.emit(op.multiply(x, wide)))
        bb.emit_func_output(out)
    hw = load_profile("nvidia_h200")
    low = lower(bb.get(), hw.to_target(), hw=hw)
    constants = []
    relax.analysis.post_order_visit(
        low["main"], lambda e: constants.append(e) if is_constant(e) else None
    )
    assert {str(c.value.dtype) for c in constants} == {"float16"}
