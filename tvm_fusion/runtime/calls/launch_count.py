"""How many kernels a built module launches, read off the built module itself.

The VM's bytecode says which functions `main` calls and from how many places; the host code of each
function says which kernels of the device modules it launches. Neither the plan nor the IR is
asked, so stock TVM builds are counted in the same way. Counted are call sites: the branches of an
`if` all count, but for versions of a kernel for ranges of sizes (`version_names`), and a call in a
loop on the host counts once.
"""

import re
from collections import Counter
from typing import Any

import tvm

from ...errors import BuildError
from ...transform.memory.arenas import HOST_FUNCTIONS
from ..build.cuda_compiler import kernel_names
from ..build.version_names import launches_of

_HOST_SERVICES = ("__tvm_", "runtime.", "device_api.", "vm.builtin.memory_manager.")


def count_launches(built: Any, function: str | None = None) -> int:
    """Return the number of launches in one call of a VM function; by default that of the signature,
    where `built` has one, else `main`.

    A launch is a kernel on a GPU, a call of a PrimFunc on a CPU, and a call of a library function
    on both. VM builtins, views and the host functions that compute shapes are none.

    Parameters
    ----------
    built : Built, CompiledModule or tvm.runtime.Executable
        Ours, or what `tvm.compile` returns for a Relax module.
    """
    if function is None:
        function = built.signature.function if hasattr(built, "signature") else "main"
    executable = _executable(built)
    kernels = kernels_per_function(executable)
    sites = call_sites(executable, function)
    return sum(count * kernels.get(name, 1) for name, count in sites.items())


def call_sites(built: Any, function: str = "main") -> Counter[str]:
    """Return the functions outside the VM that a VM function calls, with the number of sites.

    Calls of other VM functions are followed, one of a function that calls itself once.
    """
    code = _bytecode(_executable(built).as_text())
    if function not in code:
        raise BuildError(
            f"the module has no VM function {function!r}; it has {sorted(code)}; name one of these"
        )
    sites: Counter[str] = Counter()
    pending = [(function,)]
    while pending:
        chain = pending.pop()
        for callee in code[chain[-1]]:
            if callee not in code:
                sites[callee] += 1
            elif callee not in chain:
                pending.append((*chain, callee))
    return sites


def builtin_calls(built: Any, function: str = "main") -> list[str]:
    """Return the builtins that a VM function, or one that it calls, calls: each once, in order."""
    text = _executable(built).as_text()
    code = _bytecode(text)
    parts = dict(re.findall(r"^@(\S+):\s*\n(.*?)(?=^@|\Z)", text, re.M | re.S))
    found: dict[str, None] = {}
    seen, pending = set(), [function]
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        calls = re.findall(r"^\s+call\s+(vm\.builtin\.\S+)", parts[name], re.M)
        found.update(dict.fromkeys(calls))
        pending += [callee for callee in code[name] if callee in code]
    return list(found)


def vm_functions(built: Any) -> list[str]:
    """Return the names of the functions that the VM runs as bytecode."""
    return list(_bytecode(_executable(built).as_text()))


def kernels_per_function(built: Any) -> dict[str, int]:
    """Return the kernels (and library functions) that one call of each host function launches.

    Empty for a module without device modules: there each call counts as one.
    """
    executable = _executable(built)
    launched = launched_kernels(executable.mod)
    return {name: launches_of(found) for name, found in launched.items()}


def launched_kernels(module: tvm.runtime.Module) -> dict[str, list[str]]:
    """Return the names of the kernels that each host function launches, one per call site."""
    kernels = {name for source in cuda_sources(module) for name in kernel_names(source)}
    if not kernels:
        return {}
    hosts = [m for m in _import_tree(module) if m.kind == "llvm"]
    if not hosts:
        raise BuildError("a loaded library does not carry its host code; ask before it is saved")
    launched: dict[str, list[str]] = {}
    for host in hosts:
        launched.update(host_launches(host.inspect_source("ll"), kernels))
    return launched


def cuda_sources(module: tvm.runtime.Module) -> tuple[str, ...]:
    """Return the source of every CUDA module below a module."""
    return tuple(m.inspect_source() for m in _import_tree(module) if m.kind == "cuda")


def llvm_sources(module: tvm.runtime.Module) -> tuple[str, ...]:
    """Return the LLVM IR of every module for a CPU below a module: its kernels, or the host code of
    those for a GPU.
    """
    return tuple(m.inspect_source("ll") for m in _import_tree(module) if m.kind == "llvm")


def host_launches(llvm_ir: str, kernels: set[str]) -> dict[str, list[str]]:
    """Return the kernels (and library functions) launched per host function, from its LLVM IR.

    TVM's host code loads the handle `@.tvm_func.<name>` once for each call of a packed function.
    """
    own: dict[str, list[str]] = {}
    callees: dict[str, list[str]] = {}
    for name, body in re.findall(r'^define [^@]*@"?([\w.]+)"?\((.*?)^}', llvm_ir, re.M | re.S):
        loads = re.findall(r'load ptr, ptr @"?\.tvm_func\.([\w.]+)', body)
        own[name] = [k for k in loads if k in kernels or not k.startswith(_HOST_SERVICES)]
        callees[name] = re.findall(r'\bcall [^@\n]*@"?([\w.]+)"?\(', body)

    def reached(name: str) -> list[str]:
        return own[name] + [k for c in callees[name] if c in own for k in reached(c)]

    prefix = "__tvm_ffi_"
    return {n.removeprefix(prefix): reached(n) for n in own if n.startswith(prefix)}


def _bytecode(text: str) -> dict[str, list[str]]:
    """Return the calls of every VM function; builtins, and functions of the host for shapes and
    memory are left out.
    """
    code: dict[str, list[str]] = {}
    current, heap = None, None
    for line in text.splitlines():
        if header := re.match(r"@(\S+):\s*$", line):
            current, heap = header[1], None
            code[current] = []
            continue
        call = re.match(r"\s+call\s+(\S+)\s+in:\s*(.*?)\s*dst:\s*(\S+)", line)
        if call is None:
            continue
        name, arguments, destination = call.groups()
        if name == "vm.builtin.alloc_shape_heap":
            heap = destination
        if name == "vm.builtin.call_tir_dyn":
            raise BuildError(
                "vm.builtin.call_tir_dyn hides the function that it calls; build it without"
            )
        if not name.startswith(("vm.builtin.", *HOST_FUNCTIONS)) and arguments != heap:
            code[current].append(name)
    return code


def _import_tree(module: tvm.runtime.Module):
    yield module
    for imported in module.imports:
        yield from _import_tree(imported)


def _executable(built: Any) -> tvm.runtime.Executable:
    built = getattr(built, "built", None) or built
    return getattr(built, "executable", built)
