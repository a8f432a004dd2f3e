"""From a module of written kernels to a VM executable.

TVM puts all kernels of a module into one CUDA source. Here each becomes a device module of its own:
nvcc compiles them side by side, one that does not compile takes no other down with it, and a change
costs one entry of the cubin cache.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import tvm
from tvm import relax, tirx
from tvm.relax import vm_build
from tvm.tirx.build import codegen_build

from ...config.targets import device_of
from ...errors import BuildError
from ...host.stages import stepped
from ...ir.weights import Weight, with_values
from ...kernels.gpu.ahead import is_to_be_early
from ...transform.functions.functions import with_functions
from ...transform.memory.plan_memory import SETTLE
from ..calls.call_memory import MemoryPlan, planned_memory
from ..calls.launch_count import (
    call_sites,
    cuda_sources,
    host_launches,
    launched_kernels,
    vm_functions,
)
from ..calls.signature import Signature, virtual_machine
from ..calls.written_inputs import own_outputs, writes_constants, written_inputs
from . import cubin_cache
from .cubin_cache import Compiling
from .cuda_compiler import DeviceCode, cuda_arch, find_compiler, kernel_names
from .destinations import AddDestinations, Destinations
from .early_launches import Calls, LaunchTimes
from .join_writes import JOINED_ATTR
from .kernel_code import (
    CODE_ATTR,
    CudaUnit,
    KernelBuildError,
    KernelCode,
    attempt,
    code_of,
    cuda_units,
    finalized,
    host_of,
    lowered_parts,
    with_codes,
)
from .lowering import SCHEDULED_ATTR, ScheduleLeftovers, lowering_pipeline, mixed_tir_pipeline
from .plain_schedule import PLAIN_ATTR
from .resources import KernelResources, resources_of
from .trusted_calls import trusted_functions, without_checks
from .weight_values import TrustParameters, WeightsAsParameters, WeightValues

if TYPE_CHECKING:
    from ...config import HardwareProfile


__all__ = [
    "Built",
    "KernelBuildError",
    "build",
    "build_entries",
    "build_functions",
    "memory_of",
]


class CompiledAhead(Protocol):
    """Kernels that nvcc compiles since they were written: their code by name of PrimFunc."""

    compiling: Compiling

    @property
    def codes(self) -> Mapping[str, KernelCode]: ...


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
        Inputs of the function that it is about, and its name: `main`, but for `build_entries`.
    kernels : Mapping[str, tuple[str, ...]]
        Names of the kernels that each PrimFunc launches, one per launch; empty on a CPU.
    cuda_sources : tuple of str
        One per kernel; empty on a CPU.
    resources : Mapping[str, KernelResources]
        By kernel, where nvcc compiled it.
    early : frozenset of str
        Kernels that are launched before the one in front has ended (`early_launches`).
    memory : MemoryPlan
    writes : tuple of int
        Inputs of the function that it writes into, by position.
    own : tuple of bool
        Of each output tensor, whether it has memory of its own (see `own_outputs`).
    destinations : Destinations or None
        The function beside it that is given such outputs.
    plain : Mapping[str, str]
        The PrimFuncs that no rule could schedule, and how they run (see `plain_schedule`).
    joined : Mapping[str, tuple[str, ...]]
        The PrimFuncs that are several in one launch, and the names of these (`join_writes`).
    weights : WeightValues or None
        What the functions of the executable take behind their inputs.
    entries : tuple of str
        The functions of the executable that can be called.
    written : callable or None
        Gives the module that was built, with the code of what is known of its kernels.
    device : tvm.runtime.Device
        That it runs on: the one of its target (`config.targets.device_of`) when it was made.
    """

    executable: relax.VMExecutable
    target: tvm.target.Target
    signature: Signature
    kernels: Mapping[str, tuple[str, ...]]
    cuda_sources: tuple[str, ...]
    resources: Mapping[str, KernelResources]
    memory: MemoryPlan
    writes: tuple[int, ...] = ()
    own: tuple[bool, ...] = ()
    destinations: Destinations | None = None
    plain: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    early: frozenset[str] = frozenset()
    weights: WeightValues | None = None
    entries: tuple[str, ...] = ()
    written: Callable[[], tvm.IRModule] | None = None
    device: tvm.runtime.Device | None = None

    def __post_init__(self) -> None:
        if self.device is None:
            object.__setattr__(self, "device", device_of(self.target))

    def machine(self) -> relax.VirtualMachine:
        """A virtual machine, whose functions have their weights."""
        return virtual_machine(self.executable, self.device, self.weights)

    def complete(self) -> relax.VMExecutable:
        """The executable with weights as constants, for who runs it without this package."""
        if isinstance(self.executable, tvm.runtime.Executable) and not self.weights:
            return self.executable
        if self.weights:
            self.weights.settle()
        entries = self.entries or (self.signature.function,)
        mod = with_values(self.written())
        built = build_entries(mod, entries, self.target, destinations=False)
        return built[self.signature.function].executable

    @property
    def launches(self) -> dict[str, int]:
        """Kernels launched by one call of each PrimFunc; empty on a CPU."""
        return {function: len(names) for function, names in self.kernels.items()}

    @property
    def cuda_source(self) -> str | None:
        """All CUDA sources in one text; None on a CPU."""
        return "\n".join(self.cuda_sources) or None


