"""What the loops are fitted to: vector registers, caches and cores of the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import tvm
from tvm.target import Target, codegen

from ...config import HardwareProfile
from ...config.targets import cpu_target

# Work (in additions) below which a parallel loop costs more than it gains. On 2 cores of a Zen 4,
# that wake each other in `WAKE_US`, a chain on 128 x 1024 (524,288) takes 13.5 us on one core and
# 9.6 on both, LayerNorm on 128 x 256 (463,232) 6.0 and 8.0.
SMALL_WORK = 500_000
WAKE_US = 0.8

# Additions that a multiply-add of a product counts as in `Machine.small_work`: the cores share its
# operands, and each fetches little from the other's caches. On the Zen 4 told of there products of
# 16 x 128 x 128, 8 x 256 x 128 and 4 x 512 x 64 take 6.4, 5.1 and 2.6 us on one core, 4.6, 3.9 and
# 2.3 on both; of 48 x 48 x 48, 7 x 129 x 65 and 2 x 300 x 100 2.4, 2.4 and 1.7 on one, 2.5, 2.7 and
# 2.3 on both.
PRODUCT_WORK = 5

# What a measured wake may be of that: beyond, the machine was busy with something else.
WAKES = (0.5, 8.0)


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
    small_work : float
        Additions of a kernel that stays on one core, see `small_work`.
    """

    vector_bytes: int
    vector_registers: int
    cores: int
    dots_pairs: bool = False
    small_work: float = SMALL_WORK

    @property
    def scales(self) -> bool:
        """Whether vectors are multiplied by powers of two in one instruction (AVX-512)."""
        return self.vector_bytes == 64

    def lanes(self, element_bytes: int) -> int:
        """Elements in a vector register."""
        return max(1, self.vector_bytes // element_bytes)


def small_work(wake_us: float, cores: int) -> float:
    """Additions that one core has done before the others would have helped: of W on one core, all
    save W (1 - 1 / cores) and lose the wake.
    """
    least, most = WAKES
    wake = min(max(wake_us / WAKE_US, least), most)
    return SMALL_WORK * wake / (2.0 * (1.0 - 1.0 / max(2, cores)))


def machine_of(hw: HardwareProfile | None) -> Machine:
    """The machine of the current target; without one, that of a profile or of this computer.

    The target comes first: a user's own may be of another machine than its profile. Its cores are
    the threads that kernels run on here: a profile holds those of the machine that was measured,
    and what it takes to wake them, from which plans say as well what stays on one core.
    """
    target = Target.current(allow_none=True)
    cpu = hw if hw is not None and hw.kind == "llvm" else None
    if target is None or target.kind.name != "llvm":
        target = cpu.to_target() if cpu is not None else cpu_target()
    found = _of_target(target)
    if cpu is None:
        return found
    return replace(found, small_work=small_work(cpu.launch_us, cpu.num_sms))


def _of_target(target: tvm.target.Target) -> Machine:
    cores = int(target.attrs.get("num-cores", 1))
    if codegen.target_has_features("avx512f", target):
        return Machine(64, 32, cores, codegen.target_has_features("avx512bf16", target))
    if codegen.target_has_features("avx", target):
        return Machine(32, 16, cores)
    if codegen.target_has_features("neon", target):
        return Machine(16, 32, cores)
    return Machine(16, 16, cores)
