"""Kernels of a module are launched early where the device can, and wait for those before them."""

import re

import pytest
import tvm

from tvm_fusion.config import resolve_target
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.runs.rank import emit_product, product_ranked
from tvm_fusion.runtime.build.build import build
from tvm_fusion.runtime.build.early_launches import (
    DYNAMIC_SMEM,
    EARLY,
    VARIABLE,
    launched_early,
)
from tvm_fusion.runtime.build.kernel_code import kernel_code
from tvm_fusion.runtime.build.lowering import COOPERATIVE, LAUNCH_PARAMS

from ..support.runtime_cases import H200, call_in_sequence, double_in_tirx
from ..support.thin_products import Thin

INSTRUCTIONS = ("griddepcontrol.wait;", "griddepcontrol.launch_dependents;")
FIRST_STATEMENT = re.compile(r"double_kernel\([^;{]*\) \{\s*(\w+)\(\);")


@pytest.mark.parametrize("compiled", [False, True], ids=["source", "compiled"])
def test_each_kernel_of_a_module_waits_before_anything_else(compiled, tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "1")
    built = build(call_in_sequence({"double": double_in_tirx()}), H200, compile_kernels=compiled)
    sources = built.cuda_sources if compiled else (built.cuda_source,)
    assert sources
    for source in sources:
        assert all(word in source for word in INSTRUCTIONS)
        assert source.index(INSTRUCTIONS[0]) < source.index(INSTRUCTIONS[1])
    (first,) = FIRST_STATEMENT.findall("".join(sources))
    assert first.endswith("wait_for_kernels_before")


def unit_of(profile, early):
    """Of a kernel with shared memory of a size that its launch tells."""
    target, hw = resolve_target(profile)
    problem = analyze_contraction(Thin(4, 16, 16, batch=1).func())
    kernel = emit_product(problem, hw, product_ranked(problem, hw)[0][1])
    (unit,) = kernel_code("product", kernel, target, early).units
    return unit


def parameters(unit):
    ((_, func),) = unit.kernels.functions_items()
    return [str(name) for name in func.attrs[LAUNCH_PARAMS]]


def test_the_size_of_shared_memory_stays_the_last_parameter_of_a_launch(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    plain, early = (parameters(unit_of("nvidia_h200", early)) for early in (False, True))
    assert plain[-1] == DYNAMIC_SMEM
    assert EARLY not in plain
    assert early == [*plain[:-1], EARLY, DYNAMIC_SMEM]


@pytest.mark.parametrize("why", ["device", "environment"])
def test_where_nothing_is_launched_early_kernels_are_the_same(why, monkeypatch):
    monkeypatch.setenv(VARIABLE, "" if why == "environment" else "1")
    profile = "nvidia_a100" if why == "device" else "nvidia_h200"
    plain, early = (unit_of(profile, early) for early in (False, True))
    assert early.source == plain.source
    assert parameters(early) == parameters(plain)


def test_a_kernel_whose_blocks_wait_for_each_other_is_not_launched_early(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    unit = unit_of("nvidia_h200", False)
    ((gvar, func),) = unit.kernels.functions_items()
    spread = func.with_attr(LAUNCH_PARAMS, [COOPERATIVE, *parameters(unit)])
    kernels = tvm.IRModule({gvar: spread})
    assert launched_early(kernels, unit.target)[gvar].same_as(spread)
