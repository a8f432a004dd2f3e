"""The moves of the search: which pairs of groups could become one, and which producers could be
recomputed by their consumers.

    vertical    a -> b, also through views:  {a} {v} {b}   =>  {a, v', b}
    sibling     a, b read the same tensor:   {a} {b}       =>  {a, b}
    horizontal  a, b have nothing in common: {a} {b}       =>  {a, b}
    remat       p -> c1, c2, ...:            {p} {c1} {c2} =>  {p', c1} {p', c2}

A move is a value; applying it to a state is `State.merge` or `State.copy_into`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from ..ir.extents import assumed_product
from ..ir.graph import OpKind
from ..kernels.base import Refusal
from .legality import Costed
from .state import NOTHING, Members, State

SIBLING_MIN_ELEMENTS = 2  # sharing a scalar is no reason to stand in one kernel


class MoveKind(Enum):
    VERTICAL = "vertical"
    SIBLING = "sibling"
    HORIZONTAL = "horizontal"


@dataclass(frozen=True, slots=True)
class Merge:
    """Two groups become one; `copies` are the views between them, copied into the result."""

    kind: MoveKind
    first: int
    second: int
    copies: Members = NOTHING


@dataclass(frozen=True, slots=True)
class Recompute:
    """Each of the consumer groups computes these operators of the producer group itself.

    Where nobody reads the producer's own instances any more they are dropped: the operators have
    then moved.
    """

    producer: int
    ops: Members
    consumers: tuple[int, ...]


def fusible(state: State, gid: int) -> bool:
    """A live group of operators that can be read, other than a lone view."""
    ops = [state.graph.ops[i] for i in state.owned[gid]]
    return state.alive(gid) and any(op.kind is OpKind.CALL_TIR for op in ops)


def merges_of(state: State, gid: int) -> Iterator[Merge]:
    """All merges of one group with a neighbour, in a fixed order."""
    if not fusible(state, gid):
        return
    for other, views in sorted(_below(state, gid).items()):
        if other != gid and fusible(state, other):
            yield Merge(MoveKind.VERTICAL, gid, other, views)
    for other, views in sorted(_above(state, gid).items()):
        if other != gid and fusible(state, other):
            yield Merge(MoveKind.VERTICAL, other, gid, views)
    for other, views in sorted(_siblings(state, gid).items()):
        if other != gid and fusible(state, other):
            yield Merge(MoveKind.SIBLING, *sorted((gid, other)), views)


def holds_independent(state: State, gid: int) -> bool:
    """Whether the group's kernel class computes independent groups side by side in one launch."""
    costed = state.cost(gid)
    return not isinstance(costed, Refusal) and getattr(costed.kernel, "joins_independent", False)


def opaque_neighbours(state: State, gid: int) -> list[int]:
    """Groups beside this one that no kernel class can read, in order."""
    beside = {**_below(state, gid), **_above(state, gid)}
    kinds = {g: state.graph.ops[min(state.owned[g])].kind for g in beside}
    return sorted(g for g, kind in kinds.items() if kind is OpKind.OPAQUE)


def _below(state: State, gid: int, ops: Members | None = None) -> dict[int, Members]:
    """Groups that read this one (or some of its operators), with the views on the way."""
    starts = state.owned[gid] if ops is None else ops
    return _neighbours(state, gid, starts, state.graph.consumers)


def _above(state: State, gid: int) -> dict[int, Members]:
    """Groups this one reads, with the views on the way."""
    return _neighbours(state, gid, state.members(gid), state.graph.producers)


def _neighbours(
    state: State, gid: int, starts: Members, step: Callable[[int], tuple[int, ...]]
) -> dict[int, Members]:
    found: dict[int, Members] = {}
    stack = [(op, NOTHING) for op in sorted(starts)]
    while stack:
        op, views = stack.pop()
        for n in step(op):
            if state.graph.ops[n].kind is not OpKind.VIEW:
                home = state.home[n]
                if home != gid:
                    found[home] = found.get(home, NOTHING) | views
            elif n not in state.owned[gid]:
                stack.append((n, views | {n}))
    return found


def _siblings(state: State, gid: int) -> dict[int, Members]:
    """Groups that read a tensor this one reads, or a view of it, with the views on the way."""
    found: dict[int, Members] = {}
    for op in sorted(state.members(gid)):
        for t in state.graph.ops[op].inputs:
            if assumed_product(state.graph.tensors[t].shape) >= SIBLING_MIN_ELEMENTS:
                source, views = _behind_views(state, t)
                for home, more in _readers(state, source, views).items():
                    found[home] = found.get(home, NOTHING) | more
    return found


def _behind_views(state: State, tensor: int) -> tuple[int, Members]:
    """The tensor that `tensor` is a view of, and the views between."""
    views = NOTHING
    while (producer := state.graph.tensors[tensor].producer) is not None:
        op = state.graph.ops[producer]
        if op.kind is not OpKind.VIEW:
            break
        views, tensor = views | {producer}, op.inputs[0]
    return tensor, views


def _readers(state: State, tensor: int, views: Members) -> dict[int, Members]:
    """Groups that read a tensor, with `views` and the views on the way to them."""
    found: dict[int, Members] = {}
    for c in state.graph.tensors[tensor].consumers:
        if state.graph.ops[c].kind is not OpKind.VIEW:
            found[state.home[c]] = found.get(state.home[c], NOTHING) | views
            continue
        for t in state.graph.ops[c].outputs:
            for home, more in _readers(state, t, views | {c}).items():
                found[home] = found.get(home, NOTHING) | more
    return found


def evaluate_merge(state: State, move: Merge) -> Costed | Refusal:
    a, b = move.first, move.second
    copies = state.copies.get(a, NOTHING) | state.copies.get(b, NOTHING) | move.copies
    return state.evaluate(state.owned[a] | state.owned[b], copies, frozenset((a, b)))


def merge_makes_cycle(state: State, move: Merge) -> bool:
    a, b = move.first, move.second
    owned = state.owned[a] | state.owned[b]
    copies = state.copies.get(a, NOTHING) | state.copies.get(b, NOTHING) | move.copies
    return state.makes_cycle(owned, copies - owned, frozenset((a, b)))


def recomputes_of(state: State, gid: int) -> Iterator[Recompute]:
    """The whole group, and each of its operators that others read: into all readers together, then
    into each alone.
    """
    if not fusible(state, gid):
        return
    whole = frozenset(op for op in state.owned[gid] if state.live[op])
    for ops in [whole, *(frozenset((op,)) for op in sorted(whole) if len(whole) > 1)]:
        if any(b.reduction is not None for op in ops for b in state.graph.ops[op].blocks):
            continue
        readers = _below(state, gid, ops)
        consumers = tuple(sorted(c for c in readers if c != gid and fusible(state, c)))
        if len(consumers) > 1:
            yield Recompute(gid, ops, consumers)
        for c in consumers:
            yield Recompute(gid, ops, (c,))


def apply_recompute(state: State, move: Recompute) -> None:
    views = _below(state, move.producer, move.ops)
    for c in move.consumers:
        state.copies[c] = (
            state.copies.get(c, NOTHING) | move.ops | views.get(c, NOTHING)
        ) - state.owned[c]
    state.refresh()
