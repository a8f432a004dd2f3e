"""HardwareProfile: what is known of a device, and its target; `files` reads it from `configs/`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from ..errors import ConfigError
from ..host.threads import kernel_threads, thread_count
from .architecture import NO_GPU, Architecture, read_architecture
from .toml import fingerprint, number, number_fields, table

_KINDS = ("cuda", "llvm")
HOST_NUMBERS = (
    "num_sms",
    "fma_per_s_f32",
    "special_per_s",
    "hbm_bytes_per_s",
    "l2_bytes_per_s",
    "launch_us",
    "kernel_gap_us",
)
"""What is measured of a CPU at first use."""


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """What the cost model, the legality rules and the kernel writers know of a device.

    On a CPU (`kind` "llvm") a "streaming multiprocessor" is a core, a "warp" its vector lanes,
    "shared memory" its first-level cache and "L2" the last-level cache. Rates are what well-written
    code reaches, where that was measured; `hbm_peak_bytes_per_s` is the datasheet's.
    """

    name: str
    kind: str
    arch: str
    description: str
    aliases: tuple[str, ...]

    num_sms: int = number("count")
    clock_ghz: float = number("GHz")
    warp_size: int = number("count")
    max_threads_per_block: int = number("count")
    max_threads_per_sm: int = number("count")
    max_blocks_per_sm: int = number("count")
    registers_per_sm: int = number("count")  # of 32 bits
    max_registers_per_thread: int = number("count")
    smem_per_sm_bytes: int = number("byte")
    smem_per_block_bytes: int = number("byte")
    smem_reserved_per_block_bytes: int = number("byte")
    kernel_param_bytes: int = number("byte")
    instruction_cache_bytes: int = number("byte")

    memory_bytes: int = number("byte")
    hbm_peak_bytes_per_s: float = number("byte/s")
    hbm_bytes_per_s: float = number("byte/s")
    l2_bytes: int = number("byte")
    l2_bytes_per_s: float = number("byte/s")
    smem_bytes_per_s: float = number("byte/s")
    sector_bytes: int = number("byte")
    bytes_in_flight_latency_s: float = number("s")
    hbm_access_bytes: int = number("byte")  # memory moves for an access that stands alone
    l2_usable_share: float = number("1")  # of the L2 that keeps data until it is read again
    smem_conflict_factor: float = number("1")  # n lanes on one bank take n times this

    fma_per_s_f32: float = number("flop/s")  # a fused multiply-add counts as 2 flop
    tensor_flop_per_s: Mapping[str, float] = table("flop/s")  # by dtype of the operands
    special_per_s: float = number("op/s")
    special_slots: Mapping[str, float] = table("slot")  # special-function slots by function
    int_per_s: float = number("op/s")
    int_div_per_s: float = number("op/s")
    conversion_per_s: float = number("op/s")  # between half and single precision
    spill_bytes_per_s: float = number("byte/s")  # spilled registers, written and read
    code_bytes_per_s: float = number("byte/s")  # beyond the instruction cache, one multiprocessor

    launch_us: float = number("us")  # a launch in a stream, host side included
    graph_launch_us: float = number("us")  # a kernel node in a CUDA graph
    queued_launch_us: float = number("us")  # a launch in a stream that never runs dry
    kernel_gap_us: float = number("us")  # ramp-up and drain of any kernel
    roofline_exponent: float = number("1")  # p of T = gap + (sum T_i^p)^(1/p)

    # inside a kernel that reduces rows (kernels/row/cost.py)
    memory_latency_s: float = number("s")  # a load that no cache holds, from a warp's view
    l2_latency_s: float = number("s")  # one that the L2 holds
    block_start_s: float = number("s")  # a block takes the place of one that ended
    barrier_s: float = number("s")  # exchange between the warps of a block
    shuffle_s: float = number("s")  # one step of a reduction within a warp
    warp_issue_cycles: float = number("cycle")  # an instruction of a warp that is alone
    cluster_barrier_s: float = number("s")  # exchange between the blocks of a cluster
    cluster_start_s: float = number("s")  # a cluster takes the place of one that ended
    remote_store_s: float = number("s")  # a store into another block's shared memory
    cluster_loss: float = number("1")  # bandwidth lost at each doubling of a cluster
    sms_per_cluster_group: int = number("count")  # a cluster lies within such a group
    sm_bytes_per_s: float = number("byte/s")  # between one multiprocessor and the L2
    wavefronts_per_s: float = number("op/s")  # passes of 128 bytes through the load/store units
    thread_bytes_in_flight: float = number("byte")  # of loads that the compiler issues ahead
    blocks_per_s: float = number("op/s")  # that the device starts
    row_l2_share: float = number("1")  # of the L2 that holds rows until they are read again
    row_exponent: float = number("1")  # p among the terms of a row kernel
    row_tail: float = number("1")  # of a block's time that the last blocks leave idle
    wave_rounding: float = number("1")  # of a partial wave that costs as much as a whole one
    wave_balance: float = number("1")  # of a last wave's idle multiprocessors that shows
    waves_to_drift: float = number("1")  # until blocks side by side are in different phases
    single_wave_exponent: float = number("1")  # p while all blocks are in the same phase
    l2_residence_exponent: float = number("1")  # how sharply an L2 stops holding what is too large

    host: str = ""  # the CPU of this machine, where its rates were measured at first use
    derived: str = ""  # what its numbers come from, where nobody measured the device
    guessed: bool = False  # a CPU's file says of a rate of `HOST_NUMBERS` that nobody measured it

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError(f"profile {self.name}: kind = {self.kind!r} is none of {_KINDS}")
        if self.kind == "cuda":
            try:
                read_architecture(self.arch)
            except ConfigError as error:
                raise ConfigError(f"profile {self.name}: arch = {error}; give another") from None
        for f in number_fields(type(self)):
            value = getattr(self, f.name)
            for x in value.values() if isinstance(value, Mapping) else (value,):
                if not x >= 0:
                    raise ConfigError(f"profile {self.name}: {f.name} = {x} must be at least 0")

    def __reduce__(self) -> tuple[Any, ...]:
        """To other processes: read-only mappings cannot go there."""
        values = (getattr(self, f.name) for f in fields(self))
        return type(self), tuple(dict(v) if isinstance(v, Mapping) else v for v in values)

    def to_target(self) -> Any:
        """Return the `tvm.target.Target` of this device."""
        return cuda_target(self) if self.kind == "cuda" else cpu_target()

    @property
    def architecture(self) -> Architecture:
        """The compute capability, and what it can do; of a CPU that of no GPU."""
        return read_architecture(self.arch) if self.kind == "cuda" else NO_GPU

    @property
    def has_clusters(self) -> bool:
        """Whether the device has thread block clusters (Hopper and later)."""
        return self.architecture.has_clusters

    @property
    def measured(self) -> dict[str, Any]:
        """What was measured here, or what a profile was derived from, for plans to record; empty
        for a profile from a file.
        """
        if self.derived:
            made_of = {"derived": self.derived}
        elif self.host:
            made_of = {"host": self.host}
        else:
            return {}
        return made_of | {name: getattr(self, name) for name in HOST_NUMBERS}

    def fingerprint(self) -> str:
        """Return a hash of all values: equal for equal numbers, whatever their sources say."""
        return fingerprint(self, without=("host", "derived", "guessed"))


def cuda_target(profile: HardwareProfile) -> Any:
    """Target of a CUDA profile, with the build machine as its host."""
    from tvm.target import Target

    return Target(
        {
            "kind": "cuda",
            "arch": profile.arch,
            "max_threads_per_block": profile.max_threads_per_block,
            "max_num_threads": profile.max_threads_per_block,
            "thread_warp_size": profile.warp_size,
            "max_shared_memory_per_block": profile.smem_per_block_bytes,
            "registers_per_block": profile.registers_per_sm,
            "l2_cache_size_bytes": profile.l2_bytes,
            "host": {"kind": "llvm", "mtriple": _llvm("GetDefaultTargetTriple")()},
        }
    )


def cpu_target() -> Any:
    """Target of this machine's CPU: its name, the threads that kernels run on (its cores), and no
    instruction that it lacks.

    The name switches on f16c, without which a float16 conversion is a function call. It is not
    enough in a virtual machine, which may hide instructions of the CPU that it reports.
    """
    kernel_threads()  # the first kernel that runs here would pin the thread to one core
    return _cpu_target(thread_count())


@cache
def _cpu_target(cores: int) -> Any:
    import tvm_ffi
    from tvm.target import Target

    config = {"kind": "llvm", "num-cores": cores, "mcpu": _llvm("GetHostCPUName")()}
    implied = tvm_ffi.get_global_func("target.llvm_get_cpu_features")(Target(config))
    present = _llvm("GetHostCPUFeatures")()
    hidden = sorted(f for f in map(str, implied) if f in present and not bool(present[f]))
    if hidden:
        config["mattr"] = [f"-{feature}" for feature in hidden]
    return Target(config)


def _llvm(name: str) -> Any:
    import tvm_ffi

    return tvm_ffi.get_global_func(f"tvm.codegen.llvm.{name}")
