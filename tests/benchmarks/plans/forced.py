"""Plans by hand: launches that the search would not choose, to cost and to time them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm_fusion.config import HardwareProfile, Policy
from tvm_fusion.ir.graph import FusionGraph, bits
from tvm_fusion.plan.legality import Evaluator
from tvm_fusion.plan.search.solution import Launch, Solution, in_order

UNBOUNDED = 1_000_000


def lenient(policy: Policy) -> Policy:
    """The policy without its limits on the size of groups and on recomputation."""
    return replace(policy, max_group_ops=UNBOUNDED, max_recompute=float(UNBOUNDED))


def evaluator(graph: FusionGraph, hw: HardwareProfile, policy: Policy) -> Evaluator:
    """What says classes and predicted times of launches that a policy would refuse."""
    return Evaluator(graph, hw, lenient(policy))


def forced(graph: FusionGraph, parts: Sequence[Sequence[int]]) -> Solution:
    """The launches that compute the given operators.

    Parameters
    ----------
    graph : FusionGraph
    parts : sequence of sequences of int
        The operators of each launch; together all of the graph. Of an operator in several of them,
        the first writes what is read outside the launches that compute it.
    """
    members = [frozenset(part) for part in parts]
    home = {op: k for k, part in reversed(list(enumerate(members))) for op in part}
    launches = []
    for k, part in enumerate(members):
        stores = [
            t
            for op in sorted(part)
            if home[op] == k
            for t in graph.ops[op].outputs
            if graph.tensors[t].is_output or _read_outside(graph, t, op, members)
        ]
        launches.append(Launch(bits(part), tuple(stores)))
    return in_order(graph, launches)


def _read_outside(
    graph: FusionGraph, tensor: int, op: int, members: Sequence[frozenset[int]]
) -> bool:
    readers = graph.tensors[tensor].consumers
    return any(op not in part and part & frozenset(readers) for part in members)
