"""Kernel families: what the planner asks of them, and how they write.

A family answers for a group of operators: can one launch compute it (`accepts`), what does that
move and execute (`traffic`, `resources`), and how is it written (`writer`). Adding a kind of kernel
is one folder with such a class and one line in `registry.py`; users add theirs by
`tvm_fusion.register_family`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

from tvm import tirx

from ..config import HardwareProfile, Policy
from ..cost.traffic import Resources, Traffic
from ..errors import Unsupported
from ..ir.graph import FusionGraph
from ..plan.group_view import GroupView
from ..plan.refusal import Refusal
from .forms import Form, Ranked, Writer

# Traits of operators, as bits: what decides which families need not be asked about a group.

REDUCES = 1
ROLLED = 2  # a reduction that pointwise kernels do not unroll
TRANSPOSES = 4
MULTIPLIES = 8
SUMS_ROWS = 16  # a reduction that keeps the contiguous axis
SUMS_COLUMNS = 32
READABLE = 64  # has blocks
MULTIPLIES_TWICE = MULTIPLIES << 4
SCANS = 256


class Needs(NamedTuple):
    """Traits that a group must have all of, and those that it may have none of; scans are for
    families that say so.
    """

    present: int = 0
    absent: int = 0
    scans: bool = False

    def allow(self, traits: int) -> bool:
        if traits & SCANS and not self.scans:
            return False
        return traits & self.present == self.present and not traits & self.absent

    @property
    def count(self) -> int:
        """How much is asked for: two products are one and another."""
        return self.present.bit_count() + bool(self.present & MULTIPLIES_TWICE)


def together(some: int, more: int) -> int:
    """The traits of some operators and of more of them."""
    return some | more | (some & more & MULTIPLIES) << 4


# With more, TVM's simplifier takes minutes over the index arithmetic of a tiled loop (seen with 6).
MAX_SYMBOLIC_EXTENTS = 3

FIXED_SIZES = "size: give fixed sizes when the model is exported (no `dynamic_shapes`)"
"""The action of classes that take no symbolic extents (`Refusal.action`)."""


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


class Family:
    """One kind of kernel: which groups one launch computes, what that takes, how it is written.

    Attributes
    ----------
    name : the kernel class of the groups that it computes, in plans and reports.
    needs : what a group must have and may not have to be worth asking about.
    joins_independent : computes groups that share no data side by side in one launch; the search
        then offers it such groups.
    is_product : the planner doubts its predicted times by the policy's `unknown_ratio_gemm`.
    slow_to_compile : its kernels take the compiler of the device long, so their build begins first.
    writes_out_windows : its kernels have each term of a window written out: two windows of 3 x 3 in
        one are 81, which take the compiler longest.
    """

    name: str
    needs = Needs()
    joins_independent = False
    is_product = False
    slow_to_compile = False
    writes_out_windows = False

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        """How one launch computes the group, or why none does. Asked of access maps alone."""
        raise NotImplementedError

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        """What the launch moves and executes."""
        raise NotImplementedError

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        """Registers a thread and bytes of shared memory a block."""
        raise NotImplementedError

    def cores(self, graph: FusionGraph) -> Iterator[tuple[int, ...]]:
        """Sets of operators worth a launch as a whole, though none of the groups on the way to them
        is: the search starts from these.
        """
        return iter(())

    def writer(self, hw: HardwareProfile) -> Writer:
        """How kernels for the device are written; here, as loops for a CPU. Imported when a kernel
        is written, which planning does not need.
        """
        if hw.kind != "llvm":
            raise Unsupported(f"kernel family {self.name} writes nothing for {hw.kind}")
        return ON_CPU

    def ranked(self, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy) -> Ranked:
        """Predicted seconds of one launch (or None) and configurations, the best guess first.

        Raises
        ------
        Unsupported
            No kernel of the family computes the function.
        """
        writer = self.writer(hw)
        return writer.ranked(writer.read(func, policy.rounding == "exact"), hw, policy)

    def write(
        self, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy, config: Any = None
    ) -> tirx.PrimFunc:
        """The kernel of a fused PrimFunc: of one of the configurations of `ranked`, None for the
        best guess; where a size is symbolic, for the best guess of each range of it.

        Raises
        ------
        Unsupported
            No kernel of the family computes the function.
        """
        writer = self.writer(hw)
        kernel, problem = None, None
        if config is None and writer.versions is not None:
            kernel = writer.versions(writer, func, hw, policy)
        if kernel is None or writer.finish is not None:
            problem = writer.read(func, policy.rounding == "exact")
        if kernel is None:
            kernel = writer.emit(problem, hw, policy, config)
        return kernel if writer.finish is None else writer.finish(kernel, problem)


class OnCPU(NamedTuple):
    """A function whose loops are made from its blocks alone.

    `exact`: every rounding of the unfused graph is kept.
    """

    func: tirx.PrimFunc
    exact: bool


def unranked(problem: Any, hw: HardwareProfile, policy: Policy) -> Ranked:
    """The one way to write a problem that has no configurations."""
    return [(None, None)]


def write_on_cpu(problem: OnCPU, hw: HardwareProfile, config: None = None) -> tirx.PrimFunc:
    """The CPU loops of any group.

    Raises
    ------
    Unsupported
        The function is outside what the CPU writer, or TVM behind it, can handle.
    """
    from .cpu.write import write_cpu

    _refuse_on_cpu(problem.func)
    return write_cpu(problem.func, exact=problem.exact, hw=hw)


ON_CPU = Writer("loops", OnCPU, (Form("loops", NoneType, unranked, write_on_cpu),))


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
