"""Relabelings: what chains of permutations and reshapes do to the axes of a tensor.

    permute_dims(reshape(x, (B, S, H, D)), (0, 2, 1, 3))         x is [B, S, H * D]

is, over the atoms b, s, h, d,                 (b)(s)(h d)  ->  (b)(h)(s)(d)

Both sides name the same atoms, each axis as a group of them. Permutations exchange groups, reshapes
group anew; composing two takes atoms apart where one side groups what the other splits. Axes of
extent 1 are empty groups. An extent is known by its factors, so that symbolic axes can be merged
and split as well.

Does not handle (None): reshapes whose groups share no atoms, as [2, 6] -> [3, 4], extents of 0, and
sums of symbols that are split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr

Groups = tuple[tuple[int, ...], ...]
Step = tuple[str, tuple]  # ("reshape", extents) or ("permute_dims", axes)


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """An extent: a number times other expressions."""

    number: int
    others: tuple[Expr, ...] = ()

    @classmethod
    def of(cls, extent: Expr | int) -> Factors:
        """The factors of an extent."""
        if isinstance(extent, int | tirx.IntImm):
            return cls(int(extent))
        if isinstance(extent, tirx.Mul):
            left, right = cls.of(extent.a), cls.of(extent.b)
            return cls(left.number * right.number, (*left.others, *right.others))
        return cls(1, (extent,))

    def over(self, divisor: Factors) -> Factors | None:
        """The quotient, if all factors of the divisor are among these."""
        if divisor.number == 0 or self.number % divisor.number:
            return None
        left = list(self.others)
        for other in divisor.others:
            place = next((i for i, f in enumerate(left) if _same(f, other)), None)
            if place is None:
                return None
            del left[place]
        return Factors(self.number // divisor.number, tuple(left))

    @property
    def is_one(self) -> bool:
        return self.number == 1 and not self.others

    def extent(self) -> Expr:
        """As an expression."""
        number = tirx.IntImm("int64", self.number)
        if not self.others:
            return number
        return math.prod(self.others[1:], start=self.others[0]) * number


@dataclass(frozen=True, slots=True, eq=False)
class Relabeling:
    """See the module docstring.

    Attributes
    ----------
    atoms : tuple of Factors
    source, target : tuple of tuple of int
        The atoms of each axis, outermost first, before and after.
    """

    atoms: tuple[Factors, ...]
    source: Groups
    target: Groups

    @classmethod
    def permutation(cls, shape: Sequence[Expr], axes: Sequence[int]) -> Relabeling | None:
        """Of `permute_dims`."""
        plain = cls.reshape(shape, shape)
        return plain and cls(plain.atoms, plain.source, tuple(plain.target[a] for a in axes))

    @classmethod
    def reshape(cls, old: Sequence[Expr], new: Sequence[Expr]) -> Relabeling | None:
        """Of `reshape`, None where an axis would have to be cut across."""
        aligned = _align(list(map(Factors.of, old)), list(map(Factors.of, new)))
        return aligned and cls(*aligned)

    def inverse(self) -> Relabeling:
        """Back from the target to the source."""
        return Relabeling(self.atoms, self.target, self.source)

    def then(self, other: Relabeling) -> Relabeling | None:
        """This one, and behind it another one of its result."""
        atoms: list[Factors] = []
        first: dict[int, list[int]] = {}
        second: dict[int, list[int]] = {}
        for mine, others in zip(self.target, other.source, strict=True):
            aligned = _align([self.atoms[a] for a in mine], [other.atoms[a] for a in others])
            if aligned is None:
                return None
            new, left, right = aligned
            shift = len(atoms)
            atoms += new
            first |= {a: [shift + i for i in g] for a, g in zip(mine, left, strict=True)}
            second |= {a: [shift + i for i in g] for a, g in zip(others, right, strict=True)}
        source, target = _renamed(self.source, first), _renamed(other.target, second)
        return Relabeling(tuple(atoms), source, target)

    def only(self, kept: Iterable[int], axes: Sequence[int]) -> Relabeling:
        """What this does to a tensor that has of the source only some axes, and their atoms."""
        wanted = set(kept)
        source = tuple(tuple(a for a in self.source[axis] if a in wanted) for axis in axes)
        target = tuple(tuple(a for a in group if a in wanted) for group in self.target)
        return Relabeling(self.atoms, source, target)

    @property
    def is_view(self) -> bool:
        """Whether no element moves in memory."""
        return _flat(self.source) == _flat(self.target)

    @property
    def target_shape(self) -> list[Expr]:
        return [self._extent(group) for group in self.target]

    def key(self) -> tuple:
        """Equal for relabelings of one tensor that do the same."""
        runs = self._runs()
        order = tuple(sorted(range(len(runs)), key=lambda i: _flat(self.target).index(runs[i][0])))
        return order, tuple(str(self._extent(run)) for run in (*runs, *self.target))

    def steps(self) -> list[Step]:
        """The fewest reshapes and permutations that do it, at most one permutation."""
        if self.is_view:
            same = self._shape(self.source) == self._shape(self.target)
            return [] if same else [("reshape", tuple(self.target_shape))]
        plain = self._by_source()
        if plain is not None and len(plain) == 1:
            return plain
        ways = [plain, self._by_target(), self._by_pieces(self._runs())]
        return min((way for way in ways if way is not None), key=len)

    def _by_source(self) -> list[Step] | None:
        """The axes of the source exchanged as they are, and reshaped then."""
        flat = _flat(self.target)
        axes, units = {}, [i for i, group in enumerate(self.source) if not group]
        for axis, group in enumerate(self.source):
            if group:
                start = flat.index(group[0])
                if tuple(flat[start : start + len(group)]) != group:
                    return None
                axes[group[0]] = axis
        order = []
        for group in self.target:
            if not group and units:  # keeps an axis of 1 where the target wants one
                order.append(units.pop(0))
            order += [axes[a] for a in group if a in axes]
        order += units
        steps: list[Step] = [("permute_dims", tuple(order))]
        turned = [self.source[axis] for axis in order]
        if self._shape(turned) != self._shape(self.target):
            steps.append(("reshape", tuple(self.target_shape)))
        return steps

    def _by_target(self) -> list[Step] | None:
        """The axes of the target made first, and exchanged then."""
        flat, pieces = _flat(self.source), []
        for group in self.target:
            if group:
                start = flat.index(group[0])
                if tuple(flat[start : start + len(group)]) != group:
                    return None
                pieces.append(group)
        pieces.sort(key=lambda group: flat.index(group[0]))
        return self._by_pieces(pieces)

    def _by_pieces(self, pieces: Sequence[tuple[int, ...]]) -> list[Step]:
        """Reshaped to pieces, in the order of the source; these exchanged; and reshaped."""
        flat = _flat(self.target)
        order = sorted(range(len(pieces)), key=lambda i: flat.index(pieces[i][0]))
        steps: list[Step] = []
        if self._shape(pieces) != self._shape(self.source):
            steps.append(("reshape", tuple(self._extent(piece) for piece in pieces)))
        steps.append(("permute_dims", tuple(order)))
        if self._shape([pieces[i] for i in order]) != self._shape(self.target):
            steps.append(("reshape", tuple(self.target_shape)))
        return steps

    def _runs(self) -> list[tuple[int, ...]]:
        """Atoms that stand side by side before and after, as long as can be."""
        flat = _flat(self.target)
        behind = dict(pairwise(flat))
        runs: list[list[int]] = []
        for atom in _flat(self.source):
            if runs and behind.get(runs[-1][-1]) == atom:
                runs[-1].append(atom)
            else:
                runs.append([atom])
        return [tuple(run) for run in runs]

    def _extent(self, group: Iterable[int]) -> Expr:
        factors = [self.atoms[a] for a in group]
        number = math.prod(f.number for f in factors)
        return Factors(number, tuple(e for f in factors for e in f.others)).extent()

    def _shape(self, groups: Iterable[tuple[int, ...]]) -> list[tuple]:
        """By atoms: equal lists are equal shapes."""
        known = [tuple(group) for group in groups]
        sizes = [[self.atoms[a] for a in group] for group in known]
        plain = all(not f.others for group in sizes for f in group)
        return [(math.prod(f.number for f in g),) for g in sizes] if plain else known


def _align(old: list[Factors], new: list[Factors]) -> tuple | None:
    """Atoms that both lists of extents are products of, in order, and the groups of each."""
    if any(f.number == 0 for f in (*old, *new)):
        return None
    atoms: list[Factors] = []
    groups = tuple([[] for _ in side] for side in (old, new))
    left = [[(i, f) for i, f in enumerate(side) if not f.is_one] for side in (old, new)]
    while left[0] and left[1]:
        (i, a), (j, b) = left[0].pop(0), left[1].pop(0)
        more, rest = a.over(b), b.over(a)
        if more is None and rest is None:
            return None
        atom = b if more is not None else a
        groups[0][i].append(len(atoms))
        groups[1][j].append(len(atoms))
        atoms.append(atom)
        if more is not None and not more.is_one:
            left[0].insert(0, (i, more))
        elif rest is not None and not rest.is_one:
            left[1].insert(0, (j, rest))
    if left[0] or left[1]:
        return None
    return (tuple(atoms), *(tuple(map(tuple, side)) for side in groups))


def _renamed(groups: Groups, names: dict[int, list[int]]) -> Groups:
    return tuple(tuple(n for a in group for n in names[a]) for group in groups)


def _flat(groups: Iterable[Iterable[int]]) -> list[int]:
    return [a for group in groups for a in group]


def _same(a: Expr, b: Expr) -> bool:
    return a.same_as(b) or tvm_ffi.structural_equal(a, b)