def build(
    mod: tvm.IRModule,
    target: tvm.target.Target | None = None,
    hw: "HardwareProfile | None" = None,
    *,
    compile_kernels: bool = True,
    ahead: CompiledAhead | None = None,
    plan_memory: bool = True,
) -> Built:
    """Build a module with a function `main`; as `build_entries`."""
    how = {"compile_kernels": compile_kernels, "ahead": ahead, "plan_memory": plan_memory}
    return build_entries(mod, ("main",), target, hw, **how)["main"]


def build_entries(
    mod: tvm.IRModule,
    entries: Sequence[str],
    target: tvm.target.Target | None = None,
    hw: "HardwareProfile | None" = None,
    *,
    compile_kernels: bool = True,
    ahead: CompiledAhead | None = None,
    plan_memory: bool = True,
    destinations: bool = True,
) -> dict[str, Built]:
    """Build a module whose PrimFuncs are written kernels (see `lowering.lowering_pipeline`).

    Parameters
    ----------
    mod : tvm.IRModule
        Relax functions, and PrimFuncs of the s_tir or the TIRx dialect.
    entries : sequence of str
        The Relax functions to call from outside, all in one executable.
    target : tvm.target.Target, optional
        By default that of `hw`.
    hw : HardwareProfile, optional
        Used for its target only.
    compile_kernels : bool
        Whether CUDA kernels are compiled at once; else where the executable is loaded.
    ahead : CompiledAhead, optional
        The code of PrimFuncs that is known already: their bodies are not looked at.
    plan_memory : bool
        Whether this package plans memory where it can; else TVM does.
    destinations : bool
        Whether there is a function beside each that is given outputs, where that can be.

    Returns
    -------
    dict of str to Built
        By function; executable, kernels and sources are those of all.

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
    builder = relax.ExecBuilder()
    library, codes, planned, functions = None, [], [], {}
    early: set[str] = set()
    weights: dict[str, tuple[Weight, ...]] = {}
    given: dict[str, Destinations] = {}
    with target:
        beside = AddDestinations(entries if destinations else (), given)
        bound = WeightsAsParameters(entries, weights, given)
        own = [beside], [bound], [TrustParameters(weights, given)]
        lowered = lowering_pipeline(target, planned.append, plan_memory, *own)(mod)
        values = WeightValues(weights, target, build_functions)
        values.begin()
        rest = vm_build._vmcodegen(builder, lowered)
        functions = {g: f for g, f in rest.functions_items() if isinstance(f, tirx.PrimFunc)}
        if functions:
            prim_funcs = tvm.IRModule(functions, attrs=rest.attrs)
            calls = None if writes_constants(mod) else Calls.of(lowered, weights)
            trusted = trusted_functions(lowered, weights) if calls else ()
            library, codes = _build_tir(
                prim_funcs, target, compile_kernels, ahead, calls, early, trusted
            )
        executable = link(builder, target, library, lowered.attrs)
    launched = launched_kernels(executable.mod)
    _refuse_host_loops(executable, launched, functions)
    known = ahead.codes if ahead else {}
    common = {
        "executable": executable,
        "target": target,
        "entries": tuple(entries),
        "written": lambda: with_codes(mod, known),
        "weights": values,
        "kernels": {name: tuple(found) for name, found in launched.items()},
        "cuda_sources": cuda_sources(executable.mod),
        "resources": {r.name: r for code in codes for r in resources_of(code)},
        "early": frozenset(early),
        "plain": {
            gvar.name_hint: str(func.attrs[PLAIN_ATTR])
            for gvar, func in functions.items()
            if PLAIN_ATTR in (func.attrs or {})
        },
        "joined": {
            gvar.name_hint: tuple(map(str, func.attrs[JOINED_ATTR]))
            for gvar, func in functions.items()
            if JOINED_ATTR in (func.attrs or {})
        },
    }
    return {
        entry: Built(
            **common,
            signature=Signature.of(mod, entry),
            memory=planned_memory(planned[0], entry),
            writes=written_inputs(mod, entry),
            own=own_outputs(planned[0], entry),
            destinations=given.get(entry),
        )
        for entry in entries
    }


def memory_of(mod: tvm.IRModule, target: tvm.target.Target) -> MemoryPlan:
    """The memory that a module of PrimFuncs takes, scheduled or not; nothing is built."""
    functions = {
        g: f.with_attr(SCHEDULED_ATTR, True) if isinstance(f, tirx.PrimFunc) else f
        for g, f in mod.functions_items()
    }
    planned: list[tvm.IRModule] = []
    with target:
        marked = with_functions(mod, functions)
        lowering_pipeline(target, planned.append)(marked)
    return planned_memory(planned[0])


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
    mod: tvm.IRModule,
    target: tvm.target.Target,
    compile_kernels: bool,
    ahead: CompiledAhead | None = None,
    calls: Calls | None = None,
    told_early: set[str] | None = None,
    trusted: Collection[str] = (),
) -> tuple[tvm.runtime.Module, list[DeviceCode]]:
    """As `tvm.tirx.build`, with a device module per kernel; of kernels that are launched early
    (`early_launches`), where it is known how they are called: their names are `told_early`.
    `trusted` functions for a GPU look at no argument (`trusted_calls`).
    """
    codes_ahead = ahead.codes if ahead else {}
    known, rest = [], {}
    for gvar, func in mod.functions_items():
        if gvar.name_hint in codes_ahead:
            known.append(codes_ahead[gvar.name_hint])
        elif CODE_ATTR in (func.attrs or {}):
            known.append(code_of(func.attrs[CODE_ATTR]))
        else:
            rest[gvar] = func
    early = [gvar.name_hint for gvar, func in rest.items() if calls and is_to_be_early(func)]
    host, device = lowered_parts(tvm.IRModule(rest, attrs=mod.attrs), target)
    for code in known:
        host.update(code.host)
    on_time = LaunchTimes.of(host, calls, told_early)
    if target.kind.name == "cuda":
        host = without_checks(host, trusted)
    if target.kind.name != "cuda" or not compile_kernels:
        return _with_sources(_host_library(host, target), device, early, on_time), []
    units: list[CudaUnit] = []
    begun = []
    with nullcontext(ahead.compiling) if ahead else Compiling(cuda_arch(target)) as compiling:
        for unit in chain(*(code.units for code in known), cuda_units(device, early)):
            units.append(unit)
            begun.append(compiling.begin(unit.source))
        library = _host_library(host, target)
        finished = stepped("kernels compiled", begun, len(begun))
        codes = [code.result() for code in finished]
    _refuse_failed(units, codes, library)
    for unit, code in sorted(zip(units, codes, strict=True), key=lambda pair: pair[0].name):
        library.import_module(replace(unit, kernels=on_time(unit.kernels)).module(code.binary))
    return library, codes


def _host_library(host: tvm.IRModule, target: tvm.target.Target) -> tvm.runtime.Module:
    _, finalize, _ = mixed_tir_pipeline()
    return attempt(lambda part: codegen_build(finalize()(part), host_of(target)), host)


def _with_sources(
    library: tvm.runtime.Module,
    device: Mapping[tvm.target.Target, tvm.IRModule],
    early: Sequence[str],
    on_time: LaunchTimes,
) -> tvm.runtime.Module:
    """The library with device modules as TVM makes them."""
    for target, kernels in device.items():
        for part in finalized(kernels, target, early):
            library.import_module(codegen_build(on_time(part), target))
    return library


def _refuse_failed(
    units: list[CudaUnit], codes: list[DeviceCode | BuildError], library: tvm.runtime.Module
) -> None:
    """Raise KernelBuildError for the PrimFuncs whose kernels nvcc refused."""
    failed = {
        kernel: str(code)
        for unit, code in zip(units, codes, strict=True)
        if isinstance(code, BuildError)
        for kernel in kernel_names(unit.source)
    }
    if not failed:
        return
    find_compiler()  # without a compiler no kernel is at fault
    launched = host_launches(library.inspect_source("ll"), set(failed))
    raise KernelBuildError(
        {f: failed[k] for f, names in launched.items() for k in names if k in failed}
    )


def _refuse_host_loops(
    executable: relax.VMExecutable,
    launched: Mapping[str, list[str]],
    functions: Mapping[tvm.ir.GlobalVar, tirx.PrimFunc],
) -> None:
    """Reject PrimFuncs of a GPU module that would loop over device memory on the host; those that
    take no tensor compute numbers for the host.
    """
    of_numbers = {
        gvar.name_hint
        for gvar, func in functions.items()
        if all(isinstance(param.ty, tvm.ir.PrimType) for param in func.params)
    }
    called = {
        name for function in vm_functions(executable) for name in call_sites(executable, function)
    }
    failures = {
        name: "it launches nothing on the GPU: no loop of it is bound to a thread or block"
        for name in sorted(called - of_numbers)
        if name in launched and not launched[name] and name != SETTLE
    }
    if failures:
        raise KernelBuildError(failures)


# ---- The last step of a build: bytecode, kernels, constants and external libraries in one.


def link(
    builder: relax.ExecBuilder,
    target: tvm.target.Target,
    library: tvm.runtime.Module | None,
    attrs: Mapping[str, Any] | None,
) -> relax.VMExecutable:
    """Join bytecode, kernels, constants and external libraries, as `tvm.relax.build` does."""
    attrs = dict(attrs or {})
    external = list(attrs.get("external_mods", []))
    for module in filter(vm_build._is_device_module, external):
        if library is None:
            raise BuildError(
                "external device modules without a PrimFunc that calls them"
                "; keep a PrimFunc in the module"
            )
        library.import_module(module)
    hosts = [module for module in external if not vm_build._is_device_module(module)]
    params = dict(attrs.get("const_name_to_constant", {}))
    linked = vm_build._ffi_api.VMLink(builder, target, library, hosts, params)
    return relax.VMExecutable(linked)
