"""Who reads what an operator's instances compute, in a search state.

An operator has one home instance, in the group that owns it, and a copy in each group that
recomputes it. Whatever a group holds it reads from itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .search_state import State


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


def read_outside(
    state: State, tensors: Iterable[int], replaced: tuple[int, ...], live: Mapping[int, bool]
) -> list[int]:
    """Those of some operators' results that a group reads which is not replaced and holds no copy
    of the operator; `live` as in `home_needed`.
    """
    nodes, home, copied_in = state.graph.tensors, state.home, state.copied_in
    known = state.live
    found = []
    for t in tensors:
        tensor = nodes[t]
        if tensor.is_output:
            found.append(t)
            continue
        holders = copied_in.get(tensor.producer, ())
        for c in tensor.consumers:
            if live.get(c, known[c]) if live else known[c]:
                gid = home[c]
                if gid not in replaced and gid not in holders:
                    found.append(t)
                    break
            if c in copied_in and any(
                gid not in replaced and gid not in holders for gid in copied_in[c]
            ):
                found.append(t)
                break
    return found
