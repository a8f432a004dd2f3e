"""The graph of a model as values of its report: what flows between which operators and groups, what
the groups are called in the model, and which of them repeat.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..config import HardwareProfile
from ..ir.access import Block, Extent
from ..ir.graph import FusionGraph, Op, OpKind, Tensor
from ..ir.origins import Origin, Origins, origins_of_operators
from ..plan.group_view import dtype_bytes
from ..plan.plan import FREE, FusionPlan, PlannedGroup


@dataclass(frozen=True, slots=True)
class OperatorReport:
    """An operator of the lowered model.

    Attributes
    ----------
    name : str
        As the plan calls it.
    operator : str
        The composite that it is a part of ("softmax#1"), or else what it computes ("matmul").
    module, source : str or None
        Path of the submodule and the line of its source that it comes from, where these are known.
    inputs, outputs : tuple of int
        Tensors, by `TensorReport.id`.
    flops : float or None
        Operations of one call, a multiply-add counting two; None where that depends on symbolic
        extents.
    """

    name: str
    operator: str
    module: str | None
    source: str | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: float | None


@dataclass(frozen=True, slots=True)
class TensorReport:
    """A tensor of the lowered model.

    Attributes
    ----------
    id : int
    name : str
    shape : tuple of int or str
        Symbolic extents as text.
    dtype : str
    bytes : int or None
        None where that depends on symbolic extents.
    role : str
        "input", "constant", "intermediate" or "output".
    """

    id: int
    name: str
    shape: tuple[Extent, ...]
    dtype: str
    bytes: int | None
    role: str


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """The rates by which a plan was made.

    Attributes
    ----------
    name, kind : str
        Of the profile; "cuda" or "llvm".
    flops_per_s : mapping of str to float
        By dtype of the operands of matrix products; "float32" also of all other arithmetic.
    memory_bytes_per_s, l2_bytes_per_s : float
    launch_us : float
    """

    name: str
    kind: str
    flops_per_s: Mapping[str, float] = field(hash=False)
    memory_bytes_per_s: float
    l2_bytes_per_s: float
    launch_us: float

    @classmethod
    def of(cls, hw: HardwareProfile) -> DeviceReport:
        """What a report says of a profile."""
        rates = {"float32": hw.fma_per_s_f32, **hw.tensor_flop_per_s}
        return cls(hw.name, hw.kind, rates, hw.hbm_bytes_per_s, hw.l2_bytes_per_s, hw.launch_us)


@dataclass(frozen=True, slots=True)
class GraphReport:
    """The lowered model.

    Attributes
    ----------
    ops : tuple of OperatorReport
        In an order in which they can run.
    tensors : tuple of TensorReport
    """

    ops: tuple[OperatorReport, ...]
    tensors: tuple[TensorReport, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Groups that come again and again, as the layers of a model do.

    Attributes
    ----------
    first : int
        Index of the first group of the first repetition.
    groups : int
        Groups of one repetition.
    count : int
        Repetitions.
    """

    first: int
    groups: int
    count: int


