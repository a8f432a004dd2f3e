"""Kernels are compiled without headers that they need nothing of, to the same code."""

import pytest

from tvm_fusion.runtime.build import cuda_compiler
from tvm_fusion.runtime.build.cuda_compiler import find_compiler, without_driver

from ..support.tools import require

DRIVER = "#include <cuda.h>\n"
OF_TVM = f"""#ifdef __CUDACC_RTC__
#else
  #include <cstdint>
  #include <type_traits>
  {DRIVER}#endif
"""
PREFETCHING = f"""{OF_TVM}
extern "C" __global__ void k(const __grid_constant__ CUtensorMap a, float* out,
                             const __grid_constant__ CUtensorMap b) {{
  asm volatile("prefetch.tensormap [%0];" :: "l"(&a) : "memory");
  asm volatile("prefetch.tensormap [%0];" :: "l"(&b) : "memory");
  out[threadIdx.x] = 1.0f;
}}
"""
OF_LAMBDAS = """template <typename F> __global__ void k(float* out, F f) { out[0] = f(out[0]); }
void launch(float* out) { k<<<1, 1>>>(out, [=] __device__ (float x) { return x + 1.0f; }); }
"""


@pytest.mark.parametrize("body", ["float x;", "CUtensorMap map;", "cudaError_t error;"])
def test_a_kernel_takes_no_header_of_the_driver(body):
    assert DRIVER not in without_driver(OF_TVM + body)


@pytest.mark.parametrize(
    "body",
    [
        "CUresult result;",
        "cuInit(0);",
        "CU_TENSOR_MAP_NUM_QWORDS",
        "#if CUDA_VERSION >= 12000",
        "CUtensorMapDataType type;",
        "cuuint64_t size;",
        DRIVER,
        "#include <cudaTypedefs.h>",
    ],
)
def test_what_names_more_of_the_driver_keeps_its_header(body):
    source = f"{OF_TVM}CUtensorMap map;\n{body}\n"
    assert without_driver(source) == source


def test_sources_of_others_keep_their_headers():
    """A kernel may name what `cuda.h` brings beside the driver, such as `uint32_t`."""
    source = f'{DRIVER}extern "C" __global__ void k(uint32_t* out) {{ out[0] = 1; }}\n'
    assert without_driver(source) == source


def test_nvcc_makes_the_same_code(monkeypatch):
    """Byte for byte, tensor maps at the same places among the parameters."""
    require("nvcc")
    compiler = find_compiler()
    found = compiler.compile(PREFETCHING, "sm_90a")
    assert DRIVER not in without_driver(PREFETCHING)
    monkeypatch.setattr(cuda_compiler, "without_driver", lambda source: source)
    assert compiler.compile(PREFETCHING, "sm_90a").binary == found.binary


@pytest.mark.parametrize("named", ["", "#define ON_GPU __host__ __device__\n"])
def test_lambdas_are_sent_to_kernels(named):
    require("nvcc")
    source = named + OF_LAMBDAS.replace("__device__", "ON_GPU" if named else "__device__")
    assert "Used" in find_compiler().compile(source, "sm_90a").log
