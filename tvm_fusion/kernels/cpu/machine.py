"""What the loops are fitted to: vector registers, caches and cores of the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm.target import Target, codegen

from ...config import HardwareProfile


@dataclass(frozen=True, slots=True)
class Machine:
    """A CPU.

    Attributes
    ----------
    vector_bytes : int
        Width of a vector register.
    vector_registers : int
    cores : int
    dots_pairs : bool
        Whether products of pairs of bfloat16 are summed up in float32 (AVX-512 BF16).
    """

    vector_bytes: int
    vector_registers: int
    cores: int
    dots_pairs: bool = False

    @property
    def scales(self) -> bool:
        """Whether vectors are multiplied by powers of two in one instruction (AVX-512)."""
        return self.vector_bytes == 64

    def lanes(self, element_bytes: int) -> int:
        """Elements in a vector register."""
        return max(1, self.vector_bytes // element_bytes)


def machine_of(hw: HardwareProfile | None) -> Machine:
    """The machine of the current target; without one, that of a profile or of this computer.

    The target comes first: a user's own may be of another machine than its profile. Its cores are
    the threads that kernels run on here: a profile holds those of the machine that was measured.
    """
    from ..._targets import cpu_target

    target = Target.current(allow_none=True)
    if target is not None and target.kind.name == "llvm":
        return _of_target(target)
    return _of_target(hw.to_target() if hw is not None and hw.kind == "llvm" else cpu_target())


def _of_target(target: tvm.target.Target) -> Machine:
    cores = int(target.attrs.get("num-cores", 1))
    if codegen.target_has_features("avx512f", target):
        return Machine(64, 32, cores, codegen.target_has_features("avx512bf16", target))
    if codegen.target_has_features("avx", target):
        return Machine(32, 16, cores)
    if codegen.target_has_features("neon", target):
        return Machine(16, 32, cores)
    return Machine(16, 16, cores)
