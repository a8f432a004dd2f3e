"""The targets that the functions of a module are planned for.

A pass takes its target from its argument, else from `Target.current()`, else from the virtual
devices of the module, else from the machine. Operators whose results lie on other virtual devices
are planned for those.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from ...config import HardwareProfile, resolve_target
from ...config.targets import architecture_of
from ...errors import TargetError

logger = logging.getLogger(__name__)

Device = tuple[tvm.target.Target, HardwareProfile]

Place = tuple[str, int, str]
"""A virtual device as a key: target, number, memory scope. (`==` of two VDevices never ends.)"""


@dataclass(frozen=True, slots=True)
class Part:
    """The operators of a function that are planned together.

    Attributes
    ----------
    target : Target
    hw : HardwareProfile
    place : Place or None
        The virtual device that their results lie on; None for those that name none.
    alone : bool
        Whether they are all operators of the function.
    """

    target: tvm.target.Target
    hw: HardwareProfile
    place: Place | None
    alone: bool

    @property
    def label(self) -> str:
        """The device for readers: "cuda:0", and its memory scope where that is no usual one."""
        _, number, scope = self.place or ("", 0, "global")
        name = f"{self.target.kind.name}:{number}"
        return name if scope in ("", "global") else f"{name}:{scope}"

    def holds(self, ty: Any) -> bool:
        """Whether a result of a type is one of this part's."""
        return self.alone or place_of(ty) == self.place


def device_of(asked: Any, mod: tvm.IRModule) -> Device:
    """The target and profile for a module.

    Parameters
    ----------
    asked : str, dict, Path, Target or None
        What the user gave the pass.
    mod : IRModule

    Raises
    ------
    TargetError
        The argument and `Target.current()` are for different devices.
    """
    current = tvm.target.Target.current(allow_none=True)
    if asked is None:
        named = (vdevice.target for vdevice in (mod.global_infos or {}).get("vdevice", ()))
        return resolve_target(current or next(named, None))
    target, hw = resolve_target(asked)
    if current is not None and _code(current) != _code(target):
        raise TargetError(
            f"tvm_fusion is to fuse for {_code(target)} ({asked!r}), but the pipeline runs for "
            f"{_code(current)} ({current}): give both the same target, or the pass none"
        )
    return target, hw


def parts_of(func: relax.Function, device: Device) -> list[Part]:
    """The parts of a function, one for each virtual device that results lie on.

    Parameters
    ----------
    func : relax.Function
    device : (Target, HardwareProfile)
        That of operators that name no other.

    Returns
    -------
    list of Part
        Without the devices that this package writes no kernels for.
    """
    targets = {
        place: target for var in relax.analysis.all_vars(func) for place, target in _places(var.ty)
    }
    bound = (var for var in relax.analysis.bound_vars(func) if not _is_param(func, var))
    places = list(dict.fromkeys(place_of(var.ty) for var in bound if _holds_tensors(var.ty)))
    found = []
    for place in places:
        own = device if place is None else _device_of(targets[place], device)
        if own is not None:
            found.append(Part(*own, place, alone=len(places) == 1))
    return found


def place_of(ty: Any) -> Place | None:
    """The virtual device of a tensor, or of the first tensor of a tuple."""
    return next((place for place, _ in _places(ty)), None)


def _places(ty: Any) -> list[tuple[Place, tvm.target.Target]]:
    if isinstance(ty, relax.TupleType):
        return [found for field in ty.fields for found in _places(field)]
    if not isinstance(ty, relax.TensorType) or ty.vdevice is None:
        return []
    vdevice = ty.vdevice
    key = str(vdevice.target), int(vdevice.vdevice_id), str(vdevice.memory_scope)
    return [(key, vdevice.target)]


def _holds_tensors(ty: Any) -> bool:
    if isinstance(ty, relax.TupleType):
        return any(map(_holds_tensors, ty.fields))
    return isinstance(ty, relax.TensorType)


def _is_param(func: relax.Function, var: relax.Var) -> bool:
    return any(var.same_as(param) for param in func.params)


def _device_of(target: tvm.target.Target, device: Device) -> Device | None:
    if _code(target) == _code(device[0]):
        return device
    try:
        return resolve_target(target)
    except TargetError as error:
        logger.info("operators of the virtual device %s are left to TVM: %s", target, error)
        return None


def _code(target: tvm.target.Target) -> str:
    """What code is made for: the kind, and on a GPU its generation."""
    if target.kind.name != "cuda":
        return target.kind.name
    return f"cuda sm_{architecture_of(target).number}"
