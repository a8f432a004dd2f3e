"""Structural identity of groups: equal groups of different layers have equal keys, whatever their
operators and tensors are called.

    lv0 = add(x, b0); lv1 = relu(lv0)          layer 0     key (add, 0, 1, 2, relu, 2, 3 | 3)
    lv7 = add(lv6, b1); lv8 = relu(lv7)        layer 1     the same key

The key of an operator covers its PrimFunc and, of each tensor it touches, shape, dtype, and all
that a kernel class may ask about it. That of a group adds how its tensors are wired (numbers in the
order in which they first occur) and which are written.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ..config import HardwareProfile, Policy
from ..ir.access import Block
from ..ir.graph import FusionGraph, Op, OpKind
from ..kernels.base import (
    MULTIPLIES,
    READABLE,
    REDUCES,
    ROLLED,
    SCANS,
    SUMS_COLUMNS,
    SUMS_ROWS,
    TRANSPOSES,
    Family,
    together,
)
from ..kernels.gemm.product import match_product
from ..kernels.group.read_order import is_transposing, read_order
from ..kernels.program.window import is_window_block

MOST_KNOWN = 20_000  # structures of groups, of 1.3 kB each, that the next plan begins with
MOST_SOLVED = 32  # graphs whose solutions are known, each of 0.1 MB where it has 1000 operators


@dataclass
class Structures:
    """Numbers for structures of operators, and what is known of structures of groups and of whole
    graphs.

    One of these may serve several graphs for the same device and policy (`structures_for`).
    """

    counter: Iterator[int] = field(default_factory=itertools.count)
    numbers: dict[Hashable, int] = field(default_factory=dict)
    traits: dict[tuple[str, str], int] = field(default_factory=dict)
    known: dict[tuple[int, ...], Any] = field(default_factory=dict)
    solved: dict[Hashable, Any] = field(default_factory=dict)

    def number(self, structure: Hashable) -> int:
        return self.numbers.setdefault(structure, next(self.counter))

    def keep_solved(self, graph: Hashable, solution: Any) -> None:
        """Keeps what was found for a graph (`Wiring.whole`), and forgets the oldest of many."""
        self.solved[graph] = solution
        for oldest in [*self.solved][:-MOST_SOLVED]:
            self.solved.pop(oldest, None)


_RECENT: deque[tuple[Any, ...]] = deque(maxlen=4)


def structures_for(
    hw: HardwareProfile, policy: Policy, classes: tuple[Family, ...], residual: Any
) -> Structures:
    """What this process knows of structures for a device, a policy, kernel classes and a learned
    residual: a module is planned several times, with and without each rewrite.
    """
    name = (hw.fingerprint(), policy.fingerprint(), classes)
    for entry in tuple(_RECENT):
        if entry[0] == name and entry[1] is residual:
            if len(entry[2].known) < MOST_KNOWN:
                return entry[2]
            with suppress(ValueError):  # another thread was as quick
                _RECENT.remove(entry)
    found = Structures()
    _RECENT.append((name, residual, found))
    return found


class Wiring:
    """Structural keys over one graph.

    Attributes
    ----------
    number : structure of each operator
    touched : tensors that each operator reads, writes or keeps inside, each once
    touches : how many these are
    traits, working : of each operator; `working` is 1 where it counts as one of a group's operators
    places : the dataflow block of each operator, None for what cannot be read
    """

    def __init__(self, graph: FusionGraph, hw: HardwareProfile, structures: Structures) -> None:
        self.graph, self.structures = graph, structures
        self.touched = tuple(map(_touched, graph.ops))
        facts = _tensor_facts(graph)
        self.number = tuple(
            structures.number(_structure(op, touched, facts))
            for op, touched in zip(graph.ops, self.touched, strict=True)
        )
        self.traits = tuple(self._traits(op, hw) for op in graph.ops)
        self.working = tuple(int(_works(op)) for op in graph.ops)
        self.touches = tuple(map(len, self.touched))
        self.places = tuple(None if op.kind is OpKind.OPAQUE else op.region for op in graph.ops)

    def key(self, ops: tuple[int, ...], outputs: tuple[int, ...]) -> tuple[int, ...]:
        """The structural key of a group."""
        touched = [*chain.from_iterable([self.touched[op] for op in ops])]
        place = dict(zip(dict.fromkeys(touched), itertools.count(), strict=False)).__getitem__
        number = map(self.number.__getitem__, ops)
        return (*number, -1, *map(place, touched), -1, *map(place, outputs))

    def whole(self) -> Hashable:
        """The structural key of the graph: all that a search may ask of it but names. Tensors that
        no operator touches (weights of layers that were left out) do not count.
        """
        touched = sorted(set(chain.from_iterable(self.touched)))
        number = dict(zip(touched, itertools.count(), strict=False)).__getitem__
        wires = tuple(
            (*map(number, op.inputs), -1, *map(number, op.outputs), -1, op.region, op.is_join)
            for op in self.graph.ops
        )
        tensors = map(self.graph.tensors.__getitem__, touched)
        return self.number, wires, tuple((t.is_output, t.is_constant) for t in tensors)

    def touched_by(self, ops: tuple[int, ...]) -> tuple[int, ...]:
        """The tensors that a group touches, each once: those of equal groups correspond."""
        return tuple(dict.fromkeys(chain.from_iterable([self.touched[op] for op in ops])))

    def _traits(self, op: Op, hw: HardwareProfile) -> int:
        known = self.structures.traits
        if not op.key:
            return traits_of(op.blocks, hw)
        name = (op.key, op.kind.value)
        if name not in known:
            known[name] = traits_of(op.blocks, hw)
        return known[name]


def traits_of(blocks: tuple[Block, ...], hw: HardwareProfile) -> int:
    """The traits of some loop nests."""
    found = READABLE if blocks else 0
    for block in blocks:
        if is_transposing(block):
            found |= TRANSPOSES
        if block.scanned is not None:
            found |= SCANS
        if block.reduction is None:
            continue
        found |= REDUCES
        if hw.kind == "llvm" or not is_window_block(block):
            found |= ROLLED
        if match_product(block) is not None:
            found |= together(found, MULTIPLIES)
        order = read_order(block)
        sums_rows = bool(order) and order[-1] in block.spatial
        found |= SUMS_ROWS if sums_rows else SUMS_COLUMNS
    return found


def _works(op: Op) -> bool:
    """Whether an operator computes: conversions, and what only moves data, do not."""
    return not op.blocks or any(b.counts or b.reduction is not None for b in op.blocks)


def _touched(op: Op) -> tuple[int, ...]:
    accessed = (a.tensor for b in op.blocks for a in (*b.reads, *b.writes))
    return tuple(dict.fromkeys((*op.inputs, *op.outputs, *accessed)))


def _structure(op: Op, touched: tuple[int, ...], facts: list[Hashable]) -> Hashable:
    place = {t: n for n, t in enumerate(touched)}
    pattern = tuple(place[a.tensor] for b in op.blocks for a in (*b.reads, *b.writes))
    symbols = tuple(a.extent for b in op.blocks for a in b.axes if not isinstance(a.extent, int))
    lengths = (len(op.inputs), len(op.outputs))
    own = (op.kind.value, op.key, op.why_opaque, lengths, pattern, symbols)
    return own, tuple(facts[t] for t in touched)


def _tensor_facts(graph: FusionGraph) -> list[Hashable]:
    """All of each tensor that may matter to the cost or the legality of a group around it: beside
    its shape and dtype whether a launch has written it (it may lie in the L2), and of a reduction's
    result whether nothing but reductions reads it (it may be a partial one).
    """
    reduces = [any(b.reduction is not None for b in op.blocks) for op in graph.ops]
    facts: list[Hashable] = []
    for t in graph.tensors:
        partial = t.producer is not None and reduces[t.producer]
        partial = partial and all(reduces[c] for c in t.consumers)
        facts.append((t.shape, t.dtype, t.is_inner, _is_made(graph, t.id), partial))
    return facts


def _is_made(graph: FusionGraph, tensor: int) -> bool:
    """Whether the function computes the tensor, or what it is a view of."""
    producer = graph.tensors[tensor].producer
    while producer is not None and graph.ops[producer].kind is OpKind.VIEW:
        producer = graph.tensors[graph.ops[producer].inputs[0]].producer
    return producer is not None