class Network:
    """The graph of a function with the groups of a plan; views cost nothing and are looked through.

    Parameters
    ----------
    graph : FusionGraph
    plan : FusionPlan
        For this graph.
    origins : mapping of str to Origin
        By the names of variables of the model.
    """

    def __init__(self, graph: FusionGraph, plan: FusionPlan, origins: Origins) -> None:
        self._graph, self._plan = graph, plan
        self._number = {op.name: op.id for op in graph.ops}
        self._origins = origins_of_operators(graph, origins)

    @cached_property
    def launched(self) -> tuple[PlannedGroup, ...]:
        """The groups that are launches, in order."""
        return tuple(g for g in self._plan.groups if g.kernel_class not in FREE)

    def report(self) -> GraphReport:
        """The graph as plain values."""
        read = {t for op in self._graph.ops for t in op.inputs}
        tensors = [
            TensorReport(t.id, t.name, t.shape, t.dtype, bytes_of(t), _role(t))
            for t in self._graph.tensors
            if not t.is_inner and t.dtype != "object" and (t.id in read or t.producer is not None)
        ]
        known = {t.id for t in tensors}
        ops = tuple(self._operator(op, known) for op in self._graph.ops)
        return GraphReport(ops, tuple(tensors))

    def facts(self, group: PlannedGroup) -> dict[str, Any]:
        """What a group's report says of its place in the model."""
        ops = self._ops(group)
        modules = tuple(dict.fromkeys(o.module for o in self._from(ops)))
        kinds = list(dict.fromkeys(map(operator_kind, ops)))
        place = common_module(modules)
        flops = [_flops(op) for op in ops]
        return {
            "label": f"{place}: {', '.join(kinds)}" if place else ", ".join(kinds),
            "modules": modules,
            "lines": tuple(dict.fromkeys(o.source for o in self._from(ops) if o.source)),
            "reads": self.reads(group),
            "writes": self.writes(group),
            "flops": None if None in flops else sum(flops),
        }

    def reads(self, group: PlannedGroup) -> tuple[int, ...]:
        """The tensors in memory that a group reads."""
        ops = self._ops(group)
        inside = {t for op in ops for t in op.outputs}
        found = (self._stored(t) for op in ops for t in op.inputs if t not in inside)
        return tuple(dict.fromkeys(t for t in found if t not in inside))

    def writes(self, group: PlannedGroup) -> tuple[int, ...]:
        """The tensors that a group leaves in memory."""
        tensors = self._graph.tensors
        own = [op for op in self._ops(group) if op.name not in group.recomputed]
        return tuple(
            t for op in own for t in op.outputs if tensors[t].is_output or t in self._read_outside
        )

    def same_as(self) -> tuple[int | None, ...]:
        """Of each launch the first that has the same kernel and shapes; None for a first one."""
        first: dict[tuple, int] = {}
        return tuple(
            None if (seen := first.setdefault(key, i)) == i else seen
            for i, key in enumerate(self._signatures)
        )

    def repeats(self) -> tuple[Repeat, ...]:
        """The runs of equal launches."""
        return repeats_of(self._signatures)

    def timeline(self) -> tuple[int, ...] | None:
        """Bytes of intermediates and results in memory while each launch runs; None where extents
        are symbolic.
        """
        last: dict[int, int] = {}
        for i, group in enumerate(self.launched):
            for t in self.reads(group):
                last[t] = i
        end = len(self.launched)
        alive, size = 0, []
        ends: dict[int, int] = {}
        for i, group in enumerate(self.launched):
            for t in self.writes(group):
                tensor = self._graph.tensors[t]
                held = bytes_of(tensor)
                if held is None:
                    return None
                until = end if t in self._results else last.get(t, i)
                alive += held
                ends[until] = ends.get(until, 0) + held
            size.append(alive)
            alive -= ends.pop(i, 0)
        return tuple(size)

    # ---- what these are made of
    @cached_property
    def _read_outside(self) -> frozenset[int]:
        """Tensors that a launch reads from memory."""
        return frozenset(t for group in self.launched for t in self.reads(group))

    @cached_property
    def _views(self) -> dict[int, int]:
        """The tensor that a free view is a view of, by that of the view."""
        free = [g for g in self._plan.groups if g.kernel_class == "view"]
        ops = [op for group in free for op in self._ops(group) if op.inputs]
        return {t: op.inputs[0] for op in ops for t in op.outputs}

    @cached_property
    def _signatures(self) -> list[tuple]:
        return [self._signature(group) for group in self.launched]

    def _signature(self, group: PlannedGroup) -> tuple:
        """What two launches with the same kernel have in common."""
        numbers: dict[int, int] = {}
        parts = []
        for op in self._ops(group):
            wires = tuple(numbers.setdefault(t, len(numbers)) for t in (*op.inputs, *op.outputs))
            shapes = tuple(self._graph.tensors[t].shape for t in (*op.inputs, *op.outputs))
            parts.append((op.key or op.name, wires, shapes, op.name in group.recomputed))
        return group.kernel_class, tuple(parts)

    def _stored(self, tensor: int) -> int:
        while tensor in self._views:
            tensor = self._views[tensor]
        return tensor

    @cached_property
    def _results(self) -> frozenset[int]:
        """The tensors that are results, or that a result is a view of."""
        return frozenset(self._stored(t.id) for t in self._graph.tensors if t.is_output)

    def _ops(self, group: PlannedGroup) -> list[Op]:
        return [self._graph.ops[self._number[name]] for name in group.ops]

    def _from(self, ops: Iterable[Op]) -> list[Origin]:
        return [found for op in ops if (found := self._origins[op.id]) is not None]

    def _operator(self, op: Op, known: set[int]) -> OperatorReport:
        origin = self._origins[op.id]
        return OperatorReport(
            op.name,
            op.composite or operator_kind(op),
            origin and origin.module,
            (origin and origin.source) or None,
            tuple(t for t in op.inputs if t in known),
            tuple(t for t in op.outputs if t in known),
            _flops(op),
        )


