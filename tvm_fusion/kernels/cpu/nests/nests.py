"""Loop nests of a tile: stages over the same points are computed together, point by point.

    for j: e = exp(x[j] - m); p[j] = e; s += e        a pointwise stage, and a reduction of it

A value that a later stage of the nest reads at the same point stays in a register.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.ir import Expr, TensorLoad, Var
from tvm.ir.prim.expr import CmpExpr

from ...program.expr import same
from ..contraction.operands import split_product
from ..stages.lanes import best_lane, last_axis, transposed_axes
from ..stages.rewrite import call_name, is_conditional, nodes
from ..stages.stages import Axis, Stage, analyzer_of, load_stride, stage_work

# Work (in additions) of a stage that is written out for each row of a square.
MOST_TURNED_WORK = 12


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A stage of a nest; `axes` are its axes in the order of the nest's axes."""

    stage: Stage
    axes: tuple[Axis, ...]


@dataclass(slots=True, eq=False)
class Nest:
    """Stages over one space; `reduced` are the axes that its reductions reduce, if it has any."""

    members: list[Member]
    dims: tuple[int | None, ...]
    reduced: frozenset[int] | None = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes, as the first stage has them."""
        return self.members[0].axes

    def candidates(self) -> list[tuple[Axis, ...]]:
        """Each axis, as every stage has it."""
        return [tuple(m.axes[i] for m in self.members) for i in range(len(self.axes))]


def make_nests(stages: list[Stage], dims: dict[Var, int]) -> list[Nest]:
    """Nests that compute `stages`, in order; `dims` numbers the variables of shared axes."""
    nests: list[Nest] = []
    where: dict[Var, int] = {}
    for stage in stages:
        first = max((where.get(r.source, 0) for r in stage.reads()), default=0)
        for k in range(first, len(nests)):
            if _merge(nests[k], stage, dims):
                break
        else:
            k = len(nests)
            nests.append(_alone(stage, dims))
        where.update((b, k) for b in stage.buffers)
    return nests


def _alone(stage: Stage, dims: dict[Var, int]) -> Nest:
    axes = stage.domain
    reduced = frozenset(i for i, a in enumerate(axes) if _is_reduced(stage, a))
    names = tuple(dims.get(a.var) for a in axes)
    return Nest([Member(stage, axes)], names, reduced if stage.kind else None)


def _is_reduced(stage: Stage, axis: Axis) -> bool:
    return any(a is axis for a in stage.reduced)


def _merge(nest: Nest, stage: Stage, dims: dict[Var, int]) -> bool:
    """Add `stage` to `nest` if it can be computed at the same points."""
    if len(stage.domain) != len(nest.axes):
        return False
    members = (stage, *(m.stage for m in nest.members))
    if any(split_product(s) is not None for s in members):
        return False
    axes = _matching_axes(nest, stage)
    if axes is None:
        return False
    if not _lanes_agree(nest, stage, axes) or not _turns_agree(nest, stage, axes):
        return False
    for mine, theirs, dim in zip(axes, nest.axes, nest.dims, strict=True):
        if dims.get(mine.var) != dim or not same(mine.extent, theirs.extent):
            return False
    if stage.kind is not None:
        reduced = frozenset(i for i, a in enumerate(axes) if _is_reduced(stage, a))
        if nest.reduced not in (None, reduced):
            return False
        nest.reduced = reduced
    nest.members.append(Member(stage, axes))
    return True


def _lanes_agree(nest: Nest, stage: Stage, axes: tuple[Axis, ...]) -> bool:
    """Whether vectors should run along the same axis in `stage` as in the nest."""
    lane, first = best_lane(stage), best_lane(nest.members[0].stage)
    if lane is None or first is None:
        return True
    return any(a is lane and b is first for a, b in zip(axes, nest.axes, strict=True))


def _turns_agree(nest: Nest, stage: Stage, axes: tuple[Axis, ...]) -> bool:
    """Whether `stage` fits into a nest that turns squares in registers, or neither turns any.

    What is light arithmetic on the squares, and on rows beside them, is computed before they are
    stored.
    """
    turns = [_turn(m.stage, m.axes) for m in nest.members]
    mine = _turn(stage, axes)
    if mine is None and not any(turns):
        return True
    if mine is not None:
        return all(turn == mine for turn in turns)
    return turns[0] is not None and _is_light(stage, axes[turns[0][1]], nest)


def _turn(stage: Stage, axes: tuple[Axis, ...]) -> tuple[int, int] | None:
    """Where among `axes` a transposing copy loads and stores contiguously."""
    found = transposed_axes(stage)
    if found is None:
        return None
    loaded, stored = (next(i for i, a in enumerate(axes) if a is axis) for axis in found)
    return loaded, stored


def _is_light(stage: Stage, lane: Axis, nest: Nest) -> bool:
    """Whether `stage` is plain arithmetic whose accesses are contiguous along `lane`."""
    if stage.kind is not None or last_axis(stage) is not lane:
        return False
    if stage_work(stage) >= MOST_TURNED_WORK or any(
        is_conditional(e) or isinstance(e, CmpExpr) or call_name(e)
        for e in nodes(*stage.expressions())
    ):
        return False
    analyzer = analyzer_of(stage.domain)
    outside = (r for r in stage.reads() if _writer(nest, r.source) is None)
    return all(load_stride(r, lane.var, analyzer) in (0, 1) for r in outside)


def _matching_axes(nest: Nest, stage: Stage) -> tuple[Axis, ...] | None:
    """The axes of `stage` in the nest's order: as it reads the nest's values, else by position."""
    axes: tuple[Axis, ...] | None = None
    for read in stage.reads():
        member = _writer(nest, read.source)
        if member is None:
            continue
        found = _axes_of_read(member, stage, read)
        if found is None or (axes is not None and not _same_axes(axes, found)):
            return None
        axes = found
    return axes or stage.domain


def _writer(nest: Nest, buffer: Var) -> Member | None:
    for m in nest.members:
        if any(b.same_as(buffer) for b in m.stage.buffers):
            return m
    return None


def _axes_of_read(member: Member, stage: Stage, read: TensorLoad) -> tuple[Axis, ...] | None:
    """The axes at which `stage` reads each axis of `member`, if it reads it at its own point."""
    if member.stage.kind is not None:
        return None
    index_of: dict[Var, Expr] = {
        a.var: i for a, i in zip(member.stage.axes, read.indices, strict=True)
    }
    axes = []
    for axis in member.axes:
        index = index_of[axis.var]
        found = next((a for a in stage.domain if a.var.same_as(index)), None)
        if found is None:
            return None
        axes.append(found)
    distinct = {a.var for a in axes}
    return tuple(axes) if len(distinct) == len(stage.domain) else None


def _same_axes(a: tuple[Axis, ...], b: tuple[Axis, ...]) -> bool:
    return all(x is y for x, y in zip(a, b, strict=True))
