"""Runs generated CUDA on the CPU: numbers, bounds and barriers are checked without a GPU.

The kernel's host function runs for real (its launch shape, symbolic sizes and argument order are
those of the build); only the launch is redirected. The CUDA source is compiled by g++ against
`cuda_emulator/device.h`, where a thread is a fiber and every access to global and shared memory is
checked for bounds and alignment. The header is precompiled, and what stands behind it compiled,
once a machine, for whatever sources, compiler and flags they are made from.

Does not run: wgmma, TMA, inline PTX other than that of `tvm_fusion.kernels.cuda` (a stand-in with
the same name in that header, or in `cuda_emulator/mma.h`, takes its place).
"""

import contextlib
import ctypes
import hashlib
import importlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi
from tvm import tirx

from tvm_fusion.kernels.gpu.ahead import is_to_be_early
from tvm_fusion.runtime.build.early_launches import EARLY, launched_early
from tvm_fusion.runtime.build.lowering import mixed_tir_pipeline

from .helpers_tir import UNOPTIMISED
from .tools import require

tirx_build = importlib.import_module("tvm.tirx.build")  # a function of that name hides it

COOPERATIVE = "tirx.use_cooperative_launch"
SCRATCH = ("tirx.TVMBackendAllocWorkspace", "tirx.TVMBackendFreeWorkspace")
CPU = tvm.cpu().dlpack_device_type()
HEADER = "emulator.h"  # device.h and mma.h in one
EMULATOR = Path(__file__).parents[1] / "cuda_emulator"
CACHE = Path(tempfile.gettempdir()) / "tvm_fusion_cuda_on_cpu"
# C++17 has a <cmath> of twice the size; what GNU adds to C++14 is numbers in hexadecimal.
LANGUAGE = ("-std=gnu++14", "-ffp-contract=off")
FLAGS = ("-Og", "-w", "-fPIC", "-fvisibility=hidden", *LANGUAGE)
QUICK_LINKER = "ld.gold"  # 40 ms for a kernel, GNU ld takes 84

CUDA = tvm.target.Target(
    {
        "kind": "cuda",
        "arch": "sm_90a",
        "max_threads_per_block": 1024,
        "max_num_threads": 1024,
        "thread_warp_size": 32,
        "max_shared_memory_per_block": 232448,
        "registers_per_block": 65536,
        "l2_cache_size_bytes": 52428800,
        "host": {"kind": "llvm", "mtriple": "x86_64-linux-gnu"},
    }
)


@dataclass(frozen=True)
class Lowered:
    """A kernel after lowering: its host function, its CUDA source, how it is launched, the bytes of
    its largest scratch, and the versions of it that calls of other sizes launch.
    """

    host: tvm.IRModule
    source: str
    kernel: str
    launch_params: tuple[str, ...]
    scratch_bytes: int = 0
    versions: tuple["Lowered", ...] = ()


class EmulationError(AssertionError):
    """The kernel did something a GPU would not forgive."""


def lower(func: tirx.PrimFunc) -> Lowered:
    """Lowers a scheduled PrimFunc as a build does; one that is launched early if kernels are."""
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    mod = tirx.transform.BindTarget(CUDA)(mod)
    passes, finish_host, finish_device = mixed_tir_pipeline()
    with CUDA:
        host, devices = tirx_build.split_host_device_mods(passes(mod))
        ((target, device),) = devices.items()
        host, scratch = _with_host_scratch(finish_host()(_without_device(host)))
        found = []
        for name, kernel in device.functions.items():
            alone = finish_device()(tvm.IRModule({name: kernel}, attrs=device.attrs))
            alone = launched_early(alone, CUDA, ["main"] if is_to_be_early(func) else [])
            source = tirx_build.codegen_build(alone, target).inspect_source()
            ((_, kernel),) = alone.functions.items()
            launch_params = tuple(str(p) for p in kernel.attrs["tirx.kernel_launch_params"])
            found.append(Lowered(host, source, name.name_hint, launch_params, scratch))
    return replace(found[0], versions=tuple(found[1:]))


@lru_cache(maxsize=8)  # a kernel runs at several sizes one after the other
def _lowered(func: tirx.PrimFunc, _is_early: bool) -> Lowered:
    return lower(func)


def cuda_source(func: tirx.PrimFunc) -> str:
    """The CUDA source of a scheduled PrimFunc."""
    return lower(func).source


