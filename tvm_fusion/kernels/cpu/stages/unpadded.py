"""Padding that nobody reads: sizes that are rounded up pad where no window reaches, too.

p[i] = if_then_else(i < 111, x[i], -inf)     i < 112
y[j] = max_{r < 3} p[2 j + r]                j < 55      ->     y[j] = max_{r < 3} x[2 j + r]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm.ir import TensorLoad, Var

from ...program.expr import bounds, constant, dtype_of
from .rewrite import is_conditional, nodes
from .stages import Axis, Graph, Stage, analyzer_of, simplified

Reads = Sequence[tuple[TensorLoad, Stage]]
"""Loads of a buffer, and the stages that they are in."""


def without_unread_padding(graph: Graph) -> Graph:
    """The graph with pointwise stages computed only where they are read, if they need fewer
    conditions there.
    """
    reads: dict[Var, list[tuple[TensorLoad, Stage]]] = {}
    for stage in graph.stages:
        for load in stage.reads():
            reads.setdefault(load.source, []).append((load, stage))
    return Graph(graph.params, tuple(_where_read(s, reads.get(s.buffer, ())) for s in graph.stages))


def _where_read(stage: Stage, reads: Reads) -> Stage:
    """A stage without the elements that nobody reads, where that saves conditions."""
    if stage.kind is not None or not reads or not _conditions(stage):
        return stage
    axes = tuple(_read_part(axis, dim, reads) for dim, axis in enumerate(stage.axes))
    if all(new is old for new, old in zip(axes, stage.axes, strict=True)):
        return stage
    part = simplified(replace(stage, axes=axes))
    return part if _conditions(part) < _conditions(stage) else stage


def _read_part(axis: Axis, dim: int, reads: Reads) -> Axis:
    """The axis up to the last of its elements that is read, if that is known."""
    if axis.size is None or axis.size == 1:
        return axis
    indices = ((load.indices[dim], analyzer_of(reader.domain)) for load, reader in reads)
    last = max(bounds(index, analyzer)[1] for index, analyzer in indices)
    if not 1 <= last < axis.size - 1:  # axes of one element do not occur in expressions
        return axis
    return Axis(axis.var, constant(last + 1, dtype_of(axis.extent)))


def _conditions(stage: Stage) -> int:
    return sum(is_conditional(e) for e in nodes(*stage.expressions()))
