"""The kernel families, in the order in which the planner asks them. Users add theirs with
`register`.
"""

from __future__ import annotations

from collections.abc import Callable

from ..config import HardwareProfile
from .attention.kernel_class import AttentionClass
from .base import Family
from .column.kernel_class import Column
from .convolution.kernel_class import ConvolutionClass
from .cpu.nest_class import Nest
from .fallback import Fallback
from .gemm.kernel_class import Gemm
from .pointwise.kernel_class import Pointwise
from .row.kernel_class import Row
from .row.mixed_class import Mixed
from .transpose.kernel_class import Transpose

_FAMILIES: dict[str, tuple[Family, tuple[str, ...]]] = {}


def register(family: Family, kinds: tuple[str, ...] = ("cuda", "llvm")) -> None:
    """Adds a kernel family for the given kinds of device; asked before those registered earlier.

    Raises
    ------
    TypeError
        It is no `Family`.
    ValueError
        The name is taken.
    """
    if not isinstance(family, Family):
        raise TypeError(f"register takes an instance of a Family, got {family!r}")
    if family.name in _FAMILIES:
        raise ValueError(f"kernel family {family.name!r} is already registered")
    _FAMILIES[family.name] = (family, kinds)


def unregister(name: str) -> None:
    del _FAMILIES[name]


def families(hw: HardwareProfile) -> tuple[Family, ...]:
    """The families for a device, most specific first."""
    return tuple(f for f, kinds in reversed(_FAMILIES.values()) if hw.kind in kinds)


def added() -> tuple[tuple[Family, tuple[str, ...]], ...]:
    """The families that are not this package's own, with their kinds: for `register` in another
    process.
    """
    own = f"{__package__}."
    return tuple(e for e in _FAMILIES.values() if not type(e[0]).__module__.startswith(own))


def names(such: Callable[[Family], bool] = lambda family: True) -> frozenset[str]:
    """Of all families, or of those for which `such` holds."""
    return frozenset(name for name, (family, _) in _FAMILIES.items() if such(family))


def family(name: str) -> Family:
    return _FAMILIES[name][0]


for _builtin, _kinds in (
    (Fallback(), ("cuda", "llvm")),
    (Nest(), ("llvm",)),
    (Gemm(), ("cuda", "llvm")),
    (AttentionClass(), ("cuda", "llvm")),
    (Mixed(), ("cuda",)),
    (Column(), ("cuda", "llvm")),
    (Row(), ("cuda", "llvm")),
    (Pointwise(), ("cuda", "llvm")),
    (Transpose(), ("cuda",)),
    (ConvolutionClass(), ("cuda", "llvm")),
):
    register(_builtin, _kinds)
