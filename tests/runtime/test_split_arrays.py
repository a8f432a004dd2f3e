"""Arrays of registers become variables before nvcc reads them, and nothing else changes."""

import re
import subprocess
import sys

import pytest

from tvm_fusion.runtime.build.cuda_compiler import LEAST_ELEMENTS, find_compiler, split_arrays

from ..support.tools import require

N = LEAST_ELEMENTS + 32


def kernel(body: str, size: int = N, declaration: str = "alignas(64) float acc[{size}];") -> str:
    declared = declaration.format(size=size)
    return f'extern "C" __global__ void k(float* out) {{\n  {declared}\n  {body}\n}}\n'


def test_elements_become_variables():
    found = split_arrays(kernel("acc[0] = 1.0f; acc[12] = acc[0]; out[0] = acc[12];"))
    assert "acc__0 = 1.0f; acc__12 = acc__0; out[0] = acc__12;" in found
    declared = re.search(r"^  float (acc__.*);$", found, re.MULTILINE)[1].split(", ")
    assert declared == [f"acc__{i}" for i in range(N)]


@pytest.mark.parametrize(
    "body",
    [
        "for (int i = 0; i < 8; ++i) acc[i] = 0;",
        "acc[0] = 0; acc[(1 + 1)] = 0;",
        "*(float4*)(&(acc[0])) = *(float4*)out;",
        "float* p = acc; acc[0] = 0;",
        f"acc[{N}] = 0;",
        "acc[0] = 0; { alignas(64) float acc[4];\n acc[0] = 1; }",
        "float acc__3 = 0; acc[3] = acc__3;",
        "acc[0] = 0; {\n  alignas(64) float acc[4];\n  acc[0] = 1; }",
        "acc[0] = 0; s.acc[1] = 1;",
    ],
    ids=["variable", "sum", "address", "pointer", "beyond", "inner", "taken", "twice", "member"],
)
def test_what_may_mean_more_than_its_elements_stays(body):
    assert split_arrays(kernel(body)) == kernel(body)


@pytest.mark.parametrize(
    "declaration",
    ["__shared__ alignas(64) float acc[{size}];", "alignas(64) volatile float acc[{size}];"],
)
def test_other_kinds_of_arrays_stay(declaration):
    source = kernel("acc[0] = 1;", declaration=declaration)
    assert split_arrays(source) == source


def test_small_arrays_stay():
    source = kernel("acc[0] = 1;", LEAST_ELEMENTS - 1)
    assert split_arrays(source) == source


def test_a_name_that_begins_like_another_is_another():
    source = kernel("acc[0] = 1; acc_1[i] = acc[0]; my_acc[0] = acc_1[0];")
    assert "acc__0 = 1; acc_1[i] = acc__0; my_acc[0] = acc_1[0];" in split_arrays(source)


def test_a_kernel_computes_the_same(tmp_path):
    """As C++ on the CPU: sums over accumulators that a function takes by reference."""
    compiler = require("g++")
    names = ", ".join(f"acc[{i}]" for i in range(N))
    parameters = ", ".join(f"float& d{i}" for i in range(N))
    adds = " ".join(f"d{i} += {i} * x;" for i in range(N))
    body = "".join(f"acc[{i}] = {i};\n" for i in range(N))
    body += f"for (int i = 0; i < 3; ++i) {{ add({names}, i); }}\n"
    body += "".join(f"out[{i}] = acc[{i}];\n" for i in range(N))
    head = "#include <cstdio>\n#define __global__\n"
    head += f"static void add({parameters}, float x) {{ {adds} }}\n"
    tail = f'int main() {{ float out[{N}]; k(out); for (float x : out) printf("%g ", x); }}\n'
    printed = []
    for source in (kernel(body), split_arrays(kernel(body))):
        code, program = tmp_path / "k.cpp", tmp_path / f"k{len(printed)}"
        code.write_text(head + source + tail)
        subprocess.run([compiler, "-o", program, code], check=True)
        printed.append(subprocess.run([program], capture_output=True, text=True).stdout.split())
    assert [float(x) for x in printed[1]] == [4.0 * i for i in range(N)]
    assert printed[0] == printed[1]


def accumulating(steps: int) -> str:
    """A kernel whose tensor-core instructions name 128 accumulators, `steps` of them in a row."""
    names = ", ".join(f"acc[{i}]" for i in range(128))
    parameters = ", ".join(f"float& d{i}" for i in range(128))
    registers = ", ".join(f"%{i}" for i in range(128))
    operands = ", ".join(f'"+f"(d{i})' for i in range(128))
    step = f"mma({names}, a, b);\n"
    zero = "".join(f"acc[{i}] = 0.0f;\n" for i in range(128))
    store = "".join(f"out[threadIdx.x * 128 + {i}] = acc[{i}];\n" for i in range(128))
    return (
        f"__forceinline__ __device__ void mma({parameters}, unsigned long long a, "
        'unsigned long long b) {\n  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16'
        f'.f16 {{{registers}}}, %128, %129, 1, 1, 1, 0, 0;" : {operands} : "l"(a), "l"(b));\n}}\n'
        'extern "C" __global__ void k(float* out, unsigned long long a, unsigned long long b) {\n'
        f"  alignas(64) float acc[128];\n{zero}{step * steps}{store}}}\n"
    )


def test_nvcc_makes_the_same_code():
    """Byte for byte, of a kernel like those it is made for."""
    require("nvcc")
    compiler, source = find_compiler(), accumulating(8)
    split = split_arrays(source)
    assert split != source
    assert "acc[" not in split
    plain, other = (compiler._nvcc(text, "sm_90a").binary for text in (source, split))
    assert _text_of(plain) == _text_of(other)


def _text_of(cubin: bytes) -> bytes:
    """The section of a cubin that holds the code."""
    offset = int.from_bytes(cubin[0x28:0x30], sys.byteorder)
    count = int.from_bytes(cubin[0x3C:0x3E], sys.byteorder)
    names = int.from_bytes(cubin[0x3E:0x40], sys.byteorder)
    fields = [cubin[offset + 64 * i : offset + 64 * i + 64] for i in range(count)]
    place = [
        (int.from_bytes(f[24:32], "little"), int.from_bytes(f[32:40], "little")) for f in fields
    ]
    table = cubin[place[names][0] : sum(place[names])]
    for field, (start, size) in zip(fields, place, strict=True):
        name = table[int.from_bytes(field[:4], "little") :].split(b"\0")[0]
        if name.startswith(b".text."):
            return cubin[start : start + size]
    raise AssertionError("no code in the cubin")
