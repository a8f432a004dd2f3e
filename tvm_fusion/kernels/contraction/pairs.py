"""Pairs of columns of a product that an output is made of: a rotary embedding and its like.

    y[m, n] = T[m, n] * c[m, n] + T[m, n +- 64] * s[m, n]      runs of 128, halves swapped
    y[m, n] = T[m, n] * c[m, n] + T[m, n ^ 1] * s[m, n]        runs of 2

Within one part of a run (the first columns of all pairs, the second ones, the rest) every condition
on the column is known, and a read of the product is the own column or its partner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, Var

from ..program.expr import constant, number, same, substitute, uses_any
from .model import INDEX, Axis, Simplifier, fresh_var

Position = tuple[Expr, ...]
Read = tuple[Position, tuple[Expr, ...]]
"""Where a product is read, and the conditions that hold there."""

MAX_WIDTH = 1024
"""Columns of a run; those of a head are fewer."""


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Where an output reads a product: `base` one to one, and `distance` further or before along
    dimension `index`; in runs of `width` along it.
    """

    base: Position
    index: int
    width: int
    distance: int


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The points of one part of all runs: the run's axis as a function of others."""

    env: Mapping[Var, Expr]
    simplify: Simplifier

    def at(self, expr: Expr) -> Expr:
        """An expression at these points."""
        return self.simplify(substitute(expr, self.env))

    def place(self, position: Sequence[Expr]) -> Position:
        """Indices at these points."""
        return tuple(map(self.at, position))


