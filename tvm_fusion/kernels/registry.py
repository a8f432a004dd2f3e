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
from .join.kernel_class import JoinClass
from .pointwise.kernel_class import Pointwise
from .row.kernel_class import Row
from .row.mixed_class import Mixed
from .scan.kernel_class import ScanClass
from .transpose.kernel_class import Transpose
from .window.kernel_class import WindowClass

KINDS = ("cuda", "llvm")
REQUIRED = ("accepts", "traffic", "resources")

_FAMILIES: dict[str, tuple[Family, tuple[str, ...]]] = {}


def register(family: Family, kinds: tuple[str, ...] = KINDS) -> None:
    """Adds a kernel family for the given kinds of device; asked before those registered earlier.

    Raises
    ------
    TypeError
        It is no `Family`, or lacks a name or a method.
    ValueError
        The name is taken, or a kind does not exist.
    """
    if not isinstance(family, Family):
        raise TypeError(f"register takes an instance of a Family, got {family!r}")
    missing = _missing(type(family), kinds)
    if missing:
        raise TypeError(f"kernel family {type(family).__name__} lacks {', '.join(missing)}")
    if family.name in _FAMILIES:
        raise ValueError(f"kernel family {family.name!r} is already registered")
    if not kinds or not set(kinds) <= set(KINDS):
        raise ValueError(f"kernel family {family.name!r}: kinds={kinds!r}, not of {KINDS}")
    _FAMILIES[family.name] = (family, kinds)


def _missing(cls: type[Family], kinds: tuple[str, ...]) -> list[str]:
    """What a family has to define, and does not."""
    missing = [name for name in REQUIRED if getattr(cls, name) is getattr(Family, name)]
    if not isinstance(getattr(cls, "name", None), str):
        missing.insert(0, "name")
    if "cuda" in kinds and (cls.writer, cls.write) == (Family.writer, Family.write):
        missing.append("writer (needed for cuda: kinds=('llvm',) does without)")
    return missing


def unregister(name: str) -> None:
    del _FAMILIES[name]


def families(hw: HardwareProfile) -> tuple[Family, ...]:
    """The families for a device, most specific first."""
    return tuple(f for f, kinds in reversed(_FAMILIES.values()) if hw.kind in kinds)


def added() -> tuple[tuple[Family, tuple[str, ...]], ...]:
    """The families that are not this package's own, with their kinds: for `register` in another
    process.
    """
    return tuple(e for e in _FAMILIES.values() if not is_ours(e[0]))


def is_ours(family: Family) -> bool:
    """Whether a family is this package's own."""
    return type(family).__module__.startswith(f"{__package__}.")


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
    (WindowClass(), ("cuda",)),
    (ScanClass(), ("cuda",)),
    (JoinClass(), ("cuda",)),
    (ConvolutionClass(), ("cuda", "llvm")),
):
    register(_builtin, _kinds)
