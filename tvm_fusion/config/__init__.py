"""Hardware profiles and policies, read from ``configs/*.toml``.

Every number in those files is a table ``{value, unit, source}``. The unit has to be the one that
the code computes with; the source says where the number is from: a datasheet, a measurement with
its date, an estimate with its reasoning. No other code has a hardware number of its own.
"""

from .cards import card_names
from .files import (
    add_profile,
    added_profiles,
    file_of,
    load_policy,
    load_profile,
    policy_names,
    profile_file,
    profile_names,
    profile_text,
    remove_profile,
    shipped_file,
)
from .hardware import HardwareProfile
from .policy import Policy
from .targets import resolve_target

__all__ = [
    "HardwareProfile",
    "Policy",
    "add_profile",
    "added_profiles",
    "card_names",
    "file_of",
    "load_policy",
    "load_profile",
    "policy_names",
    "profile_file",
    "profile_names",
    "profile_text",
    "remove_profile",
    "resolve_target",
    "shipped_file",
]
