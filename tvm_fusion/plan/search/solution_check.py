"""Whether launches are a solution: what `launches` says of one, checked."""

from __future__ import annotations

from ...errors import PlanError
from ...ir.graph import FusionGraph, OpKind
from ..legality import Evaluator
from .launch import (
    Launch,
    Solution,
    costed,
    is_opaque,
    members_of,
    produced_reads,
    time_us,
    wanted_tensors,
)


def check_solution(
    graph: FusionGraph, launches: Solution, evaluator: Evaluator | None = None
) -> None:
    """Raises PlanError unless the launches are a solution in order (see `launches`) and,
    where an evaluator is given, some kernel class takes each of them.
    """
    done: set[int] = set()
    wanted = wanted_tensors(graph, launches)
    for launch in launches:
        _check_launch(graph, launch, done, wanted)
        done.update(launch.stores)
        if evaluator is not None and time_us(evaluator, launch) is None:
            refusal = costed(evaluator, launch)
            raise PlanError(f"{_names(graph, launch)} is refused: {refusal.why}")
    if missing := sorted(wanted - done):
        raise PlanError(f"{graph.tensors[missing[0]].name} is written by no launch")
    opaque = {op.id for op in graph.ops if op.kind is OpKind.OPAQUE}
    computed = {op for launch in launches for op in members_of(launch.members)}
    if missing := sorted(opaque - computed):
        raise PlanError(f"{graph.ops[missing[0]].name} is in no launch")
    _check_owners(graph, launches)


def _check_launch(graph: FusionGraph, launch: Launch, done: set[int], wanted: set[int]) -> None:
    where = _names(graph, launch)
    ops = [graph.ops[i] for i in members_of(launch.members)]
    if len(ops) > 1:
        if any(op.kind is OpKind.OPAQUE for op in ops):
            raise PlanError(f"{where} holds an operator that cannot be read")
        if len({op.region for op in ops}) > 1:
            raise PlanError(f"{where} spans several dataflow blocks")
    for t in produced_reads(graph, launch):
        if t not in done:
            raise PlanError(f"{where} reads {graph.tensors[t].name} before it is written")
    if not launch.stores and not is_opaque(graph, launch):
        raise PlanError(f"{where} writes nothing")
    for t in launch.stores:
        producer, name = graph.tensors[t].producer, graph.tensors[t].name
        if producer is None or not launch.members >> producer & 1:
            raise PlanError(f"{where} writes {name}, which it does not compute")
        if t in done:
            raise PlanError(f"{name} is written twice")
        if t not in wanted:
            raise PlanError(f"{where} writes {name}, which nobody reads")
        if len(ops) > 1 and graph.ops[producer].kind is OpKind.VIEW:
            raise PlanError(f"{where} writes {name}, which is a view")


def _check_owners(graph: FusionGraph, launches: Solution) -> None:
    home: dict[int, int] = {}
    for place, launch in enumerate(launches):
        for t in launch.stores:
            producer = graph.tensors[t].producer
            if home.setdefault(producer, place) != place:
                raise PlanError(f"the results of {graph.ops[producer].name} have two writers")


def _names(graph: FusionGraph, launch: Launch) -> str:
    return "{" + ", ".join(graph.ops[i].name for i in members_of(launch.members)) + "}"
