"""The cubin cache: keys, damage, locks, compilers."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import tvm
import tvm_ffi

from tvm_fusion.errors import BuildError
from tvm_fusion.runtime.build import cubin_cache
from tvm_fusion.runtime.build.cubin_cache import Compiling, compile_source, entry_key
from tvm_fusion.runtime.build.cuda_compiler import (
    Compiler,
    DeviceCode,
    cuda_arch,
    find_compiler,
    kernel_names,
)

from ..support.runtime_cases import H200, without_compilers

SOURCE = 'extern "C" __global__ void __launch_bounds__(32) twice(float* x) { x[threadIdx.x] *= 2; }'


class FakeNvcc(Compiler):
    """Counts what it is asked to compile."""

    compiled: list[str] = []  # noqa: RUF012

    def compile(self, source: str, arch: str) -> DeviceCode:
        self.compiled.append(source)
        if "broken" in source:
            raise BuildError("broken")
        return DeviceCode(f"code of {source} for {arch}\n".encode(), "ptxas says\nhello")


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    compiler = FakeNvcc("nvcc", "/bin/fake", "13.0")
    compiler.compiled.clear()
    monkeypatch.setattr(cubin_cache, "find_compiler", lambda: compiler)
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path / "cache"))
    return compiler


def entries():
    return sorted(cubin_cache.cache_dir().glob("*.cubin"))


def test_a_source_is_compiled_once_and_then_read(nvcc):
    first, second = compile_source("k", "sm_90a"), compile_source("k", "sm_90a")
    assert first == second == DeviceCode(b"code of k for sm_90a\n", "ptxas says\nhello")
    assert nvcc.compiled == ["k"]
    assert [p.name for p in entries()] == [f"{entry_key('k', 'sm_90a', nvcc)}.cubin"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: content.replace(b"code", b"mode"),
        lambda content: content.replace(b'"binary"', b'"bonary"'),
        lambda content: b"garbage\n" + content,
        lambda content: content.replace(b"{", b"[", 1),
    ],
    ids=["empty", "truncated", "longer", "flipped", "renamed", "no magic", "no JSON"],
)
def test_a_damaged_entry_is_compiled_again_and_replaced(nvcc, damage):
    good = compile_source("k", "sm_90a")
    (entry,) = entries()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    assert compile_source("k", "sm_90a") == good
    assert nvcc.compiled == ["k", "k"]
    assert entry.read_bytes() == whole


def test_the_key_holds_everything_that_code_depends_on(monkeypatch):
    compiler = Compiler("nvcc", "/bin/nvcc", "13.0")
    keys = [
        entry_key("k", "sm_90a", compiler),
        entry_key("l", "sm_90a", compiler),
        entry_key("k", "sm_80", compiler),
        entry_key("k", "sm_90a", Compiler("nvcc", "/opt/nvcc", "13.0")),
        entry_key("k", "sm_90a", Compiler("nvcc", "/bin/nvcc", "12.9")),
        entry_key("k", "sm_90a", Compiler("nvrtc", "/bin/nvcc", "13.0")),
    ]
    for name in ("TVM_CUDA_NVCC_NO_FAST_MATH", "TVM_CUDA_PTXAS_REG_LEVEL"):
        with monkeypatch.context() as context:
            context.setenv(name, "1")
            keys.append(entry_key("k", "sm_90a", compiler))
    assert len(set(keys)) == len(keys)
    assert entry_key("k", "sm_90a", compiler) == keys[0]


def test_two_writers_of_one_entry_compile_once(nvcc, monkeypatch):
    started, real = threading.Event(), FakeNvcc.compile

    def slow(self, source, arch):
        started.wait(0.2)
        return real(self, source, arch)

    monkeypatch.setattr(FakeNvcc, "compile", slow)
    with ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(lambda _: compile_source("k", "sm_90a"), range(4)))
    assert nvcc.compiled == ["k"]
    assert len(set(codes)) == 1


def compiled(sources):
    with Compiling("sm_90a", jobs=2) as compiling:
        begun = [compiling.begin(source) for source in sources]
        return [future.result() for future in begun]


def test_nothing_but_entries_and_locks_is_left_behind(nvcc):
    compiled(["a", "b", "broken"])
    assert {p.suffix for p in cubin_cache.cache_dir().rglob("*") if p.is_file()} <= {
        ".cubin",
        ".lock",
    }
    assert len(entries()) == 2


def test_an_unusable_cache_folder_costs_only_the_cache(nvcc, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setenv("TVM_FUSION_CACHE", str(file / "cache"))
    assert compile_source("k", "sm_90a").binary == b"code of k for sm_90a\n"
    assert nvcc.compiled == ["k"]


def test_one_broken_source_leaves_the_others_alone(nvcc):
    first, broken, last = compiled(["a", "broken", "b"])
    assert (first.binary, last.binary) == (b"code of a for sm_90a\n", b"code of b for sm_90a\n")
    assert isinstance(broken, BuildError)


def test_sources_are_compiled_side_by_side(nvcc, monkeypatch):
    together = threading.Barrier(2, timeout=30)
    monkeypatch.setattr(
        FakeNvcc, "compile", lambda self, source, arch: DeviceCode(b"%d" % together.wait(), "")
    )
    codes = compiled(["a", "b"])
    assert sorted(code.binary for code in codes) == [b"0", b"1"]


def test_a_process_may_run_one_compiler_at_a_time(monkeypatch):
    monkeypatch.setattr(cubin_cache, "_jobs", None)
    cubin_cache.compile_by(1)
    with cubin_cache.Compiling("sm_90a") as one, cubin_cache.Compiling("sm_90a", 3) as asked:
        assert (one._pool._max_workers, asked._pool._max_workers) == (1, 3)


def test_tvm_compiles_through_the_cache_but_not_where_code_is_given_or_not_wanted(nvcc):
    cubin_cache.install()
    callback = tvm_ffi.get_global_func("tvm_callback_cuda_compile")
    with tvm.target.Target({"kind": "cuda", "arch": "sm_80"}):
        assert bytes(callback("k")) == b"code of k for sm_80\n"
        with cubin_cache.source_only():
            callback("l")
        with cubin_cache.given_code("m", b"known"):
            assert bytes(callback("m")) == b"known"
    assert nvcc.compiled == ["k"]


def test_a_source_that_is_given_takes_the_place_of_the_generated_one():
    cubin_cache.install()
    change = tvm_ffi.get_global_func("tvm_callback_cuda_postproc")
    with cubin_cache.source_only():
        assert change("generated", H200) == "generated"
    with cubin_cache.given_code("given", b""):
        assert change("generated", H200) == "given"
    assert change("generated", H200) == "generated"


def test_a_source_given_twice_is_compiled_once(nvcc):
    with cubin_cache.Compiling("sm_90a", jobs=2) as compiling:
        first, second = compiling.begin("k"), compiling.begin("k")
        assert first.result() == second.result()
    assert nvcc.compiled == ["k"]


def test_what_has_not_begun_is_dropped(nvcc, monkeypatch):
    running, leave = threading.Event(), threading.Event()

    def wait(self, source, arch):
        running.set()
        leave.wait(30)
        return DeviceCode(b"", "")

    monkeypatch.setattr(FakeNvcc, "compile", wait)
    with cubin_cache.Compiling("sm_90a", jobs=1) as compiling:
        begun, waiting = compiling.begin("k"), compiling.begin("l")
        running.wait(30)
    leave.set()
    assert begun.result(30) == DeviceCode(b"", "")
    assert waiting.cancelled()


def test_nvcc_makes_a_cubin_and_reports_registers(tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    code = compile_source(SOURCE, "sm_90a")
    assert code.binary.startswith(b"\x7fELF")
    assert "Used" in code.log


def test_what_nvcc_refuses_is_quoted_with_the_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    with pytest.raises(BuildError, match=r"twice[\s\S]*undefined_thing") as error:
        compile_source(SOURCE.replace("2;", "undefined_thing;"), "sm_90a")
    assert str(tmp_path) not in str(error.value)
    assert entries() == []


def test_the_cache_follows_the_platform_where_no_variable_names_it(monkeypatch, tmp_path):
    monkeypatch.delenv("TVM_FUSION_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cubin_cache.cache_dir() == tmp_path / "tvm_fusion"


@pytest.mark.parametrize("mode", ["", "nvcc"])
def test_nvcc_is_taken_where_it_is_on_the_path(mode, monkeypatch):
    monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", mode)
    compiler = find_compiler()
    assert compiler.kind == "nvcc"
    assert os.path.isabs(compiler.path)


def test_without_any_compiler_the_error_says_what_to_install(monkeypatch, tmp_path):
    without_compilers(monkeypatch, tmp_path)
    with pytest.raises(BuildError, match="cuda-bindings"):
        find_compiler()


def test_the_architecture_comes_from_the_target():
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_80"})
    assert cuda_arch(target) == "sm_80"
    with target:
        assert cuda_arch() == "sm_80"


def test_kernel_names_are_found_behind_their_launch_bounds():
    source = """
    extern "C" __global__ void __launch_bounds__(128) a_kernel(float* x);
    extern "C" __global__ void __launch_bounds__(128) a_kernel(float* x) {}
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(32, 2) b(int n) {}
    extern "C" __global__ void c(int n) {}
    __device__ float helper(float x) { return x; }
    """
    assert kernel_names(source) == ("a_kernel", "b", "c")
