"""Hardware profiles and policies, read from ``configs/*.toml``.

Every number in those files is a table ``{value, unit, source}``. The unit has to be the one that
the code computes with; the source says where the number is from: a datasheet, a measurement with
its date, an estimate with its reasoning. No other code has a hardware number of its own.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from ._toml import nearest, number, number_fields, parse, read_toml, table
from .errors import ConfigError, TargetError

_KINDS = ("cuda", "llvm")

# Least values of a policy's numbers.
_CHOICES = {
    "rounding": ("fast", "exact"),
    "launch": ("stream", "graph"),
    "probe": ("auto", "off"),
}
_LEAST = {
    "max_recompute": 1,
    "min_gain": 0,
    "max_group_ops": 1,
    "coverage": 0,
    "unknown_ratio": 1,
    "unknown_ratio_gemm": 1,
    "probe_share": 0,
    "measure_budget_s": 0,
    "beam_width": 1,
    "exact_ops": 0,
    "search_evaluations": 0,
}


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

    # inside a kernel that reduces rows (kernels/cuda/row_cost.py)
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

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError(f"profile {self.name}: kind = {self.kind!r} is none of {_KINDS}")
        for f in number_fields(type(self)):
            value = getattr(self, f.name)
            for x in value.values() if isinstance(value, Mapping) else (value,):
                if not x >= 0:
                    raise ConfigError(f"profile {self.name}: {f.name} = {x} must be at least 0")

    def to_target(self) -> Any:
        """Return the `tvm.target.Target` of this device."""
        from ._targets import cpu_target, cuda_target

        return cuda_target(self) if self.kind == "cuda" else cpu_target()

    @property
    def has_clusters(self) -> bool:
        """Whether the device has thread block clusters and bulk copies (Hopper and later)."""
        match = re.match(r"sm_(\d+)", self.arch)
        return match is not None and int(match.group(1)) >= 90

    def fingerprint(self) -> str:
        """Return a hash of all values: equal for equal numbers, whatever their sources say."""
        return _fingerprint(self)


@dataclass(frozen=True, slots=True)
class Policy:
    """What the planner may do, and what it must win.

    Attributes
    ----------
    name : str
        For reports.
    rounding : str
        "fast": half values live in float32 inside a kernel and are rounded where they are stored.
        "exact": every rounding of the unfused graph is kept.
    max_recompute : float
        How many times an operation may be computed for once in the unfused graph.
    min_gain : float
        Share of the predicted time that a fusion has to save.
    max_group_ops : int
        Most operations in one group; conversions and moves of data do not count.
    launch : str
        "stream" or "graph": which launch cost a saved launch is worth.
    allow_rematerialisation : bool
        Whether a producer may be computed in several groups.
    verify : bool
        Whether compiled groups are checked against float64 before they are used.
    allow_tf32 : bool
        Whether tensor cores may round float32 operands of matrix products to tfloat32 (10 bits of
        mantissa).
    probe : str
        "auto": groups whose estimated registers or code are near a limit of the device are
        compiled before the plan is settled, where there is an nvcc. "off": estimates decide.
    learned : bool
        Whether the learned residual corrects the analytic model on devices that have one.
    coverage : float
        How often "together is faster than apart" has to hold for a fusion that is not measured;
        0 takes the prediction as it is. Used where the device has a learned residual.
    unknown_ratio, unknown_ratio_gemm : float
        Where there is no residual: by what factor the predicted ratio of a fusion's time to that of
        its operators apart may be too good, and the same for groups around matrix products. 1 takes
        the prediction as it is.
    probe_share : float
        Share of a limit from which on an estimate is near it.
    measure_budget_s : float
        Time for measurements, builds included; what was begun is finished.
    beam_width : int
        Plans that the search keeps side by side while it improves a region.
    exact_ops : int
        Regions of at most so many operators are solved exactly.
    search_evaluations : int
        Groups that the search may evaluate to improve one region.
    """

    name: str
    rounding: str
    launch: str
    allow_rematerialisation: bool
    verify: bool
    allow_tf32: bool
    learned: bool
    probe: str
    max_recompute: float = number("1")
    min_gain: float = number("1")
    max_group_ops: int = number("count")
    coverage: float = number("1")
    unknown_ratio: float = number("1")
    unknown_ratio_gemm: float = number("1")
    probe_share: float = number("1")
    measure_budget_s: float = number("s")
    beam_width: int = number("count")
    exact_ops: int = number("count")
    search_evaluations: int = number("count")

    def __post_init__(self) -> None:
        for key, choices in _CHOICES.items():
            if getattr(self, key) not in choices:
                raise ConfigError(
                    f"policy {self.name}: {key} = {getattr(self, key)!r} is none of {choices}"
                )
        for key, low in _LEAST.items():
            if not getattr(self, key) >= low:
                raise ConfigError(f"policy {self.name}: {key} must be at least {low}")
        if not self.coverage < 1:
            raise ConfigError(f"policy {self.name}: coverage must be less than 1")

    def fingerprint(self) -> str:
        """Return a hash of all values but the name."""
        return _fingerprint(self, without=("name",))


_files: dict[str, Path] = {}  # where profiles of the user's own were read, by fingerprint


def profile_names() -> list[str]:
    """Return the names of the profiles that ship with the package."""
    return [n for n in _shipped() if not n.startswith("policy_")]


def policy_names() -> list[str]:
    """Return the names of the policies that ship with the package."""
    return [n.removeprefix("policy_") for n in _shipped() if n.startswith("policy_")]


def load_profile(name_or_path: str | Path) -> HardwareProfile:
    """Read a hardware profile.

    Parameters
    ----------
    name_or_path : str or Path
        A shipped profile by name or alias ("nvidia_h200", "h200", "llvm"), or a TOML file.

    Raises
    ------
    TargetError
        There is no such profile.
    ConfigError
        The file has an unknown key, a missing value, a wrong unit or a wrong type.

    Examples
    --------
    >>> load_profile("h200").num_sms
    132
    """
    if _is_path(name_or_path):
        profile = _read_profile(file := _existing(name_or_path))
        _files[profile.fingerprint()] = file
        return profile
    known = _shipped_profiles()
    name = name_or_path.lower()
    if name not in known:
        names = ", ".join(["cuda", *profile_names()])
        raise TargetError(
            f"unknown target {name_or_path!r}{nearest(name, known)}; known: {names}, "
            "or a path to a profile's .toml"
        )
    return known[name]


def file_of(profile: HardwareProfile) -> Traversable:
    """Return the file with a profile's numbers: the one they were read from, or the shipped one of
    its name.
    """
    return _files.get(profile.fingerprint(), _config_dir() / f"{profile.name}.toml")


def shipped_file(name: str) -> Traversable:
    """Return a file of `configs/`, whether it exists or not."""
    return _config_dir() / name


def profile_file(name_or_path: str | Path) -> Traversable:
    """Return the TOML file of a profile that `load_profile` knows by name, alias or path."""
    if _is_path(name_or_path):
        return _existing(name_or_path)
    return _config_dir() / f"{load_profile(name_or_path).name}.toml"


def load_policy(policy: str | Path | Mapping[str, Any] | Policy | None = None) -> Policy:
    """Read a policy.

    Parameters
    ----------
    policy : str, Path, Mapping, Policy or None
        A shipped policy by name ("default", "conservative", "aggressive"), a path to a TOML file,
        or a mapping. Files and mappings change the keys they name of the default policy. None is
        the default policy.

    Raises
    ------
    ConfigError
        No such policy, an unknown key (the nearest name is suggested) or a wrong value.

    Examples
    --------
    >>> load_policy({"rounding": "exact"}).rounding
    'exact'
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, Mapping):
        given = dict(policy)
        return _policy({"name": "custom", **given}, "policy", _base_policy(), strict=False)
    if policy is None:
        policy = "default"
    if _is_path(policy):
        file = _existing(policy)
        return _policy(read_toml(file), str(file), _base_policy(), strict=True)
    name = str(policy).removeprefix("policy_")
    if name == "default":
        return Policy(**_base_policy())
    if name not in policy_names():
        raise ConfigError(
            f"unknown policy {name!r}{nearest(name, policy_names())}; known: "
            f"{', '.join(policy_names())}, or a path to a .toml file"
        )
    file = _config_dir() / f"policy_{name}.toml"
    return _policy(read_toml(file), file.name, _base_policy(), strict=True)


