"""The moves of the search: which pairs of groups could become one, and which producers could be
recomputed by their consumers.

    vertical    a -> b, also through views:  {a} {v} {b}   =>  {a, v', b}
    sibling     a, b read the same tensor:   {a} {b}       =>  {a, b}
    horizontal  a, b have nothing in common: {a} {b}       =>  {a, b}
    remat       p -> c1, c2, ...:            {p} {c1} {c2} =>  {p', c1} {p', c2}

A move is a value; applying it to a state is `State.merge` or `State.add_copies`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from ...ir.extents import assumed_product
from ...ir.graph import FusionGraph, OpKind
from ..group_view import dtype_bytes
from ..legality import Costed
from ..refusal import Refusal
from .search_state import NOTHING, Members, State

SIBLING_MIN_ELEMENTS = 2  # sharing a scalar is no reason to stand in one kernel
SIBLING_REACH = 16  # readers of one tensor, to either side, that a reader is offered to


class MoveKind(Enum):
    VERTICAL = "vertical"
    SIBLING = "sibling"
    HORIZONTAL = "horizontal"


class Merge(NamedTuple):
    """Two groups become one; `copies` are the views between them, copied into the result."""

    kind: MoveKind
    first: int
    second: int
    copies: Members = NOTHING


class Recompute(NamedTuple):
    """Each of the consumer groups computes these operators of the producer group itself.

    Where nobody reads the producer's own instances any more they are dropped: the operators have
    then moved.
    """

    producer: int
    ops: Members
    consumers: tuple[int, ...]


def fusible(state: State, gid: int) -> bool:
    """A live group of operators that can be read, other than a lone view."""
    return state.links.fusible[gid] and state.alive(gid)  # only such groups ever merge


def merges_of(state: State, gid: int) -> Iterator[Merge]:
    """All merges of one group with a neighbour, in a fixed order."""
    if not fusible(state, gid):
        return
    below, above, beside = _below(state, gid), _above(state, gid), _siblings(state, gid)
    for other, views in sorted(below.items()):
        if other != gid and fusible(state, other):
            yield Merge(MoveKind.VERTICAL, gid, other, views)
    for other, views in sorted(above.items()):
        if other != gid and fusible(state, other):
            yield Merge(MoveKind.VERTICAL, other, gid, views)
    for other, views in sorted(beside.items()):
        if other == gid or views in (below.get(other), above.get(other)):
            continue
        if fusible(state, other):
            yield Merge(MoveKind.SIBLING, *sorted((gid, other)), views)


def holds_independent(state: State, gid: int) -> bool:
    """Whether the group's kernel class computes independent groups side by side in one launch."""
    costed = state.cost(gid)
    return not isinstance(costed, Refusal) and costed.kernel.joins_independent


def producers_above(state: State, gid: int) -> Iterable[int]:
    """Groups that this one reads, also through views."""
    return _above(state, gid)


def _below(state: State, gid: int, ops: Members | None = None) -> dict[int, Members]:
    """Groups that read this one (or some of its operators), with the views on the way."""
    starts = state.owned[gid] if ops is None else ops
    return _neighbours(state, gid, starts, state.links.consumers)


def _above(state: State, gid: int) -> dict[int, Members]:
    """Groups this one reads, with the views on the way."""
    return _neighbours(state, gid, state.members(gid), state.links.producers)


def _neighbours(
    state: State, gid: int, starts: Members, steps: tuple[tuple[int, ...], ...]
) -> dict[int, Members]:
    is_view, homes, owned = state.links.view, state.home, state.owned[gid]
    found: dict[int, Members] = {}
    stack = [(op, NOTHING) for op in sorted(starts)]
    while stack:
        op, views = stack.pop()
        for n in steps[op]:
            if n in owned:
                continue
            if is_view[n]:
                stack.append((n, views | {n}))
            else:
                home = homes[n]
                found[home] = found[home] | views if home in found else views
    return found


