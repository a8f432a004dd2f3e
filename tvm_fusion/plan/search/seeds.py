"""Groups that the search starts from: those a kernel class knows to be worth a launch as a whole,
though none of the groups on the way to them is.

`Family.cores` gives such sets of operators.
"""

from __future__ import annotations

from ...ir.graph import OpKind
from ..legality import Evaluator
from ..refusal import Refusal
from .search_state import State


def seeded(evaluator: Evaluator) -> State | None:
    """The state with the cores of all kernel classes as groups, or None if there are none."""
    state, found = State.unfused(evaluator), False
    for kernel in evaluator.classes:
        for core in kernel.cores(evaluator.graph):
            found |= _joined(state, core)
    return state if found else None


def _joined(state: State, core: tuple[int, ...]) -> bool:
    """Makes one group of the operators, if they are one each and a kernel class takes them."""
    ops, is_view = state.graph.ops, state.links.view
    views = frozenset(op for op in core if is_view[op])
    members = [op for op in core if op not in views]
    alone = all(state.owned.get(op) == {op} and op not in state.copied_in for op in core)
    if not alone or any(ops[op].kind is OpKind.OPAQUE for op in core):
        return False
    if isinstance(state.evaluate(frozenset(members), views, tuple(members)), Refusal):
        return False
    # In the order of the operators no group ever stands between the two that are joined: what does
    # lies on a path from the first to the last, and is in the core.
    first, *others = members
    for op in others:
        above = frozenset(view for view in views if view < op)
        state.merge(first, op, above)
    return not isinstance(state.cost(first), Refusal)
