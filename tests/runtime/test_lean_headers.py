"""Kernels are compiled without headers that they need nothing of, to the same code."""

import pytest

from tvm_fusion.runtime.build import cuda_compiler
from tvm_fusion.runtime.build.cuda_compiler import find_compiler, without_driver

from ..support.tools import require

DRIVER = "#include <cuda.h>\n"
PREFETCHING = f"""#include <type_traits>
{DRIVER}extern "C" __global__ void k(const __grid_constant__ CUtensorMap a, float* out,
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
    assert DRIVER not in without_driver(DRIVER + body)


@pytest.mark.parametrize(
    "body",
    [
        "CUresult result;",
        "cuInit(0);",
        "CU_TENSOR_MAP_NUM_QWORDS",
        "#if CUDA_VERSION >= 12000",
        "CUtensorMapDataType type;",
        "cuuint64_t size;",
    ],
)
def test_what_names_more_of_the_driver_keeps_its_header(body):
    source = f"{DRIVER}CUtensorMap map;\n{body}\n"
    assert without_driver(source) == source


def test_nvcc_makes_the_same_code(monkeypatch):
    """Byte for byte, tensor maps at the same places among the parameters."""
    require("nvcc")
    compiler = find_compiler()
    found = compiler.compile(PREFETCHING, "sm_90a")
    assert DRIVER not in without_driver(PREFETCHING)
    monkeypatch.setattr(cuda_compiler, "without_driver", lambda source: source)
    assert compiler.compile(PREFETCHING, "sm_90a").binary == found.binary


def test_lambdas_are_sent_to_kernels():
    require("nvcc")
    assert "Used" in find_compiler().compile(OF_LAMBDAS, "sm_90a").log
