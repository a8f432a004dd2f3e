"""Who feeds whom in a graph, worked out once."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.graph import FusionGraph, OpKind


@dataclass(frozen=True, slots=True)
class Links:
    """Facts about each operator, by its number.

    Attributes
    ----------
    producers, consumers : operators it reads from, and that read from it, ascending
    pinned : whether it has to be computed whoever reads it: results, and what cannot be read
    view : whether it only renames indices
    fusible : whether a kernel class may compute it with others
    """

    producers: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[int, ...], ...]
    pinned: tuple[bool, ...]
    view: tuple[bool, ...]
    fusible: tuple[bool, ...]

    @staticmethod
    def of(graph: FusionGraph) -> Links:
        tensors = graph.tensors
        return Links(
            tuple(graph.producers(op.id) for op in graph.ops),
            tuple(graph.consumers(op.id) for op in graph.ops),
            tuple(
                op.kind is OpKind.OPAQUE or any(tensors[t].is_output for t in op.outputs)
                for op in graph.ops
            ),
            tuple(op.kind is OpKind.VIEW for op in graph.ops),
            tuple(op.kind is OpKind.CALL_TIR for op in graph.ops),
        )
