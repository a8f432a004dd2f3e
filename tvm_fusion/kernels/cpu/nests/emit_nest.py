"""Loops of one nest: chooses the axis that vectors run along, and who emits it."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Var

from ..machine import Machine
from ..stages.lanes import lane_axis, turned_axes
from ..stages.stages import Kind
from .emit_pointwise import PointwiseEmitter
from .emit_reduction import ReductionEmitter
from .emit_transpose import TransposeEmitter
from .nests import Nest
from .point import PointWriter
from .scope import Scope
from .space import Slot, Space


def emit_nest(item: Nest, stored: set[Var], scope: Scope, machine: Machine) -> tirx.Stmt:
    """The loops of `item`; `stored` holds the buffers that others read."""
    space = Space(item, scope)
    writer = PointWriter(item, stored, scope)
    if turned_axes(item.members[0].stage) is not None:
        return TransposeEmitter(item, space, writer, scope, machine).emit(_lane(item, space))
    kind = PointwiseEmitter if item.reduced is None else ReductionEmitter
    return kind(item, space, writer, scope, machine).emit(_lane(item, space))


def _lane(item: Nest, space: Space) -> Slot | None:
    """The slot that most accesses are contiguous along.

    States of a recurrence that cannot be merged are kept in the order of their terms.
    """
    stages = tuple(m.stage for m in item.members)
    candidates = space.lanes
    if any(s.kind is Kind.UPDATE and not s.elements for s in stages):
        candidates = [(slot, axes) for slot, axes in candidates if not slot.is_reduced]
    best = lane_axis(stages, [axes for _, axes in candidates])
    return None if best is None else candidates[best][0]
