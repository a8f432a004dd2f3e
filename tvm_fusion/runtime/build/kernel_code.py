"""A written PrimFunc as code: its host functions in TIR, and the CUDA sources of its kernels.

    PrimFunc -> lowering -> host functions + kernels -> CUDA sources (-> nvcc -> device modules)

A kernel without its body is all that TVM needs to make a device module of a source and machine code
that are known: the names, parameters and launch parameters of its functions.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Var
from tvm.tirx.build import codegen_build, split_host_device_mods
from tvm_ffi.serialization import from_json_graph_str, to_json_graph_str

from ...errors import BuildError
from ...kernels.gpu.ahead import is_to_be_early
from ...transform.functions.functions import with_functions
from . import cubin_cache
from .early_launches import DYNAMIC_SMEM, LAUNCH, launched_early
from .lowering import mixed_tir_pipeline, without_entry

CODE_ATTR = "tvm_fusion.code"
"""Of a PrimFunc: its `KernelCode` as text, in place of its body."""
_DEVICE_KERNEL = 2  # tvm::CallingConv::kDeviceKernelLaunch
_CPP_WORDS = (
    "alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t "
    "char8_t class co_await co_return co_yield compl concept const const_cast consteval constexpr "
    "constinit continue decltype default delete do double dynamic_cast else enum explicit export "
    "extern false float for friend goto if inline int long mutable namespace new noexcept not "
    "not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires "
    "return short signed sizeof static static_assert static_cast struct switch template this "
    "thread_local throw true try typedef typeid typename union unsigned using virtual void "
    "volatile wchar_t while xor xor_eq"
)
"""Names that a size may have and a variable of C++ may not."""
_SUMMARY_LINES = 20


class KernelBuildError(BuildError):
    """Some PrimFuncs could not be compiled.

    Attributes
    ----------
    failures : dict[str, str]
        What the compiler says, by name of the PrimFunc.
    """

    def __init__(self, failures: dict[str, str]) -> None:
        self.failures = failures
        lines = [f"{name}: {message}" for name, message in failures.items()]
        super().__init__("these PrimFuncs do not compile:\n" + "\n".join(lines))


@dataclass(frozen=True, slots=True)
class CudaUnit:
    """What becomes one device module.

    Attributes
    ----------
    source : str
        CUDA C++; one kernel, unless kernels share device functions.
    kernels : tvm.IRModule
        Its functions, without their bodies.
    """

    source: str
    kernels: tvm.IRModule

    @property
    def target(self) -> tvm.target.Target:
        """What its functions are for."""
        return next(func for _, func in self.kernels.functions_items()).attrs["target"]

    @property
    def name(self) -> str:
        """The first of its functions in the order of the alphabet."""
        return min(gvar.name_hint for gvar in self.kernels.get_global_vars())

    def module(self, binary: bytes) -> tvm.runtime.Module:
        """The device module of this source and its machine code."""
        with cubin_cache.given_code(self.source, binary):
            return codegen_build(self.kernels, self.target)


@dataclass(frozen=True, slots=True)
class KernelCode:
    """One PrimFunc, lowered.

    Attributes
    ----------
    host : tvm.IRModule
        What runs on the host: checks of the arguments, launches.
    units : tuple of CudaUnit
    """

    host: tvm.IRModule
    units: tuple[CudaUnit, ...]


def code_text(code: KernelCode) -> str:
    """Code as text (JSON)."""
    units = [
        {"source": unit.source, "kernels": to_json_graph_str(unit.kernels)} for unit in code.units
    ]
    return json.dumps({"host": to_json_graph_str(code.host), "units": units})


def code_of(text: str) -> KernelCode:
    """The code that a text says."""
    data = json.loads(text)
    units = [(unit["source"], from_json_graph_str(unit["kernels"])) for unit in data["units"]]
    found = tuple(CudaUnit(source, kernels) for source, kernels in units)
    return KernelCode(from_json_graph_str(data["host"]), found)


def with_codes(mod: tvm.IRModule, codes: Mapping[str, KernelCode]) -> tvm.IRModule:
    """A module whose PrimFuncs of these names hold their code: it can be built again by itself,
    where others hold a kernel whose code was known as a declaration.
    """
    functions = dict(mod.functions_items())
    for gvar in functions:
        code = codes.get(gvar.name_hint)
        if code is not None:
            functions[gvar] = functions[gvar].with_attr(CODE_ATTR, code_text(code))
    return with_functions(mod, functions)


def kernel_code(
    name: str, func: tirx.PrimFunc, target: tvm.target.Target, early: bool = False
) -> KernelCode:
    """Lower one PrimFunc for CUDA; `name` is what it is called by. With `early` its kernels are
    launched early if they are to be (`early_launches`).

    Raises
    ------
    KernelBuildError
        If it does not lower.
    """
    mod = tvm.IRModule({name: func.with_attr("global_symbol", name)})
    with target:
        host, device = lowered_parts(mod, target)
        names = [name] if early and is_to_be_early(func) else []
        units = attempt(lambda _: tuple(cuda_units(device, names)), mod)
    return KernelCode(host, units)


def cuda_units(
    device: Mapping[tvm.target.Target, tvm.IRModule], early: Sequence[str] = ()
) -> Iterator[CudaUnit]:
    """Generate the CUDA sources of lowered kernels, those of the PrimFuncs `early` launched so."""
    for target, kernels in device.items():
        for final in finalized(kernels, target, early):
            with cubin_cache.source_only():
                source = codegen_build(final, target).inspect_source("cuda")
            empty = {
                gvar: func.with_body(tirx.Evaluate(0)) for gvar, func in final.functions_items()
            }
            yield CudaUnit(source, tvm.IRModule(empty, attrs=final.attrs))


def finalized(
    kernels: tvm.IRModule, target: tvm.target.Target, early: Sequence[str]
) -> Iterator[tvm.IRModule]:
    """Lowered kernels as TVM generates code for them, a module for each (`one_kernel_each`)."""
    _, _, finalize = mixed_tir_pipeline()
    for part in one_kernel_each(kernels):
        final = finalize()(with_cpp_names(part))
        yield launched_early(final, target, early)


def with_cpp_names(kernels: tvm.IRModule) -> tvm.IRModule:
    """Lowered kernels, of which no parameter is called as C++ calls something else: a size `new`
    becomes `new_`.
    """
    words, changed = frozenset(_CPP_WORDS.split()), {}
    for gvar, func in kernels.functions_items():
        others = {
            param: Var(f"{param.name}_", param.ty) for param in func.params if param.name in words
        }
        if others:
            body = tvm_ffi.structural_map(func.body, [(Var, lambda v, new=others: new.get(v, v))])
            params = [others.get(param, param) for param in func.params]
            changed[gvar] = tirx.PrimFunc(params, body, func.ret_type, attrs=func.attrs)
    if not changed:
        return kernels
    return tvm.IRModule(dict(kernels.functions_items()) | changed, attrs=kernels.attrs)


def lowered_parts(
    mod: tvm.IRModule, target: tvm.target.Target
) -> tuple[tvm.IRModule, Mapping[tvm.target.Target, tvm.IRModule]]:
    """Lower PrimFuncs and split them into their host code and, by target, their kernels.

    Raises
    ------
    KernelBuildError
        If PrimFuncs do not lower; its `failures` name them.
    """
    lower, _, _ = mixed_tir_pipeline()
    mod = tirx.transform.BindTarget(target.with_host(host_of(target)))(mod)
    return split_host_device_mods(without_entry(attempt(lower, mod)))


def one_kernel_each(device: tvm.IRModule) -> Iterator[tvm.IRModule]:
    """Yield a module per kernel; kernels that share device functions stay together."""
    functions = device.functions_items()
    if any(int(f.attrs.get("calling_conv", 0)) != _DEVICE_KERNEL for _, f in functions):
        yield device
        return
    for gv, func in sorted(functions, key=lambda item: item[0].name_hint):
        yield tvm.IRModule({gv: func}, attrs=device.attrs)


def attempt(step: Callable[[tvm.IRModule], Any], mod: tvm.IRModule) -> Any:
    """Run a step on a module; where it fails, find the PrimFuncs at fault by running each alone."""
    try:
        return step(mod)
    except Exception as error:  # a kernel build
        failures = {}
        for gv, func in mod.functions_items():
            try:
                step(tvm.IRModule({gv: func}, attrs=mod.attrs))
            except Exception as alone:
                failures[gv.name_hint] = _summary(alone)
        if failures:
            raise KernelBuildError(failures) from error
        raise BuildError(
            f"the module does not build: {_summary(error)}"
            "; set TVM_FUSION_DEBUG=1 for the traceback"
        ) from error


def host_of(target: tvm.target.Target) -> tvm.target.Target:
    """The target of the host code of a target."""
    own = target if target.kind.name == "llvm" else tvm.target.Target("llvm")
    return target.host or own


def _summary(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return "\n".join(lines[:_SUMMARY_LINES]) or type(error).__name__


# ---- CUDA sources of written kernels, with what each launch asks for, without building a module.

_THREADS = ("threadIdx.x", "threadIdx.y", "threadIdx.z")
_BLOCKS = ("blockIdx.x", "blockIdx.y", "blockIdx.z")


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One kernel as it is launched.

    Attributes
    ----------
    source : str
        CUDA C++; it holds the kernel and nothing else that is launched.
    threads : int
        Threads of a block; 0 where they depend on a symbolic extent.
    dynamic_smem_bytes : int
        Shared memory that the launch asks for, beside what the kernel itself declares.
    blocks : int
        Of the launch; 0 where they depend on a symbolic extent.
    """

    source: str
    threads: int
    dynamic_smem_bytes: int
    blocks: int = 0


