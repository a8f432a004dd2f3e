"""Groups of stages that run tile by tile under one parallel loop.

Stages may share an axis when each reads the others' results only at its own position on that axis:
then one tile of all of them is computed before the next, and what they pass on stays in a cache.

    m[i] = max_k x[i, k];  e[i, k] = exp(x[i, k] - m[i]);  s[i] = sum_k e[i, k]      share i
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ..program.expr import convert, dtype_of, same
from .contraction.operands import Product, split_product
from .machine import PRODUCT_WORK, Machine
from .nests.nests import Nest
from .nests.scope import new_buffer
from .stages.lanes import best_lane
from .stages.rewrite import Rewriter, rebuild
from .stages.stages import Axis, Graph, Stage, bytes_of_buffer, points, size_of, stage_work

# Contractions write to a buffer of their tile; what others need is copied from there.


def with_copies(group: Group, kept: set[Var]) -> Group:
    """Let contractions write to a buffer of the tile, and copy from there what others need.

    C = sum(A * B)                  acc = sum(A * B); C = acc
    D = f(C)                ->      D = f(acc)
    """
    stages: list[Stage] = []
    shared: list[list[int]] = [[] for _ in group.shared]
    moved: dict[Var, Var] = {}

    def add(stage: Stage, member: int) -> None:
        stages.append(stage)
        for positions, out in zip(group.shared, shared, strict=True):
            out.append(positions[member])

    for member, stage in enumerate(group.stages):
        stage = _reading(stage, moved)
        buffer = stage.buffer
        if split_product(stage) is None or buffer not in kept:
            add(stage, member)
            continue
        dtype = dtype_of(stage.values[0])
        alias = new_buffer(f"{buffer.name}_tile", list(buffer.ty.shape), dtype)
        moved[buffer] = alias
        add(replace(stage, buffers=(alias,)), member)
        axes = tuple(replace(a, var=Var(a.var.name, a.var.ty)) for a in stage.axes)
        value = tirx.BufferLoad(alias, [a.index for a in axes])
        add(Stage(f"{stage.name}_copy", (buffer,), axes, (), (value,)), member)
    return Group(tuple(stages), tuple(tuple(s) for s in shared))


def is_copy_of(stage: Stage, item: Nest) -> bool:
    """Whether a nest does nothing but copy the result of `stage` to a buffer of the same shape."""
    if len(item.members) != 1:
        return False
    copy = item.members[0].stage
    value = copy.values[0]
    if copy.kind is not None or copy.binds or not isinstance(value, TensorLoad):
        return False
    at = zip(value.indices, copy.axes, strict=True) if value.source.same_as(stage.buffer) else ()
    return value.source.same_as(stage.buffer) and all(same(i, a.index) for i, a in at)


def _reading(stage: Stage, moved: dict[Var, Var]) -> Stage:
    """`stage` with loads of the moved buffers redirected."""
    if not moved:
        return stage
    redirect = _Redirect(moved)
    return replace(
        stage,
        binds=tuple((v, redirect(e)) for v, e in stage.binds),
        values=tuple(redirect(v) for v in stage.values),
    )


class _Redirect(Rewriter):
    def __init__(self, moved: dict[Var, Var]) -> None:
        super().__init__()
        self.moved = moved

    def visit(self, expr: Expr) -> Expr:
        expr = rebuild(expr, self)
        if isinstance(expr, TensorLoad) and expr.source in self.moved:
            load = tirx.BufferLoad(self.moved[expr.source], list(expr.indices))
            return convert(load, dtype_of(expr))
        return expr


# What the stages of a group may keep for one tile; more than this gains nothing over main memory.
MOST_LOCAL_BYTES = 4 << 20

# Tasks a core should get, so that no core waits long for the others.
TASKS_PER_CORE = 4

# Shortest useful piece of an axis that runs along vectors or through a contraction.
LEAST_TILE = 16

# Stages with less than this part of the work of a group do not decide about its tile.
SMALL_PART = 4


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Stages in order, and their shared axes: for each, its position in every stage's `axes`."""

    stages: tuple[Stage, ...]
    shared: tuple[tuple[int, ...], ...]

    def axis(self, dim: int, member: int = 0) -> Axis:
        """Shared axis `dim` as stage number `member` has it."""
        return self.stages[member].axes[self.shared[dim][member]]


def single(stage: Stage) -> Group:
    """A group of one stage: all its output axes."""
    dims = tuple((i,) for i, a in enumerate(stage.axes) if a.size != 1)
    return Group((stage,), dims)


def make_groups(graph: Graph, machine: Machine) -> list[Group]:
    """Group the stages of `graph`; the groups run one after the other."""
    groups: list[Group] = []
    where: dict[Var, int] = {}
    for stage in graph.stages:
        first = max((where.get(r.source, 0) for r in stage.reads()), default=0)
        for k in range(first, len(groups)):
            joined = _join(groups[k], stage, machine)
            if joined is not None:
                groups[k] = joined
                break
        else:
            k = len(groups)
            groups.append(single(stage))
        where.update((b, k) for b in stage.buffers)
    return groups


