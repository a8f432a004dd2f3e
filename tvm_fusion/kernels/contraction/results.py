"""Sums and outputs of a contraction while it is read, each in coordinates of its own.

y[b, s, c] = T[b, c // 64, s, c % 64]      the output y reads the sum T at functions of (b, s, c)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tvm import tirx
from tvm.ir import Expr, Var

from ...errors import Unsupported
from ..program.definitions import Definition
from ..program.expr import constant, number, same, substitute, widened
from ..program.program import Extent
from .inline import Inliner
from .model import INDEX, Axis, Simplifier, equal_sizes, fresh_var, size_of
from .pairs import Pair, Position, Read, find_pairs
from .partials import run_point


@dataclass(slots=True, eq=False)
class Sum:
    """A product under way: its definition, and where in the space of its segment it lives."""

    definition: Definition
    number: int
    position: Position | None = None

    @property
    def name(self) -> str:
        return self.definition.buffer.name


@dataclass(slots=True, eq=False)
class Result:
    """An output under way: `axes` are its own coordinates, `reads` says where it reads each sum.

    A partial has one coordinate more, `run` (the term of its reduction), which is at `place` of the
    segment. Of a sum that it reads at `pairs` of points, `reads` has one of each.
    """

    definition: Definition
    param: int
    axes: list[Axis]
    indices: Position
    run: Axis | None = None
    reads: dict[Var, Position] = field(default_factory=dict)
    position: Position | None = None
    place: Expr | None = None
    pairs: dict[Var, Pair] = field(default_factory=dict)

    def value(self, inliner: Inliner, indices: Position, run: Expr | None) -> Expr:
        """The element at `indices`; of a partial, the term of its reduction at `run`."""
        if self.run is None:
            return inliner.load(self.definition.buffer, indices)
        return inliner.resolve(self.definition.value, run_point(self.definition, indices, run))


def read_result(
    definition: Definition,
    param: int,
    definitions: dict[Var, Definition],
    exact: bool,
    run: Axis | None,
) -> Result:
    """Which sums an output reads, at which functions of its own indices."""
    axes, indices = coordinates(definition.shape, "o")
    if run is not None:
        axes.append(run)
    result = Result(definition, param, axes, indices, run)

    reads: dict[Var, list[Read]] = {}

    def note(read: Definition, at: Position) -> Expr:
        result.reads.setdefault(read.buffer, at)
        reads.setdefault(read.buffer, []).append((at, tuple(inliner.conditions)))
        return fresh_var(read.buffer.name, widened(read.dtype))

    inliner = Inliner(definitions, exact, Simplifier(axes), note)
    result.value(inliner, indices, run and run.var)
    several = {buffer: found for buffer, found in reads.items() if not _at_one_point(found)}
    if several:
        name = next(iter(several)).name
        result.pairs = (run is None and find_pairs(axes, several)) or {}
        if not result.pairs:
            raise Unsupported(f"{name} is read at several points of an output")
        result.reads.update({buffer: pair.base for buffer, pair in result.pairs.items()})
    if not result.reads:
        raise Unsupported(f"{definition.buffer.name} does not depend on a product")
    return result


def _at_one_point(reads: Sequence[Read]) -> bool:
    first = reads[0][0]
    return all(same(a, b) for at, _ in reads for a, b in zip(first, at, strict=True))


def coordinates(shape: Iterable[Extent], prefix: str) -> tuple[list[Axis], Position]:
    """One axis for each extent but 1, and the indices they make."""
    axes: list[Axis] = []
    indices: list[Expr] = []
    for extent in shape:
        if extent == 1:
            indices.append(constant(0, INDEX))
            continue
        axes.append(Axis(fresh_var(f"{prefix}{len(axes)}", INDEX), extent))
        indices.append(axes[-1].var)
    return axes, tuple(indices)


def inverted(result: Result, base: Sum, axes: Sequence[Axis]) -> dict[Var, Expr]:
    """The result's own coordinates as functions of the segment's axes."""
    why = f"{result.definition.buffer.name} is no rearrangement of {base.name}"
    reads = result.reads[base.definition.buffer]
    if not equal_sizes(size_of(result.axes), size_of(axes)):
        raise Unsupported(why)
    moved = [
        (read, at) for read, at in zip(reads, base.position, strict=True) if number(at) is None
    ]
    own = [axis.var for axis in result.axes]
    plain = {read: at for read, at in moved if isinstance(read, Var)}
    if len(plain) == len(moved) == len(own):
        return plain
    extents = [
        constant(a.extent, INDEX) if isinstance(a.extent, int) else a.extent for a in result.axes
    ]
    try:
        inverse = tirx.IndexMap(own, [read for read, _ in moved], None).inverse(extents)
    except RuntimeError as error:
        raise Unsupported(why) from error
    names = {var: at for var, (_, at) in zip(inverse.initial_indices, moved, strict=True)}
    return {
        var: substitute(index, names) for var, index in zip(own, inverse.final_indices, strict=True)
    }
