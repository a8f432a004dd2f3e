"""Loops of a nest with reductions, their running results in registers.

One axis becomes `lanes`; each lane has a running result of its own:

    lanes along a reduced axis                lanes along an output axis
        state[0:L] = start                        for each block of L outputs:
        for each block of L terms:                    state[0:L] = start
            state[0:L] += term[0:L]                   for all terms: state[0:L] += term[0:L]
        fold state[0:L] to one result                 out[0:L] = state[0:L]

Many terms of a wide tile are read as they lie in memory, the running results of all its outputs in
the nearest cache: what is read in pieces of 512 bytes, a page apart, is not fetched ahead.

    for all terms:
        for each block of L outputs: state[block] += term[block]
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.tirx import ForKind

from ...program.expr import bytes_of, constant, convert, dtype_of, number
from ..loops import Loop, nest, seq
from ..machine import Machine
from ..stages.lanes import lane_axis, transposed_axes
from ..stages.resolve import Point, Resolve, rounded_by_bits
from ..stages.stages import Kind
from ..tiles import MANY_TERMS
from .emit_pointwise import PointwiseEmitter
from .emit_transpose import TransposeEmitter
from .nests import Nest
from .point import (
    COMBINE,
    LEAST_PIECE,
    NestEmitter,
    Ops,
    PointWriter,
    State,
    env_of,
    has_vector_form,
    indices_of,
)
from .scope import Scope, allocate, new_buffer
from .space import Slot, Space

# Loops of one nest: chooses the axis that vectors run along, and who emits it.


def emit_nest(item: Nest, stored: set[Var], scope: Scope, machine: Machine) -> tirx.Stmt:
    """The loops of `item`; `stored` holds the buffers that others read."""
    space = Space(item, scope)
    writer = PointWriter(item, stored, scope)
    if transposed_axes(item.members[0].stage) is not None:
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


NEUTRAL = {Kind.SUM: 0, Kind.PROD: 1}

# Vectors of running results: enough to hide the latency of an addition, and they fit in registers.
VECTORS_ALONG_TERMS = 4
VECTORS_ALONG_OUTPUTS = 8

# Vectors of a block where the running results are in memory. With one thread of a Zen 4, exp(x)
# summed over the middle axis of 8 x 512 x 1000 takes 0.97 ms; with blocks of outputs all of whose
# terms follow each other 5.8; x * x 0.33 and 0.59.
VECTORS_OF_A_TERM = 4


class ReductionEmitter(NestEmitter):
    """Emits one nest."""

    def emit(self, lane: Slot | None) -> tirx.Stmt:
        """The loops; `lane` is reduced or not."""
        if lane is not None and lane.is_reduced:
            return self._along_terms(lane)
        return self._along_outputs(lane)

    def _along_terms(self, lane: Slot) -> tirx.Stmt:
        """Every output point by itself."""
        outer = {s: self.space.loop(s) for s in self.space.slots if not s.is_reduced}
        extent = self.space.extent(lane)
        count = self._lane_count(extent, VECTORS_ALONG_TERMS)
        states = self._states(count)
        blocks, rest = self._divide(extent, count)

        def sweep(block_count: Expr, first: Expr, lanes: Expr | int) -> tirx.Stmt:
            step = self.loops.imm(lanes) if isinstance(lanes, int) else lanes
            inner = {
                s: self.space.loop(s) for s in self.space.slots if s.is_reduced and s is not lane
            }
            block, v = self.loops.new("block", block_count), self.loops.new("v", lanes)
            local = {s: loop.value for s, loop in (*outer.items(), *inner.items())}
            local[lane] = first + block.value * step + v.value
            v, ops = self._lanes(v, self.space.values(local), states)
            return nest([*inner.values(), block, v], ops)

        values = self.space.values({s: loop.value for s, loop in outer.items()})
        start = self.loops.simplify(extent - rest)
        body = seq(
            *self._start(states, count, neutral=True),
            sweep(blocks, self.loops.imm(0), count),
            *(
                sweep(n, start + at, width)
                for n, at, width in self.pieces(rest, self._narrow(count))
            ),
            *self._fold(states, count),
            *self._finish(states, self.loops.imm(0), values, neutral=True),
        )
        return self._around(outer, states, body)

    def _along_outputs(self, lane: Slot | None) -> tirx.Stmt:
        """All terms of a block of outputs at a time; without a lane, of one output."""
        outer = {
            s: self.space.loop(s) for s in self.space.slots if not s.is_reduced and s is not lane
        }
        extent = self.loops.imm(1) if lane is None else self.space.extent(lane)
        count = self._lane_count(extent, VECTORS_ALONG_OUTPUTS)
        if lane is not None and self._has_many_terms(lane, count):
            return self._term_by_term(lane, outer)
        states = self._states(count)

        def values_at(reduced: dict[Slot, Loop], at: Expr) -> list[Expr]:
            local = {s: loop.value for s, loop in (*outer.items(), *reduced.items())}
            if lane is not None:
                local[lane] = at
            return self.space.values(local)

        def block(first: Expr, lanes: Expr | int) -> tirx.Stmt:
            reduced = {s: self.space.loop(s) for s in self.space.slots if s.is_reduced}
            v, w = self.loops.new("v", lanes), self.loops.new("v", lanes)
            v, ops = self._lanes(v, values_at(reduced, first + v.value), states)
            ends = self._finish(states, w.value, values_at({}, first + w.value), neutral=False)
            return seq(
                *self._start(states, lanes, neutral=False),
                nest([*reduced.values(), v], ops),
                w.around(seq(*ends)),
            )

        return self._around(outer, states, self._blocks(extent, count, block))

    def _has_many_terms(self, lane: Slot, count: int) -> bool:
        """Whether a tile of several blocks of `count` outputs has many terms."""
        width = number(self.space.extent(lane, whole=True))
        reduced = (s for s in self.space.slots if s.is_reduced)
        sizes = [number(self.space.extent(s, whole=True)) for s in reduced]
        known = [n for n in sizes if n is not None]
        many = len(known) < len(sizes) or prod(int(n) for n in known) >= MANY_TERMS
        return many and width is not None and width > count

    def _term_by_term(self, lane: Slot, outer: dict[Slot, Loop]) -> tirx.Stmt:
        """One term of all outputs of the tile at a time."""
        extent = self.space.extent(lane)
        count = self._lane_count(extent, VECTORS_OF_A_TERM)
        states = self._states(self.space.extent(lane, whole=True))
        reduced = {s: self.space.loop(s) for s in self.space.slots if s.is_reduced}

        def values_at(loops: dict[Slot, Loop], at: Expr) -> list[Expr]:
            local = {s: loop.value for s, loop in (*outer.items(), *loops.items())}
            return self.space.values({**local, lane: at})

        def start(first: Expr, lanes: Expr | int) -> tirx.Stmt:
            return seq(*self._start(states, lanes, neutral=False, first=first))

        def add(first: Expr, lanes: Expr | int) -> tirx.Stmt:
            v = self.loops.new("v", lanes)
            at = first + v.value
            v, ops = self._lanes(v, values_at(reduced, at), states, at)
            return nest([v], ops)

        def finish(first: Expr, lanes: Expr | int) -> tirx.Stmt:
            v = self.loops.new("v", lanes)
            at = first + v.value
            return v.around(seq(*self._finish(states, at, values_at({}, at), neutral=False)))

        terms = self._blocks(extent, count, add)
        for loop in reversed(reduced.values()):
            terms = loop.around(terms)
        ends = (self._blocks(extent, count, body) for body in (start, finish))
        return self._around(outer, states, seq(next(ends), terms, next(ends)))

    def _blocks(
        self, extent: Expr, count: int, body: Callable[[Expr, Expr | int], tirx.Stmt]
    ) -> tirx.Stmt:
        """Blocks of `count` lanes, and the rest in pieces; `body` of where each starts, and its
        lanes.
        """

        def several(number_of: Expr, first: Expr, lanes: Expr | int) -> tirx.Stmt:
            step = self.loops.imm(lanes) if isinstance(lanes, int) else lanes
            return self.loops.loop("block", number_of, lambda b: body(first + b * step, lanes))

        blocks, rest = self._divide(extent, count)
        start = self.loops.simplify(extent - rest)
        tail = (
            several(n, start + at, width) for n, at, width in self.pieces(rest, self._narrow(count))
        )
        return seq(several(blocks, self.loops.imm(0), count), *tail)

    def _around(self, outer: dict[Slot, Loop], states: list[State], body: tirx.Stmt) -> tirx.Stmt:
        for loop in reversed(outer.values()):
            body = loop.around(body)
        return seq(*(allocate(a) for s in states for a in s.arrays), body)

    def _lanes(
        self, v: Loop, values: list[Expr], states: list[State], slot: Expr | None = None
    ) -> tuple[Loop, Ops]:
        """The loop over the lanes and its body, as vectors if all of it has a vector form; `slot`
        is the running result of a lane, if that is another than its number.
        """
        slot = v.value if slot is None else slot
        size = number(v.extent) or 0
        if _is_power_of_two(int(size)):
            ops = self.writer.write(values, states, slot, v)
            if has_vector_form(ops):
                return Loop(v.var, v.extent, ForKind.VECTORIZED), ops
        return v, self.writer.write(values, states, slot)

    # Lanes

    def _divide(self, extent: Expr, count: int) -> tuple[Expr, Expr]:
        """Whole blocks of `count`, and what remains."""
        blocks = self.loops.simplify(tirx.FloorDiv(extent, self.loops.imm(count)))
        return blocks, self.loops.simplify(extent - blocks * self.loops.imm(count))

    def _vector_lanes(self) -> int:
        """Running results in a vector register."""
        widest = max(
            bytes_of(dtype_of(v))
            for m in self.nest.members
            if m.stage.kind is not None
            for v in m.stage.values
        )
        return self.machine.lanes(widest)

    def _narrow(self, count: int) -> int:
        """Lanes of a remainder of unknown length."""
        return min(count, self._vector_lanes())

    def _lane_count(self, extent: Expr, vectors: int) -> int:
        """Lanes: at most `vectors` registers; of a known extent, what leaves the fewest steps."""
        lanes = self._vector_lanes()
        size = number(extent)
        if size is None:
            return vectors * lanes
        counts = [n * lanes for n in (8, 4, 2, 1) if n <= vectors]
        counts += [n for n in (8, 4, 2, 1) if n < lanes]

        def steps(count: int) -> int:
            blocks, rest = divmod(int(size), count)
            return blocks * -(-count // lanes) + rest // lanes + min(rest % lanes, LEAST_PIECE)

        return min((n for n in counts if n <= size), key=steps)

    # Running results

    def _states(self, count: Expr | int) -> list[State]:
        length = [self.loops.imm(count) if isinstance(count, int) else count]
        return [
            State(m, tuple(new_buffer("state", length, dtype_of(v)) for v in m.stage.values))
            for m in self.nest.members
            if m.stage.kind is not None
        ]

    def _start(
        self, states: list[State], lanes: Expr | int, neutral: bool, first: Expr | None = None
    ) -> list[tirx.Stmt]:
        """Set running results from `first` on; `neutral` where the initial value is added at the
        end.
        """
        how = ForKind.VECTORIZED if isinstance(lanes, int) else ForKind.SERIAL
        stmts = []
        for s in states:
            kind = s.member.stage.kind
            for array, initial in zip(s.arrays, s.member.stage.initial, strict=True):
                value = convert(initial, dtype_of(array))
                if neutral and kind in NEUTRAL:
                    value = constant(NEUTRAL[kind], dtype_of(array))
                stmts.append(self.loops.loop("v", lanes, _setter(array, value, first), how))
        return stmts

    def _fold(self, states: list[State], count: int) -> list[tirx.Stmt]:
        """Combine the lanes in a tree; the result ends in lane 0."""
        stmts = []
        half = count // 2
        while half:
            for s in states:
                merges = s.member.stage.kind is Kind.UPDATE
                stmts.append(self._merge(s, half) if merges else self._combine(s, half))
            half //= 2
        return stmts

    def _combine(self, state: State, half: int) -> tirx.Stmt:
        (array,) = state.arrays
        at = self.loops.new("v", half, ForKind.VECTORIZED)
        low = tirx.BufferLoad(array, [at.value])
        high = tirx.BufferLoad(array, [at.value + self.loops.imm(half)])
        value = COMBINE[state.member.stage.kind](low, high)
        return at.around(tirx.BufferStore(array, value, [at.value]))

    def _merge(self, state: State, half: int) -> tirx.Stmt:
        """Merge the upper half of the states of a recurrence into the lower one."""
        stage = state.member.stage
        at = self.loops.new("v", half)
        env: dict[Var, Expr] = {}
        point = Point()
        resolve = Resolve(self.scope, env, point)
        for array, carry, element in zip(state.arrays, stage.carries, stage.elements, strict=True):
            upper = at.value + self.loops.imm(half)
            env[carry] = resolve.bind("low", tirx.BufferLoad(array, [at.value]))
            env[element] = resolve.bind("high", tirx.BufferLoad(array, [upper]))
        new = [resolve.bind("next", resolve(v)) for v in stage.merge]
        stores = [
            tirx.BufferStore(array, convert(value, dtype_of(array)), [at.value])
            for array, value in zip(state.arrays, new, strict=True)
        ]
        return at.around(nest([], [*point.ops, *stores]))

    def _finish(
        self, states: list[State], slot: Expr, values: list[Expr], neutral: bool
    ) -> list[tirx.Stmt]:
        """Store the results of one output point."""
        stmts = []
        for s in states:
            stage = s.member.stage
            indices = indices_of(stage, env_of(s.member, values))
            for buffer, array, initial in zip(stage.buffers, s.arrays, stage.initial, strict=True):
                value = tirx.BufferLoad(array, [slot])
                start = NEUTRAL.get(stage.kind)
                if neutral and start is not None and number(initial) != start:
                    value = COMBINE[stage.kind](value, convert(initial, dtype_of(array)))
                value = rounded_by_bits(value, stage.rounding)
                stmts.append(self.scope.store(buffer, value, indices))
        return stmts


def _is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _setter(array: Var, value: Expr, first: Expr | None) -> Callable[[Expr], tirx.Stmt]:
    return lambda v: tirx.BufferStore(array, value, [v if first is None else first + v])
