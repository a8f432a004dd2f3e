"""Loops of one nest: pointwise values, and reductions held in registers.

Without a reduction: loops over all axes, the contiguous one innermost, left to LLVM to vectorise.

With reductions, one axis becomes `lanes`, a small array of running results for each of them:
    lanes along a reduced axis                lanes along an output axis
        state[0:L] = start                        for each block of L outputs:
        for each block of L terms:                    state[0:L] = start
            state[0:L] += term[0:L]                   for all terms: state[0:L] += term[0:L]
        fold state[0:L] to one result                 out[0:L] = state[0:L]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.ir import Expr, PrimType, Var
from tvm.tirx import ForKind

from ..expr import bytes_of, constant, convert, dtype_of, number
from .lanes import lane_axis
from .loops import Loop, nest, seq
from .machine import Machine
from .nests import Member, Nest
from .rewrite import call_name, is_conditional, loads, nodes
from .scope import Resolve, Scope, new_buffer
from .stages import Kind, Stage
from .work import size_of

COMBINE = {
    Kind.SUM: tirx.Add,
    Kind.PROD: tirx.Mul,
    Kind.MAX: tirx.Max,
    Kind.MIN: tirx.Min,
    Kind.ALL: tirx.And,
    Kind.ANY: tirx.Or,
}
NEUTRAL = {Kind.SUM: 0, Kind.PROD: 1}

# Vectors of running results: enough to hide the latency of an addition, few enough for the registers.
VECTORS_ALONG_TERMS = 4
VECTORS_ALONG_OUTPUTS = 8

# Calls that LLVM has vector instructions for.
VECTOR_CALLS = ("fabs", "sqrt", "floor", "ceil", "trunc", "reinterpret", "")


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """Running results of one reduction: an array for each of its values."""

    member: Member
    arrays: tuple[Var, ...]


def emit_nest(item: Nest, stored: set[int], scope: Scope, machine: Machine) -> tirx.Stmt:
    """The loops of `item`; `stored` holds the hashes of the buffers that other nests read."""
    return _Emitter(item, stored, scope, machine).run()


class _Emitter:
    def __init__(self, item: Nest, stored: set[int], scope: Scope, machine: Machine) -> None:
        self.nest = item
        self.stored = stored
        self.scope = scope
        self.loops = scope.loops
        self.machine = machine
        self.regions = [scope.region(a) for a in item.axes]

    def run(self) -> tirx.Stmt:
        stages = tuple(m.stage for m in self.nest.members)
        long = [i for i, r in enumerate(self.regions) if number(r.full) != 1]
        candidates = self.nest.candidates()
        if self.nest.reduced is not None and any(s.kind is Kind.UPDATE for s in stages):
            long = [i for i in long if i not in self.nest.reduced]
        best = lane_axis(stages, [candidates[i] for i in long])
        lane = None if best is None else long[best]
        if self.nest.reduced is None:
            return self._pointwise(lane)
        if lane is not None and lane in self.nest.reduced:
            return self._along_terms(lane)
        return self._along_outputs(lane)

    # Pointwise

    def _pointwise(self, lane: int | None) -> tirx.Stmt:
        order = [i for i in range(len(self.regions)) if i != lane]
        made = {i: self._loop(i) for i in range(len(self.regions))}
        if lane is not None:
            order.append(lane)
        values = [self._value(i, made[i].value) for i in range(len(self.regions))]
        return nest([made[i] for i in order], self._point(values, []))

    def _loop(self, axis: int) -> Loop:
        return self.loops.new("i", self.regions[axis].extent)

    def _value(self, axis: int, local: Expr) -> Expr:
        return self.loops.simplify(self.regions[axis].base + local)

    # Reductions

    def _along_terms(self, lane: int) -> tirx.Stmt:
        """Lanes along a reduced axis; every output point by itself."""
        outer = [i for i in range(len(self.regions)) if i not in self.nest.reduced]
        inner = [i for i in sorted(self.nest.reduced) if i != lane]
        spatial = {i: self._loop(i) for i in outer}
        count = self._lane_count(self.regions[lane].extent, VECTORS_ALONG_TERMS)
        states = self._states(count)
        blocks = self.loops.simplify(tirx.FloorDiv(self.regions[lane].extent, self.loops.imm(count)))
        rest = self.loops.simplify(self.regions[lane].extent - blocks * self.loops.imm(count))

        def sweep(block_count: Expr, first: Expr, lanes: Expr | int) -> tirx.Stmt:
            made = {**spatial, **{i: self._loop(i) for i in inner}}
            block = self.loops.new("block", block_count)
            v = self.loops.new("v", lanes)
            made[lane] = Loop(v.var, v.extent)
            at = first + block.value * self.loops.imm(count) + v.value
            values = [
                self._value(i, at if i == lane else made[i].value) for i in range(len(self.regions))
            ]
            ops = self._point(values, states, v.value)
            v = self._vectorised(v, ops)
            return nest([*(made[i] for i in inner), block, v], ops)

        body = seq(
            *self._start(states, count, neutral=True),
            sweep(blocks, self.loops.imm(0), count),
            sweep(self.loops.imm(1), blocks * self.loops.imm(count), rest),
            *self._fold(states, count),
            *self._finish(states, self.loops.imm(0), [spatial.get(i) for i in range(len(self.regions))], True),
        )
        for i in reversed(outer):
            body = spatial[i].around(body)
        return seq(*self._allocations(states), body)

    def _along_outputs(self, lane: int | None) -> tirx.Stmt:
        """Lanes along an output axis, or none; all terms of a block of outputs at a time."""
        outer = [i for i in range(len(self.regions)) if i not in self.nest.reduced and i != lane]
        spatial = {i: self._loop(i) for i in outer}
        one = self.loops.imm(1)
        extent = one if lane is None else self.regions[lane].extent
        count = self._lane_count(extent, VECTORS_ALONG_OUTPUTS)
        states = self._states(count)
        blocks = self.loops.simplify(tirx.FloorDiv(extent, self.loops.imm(count)))
        rest = self.loops.simplify(extent - blocks * self.loops.imm(count))

        def block(first: Expr, lanes: Expr | int) -> tirx.Stmt:
            made = {**spatial, **{i: self._loop(i) for i in self.nest.reduced}}
            v = self.loops.new("v", lanes)
            if lane is not None:
                made[lane] = v
            at = first + v.value
            values = [
                self._value(i, at if i == lane else made[i].value) for i in range(len(self.regions))
            ]
            ops = self._point(values, states, v.value)
            v = self._vectorised(v, ops)
            reduced = [made[i] for i in sorted(self.nest.reduced)]
            w = self.loops.new("v", lanes)
            out = [spatial.get(i) for i in range(len(self.regions))]
            ends = self._finish(states, w.value, out, False, lane, first + w.value)
            return seq(
                *self._start(states, lanes, neutral=False),
                nest([*reduced, v], ops),
                w.around(seq(*ends)),
            )

        full = self.loops.loop("block", blocks, lambda b: block(b * self.loops.imm(count), count))
        tail = None if number(rest) == 0 else block(blocks * self.loops.imm(count), rest)
        body = seq(full, tail)
        for i in reversed(outer):
            body = spatial[i].around(body)
        return seq(*self._allocations(states), body)

    def _lane_count(self, extent: Expr, vectors: int) -> int:
        """Lanes: a power of two that the extent fills, at most `vectors` registers."""
        widest = max(
            bytes_of(dtype_of(v))
            for m in self.nest.members
            if m.stage.kind is not None
            for v in m.stage.values
        )
        count = vectors * self.machine.lanes(widest)
        size = number(extent)
        while size is not None and count > 1 and count > size:
            count //= 2
        return count

    def _states(self, count: int) -> list[State]:
        states = []
        for m in self.nest.members:
            if m.stage.kind is not None:
                arrays = tuple(
                    new_buffer("state", [self.loops.imm(count)], dtype_of(v)) for v in m.stage.values
                )
                states.append(State(m, arrays))
        return states

    def _allocations(self, states: list[State]) -> list[tirx.Stmt]:
        return [tirx.AllocBuffer(a) for s in states for a in s.arrays]

    def _start(self, states: list[State], lanes: Expr | int, neutral: bool) -> list[tirx.Stmt]:
        """Set the running results; `neutral` where the initial value is added at the end."""
        stmts = []
        for s in states:
            kind = s.member.stage.kind
            for array, initial in zip(s.arrays, s.member.stage.initial, strict=True):
                value = convert(initial, dtype_of(array))
                if neutral and kind in NEUTRAL:
                    value = constant(NEUTRAL[kind], dtype_of(array))
                kind_of_loop = ForKind.VECTORIZED if isinstance(lanes, int) else ForKind.SERIAL
                stmts.append(
                    self.loops.loop(
                        "v", lanes, _setter(array, value), kind_of_loop
                    )
                )
        return stmts

    def _fold(self, states: list[State], count: int) -> list[tirx.Stmt]:
        """Combine the lanes in a tree; the result ends in lane 0."""
        stmts = []
        half = count // 2
        while half:
            for s in states:
                (array,) = s.arrays
                combine = COMBINE[s.member.stage.kind]
                at = self.loops.new("v", half, ForKind.VECTORIZED)
                value = combine(
                    tirx.BufferLoad(array, [at.value]),
                    tirx.BufferLoad(array, [at.value + self.loops.imm(half)]),
                )
                stmts.append(at.around(tirx.BufferStore(array, value, [at.value])))
            half //= 2
        return stmts

    def _finish(
        self,
        states: list[State],
        slot: Expr,
        spatial: list[Loop | None],
        neutral: bool,
        lane: int | None = None,
        at: Expr | None = None,
    ) -> list[tirx.Stmt]:
        """Store the results of one output point."""
        stmts = []
        for s in states:
            stage = s.member.stage
            where = {
                hash(a.var): self._value(i, at if i == lane else spatial[i].value)
                for i, a in enumerate(s.member.axes)
                if i not in self.nest.reduced
            }
            indices = [
                where.get(hash(a.var), constant(0, dtype_of(a.var))) for a in stage.axes
            ]
            for buffer, array, initial in zip(stage.buffers, s.arrays, stage.initial, strict=True):
                value = tirx.BufferLoad(array, [slot])
                neutral_value = NEUTRAL.get(stage.kind)
                if neutral and neutral_value is not None and number(initial) != neutral_value:
                    value = COMBINE[stage.kind](value, convert(initial, dtype_of(array)))
                stmts.append(self.scope.store(buffer, value, indices))
        return stmts

    def _vectorised(self, loop: Loop, ops: Sequence[tirx.Stmt]) -> Loop:
        """The lane loop as vector operations, if everything in it has a vector form."""
        extent = number(loop.extent) or 0
        if not _is_power_of_two(int(extent)) or not all(_has_vector_form(op) for op in ops):
            return loop
        return Loop(loop.var, loop.extent, ForKind.VECTORIZED)

    # One point

    def _point(
        self, values: list[Expr], states: list[State], slot: Expr | None = None
    ) -> list[tirx.Stmt]:
        """What is computed at one point: bindings, stores, and updates of the running results."""
        ops: list[tirx.Stmt] = []
        known: dict[int, Expr] = {}
        state_of = {hash(s.member.stage.buffer): s for s in states}
        for member in self.nest.members:
            stage = member.stage
            env = {
                hash(a.var): convert(v, dtype_of(a.var))
                for a, v in zip(member.axes, values, strict=True)
            }
            resolve = Resolve(self.scope, env, known, ops)
            for var, value in stage.binds:
                env[hash(var)] = resolve.bind(var.name, resolve(value))
            if stage.kind is None:
                value = resolve.bind(stage.buffer.name, resolve(stage.values[0]))
                known[hash(stage.buffer)] = value
                if hash(stage.buffer) in self.stored:
                    indices = [
                        env.get(hash(a.var), constant(0, dtype_of(a.var))) for a in stage.axes
                    ]
                    ops.append(self.scope.store(stage.buffer, value, indices))
            else:
                ops.extend(self._updates(stage, state_of[hash(stage.buffer)], resolve, env, slot))
        return ops

    def _updates(
        self, stage: Stage, state: State, resolve: Resolve, env: dict[int, Expr], slot: Expr
    ) -> list[tirx.Stmt]:
        if stage.kind is not Kind.UPDATE:
            (array,) = state.arrays
            term = convert(resolve(stage.values[0]), dtype_of(array))
            value = COMBINE[stage.kind](tirx.BufferLoad(array, [slot]), term)
            return [tirx.BufferStore(array, value, [slot])]
        for carry, array in zip(stage.carries, state.arrays, strict=True):
            env[hash(carry)] = tirx.BufferLoad(array, [slot])
        new = [resolve(v) for v in stage.values]
        binds, stores = [], []
        for array, value in zip(state.arrays, new, strict=True):
            var = Var("next", PrimType(dtype_of(value)))
            binds.append(tirx.Bind(var, value))
            stores.append(tirx.BufferStore(array, convert(var, dtype_of(array)), [slot]))
        return [seq(*binds, *stores)]


def _is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _setter(array: Var, value: Expr) -> object:
    return lambda at: tirx.BufferStore(array, value, [at])


def _has_vector_form(stmt: tirx.Stmt) -> bool:
    if isinstance(stmt, tirx.Bind | tirx.BufferStore):
        return all(
            call_name(e) in VECTOR_CALLS and not (is_conditional(e) and loads(e))
            for e in nodes(stmt.value)
        )
    return False
