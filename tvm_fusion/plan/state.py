"""The search state: which group owns each operator, and which groups recompute it.

Every operator has one home group. Other groups may hold copies of it (rematerialisation; views are
copied freely). A home instance that nobody reads any more is dead and costs nothing. A group's id
is the number of an operator it owns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..ir.graph import FusionGraph, OpKind, bits
from ..kernels.base import Refusal
from .legality import Costed, Evaluator

Members = frozenset[int]
NOTHING: Members = frozenset()


@dataclass
class State:
    evaluator: Evaluator
    owned: dict[int, Members] = field(default_factory=dict)
    copies: dict[int, Members] = field(default_factory=dict)
    home: dict[int, int] = field(default_factory=dict)
    copied_in: dict[int, Members] = field(default_factory=dict)
    live: dict[int, bool] = field(default_factory=dict)

    @classmethod
    def unfused(cls, evaluator: Evaluator) -> State:
        """Every operator alone."""
        state = cls(evaluator)
        for op in evaluator.graph.ops:
            state.owned[op.id] = frozenset((op.id,))
            state.home[op.id] = op.id
        state.refresh()
        return state

    @property
    def graph(self) -> FusionGraph:
        return self.evaluator.graph

    def members(self, gid: int) -> Members:
        return self.owned[gid] | self.copies.get(gid, NOTHING)

    def alive(self, gid: int) -> bool:
        return any(self.live[op] for op in self.owned[gid])

    def refresh(self) -> None:
        """Finds the dead home instances after a move."""
        self.copied_in = {}
        for gid, ops in self.copies.items():
            for op in ops:
                self.copied_in[op] = self.copied_in.get(op, NOTHING) | {gid}
        self.live = {}
        for op in reversed(self.graph.ops):
            self.live[op.id] = self._home_needed(op.id, NOTHING, self.live)

    def _home_needed(self, op: int, replaced: Members, live: dict[int, bool]) -> bool:
        """Whether somebody outside the replaced groups reads the home instance of `op`."""
        node = self.graph.ops[op]
        if node.kind is OpKind.OPAQUE or any(self.graph.tensors[t].is_output for t in node.outputs):
            return True
        for c in self.graph.consumers(op):
            for gid in self._instances(c, live):
                if gid in replaced:
                    continue
                if gid == self.home[op] or op not in self.copies.get(gid, NOTHING):
                    return True
        return False

    def _instances(self, op: int, live: dict[int, bool]) -> Iterator[int]:
        if live.get(op, self.live.get(op, True)):
            yield self.home[op]
        yield from sorted(self.copied_in.get(op, NOTHING))

    def evaluate(self, owned: Members, copies: Members, replaced: Members) -> Costed | Refusal:
        """The group of these operators, were it to stand in place of the replaced groups."""
        copies -= owned
        live: dict[int, bool] = {}
        for op in sorted(copies, reverse=True):
            live[op] = self._home_needed(op, replaced, {**self.live, **live})
        members = sorted({op for op in owned if self.live[op]} | copies)
        live = {**self.live, **live}
        outputs = tuple(
            t
            for op in members
            if op not in copies
            for t in self.graph.ops[op].outputs
            if self._is_read_outside(t, op, replaced, live)
        )
        return self.evaluator.group(tuple(members), outputs, bits(copies))

    def _is_read_outside(self, t: int, op: int, replaced: Members, live: dict[int, bool]) -> bool:
        tensor = self.graph.tensors[t]
        return tensor.is_output or any(
            gid not in replaced and op not in self.copies.get(gid, NOTHING)
            for c in tensor.consumers
            for gid in self._instances(c, live)
        )

    def cost(self, gid: int) -> Costed | Refusal:
        """The group as it stands; a dead group may not be asked."""
        return self.evaluate(self.owned[gid], self.copies.get(gid, NOTHING), frozenset((gid,)))

    def time_us(self, gid: int) -> float:
        """Predicted time of a group; nothing for a dead one and for a lone view."""
        if not self.alive(gid):
            return 0.0
        costed = self.cost(gid)
        return 0.0 if isinstance(costed, Refusal) or costed.view.is_view else costed.time_us

    def readers(self, owned: Members, replaced: Members) -> set[int]:
        """Groups, other than the replaced ones, that read what `owned` writes."""
        found = set()
        for op in owned:
            for c in self.graph.consumers(op):
                for gid in self._instances(c, self.live):
                    if gid not in replaced and op not in self.members(gid):
                        found.add(gid)
        return found

    def sources(self, members: Members) -> set[int]:
        """Home groups of what these operators read from outside."""
        read = {p for op in members for p in self.graph.producers(op)} - members
        return {self.home[p] for p in read}

    def makes_cycle(self, owned: Members, copies: Members, replaced: Members) -> bool:
        """Whether a path leaves the would-be group and comes back to it."""
        members = owned | copies
        targets = self.sources(members) - replaced
        stack = sorted(self.readers(owned, replaced))
        seen = set(stack)
        while stack:
            gid = stack.pop()
            if gid in targets:
                return True
            for nxt in self.readers(self.owned[gid], frozenset((gid,)) | replaced):
                if nxt not in seen:
                    seen.add(nxt)
                    stack.append(nxt)
        return False

    def merge(self, a: int, b: int, copies: Members) -> int:
        """Group b joins group a, with these extra copies (views between them)."""
        self.owned[a] = self.owned[a] | self.owned.pop(b)
        both = self.copies.pop(a, NOTHING) | self.copies.pop(b, NOTHING) | copies
        if both - self.owned[a]:
            self.copies[a] = both - self.owned[a]
        for op in self.owned[a]:
            self.home[op] = a
        self.refresh()
        return a

    def copy(self) -> State:
        """An independent state to try a move on."""
        new = State(self.evaluator, dict(self.owned), dict(self.copies), dict(self.home))
        new.copied_in, new.live = self.copied_in, self.live
        return new
