"""How many scalar values are live at once where a kernel computes one point of a group.

The writers compute depth first: a value is computed where it is first used, and kept until its
last use. A chain needs one or two values at a time; a sum of sixty values that are all used again
later needs sixty.

    a = exp(x); b = a + 1; y = a * b        x | a | a b | y      two
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..ir.access import Block, derived

if TYPE_CHECKING:
    from ..plan.group_view import GroupView


def live_values(group: GroupView, roots: Iterable[int] | None = None) -> int:
    """Most values of a group's pointwise DAG that are live at once, for one point.

    Inputs count from their first use to their last. Whatever is computed as part of one operator
    counts as one value.

    Parameters
    ----------
    group : GroupView
    roots : iterable of int, optional
        The tensors that are computed, in order; by default what the group writes.
    """
    sources: dict[int, Sequence[int]] = {}
    for block in group.blocks:
        reads = _sources(block)
        for write in block.writes:
            sources[write.tensor] = reads
    return peak_live(sources, tuple(group.outputs if roots is None else roots))


@derived
def _sources(block: Block) -> tuple[int, ...]:
    return tuple(dict.fromkeys(a.tensor for a in block.reads))


def peak_live(sources: Mapping[Hashable, Sequence[Hashable]], roots: Sequence[Hashable]) -> int:
    """Most values that are live at once when `roots` are computed one after the other.

    Parameters
    ----------
    sources : mapping
        Value -> the values it is computed from; what is no key is loaded.
    roots : sequence
        What is stored; a root is free once it is computed, unless something else reads it.
    """
    order, uses = _schedule(sources, roots)
    left = dict(uses)
    live = peak = 0
    for value in order:
        live += 1
        peak = max(peak, live)
        for source in sources.get(value, ()):
            left[source] -= 1
            if not left[source]:
                live -= 1
        if not left.get(value):
            live -= 1
    return peak


def _schedule(
    sources: Mapping[Hashable, Sequence[Hashable]], roots: Sequence[Hashable]
) -> tuple[list[Hashable], dict[Hashable, int]]:
    """The values in the order in which they are computed, and how often each is used."""
    order: list[Hashable] = []
    uses: dict[Hashable, int] = {}
    done: set[Hashable] = set()
    for root in roots:
        stack = [(root, iter(sources.get(root, ())))]
        if root in done:
            continue
        done.add(root)
        while stack:
            value, rest = stack[-1]
            for source in rest:
                uses[source] = uses.get(source, 0) + 1
                if source not in done:
                    done.add(source)
                    stack.append((source, iter(sources.get(source, ()))))
                    break
            else:
                order.append(value)
                stack.pop()
    return order, uses


def held_between(
    sources: Mapping[Hashable, Sequence[Hashable]],
    roots: Iterable[tuple[int, Sequence[Hashable]]],
    weights: Mapping[Hashable, float | None],
) -> float:
    """Most that is held between two sweeps over the same points.

    Compilers find in a later sweep what an earlier one has loaded or computed at a cost, and keep
    it in registers; what is cheap they compute again.

        sweep 0: a = tanh(x); m = max a      sweep 1: s = sum exp(a - m)      held: a

    Parameters
    ----------
    sources : mapping
        Value -> the values it is computed from; nothing for loads. What is no key is not held.
    roots : iterable of (int, sequence)
        Number of a sweep, and the values that it ends in.
    weights : mapping
        Registers of each value; None for those that are cheap to compute.

    Returns
    -------
    float
        Registers of one point.
    """
    first: dict[Hashable, int] = {}
    last: dict[Hashable, int] = {}
    for sweep, wanted in sorted(roots, key=lambda item: item[0]):
        pending, seen = list(wanted), set()
        while pending:
            value = pending.pop()
            if value not in sources or value in seen:
                continue
            seen.add(value)
            new = value not in first
            first.setdefault(value, sweep)
            last[value] = sweep
            if new or weights[value] is None:
                pending.extend(sources[value])
    kept = [(first[v], last[v], weights[v] or 0.0) for v in first]
    gaps = range(max(last.values(), default=0))
    held = (sum(w for start, end, w in kept if start <= gap < end) for gap in gaps)
    return max(held, default=0.0)
