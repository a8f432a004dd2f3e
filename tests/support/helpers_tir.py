"""Running CPU kernels, and what stock TVM computes for the same graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.script import tirx as T

from .kernel_cases import Emit, numpy_dtype

# For what TVM's own kernels compute, where only the numbers count: a tenth of the time to compile.
UNOPTIMISED = tvm.target.Target({"kind": "llvm", "opt-level": 0})
# What kernels are called with is right: checks of it are half of what LLVM compiles of small ones.
UNCHECKED = {"tirx.disable_assert": True}


def quick_executable(mod: tvm.IRModule) -> relax.VMExecutable:
    """TVM's own executable of a module, where only the numbers count."""
    with tvm.transform.PassContext(config=UNCHECKED):
        return tvm.compile(mod, UNOPTIMISED)


@cache
def cpu_target() -> tvm.target.Target:
    """The target that the package compiles CPU kernels for."""
    from tvm_fusion.config import load_profile

    return load_profile("llvm").to_target()


def compile_cpu(func: tirx.PrimFunc, target: tvm.target.Target | None = None) -> Callable:
    """The compiled function; its arguments are those of the PrimFunc."""
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    with tvm.transform.PassContext(config=UNCHECKED):
        return tvm.compile(mod, target=target or cpu_target(), tir_pipeline="s_tir")["main"]


def call(
    run: Callable, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], *scalars: int
) -> list[np.ndarray]:
    """Run a compiled PrimFunc; `outputs` hold what the outputs are before."""
    results = [tvm.runtime.tensor(o) for o in outputs]
    run(*map(tvm.runtime.tensor, inputs), *results, *scalars)
    return [r.numpy() for r in results]


def poisoned(shape: Sequence[int], dtype: str) -> np.ndarray:
    """An array that no kernel should leave as it is."""
    kind = numpy_dtype(dtype)
    return np.full(tuple(shape), 77 if kind.kind in "iub" else np.nan, kind)


def run_unfused(
    emit: Emit, inputs: Sequence[tuple[Sequence[int], str]], arrays: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """What stock TVM computes with one unscheduled kernel an operator."""
    bb = relax.BlockBuilder()
    params = [relax.Var(f"p{i}", relax.TensorType(s, d)) for i, (s, d) in enumerate(inputs)]
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(emit(bb, *params))
        bb.emit_func_output(out)
    mod = relax.transform.LegalizeOps()(bb.get())
    executable = quick_executable(mod)
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](*map(tvm.runtime.tensor, arrays))
    parts = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    return [p.numpy() for p in parts]


@T.prim_func(s_tir=True)
def on_the_host(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")):
    """What no kernel can do: a call of a function of the host."""
    with T.sblock("sort"):
        T.reads(x[0:8])
        T.writes(y[0:8])
        T.evaluate(T.call_packed("a.sort", x.data, y.data))
