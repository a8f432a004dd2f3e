"""An architecture that the compiler does not know: PTX for the latest earlier one."""

import logging
import shutil

import pytest
from tvm.relax import op

import tvm_fusion
from tests.support.graphs import module
from tvm_fusion.errors import BuildError
from tvm_fusion.runtime.build import cuda_compiler
from tvm_fusion.runtime.build.cubin_cache import compile_source
from tvm_fusion.runtime.build.cuda_compiler import Compiler, find_compiler
from tvm_fusion.runtime.build.resources import resources_of

SOURCE = 'extern "C" __global__ void twice(float* a) { a[threadIdx.x] *= 2.0f; }\n'
OLD = Compiler("nvcc", "/opt/cuda-12.4/bin/nvcc", "12.4")


@pytest.fixture
def knows(monkeypatch):
    """Pretend that nvcc makes machine code for these."""

    def pretend(*numbers: int) -> None:
        monkeypatch.setattr(cuda_compiler, "_nvcc_architectures", lambda _path: frozenset(numbers))
        cuda_compiler._tell_of_ptx.cache_clear()

    return pretend


def test_what_the_compiler_knows_becomes_machine_code(knows):
    knows(80, 90, 100, 120)
    assert [OLD.nearest(arch) for arch in ("sm_80", "sm_90a", "sm_100a")] == [
        "sm_80",
        "sm_90a",
        "sm_100a",
    ]
    assert "arch=compute_120,code=sm_120" in OLD.flags("sm_120")
    assert "--cubin" in OLD.flags("sm_120")


def test_what_it_does_not_know_becomes_ptx_of_the_latest_before_it(knows):
    knows(80, 89, 90, 100, 120)
    assert OLD.nearest("sm_103a") == "sm_100"
    assert OLD.nearest("sm_130") == "sm_120"
    assert {"--ptx", "arch=compute_120,code=compute_120"} <= set(OLD.flags("sm_130"))


def test_a_compiler_that_says_nothing_is_believed_to_know_it(knows):
    knows()
    assert OLD.nearest("sm_130") == "sm_130"


def test_a_compiler_without_earlier_ones_is_refused(knows):
    knows(130, 140)
    with pytest.raises(BuildError, match="is for sm_130, sm_140, not for sm_120"):
        OLD.nearest("sm_120")


@pytest.mark.parametrize(("arch", "level"), [("sm_120", logging.WARNING), ("sm_130", logging.INFO)])
def test_only_an_old_compiler_is_warned_of_and_once(knows, monkeypatch, caplog, arch, level):
    """That a GPU is newer than all that is known was said where its profile was derived."""
    knows(80, 90)
    monkeypatch.setattr(Compiler, "_nvcc", lambda *_: cuda_compiler.DeviceCode(b"//", ""))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            OLD.compile(SOURCE, arch)
    (record,) = caplog.records
    assert record.levelno == level
    assert f"does not know {arch}: kernels are PTX for sm_90" in record.message


@pytest.mark.one_in(2)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("mode", ["nvcc", "nvrtc"])
def test_ptx_comes_with_registers_and_becomes_a_module(monkeypatch, mode):
    monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", mode)
    compiler = find_compiler()
    assert compiler.kind == mode
    code = compiler.compile(SOURCE, "sm_990")
    assert code.binary.startswith(b"//")
    assert b".target sm_" in code.binary
    (kernel,) = resources_of(code)
    assert kernel.name == "twice"
    assert kernel.registers > 0


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_model_is_compiled_for_a_gpu_newer_than_all_that_is_known():
    mod = module(lambda bb, x: op.nn.softmax(bb.emit(op.add(x, x))), ((64, 128), "float16"))
    compiled = tvm_fusion.compile(mod, {"kind": "cuda", "arch": "sm_990"})
    assert compiled.plan.measured["derived"].endswith("the rest as nvidia_h200")
    (host,) = compiled.executable.mod.imports
    (kernels,) = host.imports
    assert b".visible .entry" in compile_source(kernels.inspect_source(), "sm_990").binary
