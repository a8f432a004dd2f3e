"""Beam search over the solutions of a region, by moves that change one or two launches.

    merge       {a} {b}              =>  {a, b}            neighbours or not (horizontal)
    split       {a, b}               =>  {a} {b}           b: an operator and what follows it inside
    move        {a, p} {b}           =>  {a} {p, b}
    recompute   {p} {a} {b} {c}      =>  {p} {p', a} {p', b} {c}
    take back   {p} {p', a}          =>  {p} {a}

Solutions are ordered by predicted time and then by what they are made of, so that nothing depends
on the order in which they were found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from ..regions.regions import Region
from .exact import TOLERANCE_US, Found, Pricing, Spent
from .solution import members_of

MAX_READERS = 4  # of whose subsets each is tried for a recomputation
IDLE_ROUNDS = 2  # rounds without a better solution after which the search ends


class Part(NamedTuple):
    """One launch: the operators it computes, and those of them that no other launch owns."""

    ops: int
    own: int


Parts = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Beam:
    """What the search may do.

    Attributes
    ----------
    width : solutions kept
    moves : moves tried
    rematerialise : whether an operator may be computed by several launches
    """

    width: int
    moves: int
    rematerialise: bool = True


def parts_of(region: Region, launches: Iterable[tuple[int, int]]) -> Parts:
    """Launches as (operators, results written) of a region, by who owns what."""
    given = list(launches)
    taken = 0
    for ops, stores in given:
        taken |= sum(1 << i for i in members_of(ops) if region.out[i] & stores)
    parts = []
    for ops, stores in given:
        own = sum(1 << i for i in members_of(ops) if region.out[i] & stores)
        own |= ops & ~taken
        taken |= own
        parts.append(Part(ops, own))
    return tuple(sorted(parts))


def unfused(region: Region) -> Parts:
    """Every operator alone."""
    return tuple(Part(1 << i, 1 << i) for i in range(len(region.ops)))


def search_beam(
    region: Region, pricing: Pricing, starts: Iterable[Parts], beam: Beam
) -> Found | None:
    """The best solution found from the given ones, None if none of them and of those found is
    legal. Never raises `Spent`: it ends with what it has.
    """
    return _Search(region, pricing, beam).run(starts)


@dataclass
class _Search:
    region: Region
    pricing: Pricing
    beam: Beam
    seen: set[Parts] = field(default_factory=set)
    best: tuple[float, Parts, tuple[tuple[int, int], ...]] | None = None

    def run(self, starts: Iterable[Parts]) -> Found | None:
        try:
            level = [found for parts in starts if (found := self._priced(parts))]
            idle = 0
            while level and idle < IDLE_ROUNDS:
                before = self.best
                level = sorted(level)[: self.beam.width]
                level = [new for _, parts, _ in level for new in self._neighbours(parts)]
                idle = idle + 1 if self.best is before else 0
        except Spent:
            pass
        if self.best is None:
            return None
        time, _, launches = self.best
        return Found(launches, time, False, self.pricing.asked)

    def _neighbours(self, parts: Parts) -> Iterator[tuple]:
        for changed in self._moves(parts):
            self.pricing.tried += 1
            if self.pricing.tried > self.beam.moves:
                raise Spent
            if changed is not None and (found := self._priced(changed)):
                yield found

    def _priced(self, parts: Parts) -> tuple | None:
        """(time, solution, launches), None for one that was seen or is not legal."""
        if parts in self.seen:
            return None
        self.seen.add(parts)
        launches = ordered_launches(self.region, parts)
        if launches is None:
            return None
        total = 0.0
        for ops, stores in launches:
            time = self.pricing.time_us(ops, stores)
            if time is None:
                return None
            total += time
        found = (round(total, 9), parts, launches)
        if self.best is None or total < self.best[0] - TOLERANCE_US:
            self.best = found
        return found

    # ---- moves
    def _moves(self, parts: Parts) -> Iterator[Parts | None]:
        for a, b in combinations(range(len(parts)), 2):
            yield self._with(parts, (a, b), [(parts[a].ops | parts[b].ops, None)])
        for k, part in enumerate(parts):
            yield from self._splits(parts, k, part)
            for i in members_of(part.ops & ~part.own):
                yield self._with(parts, (k,), [(part.ops & ~(1 << i), None)])
            for i in members_of(part.own):
                yield from self._spread(parts, k, i)

    def _splits(self, parts: Parts, k: int, part: Part) -> Iterator[Parts | None]:
        for i in members_of(part.ops):
            tail = self._tail(part.ops, i)
            if part.ops & ~tail:
                yield self._with(parts, (k,), [(part.ops & ~tail, None), (tail, None)])
            head = self._head(part.ops, i)
            if part.ops & ~head:
                yield self._with(parts, (k,), [(head, None), (part.ops & ~head, None)])

    def _spread(self, parts: Parts, k: int, op: int) -> Iterator[Parts | None]:
        """An operator of one launch moves to another one, or is recomputed by some of those that
        read it.
        """
        out, bit = self.region.out[op], 1 << op
        readers = [
            j
            for j, other in enumerate(parts)
            if j != k and not other.ops & bit and self.region.reads(other.ops) & out
        ]
        for j in readers:
            if parts[k].ops != bit:
                changed = [(parts[k].ops & ~bit, None), (parts[j].ops | bit, bit)]
                yield self._with(parts, (k, j), changed)
        if not self.beam.rematerialise:
            return
        subsets = [readers] if len(readers) > MAX_READERS else []
        sizes = range(1, len(readers) + 1) if len(readers) <= MAX_READERS else (1,)
        subsets += [list(s) for size in sizes for s in combinations(readers, size)]
        for cone in dict.fromkeys((bit, self._head(parts[k].ops, op))):
            for subset in subsets:
                yield self._with(parts, subset, [(parts[j].ops | cone, None) for j in subset])

    def _with(
        self, parts: Parts, replaced: Iterable[int], by: list[tuple[int, int | None]]
    ) -> Parts | None:
        """A solution with other launches in place of some; each keeps what it owned, as far as it
        still computes it, and takes (second number) what it is to own.
        """
        gone = set(replaced)
        taken = 0
        for _, takes in by:
            taken |= takes or 0
        kept = [p for j, p in enumerate(parts) if j not in gone]
        owned = 0
        for j in gone:
            owned |= parts[j].own
        new = []
        for p in kept:
            new.append([p.ops, p.own & ~taken])
        left = owned & ~taken
        for ops, takes in by:
            own = (ops & left) | (takes or 0)
            left &= ~own
            new.append([ops, own])
        return _tidy(self.region, new)

    def _tail(self, ops: int, op: int) -> int:
        """The operator and what follows it among `ops`."""
        found = 1 << op
        made = self.region.out[op]
        for i in members_of(ops):
            if self.region.needs[i] & made:
                found |= 1 << i
                made |= self.region.out[i]
        return found

    def _head(self, ops: int, op: int) -> int:
        """The operator and what it depends on among `ops`."""
        found = 1 << op
        needed = self.region.needs[op]
        for i in reversed(members_of(ops)):
            if self.region.out[i] & needed:
                found |= 1 << i
                needed |= self.region.needs[i]
        return found


def _tidy(region: Region, parts: list[list[int]]) -> Parts | None:
    """The solution without what is computed in vain; what has lost its owner gets another.

    None if something is read that no launch computes.
    """
    out, needs = region.out, region.needs
    while True:
        wanted, owned = region.wanted, 0
        for ops, own in parts:
            wanted |= region.reads(ops)
            owned |= own
        changed = False
        for part in parts:
            ops, needed = part
            useful, inside = 0, 0
            for i in reversed(members_of(ops)):
                if out[i] & inside or (needed >> i & 1 and out[i] & wanted):
                    useful |= 1 << i
                    inside |= needs[i]
            orphans = 0
            if free := ops & ~owned:
                for i in members_of(free):
                    if out[i] & wanted:
                        orphans |= 1 << i
            if orphans:
                part[1] |= orphans
                owned |= orphans
                changed = True
            elif useful != ops:
                part[0], part[1] = useful, needed & useful
                changed = True
        parts = [p for p in parts if p[0]]
        if not changed:
            break
    made = 0
    for _, own in parts:
        made |= region.makes(own)
    if wanted & ~made:
        return None
    return tuple(map(Part._make, sorted(parts)))


def ordered_launches(region: Region, parts: Parts) -> tuple[tuple[int, int], ...] | None:
    """The launches (operators, results written) in an order in which they can run, None if there
    is none.
    """
    wanted = region.wanted
    for p in parts:
        wanted |= region.reads(p.ops)
    wait = [region.waits_for(p.ops) for p in parts]
    stores = [region.makes(p.own) & wanted for p in parts]
    done, order, left = 0, [], list(range(len(parts)))
    while left:
        ready = [k for k in left if not wait[k] & ~done]
        if not ready:
            return None
        for k in ready:
            done |= stores[k]
            order.append((parts[k].ops, stores[k]))
        left = [k for k in left if k not in ready]
    return tuple(order)