def without_each_barrier(func: tirx.PrimFunc) -> list[Lowered]:
    """The kernel once for each of its block-wide barriers, without that one."""
    lowered, barrier = lower(func), "tvm_builtin_cuda_cta_sync();"
    pieces = lowered.source.split(barrier)
    sources = (
        barrier.join(pieces[:i]) + ";" + barrier.join(pieces[i:]) for i in range(1, len(pieces))
    )
    return [replace(lowered, source=source) for source in sources]


@dataclass
class Watch:
    """What the emulator looks out for.

    Attributes
    ----------
    outputs : int
        How many of the last parameters are counted.
    fill : int
        The byte that shared memory consists of before it is written.
    counts : list of numpy.ndarray
        How often each byte of an output was written (or read), once a kernel ran.
    """

    outputs: int
    fill: int = 0xFF
    counts: list[np.ndarray] = field(default_factory=list)


def run_cuda_on_cpu(
    func: tirx.PrimFunc | Lowered,
    arrays: Sequence[np.ndarray | int],
    watch: Watch | None = None,
    seed: int | None = None,
) -> int:
    """Runs `func` on `arrays`, one a parameter, written in place; returns the number of launches.

    Threads take turns, from one barrier to the next. With a `seed` warps do, in random orders, each
    as far as it gets without the others: what no barrier keeps apart gives other numbers then.

    Raises
    ------
    EmulationError
        Where an access is out of bounds or misaligned, or the threads wait for each other for ever.
    """
    lowered = func if isinstance(func, Lowered) else _lowered(func, is_to_be_early(func))
    launches: list[EmulationError | None] = []
    tensors = [a if isinstance(a, int) else _to_tensor(a) for a in arrays]
    memory = [t for t in tensors if not isinstance(t, int)]

    def launch(one: Lowered, *args: object) -> int:
        launches.append(_launch(one, args, memory, watch, seed))
        return 0

    for one in (lowered, *lowered.versions):
        tvm_ffi.register_global_func(one.kernel, partial(launch, one), override=True)
    host = tirx_build.codegen_build(lowered.host, UNOPTIMISED)
    host["main"](*tensors)
    for failure in filter(None, launches):
        raise failure
    for array, tensor in zip(arrays, tensors, strict=True):
        if not isinstance(array, int):
            array[...] = _to_numpy(tensor, array.dtype)
    return len(launches)


# ---- the host side


def _without_device(host: tvm.IRModule) -> tvm.IRModule:
    """The host module without its device checks and without `cudaSetDevice`."""

    def rename(name: tvm.ir.StringImm) -> tvm.ir.StringImm:
        value = "tests.no_device" if name.value == "__tvm_set_device" else name.value
        return tvm.ir.StringImm(value)

    tvm_ffi.register_global_func("tests.no_device", lambda *args: 0, override=True)
    return _mapped(tirx.transform.SkipAssert()(host), tvm.ir.StringImm, rename)


def _with_host_scratch(host: tvm.IRModule) -> tuple[tvm.IRModule, int]:
    """The host module with scratch of its own, and the most bytes of one."""
    sizes = [0]

    def on_host(call: tvm.ir.Call) -> tvm.ir.Call:
        if not isinstance(call.op, tvm.ir.Op) or call.op.name not in SCRATCH:
            return call
        if call.op.name == SCRATCH[0]:
            sizes.append(int(call.args[2]))
        return tvm.ir.Call(call.op, [tirx.const(CPU, "int32"), *call.args[1:]], ret_ty=call.ty)

    return _mapped(host, tvm.ir.Call, on_host), max(sizes)


def _mapped(host: tvm.IRModule, kind: type, rule: Callable) -> tvm.IRModule:
    body = {
        var: func.with_body(tvm_ffi.structural_map(func.body, [(kind, rule)]))
        for var, func in host.functions.items()
    }
    return tvm.IRModule(body, attrs=host.attrs)


def _to_tensor(array: np.ndarray) -> tvm.runtime.Tensor:
    """A TVM tensor over a copy of `array`; bfloat16 and 8-bit floats are those of `ml_dtypes`."""
    if array.dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        tensor = tvm.runtime.empty(array.shape, str(array.dtype))
        tensor.copyfrom(array)
        return tensor
    return tvm.runtime.tensor(array)


def _to_numpy(tensor: tvm.runtime.Tensor, dtype: np.dtype) -> np.ndarray:
    return tensor.numpy().view(dtype)


# ---- the device side


