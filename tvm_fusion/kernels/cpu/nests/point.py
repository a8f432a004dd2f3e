"""What a nest computes at one point: bindings, stores, and updates of running results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.ir.prim.expr import CmpExpr, LogicalExpr

from ...program.expr import constant, convert, dtype_of, number
from ..loops import Keep, Loop, nest
from ..machine import Machine
from ..stages.resolve import Point, Resolve, is_choice
from ..stages.rewrite import call_name, nodes
from ..stages.stages import Kind, Stage
from .nests import Member, Nest
from .scope import Scope
from .space import Space

# What the emitters of loop nests, with and without reductions, have in common.

# Vectors of fewer elements gain nothing over one element after the other.
LEAST_PIECE = 4


class NestEmitter:
    """Emits one nest; how is up to the class derived from it."""

    def __init__(
        self, item: Nest, space: Space, writer: PointWriter, scope: Scope, machine: Machine
    ) -> None:
        self.nest = item
        self.space = space
        self.writer = writer
        self.scope = scope
        self.loops = scope.loops
        self.machine = machine

    def pieces(self, rest: Expr, lanes: int) -> list[tuple[Expr, Expr, Expr | int]]:
        """What whole blocks leave of an axis, as vectors: how many, where they start, how wide.

        LLVM takes vectors apart whose width is no power of two: 39 elements are 32, 4 and 3.
        """
        size = number(rest)
        if size is None:
            count = self.loops.simplify(tirx.FloorDiv(rest, self.loops.imm(lanes)))
            done = self.loops.simplify(count * self.loops.imm(lanes))
            last = self.loops.simplify(rest - done)
            return [(count, self.loops.imm(0), lanes), (self.loops.imm(1), done, last)]
        found: list[tuple[Expr, Expr, Expr | int]] = []
        at = 0
        while at < size:
            left = int(size) - at
            width = left if left < LEAST_PIECE else 1 << (left.bit_length() - 1)
            found.append((self.loops.imm(1), self.loops.imm(at), width))
            at += width
        return found


COMBINE = {
    Kind.SUM: tirx.Add,
    Kind.PROD: tirx.Mul,
    Kind.MAX: tirx.Max,
    Kind.MIN: tirx.Min,
    Kind.ALL: tirx.And,
    Kind.ANY: tirx.Or,
}

# Calls that LLVM has vector instructions for; of its own functions, math.py calls only such.
VECTOR_CALLS = (
    *("fabs", "sqrt", "floor", "ceil", "trunc", "reinterpret", "call_llvm_pure_intrin"),
    "",
)

Ops = list[tirx.Stmt | Keep]


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """Running results of one reduction: an array, with an element for each lane, for each value."""

    member: Member
    arrays: tuple[Var, ...]


class PointWriter:
    """Writes the points of a nest.

    Parameters
    ----------
    stored : set of Var
        Buffers that something outside of the nest reads.
    """

    def __init__(self, item: Nest, stored: set[Var], scope: Scope) -> None:
        self.nest = item
        self.stored = stored
        self.scope = scope

    def write(
        self,
        values: list[Expr],
        states: list[State],
        slot: Expr | None = None,
        lane: Loop | None = None,
        known: Mapping[Var, Expr] | None = None,
    ) -> Ops:
        """Compute one point.

        Parameters
        ----------
        values : list of Expr
            What the axes of the nest are.
        states, slot
            Running results, and the element of them that the point belongs to.
        lane : Loop, optional
            The loop whose iterations may become the lanes of vectors.
        known : mapping, optional
            Values of buffers that need not be computed.
        """
        point = Point(lane, dict(known or {}))
        state_of = {s.member.stage.buffer: s for s in states}
        for member in self.nest.members:
            stage = member.stage
            env = env_of(member, values)
            resolve = Resolve(self.scope, env, point)
            if stage.buffer in point.known:
                self._stored(stage, point.known[stage.buffer], env, point)
                continue
            for var, value in stage.binds:
                env[var] = resolve.bind(var.name, resolve(value), is_choice(value))
            if stage.kind is None:
                self._value(stage, env, resolve)
            elif stage.kind is Kind.UPDATE:
                self._recurrence(stage, state_of[stage.buffer], env, point, slot)
            else:
                self._term(stage, state_of[stage.buffer], resolve, slot)
        return point.ops

    def _value(self, stage: Stage, env: dict[Var, Expr], resolve: Resolve) -> None:
        """A pointwise value, stored if somebody needs it."""
        point = resolve.point
        value = resolve.bind(stage.buffer.name, resolve(stage.values[0]))
        point.known[stage.buffer] = value
        self._stored(stage, value, env, point)

    def _stored(self, stage: Stage, value: Expr, env: dict[Var, Expr], point: Point) -> None:
        if stage.buffer in self.stored:
            point.ops.append(self.scope.store(stage.buffer, value, indices_of(stage, env)))

    def _term(self, stage: Stage, state: State, resolve: Resolve, slot: Expr) -> None:
        """A term of a reduction."""
        (array,) = state.arrays
        term = convert(resolve(stage.values[0]), dtype_of(array))
        value = COMBINE[stage.kind](tirx.BufferLoad(array, [slot]), term)
        resolve.point.ops.append(tirx.BufferStore(array, value, [slot]))

    def _recurrence(
        self, stage: Stage, state: State, env: dict[Var, Expr], point: Point, slot: Expr
    ) -> None:
        """A step of a recurrence; one statement, so that nothing of it is moved out of the loop."""
        step = Point(point.lane, point.known, [], point.varying)
        resolve = Resolve(self.scope, env, step)
        for carry, array in zip(stage.carries, state.arrays, strict=True):
            env[carry] = resolve.bind("state", tirx.BufferLoad(array, [slot]))
        new = [resolve.bind("next", resolve(v)) for v in stage.values]
        stores = [
            tirx.BufferStore(array, convert(value, dtype_of(array)), [slot])
            for array, value in zip(state.arrays, new, strict=True)
        ]
        point.ops.append(nest([], [*step.ops, *stores]))


def env_of(member: Member, values: list[Expr]) -> dict[Var, Expr]:
    """What the axis variables of a stage are."""
    return {a.var: convert(v, dtype_of(a.var)) for a, v in zip(member.axes, values, strict=True)}


def indices_of(stage: Stage, env: dict[Var, Expr]) -> list[Expr]:
    """Where a stage stores; axes of length 1 are not in `env`."""
    return [env.get(a.var, constant(0, dtype_of(a.var))) for a in stage.axes]


def has_vector_form(ops: Ops) -> bool:
    """Whether TVM can turn all operations into operations on vectors."""
    return all(_is_vectorisable(op) for op in ops)


def _is_vectorisable(op: tirx.Stmt | Keep) -> bool:
    if isinstance(op, tirx.SeqStmt):
        return has_vector_form(list(op.seq))
    if not isinstance(op, tirx.Bind | tirx.BufferStore | Keep):
        return False
    return not any(call_name(e) not in VECTOR_CALLS or _is_logic(e) for e in nodes(op.value))


def _is_logic(expr: Expr) -> bool:
    """Logic and integer comparisons: TVM's simplifier fails on vectors of them."""
    if isinstance(expr, LogicalExpr):
        return True
    return isinstance(expr, CmpExpr) and not dtype_of(expr.a).startswith("float")
