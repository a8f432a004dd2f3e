"""Building: kernels side by side, and blame on the PrimFunc that is at fault."""

import pytest
import tvm
from tvm import relax, te, tirx
from tvm.relax import op

from tvm_fusion.errors import BuildError
from tvm_fusion.flow.functions import planned_function
from tvm_fusion.runtime.build.build import KernelBuildError, build
from tvm_fusion.runtime.build.cuda_compiler import kernel_names
from tvm_fusion.runtime.build.lowering import SCHEDULED_ATTR

from ..support.graphs import module
from ..support.runtime_cases import (
    H200,
    LLVM,
    call_in_sequence,
    double_in_tirx,
    extern_in_tirx,
    relax_module,
    softmax_reshape_relu,
    unscheduled_prim_func,
    without_compilers,
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))


def test_each_kernel_has_a_cuda_source_and_resources_of_its_own(tmp_path):
    built = build(call_in_sequence({"double": double_in_tirx()}), H200)
    assert [kernel_names(s) for s in built.cuda_sources] == [("double_kernel",), ("relu_kernel",)]
    assert sorted(built.resources) == ["double_kernel", "relu_kernel"]
    assert all(r.registers > 0 and r.spill_bytes == 0 for r in built.resources.values())
    assert len(list(tmp_path.glob("*.cubin"))) == 2


def test_a_module_without_a_gpu_has_no_cuda_source():
    built = build(softmax_reshape_relu(), LLVM)
    assert built.cuda_source is None
    assert built.resources == built.launches == {}


@pytest.mark.parametrize("word", ["new", "class"])
def test_a_size_may_have_a_name_that_cpp_has_for_something_else(word):
    shape = tirx.Var(word, "int64"), 64
    sums = module(lambda bb, x: op.sum(x, axis=0), (shape, "float32"))
    sources = planned_function(sums, H200).build().built.cuda_sources
    assert any(f" {word}_)" in source for source in sources)


def test_equal_modules_build_to_equal_sources():
    first, second = (build(softmax_reshape_relu(), H200, compile_kernels=False) for _ in range(2))
    assert first.cuda_sources == second.cuda_sources


def test_a_kernel_that_nvcc_refuses_is_blamed_and_no_other():
    mod = call_in_sequence({"good": double_in_tirx(), "bad": extern_in_tirx("no_such_function")})
    with pytest.raises(KernelBuildError, match="no_such_function") as error:
        build(mod, H200)
    assert list(error.value.failures) == ["bad"]


def test_a_prim_func_that_would_run_on_the_host_is_blamed_and_no_other():
    unbound = unscheduled_prim_func().with_attr(SCHEDULED_ATTR, True)
    mod = call_in_sequence({"good": double_in_tirx(), "bad": unbound})
    with pytest.raises(KernelBuildError, match="launches nothing") as error:
        build(mod, H200, compile_kernels=False)
    assert list(error.value.failures) == ["bad"]


def test_a_prim_func_that_does_not_lower_is_blamed_and_no_other():
    unbound = tirx.Var("unbound", "int64")
    a = te.placeholder((1024,), "float32", name="a")
    b = te.compute((1024,), lambda i: a[i] + unbound.astype("float32"), name="b")
    mod = call_in_sequence({"bad": te.create_prim_func([a, b])})
    with pytest.raises(KernelBuildError, match="unbound") as error:
        build(mod, LLVM)
    assert list(error.value.failures) == ["bad"]


def test_a_machine_without_a_cuda_compiler_is_told_what_to_install(tmp_path, monkeypatch):
    without_compilers(monkeypatch, tmp_path)
    with pytest.raises(BuildError, match=r"nvcc is not on PATH.*cuda-bindings") as error:
        build(call_in_sequence({}), H200)
    assert not isinstance(error.value, KernelBuildError)


def test_a_build_needs_a_target():
    with pytest.raises(BuildError, match="target"):
        build(softmax_reshape_relu())


@pytest.mark.parametrize("target", [LLVM, H200], ids=["llvm", "cuda"])
def test_a_module_without_kernels_builds(target):
    n = tirx.Var("n", "int64")
    mod = relax_module(lambda bb, x: relax.op.reshape(x, (8, n)), ("x", (n, 8), "float32"))
    assert isinstance(build(mod, target).executable, tvm.runtime.Executable)
