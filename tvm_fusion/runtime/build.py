"""From a module of written kernels to a VM executable.

TVM puts all kernels of a module into one CUDA source. Here each becomes a device module of its own:
nvcc compiles them side by side, one that does not compile takes no other down with it, and a change
costs one entry of the cubin cache.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tvm
from tvm import relax, tirx
from tvm.relax import vm_build
from tvm.tirx.build import codegen_build, split_host_device_mods

from ..errors import BuildError
from ..transform.decode_float8 import DecodeFloat8
from ..transform.wrap_integers import WrapIntegers
from . import cubin_cache
from .cuda_compiler import DeviceCode, cuda_arch, find_compiler, kernel_names
from .cuda_graph_rules import inplace_operator
from .launches import call_sites, cuda_sources, host_launches, launched_kernels, vm_functions
from .link import link
from .memory import MemoryPlan, planned_memory
from .pipeline import ScheduleLeftovers, lowering_pipeline, mixed_tir_pipeline, without_entry
from .resources import KernelResources, resources_of
from .signature import Signature

if TYPE_CHECKING:
    from ..config import HardwareProfile

_DEVICE_KERNEL = 2  # tvm::CallingConv::kDeviceKernelLaunch
_SUMMARY_LINES = 20


@dataclass(frozen=True, slots=True)
class Built:
    """A built module.

    Attributes
    ----------
    executable : tvm.relax.VMExecutable
        What `relax.VirtualMachine` runs; `CompiledModule` wraps it.
    target : tvm.target.Target
        The target it was built for.
    signature : Signature
        Inputs of `main`.
    kernels : Mapping[str, tuple[str, ...]]
        Names of the kernels that each PrimFunc launches, one per launch; empty on a CPU.
    cuda_sources : tuple of str
        One per kernel; empty on a CPU.
    resources : Mapping[str, KernelResources]
        By kernel, where nvcc compiled it.
    memory : MemoryPlan
    inplace : str or None
        An operator that writes into its inputs, if there is one.
    """

    executable: relax.VMExecutable
    target: tvm.target.Target
    signature: Signature
    kernels: Mapping[str, tuple[str, ...]]
    cuda_sources: tuple[str, ...]
    resources: Mapping[str, KernelResources]
    memory: MemoryPlan
    inplace: str | None = None

    @property
    def launches(self) -> dict[str, int]:
        """Kernels launched by one call of each PrimFunc; empty on a CPU."""
        return {function: len(names) for function, names in self.kernels.items()}

    @property
    def cuda_source(self) -> str | None:
        """All CUDA sources in one text; None on a CPU."""
        return "\n".join(self.cuda_sources) or None


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


def build(
    mod: tvm.IRModule,
    target: tvm.target.Target | None = None,
    hw: "HardwareProfile | None" = None,
    *,
    compile_kernels: bool = True,
) -> Built:
    """Build a module whose PrimFuncs are written kernels (see `pipeline.lowering_pipeline`).

    Parameters
    ----------
    mod : tvm.IRModule
        Relax functions, `main` among them, and PrimFuncs of the s_tir or the TIRx dialect.
    target : tvm.target.Target, optional
        By default that of `hw`.
    hw : HardwareProfile, optional
        Used for its target only.
    compile_kernels : bool
        Whether CUDA kernels are compiled at once; else where the executable is loaded.

    Raises
    ------
    KernelBuildError
        If kernels do not lower or compile; its `failures` name the PrimFuncs.
    BuildError
        If the module as a whole does not build, or no CUDA compiler is there.
    """
    if target is None:
        if hw is None:
            raise BuildError("build needs a target or a hardware profile")
        target = hw.to_target()
    cubin_cache.install()
    signature = Signature.of(mod)
    builder = relax.ExecBuilder()
    library, codes, plans = None, [], []
    with target:
        lowered = lowering_pipeline(target, lambda m: plans.append(planned_memory(m)))(mod)
        rest = vm_build._vmcodegen(builder, lowered)
        functions = {g: f for g, f in rest.functions_items() if isinstance(f, tirx.PrimFunc)}
        if functions:
            prim_funcs = tvm.IRModule(functions, attrs=rest.attrs)
            library, codes = _build_tir(prim_funcs, target, compile_kernels)
        executable = link(builder, target, library, lowered.attrs)
    launched = launched_kernels(executable.mod)
    _refuse_host_loops(executable, launched)
    return Built(
        executable=executable,
        target=target,
        signature=signature,
        kernels={name: tuple(found) for name, found in launched.items()},
        cuda_sources=cuda_sources(executable.mod),
        resources={r.name: r for code in codes for r in resources_of(code)},
        memory=plans[0],
        inplace=inplace_operator(mod),
    )


def build_functions(
    mod: tvm.IRModule, target: tvm.target.Target
) -> tuple[tvm.runtime.Module, list[KernelResources]]:
    """Build written kernels alone, to be called as functions of the library by their symbols.

    Parameters
    ----------
    mod : tvm.IRModule
        PrimFuncs, each with a global symbol. On a GPU those without a schedule get DLight's.
    target : tvm.target.Target

    Returns
    -------
    tuple
        The library, and on CUDA the resources of its kernels.

    Raises
    ------
    KernelBuildError, BuildError
        As `build`.
    """
    cubin_cache.install()
    with target:
        if "gpu" in target.keys:
            mod = ScheduleLeftovers(target)(mod)
        library, codes = _build_tir(mod, target, compile_kernels=True)
    return library, [r for code in codes for r in resources_of(code)]


def _build_tir(
    mod: tvm.IRModule, target: tvm.target.Target, compile_kernels: bool
) -> tuple[tvm.runtime.Module, list[DeviceCode]]:
    """As `tvm.tirx.build`, with a device module per kernel."""
    _, finalize_host, finalize_device = mixed_tir_pipeline()
    host, device = lowered_parts(mod, target)
    library = _attempt(lambda part: codegen_build(finalize_host()(part), _host_of(target)), host)
    codes: list[DeviceCode] = []
    for device_target, kernels in device.items():
        units = [finalize_device()(unit) for unit in one_kernel_each(kernels)]
        modules: list[tvm.runtime.Module | None] = [None] * len(units)
        if compile_kernels and device_target.kind.name == "cuda":
            modules, found = _compile_units(units, device_target, library)
            codes += found
        for unit, module in zip(units, modules, strict=True):
            library.import_module(module or codegen_build(unit, device_target))
    return library, codes


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
    mod = (DecodeFloat8() if target.kind.name == "llvm" else WrapIntegers())(mod)
    mod = tirx.transform.BindTarget(target.with_host(_host_of(target)))(mod)
    return split_host_device_mods(without_entry(_attempt(lower, mod)))


def one_kernel_each(device: tvm.IRModule) -> Iterator[tvm.IRModule]:
    """Yield a module per kernel; kernels that share device functions stay together."""
    functions = device.functions_items()
    if any(int(f.attrs.get("calling_conv", 0)) != _DEVICE_KERNEL for _, f in functions):
        yield device
        return
    for gv, func in sorted(functions, key=lambda item: item[0].name_hint):
        yield tvm.IRModule({gv: func}, attrs=device.attrs)


def _compile_units(
    units: list[tvm.IRModule], target: tvm.target.Target, library: tvm.runtime.Module
) -> tuple[list[tvm.runtime.Module | None], list[DeviceCode]]:
    """Compile all units side by side into the cache, where code generation finds them; with the
    modules of those that were there already.
    """
    modules, sources = [], []

    def generated() -> Iterator[str]:
        for unit in units:
            with cubin_cache.deferred() as missing:
                module = codegen_build(unit, target)
            modules.append(None if missing else module)
            sources.append(module.inspect_source("cuda"))
            yield sources[-1]

    codes = cubin_cache.compile_sources(generated(), cuda_arch(target))
    failed = {
        kernel: str(code)
        for source, code in zip(sources, codes, strict=True)
        if isinstance(code, BuildError)
        for kernel in kernel_names(source)
    }
    if failed:
        find_compiler()  # without a compiler no kernel is at fault
        launched = host_launches(library.inspect_source("ll"), set(failed))
        raise KernelBuildError(
            {f: failed[k] for f, names in launched.items() for k in names if k in failed}
        )
    return modules, codes


def _refuse_host_loops(executable: relax.VMExecutable, launched: Mapping[str, list[str]]) -> None:
    """Reject PrimFuncs of a GPU module that would loop over device memory on the host."""
    called = {
        name for function in vm_functions(executable) for name in call_sites(executable, function)
    }
    failures = {
        name: "it launches nothing on the GPU: no loop of it is bound to a thread or block"
        for name in sorted(called)
        if name in launched and not launched[name]
    }
    if failures:
        raise KernelBuildError(failures)


def _attempt(step: Callable[[tvm.IRModule], Any], mod: tvm.IRModule) -> Any:
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
        raise BuildError(f"the module does not build: {_summary(error)}") from error


def _host_of(target: tvm.target.Target) -> tvm.target.Target:
    own = target if target.kind.name == "llvm" else tvm.target.Target("llvm")
    return target.host or own


def _summary(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return "\n".join(lines[:_SUMMARY_LINES]) or type(error).__name__