def _siblings(state: State, gid: int) -> dict[int, Members]:
    """Groups that read a tensor this one reads, or a view of it, with the views on the way."""
    found: dict[int, Members] = {}
    tensors, ops, owned = state.graph.tensors, state.graph.ops, state.owned[gid]
    seen: set[tuple[int, int]] = set()
    for op in sorted(state.members(gid)):
        for t in ops[op].inputs:
            tensor = tensors[t]
            if tensor.producer in owned or assumed_product(tensor.shape) < SIBLING_MIN_ELEMENTS:
                continue
            source, views = _behind_views(state, t)
            near = _near(tensors[source].consumers, op)
            if len(near) == len(tensors[source].consumers):
                if (t, -1) in seen:
                    continue
                seen.add((t, -1))
            for home, more in _readers(state, near, views).items():
                found[home] = found.get(home, NOTHING) | more
    return found


def _near(consumers: tuple[int, ...], op: int) -> tuple[int, ...]:
    """Of many consumers those around an operator."""
    if len(consumers) <= 2 * SIBLING_REACH:
        return consumers
    before = sum(c < op for c in consumers)
    return consumers[max(0, before - SIBLING_REACH) : before + SIBLING_REACH + 1]


def _behind_views(state: State, tensor: int) -> tuple[int, Members]:
    """The tensor that `tensor` is a view of, and the views between."""
    views = NOTHING
    while (producer := state.graph.tensors[tensor].producer) is not None:
        if not state.links.view[producer]:
            break
        views, tensor = views | {producer}, state.graph.ops[producer].inputs[0]
    return tensor, views


def _readers(state: State, consumers: tuple[int, ...], views: Members) -> dict[int, Members]:
    """Groups that own consumers of a tensor, with `views` and the views on the way to them."""
    found: dict[int, Members] = {}
    for c in consumers:
        if state.graph.ops[c].kind is not OpKind.VIEW:
            found[state.home[c]] = found.get(state.home[c], NOTHING) | views
            continue
        for t in state.graph.ops[c].outputs:
            behind = state.graph.tensors[t].consumers
            for home, more in _readers(state, behind, views | {c}).items():
                found[home] = found.get(home, NOTHING) | more
    return found


def tensor_bytes(graph: FusionGraph, tensor: int) -> int:
    t = graph.tensors[tensor]
    return assumed_product(t.shape) * dtype_bytes(t.dtype)


def evaluate_merge(state: State, move: Merge) -> Costed | Refusal:
    return state.evaluate_merge(move.first, move.second, move.copies)


def merge_makes_cycle(state: State, move: Merge) -> bool:
    return state.order.makes_cycle(state, move.first, move.second, move.copies)


def recomputes_of(state: State, gid: int) -> Iterator[Recompute]:
    """The whole group, and each of its operators that others read: into all readers together, then
    into each alone.

    Left out is what cannot gain: a whole group moved to its only reader is a merge, and a reader
    that would read more than before gains only where nobody reads the producer any more.
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
        only = len(readers) == 1 and not any(state.links.pinned[op] for op in ops)
        if only and ops is whole:
            continue
        for c in consumers:
            if only or _reads_no_more(state, ops, c):
                yield Recompute(gid, ops, (c,))


def _reads_no_more(state: State, ops: Members, reader: int) -> bool:
    """Whether a group would read no more bytes if it computed what it reads of these operators."""
    graph, links = state.graph, state.links
    members = state.members(reader)
    read = {t for op in members for t in graph.ops[op].inputs}
    saved = sum(tensor_bytes(graph, t) for op in ops for t in graph.ops[op].outputs if t in read)
    if any(links.view[c] for op in ops for c in links.consumers[op]):
        return True  # what is read through views is not counted here
    more = {t for op in ops for t in graph.ops[op].inputs} - read
    made = {t for op in ops for t in graph.ops[op].outputs}
    return sum(tensor_bytes(graph, t) for t in more - made) <= saved


def copies_of(state: State, move: Recompute) -> dict[int, Members]:
    """What a rematerialisation copies into each consumer: the operators, and the views behind."""
    views = _below(state, move.producer, move.ops)
    return {c: move.ops | views.get(c, NOTHING) for c in move.consumers}
