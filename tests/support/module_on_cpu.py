"""Runs whole modules that were planned for a GPU on the CPU emulator.

`main` runs in TVM's virtual machine on the host. Each of its kernels is called as the build would
call it (its host function decides on the launches), on outputs that are poisoned first, and each
launch goes to the emulated device: what TVM schedules there itself too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.tirx.build import codegen_build

from tvm_fusion.check.reference import flatten, to_argument
from tvm_fusion.flow.planned import Planned
from tvm_fusion.runtime.build.kernel_code import cuda_units, lowered_parts
from tvm_fusion.runtime.build.lowering import ScheduleLeftovers, ViewReshapes, mixed_tir_pipeline

from . import cuda_on_cpu, hopper_on_cpu
from .cuda_on_cpu import EmulationError, Lowered
from .stock_cuda_on_cpu import AnyMemory, takes_workspace, with_host_workspaces

LLVM = tvm.target.Target("llvm")
PACKED = "tests.on_cpu."  # functions that the virtual machine calls
_numbers = itertools.count()


@dataclass
class EmulatedModule:
    """A module for a GPU, ready to run on the emulator.

    Attributes
    ----------
    kernels : by name, what is launched
    cuts : why groups could not be written
    failures : what the emulator did not forgive in the last run, by name of the kernel
    """

    main: tvm.IRModule
    host: tvm.IRModule
    outputs: dict[str, int]  # how many, by name of the function
    kernels: dict[str, Lowered]
    cuts: tuple[str, ...]
    failures: list[tuple[str, EmulationError]] = field(default_factory=list)
    _memory: Sequence[object] = ()  # of the call under way
    _loaded: object = None

    @classmethod
    def of(cls, planned: Planned) -> EmulatedModule:
        """The module of a plan, written for a GPU."""
        written = planned.write()
        with planned.target:
            mod = tvm.transform.Sequential(
                [
                    relax.backend.DispatchSortScan(),
                    relax.transform.LegalizeOps(),
                    ViewReshapes(),
                    relax.transform.DeadCodeElimination(),
                    ScheduleLeftovers(planned.target),
                ]
            )(written.mod)
            prefix = f"emulated_{next(_numbers)}_"
            host, device = lowered_parts(_named_apart(mod, prefix), planned.target)
            kernels = [k for unit in cuda_units(device) for k in _kernels(unit)]
        main, outputs = _on_packed(mod, prefix)
        cuts = tuple(written.planned.cuts.values())
        return cls(main, host, outputs, {k.kernel: k for k in kernels}, cuts)

    def texts(self) -> list[str]:
        """The kernels that can be compiled with others, in C++ for the emulated device."""
        return [cuda_on_cpu.translated(k) for k in self.kernels.values() if not _on_hopper(k)]

    def __call__(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs `main`; the outputs, tuples flattened.

        Raises
        ------
        EmulationError
            As `cuda_on_cpu.run_cuda_on_cpu`.
        """
        if self._loaded is None:
            self._loaded = self._load()
        self.failures.clear()
        outputs = flatten(self._loaded["main"](*map(to_argument, inputs)))
        for name, failure in self.failures:
            raise EmulationError(f"{name}: {failure}")
        return outputs

    def _load(self) -> relax.VirtualMachine:
        _, finish_host, _ = mixed_tir_pipeline()
        host = with_host_workspaces(cuda_on_cpu._without_device(finish_host()(self.host)))
        library = codegen_build(host, LLVM)
        tvm_ffi.register_global_func(hopper_on_cpu.ENCODE, hopper_on_cpu.encode_map, override=True)
        for name, outputs in self.outputs.items():
            tvm_ffi.register_global_func(
                PACKED + name, self._caller(library[name], name, outputs), override=True
            )
        # looked up by name once, when it is launched for the first time
        for kernel in self.kernels.values():
            tvm_ffi.register_global_func(kernel.kernel, self._launcher(kernel), override=True)
        return relax.VirtualMachine(relax.build(self.main, target=LLVM), tvm.cpu())

    def _caller(self, function: Callable, name: str, outputs: int) -> Callable:
        """What calls a host function on poisoned outputs."""
        several = sum(k.startswith(f"{name}_kernel") for k in self.kernels) > 1
        own = takes_workspace(self.host[name])

        def call(*arguments: object) -> None:
            tensors = [a for a in arguments if isinstance(a, tvm.runtime.Tensor)]
            # nothing tells where tensors between launches lie, nor those of a launch's own
            self._memory = [AnyMemory()] if several or own else tensors
            for tensor in tensors[len(tensors) - outputs :]:
                poison(tensor)
            function(*arguments)

        return call

    def _launcher(self, kernel: Lowered) -> Callable:
        """What a host function launches in place of the kernel."""

        def launch(*arguments: object) -> int:
            with hopper_on_cpu.translation(_on_hopper(kernel)):
                failure = cuda_on_cpu._launch(kernel, arguments, self._memory)
            if failure is not None:
                self.failures.append((kernel.kernel, failure))
            return 0

        return launch


def poison(tensor: tvm.runtime.Tensor) -> None:
    """NaN, or the largest integer, or true, in each element."""
    dtype = tensor.numpy().dtype
    value = np.iinfo(dtype).max if dtype.kind in "iu" else True if dtype.kind == "b" else np.nan
    tensor.copyfrom(np.full(tensor.shape, value, dtype))


def _on_hopper(kernel: Lowered) -> bool:
    return any(word in kernel.source for word in ("CUtensorMap", "wgmma"))


def _kernels(unit) -> list[Lowered]:
    # all threads of a warp are active where TVM reduces over them, and none is ahead of a barrier
    source = unit.source.replace("__activemask()", "0xffffffffu").replace("volatile ", "")
    return [
        Lowered(
            tvm.IRModule(),
            source,
            gvar.name_hint,
            tuple(str(p) for p in func.attrs["tirx.kernel_launch_params"]),
        )
        for gvar, func in unit.kernels.functions_items()
    ]


def _named_apart(mod: tvm.IRModule, prefix: str) -> tvm.IRModule:
    """The PrimFuncs, with symbols that no other module has."""
    functions = {}
    for gvar, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            name = prefix + gvar.name_hint
            functions[tvm.ir.GlobalVar(name)] = func.with_attr("global_symbol", name)
    return tvm.IRModule(functions)


def _on_packed(mod: tvm.IRModule, prefix: str) -> tuple[tvm.IRModule, dict[str, int]]:
    """`main` alone, on packed functions in place of its PrimFuncs, and how many outputs they
    have.
    """
    counts = {}

    def packed(call: relax.Call) -> relax.Call:
        if getattr(call.op, "name", "") != "relax.call_tir":
            return call
        (ty,) = call.ty_args
        outputs = list(ty.fields) if isinstance(ty, relax.TupleType) else [ty]
        name = prefix + call.args[0].name_hint
        counts[name] = len(outputs)
        several = isinstance(ty, relax.TupleType)
        return relax.call_dps_packed(PACKED + name, call.args[1], outputs if several else ty)

    main = tvm_ffi.structural_map(mod["main"], [(relax.Call, packed)])
    alone = tvm.IRModule({mod.get_global_var("main"): main})
    return relax.transform.Normalize()(alone), counts
