"""The kernel classes, in the order in which the planner asks them. Users add theirs with
`register`.
"""

from __future__ import annotations

from ..config import HardwareProfile
from .attention.kernel_class import AttentionClass
from .base import KernelClass
from .column.kernel_class import Column
from .cpu.nest_class import Nest
from .fallback import Fallback
from .gemm.kernel_class import Gemm
from .pointwise.kernel_class import Pointwise
from .row.kernel_class import Row
from .row.mixed_class import Mixed
from .transpose.kernel_class import Transpose

_CLASSES: dict[str, tuple[KernelClass, tuple[str, ...]]] = {}


def register(kernel_class: KernelClass, kinds: tuple[str, ...] = ("cuda", "llvm")) -> None:
    """Adds a kernel class for the given kinds of device; asked before those registered earlier.

    Raises
    ------
    ValueError
        The name is taken.
    """
    if kernel_class.name in _CLASSES:
        raise ValueError(f"kernel class {kernel_class.name!r} is already registered")
    _CLASSES[kernel_class.name] = (kernel_class, kinds)


def unregister(name: str) -> None:
    del _CLASSES[name]


def kernel_classes(hw: HardwareProfile) -> tuple[KernelClass, ...]:
    """The classes for a device, most specific first."""
    return tuple(c for c, kinds in reversed(_CLASSES.values()) if hw.kind in kinds)


def added() -> tuple[tuple[KernelClass, tuple[str, ...]], ...]:
    """The classes that are not this package's own, with their kinds: for `register` in another
    process.
    """
    own = f"{__package__}."
    return tuple(e for e in _CLASSES.values() if not type(e[0]).__module__.startswith(own))


def names() -> frozenset[str]:
    """Of all classes."""
    return frozenset(_CLASSES)


def kernel_class(name: str) -> KernelClass:
    return _CLASSES[name][0]


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
):
    register(_builtin, _kinds)