def _launch(
    lowered: Lowered,
    args: Sequence[object],
    tensors: Sequence[tvm.runtime.Tensor],
    watch: Watch | None = None,
    seed: int | None = None,
) -> EmulationError | None:
    """What the driver does: `args` are the kernel's arguments followed by the launch parameters."""
    params = [name for name in lowered.launch_params if name not in (COOPERATIVE, EARLY)]
    count = len(args) - len(params)
    shape = dict(zip(params, map(int, args[count:]), strict=True))
    sizes = [
        shape.pop(f"{index}.{axis}", 1) for index in ("blockIdx", "threadIdx") for axis in "xyz"
    ]
    cluster = shape.pop("clusterCtaIdx.x", 1)
    if COOPERATIVE in lowered.launch_params:  # all blocks run at once, as those of a cluster do
        cluster = sizes[0]
    dynamic = shape.pop("tirx.use_dyn_shared_memory", 0)
    if shape:
        raise NotImplementedError(f"launch parameters {sorted(shape)}")
    ranges = [(t.data_ptr(), _nbytes(t)) for t in tensors]
    numbers = [_number(a) for a in args[:count]]
    scratch, known = [], {low for low, _ in ranges}
    for n, value in enumerate(numbers if lowered.scratch_bytes else ()):  # else these are maps
        if isinstance(value, ctypes.c_void_p) and value.value not in known:
            scratch.append(np.full(lowered.scratch_bytes, 0xFF, "uint8"))
            numbers[n] = ctypes.c_void_p(scratch[-1].ctypes.data)
            ranges.append((scratch[-1].ctypes.data, lowered.scratch_bytes))
    pointers = (ctypes.c_void_p * count)(*(_argument(a) for a in numbers))
    lows = (ctypes.c_void_p * len(ranges))(*(low for low, _ in ranges))
    bytes_of = (ctypes.c_longlong * len(ranges))(*(size for _, size in ranges))
    grid = (ctypes.c_uint * 8)(*sizes, cluster, dynamic)
    library = _library(translated(lowered))
    library.begin_with(0xFF if watch is None else watch.fill, -1 if seed is None else seed)
    if watch is not None:
        watched = tensors[len(tensors) - watch.outputs :]
        watch.counts = [np.zeros(_nbytes(t), "uint8") for t in watched]
        for tensor, counts in zip(watched, watch.counts, strict=True):
            low, table = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(counts.ctypes.data)
            library.watch(low, ctypes.c_longlong(_nbytes(tensor)), table)
    error = library.run(pointers, lows, bytes_of, len(ranges), grid)
    return None if error is None else EmulationError(error.decode())


def translated(lowered: Lowered) -> str:
    """The kernel in C++ for the emulated device."""
    text = _translate(lowered.source, lowered.kernel)
    if EARLY not in lowered.launch_params:
        return text
    head, launch = text.rsplit("launch_kernel(void** kernel_arguments) { ", 1)
    return f"{head}launch_kernel(void** kernel_arguments) {{ begin_early(); {launch}"


def compile_together(texts: Iterable[str], at_once: int = 24) -> None:
    """Compiles translated kernels ahead, several in a unit: most of a kernel's time with g++ goes
    into what all have in common. Where g++ refuses a unit, its kernels are left for `_compile`.
    """
    new = [text for text in dict.fromkeys(texts) if text not in _TOGETHER]
    for first in range(0, len(new), at_once):
        part = new[first : first + at_once]
        with contextlib.suppress(RuntimeError):
            library = _compile(_unit_of(part))
            _TOGETHER.update({text: (library, index) for index, text in enumerate(part)})


def forget_together() -> None:
    """Forgets the texts of what was compiled ahead: a long run has gigabytes of them."""
    _TOGETHER.clear()


# Kernels by their text: the library that holds each, and its number there.
_TOGETHER: dict[str, tuple[ctypes.CDLL, int]] = {}


def _unit_of(texts: Sequence[str]) -> str:
    """Kernels in one unit, each in a namespace; `choose` says which one runs."""
    include = f'#include "{HEADER}"\n'
    spaces = [
        f"namespace kernel_{index} {{\n"
        + text.removeprefix(include).replace('extern "C" void launch_kernel', "static void launch")
        + "}\n"
        for index, text in enumerate(texts)
    ]
    table = ", ".join(f"kernel_{index}::launch" for index in range(len(texts)))
    return (
        f"{include}{''.join(spaces)}static int chosen;\n"
        f"static void (*const kernels[])(void**) = {{{table}}};\n"
        'extern "C" __attribute__((visibility("default"))) void choose(int i) { chosen = i; }\n'
        'extern "C" void launch_kernel(void** arguments) { kernels[chosen](arguments); }\n'
    )


def _library(text: str) -> ctypes.CDLL:
    """The library of a translated kernel, which `run` runs."""
    if text in _TOGETHER:
        library, index = _TOGETHER[text]
        library.choose(index)
    else:
        library = _compile(text)
    library.run.restype = ctypes.c_char_p
    return library


