"""One tile of a group: what part of each axis it covers, and where its buffers live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tvm import tirx
from tvm.ir import Expr, Var

from ...program.expr import bytes_of, constant, convert, dtype_of, number
from ..loops import Loops
from ..stages.stages import Axis, Stage

# Temporaries up to this size live on the stack.
MOST_STACK_BYTES = 16 << 10


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Part of an axis: `extent` elements from `base` on, at most `full`."""

    base: Expr
    extent: Expr
    full: Expr

    @property
    def is_dynamic(self) -> bool:
        """Whether the last tile may be shorter than the others."""
        return not self.extent.same_as(self.full) and number(self.extent) != number(self.full)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a buffer is kept: the element at `indices` is at ``buffer[index(indices)]``.

    What is kept is rounded to `rounding` when it is read.
    """

    buffer: Var
    index: Callable[[list[Expr]], list[Expr]]
    rounding: str | None = None


@dataclass(slots=True, eq=False)
class Scope:
    """State of emitting one tile; `scales` as `Machine` has it."""

    loops: Loops
    regions: dict[Var, Region]
    scales: bool = False
    places: dict[Var, Place] = field(default_factory=dict)
    allocated: list[tirx.Stmt] = field(default_factory=list)
    tree_sizes: dict[Var, int] = field(default_factory=dict)

    def region(self, axis: Axis) -> Region:
        """The part of an axis of a stage that belongs to the tile."""
        found = self.regions.get(axis.var)
        if found is None:
            extent = convert(axis.extent, self.loops.dtype)
            found = Region(self.loops.imm(0), extent, extent)
        return found

    def allocate(self, name: str, shape: list[Expr | int], dtype: str) -> Var:
        """A buffer of the tile's own."""
        extents = [self.loops.imm(s) if isinstance(s, int) else s for s in shape]
        buffer = new_buffer(name, extents, dtype)
        self.allocated.append(allocate(buffer))
        return buffer

    def keep_local(self, stage: Stage, buffer: Var) -> None:
        """Keep a stage's output for this tile only."""
        regions = [self.region(a) for a in stage.axes]
        local = self.allocate(buffer.name, [r.full for r in regions], dtype_of(buffer))

        def index(indices: list[Expr]) -> list[Expr]:
            return [
                self.loops.simplify(convert(i, self.loops.dtype) - r.base)
                for i, r in zip(indices, regions, strict=True)
            ]

        self.places[buffer] = Place(local, index)

    def place(self, buffer: Var) -> Place:
        """Where `buffer` is kept."""
        found = self.places.get(buffer)
        return found or Place(buffer, lambda indices: indices)

    def store(self, buffer: Var, value: Expr, indices: list[Expr]) -> tirx.Stmt:
        """Store an element of `buffer`."""
        place = self.place(buffer)
        value = convert(value, dtype_of(place.buffer))
        return tirx.BufferStore(place.buffer, value, place.index(indices))


def new_buffer(name: str, shape: list[Expr], dtype: str) -> Var:
    """A temporary buffer.

    Its scope is "global", not "local": TVM's lowering moves only "global" ones to the stack.
    """
    return tirx.decl_buffer(shape, dtype, name, layout=None)  # as TVMScript reads it


def allocate(buffer: Var) -> tirx.Stmt:
    """The allocation of a temporary: on the stack if it is small, else from TVM's pool."""
    size = bytes_of(dtype_of(buffer))
    for extent in buffer.ty.shape:
        value = number(extent)
        if value is None:
            return tirx.AllocBuffer(buffer)
        size *= int(value)
    if size > MOST_STACK_BYTES:
        return tirx.AllocBuffer(buffer)
    keep = constant(1, "int32")
    return tirx.AllocBuffer(buffer, annotations={"disable_lower_builtin": keep})
