"""Bytes by footprint and evaluation counts of a group: how much of each tensor is touched, how
often each block runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...config import Policy
from ...ir.access import Access, Affine, Block, Irregular, Pipe, derived
from ...ir.extents import assumed, assumed_product
from ...plan.group_view import GroupView, dtype_bytes
from ...plan.refusal import Refusal, RefusalCode

# What walks over the blocks of a group ask of each block, worked out once for a block: a search
# walks over the same blocks in thousands of groups.

MORE = {"erf": 12.0, "tanh": 4.0, "sigmoid": 4.0, "pow": 3.0}
"""Instructions of a special function beside the first; of others two."""


def instructions_of(functions: Iterable[tuple[str, float]]) -> float:
    """Instructions of special functions, by name and number, beside the first of each."""
    return sum(MORE.get(name, 2.0) * number for name, number in functions)


class Read(NamedTuple):
    """A read of a block: `own` where the block writes, at each point, the element that it reads;
    `lanes` are the points along the last axis that share an evaluation of what is read, `touched`
    the bytes that all points touch.
    """

    tensor: int
    own: bool
    guarded: bool
    lanes: int
    touched: float


class Facts(NamedTuple):
    """See the module docstring.

    Attributes
    ----------
    points : iterations of the whole domain
    tensor, tensors : the one that the block writes, None where it writes several; all of them
    reduces, works : it is a reduction; it counts operations
    reads : of each access
    sources : tensors that it reads, each once
    slices : it leaves a part of what it reads untouched
    divides : places of what it reads are found by division
    instructions : that compute one point
    counts : operations of a point by the name of the pipe; nothing for contractions
    functions, conversions : as in `Block`; nothing for contractions
    lanes : what the block is to neighbouring lanes (`streams`), by how they walk its result
    """

    points: float
    tensor: int | None
    tensors: tuple[int, ...]
    reduces: bool
    works: bool
    reads: tuple[Read, ...]
    sources: tuple[int, ...]
    slices: bool
    divides: bool
    instructions: float
    counts: tuple[tuple[str, float], ...]
    functions: tuple[tuple[str, float], ...]
    conversions: float
    lanes: dict[Hashable, Any]


@dataclass(frozen=True, slots=True)
class Index:
    """The blocks of a group.

    Attributes
    ----------
    facts : of each block
    made : points of the block that writes each tensor
    touched : bytes of each input that its reads touch, with the `id` of the reading block
    slices, divides : whether any block does
    footprints : `footprint_bytes`, as far as it was asked for
    """

    facts: tuple[Facts, ...]
    made: dict[int, float]
    touched: dict[int, list[tuple[float, int]]]
    slices: bool
    divides: bool
    footprints: dict[int, float] = field(default_factory=dict)


def index_of(group: GroupView) -> Index:
    """The index of a group, found once."""
    return group.memo.get("index") or group.once("index", lambda: _find_index(group))


def _find_index(group: GroupView) -> Index:
    blocks = group.blocks
    facts = tuple([_facts(b, group) for b in blocks])
    made: dict[int, float] = {}
    slices = divides = False
    for own in facts:
        slices |= own.slices
        divides |= own.divides
        for t in own.tensors:
            made[t] = own.points
    touched: dict[int, list[tuple[float, int]]] = {}
    for block, own in zip(blocks, facts, strict=True):
        for t, _, _, _, size in own.reads:
            if t not in made:
                touched.setdefault(t, []).append((size, id(block)))
    return Index(facts, made, touched, slices, divides)


@derived
def _facts(block: Block, group: GroupView) -> Facts:
    written = tuple(w.tensor for w in block.writes)
    reads = tuple(_read(group, block, access) for access in block.reads)
    shapes = (group.graph.tensors[a.tensor].shape for a in block.reads)
    slices = any(
        touched_elements(block, a, shape) < assumed_product(shape)
        for a, shape in zip(block.reads, shapes, strict=True)
    )
    indices = [index for access in block.reads for index in access.index]
    instructions = block.operations() + block.conversions
    instructions += instructions_of(block.functions)
    counted = not block.is_contraction
    return Facts(
        points=float(points(block)),
        tensor=written[0] if len(written) == 1 else None,
        tensors=written,
        reduces=block.reduction is not None,
        works=bool(block.counts),
        reads=reads,
        sources=tuple(dict.fromkeys(read.tensor for read in reads)),
        slices=slices,
        divides=any(isinstance(i, Irregular) and not i.data_dependent for i in indices),
        instructions=instructions,
        counts=tuple((pipe.value, n) for pipe, n in block.counts) if counted else (),
        functions=block.functions if counted else (),
        conversions=block.conversions if counted else 0.0,
        lanes={},
    )


def _read(group: GroupView, block: Block, access: Access) -> Read:
    tensor = group.graph.tensors[access.tensor]
    last = max(block.spatial, default=None)
    stays = last is not None and last not in access.axes
    return Read(
        access.tensor,
        is_identity(block, access),
        access.guarded,
        assumed(block.axes[last].extent) if stays else 1,
        touched_elements(block, access, tensor.shape) * dtype_bytes(tensor.dtype),
    )


@derived
def points(block: Block) -> int:
    """Iterations of a block's whole domain."""
    return assumed_product(a.extent for a in block.axes)


