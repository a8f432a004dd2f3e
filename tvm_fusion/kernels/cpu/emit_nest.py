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

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.ir.prim.expr import CmpExpr, LogicalExpr
from tvm.tirx import ForKind

from ..expr import bytes_of, constant, convert, dtype_of, number
from .lanes import lane_axis
from .loops import Loop, nest, seq
from .machine import Machine
from .nests import Member, Nest
from .rewrite import call_name, is_conditional, loads, nodes
from .scope import Resolve, Scope, allocate, new_buffer
from .space import Slot, Space
from .stages import Kind, Stage

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


def emit_nest(item: Nest, stored: set[Var], scope: Scope, machine: Machine) -> tirx.Stmt:
    """The loops of `item`; `stored` holds the buffers that others read."""
    return _Emitter(item, stored, scope, machine).run()


class _Emitter:
    def __init__(self, item: Nest, stored: set[Var], scope: Scope, machine: Machine) -> None:
        self.nest = item
        self.stored = stored
        self.scope = scope
        self.loops = scope.loops
        self.machine = machine
        self.space = Space(item, scope)

    def run(self) -> tirx.Stmt:
        stages = tuple(m.stage for m in self.nest.members)
        candidates = self.space.lanes
        if any(s.kind is Kind.UPDATE and not s.elements for s in stages):
            candidates = [(slot, axes) for slot, axes in candidates if not slot.is_reduced]
        best = lane_axis(stages, [axes for _, axes in candidates])
        lane = None if best is None else candidates[best][0]
        if self.nest.reduced is None:
            return self._pointwise(lane)
        if lane is not None and lane.is_reduced:
            return self._along_terms(lane)
        return self._along_outputs(lane)

    # Pointwise

    def _pointwise(self, lane: Slot | None) -> tirx.Stmt:
        order = [s for s in self.space.slots if s is not lane]
        if lane is not None:
            order.append(lane)
        made = {s: self.space.loop(s) for s in order}
        values = self.space.values({s: loop.value for s, loop in made.items()})
        return nest([made[s] for s in order], self._point(values, []))

    # Reductions

    def _along_terms(self, lane: Slot) -> tirx.Stmt:
        """Lanes along a reduced axis; every output point by itself."""
        outer = {s: self.space.loop(s) for s in self.space.slots if not s.is_reduced}
        others = [s for s in self.space.slots if s.is_reduced and s is not lane]
        extent = self.space.extent(lane)
        count = self._lane_count(extent, VECTORS_ALONG_TERMS)
        states = self._states(count)
        blocks, rest = self._divide(extent, count)

        def sweep(block_count: Expr, first: Expr, lanes: Expr | int) -> tirx.Stmt:
            inner = {s: self.space.loop(s) for s in others}
            block, v = self.loops.new("block", block_count), self.loops.new("v", lanes)
            local = {s: loop.value for s, loop in (*outer.items(), *inner.items())}
            local[lane] = first + block.value * self.loops.imm(count) + v.value
            ops = self._point(self.space.values(local), states, v.value)
            return nest([*inner.values(), block, self._vectorised(v, ops)], ops)

        values = self.space.values({s: loop.value for s, loop in outer.items()})
        body = seq(
            *self._start(states, count, neutral=True),
            sweep(blocks, self.loops.imm(0), count),
            sweep(self.loops.imm(1), blocks * self.loops.imm(count), rest),
            *self._fold(states, count),
            *self._finish(states, self.loops.imm(0), values, neutral=True),
        )
        for loop in reversed(outer.values()):
            body = loop.around(body)
        return seq(*self._allocations(states), body)

    def _along_outputs(self, lane: Slot | None) -> tirx.Stmt:
        """Lanes along an output axis, or none; all terms of a block of outputs at a time."""
        outer = {
            s: self.space.loop(s) for s in self.space.slots if not s.is_reduced and s is not lane
        }
        extent = self.loops.imm(1) if lane is None else self.space.extent(lane)
        count = self._lane_count(extent, VECTORS_ALONG_OUTPUTS)
        states = self._states(count)
        blocks, rest = self._divide(extent, count)

        def values_at(reduced: dict[Slot, Loop], at: Expr) -> list[Expr]:
            local = {s: loop.value for s, loop in (*outer.items(), *reduced.items())}
            if lane is not None:
                local[lane] = at
            return self.space.values(local)

        def block(first: Expr, lanes: Expr | int) -> tirx.Stmt:
            reduced = {s: self.space.loop(s) for s in self.space.slots if s.is_reduced}
            v, w = self.loops.new("v", lanes), self.loops.new("v", lanes)
            ops = self._point(values_at(reduced, first + v.value), states, v.value)
            ends = self._finish(states, w.value, values_at({}, first + w.value), neutral=False)
            return seq(
                *self._start(states, lanes, neutral=False),
                nest([*reduced.values(), self._vectorised(v, ops)], ops),
                w.around(seq(*ends)),
            )

        full = self.loops.loop("block", blocks, lambda b: block(b * self.loops.imm(count), count))
        tail = None if number(rest) == 0 else block(blocks * self.loops.imm(count), rest)
        body = seq(full, tail)
        for loop in reversed(outer.values()):
            body = loop.around(body)
        return seq(*self._allocations(states), body)

    def _divide(self, extent: Expr, count: int) -> tuple[Expr, Expr]:
        """Whole blocks of `count`, and what remains."""
        blocks = self.loops.simplify(tirx.FloorDiv(extent, self.loops.imm(count)))
        return blocks, self.loops.simplify(extent - blocks * self.loops.imm(count))

    def _lane_count(self, extent: Expr, vectors: int) -> int:
        """Lanes: at most `vectors` registers; of a known extent, what leaves the fewest vectors and single elements."""
        widest = max(
            bytes_of(dtype_of(v))
            for m in self.nest.members
            if m.stage.kind is not None
            for v in m.stage.values
        )
        lanes = self.machine.lanes(widest)
        size = number(extent)
        if size is None:
            return vectors * lanes
        counts = [n * lanes for n in (8, 4, 2, 1) if n <= vectors]
        counts += [n for n in (8, 4, 2, 1) if n < lanes]
        counts = [n for n in counts if n <= size]

        def steps(count: int) -> int:
            blocks, rest = divmod(int(size), count)
            return blocks * -(-count // lanes) + rest // lanes + rest % lanes

        return min(counts, key=steps)

    def _states(self, count: int) -> list[State]:
        states = []
        for m in self.nest.members:
            if m.stage.kind is not None:
                arrays = tuple(
                    new_buffer("state", [self.loops.imm(count)], dtype_of(v))
                    for v in m.stage.values
                )
                states.append(State(m, arrays))
        return states

    def _allocations(self, states: list[State]) -> list[tirx.Stmt]:
        return [allocate(a) for s in states for a in s.arrays]

    def _start(self, states: list[State], lanes: Expr | int, neutral: bool) -> list[tirx.Stmt]:
        """Set the running results; `neutral` where the initial value is added at the end."""
        stmts = []
        for s in states:
            kind = s.member.stage.kind
            for array, initial in zip(s.arrays, s.member.stage.initial, strict=True):
                value = convert(initial, dtype_of(array))
                if neutral and kind in NEUTRAL:
                    value = constant(NEUTRAL[kind], dtype_of(array))
                how = ForKind.VECTORIZED if isinstance(lanes, int) else ForKind.SERIAL
                stmts.append(self.loops.loop("v", lanes, _setter(array, value), how))
        return stmts

    def _fold(self, states: list[State], count: int) -> list[tirx.Stmt]:
        """Combine the lanes in a tree; the result ends in lane 0."""
        stmts = []
        half = count // 2
        while half:
            for s in states:
                stmts.append(self._fold_once(s, half))
            half //= 2
        return stmts

    def _fold_once(self, state: State, half: int) -> tirx.Stmt:
        stage = state.member.stage
        if stage.kind is Kind.UPDATE:
            at = self.loops.new("v", half)
            ops: list[tirx.Stmt] = []
            env = {}
            resolve = Resolve(self.scope, env, {}, ops)
            for array, carry, element in zip(
                state.arrays, stage.carries, stage.elements, strict=True
            ):
                upper = at.value + self.loops.imm(half)
                env[carry] = resolve.bind("low", tirx.BufferLoad(array, [at.value]))
                env[element] = resolve.bind("high", tirx.BufferLoad(array, [upper]))
            new = [resolve.bind("next", resolve(v)) for v in stage.merge]
            stores = [
                tirx.BufferStore(array, convert(value, dtype_of(array)), [at.value])
                for array, value in zip(state.arrays, new, strict=True)
            ]
            return nest([at], [*ops, *stores])
        (array,) = state.arrays
        at = self.loops.new("v", half, ForKind.VECTORIZED)
        low = tirx.BufferLoad(array, [at.value])
        high = tirx.BufferLoad(array, [at.value + self.loops.imm(half)])
        return at.around(tirx.BufferStore(array, COMBINE[stage.kind](low, high), [at.value]))

    def _finish(
        self, states: list[State], slot: Expr, values: list[Expr], neutral: bool
    ) -> list[tirx.Stmt]:
        """Store the results of one output point."""
        stmts = []
        for s in states:
            stage = s.member.stage
            where = self._env(s.member, values)
            indices = [where.get(a.var, constant(0, dtype_of(a.var))) for a in stage.axes]
            for buffer, array, initial in zip(stage.buffers, s.arrays, stage.initial, strict=True):
                value = tirx.BufferLoad(array, [slot])
                start = NEUTRAL.get(stage.kind)
                if neutral and start is not None and number(initial) != start:
                    value = COMBINE[stage.kind](value, convert(initial, dtype_of(array)))
                stmts.append(self.scope.store(buffer, value, indices))
        return stmts

    def _env(self, member: Member, values: list[Expr]) -> dict[Var, Expr]:
        """What the axis variables of a stage are."""
        return {
            a.var: convert(v, dtype_of(a.var)) for a, v in zip(member.axes, values, strict=True)
        }

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
        known: dict[Var, Expr] = {}
        state_of = {s.member.stage.buffer: s for s in states}
        for member in self.nest.members:
            stage = member.stage
            env = self._env(member, values)
            resolve = Resolve(self.scope, env, known, ops)
            for var, value in stage.binds:
                env[var] = resolve.bind(var.name, resolve(value))
            if stage.kind is None:
                value = resolve.bind(stage.buffer.name, resolve(stage.values[0]))
                known[stage.buffer] = value
                if stage.buffer in self.stored:
                    indices = [env.get(a.var, constant(0, dtype_of(a.var))) for a in stage.axes]
                    ops.append(self.scope.store(stage.buffer, value, indices))
            else:
                ops.extend(self._updates(stage, state_of[stage.buffer], resolve, env, slot))
        return ops

    def _updates(
        self, stage: Stage, state: State, resolve: Resolve, env: dict[Var, Expr], slot: Expr
    ) -> list[tirx.Stmt]:
        if stage.kind is not Kind.UPDATE:
            (array,) = state.arrays
            term = convert(resolve(stage.values[0]), dtype_of(array))
            value = COMBINE[stage.kind](tirx.BufferLoad(array, [slot]), term)
            return [tirx.BufferStore(array, value, [slot])]
        steps: list[tirx.Stmt] = []
        recur = Resolve(self.scope, env, resolve.known, steps)
        for carry, array in zip(stage.carries, state.arrays, strict=True):
            env[carry] = recur.bind("state", tirx.BufferLoad(array, [slot]))
        new = [recur.bind("next", recur(v)) for v in stage.values]
        stores = [
            tirx.BufferStore(array, convert(value, dtype_of(array)), [slot])
            for array, value in zip(state.arrays, new, strict=True)
        ]
        return [nest([], [*steps, *stores])]


def _is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _setter(array: Var, value: Expr) -> object:
    return lambda at: tirx.BufferStore(array, value, [at])


def _has_vector_form(stmt: tirx.Stmt) -> bool:
    if isinstance(stmt, tirx.SeqStmt):
        return all(_has_vector_form(s) for s in stmt.seq)
    if isinstance(stmt, tirx.Bind | tirx.BufferStore):
        return all(
            call_name(e) in VECTOR_CALLS
            and not (is_conditional(e) and loads(e))
            and not _is_logic(e)
            for e in nodes(stmt.value)
        )
    return False


def _is_logic(expr: Expr) -> bool:
    """Logic and integer comparisons: TVM's simplifier fails on vectors of them."""
    if isinstance(expr, LogicalExpr):
        return True
    return isinstance(expr, CmpExpr) and not dtype_of(expr.a).startswith("float")
