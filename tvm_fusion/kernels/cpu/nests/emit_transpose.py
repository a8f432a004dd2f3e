"""Loops of transposing copies, and of light arithmetic on them: squares transposed in registers.

    for each square of L x L:
        rows[r, 0:L] = x[j + r, i : i + L]            L loads
        interleave rows r and r + 1, then r and r + 2, r + 4 ...
        y[i + r, j : j + L] = f(rows[r, 0:L], ..)     L stores

The last square of a row of them ends where the axis ends, and so overlaps the one before it: what
it computes may be repeated. Tiles shorter than a square are copied one by one.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr, PrimType, Var
from tvm.tirx import ForKind

from ...program.expr import bytes_of, constant, convert, dtype_of, number, widened
from ..contraction.operands import blocks
from ..loops import Loop, nest, seq
from ..stages.lanes import transposed_axes
from ..stages.resolve import Point, Resolve
from ..stages.stages import analyzer_of, load_stride
from .emit_pointwise import PointwiseEmitter
from .nests import Member
from .point import env_of, has_vector_form
from .scope import allocate, new_buffer
from .space import Slot

LINE_BYTES = 64

# Edge of a square: more vectors do not fit the registers.
MOST_LANES = 16


class TransposeEmitter(PointwiseEmitter):
    """Emits one nest: copies that turn alike, and what is computed from them."""

    def emit(self, lane: Slot | None) -> tirx.Stmt:
        """The loops over squares, or those of any pointwise nest where there are none."""
        loaded, stored = (self._slot(a.var) for a in transposed_axes(self.nest.members[0].stage))
        dtypes = [widened(dtype_of(m.stage.buffer)) for m in self._copies()]
        count = min(MOST_LANES, *(self.machine.lanes(bytes_of(d)) for d in dtypes))
        if loaded is None or stored is None or loaded is stored or count < 2 or "bool" in dtypes:
            return super().emit(lane)
        extents = self.space.extent(loaded), self.space.extent(stored)
        if any((number(e) or count) < count for e in extents):
            return super().emit(lane)
        squares = self._squares(loaded, stored, count)
        if squares is None or all(number(e) is not None for e in extents):
            return squares or super().emit(lane)
        fits = tirx.And(*(tirx.GE(e, self.loops.imm(count)) for e in extents))
        return tirx.IfThenElse(fits, squares, super().emit(lane))

    def _copies(self) -> list[Member]:
        return [m for m in self.nest.members if transposed_axes(m.stage) is not None]

    def _slot(self, var: Var) -> Slot | None:
        """The loop whose innermost axis `var` is."""
        names = [a.var for a in self.nest.axes]
        return next((s for s in self.space.slots if names[s.axes[-1]].same_as(var)), None)

    def _squares(self, loaded: Slot, stored: Slot, count: int) -> tirx.Stmt | None:
        outer = {s: self.space.loop(s) for s in self.space.slots if s not in (loaded, stored)}
        across, along = self._blocks(loaded, count), self._blocks(stored, count)
        local = {s: loop.value for s, loop in outer.items()}
        local |= {s: self._start(s, loop, count) for s, loop in ((loaded, across), (stored, along))}
        body = self._square(local, loaded, stored, count)
        if body is None:
            return None
        inner = (across, along) if self._loads_whole_lines(stored) else (along, across)
        for loop in reversed([*outer.values(), *inner]):
            body = loop.around(body)
        return body

    def _loads_whole_lines(self, stored: Slot) -> bool:
        """Whether the rows of a square may start where cache lines do; where they do not, the next
        square of the same rows comes next: it shares their lines.

        x.T + y of float32 on 2 cores of a Zen 4: 1031 x 1000 takes 209 us, in the other order 262;
        1024 x 1024, whose lines share a set of the cache, 238, in the other order 309.
        """
        (member, *_) = self._copies()
        axis = member.axes[stored.axes[-1]]
        (load,) = member.stage.reads()
        step = load_stride(load, axis.var, analyzer_of(member.stage.domain))
        return step is None or step * bytes_of(dtype_of(load)) % LINE_BYTES == 0

    def _blocks(self, slot: Slot, count: int) -> Loop:
        return self.loops.new("square", blocks(self.space.extent(slot), count, self.loops))

    def _start(self, slot: Slot, loop: Loop, count: int) -> Expr:
        last = self.space.extent(slot) - self.loops.imm(count)
        return self.loops.simplify(tirx.Min(loop.value * self.loops.imm(count), last))

    def _square(
        self, local: dict[Slot, Expr], loaded: Slot, stored: Slot, count: int
    ) -> tirx.Stmt | None:
        """One square; None where it has no vector form."""
        rows_of, stmts = {}, []
        for member in self._copies():
            rows, loads = self._rows(member, local, loaded, stored, count)
            rows_of[member.stage.buffer] = rows
            stmts += [*loads, transposed(rows)]
        for r in range(count):
            v = self.loops.new("v", count, ForKind.VECTORIZED)
            at = {loaded: local[loaded] + self.loops.imm(r), stored: local[stored] + v.value}
            known = {b: tirx.BufferLoad(rows[r], [v.value]) for b, rows in rows_of.items()}
            ops = self.writer.write(self.space.values({**local, **at}), [], lane=v, known=known)
            stmts.append(nest([v], ops) if has_vector_form(ops) else None)
        if None in stmts:
            return None
        return seq(*(allocate(row) for rows in rows_of.values() for row in rows), *stmts)

    def _rows(
        self, member: Member, local: dict[Slot, Expr], loaded: Slot, stored: Slot, count: int
    ) -> tuple[list[Var], list[tirx.Stmt | None]]:
        """What a copy loads, a buffer a row: TVM puts a larger one that is accessed by whole
        vectors on the heap. None stands for loads without a vector form.
        """
        dtype = widened(dtype_of(member.stage.buffer))
        rows = [new_buffer("row", [self.loops.imm(count)], dtype) for _ in range(count)]
        stmts = []
        for r, row in enumerate(rows):
            v = self.loops.new("v", count, ForKind.VECTORIZED)
            at = {loaded: local[loaded] + v.value, stored: local[stored] + self.loops.imm(r)}
            point = Point(v)
            value = self._value(member, self.space.values({**local, **at}), point)
            ops = [*point.ops, tirx.BufferStore(row, convert(value, dtype), [v.value])]
            stmts.append(nest([v], ops) if has_vector_form(ops) else None)
        return rows, stmts

    def _value(self, member: Member, values: list[Expr], point: Point) -> Expr:
        env = env_of(member, values)
        resolve = Resolve(self.scope, env, point)
        for var, value in member.stage.binds:
            env[var] = resolve.bind(var.name, resolve(value))
        return resolve(member.stage.values[0])


def transposed(rows: list[Var]) -> tirx.Stmt:
    """Turns a square, a buffer a row.

    In each step, element (r, c) changes places with element (r ^ s, c ^ s) where r and c differ in
    bit s; after all steps r and c have changed places.
    """
    count = len(rows)
    dtype = f"{dtype_of(rows[0])}x{count}"
    stmts: list[tirx.Stmt] = []

    def bind(value: Expr) -> Var:
        var = Var("row", PrimType(dtype))
        stmts.append(tirx.Bind(var, value))
        return var

    index = dtype_of(rows[0].ty.shape[0])
    whole = [tirx.Ramp(constant(0, index), constant(1, index), count)]
    vectors = [bind(tirx.BufferLoad(row, whole)) for row in rows]
    step = 1
    while step < count:
        low = [c if not c & step else count + c - step for c in range(count)]
        high = [c + step if not c & step else count + c for c in range(count)]
        for r in (r for r in range(count) if not r & step):
            pair = [vectors[r], vectors[r + step]]
            for to, lanes in ((r, low), (r + step, high)):
                order = [constant(c, "int32") for c in lanes]
                vectors[to] = bind(tirx.Shuffle(pair, order))
        step *= 2
    stmts.extend(tirx.BufferStore(row, v, whole) for row, v in zip(rows, vectors, strict=True))
    return seq(*stmts)
