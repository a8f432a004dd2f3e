"""Between TVM targets and hardware profiles: what needs TVM and the machine."""

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import ConfigError, TargetError
from ..host.gpu_driver import gpu_attributes
from .architecture import NO_GPU, Architecture, read_architecture
from .cards import (
    OLDEST,
    TAGS,
    Card,
    card_named,
    card_names,
    card_of_architecture,
    card_of_driver,
    card_of_gpu,
    longest_words,
    newest_architecture,
    too_old,
)
from .files import added_profiles, load_profile, profile_names, profile_of_card
from .hardware import HardwareProfile, cpu_target

_logger = logging.getLogger(__name__)
_calibrations: list[Callable[[], HardwareProfile]] = []
_gpu_calibrations: list[Callable[[HardwareProfile], HardwareProfile]] = []

THIS_CPU = ("llvm", "cpu")
"""Targets that mean the CPU of this machine, whatever it is."""


def resolve_target(target: Any = None) -> tuple[Any, HardwareProfile]:
    """Return the TVM target and the hardware profile for what a user named.

    Parameters
    ----------
    target : str, Path, mapping, tvm.target.Target or None
        "llvm" or "cpu" (the CPU of this machine, with rates measured at first use), "cuda" (the GPU
        of this machine), a profile's name ("llvm_cpu": the CPU that ships), alias or path, or a
        card's name or tag ("nvidia_l4", "nvidia/nvidia-l4"), whose profile is derived; a Target, or
        its dict or tag, which is used as it is. None is "cuda" if there is a GPU that kernels can
        be written for, else "llvm".

    Raises
    ------
    TargetError
        An unknown name, no GPU in the machine, or one before compute capability 8.0.
    """
    if target is None:
        profile = present_gpu_profile() or host_profile()
        return profile.to_target(), profile
    if isinstance(target, str) and target.lower() == "cuda":
        profile = required_gpu_profile()
        return profile.to_target(), profile
    tag = ""
    if isinstance(target, str) and target.startswith(TAGS) and _is_tag_of_tvm(target):
        tag, target = target, target_of(target)
    elif isinstance(target, str | Path):
        this_cpu = isinstance(target, str) and target.lower() in THIS_CPU
        profile = host_profile() if this_cpu else load_profile(target)
        return profile.to_target(), profile
    if isinstance(target, Mapping):
        tag, target = str(target.get("tag", "")), target_of(dict(target))
    return target, profile_of_target(target, tag)


def host_profile() -> HardwareProfile:
    """Profile of this machine's CPU, calibrated at first use; see `calibrate_host_by`."""
    return _calibrations[-1]() if _calibrations else load_profile("llvm_cpu")


def calibrate_host_by(find: Callable[[], HardwareProfile]) -> None:
    """Says what measures this machine's CPU: it stands above what it measures with."""
    _calibrations.append(find)


def present_gpu_profile() -> HardwareProfile | None:
    """Profile of GPU 0, or None when there is no GPU or one that is too old."""
    name, arch = present_gpu()
    if name is None:
        return None
    try:
        return _profile_of_gpu(name, arch)
    except TargetError as why:
        _logger.warning("%s: using the CPU", why)
        return None


def required_gpu_profile() -> HardwareProfile:
    """Profile of GPU 0, or TargetError."""
    name, arch = present_gpu()
    if name is None:
        raise TargetError(
            "no CUDA device in this machine; to generate code without one, name the device: "
            f"{', '.join(p.name for p in _cuda_profiles())}, or one of the {len(card_names())} "
            "others in configs/gpu_cards.toml, such as nvidia_l4"
        )
    return _profile_of_gpu(name, arch)


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


def profile_of_target(target: Any, tag: str = "") -> HardwareProfile:
    """Profile that fits a TVM target: by the tag that it was made from, of which a Target of TVM
    0.27 keeps nothing, else by the GPU present, else by architecture.
    """
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
    tag = tag or str(target.tag)
    try:
        arch = architecture_of(target)
    except ConfigError as why:
        raise TargetError(f"the target {tag or target}: {why}; give another") from why
    if arch.number < OLDEST:
        raise TargetError(f"the target {tag or target}: {too_old(arch)}; give another")
    profile = _fitting(tag, arch)
    # The target says what code is made for: sm_90 has nothing of sm_90a.
    return profile if profile.arch == arch.name else replace(profile, arch=arch.name)


