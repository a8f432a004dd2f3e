"""Calls on a CPU: what a kernel costs in the virtual machine, alone and with all cores woken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as B

from ...runtime.build.build import build
from ...runtime.calls.compiled_module import CompiledModule
from ..findings import Family, Finding, Measured
from .bench import CpuBench

CHAIN = 32
"""Kernels in one call of the virtual machine."""

ELEMENTS = 64
WAKES = ("launch_us", "graph_launch_us", "queued_launch_us")


def add_one(cores: int | None) -> tirx.PrimFunc:
    """Adds one to a few numbers, on all cores or (None) on one."""
    with IRBuilder() as builder, B.prim_func():
        T.func_name("main")
        x = T.arg("x", T.buffer((ELEMENTS,), "float32"))
        y = T.arg("y", T.buffer((ELEMENTS,), "float32"))
        loop = T.serial(ELEMENTS) if cores is None else T.parallel(cores)
        with loop as i:
            T.buffer_store(y, x[i] + tirx.FloatImm("float32", 1.0), [i])
    attrs = {"tirx.noalias": True, "tirx.is_scheduled": True, "op_pattern": 8}
    return builder.get().with_attr(attrs | {"global_symbol": "add_one"})


def chain_of(kernel: tirx.PrimFunc) -> tvm.IRModule:
    """A module that calls a kernel `CHAIN` times, each on what the one before wrote."""
    bb = relax.BlockBuilder()
    kind = relax.TensorType((ELEMENTS,), "float32")
    x = relax.Var("x", kind)
    function = bb.add_func(kernel, "add_one")
    with bb.function("main", [x]):
        with bb.dataflow():
            value = x
            for _ in range(CHAIN):
                value = bb.emit(relax.call_tir(function, (value,), kind))
            out = bb.emit_output(value)
        bb.emit_func_output(out)
    return bb.get()


def chains(bench: CpuBench) -> dict[int | None, Callable[[], Any]]:
    """Calls of a chain of kernels, by the cores that each kernel wakes; None: it runs on one."""
    x = np.ones(ELEMENTS, "float32")
    return {
        cores: CompiledModule.of(build(chain_of(add_one(cores)), bench.target)).bind(x)
        for cores in (None, bench.cores)
    }


def measure(bench: CpuBench) -> Finding:
    """Time of a launch."""
    us = {cores: taken / CHAIN * 1e6 for cores, taken in bench.times(chains(bench)).items()}
    alone, woken = us[None], us[bench.cores]
    how = f"chain of {CHAIN} kernels in the virtual machine, {bench.cores} cores woken for each"
    note = f"a kernel in the virtual machine: {alone:.3g} us on one core, {woken:.3g} us on all"
    found = [Measured("kernel_gap_us", alone, f"chain of {CHAIN} kernels, each on one core")]
    if woken <= alone:
        return Finding(found, [note], ["what waking the cores adds: less than the noise"])
    found += [Measured(field, woken - alone, how) for field in WAKES]
    return Finding(found, [note])


FAMILY = Family(
    "launch",
    "launches in the virtual machine",
    ("kernel_gap_us", *WAKES),
    measure,
)