@dataclass(frozen=True, eq=False)
class Runs:
    """Aligned runs of `width` points of `axis`, one of `axes`; see `model.Partners`."""

    axis: Axis
    axes: tuple[Axis, ...]
    width: int
    distance: int

    @cached_property
    def part(self) -> Var:
        """The number of the part that a point lies in."""
        return fresh_var("part", "int32")

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Where parts start, and where the last one ends."""
        return tuple(sorted({0, self.distance, 2 * self.distance, self.width}))

    @cached_property
    def _names(self) -> tuple[Expr, Expr, Expr]:
        """The run, the place within both parts of a pair, and within the rest."""
        extents = self.axis.extent // self.width, self.distance, self.width - 2 * self.distance
        names = ("run", "pair", "rest")
        return tuple(
            fresh_var(name, INDEX) if n > 1 else constant(0, INDEX)
            for name, n in zip(names, extents, strict=True)
        )

    @cached_property
    def parts(self) -> tuple[_Part, ...]:
        """The parts, in order."""
        found = []
        run, pair, rest = self._names
        for start, end in zip(self.ends, self.ends[1:], strict=False):
            place = pair if start < 2 * self.distance else rest
            known = [a for a in self.axes if not a.var.same_as(self.axis.var)]
            extents = self.axis.extent // self.width, end - start
            own = zip((run, place), extents, strict=True)
            known += [Axis(var, extent) for var, extent in own if isinstance(var, Var)]
            value = run * constant(self.width, INDEX) + place + constant(start, INDEX)
            found.append(_Part({self.axis.var: value}, Simplifier(known)))
        return tuple(found)

    @cached_property
    def _simplify(self) -> Simplifier:
        return Simplifier(self.axes)

    # ---- conditions

    def holds(self, conditions: Sequence[Expr]) -> list[bool | None]:
        """Whether conditions hold in each part; None where that is not known."""
        return [_all(number(part.at(c)) for c in conditions) for part in self.parts]

    def choose(
        self, condition: Expr, outer: Sequence[Expr], branches: Sequence[Expr]
    ) -> Expr | None:
        """One of two values by the part of a point; None where that does not decide."""
        live = self.holds(outer)
        holds = self.holds([condition])
        meant = [i for i, is_live in enumerate(live) if is_live]
        if None in live or any(holds[i] is None for i in meant):
            return None
        first = [i for i in meant if holds[i]]
        if not first or len(first) == len(meant):
            return branches[0 if first else 1]
        return self.select(first, *branches)

    def select(self, parts: Sequence[int], inside: Expr, outside: Expr) -> Expr:
        """`inside` in some parts, `outside` in the others; both may be evaluated anywhere."""
        equal = [tirx.EQ(self.part, constant(i, "int32")) for i in parts]
        return tirx.Select(reduce(tirx.Or, equal), inside, outside)

    def everywhere(self, indices: Position, conditions: Sequence[Expr]) -> Position:
        """Indices that are the same where the conditions hold, and legal elsewhere, too."""
        live = self.holds(conditions)
        if None in live or all(live) or not any(live):
            return indices
        first = live.index(True)
        last = len(live) - live[::-1].index(True)
        if not all(live[first:last]):
            return indices
        start, size = self.ends[first], self.ends[last] - self.ends[first]
        width, start, size = (constant(x, INDEX) for x in (self.width, start, size))
        own = self.axis.var
        place = tirx.FloorMod(tirx.FloorMod(own, width) - start, size) + start
        env = {own: tirx.FloorDiv(own, width) * width + place}
        return tuple(self._simplify(substitute(i, env)) for i in indices)

    # ---- reads of a product

    def kinds(
        self, at: Position, own: Position, conditions: Sequence[Expr]
    ) -> dict[int, bool] | None:
        """For each part where a read may take place, whether it is one of the partner; None where
        it is one of another point.
        """
        found: dict[int, bool] = {}
        for i, live in enumerate(self.holds(conditions)):
            if live is False:
                continue
            read = self.parts[i].place(at)
            if _equal(read, self.parts[i].place(own)):
                found[i] = False
            elif i < 2 and _equal(read, self.parts[1 - i].place(own)):
                found[i] = True
            else:
                return None
        return found

    def pair(self, reads: Sequence[Read]) -> Pair | None:
        """What reads at two points have in common, if they are pairs of these runs."""
        found: list[list[Position]] = [[] for _ in self.parts]
        for at, conditions in reads:
            for i, live in enumerate(self.holds(conditions)):
                if live is not False:
                    _note(found[i], self.parts[i].place(at))
        two: list[Position] = []
        for position in (*found[0], *found[1]):
            _note(two, position)
        if len(two) != 2 or any(len(rest) > 1 for rest in found[2:]):
            return None
        moved = [i for i, (a, b) in enumerate(zip(*two, strict=True)) if not same(a, b)]
        if len(moved) != 1:
            return None
        (index,) = moved
        step = number(self.parts[0].simplify(two[1][index] - two[0][index]))
        if not isinstance(step, int) or not step:
            return None
        low, distance = two[0 if step > 0 else 1], abs(step)
        base = self._joined(low, index, distance)
        width = self.width if found[2:] else 2 * distance
        for rest in found[2:]:
            if not self._continues(base, low, index, distance):
                return None
            if rest and not _equal(rest[0], self.parts[2].place(base)):
                return None
        return Pair(base, index, width, distance)

    def _joined(self, low: Position, index: int, distance: int) -> Position:
        """One position for all parts, of that of the first columns of pairs."""
        own, run, pair = self.axis.var, *self._names[:2]
        width = constant(self.width, INDEX)
        inside = tirx.FloorMod(own, width)
        env: dict[Var, Expr] = {}
        if isinstance(run, Var):
            env[run] = tirx.FloorDiv(own, width)
        rest = self.width > 2 * self.distance
        size = constant(self.distance, INDEX)
        second = tirx.FloorDiv(inside, size) * constant(distance, INDEX)
        if isinstance(pair, Var):
            env[pair] = inside if rest else tirx.FloorMod(inside, size)
        found = [substitute(i, env) for i in low]
        if not rest:
            found[index] = found[index] + second
        return tuple(self._simplify(i) for i in found)

    def _continues(self, base: Position, low: Position, index: int, distance: int) -> bool:
        """Whether the second columns of pairs follow the first ones."""
        far = list(low)
        far[index] = self.parts[0].simplify(far[index] + constant(distance, INDEX))
        return _equal(self.parts[1].place(base), far)


def find_pairs(axes: Sequence[Axis], reads: Mapping[Var, Sequence[Read]]) -> dict[Var, Pair] | None:
    """The pairs of points at which products are read, by product; None where they are none.

    `axes` are those of the output that reads.
    """
    for runs in _candidates(axes, reads):
        found = {}
        for buffer, own in reads.items():
            pair = runs.pair(own)
            if pair is None:
                break
            found[buffer] = pair
        else:
            return found
    return None


def _candidates(axes: Sequence[Axis], reads: Mapping[Var, Sequence[Read]]) -> Iterator[Runs]:
    """Runs that conditions on a column may tell apart: halves of an axis, neighbours, and what the
    numbers in the conditions say.
    """
    conditions = [c for own in reads.values() for _, found in own for c in found]
    numbers: list[tirx.IntImm] = []
    for condition in conditions:
        tvm_ffi.structural_walk(condition, [(tirx.IntImm, numbers.append)])
    sizes = sorted({int(n.value) for n in numbers if 0 < int(n.value) <= MAX_WIDTH}, reverse=True)
    for axis in reversed(axes):
        extent = axis.extent
        if not isinstance(extent, int) or not any(uses_any(c, [axis.var]) for c in conditions):
            continue
        halves = [extent // 2] if extent % 2 == 0 else []
        distances = dict.fromkeys([*halves, *sizes, *(n // 2 for n in sizes), 1])
        for distance in distances:
            for width in dict.fromkeys([2 * distance, extent, *sizes]):
                fits = 0 < 2 * distance <= width <= MAX_WIDTH
                if fits and extent % width == 0:
                    yield Runs(axis, tuple(axes), width, distance)


def _all(values: Iterator[int | None]) -> bool | None:
    """Whether all are true; None where that is not known."""
    known = list(values)
    if any(v == 0 for v in known):
        return False
    return None if None in known else True


def _equal(a: Sequence[Expr], b: Sequence[Expr]) -> bool:
    return all(same(x, y) for x, y in zip(a, b, strict=True))


def _note(found: list[Position], position: Position) -> None:
    if not any(_equal(position, known) for known in found):
        found.append(position)
