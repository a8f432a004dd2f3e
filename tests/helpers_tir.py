"""Fused PrimFuncs from small Relax graphs, and running them: shared by the tests of kernel
writers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.relax.expr import Expr

Emit = Callable[..., Expr]
Input = tuple[Sequence[int | tirx.Var], str]


def legalized(emit: Emit, *inputs: Input) -> tvm.IRModule:
    """A module whose function "main" is ``emit(block_builder, *parameters)``, as calls of
    PrimFuncs.

    Each of `inputs` is the shape and the dtype of a parameter; shapes may hold symbolic variables.
    """
    bb = relax.BlockBuilder()
    params = [relax.Var(f"p{i}", relax.TensorType(s, d)) for i, (s, d) in enumerate(inputs)]
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(emit(bb, *params))
        bb.emit_func_output(out)
    return relax.transform.LegalizeOps()(bb.get())


def fused_primfunc(emit: Emit, *inputs: Input) -> tirx.PrimFunc:
    """The whole graph as one PrimFunc: inputs, outputs, and a scalar for each symbolic variable
    that needs one.
    """
    mod = legalized(emit, *inputs)
    main = mod["main"]
    group = relax.Function(main.params, main.body, main.ret_ty, is_pure=True)
    symbols = list(relax.analysis.free_symbolic_vars(group))
    if symbols:
        shape = relax.Var("symbols", relax.ShapeType(symbols))
        group = relax.Function([*main.params, shape], main.body, main.ret_ty, is_pure=True)
    group = relax.utils.copy_with_new_vars(group.with_attr("Primitive", True))
    kernels = {g: f for g, f in mod.functions.items() if g.name_hint != "main"}
    bb = relax.BlockBuilder(tvm.IRModule(kernels))
    fused = bb.add_func(group, "fused")
    args = [relax.Var(f"q{i}", relax.TensorType(s, d)) for i, (s, d) in enumerate(inputs)]
    extra = [relax.ShapeExpr(symbols)] if symbols else []
    with bb.function("main", args):
        with bb.dataflow():
            out = bb.emit_output(relax.Call(fused, [*args, *extra]))
        bb.emit_func_output(out)
    mod = relax.transform.FuseTIR()(bb.get())
    return with_regions(next(f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)))


def with_regions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` with the regions of all blocks computed again: FuseTIR keeps one of two reads of a
    buffer.
    """

    def rebuild(block: s_tir.SBlock) -> s_tir.SBlock:
        if block.name_hint == "root":
            return block
        buffers = {}
        stores = (tirx.BufferStore, lambda s: buffers.setdefault(s.buffer, s.buffer))
        reads = (tvm.ir.TensorLoad, lambda e: buffers.setdefault(e.source, e.source))
        tvm_ffi.structural_walk(block.body, [reads, stores])
        if block.init is not None:
            tvm_ffi.structural_walk(block.init, [stores])
        regions = s_tir.analysis.get_sblock_read_write_region(block, buffers)
        return s_tir.SBlock(
            block.iter_vars,
            *regions,
            block.name_hint,
            block.body,
            block.init,
            block.alloc_buffers,
            block.match_buffers,
            block.annotations,
            block.span,
        )

    return func.with_body(tvm_ffi.structural_map(func.body, [(s_tir.SBlock, rebuild)]))


@cache
def cpu_target() -> tvm.target.Target:
    """The target that the package compiles CPU kernels for."""
    from tvm_fusion.config import load_profile

    return load_profile("llvm").to_target()


def compile_primfunc(func: tirx.PrimFunc, target: tvm.target.Target | None = None) -> Callable:
    """The compiled function; its arguments are those of the PrimFunc."""
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    return tvm.compile(mod, target=target or cpu_target(), tir_pipeline="s_tir")["main"]


def call(
    run: Callable, inputs: Sequence[np.ndarray], outputs: Sequence[tuple], *scalars: int
) -> list[np.ndarray]:
    """Run a compiled PrimFunc; `outputs` are the shape and the dtype of each. They start as NaN."""
    results = [tvm.runtime.tensor(_unset(shape, dtype)) for shape, dtype in outputs]
    run(*map(tvm.runtime.tensor, inputs), *results, *scalars)
    return [r.numpy() for r in results]


def output_types(func: tirx.PrimFunc, count: int) -> list[tuple[tuple[int, ...], str]]:
    """Shape and dtype of the outputs of a PrimFunc of fixed shapes with `count` inputs."""
    return [
        (tuple(int(n) for n in p.ty.shape), str(p.ty.dtype))
        for p in func.params[count:]
        if isinstance(p.ty, tirx.BufferType)
    ]


def random_inputs(seed: int, *inputs: Input) -> list[np.ndarray]:
    """Normally distributed floats, small non-negative integers."""
    rng = np.random.default_rng(seed)
    arrays = []
    for shape, dtype in inputs:
        if dtype.startswith("int"):
            arrays.append(rng.integers(0, 3, tuple(shape)).astype(dtype))
        else:
            arrays.append(rng.standard_normal(tuple(shape)).astype(dtype))
    return arrays


def run_unfused(emit: Emit, arrays: Sequence[np.ndarray], *inputs: Input) -> list[np.ndarray]:
    """What stock TVM computes, one unscheduled kernel an operator."""
    executable = tvm.compile(legalized(emit, *inputs), target=tvm.target.Target({"kind": "llvm"}))
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](*map(tvm.runtime.tensor, arrays))
    parts = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    return [p.numpy() for p in parts]


def _unset(shape: Sequence[int], dtype: str) -> np.ndarray:
    if dtype.startswith(("float", "bfloat")):
        return np.full(tuple(shape), np.nan).astype(dtype)
    return np.full(tuple(shape), 77).astype(dtype)
