"""Constant folding that compiles an operator once in a process, where TVM's does in each run."""

import numpy as np
import tvm
from tvm import relax

from tvm_fusion.config import resolve_target
from tvm_fusion.transform.lower import weight_recipes
from tvm_fusion.transform.pipeline import lower

TARGET, H200 = resolve_target("nvidia_h200")
TABLE = np.arange(12, dtype="float32").reshape(3, 4)


def lowered(made) -> tvm.IRModule:
    """Of an input to which is added what is made of a table of constants."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((3, 4), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            table = builder.emit(made(relax.const(TABLE, "float32")))
            result = builder.emit_output(relax.op.add(x, table))
        builder.emit_func_output(result)
    return lower(builder.get(), TARGET, hw=H200)


def calls_of(mod: tvm.IRModule) -> list[tvm.ir.Call]:
    return [binding.value for block in mod["main"].body.blocks for binding in block.bindings]


def test_a_chain_of_constants_is_computed_and_compiled_once(monkeypatch):
    compiled, compile_ = [], tvm.compile
    monkeypatch.setattr(tvm, "compile", lambda *a, **k: compiled.append(a) or compile_(*a, **k))
    weight_recipes._compiled.cache_clear()
    counts = []
    for _ in range(2):
        (call,) = calls_of(lowered(lambda table: relax.op.exp(relax.op.sqrt(table))))
        (table,) = [field.value.numpy() for field in call.args[1] if hasattr(field, "value")]
        np.testing.assert_allclose(table, np.exp(np.sqrt(TABLE)), rtol=1e-6)
        counts.append(len(compiled))
    assert counts[0] == counts[1] > 0


def test_what_tvm_writes_for_the_threads_of_a_gpu_is_not_run_on_the_host():
    calls = calls_of(lowered(lambda table: relax.op.cumsum(relax.op.sort(table), axis=1)))
    assert len(calls) > 1
