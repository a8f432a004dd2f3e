"""Who reads what an operator's instances compute, in a search state.

An operator has one home instance, in the group that owns it, and a copy in each group that
recomputes it. Whatever a group holds it reads from itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .state import State


def home_needed(
    state: State,
    op: int,
    replaced: tuple[int, ...] = (),
    live: Mapping[int, bool] | None = None,
) -> bool:
    """Whether somebody outside the replaced groups reads the home instance of `op`; `live`
    overrides what is known of home instances.
    """
    if state.links.pinned[op]:
        return True
    own = state.home[op]
    holders = state.copied_in.get(op, ())
    for c in state.links.consumers[op]:
        for gid in instances(state, c, live or {}):
            if gid not in replaced and (gid == own or gid not in holders):
                return True
    return False


def instances(state: State, op: int, live: Mapping[int, bool]) -> Iterator[int]:
    """The groups that compute an operator; `live` overrides what is known of home instances."""
    if live.get(op, state.live[op]):
        yield state.home[op]
    if op in state.copied_in:
        yield from state.copied_in[op]


def is_read_outside(
    state: State, t: int, op: int, replaced: tuple[int, ...], live: Mapping[int, bool]
) -> bool:
    """Whether a result of `op` is read by a group that is not replaced and holds no copy of it."""
    tensor = state.graph.tensors[t]
    if tensor.is_output:
        return True
    holders = state.copied_in.get(op, ())
    for c in tensor.consumers:
        if live.get(c, state.live[c]):
            home = state.home[c]
            if home not in replaced and home not in holders:
                return True
        for gid in state.copied_in.get(c, ()):
            if gid not in replaced and gid not in holders:
                return True
    return False
