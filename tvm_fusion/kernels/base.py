"""What the planner knows of kernel classes: groups, fits, refusals, and the interface every class
implements.

A kernel class answers for a group of operators: can one launch compute it (`accepts`), what does
that move and execute (`traffic`), and how is it written (`write`). Adding a kind of kernel is one
file with such a class and one line in `registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, cached_property, lru_cache
from typing import Any, Protocol, TypeVar

from tvm import tirx

from ..config import HardwareProfile, Policy
from ..errors import Unsupported
from ..ir.access import Access, Block, Extent
from ..ir.extents import assumed_product
from ..ir.graph import FusionGraph, OpKind

# With more, TVM's simplifier takes minutes over the index arithmetic of a tiled loop (seen with 6).
MAX_SYMBOLIC_EXTENTS = 3

Found = TypeVar("Found")

_BYTES = {"bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}


class RefusalCode(Enum):
    """Why two groups may not become one. Closed: a new reason is a new member here, with a test."""

    CYCLE = "cycle"
    OPAQUE = "opaque"
    REGION = "region"
    SPACE_MISMATCH = "space_mismatch"
    REDUCTION = "reduction"
    SEVERAL_CONTRACTIONS = "several_contractions"
    NOT_TRAILING = "not_trailing"
    OFF_ROW = "off_row"
    PROLOGUE = "prologue"
    EPILOGUE = "epilogue"
    RECOMPUTE = "recompute"
    PARAMETER_BYTES = "parameter_bytes"
    GROUP_SIZE = "group_size"
    NOT_PROFITABLE = "not_profitable"
    UNDECIDED = "undecided"
    SLOWER = "slower"
    WRITER = "writer"
    CLASS_ERROR = "class_error"
    BUILD = "build"
    WRONG_NUMBERS = "wrong_numbers"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason a user may wonder at: `where` names the operators, `numbers` what was compared."""

    code: RefusalCode
    where: tuple[str, ...]
    why: str
    numbers: tuple[tuple[str, float], ...] = ()


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


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one launch moves and executes.

    Bytes are unions of footprints, operations are counts. A class with a model of its own gives its
    time as `seconds`, with the `terms` it is made of; the other fields then only say what the
    launch does.

    Attributes
    ----------
    hbm_bytes, l2_bytes : bytes that cross the memory's and the L2's interface, each once
    operations : operations by pipe (`ir.access.Pipe`)
    parallel : share of the device the launch can fill (0 to 1]
    sector_bytes : bytes that the loads and stores ask for in whole sectors, those of stores counted
        as the reads that take the L2 as long; more than `l2_bytes` where accesses are not coalesced
        or what is read is read again
    read_bytes : bytes of loads whose latency has to be covered by others in flight
    wavefronts : passes through the load/store units (up to 128 bytes of one instruction each)
    smem_bytes : bytes written to and read from shared memory
    exchanges : block-wide exchanges (a barrier with the shuffles around it) one block goes through
    shuffles : steps of reductions within warps that a thread goes through
    rounds : loads of a thread that wait for one another
    blocks : thread blocks
    in_flight_bytes : bytes of loads that one multiprocessor keeps in flight
    assumed_l2 : inputs (tensor number, bytes) that are taken to lie in the L2 when the launch
        starts, since a launch before it has just written them
    """

    hbm_bytes: float
    l2_bytes: float
    operations: Mapping[str, float] = field(hash=False)
    tensor_flops: float = 0.0
    tensor_dtype: str = "float32"
    tensor_efficiency: float = 1.0
    parallel: float = 1.0
    seconds: float | None = None
    terms: Mapping[str, float] = field(default_factory=dict, hash=False)
    sector_bytes: float = 0.0
    read_bytes: float = 0.0
    wavefronts: float = 0.0
    smem_bytes: float = 0.0
    exchanges: float = 0.0
    blocks: float = 0.0
    in_flight_bytes: float = 0.0
    shuffles: float = 0.0
    rounds: float = 0.0
    assumed_l2: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Resources:
    """What a thread and its block need: first estimates, or what `cost.probe` found.

    Attributes
    ----------
    registers_per_thread : 32-bit registers; above the device's limit they are spilled
    smem_bytes : shared memory of a block
    threads : threads of a block; 0 where not known
    code_bytes : machine code of the kernel; 0 where not known
    spill_bytes : bytes a thread stores to and loads from local memory, if the probe told
    turns : how often a thread uses these registers anew (points it computes one after the other)
    """

    registers_per_thread: int
    smem_bytes: int
    threads: int = 0
    code_bytes: int = 0
    spill_bytes: int | None = None
    turns: float = 1.0


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


@cache
@cache
def dtype_bytes(dtype: str) -> int:
    """Bytes an element of a TVM dtype takes in memory (sub-byte dtypes count as one)."""
    if dtype in _BYTES:
        return _BYTES[dtype]
    digits = "".join(c for c in dtype.split("_")[0] if c.isdigit())
    return max(1, int(digits or 8) // 8)


@lru_cache(maxsize=4096)
def _bytes(shape: tuple[Extent, ...], dtype: str) -> int:
    return assumed_product(shape) * dtype_bytes(dtype)


@dataclass(frozen=True)
class GroupView:
    """A set of operators seen as one kernel: what it reads, what it must write, and its blocks in
    order.

    `outputs` are the tensors somebody reads outside; `duplicated` is the bitset of members that
    belong to another group and are only recomputed here.
    """

    graph: FusionGraph
    ops: tuple[int, ...]
    outputs: tuple[int, ...]
    duplicated: int = 0

    @cached_property
    def memo(self) -> dict:
        """What `once` has found out."""
        return {}

    def once(self, key: Hashable, find: Callable[[], Found]) -> Found:
        """What a kernel class finds out about the group and asks for again, found when first asked
        for: nobody has to have asked the class anything before.
        """
        if key not in self.memo:
            self.memo[key] = find()
        return self.memo[key]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.graph.ops[i].name for i in self.ops)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(b for i in self.ops for b in self.graph.ops[i].blocks)

    @cached_property
    def produced(self) -> frozenset[int]:
        return frozenset(t for i in self.ops for t in self.graph.ops[i].outputs)

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Tensors read from memory, each once."""
        read = (t for i in self.ops for t in self.graph.ops[i].inputs)
        return tuple(t for t in dict.fromkeys(read) if t not in self.produced)

    @cached_property
    def writer_of(self) -> dict[int, Block]:
        return {w.tensor: b for b in self.blocks for w in b.writes}

    @cached_property
    def readers_of(self) -> dict[int, tuple[tuple[Block, Access], ...]]:
        found: dict[int, list] = {}
        for b in self.blocks:
            for a in b.reads:
                found.setdefault(a.tensor, []).append((b, a))
        return {t: tuple(r) for t, r in found.items()}

    @cached_property
    def views(self) -> frozenset[int]:
        """The blocks of reshapes, by `id`."""
        ops = (self.graph.ops[i] for i in self.ops)
        return frozenset(id(b) for op in ops if op.kind is OpKind.VIEW for b in op.blocks)

    @property
    def is_view(self) -> bool:
        """Nothing but one reshape: no kernel at all."""
        return len(self.ops) == 1 and self.graph.ops[self.ops[0]].kind is OpKind.VIEW

    def tensor_bytes(self, tensor: int) -> int:
        t = self.graph.tensors[tensor]
        return _bytes(t.shape, t.dtype)

    def refuse(self, code: RefusalCode, why: str, **numbers: float) -> Refusal:
        return Refusal(code, self.names, why, tuple(sorted(numbers.items())))
