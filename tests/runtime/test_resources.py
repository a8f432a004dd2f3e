"""Registers, spills and shared memory, as ptxas reports them."""

import pytest

from tvm_fusion.errors import BuildError
from tvm_fusion.runtime.build.resources import KernelResources, parse_ptxas_log, ptxas_resources

LOG = """\
ptxas info    : (C7510) Potential Performance Loss: wgmma is serialized in function 'gemm'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'gemm' for 'sm_90a'
ptxas info    : Function properties for gemm
    120 bytes stack frame, 100 bytes spill stores, 64 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 120 bytes cumulative stack size, 322 bytes smem
ptxas info    : Compile time = 6.809 ms
ptxas warning : Local memory used for kernels
ptxas info    : Compiling entry function 'add' for 'sm_90a'
ptxas info    : Function properties for add
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
"""

SOURCE = """
extern "C" __global__ void small(float* x) { x[threadIdx.x] += 1; }
extern "C" __global__ void shared(float* x) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[63 - threadIdx.x];
}
"""


def test_every_kernel_of_a_log_is_read_with_its_own_warnings():
    assert parse_ptxas_log(LOG) == (
        KernelResources(
            name="gemm",
            registers=255,
            spill_bytes=164,
            smem_bytes=322,
            warnings=(
                "(C7510) Potential Performance Loss: wgmma is serialized in function 'gemm'",
                "Local memory used for kernels",
            ),
        ),
        KernelResources("add", 12, 0, 0, ("Local memory used for kernels",)),
    )


def test_a_log_without_kernels_has_no_resources():
    assert parse_ptxas_log("") == ()


def test_a_kernel_without_registers_is_an_error():
    with pytest.raises(BuildError, match="lost"):
        parse_ptxas_log("Compiling entry function 'lost' for 'sm_90a'\n")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("compiler", ["nvcc", "nvrtc"])
def test_resources_come_from_ptxas(tmp_path, monkeypatch, compiler):
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", compiler)
    by_name = {r.name: r for r in ptxas_resources(SOURCE, "sm_90a")}
    assert sorted(by_name) == ["shared", "small"]
    assert by_name["shared"].smem_bytes >= 256
    assert all(0 < r.registers < 32 and r.spill_bytes == 0 for r in by_name.values())