_NUMBERED = re.compile(r"(#|_?)\d+$")


def operator_kind(op: Op) -> str:
    """What an operator computes in a word: "softmax", "matmul"."""
    return _NUMBERED.sub("", op.composite or op.func or op.name) or op.name


def common_module(modules: Sequence[str]) -> str:
    """The innermost module that holds all the given ones, by path; a module whose parts are given,
    too, counts for its own forward's few operators only, and not at all.
    """
    inner = [m for m in modules if not any(o.startswith(f"{m}.") for o in modules if m)]
    paths = [module.split(".") for module in inner if module]
    if not paths:
        return ""
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def common_pattern(modules: Sequence[str]) -> str:
    """Paths that differ in numbers only as one, "layers.*.mlp"; the first of others."""
    if not modules:
        return ""
    columns = list(zip(*(module.split(".") for module in modules), strict=False))
    same_length = len({module.count(".") for module in modules}) == 1
    if not same_length or any(len(set(c)) > 1 and not all(map(str.isdigit, c)) for c in columns):
        return modules[0]
    return ".".join(column[0] if len(set(column)) == 1 else "*" for column in columns)


def repeats_of(items: Sequence[Any]) -> tuple[Repeat, ...]:
    """The runs in which blocks of items come again at once, from the left, each the one that covers
    most, and of those the one of the shortest blocks.
    """
    numbers: dict[Any, int] = {}
    row = [numbers.setdefault(item, len(numbers)) for item in items]
    found, start = [], 0
    while start < len(row):
        best = max(_runs_at(row, start), key=lambda run: (run.groups * run.count, run.count))
        if best.count > 1:
            found.append(best)
        start += best.groups * best.count if best.count > 1 else 1
    return tuple(found)


def _runs_at(row: Sequence[int], start: int) -> list[Repeat]:
    runs = [Repeat(start, 1, 1)]
    for size in range(1, (len(row) - start) // 2 + 1):
        if row[start] != row[start + size]:
            continue
        count, block = 1, row[start : start + size]
        while row[start + count * size : start + (count + 1) * size] == block:
            count += 1
        runs += [Repeat(start, size, count)] if count > 1 else []
    return runs


def bytes_of(tensor: Tensor) -> int | None:
    """The size of a tensor; None where that depends on symbolic extents."""
    if not all(isinstance(extent, int) for extent in tensor.shape) or tensor.dtype == "object":
        return None
    return math.ceil(math.prod(tensor.shape) * dtype_bytes(tensor.dtype))


def _role(tensor: Tensor) -> str:
    if tensor.is_output:
        return "output"
    if tensor.producer is not None:
        return "intermediate"
    return "constant" if tensor.is_constant else "input"


def _flops(op: Op) -> float | None:
    if op.kind is OpKind.VIEW:
        return 0.0
    counts = [_block_flops(block) for block in op.blocks]
    return None if None in counts else float(sum(counts))


def _block_flops(block: Block) -> float | None:
    extents = [axis.extent for axis in block.axes]
    if not all(isinstance(extent, int) for extent in extents):
        return None
    each = 2 if block.is_contraction else block.operations()
    return float(math.prod(extents)) * each


def bytes_apart(
    network: Network, whole: FusionGraph, alone: FusionPlan
) -> tuple[tuple[int, ...], int]:
    """Memory traffic of the model as it is, by the launch that computes each of its operators.

    Parameters
    ----------
    network : Network
    whole : FusionGraph
        The model as it is, composites not opened.
    alone : FusionPlan
        Of that graph, nothing fused.

    Returns
    -------
    tuple of int, int
        Bytes by launch, and of the operators that were rewritten away; together all of `alone`.
    """
    owned = ((i, op, g) for i, g in enumerate(network.launched) for op in g.ops)
    owner = {op: i for i, op, g in owned if op not in g.recomputed}
    found = [0.0] * len(network.launched)
    for group in alone.groups:
        if group.kernel_class in FREE:
            continue
        if group.ops[-1] in owner:
            found[owner[group.ops[-1]]] += group.bytes
    sizes = tuple(map(int, found))
    return sizes, int(sum(g.bytes for g in alone.groups if g.kernel_class not in FREE)) - sum(sizes)
