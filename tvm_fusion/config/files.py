"""Reads hardware profiles and policies from ``configs/*.toml``.

Every number in those files is a table ``{value, unit, source}``. The unit has to be the one that
the code computes with; the source says where the number is from: a datasheet, a measurement with
its date, an estimate with its reasoning. No other code has a hardware number of its own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from ..errors import ConfigError, TargetError
from .cards import Card, all_names, card_named, card_names
from .derived import derived_profile, derived_toml, measured_name
from .hardware import HOST_NUMBERS, HardwareProfile
from .policy import Policy
from .toml import config_folder, nearest, parse, read_toml

_NOT_PROFILES = ("policy_", "tune_", "gpu_")
_RESERVED = ("cuda", "cpu")  # targets that mean a device of this machine

_files: dict[str, Path] = {}  # where profiles of the user's own were read, by fingerprint
_cards: dict[str, Card] = {}  # of which profiles were derived last, by name
_added: dict[str, HardwareProfile] = {}  # those that `add_profile` made known, by name


def profile_names() -> list[str]:
    """Return the names of the profiles that ship with the package as files; those of `card_names`
    are derived.
    """
    return [n for n in _shipped() if not n.startswith(_NOT_PROFILES)]


def policy_names() -> list[str]:
    """Return the names of the policies that ship with the package."""
    return [n.removeprefix("policy_") for n in _shipped() if n.startswith("policy_")]


def load_profile(name_or_path: str | Path) -> HardwareProfile:
    """Read a hardware profile.

    Parameters
    ----------
    name_or_path : str or Path
        A shipped profile by name or alias ("nvidia_h200", "h200", "llvm"), a card whose profile is
        derived ("nvidia_l4", "l4", "nvidia/nvidia-l4"), or a TOML file.

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
        if profile.kind == "llvm":
            profile = replace(profile, guessed=_is_guessed(read_toml(file)))
        _files[profile.fingerprint()] = file
        return profile
    known = {**_shipped_profiles(), **_by_alias(_added.values())}
    name = name_or_path.lower()
    if name in known:
        return known[name]
    if (card := card_named(name)) is not None:
        return profile_of_card(card)
    names = ", ".join(["cuda", *profile_names(), *_added])
    raise TargetError(
        f"unknown target {name_or_path!r}{nearest(name, [*known, *all_names()])}; known: {names}, "
        f"{len(card_names())} more GPUs by name (configs/gpu_cards.toml), such as nvidia_l4, "
        "or a path to a profile's .toml"
    )


def profile_of_card(card: Card) -> HardwareProfile:
    """The derived profile of a card."""
    profile = derived_profile(card, _shipped_profiles()[measured_name()])
    _cards[profile.name] = card
    return profile


def profile_text(profile: HardwareProfile) -> str:
    """The file with a profile's numbers, or for a derived one what would stand in it."""
    if profile.derived:
        return derived_toml(_cards[profile.name], _shipped_profiles()[measured_name()])
    return file_of(profile).read_text(encoding="utf-8")


def add_profile(profile: HardwareProfile) -> None:
    """Makes a profile known by its name and aliases, until `remove_profile`.

    Raises
    ------
    TypeError
        It is no `HardwareProfile`.
    ValueError
        The name or an alias is taken, or none that `load_profile` could find.
    """
    if not isinstance(profile, HardwareProfile):
        raise TypeError(f"a profile is a HardwareProfile or a path to its .toml, not {profile!r}")
    known = {**_shipped_profiles(), **_by_alias(_added.values())}
    for name in (profile.name, *profile.aliases):
        if name != name.lower() or not name or _is_path(name) or name in _RESERVED:
            raise ValueError(f"profile {profile.name!r}: {name!r} cannot be the name of a device")
        if name in known:
            raise ValueError(
                f"profile {profile.name!r}: the name {name!r} is taken by {known[name].name}; "
                "give the profile another name and other aliases"
            )
    _added[profile.name] = profile


def remove_profile(name: str) -> None:
    del _added[name]


def added_profiles() -> tuple[HardwareProfile, ...]:
    """The profiles that `add_profile` made known, the last one first."""
    return tuple(reversed(_added.values()))


def file_of(profile: HardwareProfile) -> Traversable:
    """Return the file with a profile's numbers: the one they were read from, or the shipped one of
    its name.
    """
    return _files.get(profile.fingerprint(), config_folder() / f"{profile.name}.toml")


def shipped_file(name: str) -> Traversable:
    """Return a file of `configs/`, whether it exists or not."""
    return config_folder() / name


def profile_file(name_or_path: str | Path) -> Traversable:
    """Return the TOML file of a profile that `load_profile` knows by name, alias or path."""
    if _is_path(name_or_path):
        return _existing(name_or_path)
    return config_folder() / f"{load_profile(name_or_path).name}.toml"


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
    if not isinstance(policy, str | Path):
        kind = type(policy).__name__
        raise ConfigError(
            f"a policy is a name, a path, a mapping or a Policy, not {kind}; give one"
        )
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
    file = config_folder() / f"policy_{name}.toml"
    return _policy(read_toml(file), file.name, _base_policy(), strict=True)


def _shipped() -> list[str]:
    files = (f.name for f in config_folder().iterdir())
    return sorted(f.removesuffix(".toml") for f in files if f.endswith(".toml"))


@cache
def _shipped_profiles() -> dict[str, HardwareProfile]:
    """Profiles by name and by alias."""
    return _by_alias(_read_profile(config_folder() / f"{name}.toml") for name in profile_names())


def _by_alias(profiles: Iterable[HardwareProfile]) -> dict[str, HardwareProfile]:
    return {alias: p for p in profiles for alias in (p.name, *p.aliases)}


def _is_path(name: str | Path) -> bool:
    return isinstance(name, Path) or name.endswith(".toml")


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"no such file: {path}; check the path")
    return path


def _read_profile(file: Traversable) -> HardwareProfile:
    data = read_toml(file)
    return HardwareProfile(**parse(HardwareProfile, data, str(file), strict=True, partial=False))


def _is_guessed(data: Mapping[str, Any]) -> bool:
    """Whether the source of a rate that decides plans says nothing of a measurement."""
    rates = (data[name]["source"] for name in HOST_NUMBERS if name != "num_sms")
    return not all("measured" in source for source in rates)


def _base_policy() -> dict[str, Any]:
    file = config_folder() / "policy_default.toml"
    return parse(Policy, read_toml(file), file.name, strict=True, partial=False)


def _policy(data: dict[str, Any], where: str, base: dict[str, Any], strict: bool) -> Policy:
    return Policy(**{**base, **parse(Policy, data, where, strict, partial=True)})
