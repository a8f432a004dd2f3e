"""Between TVM targets and hardware profiles: what needs TVM and the machine."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import TargetError
from .architecture import NO_GPU, Architecture, read_architecture
from .files import added_profiles, load_profile, profile_names
from .hardware import HardwareProfile, cpu_target

_logger = logging.getLogger(__name__)
_calibrations: list[Callable[[], HardwareProfile]] = []

THIS_CPU = ("llvm", "cpu")
"""Targets that mean the CPU of this machine, whatever it is."""

TAGS = "nvidia/"
"""How TVM's names of devices begin, which become a Target: "nvidia/nvidia-h200"."""


def resolve_target(target: Any = None) -> tuple[Any, HardwareProfile]:
    """Return the TVM target and the hardware profile for what a user named.

    Parameters
    ----------
    target : str, Path, mapping, tvm.target.Target or None
        "llvm" or "cpu" (the CPU of this machine, with rates measured at first use), "cuda" (the GPU
        of this machine), a profile's name ("llvm_cpu": the CPU that ships), alias or path; a
        Target, or its dict or tag, which is used as it is. None is "cuda" if there is a GPU with a
        known profile, else "llvm".

    Raises
    ------
    TargetError
        An unknown name, no GPU in the machine, or a GPU without a profile.
    """
    if target is None:
        profile = present_gpu_profile() or host_profile()
        return profile.to_target(), profile
    if isinstance(target, str) and target.lower() == "cuda":
        profile = required_gpu_profile()
        return profile.to_target(), profile
    if isinstance(target, str) and target.startswith(TAGS):
        target = target_of(target)
    elif isinstance(target, str | Path):
        this_cpu = isinstance(target, str) and target.lower() in THIS_CPU
        profile = host_profile() if this_cpu else load_profile(target)
        return profile.to_target(), profile
    if isinstance(target, Mapping):
        target = target_of(dict(target))
    return target, profile_of_target(target)


def host_profile() -> HardwareProfile:
    """Profile of this machine's CPU, calibrated at first use; see `calibrate_host_by`."""
    return _calibrations[-1]() if _calibrations else load_profile("llvm_cpu")


def calibrate_host_by(find: Callable[[], HardwareProfile]) -> None:
    """Says what measures this machine's CPU: it stands above what it measures with."""
    _calibrations.append(find)


def present_gpu_profile() -> HardwareProfile | None:
    """Profile of GPU 0, or None when there is no GPU or no profile for it."""
    name, arch = present_gpu()
    if name is None:
        return None
    profile = _profile_of_gpu(name)
    if profile is None:
        _logger.warning("no profile for the GPU %s (%s): using the CPU", name, arch)
    return profile


def required_gpu_profile() -> HardwareProfile:
    """Profile of GPU 0, or TargetError."""
    name, arch = present_gpu()
    if name is None:
        raise TargetError(
            "no CUDA device in this machine; to generate code without one, name the device: "
            f"{', '.join(p.name for p in _cuda_profiles())}"
        )
    profile = _profile_of_gpu(name)
    if profile is None:
        raise TargetError(
            f"no profile for the GPU {name} ({arch}); copy the nearest device's configs/*.toml, "
            "adapt it, pass its path as the target, and let `python -m tvm_fusion calibrate "
            "--target ./yours.toml` measure the rates"
        )
    return profile


def target_of(config: dict[str, Any] | str) -> Any:
    """The target that a dict describes or a tag names.

    Raises
    ------
    TargetError
        TVM knows no such target.
    """
    from tvm.target import Target

    try:
        return Target(config)
    except Exception as why:
        reason = str(why).strip().splitlines()[-1]
        raise TargetError(
            f"{config!r} is no target of TVM: {reason}"
            "; give a name, a profile, or what `tvm.target.Target` takes"
        ) from why


def profile_of_target(target: Any) -> HardwareProfile:
    """Profile that fits a TVM target: by its tag, else by the GPU present, else by architecture."""
    from tvm.target import Target

    if not isinstance(target, Target):
        raise TargetError(
            f"a target is a name, a path or a tvm.target.Target, not {type(target).__name__}"
            "; give one of these"
        )
    if target.kind.name == "llvm":
        return host_profile() if str(target) == str(cpu_target()) else load_profile("llvm_cpu")
    if target.kind.name != "cuda":
        raise TargetError(f"target kind {target.kind.name!r} is not supported; use cuda or llvm")
    tag = str(target.tag)
    arch = architecture_of(target)
    candidates = [p for p in _cuda_profiles() if p.architecture.number == arch.number]
    if not candidates:
        raise TargetError(
            f"no profile for the CUDA architecture {arch.name!r}; known: "
            f"{', '.join(f'{p.arch} ({p.name})' for p in _cuda_profiles())}"
        )
    name, _ = present_gpu()
    by_tag = [p for p in candidates if tag in p.aliases]
    by_gpu = [p for p in candidates if name is not None and names_gpu(p, name)]
    shipped = [p for p in candidates if p not in added_profiles()]
    return (by_tag or by_gpu or shipped or candidates)[0]


def _profile_of_gpu(name: str) -> HardwareProfile | None:
    profile = next((p for p in _cuda_profiles() if names_gpu(p, name)), None)
    if profile is None or profile.num_sms == (num_sms := _present_sms()):
        return profile
    _logger.warning(
        "%s has %d SMs, not %d: a variant of %s", name, num_sms, profile.num_sms, profile.name
    )
    return replace(profile, num_sms=num_sms)


def names_gpu(profile: HardwareProfile, device_name: str) -> bool:
    """Whether "NVIDIA A100-SXM4-80GB" holds one of the profile's aliases as a word."""
    words = device_name.lower().replace("-", " ")
    return any(f" {alias} " in f" {words} " for alias in profile.aliases)


def _cuda_profiles() -> tuple[HardwareProfile, ...]:
    """Those that were added first: they name a device closer than those that ship."""
    return (*(p for p in added_profiles() if p.kind == "cuda"), *_shipped_cuda_profiles())


@cache
def _shipped_cuda_profiles() -> tuple[HardwareProfile, ...]:
    return tuple(p for p in map(load_profile, profile_names()) if p.kind == "cuda")


def _present_sms() -> int:
    import tvm

    return tvm.device("cuda", 0).multi_processor_count


@cache
def present_gpu() -> tuple[str | None, str]:
    """Name and architecture of GPU 0, or (None, "")."""
    import tvm

    device = tvm.device("cuda", 0)
    if not device.exist:
        return None, ""
    return device.device_name, f"sm_{device.compute_version.replace('.', '')}"


def architecture_of(target: Any) -> Architecture:
    """The architecture of a TVM target for CUDA; of another target that of no GPU."""
    return read_architecture(str(target.attrs["arch"])) if target.kind.name == "cuda" else NO_GPU
