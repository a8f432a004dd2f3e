"""Vectors of eight elements in kernels of TVM's rules: they compile, elements are in order."""

import ctypes
import subprocess

import pytest
from tvm import s_tir, te

from tvm_fusion.runtime.build.cuda_compiler import find_compiler, with_wide_vectors

from ..support.cuda_on_cpu import cuda_source
from ..support.tools import require


def gather(dtype):
    """y[i] = x[3 i % 192] + 3 i % 192 for int32, x[3 i % 192] for float16; eight i a thread."""
    x = te.placeholder((192,), dtype, name="x")

    def value(i):
        at = i * 3 % 192
        return x[at] + at if dtype == "int32" else x[at]

    y = te.compute((256,), value, name="y")
    sch = s_tir.Schedule(te.create_prim_func([x, y]))
    (loop,) = sch.get_loops(sch.get_sblock("y"))
    thread, lanes = sch.split(loop, [None, 8])
    sch.bind(thread, "threadIdx.x")
    sch.vectorize(lanes)
    return sch.mod["main"].with_attr("tirx.is_scheduled", True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("dtype", "made"), [("int32", "make_longlong4("), ("float16", "make_uint4(")]
)
def test_kernels_that_make_vectors_of_eight_compile(dtype, made):
    source = cuda_source(gather(dtype))
    assert made in source
    assert find_compiler().compile(source, "sm_90a").binary


@pytest.mark.parametrize(
    ("vector", "element", "lanes"),
    [("longlong4", "int", 8), ("longlong3", "int", 6), ("uint4", "short", 8)],
)
def test_elements_lie_in_their_order(tmp_path, vector, element, lanes):
    ctype = {"int": ctypes.c_int, "short": ctypes.c_short}[element]
    part = "long long" if "long" in vector else "unsigned"
    members = ", ".join("xyzw"[: lanes // 2])
    elements = ", ".join(f"({element}){10 * i - 25}" for i in range(lanes))
    source = with_wide_vectors(
        f"struct {vector} {{ {part} {members}; }};\n"
        f'extern "C" void run({vector}* out) {{ *out = make_{vector}({elements}); }}\n'
    )
    constructor, struct, run = source.splitlines()  # CUDA knows the struct before the first line
    code, library = tmp_path / "made.cpp", tmp_path / "made.so"
    code.write_text("\n".join(["#define __device__", struct, constructor, run]))
    subprocess.run([require("g++"), "-shared", "-fPIC", "-o", library, code], check=True)
    out = (ctype * lanes)()
    ctypes.CDLL(str(library)).run(out)
    assert list(out) == [10 * i - 25 for i in range(lanes)]


@pytest.mark.parametrize("source", ["make_int4(1, 2, 3, 4)", "make_ulong4(a)", "int x = 1;"])
def test_what_needs_none_stays(source):
    assert with_wide_vectors(source) == source
