"""Builds, runs and reads the modules of the Decompose tests."""

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call

from tests.support.decompose_cases import IGNORED, Case
from tests.support.helpers_tir import quick_executable

TOLERANCES = {"float32": 2e-6, "float16": 6e-4}
"""Of the largest value: a few roundings of float32; one of float16, so the inside is wider."""


def module_of(build, *types, dataflow=True) -> tvm.IRModule:
    """main(*inputs) = build(*inputs); `types` are (shape, dtype)."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"p{i}", relax.TensorType(*type_)) for i, type_ in enumerate(types)]
    with builder.function("main", params):
        if dataflow:
            with builder.dataflow():
                out = builder.emit_output(builder.emit(builder.normalize(build(*params))))
        else:
            out = builder.emit(builder.normalize(build(*params)))
        builder.emit_func_output(out)
    return relax.transform.Normalize()(builder.get())


def case_module(case: Case, dtype: str, extent) -> tvm.IRModule:
    types = []
    for i, shape in enumerate(case.shapes):
        shape = tuple(extent if size == "n" else size for size in shape)
        types.append((shape, "int64" if i == case.label_input else dtype))
    return module_of(case.relax, *types)


def case_inputs(case: Case, dtype: str, extent: int) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    arrays = []
    for i, shape in enumerate(case.shapes):
        shape = tuple(extent if size == "n" else size for size in shape)
        if i == case.label_input:
            labels = rng.integers(0, case.shapes[0][0 if not shape else 1], shape)
            arrays.append(np.where(rng.random(shape) < 0.3, IGNORED, labels).astype("int64"))
            if not shape:
                arrays[-1] = np.array(3, "int64")
        else:
            arrays.append(rng.standard_normal(shape).astype(dtype))
    return arrays


def run(mod: tvm.IRModule, *arrays: np.ndarray) -> np.ndarray:
    executable = quick_executable(mod)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    return machine["main"](*[tvm.runtime.tensor(array) for array in arrays]).numpy()


def reference(case: Case, arrays: list[np.ndarray]) -> np.ndarray:
    wide = [a if i == case.label_input else a.astype("float64") for i, a in enumerate(arrays)]
    return np.asarray(case.numpy(*wide))


def assert_close(got: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    assert str(got.dtype) == dtype
    assert got.shape == expected.shape
    assert np.isfinite(expected).all()
    error = np.abs(got.astype("float64") - expected).max()
    assert error <= TOLERANCES[dtype] * max(1.0, np.abs(expected).max())


def operators(mod: tvm.IRModule) -> list[str]:
    """Names of the operators that main calls, in order."""
    return [value.op.name.removeprefix("relax.") for _, value in calls(mod)]


def calls(mod: tvm.IRModule) -> list[tuple[str, Call]]:
    found = []
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, Call) and isinstance(binding.value.op, tvm.ir.Op):
                found.append((binding.var.name, binding.value))
    return found


def bound_names(mod: tvm.IRModule) -> list[str]:
    return [binding.var.name for block in mod["main"].body.blocks for binding in block.bindings]