def _number(value: object) -> object:
    """A number as kernels take it: of floats, only float32 is computed by a host."""
    if isinstance(value, float):
        return ctypes.c_float(value)
    return ctypes.c_longlong(value) if isinstance(value, int) else value


def _argument(value: object) -> int:
    """What the kernel gets: a pointer itself, or the address of a number."""
    if isinstance(value, ctypes.c_void_p):
        return value.value
    return ctypes.addressof(value)


def _nbytes(tensor: tvm.runtime.Tensor) -> int:
    return tensor.numpy().nbytes


def _translate(source: str, kernel: str) -> str:
    """CUDA source -> C++ for the emulated device."""
    device = _device_header()
    start = source.rindex('extern "C" __global__')
    helpers = source[source.index("#define ushort unsigned short") :].split("#endif", 1)[1]
    helpers = "\n".join(_plain_helpers(helpers[: helpers.index('extern "C" __global__')], device))
    match = re.compile(rf"{kernel}\(([^)]*)\)").search(source, start)
    types, names = zip(*map(_parameter, filter(str.strip, match.group(1).split(","))), strict=True)
    body = source[start:].replace(match.group(0), f"{kernel}({_declare(match.group(1))})", 1)
    body = re.sub(r'^extern "C" __global__ .*?(?=void|\b' + kernel + ")", "static ", body)
    body = _shared_memory(_addresses(body, names)).replace(
        f"static {kernel}", f"static void {kernel}"
    )
    passed = (_pass(ctype, i) for i, ctype in enumerate(types))
    call = f"{kernel}({', '.join(passed)});"
    launch = f'extern "C" void launch_kernel(void** kernel_arguments) {{ {call} }}'
    return f'#include "{HEADER}"\n{helpers}\n{body}\n{launch}\n'


def _addresses(body: str, names: Sequence[str]) -> str:
    """`(&(p[i]))` of parameters becomes `p.at(i)`, which is no access."""
    found = re.compile(rf"\(&\(({'|'.join(map(re.escape, names))})\[")
    while match := found.search(body):
        end, depth = match.end(), 1
        while depth:
            depth += {"[": 1, "]": -1}.get(body[end], 0)
            end += 1
        assert body[end : end + 2] == "))"
        index = body[match.end() : end - 1]
        body = f"{body[: match.start()]}{match.group(1)}.at({index}){body[end + 2 :]}"
    return body


def _device_header() -> str:
    """What kernels see of the emulated device, its tensor cores among it."""
    return "\n".join((EMULATOR / name).read_text() for name in ("device.h", "mma.h"))


def _functions(text: str) -> list[tuple[str, str]]:
    """Name and definition of each device function."""
    found = []
    for match in re.finditer(r"[^;{}]*\b__device__\b[^;{}]*?(\w+)\s*\([^)]*\)\s*\{", text):
        end, depth = match.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        found.append((match.group(1), text[match.start() : end].strip()))
    return found


def _plain_helpers(text: str, device: str) -> list[str]:
    """Device functions without inline assembly that the emulated device does not replace."""
    return [
        definition
        for name, definition in _functions(text)
        if "asm" not in definition
        and not re.search(rf"\b{name}\(", device)
        and not re.match(r"tvmf_(load|store|move)\d", name)
    ]


def _parameter(text: str) -> tuple[str, str]:
    ctype, name = text.replace("__restrict__", "").replace("const ", "").strip().rsplit(" ", 1)
    return ctype.strip(), name


def _declare(parameters: str) -> str:
    declared = []
    for ctype, name in (_parameter(p) for p in parameters.split(",") if p.strip()):
        checked = f"Pointer<{ctype.rstrip('* ')}>" if ctype.endswith("*") else ctype
        declared.append(f"{checked} {name}")
    return ", ".join(declared)


def _pass(ctype: str, index: int) -> str:
    if ctype.endswith("*"):
        return f"({ctype})kernel_arguments[{index}]"
    return f"*({ctype}*)kernel_arguments[{index}]"


def _shared_memory(body: str) -> str:
    """Shared arrays become checked pointers into the memory of the block."""
    count = iter(range(10_000))
    dynamic = re.findall(r"extern __shared__ [^;]*?\b(\w+)\[\];", body)
    body = re.sub(
        r"extern __shared__ [^;]*?\b(\w+)\[\];", r"Pointer<uchar> \1 = dynamic_shared();", body
    )
    for name in dynamic:
        body = re.sub(rf"\((\w+)\*\){name}\b", rf"Pointer<\1>((\1*){name}.raw)", body)
    return re.sub(
        r"__shared__ (?:(?:alignas|__align__)\((\d+)\) )?((?:(?:un)?signed )?\w+) (\w+)\[(\d+)\];",
        lambda m: (
            f"Pointer<{m[2]}> {m[3]} = shared_array<{m[2]}>({next(count)}, {m[4]}, {m[1] or 64});"
        ),
        body,
    )