def resolve_target(target: Any = None) -> tuple[Any, HardwareProfile]:
    """Return the TVM target and the hardware profile for what a user named.

    Parameters
    ----------
    target : str, Path, tvm.target.Target or None
        "llvm", "cuda" (the GPU of this machine), a profile's name, alias or path, or a Target,
        which is used as it is. None is "cuda" if there is a GPU with a known profile, else "llvm".

    Raises
    ------
    TargetError
        An unknown name, no GPU in the machine, or a GPU without a profile.
    """
    from . import _targets

    if target is None:
        profile = _targets.present_gpu_profile() or load_profile("llvm")
        return profile.to_target(), profile
    if isinstance(target, str) and target.lower() == "cuda":
        profile = _targets.required_gpu_profile()
        return profile.to_target(), profile
    if isinstance(target, str | Path):
        profile = load_profile(target)
        return profile.to_target(), profile
    return target, _targets.profile_of_target(target)


def _config_dir() -> Traversable:
    """configs/ inside the installed package, or beside the package in a source checkout."""
    installed = resources.files(__package__) / "configs"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "configs"


def _shipped() -> list[str]:
    files = (f.name for f in _config_dir().iterdir())
    return sorted(f.removesuffix(".toml") for f in files if f.endswith(".toml"))


@cache
def _shipped_profiles() -> dict[str, HardwareProfile]:
    """Profiles by name and by alias."""
    profiles = [_read_profile(_config_dir() / f"{name}.toml") for name in profile_names()]
    return {alias: p for p in profiles for alias in (p.name, *p.aliases)}


def _is_path(name: str | Path) -> bool:
    return isinstance(name, Path) or name.endswith(".toml")


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"no such file: {path}")
    return path


def _read_profile(file: Traversable) -> HardwareProfile:
    data = read_toml(file)
    return HardwareProfile(**parse(HardwareProfile, data, str(file), strict=True, partial=False))


def _base_policy() -> dict[str, Any]:
    file = _config_dir() / "policy_default.toml"
    return parse(Policy, read_toml(file), file.name, strict=True, partial=False)


def _policy(data: dict[str, Any], where: str, base: dict[str, Any], strict: bool) -> Policy:
    return Policy(**{**base, **parse(Policy, data, where, strict, partial=True)})


def _fingerprint(value: Any, without: tuple[str, ...] = ()) -> str:
    names = [f.name for f in fields(value) if f.name not in without]
    data = {n: getattr(value, n) for n in names}
    text = json.dumps(data, sort_keys=True, default=dict)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