def is_identity(block: Block, access: Access) -> bool:
    """The access reads, at each point, the element that the point writes: same axes, same order."""
    return access.index == block.writes[0].index


def touched_elements(block: Block, access: Access, shape) -> float:
    """Elements of a tensor of `shape` that the access touches in the block's whole domain."""
    return _touched_elements(access, block, shape)


@derived
def _touched_elements(access: Access, block: Block, shape: Sequence[Any]) -> float:
    elements = 1.0
    for index, extent in zip(access.index, shape, strict=False):
        size = assumed(extent)
        if isinstance(index, Affine):
            steps = [
                abs(c) * (assumed(block.axes[i].extent) - 1)
                for i, c in enumerate(index.coefficients)
            ]
            count = assumed_product(assumed(block.axes[i].extent) for i in index.axes)
            elements *= min(size, sum(steps) + 1, count)
        else:
            count = assumed_product(assumed(block.axes[i].extent) for i in index.axes)
            elements *= min(size, count)
    return min(elements, points(block)) if access.axes else elements


# Elements for which one thread evaluates an operand that does not vary along the contiguous axis:
# the 16-byte vector of a
# half-precision kernel.
VECTOR_ELEMENTS = 8
UNKNOWN_SLOTS = 4.0
"""Slots of a special function that the profile does not name: a few hardware instructions."""


def footprint_bytes(group: GroupView, tensor: int) -> float:
    """Bytes of an input that the group's reads touch at least once, at most the whole tensor."""
    index = index_of(group)
    found = index.footprints.get(tensor)
    if found is None:
        found = index.footprints[tensor] = _footprint(group, index, tensor)
    return found


def _footprint(group: GroupView, index: Index, tensor: int) -> float:
    whole = group.tensor_bytes(tensor)
    touched = 0.0
    shares = reached(group)
    reads = index.touched.get(tensor, ())
    if tensor in index.made:
        pairs = zip(group.blocks, index.facts, strict=True)
        reads = [(r.touched, id(b)) for b, own in pairs for r in own.reads if r.tensor == tensor]
    for size, block in reads:
        touched += size * shares.get(block, 1.0) if shares else size
        if touched >= whole:
            return float(whole)
    return touched


def reached(group: GroupView) -> dict[int, float]:
    """Share of the domain of blocks, by `id`, that anything needs, where it is not all of it: what
    only a slice is taken of is not computed elsewhere.
    """
    return group.once("reached", lambda: _reached(group)) if index_of(group).slices else {}


def _reached(group: GroupView) -> dict[int, float]:
    shares: dict[int, float] = {}
    outputs = frozenset(group.outputs)
    for block in reversed(group.blocks):
        if block.reduction is not None or any(w.tensor in outputs for w in block.writes):
            continue
        needed = 0.0
        for write in block.writes:
            shape = group.graph.tensors[write.tensor].shape
            whole = assumed_product(shape)
            for reader, access in group.readers_of.get(write.tensor, ()):
                part = touched_elements(reader, access, shape) / whole if whole else 1.0
                needed += part * shares.get(id(reader), 1.0)
                if needed >= 1.0:
                    break
        if 0.0 < needed < 1.0:
            shares[id(block)] = needed
    return shares