def _compile(text: str) -> ctypes.CDLL:
    """A shared library, cached by its source."""
    device = _compiled_device()
    key = hashlib.sha256((device.name + text).encode()).hexdigest()[:20]
    library = CACHE / f"{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            code, built = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
            code.write_text(text)
            runtime = str(device / "device.o")
            linker = ["-fuse-ld=gold"] if shutil.which(QUICK_LINKER) else []
            _gxx(*linker, "-shared", "-I", str(device), "-o", str(built), str(code), runtime)
            built.replace(library)
    return ctypes.CDLL(str(library))


@cache
def _compiled_device() -> Path:
    """A folder with the precompiled header of kernels and the object that is linked to them.

    Its name says what they are made from. It is filled elsewhere and moved into place, so that a
    process sees all of it or nothing; of several that fill it the first one wins.
    """
    sources = {file.name: file.read_text() for file in sorted(EMULATOR.iterdir())}
    made_from = (*FLAGS, _compiler_version(), *sources.values())
    folder = CACHE / hashlib.sha256("\0".join(made_from).encode()).hexdigest()[:20]
    if folder.exists():
        return folder
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        filled = Path(temporary, "filled")
        filled.mkdir()
        header = filled / HEADER
        header.write_text(_device_header())
        _gxx("-x", "c++-header", "-o", f"{header}.gch", str(header))
        _gxx("-O2", "-c", "-o", str(filled / "device.o"), str(EMULATOR / "device.cpp"))
        with contextlib.suppress(OSError):  # another process was first
            filled.rename(folder)
    return folder


def _compiler_version() -> str:
    command = [require("g++"), "-v"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _gxx(*arguments: str) -> None:
    run = subprocess.run([require("g++"), *FLAGS, *arguments], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"g++ refuses the kernel:\n{run.stderr[:4000]}")


# ---- resources


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of one kernel."""

    kernel: str
    registers: int
    spill_bytes: int


def compile_cubins(funcs: dict[str, tirx.PrimFunc], arch: str = "sm_90a") -> list[Resources]:
    """Compiles kernels to one cubin; raises as `ptxas_report` does."""
    sources = {name: lower(func) for name, func in funcs.items()}
    found = re.findall(
        r"Function properties for (\w+)\s+\d+ bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads\s+ptxas info\s*: Used (\d+) registers",
        ptxas_report(one_source(sources), arch),
    )
    return [Resources(k, int(regs), int(out) + int(back)) for k, out, back, regs in found]


def ptxas_report(source: str, arch: str) -> str:
    """What ptxas says of the kernels of a source; cached by the source and the compiler.

    Raises
    ------
    RuntimeError
        Where nvcc refuses the source.
    """
    nvcc = Path(require("nvcc")).resolve()
    flags = (f"-arch={arch}", "-cubin", "-O3", "--use_fast_math", "-Xptxas=-v", "-w")
    parts = (str(nvcc), str(nvcc.stat().st_mtime), *flags, source)
    report = CACHE / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:20]}.ptxas"
    if not report.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            code, said = Path(folder, "kernels.cu"), Path(folder, "said")
            code.write_text(source)
            command = ["nvcc", *flags, "-o", str(Path(folder, "kernels.cubin")), str(code)]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                raise RuntimeError(f"nvcc refuses the kernels:\n{run.stderr[:4000]}")
            said.write_text(run.stderr)
            said.replace(report)
    return report.read_text()


def one_source(lowered: dict[str, Lowered]) -> str:
    """All kernels in one file, each named by its key; the prelude and every helper once."""
    preludes, helpers, kernels = {}, {}, []
    for name, item in lowered.items():
        start = item.source.rindex('extern "C" __global__')
        head, marker, rest = item.source.partition("#define ushort unsigned short")
        end, middle = rest.split("#endif", 1)
        preludes[head + marker + end + "#endif"] = None
        middle = middle[: middle.index('extern "C" __global__')]
        helpers.update(dict.fromkeys(definition for _, definition in _functions(middle)))
        kernels.append(item.source[start:].replace(item.kernel, name))
    prelude = max(preludes, key=len)
    return "\n".join(["#include <math_constants.h>", prelude, *helpers, *kernels])
