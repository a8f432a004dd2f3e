"""The launches that a graph may be computed with: sets of operators and the tensors they write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, combinations

from tvm_fusion.config import HardwareProfile, Policy
from tvm_fusion.errors import Unsupported
from tvm_fusion.ir.graph import FusionGraph, OpKind
from tvm_fusion.plan.legality import Costed, Evaluator
from tvm_fusion.plan.refusal import Refusal
from tvm_fusion.plan.search.solution import Launch, members_of

MAX_ENUMERATED_OPS = 9
MAX_OPTIONAL = 5  # tensors that a launch may write or not: with more, not all sets are tried


@dataclass
class LaunchSpace:
    """Launches of one graph under one model.

    Parameters
    ----------
    graph : FusionGraph
    hw : HardwareProfile
    policy : Policy

    Raises
    ------
    Unsupported
        An operator of the graph cannot be read.
    """

    graph: FusionGraph
    hw: HardwareProfile
    policy: Policy
    evaluator: Evaluator = field(init=False)

    def __post_init__(self) -> None:
        if opaque := [op.name for op in self.graph.ops if op.kind is OpKind.OPAQUE]:
            raise Unsupported(f"{opaque[0]} cannot be read")
        self.evaluator = Evaluator(self.graph, self.hw, self.policy)

    # ---- the graph without its views
    @cached_property
    def kernels(self) -> tuple[int, ...]:
        """Operators that need a kernel."""
        return tuple(op.id for op in self.graph.ops if op.kind is OpKind.CALL_TIR)

    @cached_property
    def sources(self) -> Mapping[int, Mapping[int, int]]:
        """For each operator the tensors it reads, seen through views: the bitset of those views."""
        return {op: self._sources(op) for op in self.kernels}

    def _sources(self, op: int) -> dict[int, int]:
        found: dict[int, int] = {}
        for t in self.graph.ops[op].inputs:
            views = 0
            while (producer := self.graph.tensors[t].producer) is not None:
                if self.graph.ops[producer].kind is not OpKind.VIEW:
                    break
                views |= 1 << producer
                t = self.graph.ops[producer].inputs[0]
            found[t] = found.get(t, 0) | views
        return found

    @cached_property
    def readers(self) -> Mapping[int, int]:
        """For each tensor the bitset of operators that read it, through views too."""
        found: dict[int, int] = {}
        for op, read in self.sources.items():
            for t in read:
                found[t] = found.get(t, 0) | 1 << op
        return found

    def _producer(self, tensor: int) -> int:
        return self.graph.tensors[tensor].producer

    def _source(self, tensor: int) -> int:
        while (producer := self._producer(tensor)) is not None:
            op = self.graph.ops[producer]
            if op.kind is not OpKind.VIEW:
                break
            tensor = op.inputs[0]
        return tensor

    def _read(self, launch: Launch) -> frozenset[int]:
        """Tensors a launch needs in memory, seen through views."""
        return frozenset(
            t
            for op in members_of(launch.members)
            if op in self.sources
            for t in self.sources[op]
            if (p := self._producer(t)) is not None and not launch.members >> p & 1
        )

    # ---- launches
    def costed(self, launch: Launch) -> Costed | None:
        """What the model says of a launch; None if no kernel class takes it."""
        found = self.evaluator.group(members_of(launch.members), launch.stores)
        return None if isinstance(found, Refusal) else found

    def launches(self) -> list[Launch]:
        """All legal launches: every set of operators that a kernel class takes, with every set of
        tensors it may write.

        Raises
        ------
        Unsupported
            The graph has more than 9 operators.
        """
        if len(self.kernels) > MAX_ENUMERATED_OPS:
            raise Unsupported(f"{len(self.kernels)} operators are too many to list all launches")
        return [launch for launch in self._candidates() if self.costed(launch) is not None]

    def _candidates(self) -> Iterator[Launch]:
        for number in range(1, 1 << len(self.kernels)):
            ops = 0
            for place, op in enumerate(self.kernels):
                ops |= (number >> place & 1) << op
            yield from self.variants(ops)

    def variants(self, ops: int) -> Iterator[Launch]:
        """The launches that compute these operators, with the sets of tensors they may write.

        Whatever is read inside only has to be written where its reader is computed in another
        launch, too; what is read outside need not be written where others compute it for
        themselves. Of launches with many such tensors only some sets are given.
        """
        whole, must, may, inner = self._stores(ops)
        if len(may) + len(inner) <= MAX_OPTIONAL:
            choices = [set(c) for c in _subsets([*may, *inner])]
        else:
            shown = may if len(may) <= MAX_OPTIONAL else []
            choices = [{*set(c), *(set(may) - set(shown))} for c in _subsets(shown)]
            choices += [{*may, t} for t in inner]
        for chosen in choices:
            stores = {*must, *chosen}
            if stores and self._needed(Launch(whole, tuple(stores))) == ops:
                yield Launch(whole, tuple(sorted(stores)))

    def _stores(self, ops: int) -> tuple[int, list[int], list[int], list[int]]:
        """The operators with the views between them; tensors they have to write, may write, and
        need to write for copies only.
        """
        whole, must, may, inner = ops, [], [], []
        for op in members_of(ops):
            for t, views in self.sources[op].items():
                producer = self.graph.tensors[t].producer
                if producer is not None and ops >> producer & 1:
                    whole |= views
            for t in self.graph.ops[op].outputs:
                readers = self.readers.get(t, 0)
                outside = readers & ~ops or self.graph.tensors[t].is_output
                if not readers & ops or (outside and len(self.graph.ops[op].outputs) > 1):
                    must.append(t)
                else:
                    (may if outside else inner).append(t)
        return whole, must, may, inner

    def _needed(self, launch: Launch) -> int:
        """Operators of a launch that something it writes depends on."""
        needed, stack = 0, [self._producer(t) for t in launch.stores]
        while stack:
            op = stack.pop()
            if needed >> op & 1 or op not in self.sources:
                continue
            needed |= 1 << op
            for t in self.sources[op]:
                p = self._producer(t)
                if p is not None and launch.members >> p & 1:
                    stack.append(p)
        return needed


def _subsets(items: list[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))
