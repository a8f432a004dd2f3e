"""NVRTC: the kernels that nvcc makes, of sources that need libcu++ and of those that do not."""

import ctypes

import pytest
from tvm import relax

from tvm_fusion.config import load_profile
from tvm_fusion.errors import BuildError
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.hopper.kernel import emit_gemm_hopper
from tvm_fusion.kernels.pointwise.kernel import emit_pointwise
from tvm_fusion.kernels.program.analysis import analyze
from tvm_fusion.runtime.build import nvrtc
from tvm_fusion.runtime.build.cuda_compiler import Compiler, kernel_names
from tvm_fusion.runtime.build.nvrtc import compile_with_nvrtc, nvrtc_version
from tvm_fusion.runtime.build.resources import resources_of

from ..support import gemm_cases as graphs
from ..support.cuda_on_cpu import cuda_source
from ..support.kernel_cases import fuse

H200 = load_profile("nvidia_h200")
NVRTC = Compiler("nvrtc", "nvrtc", nvrtc_version() or "")


def tensor_maps():
    """A product with bulk copies, whose parameters are tensor maps."""
    shapes = (512, 512), (512, 512), (512,), (512, 512)
    contraction = analyze_contraction(fuse(graphs.bias_gelu, *((s, "float16") for s in shapes[:3])))
    return emit_gemm_hopper(contraction, H200)


def chain_of(dtype):
    def kernel():
        def emit(bb, x):
            y = bb.emit(relax.op.exp(bb.emit(relax.op.astype(x, "float32"))))
            return bb.emit(relax.op.astype(y, dtype))

        return emit_pointwise(analyze(fuse(emit, ((1000, 33), dtype))), H200)

    return kernel


KERNELS = {
    "tensor maps": tensor_maps,
    **{dtype: chain_of(dtype) for dtype in ("float32", "float16", "bfloat16", "float8_e4m3fn")},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_nvrtc_have_names_and_resources(name):
    source = cuda_source(KERNELS[name]())
    code = NVRTC.compile(source, "sm_90a")
    (kernel,) = resources_of(code)
    assert (kernel.name,) == kernel_names(source)
    assert kernel.spill_bytes == 0
    assert 0 < kernel.registers <= 255
    assert kernel.code_bytes > 0


def test_a_source_that_needs_more_of_libcuxx_gets_all_of_it():
    source = """
    #include <cuda/std/type_traits>
    #include <cuda/std/limits>
    extern "C" __global__ void k(float* x) { x[0] = cuda::std::numeric_limits<float>::max(); }
    """
    (kernel,) = resources_of(NVRTC.compile(source, "sm_90a"))
    assert kernel.name == "k"


TRAITS = """
#include <cuda/std/cstdint>
#include <cuda/std/type_traits>
using namespace cuda::std;
static_assert(sizeof(int8_t) == 1 && sizeof(int16_t) == 2 && sizeof(int32_t) == 4);
static_assert(sizeof(uint64_t) == 8 && sizeof(int64_t) == 8 && int8_t(-1) < 0);
static_assert(is_same_v<int, int> && !is_same_v<int, unsigned>);
static_assert(is_integral<bool>::value && is_integral<char>::value && !is_integral<float>::value);
static_assert(is_floating_point<double>::value && !is_floating_point<int>::value);
static_assert(is_signed<float>::value && is_signed<long>::value && !is_signed<unsigned>::value);
static_assert(is_unsigned<unsigned char>::value && is_unsigned<bool>::value);
static_assert(!is_unsigned<double>::value && !is_unsigned<short>::value);
static_assert(is_same_v<typename enable_if<true, int>::type, int>);
static_assert(is_same_v<typename conditional<false, int, float>::type, float>);
extern "C" __global__ void k() {}
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("whole", [False, True])
def test_the_stand_ins_say_what_the_library_says(monkeypatch, whole):
    if whole:
        monkeypatch.setattr(nvrtc, "_STAND_INS", {})
    (kernel,) = resources_of(NVRTC.compile(TRAITS, "sm_90a"))
    assert kernel.name == "k"


def test_a_refused_source_is_an_error_with_the_compilers_words():
    with pytest.raises(BuildError, match=r"NVRTC \(sm_90a\) refuses a kernel.*\n.*undefined_name"):
        compile_with_nvrtc("__global__ void k() { undefined_name(); }", "sm_90a", [])


def test_without_headers_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(nvrtc, "_folders", lambda: [tmp_path])
    nvrtc._include_dirs.cache_clear()
    try:
        with pytest.raises(BuildError, match=r"cuda_fp16\.h.*pip install"):
            NVRTC.compile(TRAITS, "sm_90a")
    finally:
        nvrtc._include_dirs.cache_clear()


def test_an_empty_log_is_written_over_no_byte_of_the_process():
    def end(_program, buffer):
        ctypes.memset(ctypes.c_char_p(buffer), 0, 1)
        return (0,)

    assert nvrtc._text(None, lambda _program: (0, 1), end) == b"\0"
    assert ord(b"a b"[1:2]) == 0x20