class Evaluations(NamedTuple):
    """Points at which each block of a group runs, and the largest ratio to its own domain."""

    counts: tuple[float, ...]
    worst: float
    worst_block: Block | None


def evaluations(
    group: GroupView, once: frozenset[int] = frozenset(), hoist: int = VECTOR_ELEMENTS
) -> Evaluations:
    """How often each block is evaluated when every pointwise producer is computed where it is used.

    Parameters
    ----------
    group : GroupView
    once : frozenset of int
        Tensors that the kernel computes exactly once whatever reads them (reductions,
        accumulators).
    hoist : int
        How many points along the contiguous axis share one evaluation of an operand that does not
        vary along it.

    Notes
    -----
    A producer read at the consumer's own index is computed once for all such consumers. Any other
    read multiplies: one through a broadcast runs once per consumer point (divided by `hoist` if it
    does not vary along the last axis), a guarded one at most once per element for each time that
    its consumer runs.
    """
    index = index_of(group)
    facts, made = index.facts, index.made
    counts = [0.0] * len(facts)
    worst, worst_block = 1.0, None
    kept = once.union(group.outputs)
    shared: dict[int, float] = {}  # of a tensor, by all readers at their own points
    extra: dict[int, float] = {}  # by others, each by itself
    shares = reached(group)
    for k in range(len(facts) - 1, -1, -1):
        own, tensor, tensors, reduces, works, reads = facts[k][:6]
        if shares:
            own *= shares.get(id(group.blocks[k]), 1.0)
        if tensor is not None:
            together, more = shared.get(tensor, 0.0), extra.get(tensor, 0.0)
            stays = reduces or tensor in kept
        else:
            together = max((shared.get(t, 0.0) for t in tensors), default=0.0)
            more = sum(extra.get(t, 0.0) for t in tensors)
            stays = reduces or not kept.isdisjoint(tensors)
        if stays and own > together:
            together = own
        count = together + more
        if not count:
            continue
        if count < own:
            count = own
        counts[k] = count
        if count > own > 0.0 and works and count / own > worst:
            worst, worst_block = count / own, group.blocks[k]
        for t, at_own, guarded, lanes, _ in reads:
            if t in once or t not in made:
                continue
            used, own_source = count, made[t]
            if guarded:
                used = min(used, own_source * max(1.0, used / own))
            if at_own or own_source == used:
                if used > shared.get(t, 0.0):
                    shared[t] = used
            else:
                extra[t] = extra.get(t, 0.0) + used / min(hoist, lanes)
    return Evaluations(tuple(counts), worst, worst_block)


def operations(
    group: GroupView, counts: tuple[float, ...], slots: Mapping[str, float]
) -> dict[str, float]:
    """Operations by pipe over the whole group; those of contractions are not among them (they are
    `tensor_flops`). Those of the special-function unit are counted in its slots.
    """
    total = dict.fromkeys(_PIPES, 0.0)
    for own, count in zip(index_of(group).facts, counts, strict=True):
        if not count:
            continue
        for pipe, number in own.counts:
            total[pipe] += number * count
        for name, number in own.functions:
            total["special"] += (slots.get(name, UNKNOWN_SLOTS) - 1) * number * count
        if own.conversions:
            total["conversion"] += own.conversions * count
    return total


_PIPES = (*(pipe.value for pipe in Pipe), "conversion")


def costly(block: Block) -> bool:
    """Whether recomputing the block costs more than arithmetic: special functions, divisions,
    integer division.
    """
    return any(pipe is not Pipe.ARITHMETIC for pipe, _ in block.counts)


def refuse_recompute(group: GroupView, runs: Evaluations, policy: Policy) -> Refusal | None:
    """The refusal for a costly block that would run more often than the policy allows."""
    if (
        runs.worst_block is None
        or runs.worst <= policy.max_recompute
        or not costly(runs.worst_block)
    ):
        return None
    return group.refuse(
        RefusalCode.RECOMPUTE,
        f"{runs.worst_block.name} would be computed {runs.worst:.0f} times an element",
        factor=runs.worst,
        allowed=policy.max_recompute,
    )
