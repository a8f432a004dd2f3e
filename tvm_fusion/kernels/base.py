"""What the planner knows of kernel classes: fits, and the interface every class implements.

A kernel class answers for a group of operators: can one launch compute it (`accepts`), what does
that move and execute (`traffic`), and how is it written (`write`). Adding a kind of kernel is one
folder with such a class and one line in `registry.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tvm import tirx

from ..config import HardwareProfile, Policy
from ..cost.traffic import Resources, Traffic
from ..errors import Unsupported
from ..plan.group_view import GroupView
from ..plan.refusal import Refusal

# With more, TVM's simplifier takes minutes over the index arithmetic of a tiled loop (seen with 6).
MAX_SYMBOLIC_EXTENTS = 3


@dataclass(frozen=True, slots=True)
class Fit:
    """One launch of `kernel_class` computes the group.

    Attributes
    ----------
    kernel_class : str
    rows, columns : int
        The space it runs over (symbols at their assumed size); `columns` is what one thread block
        shares.
    evaluations : tuple of float
        How often each block of the group is evaluated, in points.
    contraction : (batch, M, N, K) of the matrix products in the group, each once
    seconds : predicted time without the launch's own cost, where the class predicts it itself
    terms : of that time, by name, in seconds
    """

    kernel_class: str
    rows: int
    columns: int
    evaluations: tuple[float, ...]
    contractions: tuple[tuple[int, int, int, int], ...] = ()
    side_by_side: bool = False
    seconds: float | None = None
    terms: tuple[tuple[str, float], ...] = ()


class KernelClass(Protocol):
    """One kind of kernel; see the module docstring.

    `configs` has the best guess first: the one that `write` takes where it gets none.

    A class with a true attribute `joins_independent` computes groups that share no data side by
    side in one launch; the search then offers it such groups. One with a method `ranked`, like
    `configs` with the predicted seconds of a launch (or None) beside each configuration, lets
    tuning begin with what is predicted.
    """

    name: str

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal: ...

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic: ...

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources: ...

    def configs(self, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy) -> list[Any]: ...

    def write(
        self, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy, config: Any = None
    ) -> tirx.PrimFunc: ...


def write_on_cpu(func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy) -> tirx.PrimFunc:
    """The CPU loops of any class: they are made from the function's blocks alone.

    Raises
    ------
    Unsupported
        The function is outside what the CPU writer, or TVM behind it, can handle.
    """
    from .cpu.write import write_cpu

    _refuse_on_cpu(func)
    return write_cpu(func, exact=policy.rounding == "exact", hw=hw)


def _refuse_on_cpu(func: tirx.PrimFunc) -> None:
    for param in func.params:
        if not isinstance(param.ty, tirx.BufferType):
            continue
        if str(param.ty.dtype).startswith("float8_e8m0"):
            raise Unsupported(
                f"{param.name} is {param.ty.dtype}, which TVM widens in plain loads only"
            )
        symbols = sum(not isinstance(e, tirx.IntImm) for e in param.ty.shape)
        if symbols > MAX_SYMBOLIC_EXTENTS:
            raise Unsupported(f"{param.name} has {symbols} symbolic extents")
