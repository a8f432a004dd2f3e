"""Regions: operators whose launches are chosen together, whatever the rest of the solution does.

A region holds the members of some launches of a solution. What it has to write is what the
launches outside read of it (and results of the graph); what it may read is whatever they write.
Inside, every split into launches is open, with any operator computed as often as one likes. No
launch outside may write what an operator of the region computes.

Paths that leave a region and come back through launches outside bound the order inside: before an
operator at the end of such a path runs, the results at its start must have been written by another
launch (`before`).

Sets of operators and of results are ints with one bit for each, numbered inside the region. Views
are no operators here: they are looked through (`Read.chain`) and added to a launch where it
computes both ends of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...ir.graph import FusionGraph, OpKind
from ..search.solution import Launch, members_of, produced_reads


@dataclass(frozen=True, slots=True)
class Read:
    """An input of an operator: the tensor behind its views, and the bitset (of the graph) of those
    views.
    """

    tensor: int
    chain: int


@dataclass(frozen=True)
class Region:
    """See the module docstring.

    Attributes
    ----------
    graph : FusionGraph
    ops : tuple of int
        Its operators other than views, ascending.
    results : tuple of int
        The tensors they compute, ascending by operator.
    wanted : int
        Results that have to be written.
    out : tuple of int
        For each operator its results.
    needs : tuple of int
        For each operator the results it reads.
    before : tuple of int
        For each operator the results that another launch must have written before it runs.
    ancestors : tuple of int
        For each operator the results of all operators it depends on, also through launches
        outside, and its own.
    inputs : tuple of tuple of Read
        For each operator.
    """

    graph: FusionGraph
    ops: tuple[int, ...]
    results: tuple[int, ...]
    wanted: int
    out: tuple[int, ...]
    needs: tuple[int, ...]
    before: tuple[int, ...]
    ancestors: tuple[int, ...]
    inputs: tuple[tuple[Read, ...], ...]

    def members(self, ops: int, shared: bool = True) -> int:
        """The bitset (of the graph) of some operators and the views between them.

        Parameters
        ----------
        ops : int
        shared : bool
            Whether the views in front of a tensor that is read several times, through different
            views, are computed too, so that it is read once.
        """
        members, inside = 0, 0
        for i in members_of(ops):
            members |= 1 << self.ops[i]
            inside |= self.out[i]
        if not self.has_views:
            return members
        chains: dict[int, set[int]] = {}
        for i in members_of(ops):
            for read in self.inputs[i]:
                bit = self._bit.get(read.tensor, 0)
                if bit & inside:
                    members |= read.chain
                elif shared:
                    chains.setdefault(read.tensor, set()).add(read.chain)
        for found in chains.values():
            if len(found) > 1:
                for chain in found:
                    members |= chain
        return members

    def tensors(self, results: int) -> tuple[int, ...]:
        """Numbers (of the graph) of some results, ascending."""
        return tuple(sorted(self.results[i] for i in members_of(results)))

    def results_of(self, tensors: Iterable[int]) -> int:
        """The bitset of those tensors that are results of the region."""
        return sum(1 << t for t in {self._place[t] for t in tensors if t in self._place})

    def reads(self, ops: int) -> int:
        """The results that some operators read and do not compute."""
        read = self._reads.get(ops)
        if read is None:
            found, inside = 0, 0
            for i in members_of(ops):
                found |= self.needs[i]
                inside |= self.out[i]
            read = self._reads[ops] = found & ~inside
        return read

    def makes(self, ops: int) -> int:
        """The results of some operators."""
        found = self._made.get(ops)
        if found is None:
            found = self._made[ops] = _union(self.out[i] for i in members_of(ops))
        return found

    def waits_for(self, ops: int) -> int:
        """The results that other launches must have written before some operators run."""
        return self.reads(ops) | _union(self.before[i] for i in members_of(ops) if self.before[i])

    def ops_of(self, members: int) -> int:
        """The bitset (of the region) of a launch's operators."""
        return sum(1 << self._number[op] for op in members_of(members) if op in self._number)

    @cached_property
    def has_views(self) -> bool:
        """Whether any operator reads through views."""
        return any(read.chain for reads in self.inputs for read in reads)

    @cached_property
    def _made(self) -> dict[int, int]:
        return {}

    @cached_property
    def _reads(self) -> dict[int, int]:
        return {}

    @cached_property
    def _place(self) -> dict[int, int]:
        return {t: i for i, t in enumerate(self.results)}

    @cached_property
    def _bit(self) -> dict[int, int]:
        return {t: 1 << i for i, t in enumerate(self.results)}

    @cached_property
    def _number(self) -> dict[int, int]:
        return {op: i for i, op in enumerate(self.ops)}


