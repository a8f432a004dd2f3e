"""Kernels that are lowered and compiled while others are still written."""

import threading

import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.flow.kernels_ahead import KernelsAhead, kernels_ahead
from tvm_fusion.runtime.build.build import KernelBuildError, build
from tvm_fusion.runtime.build.cuda_compiler import Compiler, kernel_names
from tvm_fusion.runtime.build.kernel_code import kernel_code
from tvm_fusion.runtime.build.lowering import SCHEDULED_ATTR
from tvm_fusion.transform.apply.write_kernels import write_kernels
from tvm_fusion.transform.pipeline import lower

from ..support.graphs import module
from ..support.runtime_cases import (
    call_in_sequence,
    double_in_tirx,
    extern_in_tirx,
    two_kernel_prim_func,
    unscheduled_prim_func,
)

TARGET, H200 = resolve_target("nvidia_h200")
POLICY = load_policy(None)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))


def built_ahead(kernels):
    with KernelsAhead(TARGET, H200, POLICY) as ahead:
        for name, kernel in kernels.items():
            ahead.add(name, kernel, "pointwise", kernel)
        return ahead, build(call_in_sequence(kernels), TARGET, ahead=ahead)


def test_a_kernel_lowered_ahead_is_the_one_that_the_build_makes():
    ahead, built = built_ahead({"double": double_in_tirx()})
    plain = build(call_in_sequence({"double": double_in_tirx()}), TARGET)
    assert list(ahead.codes) == ["double"]
    assert built.cuda_sources == plain.cuda_sources
    assert built.kernels == plain.kernels
    assert built.resources == plain.resources
    assert built.executable.as_text() == plain.executable.as_text()


def test_a_declaration_is_enough_for_what_is_lowered_ahead():
    kernel = double_in_tirx()
    with KernelsAhead(TARGET, H200, POLICY) as ahead:
        ahead.add("double", kernel, "pointwise", kernel)
        empty = kernel.with_body(tvm.tirx.Evaluate(0))
        built = build(call_in_sequence({"double": empty}), TARGET, ahead=ahead)
    assert built.cuda_sources == build(call_in_sequence({"double": kernel}), TARGET).cuda_sources


def test_nvcc_begins_before_the_next_kernel_is_there(monkeypatch):
    sources = []
    compile_now = Compiler.compile

    def noted(self, source, arch):
        sources.append(kernel_names(source))
        return compile_now(self, source, arch)

    monkeypatch.setattr(Compiler, "compile", noted)
    with KernelsAhead(TARGET, H200, POLICY) as ahead:
        ahead.add("first", double_in_tirx(), "pointwise", double_in_tirx())
        (unit,) = ahead.codes["first"].units
        assert ahead.compiling.begin(unit.source).result().binary
    assert sources == [("first_kernel",)]


def test_kernels_are_lowered_beside_the_writer_with_its_options(monkeypatch):
    seen = []

    def noted(name, *how, **more):
        config = dict(tvm.transform.PassContext.current().config)
        seen.append((name, threading.current_thread() is threading.main_thread(), config))
        return kernel_code(name, *how, **more)

    monkeypatch.setattr("tvm_fusion.flow.kernels_ahead.kernel_code", noted)
    options = {"tirx.disable_storage_rewrite": True}
    instrument = tvm.ir.instrument.PassTimingInstrument()
    with KernelsAhead(TARGET, H200, POLICY) as ahead:
        with tvm.transform.PassContext(config=options):
            ahead.add("beside", double_in_tirx(), "pointwise", double_in_tirx())
        with tvm.transform.PassContext(config=options, instruments=[instrument]):
            ahead.add("watched", double_in_tirx(), "pointwise", double_in_tirx())
        assert list(ahead.codes) == ["beside", "watched"]
    assert sorted(seen) == [("beside", False, options), ("watched", True, options)]


def test_what_takes_nvcc_longest_is_written_first():
    def model(bb, x, y, w):
        pooled = bb.emit(op.nn.max_pool2d(x, (7, 7), padding=(3, 3)))
        narrow = bb.emit(op.nn.max_pool2d(pooled, (2, 2)))
        return relax.Tuple([narrow, bb.emit(op.nn.relu(y)), bb.emit(op.matmul(y, w))])

    half = "float16"
    inputs = ((1, 8, 16, 16), half), ((64, 64), half), ((64, 64), half)
    low = lower(module(lambda bb, *p: bb.emit(model(bb, *p)), *inputs), TARGET, decompose=False)
    classes = {"max_pool2d": "pointwise", "max_pool2d1": "pointwise", "relu": "pointwise"}
    written = []

    class Noted:
        def in_turn(self, wanted):
            return wanted

        def known(self, *_):
            return None

        def add(self, name, *_):
            written.append(name)

    done = write_kernels(low, {**classes, "matmul": "gemm"}, H200, POLICY, Noted())
    assert not done.failures
    assert written == ["max_pool2d", "matmul", "max_pool2d1", "relu"]


def test_kernels_of_the_other_dialect_are_left_to_the_build():
    ahead, built = built_ahead({"two": two_kernel_prim_func()})
    assert ahead.codes == {}
    assert built.launches["two"] == 2


def test_a_kernel_that_nvcc_refuses_is_blamed_and_no_other():
    kernels = {"good": double_in_tirx(), "bad": extern_in_tirx("no_such_function")}
    with pytest.raises(KernelBuildError, match="no_such_function") as error:
        built_ahead(kernels)
    assert list(error.value.failures) == ["bad"]


def test_a_kernel_that_does_not_lower_is_blamed_by_the_build():
    unbound = unscheduled_prim_func().with_attr(SCHEDULED_ATTR, True)
    tirx_kernel = unbound.with_attr("tvm_fusion.tirx", True)
    with pytest.raises(KernelBuildError) as error:
        built_ahead({"good": double_in_tirx(), "bad": tirx_kernel})
    assert list(error.value.failures) == ["bad"]


def test_a_kernel_that_no_call_reaches_is_not_in_the_module():
    with KernelsAhead(TARGET, H200, POLICY) as ahead:
        for name in ("double", "unused"):
            ahead.add(name, double_in_tirx(), "pointwise", double_in_tirx())
        built = build(call_in_sequence({"double": double_in_tirx()}), TARGET, ahead=ahead)
    assert "unused" not in built.kernels
    assert not any("unused" in source for source in built.cuda_sources)


def test_without_cuda_there_is_nothing_ahead():
    cpu, profile = resolve_target("llvm")
    with kernels_ahead(cpu, profile, POLICY) as ahead:
        assert ahead is None


def test_the_sources_are_those_of_a_build_that_compiles_nothing():
    _, built = built_ahead({"double": double_in_tirx()})
    plain = build(call_in_sequence({"double": double_in_tirx()}), TARGET, compile_kernels=False)
    assert built.cuda_sources == plain.cuda_sources