def _fitting(tag: str, arch: Architecture) -> HardwareProfile:
    """The profile of a tag, else of the GPU present, else one that stands for an architecture."""
    candidates = [p for p in _cuda_profiles() if p.architecture.number == arch.number]
    by_tag = [p for p in candidates if tag in p.aliases]
    if by_tag:
        return by_tag[0]
    if (card := card_named(tag)) is not None:
        return profile_of_card(card)
    name, present = present_gpu()
    if name is not None and read_architecture(present).number == arch.number:
        return _profile_of_gpu(name, present)
    shipped = [p for p in candidates if p not in added_profiles()]
    if found := shipped or candidates:
        return found[0]
    _tell_of_newer(arch)
    return profile_of_card(card_of_architecture(arch))


def _profile_of_gpu(name: str, arch: str) -> HardwareProfile:
    """The profile of the GPU present: one that was measured, if its name is nearer than a card's,
    else one that is derived from what its driver says.
    """
    architecture = read_architecture(arch)
    if architecture.number < OLDEST:
        raise TargetError(f"the GPU {name}: {too_old(architecture)}; name another target")
    known = [p for p in _cuda_profiles() if names_gpu(p, name)]
    card = card_of_gpu(name)
    nearest = max((longest_words(p.aliases, name) for p in known), default=0)
    if not known or (card is not None and len(card.words) > nearest and not _is_added(known[0])):
        _tell_of_newer(architecture)
        return _of_present(card_of_driver(name, architecture, gpu_attributes()))
    profile = known[0]
    if profile.num_sms == (num_sms := _present_sms()):
        return profile
    _logger.warning(
        "%s has %d SMs, not %d: a variant of %s", name, num_sms, profile.num_sms, profile.name
    )
    return replace(profile, num_sms=num_sms)


def _of_present(card: Card) -> HardwareProfile:
    """The derived profile of the GPU present, with what was measured of it at first use."""
    derived = profile_of_card(card)
    return _gpu_calibrations[-1](derived) if _gpu_calibrations else derived


def calibrate_gpu_by(measure: Callable[[HardwareProfile], HardwareProfile]) -> None:
    """Says what measures a GPU whose profile is derived: it stands above what it measures with."""
    _gpu_calibrations.append(measure)


def _is_added(profile: HardwareProfile) -> bool:
    return profile in added_profiles()


@cache
def _tell_of_newer(arch: Architecture) -> None:
    """One warning where an architecture is newer than all that are known."""
    if arch.number > (newest := newest_architecture()):
        _logger.warning(
            "%s is newer than all that is known: rates are those of sm_%d, kernels its portable "
            "forms; `python -m tvm_fusion calibrate` measures the device",
            arch.name,
            newest,
        )


def _is_tag_of_tvm(tag: str) -> bool:
    """Whether TVM has a target of a tag: those of newer cards are names of profiles alone."""
    from tvm.target import list_tags

    return tag in (list_tags() or ())


def names_gpu(profile: HardwareProfile, device_name: str) -> bool:
    """Whether "NVIDIA A100-SXM4-80GB" holds one of the profile's aliases as a word."""
    return longest_words(profile.aliases, device_name) > 0


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


def device_of(target: Any) -> Any:
    """The TVM device that code for a target runs on now, there or not. Of several GPUs it is
    torch's current one where torch uses them, else the first.
    """
    import tvm

    found = tvm.runtime.device_from_target(target)
    torch = sys.modules.get("torch")
    if found.type != "cuda" or torch is None or not torch.cuda.is_initialized():
        return found
    return tvm.device("cuda", torch.cuda.current_device())


def architecture_of(target: Any) -> Architecture:
    """The architecture of a TVM target for CUDA; of another target that of no GPU."""
    return read_architecture(str(target.attrs["arch"])) if target.kind.name == "cuda" else NO_GPU
