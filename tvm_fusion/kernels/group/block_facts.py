"""What walks over the blocks of a group ask of each block, worked out once for a block: a search
walks over the same blocks in thousands of groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...ir.access import Access, Affine, Block, Irregular, derived
from ...ir.extents import assumed, assumed_product
from ...plan.group_view import GroupView, dtype_bytes

MORE = {"erf": 12.0, "tanh": 4.0, "sigmoid": 4.0, "pow": 3.0}
"""Instructions of a special function beside the first; of others two."""


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
    instructions += sum(MORE.get(name, 2.0) * number for name, number in block.functions)
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
