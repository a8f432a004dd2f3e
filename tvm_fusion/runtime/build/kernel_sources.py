"""CUDA sources of written kernels, with what each launch asks for, without building a module."""

from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from .kernel_code import kernel_code

_LAUNCH = "call_ffi_kernel"
_THREADS = ("threadIdx.x", "threadIdx.y", "threadIdx.z")
_DYNAMIC_SMEM = "tirx.use_dyn_shared_memory"


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
    """

    source: str
    threads: int
    dynamic_smem_bytes: int


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
    threads = 1 if any(asked) else 0
    for axis in _THREADS:
        threads *= max((launch.get(axis, 1) for launch in asked), default=0)
    return KernelSource(source, threads, max(launch.get(_DYNAMIC_SMEM, 0) for launch in asked))


def _launches(host: tvm.IRModule) -> dict[str, dict[str, int]]:
    """What the launch of each kernel asks for, by launch parameter; 0 for what is not constant."""
    found: dict[str, dict[str, int]] = {}

    def see(call: Call) -> None:
        if str(getattr(call.op, "name", "")).endswith(_LAUNCH):
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