def behind_views(graph: FusionGraph, tensor: int) -> Read:
    """The tensor that `tensor` renames, and the views between."""
    chain = 0
    while (producer := graph.tensors[tensor].producer) is not None:
        op = graph.ops[producer]
        if op.kind is not OpKind.VIEW:
            break
        chain |= 1 << producer
        tensor = op.inputs[0]
    return Read(tensor, chain)


def region_of(
    graph: FusionGraph, launches: Sequence[Launch], others: Sequence[Launch], wanted: set[int]
) -> Region:
    """The region of some launches of a solution.

    Parameters
    ----------
    graph : FusionGraph
    launches : sequence of Launch
        Kernels whose operators make the region.
    others : sequence of Launch
        At least all launches that stand between them, in order.
    wanted : set of int
        Tensors (behind their views) that launches outside read, and results of the graph; others
        may be among them.
    """
    members = 0
    for launch in launches:
        members |= launch.members
    ops = tuple(op for op in members_of(members) if graph.ops[op].kind is OpKind.CALL_TIR)
    results = tuple(t for op in ops for t in graph.ops[op].outputs)
    bit = {t: 1 << i for i, t in enumerate(results)}
    inputs = tuple(
        tuple(behind_views(graph, t) for t in dict.fromkeys(graph.ops[op].inputs)) for op in ops
    )
    needs = tuple(_union(bit.get(read.tensor, 0) for read in reads) for reads in inputs)
    out = tuple(_union(bit[t] for t in graph.ops[op].outputs) for op in ops)
    outside = _outside(graph, others, bit)
    before = tuple(_union(outside.get(read.tensor, 0) for read in reads) for reads in inputs)
    ancestors = _ancestors(out, tuple(n | b for n, b in zip(needs, before, strict=True)))
    must = _union(bit[t] for t in wanted if t in bit)
    return Region(graph, ops, results, must, out, needs, before, ancestors, inputs)


def _ancestors(out: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Results each operator comes after, by any path, and its own. Paths through launches outside
    may lead from a later operator to an earlier one, so one pass need not do.
    """
    maker = {r: i for i, own in enumerate(out) for r in members_of(own)}
    found, again = list(out), True
    while again:
        again = False
        for i, results in enumerate(after):
            more = found[i] | _union(found[maker[r]] for r in members_of(results))
            again |= more != found[i]
            found[i] = more
    return tuple(found)


def _union(sets: Iterable[int]) -> int:
    found = 0
    for s in sets:
        found |= s
    return found


def _outside(graph: FusionGraph, others: Sequence[Launch], bit: dict[int, int]) -> dict[int, int]:
    """For each tensor that launches outside write, the results of the region that must have been
    written before.
    """
    found: dict[int, int] = {}
    for launch in others:
        behind = 0
        for t in produced_reads(graph, launch):
            read = behind_views(graph, t).tensor
            behind |= bit.get(read, 0) | found.get(read, 0)
        if behind:
            for t in launch.stores:
                found[t] = behind
    return found


def region_key(region: Region) -> tuple:
    """Equal for regions that differ in nothing but the names and numbers of their operators and
    tensors: their solutions correspond operator by operator.
    """
    graph = region.graph
    number: dict[int, int] = {}
    described = []
    for op in region.ops:
        node = graph.ops[op]
        reads = tuple(_tensor_key(graph, t, number) for t in node.inputs)
        writes = tuple(
            (t.shape, t.dtype, t.is_output) for t in (graph.tensors[t] for t in node.outputs)
        )
        for t in node.outputs:
            number.setdefault(t, len(number))
        described.append((node.key, node.region, reads, writes))
    shift = min((node[1] for node in described), default=0)
    described = [(key, block - shift, *rest) for key, block, *rest in described]
    return (tuple(described), region.wanted, region.before)


def _tensor_key(graph: FusionGraph, tensor: int, number: dict[int, int]) -> tuple:
    """A tensor by its number inside, its views, and whether a launch wrote it."""
    node = graph.tensors[tensor]
    first = tensor not in number
    place = number.setdefault(tensor, len(number))
    if not first:
        return (place,)
    views: tuple = ()
    if node.producer is not None and graph.ops[node.producer].kind is OpKind.VIEW:
        op = graph.ops[node.producer]
        views = (op.key, _tensor_key(graph, op.inputs[0], number))
    return (place, node.shape, node.dtype, node.is_constant, node.producer is not None, views)