def _join(group: Group, stage: Stage, machine: Machine) -> Group | None:
    """The group with `stage` at its end, or None where that is wrong or slow."""
    written = {b: (m, s) for m, s in enumerate(group.stages) for b in s.buffers}
    reads = [r for r in stage.reads() if r.source in written]
    if reads:
        shared = _shared_by_reads(group, stage, reads, written)
    else:
        shared = _shared_by_siblings(group, stage)
    if not shared or (reads and len(shared) < len(group.shared) and _sweeps_rows(group)):
        return None
    joined = Group((*group.stages, stage), tuple(shared))
    if not reads and len(shared) < len(group.shared) and _has_contraction(joined):
        return None
    if _tasks(joined) < max(_needed(group, machine), _needed(single(stage), machine)):
        return None
    return joined if local_bytes(joined) <= MOST_LOCAL_BYTES else None


def _shared_by_reads(
    group: Group, stage: Stage, reads: list[TensorLoad], written: dict[Var, tuple[int, Stage]]
) -> list[tuple[int, ...]]:
    """The shared axes that `stage` keeps: it reads the group's results at one of its own axes."""
    shared = []
    for positions in group.shared:
        found: set[int | None] = set()
        for read in reads:
            member, _ = written[read.source]
            index = read.indices[positions[member]]
            found.add(_position(stage, index))
        position = found.pop() if len(found) == 1 else None
        if position is None or any(position == p[-1] for p in shared):
            continue
        if same(stage.axes[position].extent, group.stages[0].axes[positions[0]].extent):
            shared.append((*positions, position))
    return shared


def _shared_by_siblings(group: Group, stage: Stage) -> list[tuple[int, ...]]:
    """The axes on which `stage` and a stage of the group read the same inputs alike."""
    for member in range(len(group.stages) - 1, -1, -1):
        links = _links(group.stages[member], stage)
        shared = []
        for positions in group.shared:
            position = links.get(positions[member])
            if position is not None and all(position != p[-1] for p in shared):
                shared.append((*positions, position))
        if shared:
            return shared
    return []


def _links(a: Stage, b: Stage) -> dict[int, int]:
    """Axes of `a` and of `b` that index the same dimension of the same buffer, by position."""
    links: dict[int, int] = {}
    for x in a.reads():
        for y in b.reads():
            if not x.source.same_as(y.source):
                continue
            for i, j in zip(x.indices, y.indices, strict=True):
                p, q = _position(a, i), _position(b, j)
                if p is not None and q is not None and same(a.axes[p].extent, b.axes[q].extent):
                    links.setdefault(p, q)
    return links


def _position(stage: Stage, index: object) -> int | None:
    """Position of the output axis that `index` is, if it is one."""
    if not isinstance(index, Var):
        return None
    return next((i for i, a in enumerate(stage.axes) if a.var.same_as(index)), None)


def _has_contraction(group: Group) -> bool:
    return any(split_product(s) is not None for s in group.stages)


def _sweeps_rows(group: Group) -> bool:
    """Whether a group sums up along rows: its vectors, and what memory fetches ahead, run along its
    results. What reads few of these does not decide how they are made.
    """
    stage = group.stages[-1]
    if len(group.stages) > 1 or stage.kind is None or split_product(stage) is not None:
        return False
    lane = best_lane(stage)
    return any(a is lane for a in stage.axes)


def _needed(group: Group, machine: Machine) -> int:
    """Tasks that the work of a group asks for."""
    if group_work(group) < machine.small_work:
        return 1
    return min(_tasks(group), TASKS_PER_CORE * machine.cores)


def group_work(group: Group, product: int = 1) -> int:
    """Cost of a group in additions; a multiply-add of a contraction counts as `product`."""
    return sum(_work(stage, product) for stage in group.stages)


@lru_cache(maxsize=1024)  # asked for all stages of a group whenever it grows; a stage never changes
def _work(stage: Stage, product: int) -> int:
    return points(stage.domain) * (product if split_product(stage) else stage_work(stage))


def is_small(group: Group, machine: Machine) -> bool:
    """Whether one core is done with a group before the others would have helped."""
    return group_work(group, PRODUCT_WORK) < machine.small_work


def _tasks(group: Group) -> int:
    """How many tiles a group can be cut into at most."""
    return prod(
        -(-size_of(group.axis(d)) // _least_tile(group, d)) for d in range(len(group.shared))
    )


def _least_tile(group: Group, dim: int) -> int:
    """Shortest piece of a shared axis: what is computed once a row runs along rows as well, and is
    too little to make them come in vectors.
    """
    whole = group_work(group)
    for member, stage in enumerate(group.stages):
        position = group.shared[dim][member]
        product = split_product(stage)
        if product is not None and not _is_batch(product, stage.axes[position]):
            return LEAST_TILE
        is_lane = product is None and stage.axes[position] is best_lane(stage)
        if is_lane and _work(stage, 1) * SMALL_PART >= whole:
            return LEAST_TILE
    return 1


def _is_batch(product: Product, axis: Axis) -> bool:
    return any(a is axis for a in product.batch)


def local_bytes(group: Group) -> int:
    """Bytes that a group keeps for its smallest tile."""
    total = 0
    least = [_least_tile(group, dim) for dim in range(len(group.shared))]
    for member, stage in enumerate(group.stages):
        shape = [a.extent for i, a in enumerate(stage.axes)]
        full = sum(bytes_of_buffer(shape, dtype_of(b)) for b in stage.buffers)
        for dim, positions in enumerate(group.shared):
            full = full * min(least[dim], size_of(stage.axes[positions[member]]))
            full = -(-full // size_of(stage.axes[positions[member]]))
        total += full
    return total
