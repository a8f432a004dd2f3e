"""Lowering: mixed dialects, views, default schedules."""

import inspect

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.s_tir import dlight
from tvm.tirx import compilation_pipeline
from tvm.tirx.script.parser import entry

from tvm_fusion.errors import BuildError
from tvm_fusion.runtime.build.build import build
from tvm_fusion.runtime.build.cuda_compiler import kernel_names
from tvm_fusion.runtime.build.lowering import (
    SCHEDULED_ATTR,
    TIR_PIPELINE,
    ScheduleLeftovers,
    lowering_pipeline,
)
from tvm_fusion.runtime.build.plain_schedule import PER_ELEMENT, PLAIN_ATTR
from tvm_fusion.runtime.calls.compiled_module import CompiledModule

from ..support.helpers_tir import on_the_host
from ..support.runtime_cases import (
    H200,
    LLVM,
    call_in_sequence,
    double_in_tirx,
    softmax_reshape_relu,
    unscheduled_prim_func,
)


def test_s_tir_and_tirx_kernels_build_into_one_executable():
    mod = call_in_sequence({"double": double_in_tirx()})
    built = build(mod, H200, compile_kernels=False)
    assert built.launches == {"double": 1, "relu": 1}
    assert kernel_names(built.cuda_source) == ("double_kernel", "relu_kernel")


def test_the_tir_pipeline_is_registered_for_tvm_compile():
    assert TIR_PIPELINE in compilation_pipeline.PIPELINE_MAP
    mod = softmax_reshape_relu(8, 16)
    executable = tvm.compile(
        mod, LLVM, relax_pipeline=lowering_pipeline(LLVM), tir_pipeline=TIR_PIPELINE
    )
    x = np.random.default_rng(0).standard_normal((8, 16)).astype("float32")
    vm = tvm.relax.VirtualMachine(executable, tvm.cpu())
    np.testing.assert_allclose(vm["main"](tvm.runtime.tensor(x)).numpy().sum(), 8, rtol=1e-5)


@pytest.mark.parametrize("target", [LLVM, H200], ids=["llvm", "cuda"])
def test_a_pure_reshape_is_a_view_and_its_prim_func_is_not_built(target):
    built = build(softmax_reshape_relu(), target, compile_kernels=False)
    assert "vm.builtin.reshape" in built.executable.as_text()
    assert CompiledModule.of(built).launches == 2
    assert "reshape" not in built.launches


def test_lowering_leaves_its_input_unchanged():
    mod = softmax_reshape_relu()
    before = mod.clone()
    build(mod, H200, compile_kernels=False)
    tvm.ir.assert_structural_equal(mod, before)


def test_scheduled_functions_keep_their_schedule_and_others_get_one():
    mod = call_in_sequence({"double": double_in_tirx()})
    mod = tvm.relax.transform.LegalizeOps()(mod)
    scheduled = ScheduleLeftovers(H200)(mod)
    tvm.ir.assert_structural_equal(scheduled["double"], mod["double"])
    assert not mod["relu"].attrs.get(SCHEDULED_ATTR, False)
    assert scheduled["relu"].attrs[SCHEDULED_ATTR]
    tvm.ir.assert_structural_equal(ScheduleLeftovers(H200)(scheduled), scheduled)


class _Raising:
    def apply(self, *_):
        raise ValueError("no such thing")


class _Refusing:
    def apply(self, *_):
        return None


class _Parsing:
    """Looks at the parser, as DLight's rule for products does, which imports tensor intrinsics."""

    def apply(self, *_):
        self.inspect = entry.inspect


def test_parsers_find_their_callers_quickly_while_a_rule_runs(monkeypatch):
    monkeypatch.setattr(entry, "inspect", inspect)
    rule = _Parsing()
    ScheduleLeftovers(H200, (rule,))(tvm.IRModule({"f": unscheduled_prim_func()}))
    assert rule.inspect is not inspect


def test_a_default_rule_that_raises_makes_way_for_the_next():
    schedule = ScheduleLeftovers(H200, (_Raising(), dlight.gpu.Fallback()))
    out = schedule(tvm.IRModule({"f": unscheduled_prim_func()}))
    assert out["f"].attrs[SCHEDULED_ATTR]


def test_what_no_rule_takes_gets_a_plain_schedule():
    schedule = ScheduleLeftovers(H200, (_Raising(), _Refusing()))
    out = schedule(tvm.IRModule({"strange": unscheduled_prim_func()}))
    assert out["strange"].attrs[SCHEDULED_ATTR]
    assert out["strange"].attrs[PLAIN_ATTR] == PER_ELEMENT


def test_a_median_that_is_sorted_by_the_host_is_refused_by_name():
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((7, 5), "float32"))
    with bb.function("main", [x]):
        bb.emit_func_output(bb.emit(relax.op.median(x, axis=[1])))
    with H200, pytest.raises(BuildError, match=r"PrimFunc median: .* functions of the host"):
        lowering_pipeline(H200)(bb.get())


@pytest.mark.parametrize("rules", [(_Raising(), _Refusing()), None], ids=["none", "default"])
def test_a_prim_func_without_any_schedule_is_named(rules):
    schedule = ScheduleLeftovers(H200, rules)
    with pytest.raises(BuildError, match="no GPU schedule for the PrimFunc strange"):
        schedule(tvm.IRModule({"strange": on_the_host}))