def kernel_sources(
    func: tirx.PrimFunc, target: tvm.target.Target, name: str = "kernel"
) -> tuple[KernelSource, ...]:
    """Return the CUDA sources of the kernels that a written PrimFunc launches.

    Parameters
    ----------
    func : PrimFunc
        As a kernel class writes it.
    target : Target
    name : str
        What the PrimFunc is called; its kernels are named after it.

    Raises
    ------
    KernelBuildError
        If the PrimFunc does not lower.
    """
    code = kernel_code(name, func, target)
    launches = _launches(code.host)
    found = []
    for unit in code.units:
        asked = [launches.get(gv.name_hint, {}) for gv in unit.kernels.get_global_vars()]
        found.append(_source(unit.source, asked))
    return tuple(found)


def _source(source: str, asked: list[dict[str, int]]) -> KernelSource:
    threads = blocks = 1 if any(asked) else 0
    for axis in _THREADS:
        threads *= max((launch.get(axis, 1) for launch in asked), default=0)
    for axis in _BLOCKS:
        blocks *= max((launch.get(axis, 1) for launch in asked), default=0)
    shared = max(launch.get(DYNAMIC_SMEM, 0) for launch in asked)
    return KernelSource(source, threads, shared, blocks)


def _launches(host: tvm.IRModule) -> dict[str, dict[str, int]]:
    """What the launch of each kernel asks for, by launch parameter; 0 for what is not constant."""
    found: dict[str, dict[str, int]] = {}

    def see(call: Call) -> None:
        if str(getattr(call.op, "name", "")).endswith(LAUNCH):
            names = [str(n) for n in call.attrs["launch_params"]]
            values = list(call.args)[len(call.args) - len(names) :]
            found[str(call.args[0].value)] = {
                n: int(v.value) if isinstance(v, tirx.IntImm) else 0
                for n, v in zip(names, values, strict=True)
            }

    for _, func in host.functions_items():
        if isinstance(func, tirx.PrimFunc):
            tvm_ffi.structural_walk(func.body, [(Call, see)])
    return found
