"""Runs PrimFuncs of TVM's s_tir lowering on the CPU emulator: of several launches, with reductions
over threads.

What `cuda_on_cpu` does for the one kernel of a function that this package wrote.
"""

from collections.abc import Sequence

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.tirx import compilation_pipeline

from . import cuda_on_cpu
from .cuda_on_cpu import CUDA, EmulationError, Lowered, tirx_build

_CPU = 1  # DLDeviceType


def lowered_together(funcs: Sequence[tirx.PrimFunc]) -> list[list[Lowered]]:
    """The kernels of each function, which g++ compiles together."""
    found = [kernels_of(func) for func in funcs]
    cuda_on_cpu.compile_together(cuda_on_cpu.translated(k) for kernels in found for k in kernels)
    return found


def run_launches_on_cpu(
    func: tirx.PrimFunc | Sequence[Lowered], arrays: Sequence[np.ndarray]
) -> int:
    """Runs `func`, or the kernels of one, on `arrays`, one a parameter, written in place; returns
    the number of launches.

    Raises
    ------
    EmulationError
        As `cuda_on_cpu.run_cuda_on_cpu`; bounds are checked only where there is one launch, since
        nothing tells where the tensors between launches lie.
    """
    tensors = [tvm.runtime.tensor(a) for a in arrays]
    failures: list[EmulationError | None] = []
    kernels = kernels_of(func) if isinstance(func, tirx.PrimFunc) else func
    memory = tensors if len(kernels) == 1 else [AnyMemory()]
    for kernel in kernels:
        tvm_ffi.register_global_func(kernel.kernel, _launcher(kernel, memory, failures), True)
    host = tirx_build.codegen_build(kernels[0].host, tvm.target.Target("llvm"))
    host["main"](*tensors)
    for failure in filter(None, failures):
        raise failure
    for array, tensor in zip(arrays, tensors, strict=True):
        array[...] = tensor.numpy()
    return len(failures)


class AnyMemory:
    """Stands for a tensor at every address."""

    nbytes = 1 << 62

    def data_ptr(self) -> int:
        return 1

    def numpy(self) -> "AnyMemory":
        return self


def _launcher(kernel: Lowered, memory: list, failures: list):
    def launch(*args: object) -> int:
        failures.append(cuda_on_cpu._launch(kernel, args, memory))
        return 0

    return launch


def kernels_of(func: tirx.PrimFunc) -> list[Lowered]:
    """Every kernel of a function, each with a source of its own."""
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    mod = tirx.transform.BindTarget(CUDA)(mod)
    passes, finish_host, finish_device = compilation_pipeline.get_tir_pipeline("s_tir")
    with CUDA:
        host, devices = tirx_build.split_host_device_mods(passes(mod))
        ((target, device),) = devices.items()
        host = with_host_workspaces(cuda_on_cpu._without_device(finish_host()(host)))
        kernels = []
        for gvar, kernel in device.functions.items():
            alone = finish_device()(tvm.IRModule({gvar: kernel}, attrs=device.attrs))
            source = tirx_build.codegen_build(alone, target).inspect_source()
            # all threads of a warp are active where TVM reduces over them
            source = source.replace("__activemask()", "0xffffffffu")
            params = tuple(str(p) for p in kernel.attrs["tirx.kernel_launch_params"])
            kernels.append(Lowered(host, source, gvar.name_hint, params))
    return kernels


def takes_workspace(func: tirx.PrimFunc) -> bool:
    """Whether a function of the host allocates memory for its launches."""
    found: list[tirx.AllocBuffer] = []
    tvm_ffi.structural_walk(func.body, [(tirx.AllocBuffer, found.append)])
    return any(node.buffer.scope() == "global" for node in found)


def with_host_workspaces(host: tvm.IRModule) -> tvm.IRModule:
    """Tensors between launches lie in the host's memory."""

    def on_host(call: tvm.ir.Call) -> tvm.ir.Call:
        if not getattr(call.op, "name", "").endswith("Workspace"):
            return call
        device = tirx.IntImm(str(call.args[0].ty), _CPU)
        return tvm.ir.Call(call.op, [device, *call.args[1:]], call.attrs, ret_ty=call.ty)

    body = {
        var: func.with_body(tvm_ffi.structural_map(func.body, [(tvm.ir.Call, on_host)]))
        for var, func in host.functions.items()
    }
    return tvm.IRModule(body, attrs=host.attrs)
